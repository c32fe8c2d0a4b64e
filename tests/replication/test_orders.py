"""Orders of operators: as values, and in ZooKeeper for every session."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from ledgers.errors import ConflictError, CorruptionError, SessionLostError, UnavailableError
from ledgers.store import Stat
from replication.orders import (
    TRIES_TOLD_MAX,
    TRIES_TOLD_S,
    WINDOW_IN_DOUBT_MS,
    ChecksOrder,
    DisableSwitch,
    DrainOrder,
    HoldOrder,
    IdentitiesOrder,
    LimitsOrder,
    MaintenanceWindow,
    Orders,
    OrderStore,
    OrderZnode,
    TriesOrder,
    checks_znode,
    drain_znode,
    hold_znode,
    identities_znode,
    limits_znode,
    maintenance_znode,
    tries_znode,
)
from replication.records import Record
from replication.settings import ReplicationSettings
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, queue_empty, shut_out, until, with_lost_b2
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS, working
from tests.replication.overload import overload

WINDOW = MaintenanceWindow(since_ms=1_000, until_ms=5_000, reason="new kernel")
HELD = HoldOrder(since_ms=1_000, until_ms=5_000, bookies=(B1, B2), reason="2 of 3 are gone")


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(DrainOrder(since_ms=5), id="a drain that leaves open ledgers alone"),
        pytest.param(DrainOrder(since_ms=5, may_fence=True), id="a drain that may fence"),
        pytest.param(WINDOW, id="a window with a reason"),
        pytest.param(LimitsOrder(), id="no limits at all"),
        pytest.param(
            LimitsOrder(bytes_per_s=0, yields_to_writers=False), id="zero is not the same as absent"
        ),
        pytest.param(
            LimitsOrder(entries_per_s=7, reads_in_flight_per_bookie=500, requests_per_s=9),
            id="the other limits",
        ),
        pytest.param(HELD, id="a hold with an end"),
        pytest.param(
            HoldOrder(since_ms=5, is_by_operator=True), id="an operator's, without an end"
        ),
        pytest.param(ChecksOrder(since_ms=5), id="a pause of the checks"),
        pytest.param(TriesOrder(ordered_ms={17: 5, 3: 6}), id="two ledgers to be tried"),
    ],
)
def test_an_order_is_read_as_it_was_written(
    order: DrainOrder | MaintenanceWindow | LimitsOrder | HoldOrder | ChecksOrder | TriesOrder,
) -> None:
    assert type(order).parse(order.to_json()) == order


def test_old_tries_are_forgotten_and_so_are_the_oldest_of_many() -> None:
    long_ago = TriesOrder(ordered_ms={1: 0, 2: 5})
    now_ms = int(TRIES_TOLD_S * 1000) + 3

    assert long_ago.with_ledger(3, now_ms=now_ms).ordered_ms == {2: 5, 3: now_ms}
    assert long_ago.with_ledger(1, now_ms=9).ordered_ms == {2: 5, 1: 9}
    many = TriesOrder(ordered_ms=dict.fromkeys(range(TRIES_TOLD_MAX), 5))
    assert many.with_ledger(-1, now_ms=9).ordered_ms.keys() == {-1, *range(1, TRIES_TOLD_MAX)}


def test_a_hold_that_is_over_counts_as_released() -> None:
    orders = Orders(hold=HELD)

    assert orders.at(4_999).is_held
    assert orders.next_end_ms == 5_000
    assert not orders.at(5_000).is_held
    assert orders.at(5_000).next_end_ms is None


def test_fields_of_a_later_release_are_ignored() -> None:
    data = json.dumps({"version": 1, "since_ms": 5, "colour": "green"}).encode()

    assert DrainOrder.parse(data) == DrainOrder(since_ms=5)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        pytest.param(DrainOrder, b"", id="nothing at all"),
        pytest.param(DrainOrder, b"yes please", id="no JSON"),
        pytest.param(DrainOrder, b"\xff{}", id="no text"),
        pytest.param(DrainOrder, b"[1]", id="no object"),
        pytest.param(DrainOrder, b'{"since_ms": 1}', id="no version"),
        pytest.param(DrainOrder, b'{"version": 2, "since_ms": 1}', id="a later version"),
        pytest.param(DrainOrder, b'{"version": 1}', id="a drain of no time"),
        pytest.param(
            DrainOrder,
            b'{"version": 1, "since_ms": 1, "may_fence": "no"}',
            id="a text is no switch: 'no' would be true",
        ),
        pytest.param(
            MaintenanceWindow, b'{"version": 1, "since_ms": 1}', id="a window without an end"
        ),
        pytest.param(
            MaintenanceWindow,
            b'{"version": 1, "since_ms": 1, "until_ms": true}',
            id="a window whose end is no number",
        ),
        pytest.param(
            MaintenanceWindow,
            b'{"version": 1, "since_ms": 1, "until_ms": 2, "reason": 3}',
            id="a reason that is no text",
        ),
        pytest.param(LimitsOrder, b'{"version": 1, "bytes_per_s": -1}', id="less than nothing"),
        pytest.param(TriesOrder, b'{"version": 1, "ordered_ms": [17]}', id="tries of no time"),
        pytest.param(
            LimitsOrder,
            b'{"version": 1, "reads_in_flight_per_bookie": 501}',
            id="S10: more reads than a bookie may be asked",
        ),
        pytest.param(
            LimitsOrder,
            b'{"version": 1, "reads_in_flight_per_bookie": 0}',
            id="no reads at all would be no limit to some, and a stop to others",
        ),
    ],
)
def test_data_that_is_no_order_of_this_release_is_refused(
    kind: type[DrainOrder] | type[MaintenanceWindow] | type[LimitsOrder] | type[TriesOrder],
    data: bytes,
) -> None:
    with pytest.raises(CorruptionError):
        kind.parse(data)


@pytest.mark.parametrize(
    ("now_ms", "is_current"),
    [
        pytest.param(4_999, True, id="just inside"),
        pytest.param(5_000, False, id="the end itself is over"),
        pytest.param(0, True, id="given on a host whose clock is ahead: it counts from now"),
    ],
)
def test_a_window_is_over_at_its_end(now_ms: int, is_current: bool) -> None:
    orders = Orders(maintenance={B1: WINDOW}, draining={B2: DrainOrder(since_ms=1)})

    current = orders.at(now_ms)

    assert (B1 in current.maintenance) is is_current
    assert current.draining == orders.draining


def test_the_next_end_is_that_of_the_window_that_ends_first() -> None:
    later = MaintenanceWindow(since_ms=0, until_ms=9_000)

    assert Orders(maintenance={B1: later, B2: WINDOW}).next_end_ms == 5_000
    assert Orders().next_end_ms is None


# --- In ZooKeeper ---------------------------------------------------------------------------------


async def test_of_two_equal_concurrent_orders_one_is_refused(cluster: Cluster) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, B1)
    await order_store.give(znode, WINDOW, over=None)
    seen = await order_store.stored(znode)
    assert seen is not None

    await order_store.give(znode, MaintenanceWindow(since_ms=1, until_ms=9_000), over=seen)

    for late in (None, seen):
        with pytest.raises(ConflictError):
            await order_store.give(znode, WINDOW, over=late)
    with pytest.raises(ConflictError):
        await order_store.withdraw(znode, over=seen)
    assert (await order_store.read()).maintenance[B1].until_ms == 9_000


async def test_an_order_withdrawn_meanwhile_is_not_replaced(cluster: Cluster) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), drain_znode(PATHS, B1)
    await order_store.give(znode, DrainOrder(since_ms=1), over=None)
    seen = await order_store.stored(znode)
    assert seen is not None

    await order_store.withdraw(znode, over=seen)
    await order_store.withdraw(znode, over=seen)  # gone already: as it should be

    with pytest.raises(ConflictError):
        await order_store.give(znode, DrainOrder(since_ms=2), over=seen)
    assert await order_store.read() == Orders()


async def test_an_unreadable_order_is_reported_once_and_replaced_by_the_careful_one() -> None:
    cluster = await Cluster.start()
    order_store = OrderStore(cluster.store, PATHS)
    broken: list[OrderZnode[DrainOrder] | OrderZnode[MaintenanceWindow] | OrderZnode[LimitsOrder]]
    broken = [drain_znode(PATHS, B1), limits_znode(PATHS), maintenance_znode(PATHS, B2)]
    for znode in broken:
        await cluster.store.create(znode.path, b'{"version": 9}', with_parents=True)
    written_ms = cluster.clock.wall_ms()
    await cluster.clock.sleep(60)

    with capture_logs() as logs:
        for _ in range(3):
            found = await order_store.read()
            assert found == Orders(
                draining={B1: DrainOrder(since_ms=written_ms)},
                maintenance={
                    B2: MaintenanceWindow.in_doubt(Stat(version=0, mtime_ms=written_ms), None)
                },
                unreadable=tuple(znode.path for znode in broken),
            )
            assert B2 in found.at(written_ms + WINDOW_IN_DOUBT_MS - 1).maintenance
            assert B2 not in found.at(written_ms + WINDOW_IN_DOUBT_MS).maintenance
        assert sorted(line["path"] for line in logs) == sorted(znode.path for znode in broken)

        await cluster.store.set(broken[0].path, b"worse", version=-1)
        await order_store.read()
        assert len(logs) == 4, "another hand, another report"

    source_health = await order_store.stored(limits_znode(PATHS))
    assert source_health is not None
    assert source_health.value is None, "a client that overwrites it sees that it exists"


async def test_an_unreadable_order_leaves_the_last_one_in_force_for_later_sessions_too() -> None:
    cluster, last = await Cluster.start(), dict[str, Record]()
    order_store = OrderStore(cluster.store, PATHS, last)
    retried = TriesOrder().with_ledger(7, now_ms=cluster.clock.wall_ms())
    trusted = IdentitiesOrder(since_ms=1, cookies={B1: 1})
    await order_store.give(limits_znode(PATHS), LimitsOrder(bytes_per_s=10), over=None)
    await order_store.give(
        drain_znode(PATHS, B1), DrainOrder(since_ms=1, may_fence=True), over=None
    )
    await order_store.give(maintenance_znode(PATHS, B2), WINDOW, over=None)
    await order_store.give(tries_znode(PATHS), retried, over=None)
    await order_store.give(identities_znode(PATHS), trusted, over=None)
    before = await order_store.read()
    paths = [limits_znode(PATHS).path, drain_znode(PATHS, B1).path, tries_znode(PATHS).path]
    paths += [maintenance_znode(PATHS, B2).path, identities_znode(PATHS).path]

    for path in paths:
        await cluster.store.set(path, b"{", version=-1)

    longer = MaintenanceWindow.in_doubt(Stat(version=0, mtime_ms=cluster.clock.wall_ms()), WINDOW)
    for session in (order_store, OrderStore(cluster.store, PATHS, last)):
        assert await session.read() == replace(
            before, maintenance={B2: longer}, identities=None, unreadable=tuple(sorted(paths))
        )

    for path in paths:
        await cluster.store.delete(path)
    assert await order_store.read() == Orders(), "taken back"
    await cluster.store.create(limits_znode(PATHS).path, b"{")
    assert (await order_store.read()).limits == LimitsOrder(), "a withdrawn order is no last one"


@pytest.mark.parametrize("is_stat_open", [True, False], ids=["older ZooKeeper", "3.9.5"])
async def test_denied_access_to_an_order_stops_no_node(
    cluster: Cluster, is_stat_open: bool
) -> None:
    """The order is reported as unreadable."""
    order_store, shut = (
        OrderStore(cluster.store, PATHS),
        (PATHS.draining_orders, hold_znode(PATHS).path),
    )
    await order_store.give(hold_znode(PATHS), HoldOrder(since_ms=1, is_released=True), over=None)
    await order_store.give(drain_znode(PATHS, B1), DrainOrder(since_ms=1), over=None)
    await order_store.give(maintenance_znode(PATHS, B1), WINDOW, over=None)
    shut_out(cluster.store, *shut, is_stat_open=is_stat_open)

    found = await order_store.read()

    assert found.is_held
    assert (found.draining, found.maintenance) == ({}, {B1: WINDOW})
    assert found.unreadable == shut


async def test_rule_s8_denied_access_is_no_withdrawal(cluster: Cluster) -> None:
    """Orders that were read before stay in force."""
    order_store, drain = OrderStore(cluster.store, PATHS), DrainOrder(since_ms=1)
    await order_store.give(drain_znode(PATHS, B1), drain, over=None)
    await order_store.give(maintenance_znode(PATHS, B2), WINDOW, over=None)
    before = await order_store.read()
    assert (before.draining, before.maintenance) == ({B1: drain}, {B2: WINDOW})

    shut = shut_out(cluster.store, PATHS.draining_orders, PATHS.maintenance_orders)

    for _ in range(2):
        found = await order_store.read()
        assert (found.draining, found.maintenance) == (before.draining, before.maintenance)
        assert found.unreadable == (PATHS.draining_orders, PATHS.maintenance_orders)

    shut.clear()
    await cluster.store.delete(drain_znode(PATHS, B1).path)
    found = await order_store.read()
    assert (found.draining, found.unreadable) == ({}, ())


async def test_checks_pause_while_their_order_exists_in_any_form(cluster: Cluster) -> None:
    path = checks_znode(PATHS).path
    await cluster.store.create(path, b"", with_parents=True)

    found = await OrderStore(cluster.store, PATHS).read()

    assert found.paused_checks == ChecksOrder(since_ms=cluster.clock.wall_ms())
    assert found.unreadable == (path,)


async def test_an_unreadable_hold_counts_until_it_is_replaced(cluster: Cluster) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await cluster.store.create(znode.path, b"{", with_parents=True)
    written_ms = cluster.clock.wall_ms()
    await cluster.clock.sleep(3600)

    found = await order_store.read()
    assert (found.is_held, found.unreadable) == (True, (znode.path,))
    assert found.at(cluster.clock.wall_ms()).hold == HoldOrder.in_doubt(
        Stat(version=0, mtime_ms=written_ms), None
    )

    over = await order_store.stored(znode)
    await order_store.give(znode, HoldOrder(since_ms=1, is_released=True), over=over)
    found = await order_store.read()
    assert (found.is_held, found.unreadable) == (False, ())


# --- A session reads the disable switch, and is careful while the switch is unknown ---------------

DISABLE = PATHS.disable
SOON_S = 0.5


class Watched:
    """A watched switch. ``told_count``: how often it reported a change."""

    def __init__(self, cluster: Cluster) -> None:
        self.store = MemoryStore(cluster.tree)
        self.switch = DisableSwitch(self.store, PATHS, cluster.clock)
        self.told_count = 0

    async def watch(self) -> None:
        async with aclosing(self.switch.watch()) as readings:
            async for _ in readings:
                self.told_count += 1


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[Watched]:
    watched = Watched(cluster)
    task = asyncio.create_task(watched.watch())
    await asyncio.sleep(SOON_S)
    try:
        yield watched
        assert not task.done(), "nothing ends it but the session"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watched.store.close()


async def reconnect(cluster: Cluster, store: MemoryStore) -> None:
    cluster.tree.suspend(store)
    await asyncio.sleep(SOON_S)
    cluster.tree.resume(store)
    await asyncio.sleep(SOON_S)


async def test_a_watched_switch_is_known_without_a_request(cluster: Cluster) -> None:
    async with watching(cluster) as watched:
        before = watched.store.request_count
        assert not await watched.switch.is_on()
        assert watched.store.request_count == before

        await cluster.store.create(DISABLE)
        await asyncio.sleep(SOON_S)
        assert await watched.switch.is_on()

        await cluster.store.delete(DISABLE)
        await asyncio.sleep(SOON_S)
        assert not await watched.switch.is_on()


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
async def test_rule_s8_an_unreadable_switch_stops_new_work(cluster: Cluster, is_on: bool) -> None:
    """It is read again."""
    async with watching(cluster) as watched:
        throttled = overload(watched.store, DISABLE)
        await reconnect(cluster, watched.store)
        if is_on:
            await cluster.store.create(DISABLE)
        await asyncio.sleep(60)
        assert not watched.switch.may_lease
        with pytest.raises(UnavailableError):
            await watched.switch.is_on()

        throttled.clear()
        told_count = watched.told_count
        await asyncio.sleep(60)
        assert watched.switch.may_lease is not is_on
        assert await watched.switch.is_on() is is_on
        assert watched.told_count > told_count, "waiting callers are woken"


async def test_rule_s8_the_switch_stays_on_until_its_removal_is_read(cluster: Cluster) -> None:
    await cluster.store.create(DISABLE)
    async with watching(cluster) as watched:
        throttled = overload(watched.store, DISABLE)
        await cluster.store.delete(DISABLE)
        await asyncio.sleep(60)
        assert not watched.switch.may_lease

        throttled.clear()
        await asyncio.sleep(60)
        assert watched.switch.may_lease


async def test_the_end_of_the_session_ends_the_watch(cluster: Cluster) -> None:
    """Also while the switch is read again."""
    watched = Watched(cluster)
    throttled = overload(watched.store, DISABLE)
    task = asyncio.create_task(watched.watch())
    await asyncio.sleep(60)

    throttled.clear()
    cluster.tree.expire(watched.store)

    with pytest.raises(SessionLostError):
        await task


async def test_a_worker_survives_an_unreadable_switch() -> None:
    cluster = await with_lost_b2(3)
    settings = ReplicationSettings(idle_wait_s=1000)
    async with cluster.node(settings=settings) as node:
        throttled = overload(node.store, DISABLE)
        async with working(node):
            await asyncio.sleep(60)
            assert len(await cluster.marked()) == 3
            assert await cluster.locked() == []

            throttled.clear()
            took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 15, "it is not left to the next look"
