"""Limits that are ordered for all nodes, instead of their settings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import click
import pytest
from click.testing import CliRunner

from daemon.cli.option_types import Limit
from daemon.cli.orders import limits
from daemon.limits import (
    SHARES_INTERVAL_S,
    keep_to_our_share,
    keep_to_pace,
    yield_to_clients,
)
from daemon.live_settings import LiveSettings
from daemon.operations.limits import change_limits, concerns, effective_limits, limit_text
from daemon.settings import Settings, ZooKeeperSettings
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.flow_control import Activity, FlowControl, FlowLimits, flow_limits
from ledgers.bulk.limiters import Budgets
from ledgers.errors import CorruptionError
from replication.client_activity import STALE_AFTER_S, ActivitySource, ClientActivity
from replication.nodes import Membership, Role
from replication.orders import LIMIT_RANGES, LimitsOrder, OrderStore, limits_znode
from replication.settings import ReplicationSettings
from replication.transactions import LINGER_S, Batcher
from tests.auditor.scenes import SOON_S
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1
from tests.replication.nodes import PATHS, Node, node_info
from tests.replication.overload import overload

URI = "zk+hierarchical://zk:2181/ledgers"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("none", 0),
        ("500", 500),
        ("20k", 20_000),
        ("20M", 20_000_000),
        ("1G", 1_000_000_000),
    ],
)
def test_a_limit_may_have_a_suffix(text: str, number: int) -> None:
    assert Limit("bytes_per_s").convert(text, None, None) == number


@pytest.mark.parametrize(
    ("key", "text"),
    [
        pytest.param("bytes_per_s", "", id="nothing"),
        pytest.param("bytes_per_s", "M", id="only a factor"),
        pytest.param("bytes_per_s", "-1", id="negative"),
        pytest.param("bytes_per_s", "1.5M", id="not a whole number"),
        pytest.param("bytes_per_s", "20MB", id="another unit"),
        pytest.param("bytes_per_s", "٣", id="another script's digit"),
        pytest.param("bytes_per_s", "9" * 5_000, id="more digits than Python reads"),
        pytest.param("reads_in_flight_per_bookie", "none", id="S10: reads always have a limit"),
        pytest.param(
            "reads_in_flight_per_bookie", "501", id="S10: more than a bookie may be asked"
        ),
        pytest.param("reads_in_flight_per_bookie", "0", id="S10: zero would stop all reads"),
    ],
)
def test_a_limit_that_no_setting_allows_is_refused(key: str, text: str) -> None:
    most = "500" if key == "reads_in_flight_per_bookie" else "1000000000000"
    with pytest.raises(click.BadParameter, match=f"is not a whole number from . to {most}"):
        Limit(key).convert(text, None, None)


def test_full_speed_and_gentle_exclude_each_other() -> None:
    said = CliRunner().invoke(limits, ["--full-speed", "--gentle"])

    assert said.exit_code == 2
    assert "not both" in said.output


@pytest.mark.parametrize(("option", "yields"), [("--full-speed", False), ("--gentle", True)])
def test_full_speed_or_gentle_is_ordered(in_memory: InMemory, option: str, yields: bool) -> None:
    async def ordered(cluster: Cluster) -> bool | None:
        return (await OrderStore(cluster.store, PATHS).read()).limits.yields_to_writers

    _, found = in_memory(limits, option, look=ordered)

    assert found is yields


@pytest.mark.parametrize(
    ("order", "low"),
    [
        pytest.param(LimitsOrder(), [], id="from the settings"),
        pytest.param(LimitsOrder(bytes_per_s=0, entries_per_s=0), [], id="no limit"),
        pytest.param(LimitsOrder(bytes_per_s=2**20, entries_per_s=10), [], id="low enough"),
        pytest.param(LimitsOrder(bytes_per_s=2**20 - 1), ["bytes_per_s"], id="20 meant as MB"),
        pytest.param(
            LimitsOrder(bytes_per_s=1, entries_per_s=9), ["bytes_per_s", "entries_per_s"], id="both"
        ),
    ],
)
def test_a_limit_that_is_too_low_gets_a_warning(order: LimitsOrder, low: list[str]) -> None:
    warnings = concerns(effective_limits(order, Settings(metadata_service_uri=URI)))

    assert [warning.partition(" ")[0] for warning in warnings] == low
    assert all("take very long" in warning for warning in warnings)


def test_the_ranges_are_the_same_as_in_the_settings() -> None:
    for key, (least, most) in LIMIT_RANGES.items():
        section = ZooKeeperSettings if key == "requests_per_s" else ReplicationSettings
        for allowed in (least, most):
            section(**{key: allowed})  # type: ignore[arg-type]
        for refused in (least - 1, most + 1):
            with pytest.raises(Exception, match=key):
                section(**{key: refused})  # type: ignore[arg-type]


def test_an_order_overrides_the_settings() -> None:
    settings = Settings(
        metadata_service_uri=URI,
        replication=ReplicationSettings(bytes_per_s=7, entries_per_s=8),
        zookeeper=ZooKeeperSettings(requests_per_s=9),
    )

    found = effective_limits(LimitsOrder(bytes_per_s=0, yields_to_writers=False), settings)

    assert {key: (each.value, each.is_ordered) for key, each in found.items()} == {
        "bytes_per_s": (0, True),
        "entries_per_s": (8, False),
        "reads_in_flight_per_bookie": (500, False),
        "requests_per_s": (9, False),
        "yields_to_writers": (False, True),
    }
    texts = [limit_text(key, each) for key, each in found.items()]
    assert "no limit" in texts[0]
    assert "by order" in texts[0]
    assert "no  " in texts[4]


@in_virtual_time
async def test_limits_are_ordered_singly_and_reset_together() -> None:
    cluster = await Cluster.start()
    order_store, here = OrderStore(cluster.store, PATHS), visiting(cluster)

    await change_limits(here, LimitsOrder(bytes_per_s=5), reset=False)
    await change_limits(here, LimitsOrder(entries_per_s=6), reset=False)
    assert (await order_store.read()).limits == LimitsOrder(bytes_per_s=5, entries_per_s=6)

    await change_limits(here, LimitsOrder(requests_per_s=7), reset=True)
    assert (await order_store.read()).limits == LimitsOrder(requests_per_s=7)

    await change_limits(here, LimitsOrder(), reset=True)
    assert await cluster.store.exists(limits_znode(PATHS).path) is None
    await change_limits(here, LimitsOrder(), reset=True)


@in_virtual_time
async def test_an_unreadable_limits_order_can_only_be_reset() -> None:
    """A later release may have written the order."""
    cluster = await Cluster.start()
    await cluster.store.create(limits_znode(PATHS).path, b'{"version": 2}')

    with pytest.raises(CorruptionError, match="--reset"):
        await change_limits(visiting(cluster), LimitsOrder(bytes_per_s=5), reset=False)
    await change_limits(visiting(cluster), LimitsOrder(bytes_per_s=5), reset=True)

    assert (await OrderStore(cluster.store, PATHS).read()).limits == LimitsOrder(bytes_per_s=5)


# --- Effects on running nodes ---------------------------------------------------------------------


class RecordedCopying:
    """The part of ``BulkTransfers`` that limits use. Records the last limits, and copies to B1."""

    def __init__(self) -> None:
        self.rate_limit = self
        self.rates: dict[str, int] = {}
        self.flow = FlowControl()
        self.flow.of(B1)

    def set(self, **rates: int) -> None:
        self.rates = rates

    @property
    def limits(self) -> FlowLimits:
        return self.flow.of(B1).limits


@asynccontextmanager
async def sharing(
    cluster: Cluster, node: Node, budgets: Budgets, settings: Settings | None = None, **most: int
) -> AsyncIterator[None]:
    """Let a node keep to its share of the reads of each bookie."""
    live = LiveSettings(settings or Settings(metadata_service_uri=URI))
    keeping = asyncio.create_task(
        keep_to_our_share(live, node.views, node.membership, budgets, clock=cluster.clock, **most)
    )
    yield
    keeping.cancel()


@in_virtual_time
async def test_a_worker_follows_an_order_and_then_its_settings_again() -> None:
    cluster = await Cluster.start()
    settings = Settings(
        metadata_service_uri=URI,
        replication=ReplicationSettings(bytes_per_s=7, reads_in_flight_per_bookie=50),
    )
    copying, budgets = RecordedCopying(), Budgets(reads_in_flight_max=64)
    batcher = Batcher(cluster.store, ())
    here, znode = OrderStore(cluster.store, PATHS), limits_znode(PATHS)
    order = LimitsOrder(bytes_per_s=9, yields_to_writers=False, reads_in_flight_per_bookie=400)
    async with (
        cluster.node() as node,
        sharing(cluster, node, budgets, settings),
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(
            keep_to_pace(LiveSettings(settings), node.views, cast(BulkTransfers, copying), batcher)
        )

        def told() -> tuple[dict[str, int], bool, int]:
            return copying.rates, copying.flow.yields, budgets.reads_in_flight_max

        await asyncio.sleep(SOON_S)
        by_settings = ({"bytes_per_s": 7, "entries_per_s": 0}, True, 50)
        assert told() == by_settings
        assert batcher.linger_s == LINGER_S

        await here.give(znode, order, over=None)
        await asyncio.sleep(SOON_S)
        assert told() == ({"bytes_per_s": 9, "entries_per_s": 0}, False, 400)
        assert batcher.linger_s == 0

        await change_limits(visiting(cluster), LimitsOrder(), reset=True)
        await asyncio.sleep(SOON_S)
        assert told() == by_settings

        for number in range(9):
            await Membership.join(cluster.store, PATHS, node_info(f"reader-{number}", Role.HAND))
        await Membership.join(cluster.store, PATHS, node_info("auditor", Role.AUDITOR))
        await here.give(znode, order, over=None)
        await asyncio.sleep(SOON_S)
        assert budgets.reads_in_flight_max == 2_000 // 11, (
            "ten read, not both by hand, and the leader's checks count as well (S10)"
        )

        for number in range(9):
            path = f"{PATHS.fsck_executors}/run-1.{number}"
            await cluster.store.create(path, is_ephemeral=True, with_parents=True)
        await asyncio.sleep(SHARES_INTERVAL_S + SOON_S)
        assert budgets.reads_in_flight_max == 2_000 // 20, "and so do executors of fsck"
        following.cancel()


@in_virtual_time
async def test_a_worker_keeps_to_settings_that_were_reloaded() -> None:
    cluster = await Cluster.start()
    before = Settings(metadata_service_uri=URI, replication=ReplicationSettings(bytes_per_s=7))
    live, copying = LiveSettings(before), RecordedCopying()
    batcher = Batcher(cluster.store, ())
    async with cluster.node() as node, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(
            keep_to_pace(live, node.views, cast(BulkTransfers, copying), batcher)
        )
        await asyncio.sleep(SOON_S)
        assert copying.rates == {"bytes_per_s": 7, "entries_per_s": 0}

        live.current = replace(before, replication=ReplicationSettings(entries_per_s=8))
        await asyncio.sleep(SHARES_INTERVAL_S + SOON_S)
        assert copying.rates == {"bytes_per_s": 0, "entries_per_s": 8}

        following.cancel()


@pytest.mark.parametrize(
    "hide",
    [
        pytest.param(lambda store: overload(store, PATHS.nodes), id="overloaded"),
        pytest.param(lambda store: shut_out(store, PATHS.nodes), id="nodes are denied"),
        pytest.param(
            lambda store: shut_out(store, PATHS.fsck_executors), id="executors of fsck are denied"
        ),
    ],
)
@in_virtual_time
async def test_the_last_share_stays_while_nodes_cannot_be_counted(
    hide: Callable[[MemoryStore], set[str]],
) -> None:
    cluster = await Cluster.start()
    budgets = Budgets(reads_in_flight_max=64)
    here, znode = OrderStore(cluster.store, PATHS), limits_znode(PATHS)
    async with cluster.node() as node, sharing(cluster, node, budgets):
        await here.give(znode, LimitsOrder(reads_in_flight_per_bookie=500), over=None)
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.fsck_executors, with_parents=True)
        hidden = hide(node.store)
        for number in range(8):
            await Membership.join(cluster.store, PATHS, node_info(f"reader-{number}", Role.HAND))
        await asyncio.sleep(5 * SHARES_INTERVAL_S)
        assert budgets.reads_in_flight_max == 500

        hidden.clear()
        await asyncio.sleep(2 * SHARES_INTERVAL_S)
        assert budgets.reads_in_flight_max == 2_000 // 10


@in_virtual_time
async def test_the_checks_have_their_own_limit_or_a_lower_order() -> None:
    cluster = await Cluster.start()
    budgets = Budgets(reads_in_flight_max=64)
    here, znode = OrderStore(cluster.store, PATHS), limits_znode(PATHS)
    async with cluster.node() as node, sharing(cluster, node, budgets, count_max=16):
        await asyncio.sleep(SOON_S)
        assert budgets.reads_in_flight_max == 16

        await here.give(znode, LimitsOrder(reads_in_flight_per_bookie=3), over=None)
        await asyncio.sleep(SOON_S)
        assert budgets.reads_in_flight_max == 3


@in_virtual_time
async def test_a_worker_follows_the_leaders_record_of_client_activity() -> None:
    cluster = await Cluster.start()
    copying, batcher = RecordedCopying(), Batcher(cluster.store, ())
    said = ClientActivity(quiet=frozenset({B1}), copying_node_count=2)
    async with cluster.node() as node, asyncio.TaskGroup() as tasks:
        source = ActivitySource(cluster.store, PATHS, cluster.clock)
        yielding = yield_to_clients(
            source,
            node.membership,
            cast(BulkTransfers, copying),
            batcher,
            clock=cluster.clock,
        )
        following = [tasks.create_task(work) for work in (source.run(), yielding)]

        await asyncio.sleep(SOON_S)
        alone = flow_limits(Activity.UNKNOWN, yields=True, sharer_count=1)
        assert copying.limits == alone
        assert batcher.linger_s == LINGER_S

        await cluster.store.create(PATHS.activity, said.to_json(), with_parents=True)
        await asyncio.sleep(SOON_S)
        assert copying.limits.is_full_speed
        assert batcher.linger_s == 0

        active = replace(said, quiet=frozenset(), active=frozenset({B1}))
        await cluster.store.set(PATHS.activity, active.to_json(), version=-1)
        await asyncio.sleep(SOON_S)
        assert copying.limits == flow_limits(Activity.ACTIVE, yields=True, sharer_count=2)

        await Membership.join(cluster.store, PATHS, node_info("another", Role.WORKER))
        await Membership.join(cluster.store, PATHS, node_info("a third", Role.WORKER))
        await asyncio.sleep(STALE_AFTER_S + SHARES_INTERVAL_S)
        assert copying.limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=3)

        for task in following:
            task.cancel()
