"""The replicas check: how many copies each entry has, by the answers of its bookies."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from auditor.checks import placement
from auditor.checks.copies import CopyReport, max_damaged_count
from auditor.checks.placement import PlacementCheck
from auditor.checks.records import REPLICAS, CheckRun, FindingReporter
from auditor.mark_reasons import Findings, read_findings
from auditor.settings import ChecksSettings
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from ledgers.placement import DEFAULT_RACK, NoRule, PlacementPolicy, RackRule, Rule, ZoneRule
from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import OrderStore
from replication.transactions import Batcher
from tests.auditor.checking import (
    check_each,
    checked_at_ms,
    checker,
    filled_ledger_map,
    last_run,
    running,
)
from tests.auditor.scenes import replicas, with_ledgers
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, closed_ledger, fragment
from tests.replication.nodes import PATHS, ROOT
from tests.replication.repairs import order_maintenance

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

    last = await last_run(cluster, REPLICAS)
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

    last = await last_run(cluster, REPLICAS)
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


RACKS = {B1: "/a", B2: "/a", B3: "/a", B4: "/b", B5: "/b"}
"""The racks of B6 and B7 are unknown."""
CHECK = "AuditorPlacementPolicyCheckTest"
OWN = PATHS.private


@dataclass(slots=True, kw_only=True)
class Checked:
    """One run over all ledgers. ``marked``: the ledgers it marked, with the bookies in the
    marks."""

    counts: Counter[str]
    marked: dict[int, tuple[BookieId, ...]]


async def check(
    cluster: Cluster,
    *,
    racks: Mapping[BookieId, str] = RACKS,
    rule: Rule | None = None,
    has_rack_source: bool = True,
    marks: bool = False,
) -> Checked:
    views = ViewSource(
        Registration(cluster.store, ROOT), cluster.clock, OrderStore(cluster.store, PATHS)
    )
    await views.refresh()
    ledger_map = await filled_ledger_map(cluster.manager)
    async with reports(cluster) as made:
        checking = PlacementCheck(
            ledger_map=ledger_map,
            views=views,
            policy=PlacementPolicy(rule or RackRule(), random.Random(0), locate=racks.get),
            rack_of=lambda bookie: racks.get(bookie, DEFAULT_RACK),
            has_rack_source=has_rack_source,
            reports=made if marks else None,
        )
        run = CheckRun(started_ms=0)
        await checking.begin(run)
        counts = await check_each(checking, ledger_map.ledger_ids(count_max=1_000))
        await checking.finish(CheckRun(started_ms=0, counts=dict(counts)))
    assert await cluster.marked() == [], "Java's workers would find them whole"
    marked = await read_marks(cluster.store, OWN, await marked_ledger_ids(cluster.store, OWN))
    return Checked(
        counts=+counts, marked={each.ledger_id: each.mark.replicas for each in marked if each.mark}
    )


@asynccontextmanager
async def reports(cluster: Cluster) -> AsyncIterator[FindingReporter]:
    batcher = Batcher(cluster.store, [])
    sender = asyncio.create_task(batcher.run())
    yield FindingReporter(Findings(cluster.store, batcher, PATHS, cluster.clock))
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)


# --- Counts ---------------------------------------------------------------------------------------


@pytest.mark.compat("AuditorPlacementPolicyCheckTaskTest.testPlacementPolicyCheck", verdict="same")
async def test_ten_ledgers_in_one_rack_are_all_misplaced(cluster: Cluster) -> None:
    for ledger_id in range(10):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)

    assert (await check(cluster)).counts == {"fail": 10}


@pytest.mark.compat(
    f"{CHECK}.testPlacementPolicyCheckWithBookiesFromDifferentRacks", verdict="same"
)
async def test_ledgers_in_different_racks_are_well_placed(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B4), ledger_id=1)
    await cluster.write_ledger((B1, B4, B2, B5), ledger_id=2)

    assert (await check(cluster)).counts == {"strict": 2}


@pytest.mark.compat(
    f"{CHECK}.testPlacementPolicyCheckWithLedgersNotAdheringToPlacementPolicy",
    verdict="better",
    why="ledgers that are not closed are counted too, separately",
)
async def test_misplaced_ledgers_are_counted_open_ones_separately(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1)
    await cluster.write_ledger((B1, B4), ledger_id=2)
    await cluster.write_ledger((B1, B2), ledger_id=3, state=LedgerState.OPEN)
    await cluster.write_ledger((B1, B4), ledger_id=4, state=LedgerState.IN_RECOVERY)

    found = await check(cluster)

    assert found.counts == {"fail": 1, "strict": 1, "open_fail": 1, "open_strict": 1}


@pytest.mark.compat(
    f"{CHECK}.testPlacementPolicyCheckWithLedgersNotAdheringToPolicyWithMultipleSegments",
    verdict="same",
)
async def test_a_ledger_with_several_misplaced_segments_counts_once(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), (B2, B3), (B1, B4), starts=(0, 3, 6), ledger_id=1, last=9)
    await cluster.write_ledger((B1, B4), (B2, B5), starts=(0, 5), ledger_id=2)

    assert (await check(cluster)).counts == {"fail": 1, "strict": 1}


@pytest.mark.compat(f"{CHECK}.testZoneawarePlacementPolicyCheck", verdict="same")
async def test_by_zones_placement_is_strict_or_soft_or_wrong(cluster: Cluster) -> None:
    zones = {B1: "/x/1", B2: "/x/2", B3: "/y/1", B4: "/z/1", B5: "/x/1", B6: "/y/2"}
    for ledger_id, ensemble in enumerate(
        [(B1, B3, B4), (B1, B2, B3), (B1, B5, B3), (B1, B3, B4, B2)]
    ):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id, write_quorum=3, ack_quorum=2)

    found = await check(cluster, racks=zones, rule=ZoneRule())

    assert found.counts == {"strict": 1, "soft": 1, "fail": 2}


@pytest.mark.parametrize(
    ("rule", "counts"),
    [
        pytest.param(RackRule(), {"uncompared": 2}, id="racks would decide"),
        pytest.param(NoRule(), {"strict": 1, "open_strict": 1}, id="no rule asks for racks"),
    ],
)
async def test_without_a_source_of_racks_nothing_is_compared(
    cluster: Cluster, rule: Rule, counts: dict[str, int]
) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1)
    await cluster.write_ledger((B1, B2), ledger_id=2, state=LedgerState.OPEN)

    found = await check(cluster, racks={}, rule=rule, has_rack_source=False, marks=True)

    assert (found.counts, found.marked) == (counts, {})


@pytest.mark.compat(
    "G19",
    verdict="better",
    why="the last known rack of an absent bookie counts; without one the verdict is unknown",
)
async def test_a_lost_bookie_makes_no_ledger_misplaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B4), ledger_id=1)
    await cluster.write_ledger((B1, B6), ledger_id=2)
    await cluster.kill(B4, B6)

    found = await check(cluster, marks=True)

    assert found.counts == {"strict": 1, "unknown": 1}
    assert not found.marked


async def test_without_any_racks_nothing_is_reported(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1)
    await cluster.write_ledger((B1,), ledger_id=2, write_quorum=1)

    assert (await check(cluster, racks={})).counts == {"unknown": 1, "strict": 1}


async def test_an_unreadable_ledger_does_not_stop_the_check(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1)
    await cluster.write_ledger((B1, B4), ledger_id=2)
    await cluster.store.set(cluster.manager.path(1), b"nonsense", version=-1)

    assert (await check(cluster)).counts == {"unreadable": 1, "strict": 1}


# --- Marks ----------------------------------------------------------------------------------------


async def one_of_each() -> Cluster:
    """Return misplaced ledger 1, well placed ledger 2, and misplaced open ledger 3."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), ledger_id=1)
    await cluster.write_ledger((B1, B4), ledger_id=2)
    await cluster.write_ledger((B1, B2), ledger_id=3, state=LedgerState.OPEN)
    return cluster


