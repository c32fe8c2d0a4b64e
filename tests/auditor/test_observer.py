"""Whoever only looks on comes to what a leader then does, and leaves no trace."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from auditor.findings import Cause, Finding, Why, causes_path, causes_to_bytes
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.observation import Absence, Observation
from auditor.observer import Observer
from auditor.safety_hold import CALM_S, SafetyHoldPolicy
from auditor.settings import AuditorSettings, HoldSettings
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.memory.store import MemoryStore
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.store import ReadOnlyStore
from ledgers.tasks import task_scope
from replication import znodes
from replication.cluster import ViewSource
from replication.marks import read_marks
from replication.orders import HoldOrder, OrderBook, hold_place
from replication.znodes import findings_path, own_path
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, replicas, set_delay, with_ledgers
from tests.auditor.test_auditor_maintenance import maintain
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5, BOOKIES
from tests.replication.nodes import ROOT, UR

RING = tuple(zip(BOOKIES, (*BOOKIES[1:], BOOKIES[0]), strict=True))
"""Ledgers 0, 1, … 6, each on two neighbours of seven bookies."""
Scene = Callable[[Cluster], Awaitable[None]]


@asynccontextmanager
async def observing(
    cluster: Cluster, settings: AuditorSettings | None = None, hold: HoldSettings | None = None
) -> AsyncIterator[Observer]:
    """On a session that refuses every write, with the index built."""
    store, settings = ReadOnlyStore(MemoryStore(cluster.tree)), settings or AuditorSettings()
    views = ViewSource(Registration(store, ROOT), cluster.clock, OrderBook(store, UR))
    await views.refresh()
    updater = LedgerMapUpdater(
        store=store,
        manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
        clock=cluster.clock,
        rescan_interval_s=settings.rescan_interval_s,
    )
    observer = Observer(
        store=store,
        ur=UR,
        updater=updater,
        views=views,
        settings=settings,
        judge=SafetyHoldPolicy(hold or HoldSettings(), cluster.clock),
        clock=cluster.clock,
    )
    await observer.prepare()
    async with task_scope() as beside:
        for work in (views.run(), updater.run()):
            beside.start(work)
        await asyncio.sleep(SOON_S)
        yield observer


async def look(cluster: Cluster, observer: Observer) -> Observation:
    """When all that happened has been seen; the store is as before."""
    await asyncio.sleep(SOON_S)
    before = cluster.tree.snapshot()
    seen = await observer.look()
    assert cluster.tree.snapshot() == before
    return seen


async def marks(cluster: Cluster) -> dict[int, tuple[BookieId, ...]]:
    listed = await cluster.marked()
    return {
        each.ledger_id: tuple(sorted(each.mark.replicas))
        for each in await read_marks(cluster.store, UR, listed)
        if each.mark is not None
    }


async def lose_one(cluster: Cluster) -> None:
    await cluster.kill(B2)


async def lose_two(cluster: Cluster) -> None:
    await cluster.kill(B2, B3)


async def lose_all_but_two(cluster: Cluster) -> None:
    await cluster.kill(*BOOKIES[:5])


async def wipe_one(cluster: Cluster) -> None:
    await cluster.kill(B4)
    await cluster.wipe(B4)
    await cluster.revive(B4)


async def maintain_one_and_lose_another(cluster: Cluster) -> None:
    await maintain(cluster, B1, for_s=1_000)
    await cluster.kill(B1, B5)


async def lose_one_that_may_come_back(cluster: Cluster) -> None:
    await set_delay(cluster, 600)
    await cluster.kill(B2)


async def lose_one_while_disabled(cluster: Cluster) -> None:
    await cluster.store.create(znodes.disable_path(UR))
    await cluster.kill(B2)


SCENES: list[Scene] = [
    lose_one,
    lose_two,
    lose_all_but_two,
    wipe_one,
    maintain_one_and_lose_another,
    lose_one_that_may_come_back,
    lose_one_while_disabled,
]


async def ring() -> Cluster:
    cluster = await with_ledgers(*RING)
    await cluster.store.create(znodes.recovery_delay_path(UR), znodes.recovery_delay_to_bytes(0))
    return cluster


@pytest.mark.parametrize("scene", [pytest.param(each, id=each.__name__) for each in SCENES])
@in_virtual_time
async def test_what_it_would_mark_is_what_a_leader_then_marks(scene: Scene) -> None:
    cluster = await ring()
    async with observing(cluster) as observer:
        await scene(cluster)
        foreseen = await look(cluster, observer)
        assert foreseen.marked_count == 0

        async with auditing(cluster):
            await asyncio.sleep(SOON_S)
            made = await marks(cluster)
            seen = await look(cluster, observer)

    assert {each.ledger_id: each.lost for each in foreseen.would_mark} == made
    assert seen.marked_count == len(made)
    if scene is wipe_one:  # a leader of ours makes such marks once, and takes note of it
        assert seen.difference.surplus == tuple(made)
    elif made:
        assert (seen.difference.unmarked, seen.difference.surplus) == ((), ())


@in_virtual_time
async def test_the_most_endangered_come_first_and_are_counted_by_copies_left() -> None:
    cluster = await ring()
    async with observing(cluster) as observer:
        await lose_two(cluster)

        seen = await look(cluster, observer)

    assert seen.would_mark[0].ledger_id == 1, "on both of them"
    assert seen.by_copies_left == {0: 1, 1: 2}
    assert seen.difference.unmarked == tuple(each.ledger_id for each in seen.would_mark)


@in_virtual_time
async def test_an_absence_counts_from_when_it_was_first_seen_and_the_delay_is_the_znodes() -> None:
    cluster = await ring()
    await set_delay(cluster, 100)
    async with observing(cluster) as observer:
        await cluster.kill(B1)
        [away] = (await look(cluster, observer)).missing
        assert (away.bookie, away.absence, away.ledger_count) == (B1, Absence.WAITING, 2)
        assert 99 <= away.left_s <= 100
        assert observer.wait_s == away.left_s

        await asyncio.sleep(50)
        assert not (await look(cluster, observer)).would_mark
        await asyncio.sleep(50)

        assert [row.absence for row in (await look(cluster, observer)).missing] == [Absence.LOST]


@in_virtual_time
async def test_an_operator_who_asks_not_to_wait_is_heard() -> None:
    cluster = await ring()
    await set_delay(cluster, 100)
    async with observing(cluster) as observer:
        await cluster.kill(B1)
        assert not (await look(cluster, observer)).would_mark

        await set_delay(cluster, 100)

        assert len((await look(cluster, observer)).would_mark) == 2


@in_virtual_time
async def test_it_goes_on_counting_where_a_leader_of_ours_is() -> None:
    cluster = await ring()
    await set_delay(cluster, 100)
    async with auditing(cluster, settings=delayed(100)):
        await cluster.kill(B1)
        await asyncio.sleep(70)
        async with observing(cluster) as observer:
            [away] = (await look(cluster, observer)).missing

    assert 25 <= away.left_s <= 30


@in_virtual_time
async def test_a_mass_loss_would_be_held_until_they_are_back() -> None:
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
        assert (await look(cluster, observer)).hold is not None, "they might go again"
        assert observer.wait_s <= CALM_S
        await asyncio.sleep(CALM_S)

        seen = await look(cluster, observer)
        assert seen.hold is None
        assert {each.lost for each in seen.would_mark} == {(B5,)}


@in_virtual_time
async def test_bookies_whose_ledgers_a_leader_marked_long_ago_are_no_mass_loss() -> None:
    cluster = await ring()
    long_ago_ms = cluster.clock.wall_ms() - 3_600_000
    causes = {bookie: Cause(why=Why.LOST, since_ms=long_ago_ms) for bookie in BOOKIES[:5]}
    await lose_all_but_two(cluster)
    async with observing(cluster) as observer:
        assert (await look(cluster, observer)).hold is not None, "nobody knew of them"
    await cluster.store.create(causes_path(UR), causes_to_bytes(causes), with_parents=True)

    async with observing(cluster) as observer:
        seen = await look(cluster, observer)

    assert seen.hold is None
    assert len(seen.would_mark) == 6


@in_virtual_time
async def test_an_operators_order_goes_before_what_we_would_have_ordered() -> None:
    cluster = await ring()
    book, place = OrderBook(cluster.store, UR), hold_place(UR)
    async with observing(cluster) as observer:
        await lose_all_but_two(cluster)
        assert (await look(cluster, observer)).hold is not None

        released = HoldOrder(since_ms=0, bookies=BOOKIES[:5], is_released=True)
        await book.give(place, released, over=None)
        assert len((await look(cluster, observer)).would_mark) == 6

        held = HoldOrder(since_ms=cluster.clock.wall_ms(), is_by_operator=True)
        await book.give(place, held, over=await book.stored(place))
        seen = await look(cluster, observer)

    assert seen.is_hold_ordered
    assert not seen.would_mark


@in_virtual_time
async def test_marks_of_somebody_else_are_followed_as_they_come_grow_and_go() -> None:
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
        await cluster.store.delete(znodes.mark_path(UR, 5))
        seen = await look(cluster, observer)

    assert await replicas(cluster, 1) == (B2, B3)
    assert (seen.difference.unmarked, seen.difference.partly_marked) == ((0, 2), ())
    assert (seen.difference.surplus, seen.marked_count) == ((), 1)


@in_virtual_time
async def test_our_own_queue_is_seen_what_is_damaged_there_apart_and_what_java_sees_once() -> None:
    cluster = await ring()
    own, found = own_path(UR), Finding(check="fsck", bookies=(B1,), detail="bad", found_ms=1)
    async with observing(cluster) as observer:
        for ledger_id in (4, 5, 6):
            path = znodes.mark_path(own, ledger_id)
            await cluster.store.create(path, with_parents=True)
        for ledger_id in (4, 6):
            path = findings_path(UR, ledger_id)
            await cluster.store.create(path, found.to_json(), with_parents=True)
        await cluster.mark(B1, ledger_id=6)
        seen = await look(cluster, observer)
        assert (seen.own.damaged, seen.own.others) == ((4,), (5,))
        assert (seen.marked_count, seen.queued_count) == (1, 3)

        await cluster.store.delete(znodes.mark_path(UR, 6))
        assert (await look(cluster, observer)).own.damaged == (4, 6)

        await cluster.store.delete(znodes.mark_path(own, 4))
        await cluster.store.delete(znodes.mark_path(own, 4).rpartition("/")[0])
        seen = await look(cluster, observer)

    assert (seen.own.damaged, seen.own.others) == ((6,), (5,))


@in_virtual_time
async def test_one_unreadable_ledger_is_told_and_the_rest_is_seen() -> None:
    cluster = await ring()
    await cluster.store.set(cluster.manager.path(0), b"no metadata", version=-1)
    async with observing(cluster) as observer:
        await lose_one(cluster)

        seen = await look(cluster, observer)

    assert (seen.unreadable, seen.ledger_count) == ((0,), 7)
    assert [each.ledger_id for each in seen.would_mark] == [1]
