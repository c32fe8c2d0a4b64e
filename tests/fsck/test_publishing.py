"""What fsck found becomes marks, and the daemon mends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor.findings import Findings, read_findings
from auditor.fsck.publishing import (
    Fault,
    Foreseen,
    Published,
    Publisher,
    fault_of,
    faults_of,
    foresee,
)
from auditor.fsck.results.advice import entries_text
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from auditor.marker import BothQueues
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication import znodes
from replication.cluster import ViewSource
from tests.auditor.auditing import leading
from tests.fsck.looking import look_twice, told
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT, working


def verdict(
    *evidence: Evidence, ledger_id: int = LEDGER, grade: Grade = Grade.AT_RISK
) -> LedgerVerdict:
    return LedgerVerdict(
        ledger_id=ledger_id,
        grade=grade,
        findings=tuple(each.finding for each in evidence),
        evidence=evidence,
        metadata_version=0,
    )


def seen(finding: Finding, bookie: BookieId | None = B1, first: int = 3, last: int = 3) -> Evidence:
    return Evidence(
        finding=finding,
        bookie=bookie,
        first_entry_id=first,
        last_entry_id=last,
        entry_count=last - first + 1,
    )


async def missing_fault(cluster: Cluster) -> Fault:
    """Of the ledger as it stands there."""
    versioned = await cluster.manager.read(LEDGER)
    seen_first = seen(Finding.MISSING, first=0, last=0)
    found = fault_of(replace(verdict(seen_first), mtime_ms=versioned.stat.mtime_ms))
    assert found is not None
    return found


@asynccontextmanager
async def publishing(cluster: Cluster) -> AsyncIterator[Publisher]:
    async with leading(cluster) as leader:  # any joined session will do
        views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
        await views.refresh()
        yield Publisher(
            BothQueues(leader.store, leader.batcher, PATHS, cluster.clock),
            Findings(leader.store, leader.batcher, PATHS, cluster.clock),
            cluster.manager,
            views,
        )


async def foreseen(cluster: Cluster, *faults: Fault) -> Foreseen:
    view = await ViewSource(Registration(cluster.store, ROOT), cluster.clock).refresh()
    return await foresee(faults, cluster.manager, view)


@pytest.mark.parametrize("finding", list(Finding), ids=lambda finding: finding.value)
def test_only_what_is_explicitly_missing_or_bad_is_marked(finding: Finding) -> None:
    is_fault = finding in (Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR)

    assert (fault_of(verdict(seen(finding))) is not None) is is_fault


def test_the_bookies_at_fault_are_named_and_no_others() -> None:
    fault = fault_of(
        verdict(
            seen(Finding.NOT_ANSWERED, B3),
            seen(Finding.BAD_DIGEST, B2, 4, 9),
            seen(Finding.MISSING, B1),
            seen(Finding.MISSING, B2),
        )
    )

    assert fault is not None
    assert fault.bookies == (B1, B2)
    assert (list(fault.damage[B2].bad), list(fault.damage[B2].refused)) == ([3, 4, 9], [3])
    assert fault.detail == (
        f"{B2}: bad digest, entries 4 to 9; {B1}: missing, entry 3; {B2}: missing, entry 3"
    )


@pytest.mark.parametrize(
    ("first", "last", "count", "text"),
    [
        pytest.param(150, 150, 1, "entry 150", id="one"),
        pytest.param(150, 250, 101, "entries 150 to 250", id="all between"),
        pytest.param(150, 250, 3, "3 entries between 150 and 250", id="some between"),
        pytest.param(-1, -1, 0, "", id="none"),
    ],
)
def test_entries_are_told_as_one_as_all_or_as_some_between(
    first: int, last: int, count: int, text: str
) -> None:
    evidence = replace(seen(Finding.MISSING, first=first, last=last), entry_count=count)

    assert entries_text(evidence) == text


def test_what_is_at_risk_is_marked_first() -> None:
    faults = faults_of(
        verdict(seen(Finding.MISSING), ledger_id=ledger_id, grade=grade)
        for ledger_id, grade in enumerate(
            [Grade.DEGRADED, Grade.AT_RISK, Grade.LOST, Grade.AT_RISK]
        )
    )

    assert [fault.ledger_id for fault in faults] == [2, 1, 3, 0]


@in_virtual_time
async def test_a_mark_says_which_bookies_and_a_finding_beside_it_why() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    fault = await missing_fault(cluster)
    left: list[int] = []

    async with publishing(cluster) as publisher:
        assert await publisher.publish([fault], left.append) == Published(new=1)
        assert await publisher.publish([fault], left.append) == Published(known=1)

    data, _ = await cluster.store.get(PATHS.mark(LEDGER))
    assert znodes.parse_mark(data).replicas == (B1,)
    found = (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER]
    assert (found.check, found.bookies, found.detail) == ("fsck", (B1,), fault.detail)
    assert left == [0, 0]


@in_virtual_time
async def test_a_mark_of_somebody_else_keeps_what_it_says() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    await cluster.mark(B3)
    fault = await missing_fault(cluster)

    async with publishing(cluster) as publisher:
        assert await publisher.publish([fault]) == Published(new=1)

    data, _ = await cluster.store.get(PATHS.mark(LEDGER))
    assert set(znodes.parse_mark(data).replicas) == {B1, B3}


@in_virtual_time
async def test_what_changed_since_it_was_judged_is_not_marked() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    fault = await missing_fault(cluster)
    faults = [
        replace(fault, metadata_version=1),
        replace(fault, mtime_ms=fault.mtime_ms - 1),  # deleted, and made anew: at version 0 again
        replace(fault, ledger_id=LEDGER + 1),
    ]

    async with publishing(cluster) as publisher:
        assert await publisher.publish(faults) == Published(changed=3)

    assert await cluster.marked() == []
    assert await foreseen(cluster, *faults, fault) == Foreseen(faults=(fault,), changed=3)


@in_virtual_time
async def test_what_would_be_marked_is_what_is_then_marked_in_the_same_queue() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    cluster.bookie(B1).lose(LEDGER, 3)
    found = await look_twice(cluster)
    assert found is not None
    [fault] = faults_of([found])

    before = cluster.tree.snapshot()
    seen = await foreseen(cluster, fault)
    assert cluster.tree.snapshot() == before

    assert seen == Foreseen(faults=(fault,), own=1)
    async with publishing(cluster) as publisher:
        assert await publisher.publish(seen.faults) == Published(new=1, own=1)


@in_virtual_time
async def test_a_ledger_that_acls_have_shut_away_since_is_not_marked_and_stops_no_other() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    await cluster.write_ledger([B1, B2, B3], ledger_id=LEDGER + 1)
    fault = await missing_fault(cluster)
    shut_out(cluster.store, cluster.manager.path(LEDGER + 1))

    async with publishing(cluster) as publisher:
        found = await publisher.publish([replace(fault, ledger_id=LEDGER + 1), fault])

    assert found == Published(new=1, changed=1)
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_what_fsck_finds_in_the_middle_of_a_ledger_the_daemon_mends() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    cluster.bookie(B1).lose(LEDGER, 3)  # its ends are there: a worker alone would find nothing
    found = await look_twice(cluster)
    assert told(found) != (Grade.WHOLE, ())
    assert found is not None

    async with publishing(cluster) as publisher:
        assert await publisher.publish(faults_of([found])) == Published(new=1, own=1)
    assert await cluster.marked() == [], "Java's workers would find it whole"
    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    assert await cluster.marked(PATHS.private) == []
    assert told(await look_twice(cluster)) == (Grade.WHOLE, ())
