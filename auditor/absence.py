"""When an absent bookie counts as lost: after the recovery delay, counted for each bookie by itself.

While a maintenance window stands, its bookie is away on purpose, which is no absence. So the delay counts
from the end of the window or from the bookie's going, whichever is later: an operator who ends a window by
hand, or who forgot a bookie in it, has the same time to act as after any other loss.
"""

import math
from collections.abc import Collection, Mapping

from ledgers.metadata import BookieId


def still_absent(
    absent_since_s: Mapping[BookieId, float],
    *,
    known: Collection[BookieId],
    available: Collection[BookieId],
    excused: Collection[BookieId] = (),
    now_s: float,
) -> dict[BookieId, float]:
    """Since when each known bookie is away: those that came back are dropped, new ones begin now.

    ``excused``: bookies under maintenance, which are not away.
    """
    return {
        bookie: absent_since_s.get(bookie, now_s)
        for bookie in known
        if bookie not in available and bookie not in excused
    }


def lost_bookies(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    overruled_s: float = -math.inf,
) -> frozenset[BookieId]:
    """Bookies absent for at least the recovery delay, or since ``overruled_s`` or before.

    Times are monotonic seconds. ``overruled_s``: when somebody last asked not to wait any longer.
    """
    assert delay_s >= 0
    return frozenset(
        bookie
        for bookie, since_s in absent_since_s.items()
        if now_s - since_s >= delay_s or since_s <= overruled_s
    )


def next_loss_s(
    absent_since_s: Mapping[BookieId, float], *, now_s: float, delay_s: float
) -> float | None:
    """Seconds until the next absent bookie counts as lost; None when there is none to wait for."""
    waits_s = [
        since_s + delay_s - now_s
        for since_s in absent_since_s.values()
        if now_s - since_s < delay_s
    ]
    return min(waits_s, default=None)
