"""What Java and bookmender share for the whole cluster: auto-recovery on or off, and the delay
before an absent bookie counts as lost."""

from contextlib import suppress

from daemon.admin_session import AdminSession, order_event, shared_clock
from daemon.answers import Answer
from ledgers.errors import ConflictError, NodeExistsError, NoNodeError
from ledgers.store import ANY_VERSION
from replication.orders import DisableEndOrder, OrderStore, disable_end_znode
from replication.znodes import parse_recovery_delay, recovery_delay_to_bytes


class SwitchRecord(Answer, frozen=True, kw_only=True):
    """``has_changed``: false if it was so before. ``until_ms``: when the leader enables it again;
    null: not by itself."""

    is_enabled: bool
    has_changed: bool
    until_ms: int | None = None


class RecoveryDelay(Answer, frozen=True, kw_only=True):
    """``recovery_delay_s``: null if it is not set, because no auditor has ever run."""

    recovery_delay_s: int | None


async def is_enabled(cluster: AdminSession) -> bool:
    return await cluster.store.exists(cluster.paths.disable) is None


async def switch_off(
    cluster: AdminSession, *, duration_s: int | None = None, reason: str = ""
) -> SwitchRecord:
    """Disable auto-recovery. The znode is shared with Java's AutoRecovery, and has no data.

    ``duration_s``: the leader enables it again after this time; None: it stays until ``switch_on``.
    Raises ConflictError.
    """
    orders, znode = OrderStore(cluster.store, cluster.paths), disable_end_znode(cluster.paths)
    end, path = await orders.stored(znode), cluster.paths.disable
    if end is not None and duration_s is None:
        await orders.withdraw(znode, over=end)  # first, or the leader might still enable it
    has_changed = end is not None or duration_s is not None
    with suppress(NodeExistsError):
        await cluster.store.create(path, with_parents=True)
        has_changed = True
    until_ms = None
    if duration_s is not None:
        until_ms = (await shared_clock(cluster)).wall_ms() + duration_s * 1000
        try:  # a new version, which no znode has that is created later
            stat = await cluster.store.set(path, b"", version=ANY_VERSION)
        except NoNodeError as error:
            raise ConflictError("another client has just enabled auto-recovery") from error
        order = DisableEndOrder(until_ms=until_ms, version=stat.version)
        await orders.give(znode, order, over=end)
    if has_changed:
        await cluster.note_order(order_event("disable", ends_ms=until_ms, reason=reason))
    return SwitchRecord(is_enabled=False, has_changed=has_changed, until_ms=until_ms)


async def switch_on(cluster: AdminSession) -> SwitchRecord:
    orders, znode = OrderStore(cluster.store, cluster.paths), disable_end_znode(cluster.paths)
    end = await orders.stored(znode)
    try:
        await cluster.store.delete(cluster.paths.disable)
    except NoNodeError:
        return SwitchRecord(is_enabled=True, has_changed=False)
    if end is not None:
        with suppress(ConflictError):  # of a later order to disable
            await orders.withdraw(znode, over=end)
    await cluster.note_order(order_event("enable"))
    return SwitchRecord(is_enabled=True, has_changed=True)


async def read_recovery_delay(cluster: AdminSession) -> int | None:
    """Return the stored delay in seconds; None if there is none. Raises CorruptionError."""
    try:
        data, _ = await cluster.store.get(cluster.paths.recovery_delay)
    except NoNodeError:
        return None
    return parse_recovery_delay(data)


async def set_recovery_delay(cluster: AdminSession, delay_s: int) -> None:
    """Store the recovery delay. The leader watches it, and starts an audit."""
    path, data = cluster.paths.recovery_delay, recovery_delay_to_bytes(delay_s)
    try:
        await cluster.store.create(path, data, with_parents=True)
    except NodeExistsError:
        await cluster.store.set(path, data, version=ANY_VERSION)
