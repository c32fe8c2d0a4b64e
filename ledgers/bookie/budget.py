"""How much one process may ask of one bookie at a time (rule S10).

A 4.18.0 bookie that gets past 10,000 reads in flight, from all its clients together, answers
nothing any more until it is restarted (apache/bookkeeper PR 4730). So the control path and the bulk
path of a process draw on one ``ReadBudget`` per bookie: reads in flight, and the bytes that they
will bring.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ledgers.metadata import BookieId

READS_IN_FLIGHT_DEFAULT = 64
READS_IN_FLIGHT_CEILING = 500
CLUSTER_READS_IN_FLIGHT_MAX = 2_000
"""Of all readers together at one bookie: a fifth of what wedges it, the rest is its clients'."""
ASKED_BYTES_MAX = 8 * 1024 * 1024


def reads_in_flight_max(setting: int, *, reader_count: int) -> int:
    """The cap of one process when ``reader_count`` of them (live nodes, fsck executors) share a
    bookie."""
    fair_share = CLUSTER_READS_IN_FLIGHT_MAX // max(1, reader_count)
    return max(1, min(setting, READS_IN_FLIGHT_CEILING, fair_share))


class Window:
    """What may be outstanding somewhere: a number of entries, and the bytes that they weigh.

    A single entry larger than ``bytes_max`` is let through when nothing else is outstanding.
    """

    __slots__ = ("_count_max", "bytes_max", "count", "entry_bytes")

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        assert count_max >= 1, count_max
        self._count_max = count_max
        self.bytes_max = bytes_max
        self.count = 0
        """Outstanding now. May exceed a ``count_max`` that was lowered, until they end."""
        self.entry_bytes = 0
        """What they were expected to weigh when they were taken."""

    def take(self, count: int, entry_bytes: int) -> int:
        """Take the credit of up to ``count`` entries of about ``entry_bytes`` each; how many were
        free."""
        taken_count, taken_bytes = self.count + count, self.entry_bytes + count * entry_bytes
        if taken_count > self._count_max or taken_bytes > self.bytes_max:
            count = self._fitting(count, entry_bytes)
            taken_count, taken_bytes = self.count + count, self.entry_bytes + count * entry_bytes
        self.count, self.entry_bytes = taken_count, taken_bytes
        return count

    def _fitting(self, count: int, entry_bytes: int) -> int:
        """How many of so many entries there is room for."""
        fitting_count = min(
            count,
            self._count_max - self.count,
            max(0, self.bytes_max - self.entry_bytes) // max(1, entry_bytes),
        )
        if fitting_count > 0:
            return fitting_count
        return 0 if self.count else 1  # larger than the window: alone

    def release(self, entry_bytes: int, *, count: int = 1) -> None:
        """Give back ``count`` entries that took ``entry_bytes`` together, whatever they weighed."""
        self.count -= count
        self.entry_bytes -= entry_bytes
        assert self.count >= 0, self.count
        assert self.entry_bytes >= 0, self.entry_bytes

    @property
    def count_max(self) -> int:
        return self._count_max

    @count_max.setter
    def count_max(self, count_max: int) -> None:
        assert count_max >= 1, count_max
        self._count_max = count_max

    @property
    def free_count(self) -> int:
        return self._count_max - self.count

    @property
    def is_half_free(self) -> bool:
        return self.count == 0 or (
            2 * self.count <= self._count_max and 2 * self.entry_bytes <= self.bytes_max
        )


@dataclass(slots=True, eq=False)
class Waiter:
    """Someone in line. ``turn`` is called once, when ``entry_bytes`` fit."""

    entry_bytes: int
    turn: Callable[[], None]


class ReadBudget(Window):
    """The reads, and the bytes they ask for, that this process may have outstanding at one bookie.

    First come, first served: while anyone waits in line, nobody else takes credit. For one loop's
    use.
    """

    __slots__ = ("_is_turn", "_waiters")

    def __init__(
        self, *, count_max: int = READS_IN_FLIGHT_DEFAULT, bytes_max: int = ASKED_BYTES_MAX
    ) -> None:
        assert count_max <= READS_IN_FLIGHT_CEILING, count_max
        super().__init__(count_max=count_max, bytes_max=bytes_max)
        self._waiters: deque[Waiter] = deque()
        self._is_turn = False

    @property
    def count_max(self) -> int:
        return self._count_max

    @count_max.setter
    def count_max(self, count_max: int) -> None:
        assert 1 <= count_max <= READS_IN_FLIGHT_CEILING, count_max
        self._count_max = count_max
        self._admit()

    async def acquire(self, entry_bytes: int) -> None:
        """Wait for the credit of one read of about that many bytes."""
        if self.try_acquire(entry_bytes):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def turn() -> None:
            if not granted.done():
                self.take(1, entry_bytes)
                granted.set_result(None)

        waiter = self.wait_in_line(entry_bytes, turn)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(entry_bytes)  # the turn came just before the cancellation
            self.leave_line(waiter)
            raise

    def try_acquire(self, entry_bytes: int) -> bool:
        """Take the credit of one read if it is free and nobody waits for it."""
        return self.take(1, entry_bytes) == 1

    def take(self, count: int, entry_bytes: int) -> int:
        """As any window's, but 0 while others wait in line, except in the caller's own turn."""
        if self._waiters:
            if not self._is_turn:
                return 0
            # Others are behind: leave them the larger part of what is or becomes free.
            count = min(count, max(1, self._count_max // 8))
        return super().take(count, entry_bytes)

    def release(self, entry_bytes: int, *, count: int = 1) -> None:
        super().release(entry_bytes, count=count)
        if self._waiters:
            self._admit()

    def wait_in_line(self, entry_bytes: int, turn: Callable[[], None]) -> Waiter:
        """Have ``turn`` called, once, when ``entry_bytes`` are free and all who came before are
        served.

        Within that call ``take`` gives credit; what the caller does not take goes to the next.
        """
        waiter = Waiter(entry_bytes, turn)
        self._waiters.append(waiter)
        return waiter

    def leave_line(self, waiter: Waiter) -> None:
        """Give up the place in line; harmless when the turn is over."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._admit()

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].entry_bytes):
            waiter = self._waiters.popleft()
            self._is_turn = True
            try:
                waiter.turn()
            finally:
                self._is_turn = False

    def _fits(self, entry_bytes: int) -> bool:
        if self.count == 0:
            return True
        return self.count < self._count_max and self.entry_bytes + entry_bytes <= self.bytes_max


class Budgets:
    """The read budgets of one process, by bookie. All share one cap, changed at run time."""

    def __init__(self, *, reads_in_flight_max: int = READS_IN_FLIGHT_DEFAULT) -> None:
        self._count_max = reads_in_flight_max
        self._reads: dict[BookieId, ReadBudget] = {}

    @property
    def reads_in_flight_max(self) -> int:
        """Per bookie. What ``reads_in_flight_max()`` gives for the settings and the live nodes."""
        return self._count_max

    @reads_in_flight_max.setter
    def reads_in_flight_max(self, count_max: int) -> None:
        self._count_max = count_max
        for budget in self._reads.values():
            budget.count_max = count_max

    def reads(self, bookie: BookieId) -> ReadBudget:
        budget = self._reads.get(bookie)
        if budget is None:
            budget = self._reads[bookie] = ReadBudget(count_max=self._count_max)
        return budget
