"""All nodes use one wall-clock time, even if the clocks of their hosts differ."""

import asyncio

import pytest
from structlog.testing import capture_logs

from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.nodes import SYNCHRONISE_INTERVAL_S, Membership, SharedClock
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1
from tests.replication.nodes import PATHS, ROOT, node_info
from tests.replication.repairs import order_maintenance
from tests.virtual_time import LoopClock

HOUR_S = 3_600


class SkewedClock(LoopClock):
    """A host's clock that is wrong, and may be set."""

    def __init__(self, skew_s: float) -> None:
        super().__init__()
        self.skew_s = skew_s

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self.skew_s * 1000)


async def clock_of(cluster: Cluster, own: SkewedClock) -> SharedClock:
    clock = SharedClock(own)
    membership = await Membership.join(cluster.store, PATHS, node_info("node"))
    await membership.synchronise(clock)
    return clock


@pytest.mark.parametrize("skew_s", [-HOUR_S, 0, HOUR_S])
async def test_the_time_is_zookeepers_whatever_the_host_says(skew_s: float) -> None:
    cluster = await Cluster.start()
    clock = await clock_of(cluster, SkewedClock(skew_s))

    await asyncio.sleep(100)

    assert abs(clock.wall_ms() - cluster.clock.wall_ms()) < 10
    assert abs(clock.skew_s - skew_s) < 0.01


async def test_a_changed_host_clock_does_not_change_the_time(cluster: Cluster) -> None:
    own = SkewedClock(0)
    clock = await clock_of(cluster, own)

    own.skew_s = HOUR_S

    assert abs(clock.wall_ms() - cluster.clock.wall_ms()) < 10


async def test_a_skew_is_logged_once(cluster: Cluster) -> None:
    own = SkewedClock(60)
    clock = SharedClock(own)
    membership = await Membership.join(cluster.store, PATHS, node_info("node"))

    with capture_logs() as logs:
        await membership.synchronise(clock)
        ticking = asyncio.create_task(membership.keep_synchronised(clock))
        await asyncio.sleep(3 * SYNCHRONISE_INTERVAL_S)
        ticking.cancel()

    assert [(each["event"], each["skew_s"]) for each in logs] == [("clock.skewed", 60.0)]


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
async def test_orders_last_equally_long_with_a_wrong_clock(cluster: Cluster, skew_s: float) -> None:
    """A hold and a maintenance window."""
    now_ms = cluster.clock.wall_ms()
    hold = HoldOrder(since_ms=now_ms, until_ms=now_ms + 600_000)
    await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)
    await order_maintenance(cluster, B1, for_s=600)
    clock = await clock_of(cluster, SkewedClock(skew_s))
    views = ViewSource(Registration(cluster.store, ROOT), clock, OrderStore(cluster.store, PATHS))

    await asyncio.sleep(590)
    before = (await views.refresh()).orders
    await asyncio.sleep(20)
    after = (await views.refresh()).orders

    assert before.is_held
    assert B1 in before.maintenance
    assert not after.is_held
    assert B1 not in after.maintenance
