"""The replicas check: how many copies each entry has, by the answers of its bookies."""

import asyncio
from collections import Counter

import pytest

from auditor.checks.copies import CopyReport, max_damaged_count
from auditor.checks.records import REPLICAS
from auditor.mark_reasons import read_findings
from auditor.settings import ChecksSettings
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from tests.auditor.checking import check_each, checked_at_ms, checker, record, running
from tests.auditor.scenes import replicas, with_ledgers
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4, closed_ledger, fragment
from tests.replication.nodes import PATHS

JAVA = "AuditorReplicasCheckTest"
ON = ChecksSettings(replicas_interval_s=3_600)


async def count(cluster: Cluster, *ledger_ids: int) -> Counter[str]:
    async with checker(cluster) as made:
        return await check_each(made.replicas, ledger_ids or [0])


async def one_ledger(**fields: object) -> Cluster:
    """Return a ledger of entries 0 to 9 with three copies of each; the ack quorum is two."""
    cluster = await Cluster.start()
    options = {"ledger_id": 0, "write_quorum": 3, "ack_quorum": 2} | fields
    await cluster.write_ledger((B1, B2, B3), **options)  # type: ignore[arg-type]
    return cluster


@pytest.mark.compat("AuditorReplicasCheckTaskTest.testReplicasCheck", verdict="same")
async def test_ten_healthy_ledgers_have_all_their_copies() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 10)

    async with checker(cluster, settings=ON) as made:
        made.runs(made.replicas)
        async with running(made):
            await asyncio.sleep(60)

    last = (await record(cluster, REPLICAS)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {})
    assert await checked_at_ms(cluster, REPLICAS) == last.finished_ms


@pytest.mark.compat(f"{JAVA}.testReplicasCheckForBookieHandleNotAvailable", verdict="same")
@pytest.mark.parametrize("is_registered", [True, False])
async def test_a_bookie_that_cannot_be_asked_lacks_nothing(is_registered: bool) -> None:
    cluster = await one_ledger()
    cluster.bookie(B2).is_down = True
    if not is_registered:
        await cluster.unregister(B2)

    assert await count(cluster) == ({"unknown": 1} if is_registered else {})
    assert await cluster.marked() == []


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        pytest.param(
            (B1, B2, B3),
            "no_copy",
            marks=pytest.mark.compat(
                f"{JAVA}.testReplicasCheckForLedgersFoundHavingNoReplica",
                verdict="better",
                why="the ledger is marked too",
            ),
            id="no bookie has the entry",
        ),
        pytest.param(
            (B1, B3),
            "below_ack_quorum",
            marks=pytest.mark.compat(
                f"{JAVA}.testReplicasCheckForLedgersFoundHavingLessThanAQReplicasOfAnEntry",
                verdict="better",
                why="the ledger is marked too",
            ),
            id="one of three has the entry",
        ),
        pytest.param(
            (B2,),
            "below_write_quorum",
            marks=pytest.mark.compat(
                f"{JAVA}.testReplicasCheckForLedgersFoundHavingLessThanWQReplicasOfAnEntry",
                verdict="better",
                why="the ledger is marked too",
            ),
            id="two of three have it",
        ),
    ],
)
@pytest.mark.compat(
    "G7", verdict="better", why="counts cover the whole run, and ledgers are marked"
)
async def test_the_entry_with_the_fewest_copies_decides(
    lacking: tuple[BookieId, ...], expected: str
) -> None:
    """The ledger is marked in our own queue, with a finding."""
    cluster = await one_ledger()
    cluster.bookie(B3).lose(0, 7)  # another entry, of which two copies are left in any case
    for bookie in lacking:
        cluster.bookie(bookie).lose(0, 4)

    counts = await count(cluster)

    assert counts == {expected: 1, "found": 1, "marked": 1}
    assert await replicas(cluster, 0, PATHS.private) == tuple(sorted({*lacking, B3}))
    finding = (await read_findings(cluster.store, PATHS, [0]))[0]
    assert finding.check == "replicas"
    assert finding.detail.startswith("an entry has ")
    assert f"{lacking[0]} lacks " in finding.detail


@pytest.mark.compat(f"{JAVA}.testReplicasCheckForLedgersFoundHavingNoReplica", verdict="better")
async def test_a_ledger_unknown_to_its_bookies_has_no_copy() -> None:
    cluster = await one_ledger()
    for bookie in (B1, B2, B3):
        cluster.bookie(bookie)._ledgers.pop(0)

    assert (await count(cluster))["no_copy"] == 1


