"""The check of all ledgers: what it reads, finds and marks, and that nothing stops it."""

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from auditor.checks.records import ALL_LEDGERS, LOGGED_MAX
from auditor.mark_reasons import read_findings
from auditor.settings import ChecksSettings
from ledgers.bookies import Transfer
from ledgers.errors import UnreadableError
from ledgers.model import BookieId, LedgerState
from tests.auditor.checking import (
    asked_of,
    check_each,
    checked_at_ms,
    checker,
    five_ledgers,
    look,
    lose_first,
    lose_the_ledger,
    record,
    running,
)
from tests.auditor.scenes import replicas, with_ledgers
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import (
    Cluster,
    queue_empty,
    until,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import PATHS, working

EVERY = ChecksSettings(all_ledgers_share=1.0)


@pytest.mark.compat("AuditorCheckAllLedgersTaskTest.testCheckAllLedgers", verdict="same")
async def test_healthy_ledgers_are_all_checked_and_none_is_marked() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 10)

    async with checker(cluster) as made:
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(10)

    last = (await record(cluster, ALL_LEDGERS)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {})
    assert await checked_at_ms(cluster, ALL_LEDGERS) == last.finished_ms
    assert await cluster.marked() == []


Harm = Callable[[Cluster], None]


def damage_last(cluster: Cluster) -> None:
    cluster.bookie(B2).corrupt(3, 9 if 9 in cluster.bookie(B2).entry_ids(3) else 8)


def break_disk(cluster: Cluster) -> None:
    def faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        is_hit = (bookie, op, ledger_id) == (B2, Op.READ, 3)
        return Fault(error=UnreadableError) if is_hit else Fault()

    cluster.bookies.faults = faults


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        pytest.param(lose_first, "b2:3181 lacks entry 0", id="an entry is missing"),
        pytest.param(
            lose_the_ledger, "b2:3181 lacks 2 of the entries 0 to 9", id="the ledger is missing"
        ),
        pytest.param(
            damage_last,
            "b2:3181 holds damaged entry 9",
            marks=pytest.mark.compat("G12", verdict="better", why="digests are verified"),
            id="an entry is damaged",
        ),
        pytest.param(break_disk, "b2:3181 cannot read 2 of the entries 0 to 9", id="its disk is"),
    ],
)
async def test_a_missing_copy_is_marked_with_bookie_and_reason(harm: Harm, what: str) -> None:
    cluster = await five_ledgers()
    harm(cluster)

    counts = await look(cluster)

    assert counts == {"found": 1, "marked": 1}
    paths = PATHS.private if harm is damage_last else PATHS  # of which Java's workers know nothing
    assert await cluster.marked(paths) == [3]
    assert await replicas(cluster, 3, paths) == (B2,)
    finding = (await read_findings(cluster.store, PATHS, [3]))[3]
    assert (finding.check, finding.bookies, finding.detail) == ("all-ledgers", (B2,), what)


async def test_very_many_findings_are_all_marked_and_some_are_logged() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 50)
    for ledger_id in range(50):
        cluster.bookie(B1).lose(ledger_id, 0)

    async with checker(cluster) as made:
        with capture_logs() as logs:
            counts = await check_each(made.all_ledgers, range(50))

    assert counts["marked"] == 50
    assert sum(entry["event"] == "check.found" for entry in logs) == LOGGED_MAX


async def test_a_repeated_finding_changes_nothing() -> None:
    cluster = await five_ledgers()
    lose_first(cluster)
    await look(cluster)

    counts = await look(cluster)

    assert counts == {"found": 1}
    assert await replicas(cluster, 3) == (B2,)


@pytest.mark.parametrize(
    ("share", "is_found"),
    [
        pytest.param(0.0, False, id="the first and the last entry alone"),
        pytest.param(1.0, True, id="every entry"),
    ],
)
@pytest.mark.compat("G12", verdict="better")
async def test_damage_between_the_ends_is_found_by_a_sample(share: float, is_found: bool) -> None:
    cluster = await five_ledgers()
    middle = sorted(cluster.bookie(B2).entry_ids(3))[2]
    cluster.bookie(B2).corrupt(3, middle)

    await look(cluster, settings=ChecksSettings(all_ledgers_share=share))

    assert await cluster.marked(PATHS.private) == ([3] if is_found else [])


