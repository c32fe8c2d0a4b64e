"""The view of the bookies as it follows ZooKeeper."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from ledgers.codec.registration import Address
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.tasks import RETRY_MIN_S
from replication.cluster import ViewSource
from replication.orders import (
    DrainOrder,
    LimitsOrder,
    MaintenanceWindow,
    Orders,
    OrderStore,
    drain_znode,
    limits_znode,
    maintenance_znode,
)
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import PATHS, ROOT
from tests.replication.watched import settle


async def test_a_change_is_seen_and_wakes_waiting_callers(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        before = node.views.current
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))

        await cluster.unregister(B2)
        await asyncio.wait_for(waiting, 1)

        assert before.available - node.views.current.available == {B2}
        assert B2 in before.available, "a view never changes"


async def test_a_deleted_cookie_is_seen_and_rereads_no_bookie(cluster: Cluster) -> None:
    """A decommission changes nothing else."""
    await cluster.unregister(B2)
    async with cluster.node() as node:
        await settle()
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))
        before = node.store.request_count

        await cluster.store.delete(f"{ROOT}/cookies/{B2}")
        await asyncio.wait_for(waiting, 1)

        assert B2 not in node.views.current.cookies
        assert node.store.request_count - before == 1 + len(node.views.current.cookies)


async def test_reading_the_same_list_again_is_no_change(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        count = node.views.change_count

        await node.views.refresh()

        assert node.views.change_count == count


async def test_writable_and_read_only_bookies_are_distinguished(cluster: Cluster) -> None:
    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    async with cluster.node() as node:
        view = node.views.current

    assert view.available == frozenset(BOOKIES)
    assert view.writable == frozenset(BOOKIES) - {B1}


async def test_each_registration_of_a_bookie_has_its_own_czxid(cluster: Cluster) -> None:
    async with cluster.node() as node:
        first = node.views.current.czxid(B1)
        await cluster.unregister(B1)
        await settle()
        absent = node.views.current.czxid(B1)
        await cluster.register(B1)
        await settle()

        assert absent == 0
        assert node.views.current.czxid(B1) > first > 0


async def test_rule_s6_a_bookie_with_a_newer_cookie_is_reported(cluster: Cluster) -> None:
    written = await cluster.write_ledger((B1, B2))
    stat = (await cluster.manager.read(written.ledger_id)).stat
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)

    async with cluster.node() as node:
        assert node.views.current.initialised_after(stat.czxid) == {B2}


@pytest.mark.parametrize("is_missing", [False, True], ids=["empty", "missing"])
async def test_rule_s8_an_empty_list_does_not_change_the_view(
    cluster: Cluster,
    is_missing: bool,
) -> None:
    """The same if the znode is missing."""
    async with cluster.node() as node:
        for bookie in BOOKIES:
            await cluster.unregister(bookie)
        await cluster.store.delete(f"{ROOT}/available/readonly")
        if is_missing:
            await cluster.store.delete(f"{ROOT}/available")
        await asyncio.sleep(5)

        assert node.views.current.available

        if is_missing:
            await cluster.store.create(f"{ROOT}/available")
        await cluster.register(B3)
        await asyncio.sleep(5)
        assert node.views.current.available == {B3}


async def test_there_is_no_view_before_the_first_reading(cluster: Cluster) -> None:
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)

    with pytest.raises(UnavailableError):
        assert views.current


async def test_rule_s13_an_absent_bookie_keeps_its_last_address(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await cluster.unregister(B1)
        await settle()

        assert node.views.resolve(B1) == Address("b1", 3181)
        assert node.views.resolve(BookieId("nobody:1")) == Address("nobody", 1), "by its id"


# --- Orders ---------------------------------------------------------------------------------------


async def test_an_order_is_seen_and_wakes_waiting_callers(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    async with cluster.node() as node:
        await settle()
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))

        await order_store.give(drain_znode(PATHS, B1), DrainOrder(since_ms=1), over=None)
        await asyncio.wait_for(waiting, 1)

        assert node.views.current.orders.draining.keys() == {B1}
        assert B1 in node.views.current.writable
        assert B1 not in node.views.current.receiving


async def test_existing_orders_are_in_the_first_view(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    await order_store.give(limits_znode(PATHS), LimitsOrder(bytes_per_s=5), over=None)

    async with cluster.node() as node:
        assert node.views.current.orders.limits.bytes_per_s == 5


async def test_a_window_ends_without_any_event(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    now_ms = cluster.clock.wall_ms()
    for bookie, seconds in ((B1, 100), (B2, 300)):
        window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + seconds * 1000)
        await order_store.give(maintenance_znode(PATHS, bookie), window, over=None)
    async with cluster.node() as node:
        await settle()
        assert node.views.current.orders.maintenance.keys() == {B1, B2}
        assert node.views.current.receiving == frozenset(BOOKIES) - {B1, B2}

        for left, end_s in (({B2}, 100), (set(), 300)):
            await asyncio.wait_for(node.views.wait_change(node.views.change_count), 1_000)
            assert node.views.current.orders.maintenance.keys() == left
            assert (cluster.clock.wall_ms() - now_ms) / 1000 == pytest.approx(end_s, abs=0.1)


async def test_a_window_that_is_over_is_not_in_the_first_view(cluster: Cluster) -> None:
    window = MaintenanceWindow(since_ms=1, until_ms=cluster.clock.wall_ms())
    await OrderStore(cluster.store, PATHS).give(maintenance_znode(PATHS, B1), window, over=None)

    async with cluster.node() as node:
        assert node.views.current.orders.maintenance == {}


async def test_a_change_of_orders_does_not_reread_all_bookies(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        before = node.store.request_count

        await OrderStore(cluster.store, PATHS).give(
            limits_znode(PATHS), LimitsOrder(bytes_per_s=5), over=None
        )
        await settle()

        assert node.views.current.orders.limits.bytes_per_s == 5
        assert node.store.request_count - before <= 4 * 2, "two readings of four requests at most"


async def test_unreadable_orders_are_read_when_possible(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        cluster.tree.suspend(node.store)
        await OrderStore(cluster.store, PATHS).give(
            drain_znode(PATHS, B1), DrainOrder(since_ms=1), over=None
        )
        await asyncio.sleep(3 * RETRY_MIN_S)
        assert node.views.current.orders.draining == {}, "the view stays as it was"

        cluster.tree.resume(node.store)
        await settle()

        assert node.views.current.orders.draining.keys() == {B1}


async def in_maintenance(cluster: Cluster, orders: OrderStore) -> None:
    """Put B1 in maintenance and stop it."""
    now_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + 3_600_000)
    await orders.give(maintenance_znode(PATHS, B1), window, over=None)
    await cluster.unregister(B1)


async def end_maintenance(cluster: Cluster) -> None:
    """Start B1, and only then end its maintenance."""
    await cluster.register(B1)
    await cluster.store.delete(maintenance_znode(PATHS, B1).path)


class LateEvents(Registration):
    """Bookies of whose changes no event arrives."""

    async def changes(self) -> AsyncGenerator[None, None]:
        yield
        await asyncio.Event().wait()


async def test_a_bookie_is_not_absent_at_the_end_of_its_maintenance(cluster: Cluster) -> None:
    """The event of the order arrives before the event of the registration."""
    orders = OrderStore(cluster.store, PATHS)
    await in_maintenance(cluster, orders)
    views = ViewSource(LateEvents(cluster.store, ROOT), cluster.clock, orders)
    await views.refresh()
    following = asyncio.create_task(views.run())
    await settle()
    assert B1 not in views.current.available

    await end_maintenance(cluster)
    await settle()
    following.cancel()

    assert not views.current.orders.maintenance
    assert B1 in views.current.available


class SlowOrders(OrderStore):
    """Orders that are read only after ``before_read`` has run, once."""

    before_read: Callable[[], Awaitable[None]] | None = None

    async def read(self) -> Orders:
        hook, self.before_read = self.before_read, None
        if hook is not None:
            await hook()
        return await super().read()


async def test_a_maintenance_may_end_while_the_view_is_read(cluster: Cluster) -> None:
    orders = SlowOrders(cluster.store, PATHS)
    await in_maintenance(cluster, orders)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock, orders)
    await views.refresh()

    orders.before_read = functools.partial(end_maintenance, cluster)
    view = await views.refresh()

    assert not view.orders.maintenance
    assert B1 in view.available
