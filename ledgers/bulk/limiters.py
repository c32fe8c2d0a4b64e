"""Limiters: the conditions that must hold before entries are requested, and the waiting lines.

``flow_control`` shows all limits in one picture. This module has the mechanisms:

- A ``LimiterChain`` asks several limiters in turn for the entries of a transfer. Each limiter
  grants credit for some entries, or puts the read part into its waiting line. A ``RateLimiter``
  bounds entries and bytes per second. A ``WindowLimiter`` bounds entries and bytes in flight.
- A ``BookieWindow`` follows the rate at which one bookie replies. So a slow bookie occupies little
  of the memory that all share.
- A ``ReadBudget`` bounds the reads in flight at one bookie (rule S10). It is the last condition,
  and here a whole connection waits in line. A 4.18.0 bookie with 10,000 reads in flight, from all
  of its clients together, stops answering until it is restarted (apache/bookkeeper PR 4730). So the
  control path and the bulk path of a process share one ``ReadBudget`` per bookie.

Every waiting line is first come, first served. No newcomer overtakes, so no ledger starves. This
module does not decide how strict a limit is; ``flow_control`` and the operator's settings do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ledgers.model import BookieId

READS_IN_FLIGHT_CEILING = 500
"""Reads in flight of one process at one bookie: the upper bound of every setting and order, and the
default of ``replication.reads_in_flight_per_bookie``."""
CLUSTER_READS_IN_FLIGHT_MAX = 2_000
"""Reads in flight of all our processes at one bookie: a fifth of the number that hangs it."""
ASKED_BYTES_MAX = 8 * 1024 * 1024
BURST_S = 0.1
"""Unused credit of a rate is kept for this long."""
WINDOW_ENTRIES_MIN = 64
WINDOW_BYTES_MIN = 512 * 1024
"""The smallest window. A bookie that needs more than the timeout for so little is slow."""


class SizeEstimate(Protocol):
    """The properties of a transfer that limiters use."""

    expected_bytes: int
    """Expected size of its next entry."""
    has_started: bool
    """True once its first entry passed a limiter that charges for the start of a transfer."""


class Applicant(Protocol):
    """What limiters use of a read part: what one transfer reads from one source."""

    woken_by: set[Limiter]
    """Limiters that took the part out of their waiting line and did not see it since. There it goes
    ahead of all that wait, although it may have to wait at other limiters first."""

    @property
    def state(self) -> SizeEstimate: ...

    @property
    def quantum(self) -> int:
        """The number of entries that the part may request in its next turn."""

    def enqueue(self) -> None:
        """Give the part a turn at its source. It then applies again."""


class LimiterChain:
    """The limiters that the entries of a transfer must pass, in order, to be requested."""

    __slots__ = ("limiters",)

    def __init__(self, *limiters: Limiter) -> None:
        self.limiters = limiters

    def admit(self, part: Applicant, count: int) -> int:
        """Return how many of ``count`` entries pass. 0: the part waits at a limiter."""
        expected_bytes = part.state.expected_bytes
        for passed_count, limiter in enumerate(self.limiters):
            granted_count = limiter.admit(part, count)
            if granted_count < count:
                spare_count = count - granted_count
                for passed in self.limiters[:passed_count]:
                    passed.refund(spare_count * expected_bytes, count=spare_count)
            if granted_count == 0:
                limiter.wait(part)
                return 0
            count = granted_count
        return count

    def refund(self, entry_bytes: int, *, count: int) -> None:
        """Return the credit of admitted entries that were not requested, or not received."""
        for limiter in self.limiters:
            limiter.refund(entry_bytes, count=count)

    def release(self, entry_bytes: int, *, count: int) -> None:
        """Record the end of entries in flight: acknowledged, or read if only verified."""
        for limiter in self.limiters:
            limiter.release(entry_bytes, count=count)

    def resize(self, difference_bytes: int) -> None:
        """Correct the size of entries in flight, which is now known."""
        for limiter in self.limiters:
            limiter.resize(difference_bytes)


class Limiter(ABC):
    """Grants credit for entries, and keeps a line of read parts that wait for credit."""

    def __init__(self) -> None:
        self._waiting: deque[Applicant] = deque()

    @property
    def is_limiting(self) -> bool:
        """True if parts wait for this limiter."""
        return bool(self._waiting)

    def admit(self, part: Applicant, count: int) -> int:
        """Grant credit for up to ``count`` entries. On 0 the caller must call ``wait``."""
        is_woken = self in part.woken_by
        if self._waiting and not is_woken:
            return 0
        granted_count = self._grant(count, part.state.expected_bytes)
        if granted_count and is_woken:
            part.woken_by.remove(self)
        return granted_count

    def wait(self, part: Applicant) -> None:
        """Put the part into the waiting line: at its head if its turn came while credit was short.
        So credit accumulates for it, and small entries do not starve a large one."""
        if self in part.woken_by:
            part.woken_by.remove(self)
            self._waiting.appendleft(part)
        else:
            self._waiting.append(part)

    def _wake(self, free_count: float, free_bytes: float) -> None:
        """Give a turn to the parts that have waited longest, as far as the free credit suffices. A
        part takes its credit in the next turn of the event loop."""
        while self._waiting and free_count > 0 and free_bytes > 0:
            part = self._waiting.popleft()
            free_count -= self._entries_per_turn(part)
            free_bytes -= part.quantum * part.state.expected_bytes
            part.woken_by.add(self)
            part.enqueue()

    def _entries_per_turn(self, part: Applicant) -> int:
        """Return the credit that the next turn of the part takes, in entries."""
        return part.quantum

    @abstractmethod
    def _grant(self, count: int, entry_bytes: int) -> int:
        """Take credit for up to ``count`` entries of about ``entry_bytes`` each."""

    @abstractmethod
    def refund(self, entry_bytes: int, *, count: int) -> None:
        """Do what ``LimiterChain`` specifies, as do the next two methods."""

    @abstractmethod
    def release(self, entry_bytes: int, *, count: int) -> None: ...

    @abstractmethod
    def resize(self, difference_bytes: int) -> None: ...


class WindowLimiter(Limiter):
    """Limits the entries in flight, and their bytes: to one target, or of the whole process. Parts
    are woken when half of it is free, so that each can request many entries at once."""

    def __init__(self, window: Window, *, is_open: bool = True) -> None:
        super().__init__()
        self.window = window
        self._is_open = is_open
        self._is_waking = False
        """True if ``_wake_waiting`` is scheduled."""

    def open(self) -> None:
        self._is_open = True
        self._wake_waiting()

    def shut(self) -> None:
        """Grant nothing until ``open`` is called."""
        self._is_open = False

    def wake_if_half_free(self) -> None:
        """Wake waiting parts if there is room. Called periodically.

        Without this call parts could wait although the window is free:

        1. The window is half free. It wakes enough parts to fill it.
        2. All of them go on to wait for a source that is slow. They take no credit.
        3. No entry is released from the window, so ``release`` wakes no other part.
        """
        if self._waiting and self.window.is_half_free:
            self._wake_waiting()

    def refund(self, entry_bytes: int, *, count: int) -> None:
        self.release(entry_bytes, count=count)

    def release(self, entry_bytes: int, *, count: int) -> None:
        self.window.release(entry_bytes, count=count)
        if self._waiting and not self._is_waking and self.window.is_half_free:
            # Once for everything that is released in this turn of the loop: the window looks free
            # until the woken parts have taken their credit.
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_waiting)

    def resize(self, difference_bytes: int) -> None:
        self.window.entry_bytes += difference_bytes

    def _grant(self, count: int, entry_bytes: int) -> int:
        return self.window.take(count, entry_bytes) if self._is_open else 0

    def _wake_waiting(self) -> None:
        self._is_waking = False
        window = self.window
        self._wake(window.count_max - window.count, window.bytes_max - window.entry_bytes)


class RateLimiter(Limiter):
    """Limits entries and stored bytes per second. 0 means no limit. May be changed at any time.

    If there is any credit, the next entry passes, however large it is. The balance may become
    negative, and the next entry waits until the debt is repaid. So the average rate holds, and an
    entry larger than a burst still passes.

    ``starting_entries``: the start of a transfer costs as much as this many entries.
    """

    def __init__(self, *, burst_s: float = BURST_S, starting_entries: int = 0) -> None:
        super().__init__()
        self._entries = _TokenBucket(burst_s)
        self._bytes = _TokenBucket(burst_s)
        self._starting_entries = starting_entries
        self._timer: asyncio.TimerHandle | None = None

    def set(self, *, bytes_per_s: int, entries_per_s: int) -> None:
        """Apply new limits, also to parts that already wait."""
        now_s = asyncio.get_running_loop().time()
        self._bytes.set_rate(bytes_per_s, now_s)
        self._entries.set_rate(entries_per_s, now_s)
        self._restart_timer()

    def admit(self, part: Applicant, count: int) -> int:
        granted_count = super().admit(part, count)
        if granted_count and self._starting_entries and not part.state.has_started:
            part.state.has_started = True
            self._entries.balance -= self._starting_entries
        return granted_count

    def wait(self, part: Applicant) -> None:
        super().wait(part)
        if self._timer is None:
            self._restart_timer()

    def refund(self, entry_bytes: int, *, count: int) -> None:
        self._entries.balance += count
        self._bytes.balance += entry_bytes

    def release(self, entry_bytes: int, *, count: int) -> None:
        """Do nothing: the credit of copied entries is spent."""

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

    def _restart_timer(self) -> None:
        """Wake waiting parts when there is enough credit for a turn."""
        self.close()
        self._timer = None
        if self._waiting:
            loop = asyncio.get_running_loop()
            delay_s = max(bucket.delay_s(loop.time()) for bucket in (self._entries, self._bytes))
            self._timer = loop.call_later(delay_s, self._wake_waiting)

    def _entries_per_turn(self, part: Applicant) -> int:
        starting = 0 if part.state.has_started else self._starting_entries
        return super()._entries_per_turn(part) + starting

    def _wake_waiting(self) -> None:
        self._timer = None
        self._wake(self._entries.balance, self._bytes.balance)
        self._restart_timer()


_UNLIMITED = 1 << 62


class _TokenBucket:
    """Credit that grows by ``rate`` per second, up to one burst. A negative balance is a debt."""

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
        """Set a new rate. 0: no limit."""
        assert rate >= 0, rate
        if rate != self._rate:
            self._rate, self._since_s, self.balance = rate, now_s, self._burst(rate)

    def units(self, size: int, now_s: float) -> int:
        """Return for how many units of this size there is credit: at least 1 if there is any."""
        self._refill(now_s)
        return max(1, int(self.balance // size)) if self.balance > 0 else 0

    def delay_s(self, now_s: float) -> float:
        """Return the time until the balance is half a burst."""
        self._refill(now_s)
        lacking = self._burst(self._rate) / 2 - self.balance
        return max(0.0, lacking / self._rate) if self._rate else 0.0

    def _refill(self, now_s: float) -> None:
        grown = self.balance + self._rate * (now_s - self._since_s)
        self._since_s = now_s
        # A refund may raise the balance above a burst. That credit was earned before, so it stays.
        self.balance = min(grown, max(self.balance, self._burst(self._rate)))

    def _burst(self, rate: int) -> float:
        return max(1.0, rate * self._burst_s) if rate else _UNLIMITED


class Window:
    """Entries that may be in flight at a time: their number, and their bytes. A single entry larger
    than ``bytes_max`` passes when nothing else is in flight."""

    __slots__ = ("bytes_max", "count", "count_max", "entry_bytes")

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        assert count_max >= 1, count_max
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.count = 0
        """Entries in flight. After ``count_max`` was lowered, it may be exceeded until they end."""
        self.entry_bytes = 0
        """The size of the entries in flight, as expected when their credit was taken."""

    def take(self, count: int, entry_bytes: int) -> int:
        """Take credit for up to ``count`` entries of this size. Returns for how many."""
        taken_count, taken_bytes = self.count + count, self.entry_bytes + count * entry_bytes
        if taken_count > self.count_max or taken_bytes > self.bytes_max:
            room_bytes = max(0, self.bytes_max - self.entry_bytes)
            room_count = self.count_max - self.count
            count = min(count, room_count, room_bytes // max(1, entry_bytes))
            if count <= 0:  # an entry larger than the window passes alone
                count = 0 if self.count else 1
            taken_count, taken_bytes = self.count + count, self.entry_bytes + count * entry_bytes
        self.count, self.entry_bytes = taken_count, taken_bytes
        return count

    def release(self, entry_bytes: int, *, count: int = 1) -> None:
        """Return the credit of ``count`` entries. ``entry_bytes``: as taken for them together."""
        self.count -= count
        self.entry_bytes -= entry_bytes
        assert self.count >= 0, self.count
        assert self.entry_bytes >= 0, self.entry_bytes

    @property
    def is_half_free(self) -> bool:
        return self.count == 0 or (
            2 * self.count <= self.count_max and 2 * self.entry_bytes <= self.bytes_max
        )


class BookieWindow(Window):
    """The window of one bookie. It follows the rate at which the bookie replies, so that a slow
    bookie occupies little of the memory that all transfers share.

    It starts small. Every reply widens it by the size of the entries, up to the maximum, so it
    doubles with each round trip. ``adapt`` narrows it to what the bookie answers between two
    checks, or within two reply times if these are longer, if more than that waits for the bookie.
    So a distant bookie, whose replies take long but are many, keeps a wide window. The shortest
    reply time counts, because in the others requests wait behind our own.

    ``start``: the window begins with this multiple of the smallest one.
    """

    __slots__ = (
        "_adapted_s",
        "_bytes_cap",
        "_count_cap",
        "_count_limit",
        "_followed_count",
        "_recent_bytes",
        "_recent_count",
        "_reply_s",
        "_seen_bytes",
        "_seen_count",
        "_start",
        "replied_bytes",
        "replied_count",
    )

    def __init__(self, *, count_max: int, bytes_max: int, start: int = 1) -> None:
        super().__init__(count_max=count_max, bytes_max=bytes_max)
        self._start = start
        self._count_cap, self._bytes_cap = count_max, bytes_max
        self._count_limit = count_max
        self.replied_count = self.replied_bytes = 0
        """Entries that the bookie answered since the start, and their size."""
        self._adapted_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Start small again, because nothing is known of the next connection."""
        self._seen_count, self._seen_bytes = self.replied_count, self.replied_bytes
        self._recent_count = self._recent_bytes = 0
        self._reply_s = 0.0  # not measured
        self._follow(self._start * WINDOW_ENTRIES_MIN, self._start * WINDOW_BYTES_MIN)

    def limit_count(self, count_max: int) -> None:
        """Apply another limit as well. It may be changed at any time."""
        self._count_limit = count_max
        self._follow(self._followed_count, self.bytes_max)

    def note_replies(self, entry_bytes: int, *, count: int) -> None:
        """Widen the window, because the bookie answered these entries."""
        self.replied_count += count
        self.replied_bytes += entry_bytes
        if self._followed_count < self._count_cap or self.bytes_max < self._bytes_cap:
            self._follow(self._followed_count + count, self.bytes_max + entry_bytes)

    def note_reply_time(self, reply_s: float) -> None:
        """Record a measured reply time."""
        self._reply_s = min(self._reply_s or reply_s, reply_s)

    def adapt(self, waiting_count: int, now_s: float) -> None:
        """Narrow the window if the bookie is slow. Called at each check. ``waiting_count``: entries
        in flight that wait for this bookie. The rate falls slowly: a bookie may pause for a
        moment."""
        if now_s - self._adapted_s < 2 * self._reply_s:
            return
        self._adapted_s = now_s
        self._recent_count = max(self.replied_count - self._seen_count, self._recent_count // 2)
        self._recent_bytes = max(self.replied_bytes - self._seen_bytes, self._recent_bytes // 2)
        self._seen_count, self._seen_bytes = self.replied_count, self.replied_bytes
        if waiting_count > self._recent_count:
            self._follow(
                min(self._followed_count, self._recent_count),
                min(self.bytes_max, self._recent_bytes),
            )
        elif waiting_count == 0:
            self._follow(
                max(self._followed_count, self._start * WINDOW_ENTRIES_MIN),
                max(self.bytes_max, self._start * WINDOW_BYTES_MIN),
            )

    def _follow(self, count: int, entry_bytes: int) -> None:
        self._followed_count = min(max(count, WINDOW_ENTRIES_MIN), self._count_cap)
        self.count_max = min(self._followed_count, self._count_limit)
        self.bytes_max = min(max(entry_bytes, WINDOW_BYTES_MIN), self._bytes_cap)

    @property
    def has_room(self) -> bool:
        """True if ``add`` may be called."""
        return self.count < self.count_max and self.entry_bytes < self.bytes_max

    def add(self, count: int, entry_bytes: int) -> None:
        """Take credit for entries of this size. A batch may exceed the window: it is not split."""
        self.count += count
        self.entry_bytes += count * entry_bytes


@dataclass(slots=True, eq=False)
class Waiter:
    """A place in the line of a ReadBudget. ``turn`` is called once, when there is room."""

    entry_bytes: int
    turn: Callable[[], None]


class ReadBudget(Window):
    """The reads, and their bytes, that this process may have in flight at one bookie. First come,
    first served: no newcomer overtakes those in line. Used by one event loop only."""

    __slots__ = ("_is_turn", "_waiters")

    def __init__(self, *, count_max: int, bytes_max: int = ASKED_BYTES_MAX) -> None:
        assert count_max <= READS_IN_FLIGHT_CEILING, count_max
        super().__init__(count_max=count_max, bytes_max=bytes_max)
        self._waiters: deque[Waiter] = deque()
        self._is_turn = False

    def limit(self, count_max: int) -> None:
        """Change the number of reads. It may be exceeded until earlier reads end."""
        assert 1 <= count_max <= READS_IN_FLIGHT_CEILING, count_max
        self.count_max = count_max
        self._serve_line()

    async def acquire(self, entry_bytes: int) -> None:
        """Wait for the credit of one read of about that many bytes, and take it."""
        if self.take(1, entry_bytes):
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
                # 1. ``turn`` took the credit. 2. The task was cancelled before it resumed.
                self.release(entry_bytes)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve_line()
            raise

    def take(self, count: int, entry_bytes: int) -> int:
        """Like Window, but while others wait in line, only the caller whose turn it is gets any."""
        if self._waiters:
            if not self._is_turn:
                return 0
            # Leave most of the free credit to those that wait behind the caller.
            count = min(count, max(1, self.count_max // 8))
        return super().take(count, entry_bytes)

    def release(self, entry_bytes: int, *, count: int = 1) -> None:
        super().release(entry_bytes, count=count)
        if self._waiters:
            self._serve_line()

    def wait_in_line(self, entry_bytes: int, turn: Callable[[], None]) -> Waiter:
        """Call ``turn`` once, when ``entry_bytes`` are free and all earlier waiters are served.
        Within the call ``take`` grants credit; the next waiter gets what is left."""
        waiter = Waiter(entry_bytes, turn)
        self._waiters.append(waiter)
        return waiter

    def _serve_line(self) -> None:
        while self._waiters:
            entry_bytes = self.entry_bytes + self._waiters[0].entry_bytes
            if self.count and (self.count >= self.count_max or entry_bytes > self.bytes_max):
                break
            waiter = self._waiters.popleft()
            self._is_turn = True
            try:
                waiter.turn()
            finally:
                self._is_turn = False


class Budgets:
    """The read budgets of one process, by bookie. The cap is common, and may be changed."""

    def __init__(self, *, reads_in_flight_max: int) -> None:
        self._count_max = reads_in_flight_max
        self._reads: dict[BookieId, ReadBudget] = {}

    @property
    def reads_in_flight_max(self) -> int:
        """The cap per bookie. See the function ``reads_in_flight_max``."""
        return self._count_max

    @reads_in_flight_max.setter
    def reads_in_flight_max(self, count_max: int) -> None:
        self._count_max = count_max
        for budget in self._reads.values():
            budget.limit(count_max)

    def reads(self, bookie: BookieId) -> ReadBudget:
        budget = self._reads.get(bookie)
        if budget is None:
            budget = self._reads[bookie] = ReadBudget(count_max=self._count_max)
        return budget


def reads_in_flight_max(setting: int, *, reader_count: int) -> int:
    """Return the cap of one process per bookie. ``reader_count``: processes that share a bookie,
    namely registered nodes and fsck executors."""
    fair_share = CLUSTER_READS_IN_FLIGHT_MAX // max(1, reader_count)
    return max(1, min(setting, READS_IN_FLIGHT_CEILING, fair_share))
