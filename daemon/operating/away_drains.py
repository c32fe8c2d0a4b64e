"""What a drain means for a bookie that is away, before it is ordered: nothing can be read from it,
and as one that is lost its ledgers are copied anyway.
"""

from collections.abc import Sequence

from auditor.delay import read_delay
from daemon.operating.bookie_ids import registered_bookies
from daemon.operating.bookies import loss_due_text, maintenance_text
from daemon.operating.progress import duration_text
from daemon.status.leader import losses_due_ms
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.metadata import BookieId
from replication.cluster.order_book import OrderBook
from replication.cluster.orders import MaintenanceWindow


async def away_concerns(
    cluster: Visit, bookies: Sequence[BookieId], *, clock: Clock
) -> dict[BookieId, str]:
    """A sentence for each of these that is away; none where no bookie is registered at all (rule
    S8)."""
    available = (await registered_bookies(cluster)).available
    away = [bookie for bookie in dict.fromkeys(bookies) if bookie not in available]
    if not away or not available:
        return {}
    now_ms = clock.wall_ms()
    windows = (await OrderBook(cluster.store, cluster.ur).read()).at(now_ms).maintenance
    due_ms = await losses_due_ms(cluster, away, clock=clock)
    default_s = cluster.settings.auditor.lost_bookie_recovery_delay_s
    delay = await read_delay(cluster.store, cluster.ur, default_s=default_s)
    losses = {
        bookie: _loss_text(at_ms, delay_s=delay.delay_s, now_ms=now_ms)
        for bookie, at_ms in due_ms.items()
    }
    return {
        bookie: resting_text(bookie, windows[bookie], now_ms=now_ms)
        if bookie in windows
        else gone_text(bookie, losses.get(bookie, ""))
        for bookie in away
    }


def resting_text(bookie: BookieId, window: MaintenanceWindow, *, now_ms: int) -> str:
    """Of one that is away on purpose."""
    return (
        f"{bookie} is away, {maintenance_text(window, now_ms=now_ms)}: nothing of it is moved before the window is "
        "over, or it is back"
    )


def gone_text(bookie: BookieId, loss: str) -> str:
    """``loss``: when it will be lost; empty where it is."""
    without = (
        "its ledgers are marked, and copied to others from their other copies, without any drain"
    )
    advice = f"if it is not to come back: bookmender bookie decommission {bookie}"
    if not loss:
        return f"{bookie} is away, and counts as lost: {without}; {advice}"
    return (
        f"{bookie} is away, so nothing can be read from it, and {loss}: then {without}; a drain does not wait for "
        f"that, and has open ledgers on it closed as if it were lost; {advice}"
    )


def _loss_text(due_ms: int | None, *, delay_s: int, now_ms: int) -> str:
    """``due_ms``: None where nobody counts."""
    if due_ms is None:
        return f"lost after the recovery delay of {duration_text(delay_s)}"
    return loss_due_text(due_ms, now_ms=now_ms)
