"""The limits of a node: its settings, overridden by an operator's order (``bookmender limits``).

``limits_in_force`` returns the limits that apply. One loop for each limited resource applies them
as soon as an order changes, and within ten seconds after a reload of the settings.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client import Gauge

from daemon.live_settings import LiveSettings
from daemon.settings import Settings
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING, Budgets, reads_in_flight_max
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.tasks import until_answered
from ledgers.zookeeper.store import ZooKeeperStore
from replication.client_activity import ActivitySource, ClientActivity
from replication.cluster import ViewSource
from replication.nodes import Membership
from replication.orders import LimitsOrder
from replication.transactions import LINGER_S, Batcher

YIELDING = Gauge(
    "bookmender_copying_yields",
    "1 while copies of this node are limited because clients are or may be active at bookies; "
    "0 at full speed.",
)
ACTIVE_BOOKIES = Gauge(
    "bookmender_client_active_bookies", "Bookies with active clients, as published by the leader."
)
LIMITED = Gauge(
    "bookmender_copying_limited",
    "1 if this limits the copies of this node, else 0: clients (copies yield where clients are "
    "active), unknown-clients (copies yield everywhere, because no leader publishes the activity "
    "of clients) or rate (a setting, or bookmender limits).",
    ["by"],
)
_BY_CLIENTS, _BY_UNKNOWN, _BY_RATE = (
    LIMITED.labels(by=by) for by in ("clients", "unknown-clients", "rate")
)
RATE = Gauge(
    "bookmender_copying_rate_limit",
    "Rate limit of the copies of this node, in bytes or entries per second; 0: none.",
    ["unit"],
)
SHARES_INTERVAL_S = 10.0
"""Interval of counting the nodes, for each node's share of a bookie's reads (rule S10), and of
looking for changed settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a node, with a value for every field of ``LimitsOrder``. 0: no limit."""

    bytes_per_s: int
    entries_per_s: int
    reads_in_flight_per_bookie: int
    requests_per_s: int
    yields_to_writers: bool


def limits_in_force(order: LimitsOrder, settings: Settings) -> Limits:
    """Return the limits of a node: its settings, overridden by the order."""
    ours = settings.replication
    own = Limits(
        bytes_per_s=ours.bytes_per_s,
        entries_per_s=ours.entries_per_s,
        reads_in_flight_per_bookie=ours.reads_in_flight_per_bookie,
        requests_per_s=settings.zookeeper.requests_per_s,
        yields_to_writers=ours.yields_to_writers,
    )
    return replace(own, **ordered_limits(order))


def ordered_limits(order: LimitsOrder) -> dict[str, Any]:
    """Return the limits that the order sets, by key."""
    return {key: value for key, value in asdict(order).items() if value is not None}


async def _each_in_force(live: LiveSettings, views: ViewSource) -> AsyncGenerator[Limits, None]:
    """Yield the limits in force at once, whenever an order may have changed, and every ten seconds,
    because the settings may have changed."""
    while True:
        seen = views.change_count
        yield limits_in_force(views.current.orders.limits, live.current)
        await views.wait_change(seen, timeout_s=SHARES_INTERVAL_S)


async def keep_to_requests_per_s(
    live: LiveSettings, views: ViewSource, store: ZooKeeperStore
) -> None:
    async for limits in _each_in_force(live, views):
        store.outbox.requests_per_s = limits.requests_per_s


async def keep_to_pace(
    live: LiveSettings, views: ViewSource, bulk: BulkTransfers, batcher: Batcher
) -> None:
    """Apply the limits on copied bytes and entries, and whether copies yield to clients."""
    async for limits in _each_in_force(live, views):
        bulk.rate_limit.set(bytes_per_s=limits.bytes_per_s, entries_per_s=limits.entries_per_s)
        bulk.flow.yields = limits.yields_to_writers
        _BY_RATE.set(bool(limits.bytes_per_s or limits.entries_per_s))
        RATE.labels(unit="bytes").set(limits.bytes_per_s)
        RATE.labels(unit="entries").set(limits.entries_per_s)
        _linger(batcher, bulk)


async def yield_to_clients(
    activity: ActivitySource,
    membership: Membership,
    bulk: BulkTransfers,
    batcher: Batcher,
    *,
    clock: Clock,
) -> None:
    """Apply the client activity that the leader publishes to the copies of this node. Runs until
    the session ends."""
    while True:
        seen, said = activity.change_count, activity.current
        if said is None:
            worker_count = await until_answered(
                membership.worker_count,
                event="workers.count_failed",
                clock=clock,
                errors=(UnavailableError, UnauthorizedError),
            )
            bulk.flow.set_activity(None, sharer_count=worker_count)
        else:
            bulk.flow.set_activity(said.of, sharer_count=said.copying_node_count)
        _linger(batcher, bulk)
        _meter(said, bulk)
        await activity.wait_change(seen, timeout_s=SHARES_INTERVAL_S)


def _linger(batcher: Batcher, bulk: BulkTransfers) -> None:
    """Delay ZooKeeper writes a little while copies yield: fewer and larger transactions cost other
    clients less."""
    batcher.linger_s = LINGER_S if bulk.flow.is_yielding else 0.0


def _meter(said: ClientActivity | None, bulk: BulkTransfers) -> None:
    YIELDING.set(bulk.flow.is_yielding)
    _BY_CLIENTS.set(bulk.flow.yields and said is not None and bool(said.active))
    _BY_UNKNOWN.set(bulk.flow.yields and said is None)
    ACTIVE_BOOKIES.set(0 if said is None else len(said.active))


async def keep_to_our_share(
    live: LiveSettings,
    views: ViewSource,
    membership: Membership,
    budgets: Budgets,
    *,
    clock: Clock,
    count_max: int = READS_IN_FLIGHT_CEILING,
) -> None:
    """Set how many reads this node may have in flight at one bookie (rule S10).

    The more nodes and executors of fsck read, the smaller the share of each. The checks of the
    leader count as one more reader. ``count_max``: upper bound of the share. While the readers
    cannot be counted, the last share stays in force. Ends with the session.
    """
    async with aclosing(_each_in_force(live, views)) as in_force:
        async for limits in in_force:
            reader_count = await until_answered(
                membership.reader_count,
                event="readers.count_failed",
                clock=clock,
                errors=(UnavailableError, UnauthorizedError),
            )
            budgets.reads_in_flight_max = reads_in_flight_max(
                min(count_max, limits.reads_in_flight_per_bookie), reader_count=reader_count
            )