@pytest.mark.compat(
    f"{JAVA}.testReplicasCheckForLedgersFoundHavingLessThanWQReplicasOfAnEntry", verdict="better"
)
async def test_a_copy_outside_the_stripe_does_not_count() -> None:
    cluster = await one_ledger(write_quorum=2)
    cluster.put(0, 0, B3)  # belongs on B1 and B2
    cluster.bookie(B2).lose(0, 0)

    assert (await count(cluster))["below_ack_quorum"] == 1


async def test_a_damaged_copy_does_not_count() -> None:
    cluster = await one_ledger()
    cluster.bookie(B2).corrupt(0, 4)

    assert (await count(cluster))["below_write_quorum"] == 1


@pytest.mark.compat(f"{JAVA}.testReplicasCheckForLedgersWithEmptySegments", verdict="same")
@pytest.mark.parametrize(
    "starts",
    [
        pytest.param((0, 5, 10), id="the last segment is empty"),
        pytest.param((0, 10, 12), id="so is the segment before"),
        pytest.param((0, 5, 6), id="a segment of a single entry, of which a bookie stores none"),
    ],
)
@pytest.mark.parametrize("is_harmed", [False, True])
async def test_empty_segments_change_nothing(is_harmed: bool, starts: tuple[int, int, int]) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B2, B3, B4), (B4, B3, B2), ledger_id=0, starts=starts)
    if is_harmed:
        cluster.bookie(named_by(await cluster.metadata(0), 5)[0]).lose(0, 5)

    counts = await count(cluster)

    expected = {"below_write_quorum": 1, "found": 1, "marked": 1}
    assert counts == (expected if is_harmed else {})


async def test_open_empty_and_marked_ledgers_are_skipped(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
    await cluster.write_ledger((B1, B2), ledger_id=1, last=-1)
    await cluster.write_ledger((B1, B2), ledger_id=2)
    await cluster.mark(B1, ledger_id=2)

    assert await count(cluster, 0, 1, 2) == {"skipped": 3}
    assert cluster.bookies.transfers == []


@pytest.mark.compat("G7", verdict="better")
async def test_the_counts_are_of_the_whole_run() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 60)
    for ledger_id in (0, 25, 59):  # parts one, two and three
        cluster.bookie(B1)._ledgers.pop(ledger_id)

    async with checker(cluster, settings=ON) as made:
        made.runs(made.replicas)
        async with running(made):
            await asyncio.sleep(60)

    last = (await record(cluster, REPLICAS)).last
    assert last is not None
    assert last.counts == {"below_write_quorum": 3, "found": 3, "marked": 3}
    assert await cluster.marked() == [0, 25, 59]


async def test_many_unanswered_reads_are_no_missing_copies() -> None:
    cluster = await one_ledger()
    cluster.bookies.faults = lambda bookie, op, ledger_id: (
        Fault(error=UnavailableError) if op is Op.READ and bookie != B1 else Fault()
    )

    assert await count(cluster) == {"unknown": 1}


def runs(*entry_ids: int) -> ReadFailures:
    return ReadFailures(absent=EntryRuns(entry_ids))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        pytest.param({}, 0, id="nothing is bad"),
        pytest.param({B1: runs(1, 2, 3), B2: runs(4, 5)}, 1, id="runs that touch do not overlap"),
        pytest.param({B1: runs(1, 2, 3), B2: runs(3, 4)}, 2, id="runs that share an entry"),
        pytest.param({B1: runs(1), B2: runs(1), B3: runs(0, 1, 2)}, 3, id="the same entry on all"),
        pytest.param({B4: runs(1), B1: runs(1)}, 1, id="a bookie of another fragment"),
        pytest.param({B1: runs(10, 11), B2: runs(11)}, 0, id="entries of another fragment"),
    ],
)
def test_the_worst_entry_is_the_one_with_most_damaged_copies(
    bad: dict[BookieId, ReadFailures], expected: int
) -> None:
    copies = CopyReport(
        metadata=closed_ledger((B1, B2, B3)), fragments=(fragment((B1, B2, B3)),), damaged=bad
    )

    assert max_damaged_count(copies) == expected


def test_millions_of_missing_entries_need_little_memory() -> None:
    count = 10_000_000
    empty = EntryRuns(range(count))
    whole = fragment((B1, B2), last=count - 1)
    bad = dict.fromkeys((B1, B2), ReadFailures(absent=empty))

    assert (
        max_damaged_count(
            CopyReport(metadata=closed_ledger((B1, B2)), fragments=(whole,), damaged=bad)
        )
        == 2
    )