@pytest.mark.compat(
    f"{CHECK}.testPlacementPolicyCheckWithLedgersNotAdheringToPlacementPolicyAndNotMarkToUnderreplication",
    verdict="same",
)
async def test_nothing_is_marked_unless_the_setting_says_so() -> None:
    assert not (await check(await one_of_each())).marked


@pytest.mark.compat(
    f"{CHECK}.testPlacementPolicyCheckWithLedgersNotAdheringToPlacementPolicyAndMarkToUnderreplication",
    verdict="better",
    why="in the private queue, so no Java worker unmarks the ledger or moves it by another policy",
)
async def test_only_misplaced_closed_ledgers_are_marked() -> None:
    cluster = await one_of_each()

    found = await check(cluster, marks=True)

    assert found.marked == {1: ()}
    assert found.counts["marked"] == 1
    [finding] = (await read_findings(cluster.store, PATHS, [1])).values()
    assert (finding.check, finding.bookies) == ("placement", ())
    assert f"{B1} in /a, {B2} in /a" in finding.detail


@pytest.mark.compat(
    "G18",
    verdict="better",
    why="a ledger whose placement no bookie improves is counted, but not marked",
)
async def test_nothing_is_marked_if_no_bookie_is_better_placed() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2))

    found = await check(cluster, marks=True)

    assert found.counts == {"fail": 1}
    assert not found.marked


async def test_a_bookie_in_maintenance_is_not_better_placed() -> None:
    cluster = await Cluster.start(B1, B2, B4)
    await cluster.write_ledger((B1, B2))
    await order_maintenance(cluster, B4)

    assert not (await check(cluster, marks=True)).marked


async def test_a_ledger_is_not_marked_while_a_bookie_of_it_is_absent(cluster: Cluster) -> None:
    """A worker would treat the bookie as lost before its delay is over."""
    await cluster.write_ledger((B1, B2))
    await cluster.kill(B2)

    found = await check(cluster, marks=True)

    assert found.counts == {"fail": 1}
    assert not found.marked


async def test_a_run_marks_a_limited_number_and_the_next_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "MARKS_MAX", 3)
    monkeypatch.setattr(PlacementCheck, "at_once", 1)
    cluster = await Cluster.start()
    for ledger_id in range(5):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id)

    first, second = await check(cluster, marks=True), await check(cluster, marks=True)

    assert set(first.marked) == {0, 1, 2}
    assert set(second.marked) == set(range(5))
    assert (first.counts["marked"], second.counts["marked"]) == (3, 2)
