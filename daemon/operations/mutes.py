"""Mutes conditions of ``bookmender status`` for a time, and ends that."""

from dataclasses import replace

from daemon.admin_session import AdminSession, order_event
from daemon.status.condition import Entry, subjects
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from ledgers.clock import Clock
from ledgers.errors import RejectedError
from replication.orders import Mute, MutesOrder, OrderStore, mutes_znode


async def mute(
    cluster: AdminSession, entry: Entry, *, duration_s: int, reason: str, clock: Clock
) -> None:
    """Mute the condition as it is now. Raises RejectedError if it says that data is lost or
    unavailable; ConflictError."""
    if not entry.can_be_muted:
        raise RejectedError(
            f"{entry.code} says that data may be lost or unavailable, so it cannot be muted"
        )
    status, now_ms = await gather_status(cluster, clock=clock), clock.wall_ms()
    found = next((each for each in conditions(status) if each.code == entry.code), None)
    new = Mute(
        since_ms=now_ms,
        until_ms=now_ms + duration_s * 1000,
        severity=found.severity if found else "WARN",
        subjects=subjects(found) if found else (),
        by=cluster.by,
        reason=reason,
    )
    await _change(cluster, entry.code, new, now_ms=now_ms)
    event = order_event("status --mute", cause=entry.code, ends_ms=new.until_ms, reason=reason)
    await cluster.note_order(event)


async def unmute(cluster: AdminSession, entry: Entry, *, clock: Clock) -> bool:
    """End the mute, and return False if there was none. Raises ConflictError."""
    if not await _change(cluster, entry.code, None, now_ms=clock.wall_ms()):
        return False
    await cluster.note_order(order_event("status --unmute", cause=entry.code))
    return True


async def _change(cluster: AdminSession, code: str, new: Mute | None, *, now_ms: int) -> bool:
    """Replace the mute of one condition, and drop those that are over. Return True if there was
    one."""
    orders, znode = OrderStore(cluster.store, cluster.paths), mutes_znode(cluster.paths)
    stored = await orders.stored(znode)
    order = MutesOrder() if stored is None or stored.value is None else stored.value
    kept = {each: it for each, it in order.by_code.items() if now_ms < it.until_ms}
    was_muted = kept.pop(code, None) is not None
    kept |= {} if new is None else {code: new}
    if kept or stored is not None:
        await orders.give(znode, replace(order, by_code=kept), over=stored)
    return was_muted
