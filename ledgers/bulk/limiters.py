"""What entries need before they are asked for, and the waiting lines where it lacks.

A transfer's entries pass its gates in turn: the paces of their source and of their target, the pace
that an operator set, the window of the target, the memory of the process. ``flow`` says how narrow
they are. Each grants credit for so many of them, or parks the reading until it can. First come,
first served: nobody overtakes those that wait, so that no ledger starves. (The last hurdle, the
source's own ``ReadBudget``, is no gate: there a whole connection waits in line.)

How much one process may ask of one bookie at a time (rule S10).

A 4.18.0 bookie that gets past 10,000 reads in flight, from all its clients together, answers
nothing any more until it is restarted (apache/bookkeeper PR 4730). So the control path and the bulk
path of a process draw on one ``ReadBudget`` per bookie: reads in flight, and the bytes that they
will bring.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgers.model import BookieId

if TYPE_CHECKING:
    from ledgers.bulk.transfer import AnyReading

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


BURST_S = 0.1
"""A pace may be caught up with for so long: what is not used by then is lost."""


class Gate(ABC):
    """Grants credit for entries, and parks readings while it has none."""

    def __init__(self) -> None:
        self._parked: deque[AnyReading] = deque()

    def take(self, reading: "AnyReading", count: int) -> int:
        """Credit for up to ``count`` more of its entries; 0 means: park."""
        is_let_go = self in reading.let_go_by
        if self._parked and not is_let_go:
            return 0
        granted_count = self._grant(count, reading.job.expected_bytes)
        if granted_count and is_let_go:
            reading.let_go_by.remove(self)
        return granted_count

    def park(self, reading: "AnyReading") -> None:
        """Whose turn had come, and there was too little yet, stays the first: what its entry needs
        comes together then, however large that is."""
        if self in reading.let_go_by:
            reading.let_go_by.remove(self)
            self._parked.appendleft(reading)
        else:
            self._parked.append(reading)

    def _let_go(self, free_count: float, free_bytes: float) -> None:
        """Give a turn to those that have waited longest, as many as that is enough for.

        What is let go takes its credit only in the loop's next turn.
        """
        while self._parked and free_count > 0 and free_bytes > 0:
            reading = self._parked.popleft()
            free_count -= self._weight(reading)
            free_bytes -= reading.quantum * reading.job.expected_bytes
            reading.let_go_by.add(self)
            reading.lane.enqueue(reading)

    def _weight(self, reading: "AnyReading") -> int:
        """What its next turn takes of the credit, in entries."""
        return reading.quantum

    @abstractmethod
    def _grant(self, count: int, entry_bytes: int) -> int:
        """Take credit for up to ``count`` entries of about ``entry_bytes`` each."""

    @abstractmethod
    def give_back(self, entry_bytes: int, *, count: int) -> None:
        """They were not asked for after all, or not given."""

    @abstractmethod
    def release(self, entry_bytes: int, *, count: int) -> None:
        """Their way is over: acknowledged, or, without a target, read."""

    @abstractmethod
    def resize(self, difference_bytes: int) -> None:
        """Entries weigh more, or less, than what was taken for them."""


class Way:
    """The gates that entries pass, in this order, before they are asked for."""

    __slots__ = ("_gates",)

    def __init__(self, *gates: Gate) -> None:
        self._gates = gates

    def behind(self, *gates: Gate) -> "Way":
        """The same way with others before it."""
        return Way(*gates, *self._gates)

    def take(self, reading: "AnyReading", count: int) -> int:
        """Pass with up to ``count`` entries of a reading; 0: it was parked at one of the gates."""
        expected_bytes = reading.job.expected_bytes
        for passed_count, gate in enumerate(self._gates):
            granted_count = gate.take(reading, count)
            if granted_count < count:
                spare_count = count - granted_count
                for passed in self._gates[:passed_count]:
                    passed.give_back(spare_count * expected_bytes, count=spare_count)
            if granted_count == 0:
                gate.park(reading)
                return 0
            count = granted_count
        return count

    def give_back(self, entry_bytes: int, *, count: int) -> None:
        """Entries that passed were not asked for after all, or not given."""
        for gate in self._gates:
            gate.give_back(entry_bytes, count=count)

    def release(self, entry_bytes: int, *, count: int) -> None:
        """The way of entries is over: acknowledged, or, where they are not written, read."""
        for gate in self._gates:
            gate.release(entry_bytes, count=count)

    def resize(self, difference_bytes: int) -> None:
        """Entries on their way weigh more, or less, than what was taken for them."""
        for gate in self._gates:
            gate.resize(difference_bytes)


class WindowGate(Gate):
    """Entries on their way at a time, and their bytes: of a target, or of the whole process.

    Those that were parked go on whenever half of it is free, so that they can ask for many at once.
    """

    def __init__(self, window: Window, *, is_open: bool = True) -> None:
        super().__init__()
        self.window = window
        self._is_open = is_open
        self._is_unparking = False
        """Whether ``_unpark`` is about to be called."""

    def open(self) -> None:
        self._is_open = True
        self._unpark()

    def shut(self) -> None:
        """Grant nothing until it is opened again."""
        self._is_open = False

    @property
    def is_limiting(self) -> bool:
        """Whether readings wait for it."""
        return bool(self._parked)

    def unpark_if_free(self) -> None:
        """Those that were let go may all wait for a source that is slow."""
        if self._parked and self.window.is_half_free:
            self._unpark()

    def give_back(self, entry_bytes: int, *, count: int) -> None:
        self.release(entry_bytes, count=count)

    def release(self, entry_bytes: int, *, count: int) -> None:
        self.window.release(entry_bytes, count=count)
        if self._parked and not self._is_unparking and self.window.is_half_free:
            # Once for all that comes back in this turn of the loop: until what is let go has taken
            # its credit the window looks free.
            self._is_unparking = True
            asyncio.get_running_loop().call_soon(self._unpark)

    def resize(self, difference_bytes: int) -> None:
        self.window.entry_bytes += difference_bytes

    def _grant(self, count: int, entry_bytes: int) -> int:
        return self.window.take(count, entry_bytes) if self._is_open else 0

    def _unpark(self) -> None:
        self._is_unparking = False
        self._let_go(self.window.free_count, self.window.bytes_max - self.window.entry_bytes)


class Pace(Gate):
    """How many entries, and stored bytes, a second may be copied. 0: no limit. May be set at any
    time.

    The first entry for which there is any credit passes, however large, and the debt is paid off
    before the next: so the average holds, and an entry larger than a burst is not stuck.

    ``starting_entries``: a transfer counts as so many entries more, when the first of it passes.
    """

    def __init__(self, *, burst_s: float = BURST_S, starting_entries: int = 0) -> None:
        super().__init__()
        self._entries = _Bucket(burst_s)
        self._bytes = _Bucket(burst_s)
        self._starting_entries = starting_entries
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_limiting(self) -> bool:
        """Whether readings wait for it."""
        return bool(self._parked)

    def set(self, *, bytes_per_s: int, entries_per_s: int) -> None:
        """From now on, for those too that wait already."""
        now_s = asyncio.get_running_loop().time()
        self._bytes.set_rate(bytes_per_s, now_s)
        self._entries.set_rate(entries_per_s, now_s)
        self._wait()

    def take(self, reading: "AnyReading", count: int) -> int:
        granted_count = super().take(reading, count)
        if granted_count and self._starting_entries and not reading.job.is_begun:
            reading.job.is_begun = True
            self._entries.balance -= self._starting_entries
        return granted_count

    def park(self, reading: "AnyReading") -> None:
        super().park(reading)
        if self._timer is None:
            self._wait()

    def give_back(self, entry_bytes: int, *, count: int) -> None:
        self._entries.balance += count
        self._bytes.balance += entry_bytes

    def release(self, entry_bytes: int, *, count: int) -> None:
        """What was copied is spent."""

    def resize(self, difference_bytes: int) -> None:
        self._bytes.balance -= difference_bytes

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _grant(self, count: int, entry_bytes: int) -> int:
        if not (self._entries.is_limited or self._bytes.is_limited):
            return count
        now_s = asyncio.get_running_loop().time()
        count = min(count, self._entries.units(1, now_s), self._bytes.units(entry_bytes, now_s))
        self._entries.balance -= count
        self._bytes.balance -= count * entry_bytes
        return count

    def _wait(self) -> None:
        """Until something worth a turn has come together."""
        self.close()
        self._timer = None
        if self._parked:
            loop = asyncio.get_running_loop()
            delay_s = max(bucket.delay_s(loop.time()) for bucket in (self._entries, self._bytes))
            self._timer = loop.call_later(delay_s, self._unpark)

    def _weight(self, reading: "AnyReading") -> int:
        starting = 0 if reading.job.is_begun else self._starting_entries
        return super()._weight(reading) + starting

    def _unpark(self) -> None:
        self._timer = None
        self._let_go(self._entries.balance, self._bytes.balance)
        self._wait()


_UNLIMITED = 1 << 62


class _Bucket:
    """Credit that grows by ``rate`` a second, up to a burst of it; below 0 it is a debt."""

    __slots__ = ("_burst_s", "_rate", "_since_s", "balance")

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._rate = 0
        self._since_s = 0.0
        self.balance: float = _UNLIMITED

    @property
    def is_limited(self) -> bool:
        return self._rate > 0

    def set_rate(self, rate: int, now_s: float) -> None:
        """0: no limit."""
        assert rate >= 0, rate
        if rate != self._rate:
            self._rate, self._since_s, self.balance = rate, now_s, self._burst(rate)

    def units(self, size: int, now_s: float) -> int:
        """How many of that size there is credit for: at least one while there is any credit."""
        self._refill(now_s)
        return max(1, int(self.balance // size)) if self.balance > 0 else 0

    def delay_s(self, now_s: float) -> float:
        """Until half a burst is there."""
        self._refill(now_s)
        lacking = self._burst(self._rate) / 2 - self.balance
        return max(0.0, lacking / self._rate) if self._rate else 0.0

    def _refill(self, now_s: float) -> None:
        grown = self.balance + self._rate * (now_s - self._since_s)
        self._since_s = now_s
        # What was given back may exceed a burst: it had been saved up once already.
        self.balance = min(grown, max(self.balance, self._burst(self._rate)))

    def _burst(self, rate: int) -> float:
        return max(1.0, rate * self._burst_s) if rate else _UNLIMITED
