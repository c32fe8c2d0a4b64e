"""Changes the cluster by order of a request, as the commands of the same names do.

Each function works in a session of its own, which the caller opens. ``concerns`` in the answers are
the sentences that the command would print beside its result.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from daemon.admin_session import AdminSession, shared_clock
from daemon.http.records import (
    ChangedRecord,
    DisableOrderRecord,
    DrainOrderRecord,
    HoldOrderRecord,
    MaintenanceOrderRecord,
)
from daemon.operations import drains, maintenance
from daemon.operations.bookies import check_known
from daemon.operations.errors import UnknownBookieError as UnknownBookieError
from daemon.operations.holds import HoldStateRecord, begin_hold, read_hold, release_hold
from daemon.operations.orders import leader_concerns, node_concerns
from daemon.operations.switch import SwitchRecord, switch_off, switch_on
from ledgers.clock import SystemClock
from ledgers.errors import RejectedError
from ledgers.model import BookieId


class WrongRequestError(Exception):
    """The request is wrong: a value is out of range."""


async def begin(cluster: AdminSession, order: HoldOrderRecord) -> HoldStateRecord:
    """Begin a safety hold. Raises ConflictError, WrongRequestError."""
    _check_reason(order.reason)
    clock = await shared_clock(cluster)
    await begin_hold(cluster, duration_s=order.for_s, reason=order.reason, clock=clock)
    return await read_hold(cluster, clock=clock)


async def end(cluster: AdminSession, *, accepts_lost: bool) -> HoldStateRecord:
    """End the safety hold. Raises RejectedError if bookies are absent and that is not accepted."""
    clock = await shared_clock(cluster)
    state, is_refused = await release_hold(cluster, accepts_lost=accepts_lost, clock=clock)
    if is_refused:
        raise RejectedError(
            f"nothing was changed: {state.absent_text}. Their ledgers would be marked. Start the "
            "bookies, or add accept_lost=true."
        )
    return state


async def disable(cluster: AdminSession, order: DisableOrderRecord) -> SwitchRecord:
    _check_reason(order.reason)
    return await switch_off(cluster, duration_s=order.for_s, reason=order.reason)


async def enable(cluster: AdminSession) -> SwitchRecord:
    return await switch_on(cluster)


async def begin_drain(
    cluster: AdminSession, bookie: BookieId, order: DrainOrderRecord
) -> ChangedRecord:
    """Order the drain. Raises RejectedError if the bookie is absent and that is not accepted."""
    before = (await drains.read_drains(cluster)).orders.draining.get(bookie)
    with _refusals_name("accept_absent"):
        concerns = await drains.begin_drains(
            cluster,
            [bookie],
            may_fence=order.fence_open,
            accepts_absent=order.accept_absent,
            clock=SystemClock(),
        )
    after = (await drains.read_drains(cluster)).orders.draining.get(bookie)
    return ChangedRecord(
        has_changed=before != after,
        concerns=[*concerns, *await node_concerns(cluster, ignored="drains")],
    )


async def end_drain(cluster: AdminSession, bookie: BookieId) -> ChangedRecord:
    await check_known(cluster, [bookie])
    cancelled = await drains.cancel_drains(cluster, [bookie])
    return ChangedRecord(has_changed=bool(cancelled), concerns=[])


async def begin_maintenance(
    cluster: AdminSession, bookie: BookieId, order: MaintenanceOrderRecord
) -> ChangedRecord:
    """Begin a window. Raises RejectedError if ledgers would become unreadable and that is not
    accepted."""
    _check_reason(order.reason)
    with _refusals_name("accept_unavailable"):
        concerns = await maintenance.begin_window(
            cluster,
            bookie,
            duration_s=order.for_s,
            reason=order.reason,
            accepts_unavailable=order.accept_unavailable,
            clock=SystemClock(),
        )
    return ChangedRecord(
        has_changed=True,
        concerns=[*concerns, *await leader_concerns(cluster, "maintenance windows")],
    )


async def end_maintenance(cluster: AdminSession, bookie: BookieId) -> ChangedRecord:
    await check_known(cluster, [bookie])
    has_ended, concerns = await maintenance.end_window(cluster, bookie), list[str]()
    if has_ended:
        concerns = await maintenance.end_concerns(cluster, bookie, clock=SystemClock())
    return ChangedRecord(has_changed=has_ended, concerns=concerns)


@contextmanager
def _refusals_name(key: str) -> Iterator[None]:
    """Add to a refusal which key of the request confirms it."""
    try:
        yield
    except RejectedError as error:
        raise RejectedError(f"nothing was changed: {error} To do it anyway, set {key}.") from error


def _check_reason(reason: str) -> None:
    if not reason.isprintable():
        raise WrongRequestError("reason: printable characters on one line")
