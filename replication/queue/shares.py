"""Which worker a ledger falls to, so that many nodes do not reach for the same one.

Every worker knows the others (``membership``) and comes to the same answer by itself: consistent
hashing, each worker at many points of a circle, a ledger falling to the next point from its own.
When a worker comes or goes only its own ledgers change hands; a node that has not heard of it yet
loses a few races, which cost a request each. A hash for each pair of ledger and worker would say
the same, but a look lists 20,000 ledgers, and 400 nodes are a real size.
"""

import bisect
from collections.abc import Collection

POINTS_PER_WORKER = 64
"""Shares differ by about an eighth then."""

_MASK = 2**64 - 1


class Shares:
    """The ledgers of each of ``workers`` (session ids), seen by ``own``. Immutable."""

    def __init__(self, workers: Collection[int], *, own: int) -> None:
        self.workers = frozenset({*workers, own})
        placed = sorted(
            (_mixed(_mixed(worker) + number), worker == own)
            for worker in self.workers
            for number in range(POINTS_PER_WORKER)
        )
        self._points = [point for point, _ in placed]
        self._is_own = [is_own for _, is_own in placed]

    def is_own(self, ledger_id: int) -> bool:
        if len(self.workers) == 1:
            return True
        position = bisect.bisect_left(self._points, _mixed(ledger_id))
        return self._is_own[position % len(self._points)]


def _mixed(number: int) -> int:
    """64 bits of which each depends on all of the number's. The same in every release and
    process."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
