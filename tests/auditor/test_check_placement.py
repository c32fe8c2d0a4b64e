"""The placement check: what it counts, and which ledgers it marks to be moved."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from auditor.checks import placement
from auditor.checks.placement import PlacementCheck
from auditor.checks.records import CheckRun, FindingReporter
from auditor.mark_reasons import Findings, read_findings
from ledgers.model import BookieId, LedgerState
from ledgers.placement import DEFAULT_RACK, NoRule, PlacementPolicy, RackRule, Rule, ZoneRule
from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import OrderStore
from replication.transactions import Batcher
from tests.auditor.checking import check_each, filled_ledger_map
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import PATHS, ROOT
from tests.replication.repairs import order_maintenance

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


@pytest.mark.compat(
    "AuditorPlacementPolicyCheckTaskTest.testPlacementPolicyCheck",
    verdict="same",
)
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
