"""The limits on repair traffic that an operator orders for all nodes."""

from collections.abc import Mapping
from dataclasses import asdict, replace

from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.limits import limits_in_force, ordered_limits
from daemon.settings import Settings
from ledgers.errors import CorruptionError
from replication.orders import LimitsOrder, OrderStore, limits_znode

EXPLAINED: Mapping[str, str] = {
    "bytes_per_s": "stored bytes that each node copies per second",
    "entries_per_s": "entries that each node copies per second",
    "reads_in_flight_per_bookie": "reads that each node has in flight at one bookie",
    "requests_per_s": "requests that each role of a node sends to ZooKeeper per second",
    "yields_to_writers": "slower at bookies with active clients, full speed at others",
}


LOWEST_SENSIBLE: Mapping[str, int] = {"bytes_per_s": 2**20, "entries_per_s": 10}
"""Values below these are probably a mistake, such as a wrong unit."""


class EffectiveLimit(Answer, frozen=True, kw_only=True):
    """One limit in force. ``is_ordered``: an order sets it for all nodes; else it comes from this
    host's settings."""

    value: int | bool
    is_ordered: bool


Limits = dict[str, EffectiveLimit]
"""The limits in force, by name."""


def limit_text(key: str, limit: EffectiveLimit) -> str:
    if isinstance(limit.value, bool):
        value = "yes" if limit.value else "no"
    else:
        value = f"{limit.value:,}" if limit.value else "no limit"
    by = "by order" if limit.is_ordered else "by this host's settings"
    return f"{key:<27} {value:<12} {by:<24} {EXPLAINED[key]}"


async def change_limits(cluster: AdminSession, wanted: LimitsOrder, *, reset: bool) -> Limits:
    """Write an order with the wanted limits, and return those in force. Raises ConflictError,
    CorruptionError.

    Limits of the present order that ``wanted`` does not name stay; with ``reset`` they are removed.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), limits_znode(cluster.paths)
    stored = await order_store.stored(znode)
    if stored is not None and stored.value is None and not reset:
        raise CorruptionError(
            "the ordered limits cannot be read. Withdraw them first: bookmender limits --reset"
        )
    before = LimitsOrder() if reset or stored is None else stored.value or LimitsOrder()
    limits = replace(before, **ordered_limits(wanted))
    if limits != LimitsOrder():
        await order_store.give(znode, limits, over=stored)
        ordered = {key: int(value) for key, value in ordered_limits(limits).items()}
        await cluster.note_order(order_event("limits", counts=ordered))
    elif stored is not None:
        await order_store.withdraw(znode, over=stored)
        await cluster.note_order(order_event("limits --reset"))
    return effective_limits(limits, cluster.settings)


def concerns(limits: Limits) -> list[str]:
    """Return warnings about limits so low that repairs make no progress."""
    return [
        f"{key} is {limit.value:,}. Below {LOWEST_SENSIBLE[key]:,} repairs take very long, and "
        "ledgers lack copies meanwhile. Give the value none for no limit."
        for key, limit in limits.items()
        if 0 < limit.value < LOWEST_SENSIBLE.get(key, 0)
    ]


def effective_limits(order: LimitsOrder, settings: Settings) -> Limits:
    """Return the limits of a node with these settings, and where each comes from."""
    ordered = ordered_limits(order)
    return {
        key: EffectiveLimit(value=value, is_ordered=key in ordered)
        for key, value in asdict(limits_in_force(order, settings)).items()
    }