async def test_a_sample_reads_its_share_of_each_copy_once(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, last=99)

    await look(cluster, 0, settings=ChecksSettings(all_ledgers_share=0.25))

    asked = asked_of(cluster, B1)
    assert max(asked.values()) == 1
    assert len(asked) == pytest.approx(25, abs=3)
    assert {(0, 0), (0, 99)} <= asked.keys()


@pytest.mark.compat(
    "G8", verdict="better", why="no bookie has the entry, so the ledger is marked and reported"
)
async def test_the_missing_only_entry_of_a_closed_ledger_is_found(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, last=0)
    for bookie in (B1, B2):
        cluster.bookie(bookie).lose(0, 0)

    counts = await look(cluster, 0)

    assert counts["found"] == 1
    assert await replicas(cluster, 0) == (B1, B2)


@pytest.mark.compat("G23", verdict="better")
async def test_the_mark_names_all_bookies_that_lack_something(cluster: Cluster) -> None:
    ensemble = (B1, B2, B3, B4, B5, B6)
    await cluster.write_ledger(ensemble, ledger_id=0)
    for bookie in ensemble:
        cluster.bookie(bookie)._ledgers.pop(0)

    await look(cluster, 0)

    assert await replicas(cluster, 0) == ensemble


async def test_closed_fragments_of_an_open_ledger_are_checked(cluster: Cluster) -> None:
    """The open fragment is not."""
    await cluster.write_ledger(
        (B1, B2), (B3, B4), starts=(0, 5), ledger_id=0, state=LedgerState.OPEN
    )
    cluster.bookie(B1).lose(0, 0)
    cluster.bookie(B3).lose(0, 5)

    counts = await look(cluster, 0)

    assert counts["found"] == 1
    assert await replicas(cluster, 0) == (B1,)
    assert not asked_of(cluster, B3)
    assert (await cluster.metadata(0)).state is LedgerState.OPEN


async def test_a_ledger_whose_copies_are_being_written_is_not_read(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)

    assert await look(cluster, 0) == {}
    assert cluster.bookies.transfers == []


@pytest.mark.compat("AuditorPeriodicCheckTest.testGetLedgerFromZookeeperThrottled", verdict="same")
async def test_shards_smaller_than_the_cluster_cover_all_of_it() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 30)
    cluster.bookie(B1).lose(29, 0)

    async with checker(cluster) as made:
        made.all_ledgers.part_size = 10
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(30)

    last = (await record(cluster, ALL_LEDGERS)).last
    assert last is not None
    assert last.ledger_count == 30
    assert await cluster.marked() == [29]


@pytest.mark.compat("G5", verdict="better", why="the ledger is counted, and the check continues")
async def test_a_ledger_that_cannot_be_opened_is_counted_and_skipped() -> None:
    cluster = await five_ledgers()
    await cluster.store.set(
        cluster.manager.path(1), b"BookieMetadataFormatVersion\t3\n\xff", version=-1
    )
    cluster.bookie(B2).lose(4, sorted(cluster.bookie(B2).entry_ids(4))[0])

    async with checker(cluster) as made:
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(10)

    last = (await record(cluster, ALL_LEDGERS)).last
    assert last is not None
    assert last.counts == {"unreadable": 1, "found": 1, "marked": 1}
    assert await checked_at_ms(cluster, ALL_LEDGERS) is not None
    assert await cluster.marked() == [4]


async def test_very_large_ledgers_are_checked_a_few_at_a_time(cluster: Cluster) -> None:
    for ledger_id in range(20):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=1_200)
    at_once: set[int] = set()
    most = 0

    async def begin(transfer: Transfer) -> None:
        nonlocal most
        at_once.add(transfer.ledger_id)
        most = max(most, len(at_once))

    async def end(transfer: Transfer) -> None:
        at_once.discard(transfer.ledger_id)

    cluster.bookies.before_transfer, cluster.bookies.after_transfer = begin, end
    async with checker(cluster, settings=EVERY) as made:
        counts = await check_each(made.all_ledgers, range(20))

    assert counts == {}
    assert 1 < most <= 8


@pytest.mark.compat("AuditorPeriodicCheckTest.testFailedWriteRecovery", verdict="same")
async def test_a_bookie_that_never_stored_the_entries_is_replaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, ack_quorum=1)
    cluster.bookie(B2)._ledgers.pop(0)
    cluster.bookie(B2).is_read_only = True

    assert (await look(cluster, 0))["marked"] == 1
    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    (ensemble,) = await cluster.ensembles(0)
    assert ensemble[0] == B1
    assert ensemble[1] != B2
    assert not cluster.violations
