"""What Java and bookmender share for the whole cluster: auto-recovery on or off, and the delay
before an absent bookie counts as lost."""

from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from ledgers.errors import NodeExistsError, NoNodeError
from ledgers.store import ANY_VERSION
from replication.znodes import parse_recovery_delay, recovery_delay_to_bytes


class SwitchRecord(Answer, frozen=True, kw_only=True):
    """``has_changed``: false if it was so before."""

    is_enabled: bool
    has_changed: bool


class RecoveryDelay(Answer, frozen=True, kw_only=True):
    """``recovery_delay_s``: null if it is not set, because no auditor has ever run."""

    recovery_delay_s: int | None


async def is_enabled(cluster: AdminSession) -> bool:
    return await cluster.store.exists(cluster.paths.disable) is None


async def switch_off(cluster: AdminSession) -> SwitchRecord:
    """Disable auto-recovery. The znode is shared with Java's AutoRecovery, and has no data."""
    try:
        await cluster.store.create(cluster.paths.disable, with_parents=True)
    except NodeExistsError:
        return SwitchRecord(is_enabled=False, has_changed=False)
    await cluster.note_order(order_event("disable"))
    return SwitchRecord(is_enabled=False, has_changed=True)


async def switch_on(cluster: AdminSession) -> SwitchRecord:
    try:
        await cluster.store.delete(cluster.paths.disable)
    except NoNodeError:
        return SwitchRecord(is_enabled=True, has_changed=False)
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
