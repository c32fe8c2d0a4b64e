"""Changes the cluster by order of a request, as the commands of the same names do.

Each function works in a session of its own, which the caller opens. ``concerns`` in the answers are
the sentences that the command would print beside its result.
"""

from daemon.admin_session import AdminSession, shared_clock
from daemon.cli.bookies import known_bookies
from daemon.cli.drain import absent_concerns, cancel_drains, order_drains, read_drains
from daemon.cli.drain import concerns as drain_concerns
from daemon.cli.hold import HoldState, begin_hold, end_hold, read_hold
from daemon.cli.maintenance import concerns as window_concerns
from daemon.cli.maintenance import end_concerns, end_window, left_without, open_window
from daemon.cli.orders import leader_concerns
from daemon.cli.switch import switch_off, switch_on
from daemon.http.records import (
    ChangedRecord,
    DrainOrderRecord,
    HoldOrderRecord,
    MaintenanceOrderRecord,
    SwitchRecord,
)
from ledgers.clock import SystemClock
from ledgers.errors import RejectedError
from ledgers.model import BookieId


class WrongRequestError(Exception):
    """The request is wrong: a value is out of range."""


class UnknownBookieError(Exception):
    """The cluster knows no such bookie."""


async def begin(cluster: AdminSession, order: HoldOrderRecord) -> HoldState:
    """Begin a safety hold. Raises ConflictError, WrongRequestError."""
    _check_reason(order.reason)
    clock = await shared_clock(cluster)
    await begin_hold(cluster, duration_s=order.for_s, reason=order.reason, clock=clock)
    return await read_hold(cluster, clock=clock)


async def end(cluster: AdminSession, *, accepts_lost: bool) -> HoldState:
    """End the safety hold. Raises RejectedError if bookies are absent and that is not accepted."""
    clock = await shared_clock(cluster)
    before = await read_hold(cluster, clock=clock)
    if before.hold is not None and before.absent and not accepts_lost:
        raise RejectedError(
            f"nothing was changed: {before.absent_text}. They would count as lost. Start the "
            "bookies, or add accept_lost=true."
        )
    if before.hold is not None:
        await end_hold(cluster, before.absent, clock=clock)
    return await read_hold(cluster, clock=clock)


async def disable(cluster: AdminSession) -> SwitchRecord:
    return SwitchRecord(has_changed=await switch_off(cluster), is_enabled=False)


async def enable(cluster: AdminSession) -> SwitchRecord:
    return SwitchRecord(has_changed=await switch_on(cluster), is_enabled=True)


async def begin_drain(
    cluster: AdminSession, bookie: BookieId, order: DrainOrderRecord
) -> ChangedRecord:
    """Order the drain. Raises RejectedError if the bookie is absent and that is not accepted."""
    await _check_known(cluster, bookie)
    clock = SystemClock()
    before = (await read_drains(cluster)).orders.draining.get(bookie)
    absent = await absent_concerns(cluster, [bookie], clock=clock)
    if absent and before is None and not order.accept_absent:
        raise RejectedError(
            f"nothing was ordered. To order the drain anyway, set accept_absent. {absent[bookie]}"
        )
    await order_drains(cluster, [bookie], may_fence=order.fence_open, clock=clock)
    after = (await read_drains(cluster)).orders.draining.get(bookie)
    return ChangedRecord(
        has_changed=before != after,
        concerns=[*absent.values(), *await drain_concerns(cluster, [bookie])],
    )


async def end_drain(cluster: AdminSession, bookie: BookieId) -> ChangedRecord:
    await _check_known(cluster, bookie)
    return ChangedRecord(has_changed=bool(await cancel_drains(cluster, [bookie])), concerns=[])


async def begin_maintenance(
    cluster: AdminSession, bookie: BookieId, order: MaintenanceOrderRecord
) -> ChangedRecord:
    """Begin a window. Raises RejectedError if ledgers would become unreadable and that is not
    accepted."""
    _check_reason(order.reason)
    await _check_known(cluster, bookie)
    if not order.accept_unavailable:
        left = await left_without(cluster, bookie, clock=SystemClock())
        if left is not None and not left.is_harmless:
            raise RejectedError(
                f"nothing was changed: {left.to_text()} To begin the window anyway, set "
                "accept_unavailable."
            )
    clock = await shared_clock(cluster)
    await open_window(cluster, bookie, duration_s=order.for_s, reason=order.reason, clock=clock)
    return ChangedRecord(
        has_changed=True,
        concerns=[
            *await window_concerns(cluster, bookie, clock=clock),
            *await leader_concerns(cluster, "maintenance windows"),
        ],
    )


async def end_maintenance(cluster: AdminSession, bookie: BookieId) -> ChangedRecord:
    await _check_known(cluster, bookie)
    has_ended = await end_window(cluster, bookie)
    concerns = await end_concerns(cluster, bookie, clock=SystemClock()) if has_ended else []
    return ChangedRecord(has_changed=has_ended, concerns=concerns)


async def _check_known(cluster: AdminSession, bookie: BookieId) -> None:
    if bookie not in await known_bookies(cluster):
        raise UnknownBookieError(
            f"the cluster knows no bookie {bookie}. /api/v1/bookies lists the known ones."
        )


def _check_reason(reason: str) -> None:
    if not reason.isprintable():
        raise WrongRequestError("reason: printable characters on one line")
