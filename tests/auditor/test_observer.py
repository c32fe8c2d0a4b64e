"""The observer decides what a leader decides in its place, and writes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from auditor.absence import LossTracker, Outages
from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.mark_reasons import Finding, LossKind, LossRecord, LossRecords
from auditor.observer import BookieCondition, Observation, Observer, affected_bookies, compare
from auditor.safety_hold import CALM_S, SafetyHolds
from auditor.settings import AuditorSettings, HoldSettings
from auditor.underreplication import (
    BookieLosses,
    ReformattedBookie,
    UnderreplicatedLedger,
    lost_bytes,
)
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerState
from ledgers.registration import Registration
from ledgers.tasks import task_scope
from replication import znodes
from replication.cluster import ViewSource
from replication.marks import read_marks
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, replicas, set_delay, with_ledgers
from tests.auditor.test_auditor_absences import maintain
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, BOOKIES
from tests.replication.nodes import PATHS, ROOT
from tests.replication.test_preview import touching_nothing

RING = tuple(zip(BOOKIES, (*BOOKIES[1:], BOOKIES[0]), strict=True))
"""Ledgers 0 to 6, each on two neighbours of seven bookies."""
Scene = Callable[[Cluster], Awaitable[None]]


@asynccontextmanager
async def observing(
    cluster: Cluster,
    settings: AuditorSettings | None = None,
    hold: HoldSettings | None = None,
    outages: Outages | None = None,
) -> AsyncIterator[Observer]:
    """An observer in a session that refuses every write, with a complete ledger map."""
    store, settings = MemoryStore(cluster.tree).as_read_only(), settings or AuditorSettings()
    views = ViewSource(Registration(store, ROOT), cluster.clock, OrderStore(store, PATHS))
    await views.refresh()
    updater = LedgerMapUpdater(
        store=store, manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL), clock=cluster.clock
    )
    tracker = LossTracker(
        updater=updater,
        views=views,
        holds=SafetyHolds(
            store=store,
            batcher=None,
            paths=PATHS,
            settings=hold or HoldSettings(),
            clock=cluster.clock,
        ),
        settings=settings,
        outages=outages,
    )
    await tracker.prepare()
    observer = Observer(tracker)
    async with task_scope() as beside:
        for work in (views.run(), updater.run(), observer.run()):
            beside.start(work)
        await asyncio.sleep(SOON_S)
        yield observer


async def look(cluster: Cluster, observer: Observer) -> Observation:
    """Return a look after all events were seen. The look leaves the tree of znodes unchanged."""
    await asyncio.sleep(SOON_S)
    before = cluster.tree.snapshot()
    seen = await observer.observe()
    assert cluster.tree.snapshot() == before
    return seen


async def marks(cluster: Cluster) -> dict[int, tuple[BookieId, ...]]:
    listed = await cluster.marked()
    return {
        each.ledger_id: tuple(sorted(each.mark.replicas))
        for each in await read_marks(cluster.store, PATHS, listed)
        if each.mark is not None
    }


async def ring() -> Cluster:
    cluster = await with_ledgers(*RING)
    await cluster.store.create(PATHS.recovery_delay, znodes.recovery_delay_to_bytes(0))
    return cluster


# --- The same decisions as a leader ---------------------------------------------------------------


async def lose_one(cluster: Cluster) -> None:
    await cluster.kill(B2)


async def lose_two(cluster: Cluster) -> None:
    await cluster.kill(B2, B3)


async def lose_one_and_another_returns(cluster: Cluster) -> None:
    await cluster.kill(B2, B5)
    await asyncio.sleep(SOON_S)
    await cluster.revive(B5)
    for ledger_id in {3, 4}.intersection(await cluster.marked()):
        await cluster.store.delete(PATHS.mark(ledger_id))  # as a worker does


async def lose_all_but_two(cluster: Cluster) -> None:
    await cluster.kill(*BOOKIES[:5])


async def mass_loss_is_over(cluster: Cluster) -> None:
    await lose_all_but_two(cluster)
    await asyncio.sleep(SOON_S)
    for bookie in BOOKIES[:4]:
        await cluster.revive(bookie)
    await asyncio.sleep(CALM_S)


async def operator_ends_the_hold(cluster: Cluster) -> None:
    await lose_all_but_two(cluster)
    await asyncio.sleep(SOON_S)
    await order_hold(cluster, HoldOrder(since_ms=0, bookies=BOOKIES[:5], is_released=True))


async def operator_begins_a_hold(cluster: Cluster) -> None:
    await order_hold(cluster, HoldOrder(since_ms=cluster.clock.wall_ms(), is_by_operator=True))
    await asyncio.sleep(SOON_S)
    await cluster.kill(B2)


async def order_hold(cluster: Cluster, hold: HoldOrder) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await order_store.give(znode, hold, over=await order_store.stored(znode))


async def reformat_one(cluster: Cluster) -> None:
    await cluster.reformat(B4)


async def reformat_one_before_its_ledger_changes(cluster: Cluster) -> None:
    await reformat_one(cluster)
    await asyncio.sleep(SOON_S)
    data, stat = await cluster.store.get(cluster.manager.path(3))
    await cluster.store.set(cluster.manager.path(3), data, version=stat.version)


async def maintain_one_and_lose_another(cluster: Cluster) -> None:
    await maintain(cluster, B1, for_s=1_000)
    await cluster.kill(B1, B5)


async def lose_one_that_may_return(cluster: Cluster) -> None:
    await set_delay(cluster, 600)
    await cluster.kill(B2)


async def operator_does_not_wait(cluster: Cluster) -> None:
    await lose_one_that_may_return(cluster)
    await asyncio.sleep(SOON_S)
    await set_delay(cluster, 600)


async def lose_one_while_disabled(cluster: Cluster) -> None:
    await cluster.store.create(PATHS.disable)
    await asyncio.sleep(SOON_S)
    await cluster.kill(B2)


async def lose_one_beside_an_unreadable_ledger(cluster: Cluster) -> None:
    await cluster.store.set(cluster.manager.path(1), b"no metadata", version=-1)
    await asyncio.sleep(SOON_S)
    await cluster.kill(B2)


async def lose_two_that_java_marked_in_part(cluster: Cluster) -> None:
    await cluster.mark(B2, ledger_id=1)
    await cluster.mark(B6, ledger_id=5)
    await lose_two(cluster)


async def reformat_one_that_an_earlier_leader_knew(cluster: Cluster) -> None:
    cookie = await cluster.store.exists(f"{ROOT}/cookies/{B4}")
    assert cookie is not None
    record = json.dumps({"version": 1, "cookies": {B4: cookie.czxid}}).encode()
    await cluster.store.create(PATHS.identities, record, with_parents=True)
    await reformat_one_before_its_ledger_changes(cluster)


SCENES: list[Scene] = [
    lose_one,
    lose_two,
    lose_one_and_another_returns,
    lose_all_but_two,
    mass_loss_is_over,
    operator_ends_the_hold,
    operator_begins_a_hold,
    reformat_one,
    reformat_one_before_its_ledger_changes,
    maintain_one_and_lose_another,
    lose_one_that_may_return,
    operator_does_not_wait,
    lose_one_while_disabled,
    lose_one_beside_an_unreadable_ledger,
    lose_two_that_java_marked_in_part,
]
BEFORE_THE_START: list[Scene] = [*SCENES, reformat_one_that_an_earlier_leader_knew]


def scenes(table: Sequence[Scene]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [pytest.param(x, id=x.__name__) for x in table])


@scenes(SCENES)
async def test_an_observer_decides_what_a_leader_would_decide(scene: Scene) -> None:
    observed, led = await ring(), await ring()

    async with observing(observed) as observer:
        await look(observed, observer)
        await scene(observed)
        seen = await look(observed, observer)
    async with auditing(led):
        await asyncio.sleep(SOON_S)
        await scene(led)
        await asyncio.sleep(SOON_S)

    await assert_same_decisions(seen, observed, led)


@scenes(BEFORE_THE_START)
async def test_an_observer_that_starts_late_decides_like_a_new_leader(scene: Scene) -> None:
    observed, led = await ring(), await ring()
    await scene(observed)
    await scene(led)

    async with touching_nothing(observed):
        tree = observed.tree.snapshot()
        async with observing(observed) as observer:
            seen = await look(observed, observer)
        assert observed.tree.snapshot() == tree
    async with auditing(led):
        await asyncio.sleep(SOON_S)

    await assert_same_decisions(seen, observed, led)
    if scene is reformat_one_that_an_earlier_leader_knew:
        assert [each.ledger_id for each in seen.would_mark] == [2, 3]


async def assert_same_decisions(seen: Observation, observed: Cluster, led: Cluster) -> None:
    """The marks that the observer would add are those that the leader wrote, and so is the hold."""
    expected = {ledger_id: set(named) for ledger_id, named in (await marks(observed)).items()}
    for each in seen.would_mark:
        expected.setdefault(each.ledger_id, set()).update(each.lost)
    assert {ledger_id: set(named) for ledger_id, named in (await marks(led)).items()} == expected

    written = await OrderStore(led.store, PATHS).stored(hold_znode(PATHS))
    hold = None if written is None or written.value is None else written.value
    is_held = hold is not None and not hold.is_released
    assert (seen.hold is not None) == is_held
    if seen.hold is not None and hold is not None:
        assert (seen.hold.bookies, seen.hold.reason) == (hold.bookies, hold.reason)
        assert seen.hold.is_by_operator == hold.is_by_operator


async def test_nothing_is_left_to_mark_after_a_leader_has_marked() -> None:
    cluster = await ring()
    async with observing(cluster) as observer:
        await lose_two(cluster)
        foreseen = await look(cluster, observer)
        assert (foreseen.marked_count, foreseen.difference.agreed_count) == (0, 0)

        async with auditing(cluster):
            await asyncio.sleep(SOON_S)
            seen = await look(cluster, observer)

    assert {each.ledger_id: each.lost for each in foreseen.would_mark} == await marks(cluster)
    assert (seen.difference.unmarked, seen.difference.partly_marked) == ((), ())
    assert (seen.difference.agreed_count, seen.difference.surplus) == (3, ())


async def test_reformatted_bookies_that_a_leader_recorded_are_skipped() -> None:
    cluster = await ring()
    async with observing(cluster) as observer:
        await reformat_one(cluster)
        foreseen = await look(cluster, observer)

        async with auditing(cluster):
            await asyncio.sleep(SOON_S)
            made = await marks(cluster)
            seen = await look(cluster, observer)

    assert {each.ledger_id: each.lost for each in foreseen.would_mark} == made != {}
    assert (seen.would_mark, seen.difference.surplus) == ((), tuple(made))


# --- A look ---------------------------------------------------------------------------------------


async def test_ledgers_are_ordered_and_counted_by_copies_left() -> None:
    cluster = await ring()
    async with observing(cluster) as observer:
        await lose_two(cluster)

        seen = await look(cluster, observer)

    assert seen.would_mark[0].ledger_id == 1, "on both of them"
    assert seen.by_copies_left == {0: 1, 1: 2}
    assert seen.difference.unmarked == tuple(each.ledger_id for each in seen.would_mark)


async def test_an_absence_counts_from_the_first_look() -> None:
    """The znode decides the delay."""
    cluster = await ring()
    await set_delay(cluster, 100)
    async with observing(cluster) as observer:
        await cluster.kill(B1)
        [absent] = (await look(cluster, observer)).affected
        assert (absent.bookie, absent.state, absent.ledgers) == (B1, BookieCondition.ABSENT, 2)
        assert 99 <= absent.left_s <= 100
        assert observer.tracker.wait_s == absent.left_s

        await asyncio.sleep(50)
        assert not (await look(cluster, observer)).would_mark
        await asyncio.sleep(50)

        assert [row.state for row in (await look(cluster, observer)).affected] == [
            BookieCondition.LOST
        ]


async def test_absent_bookies_get_time_to_return_after_its_own_outage() -> None:
    cluster = await ring()
    outages = Outages(cluster.clock, return_s=60)
    async with observing(cluster, outages=outages) as observer:
        outages.begin()
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        outages.end()
        [row] = (await look(cluster, observer)).affected
        assert row.state is BookieCondition.ABSENT
        assert row.left_s == pytest.approx(60, abs=1)

        await asyncio.sleep(60)
        assert len((await look(cluster, observer)).would_mark) == 2


async def test_it_continues_the_absences_that_a_leader_recorded() -> None:
    cluster = await ring()
    await set_delay(cluster, 100)
    async with auditing(cluster, settings=delayed(100)):
        await cluster.kill(B1)
        await asyncio.sleep(70)
        async with observing(cluster) as observer:
            [absent] = (await look(cluster, observer)).affected

    assert 25 <= absent.left_s <= 30


async def test_a_safety_hold_would_last_until_bookies_are_back() -> None:
    """Enough of them, for long enough."""
    cluster = await ring()
    async with observing(cluster) as observer:
        await lose_all_but_two(cluster)
        seen = await look(cluster, observer)
        assert seen.hold is not None
        assert not seen.is_hold_ordered
        assert not seen.would_mark
        assert len(seen.underreplicated) == 6

        for bookie in BOOKIES[:4]:
            await cluster.revive(bookie)
        assert (await look(cluster, observer)).hold is not None, "they may disappear again"
        assert observer.tracker.wait_s <= CALM_S
        await asyncio.sleep(CALM_S)

        seen = await look(cluster, observer)
        assert seen.hold is None
        assert {each.lost for each in seen.would_mark} == {(B5,)}


async def test_losses_marked_long_ago_cause_no_safety_hold() -> None:
    cluster = await ring()
    long_ago_ms = cluster.clock.wall_ms() - 3_600_000
    causes = {
        bookie: LossRecord(kind=LossKind.LOST, since_ms=long_ago_ms) for bookie in BOOKIES[:5]
    }
    await lose_all_but_two(cluster)
    async with observing(cluster) as observer:
        assert (await look(cluster, observer)).hold is not None, "no record names them"
    await cluster.store.create(
        PATHS.losses, LossRecords(bookies=causes).to_json(), with_parents=True
    )

    async with observing(cluster) as observer:
        seen = await look(cluster, observer)

    assert seen.hold is None
    assert len(seen.would_mark) == 6


async def test_changes_of_another_auditors_marks_are_followed() -> None:
    """Marks appear, grow and disappear."""
    cluster = await ring()
    async with observing(cluster) as observer:
        await lose_two(cluster)
        await cluster.mark(B2, ledger_id=1)
        await cluster.mark(B4, ledger_id=5)
        seen = await look(cluster, observer)
        assert seen.difference.unmarked == (0, 2)
        assert seen.difference.partly_marked == (1,), "its mark lacks a replica"
        assert seen.difference.surplus == (5,)

        await cluster.mark(B2, B3, ledger_id=1)
        await cluster.store.delete(PATHS.mark(5))
        seen = await look(cluster, observer)

    assert await replicas(cluster, 1) == (B2, B3)
    assert (seen.difference.unmarked, seen.difference.partly_marked) == ((0, 2), ())
    assert (seen.difference.surplus, seen.marked_count) == ((), 1)


async def test_our_own_queue_is_counted_separately() -> None:
    """Without ledgers that are in the shared queue too."""
    cluster = await ring()
    own, found = PATHS.private, Finding(check="fsck", bookies=(B1,), detail="bad", found_ms=1)
    async with observing(cluster) as observer:
        for ledger_id in (4, 5, 6):
            path = own.mark(ledger_id)
            await cluster.store.create(path, with_parents=True)
        for ledger_id in (4, 6):
            path = PATHS.finding(ledger_id)
            await cluster.store.create(path, found.to_json(), with_parents=True)
        await cluster.mark(B1, ledger_id=6)
        seen = await look(cluster, observer)
        assert (seen.private.damaged, seen.private.others) == ((4,), (5,))
        assert (seen.marked_count, seen.queued_count) == (1, 3)

        await cluster.store.delete(PATHS.mark(6))
        assert (await look(cluster, observer)).private.damaged == (4, 6)

        await cluster.store.delete(own.mark(4))
        await cluster.store.delete(own.mark(4).rpartition("/")[0])
        seen = await look(cluster, observer)

    assert (seen.private.damaged, seen.private.others) == ((6,), (5,))


# --- The values of observe mode -------------------------------------------------------------------


def underreplicated(ledger_id: int, *lost: BookieId) -> UnderreplicatedLedger:
    return UnderreplicatedLedger(ledger_id=ledger_id, lost=lost, copies_left=1, length=100)


@pytest.mark.parametrize(
    ("marks", "agreed", "unmarked", "partly_marked", "surplus"),
    [
        pytest.param(
            {}, 0, (5, 2), (), (), id="nothing is marked: the ledger at most risk stays first"
        ),
        pytest.param({5: (B1,), 2: (B1, B2)}, 2, (), (), (), id="all as we would mark them"),
        pytest.param({5: (B1,), 2: (B1,)}, 1, (), (2,), (), id="a mark that lacks a lost replica"),
        pytest.param({5: (B1, B3), 2: (B2, B1)}, 2, (), (), (), id="a mark that names more"),
        pytest.param({5: (), 2: (B1, B2)}, 1, (), (5,), (), id="an unreadable mark"),
        pytest.param({9: (B3,), 8: (B3,)}, 0, (5, 2), (), (8, 9), id="marks of other ledgers"),
    ],
)
def test_marks_are_compared_by_ledger_and_by_bookies(
    marks: dict[int, tuple[BookieId, ...]],
    agreed: int,
    unmarked: tuple[int, ...],
    partly_marked: tuple[int, ...],
    surplus: tuple[int, ...],
) -> None:
    found = compare([underreplicated(5, B1), underreplicated(2, B1, B2)], marks)

    assert (found.agreed_count, found.unmarked) == (agreed, unmarked)
    assert (found.partly_marked, found.surplus) == (partly_marked, surplus)


@pytest.mark.parametrize(
    ("ensembles", "write_quorum", "lost", "weight"),
    [
        pytest.param([(B1, B2)], 2, {B1}, 1_000, id="a copy of all of it"),
        pytest.param([(B1, B2)], 2, {B1, B2}, 2_000, id="both copies"),
        pytest.param([(B1, B2, B3)], 1, {B1}, 333, id="a stripe"),
        pytest.param([(B1, B2), (B3, B2)], 2, {B1}, 500, id="in one of two segments"),
        pytest.param([(B1, B2)], 2, {B4}, 0, id="on none of its bookies"),
    ],
)
def test_lost_bytes_are_the_share_of_the_lost_copies(
    ensembles: list[tuple[BookieId, ...]], write_quorum: int, lost: set[BookieId], weight: int
) -> None:
    ledger = MappedLedger(
        ledger_id=1,
        state=LedgerState.CLOSED,
        write_quorum=write_quorum,
        ack_quorum=1,
        length=1_000,
        ensembles=tuple(ensembles),
        czxid=1,
        mzxid=1,
    )

    assert round(lost_bytes(ledger, lost)) == weight


def test_each_affected_bookie_is_listed_once_by_risk() -> None:
    reformatted = (B3, B4, BookieId("new:3181"))
    missing = BookieLosses(
        lost_since_s={B1: 0.0, B4: 0.0},
        reformatted={bookie: ReformattedBookie(czxid=9, was_known=True) for bookie in reformatted},
    )

    rows = affected_bookies(
        missing,
        {B2: 30.0},
        underreplicated=[underreplicated(1, B1, B3), underreplicated(2, B3)],
        naming={B2: 7},
    )

    assert [(row.bookie, row.state, row.left_s, row.ledgers) for row in rows] == [
        (B2, BookieCondition.ABSENT, 30.0, 7),
        (B3, BookieCondition.REFORMATTED, 0.0, 2),
        (B1, BookieCondition.LOST, 0.0, 1),
        (B4, BookieCondition.LOST, 0.0, 0),
    ], "a new bookie lacks nothing, and is not listed"
