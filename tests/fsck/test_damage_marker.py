"""Findings of fsck become marks, and workers repair the ledgers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor.fsck.damage_marker import (
    DamagedLedger,
    DamageMarker,
    MarkCounts,
    MarkPreview,
    damaged_ledger,
    damaged_ledgers,
    preview_marks,
)
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict, entries_text
from auditor.mark_reasons import Findings, read_findings
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication import znodes
from replication.cluster import ViewSource
from tests.auditor.auditing import leading
from tests.fsck.inspections import inspect_twice, told
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


async def missing_fault(cluster: Cluster) -> DamagedLedger:
    """Return the present ledger as damaged."""
    versioned = await cluster.manager.read(LEDGER)
    seen_first = seen(Finding.MISSING, first=0, last=0)
    found = damaged_ledger(replace(verdict(seen_first), mtime_ms=versioned.stat.mtime_ms))
    assert found is not None
    return found


@asynccontextmanager
async def publishing(cluster: Cluster) -> AsyncIterator[DamageMarker]:
    async with leading(cluster) as leader:  # any joined session will do
        views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
        await views.refresh()
        yield DamageMarker(
            Findings(leader.store, leader.batcher, PATHS, cluster.clock), cluster.manager, views
        )


async def foreseen(cluster: Cluster, *faults: DamagedLedger) -> MarkPreview:
    view = await ViewSource(Registration(cluster.store, ROOT), cluster.clock).refresh()
    return await preview_marks(faults, cluster.manager, view)


@pytest.mark.parametrize("finding", list(Finding), ids=lambda finding: finding.value)
def test_only_missing_bad_or_failing_copies_are_marked(finding: Finding) -> None:
    is_fault = finding in (Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR)

    assert (damaged_ledger(verdict(seen(finding))) is not None) is is_fault


def test_a_mark_names_only_the_bookies_at_fault() -> None:
    fault = damaged_ledger(
        verdict(
            seen(Finding.NOT_ANSWERED, B3),
            seen(Finding.BAD_DIGEST, B2, 4, 9),
            seen(Finding.MISSING, B1),
            seen(Finding.MISSING, B2),
        )
    )

    assert fault is not None
    assert fault.bookies == (B1, B2)
    assert (list(fault.damage[B2].bad), list(fault.damage[B2].absent)) == ([3, 4, 9], [3])
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
def test_entries_are_described_by_their_range(first: int, last: int, count: int, text: str) -> None:
    evidence = replace(seen(Finding.MISSING, first=first, last=last), entry_count=count)

    assert entries_text(evidence) == text


def test_ledgers_at_greater_risk_are_marked_first() -> None:
    faults = damaged_ledgers(
        verdict(seen(Finding.MISSING), ledger_id=ledger_id, grade=grade)
        for ledger_id, grade in enumerate(
            [Grade.DEGRADED, Grade.AT_RISK, Grade.LOST, Grade.AT_RISK]
        )
    )

    assert [fault.ledger_id for fault in faults] == [2, 1, 3, 0]


@in_virtual_time
async def test_a_mark_names_the_bookies_and_a_finding_the_reason() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    fault = await missing_fault(cluster)
    left: list[int] = []

    async with publishing(cluster) as publisher:
        assert await publisher.mark([fault], left.append) == MarkCounts(new=1)
        assert await publisher.mark([fault], left.append) == MarkCounts(known=1)

    data, _ = await cluster.store.get(PATHS.mark(LEDGER))
    assert znodes.parse_mark(data).replicas == (B1,)
    found = (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER]
    assert (found.check, found.bookies, found.detail) == ("fsck", (B1,), fault.detail)
    assert left == [0, 0]


@in_virtual_time
async def test_the_bookies_of_an_existing_mark_stay() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    await cluster.mark(B3)
    fault = await missing_fault(cluster)

    async with publishing(cluster) as publisher:
        assert await publisher.mark([fault]) == MarkCounts(new=1)

    data, _ = await cluster.store.get(PATHS.mark(LEDGER))
    assert set(znodes.parse_mark(data).replicas) == {B1, B3}


@in_virtual_time
async def test_a_ledger_changed_since_its_check_is_not_marked() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    fault = await missing_fault(cluster)
    faults = [
        replace(fault, metadata_version=1),
        replace(
            fault, mtime_ms=fault.mtime_ms - 1
        ),  # deleted and created again, at version 0 again
        replace(fault, ledger_id=LEDGER + 1),
    ]

    async with publishing(cluster) as publisher:
        assert await publisher.mark(faults) == MarkCounts(changed=3)

    assert await cluster.marked() == []
    assert await foreseen(cluster, *faults, fault) == MarkPreview(ledgers=(fault,), changed=3)


@in_virtual_time
async def test_the_preview_agrees_with_the_marks() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    cluster.bookie(B1).lose(LEDGER, 3)
    found = await inspect_twice(cluster)
    assert found is not None
    [fault] = damaged_ledgers([found])

    before = cluster.tree.snapshot()
    seen = await foreseen(cluster, fault)
    assert cluster.tree.snapshot() == before

    assert seen == MarkPreview(ledgers=(fault,), own=1)
    async with publishing(cluster) as publisher:
        assert await publisher.mark(seen.ledgers) == MarkCounts(new=1, own=1)


@in_virtual_time
async def test_a_ledger_denied_since_its_check_is_not_marked() -> None:
    """The other ledgers are marked."""
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    await cluster.write_ledger([B1, B2, B3], ledger_id=LEDGER + 1)
    fault = await missing_fault(cluster)
    shut_out(cluster.store, cluster.manager.path(LEDGER + 1))

    async with publishing(cluster) as publisher:
        found = await publisher.mark([replace(fault, ledger_id=LEDGER + 1), fault])

    assert found == MarkCounts(new=1, changed=1)
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_a_worker_repairs_damage_that_only_fsck_finds() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger([B1, B2, B3])
    cluster.bookie(B1).lose(LEDGER, 3)  # its ends exist, so a worker alone would find nothing
    found = await inspect_twice(cluster)
    assert told(found) != (Grade.WHOLE, ())
    assert found is not None

    async with publishing(cluster) as publisher:
        assert await publisher.mark(damaged_ledgers([found])) == MarkCounts(new=1, own=1)
    assert await cluster.marked() == [], "Java's workers would find it whole"
    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    assert await cluster.marked(PATHS.private) == []
    assert told(await inspect_twice(cluster)) == (Grade.WHOLE, ())
