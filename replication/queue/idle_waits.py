"""How long a worker waits between two looks at the queue: the longer, the more workers share it.

A look costs ZooKeeper the same whether there is anything to do or not, so what is bounded is the
looks of all workers together, not those of each. What is soon to be seen is not left to chance: the
first mark in an empty tree, a bookie that comes or goes, and a worker's own last repair wake it at
once.
"""

WAIT_MIN_S = 0.05
"""The first wait after something happened; each further one is twice as long, up to the longest.
The marks come after what wakes us: the bookie that went, the first directory of the mark tree."""
BUSY_LOOKS_PER_S = 200
"""Of all workers together, right after something happened. More than ten workers wait longer at
first."""
IDLE_LOOKS_PER_S = 20
"""Of all workers together, while nothing happens. Up to forty wait no longer than is set by
default."""

EMPTY_QUEUE_FACTOR = 5
"""So many times as long an idle worker waits while no ledger at all is marked: the first mark wakes
it."""


def longest_wait_s(idle_wait_s: float, *, worker_count: int) -> float:
    """``idle_wait_s`` is the setting, which few workers keep to."""
    assert worker_count >= 1, worker_count
    return max(idle_wait_s, worker_count / IDLE_LOOKS_PER_S)


class IdleWaits:
    """One worker's waits."""

    def __init__(self, idle_wait_s: float) -> None:
        self._idle_wait_s = idle_wait_s
        self._doubled_s = 0.0

    def restart(self) -> None:
        """Something happened, of which there may be more."""
        self._doubled_s = 0.0

    def next_s(self, *, worker_count: int, is_queue_empty: bool) -> float:
        shortest_s = max(WAIT_MIN_S, worker_count / BUSY_LOOKS_PER_S)
        longest_s = longest_wait_s(self._idle_wait_s, worker_count=worker_count)
        if is_queue_empty:
            longest_s *= EMPTY_QUEUE_FACTOR
        wait_s = min(max(shortest_s, self._doubled_s), longest_s)
        self._doubled_s = 2 * wait_s
        return wait_s
