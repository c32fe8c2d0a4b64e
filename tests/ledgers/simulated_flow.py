"""Nodes that copy to simulated bookies under their flow control, beside a client, in virtual
time."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from ledgers.bulk.flow_control import FlowControl, ReplyTimes
from ledgers.bulk.limiters import Limiter, LimiterChain, Window, WindowLimiter
from ledgers.model import BookieId

QUANTUM = 16
ENTRY_BYTES = 1_000
WINDOW_ENTRIES = 1_000


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedBookie:
    """A bookie that serves one entry after the other, in the order of arrival."""

    bookie_id: BookieId
    entries_per_s: float = 40_000
    hangs: bool = False
    copied: Counter[int] = field(default_factory=Counter)
    """Entries of copies, by the tenth of a second in which they were served."""
    _free_s: float = 0.0
    """Time at which it has served all requests that were sent to it."""

    def serve(self, count: int) -> float:
        """Return the seconds after which this number of further entries is served."""
        self._free_s = max(self._free_s, now_s()) + count / self.entries_per_s
        return self._free_s - now_s()

    def copied_between(self, first_s: float, last_s: float) -> float:
        """Return the entries per second."""
        count = sum(n for at, n in self.copied.items() if first_s * 10 <= at < last_s * 10)
        return count / (last_s - first_s)


@dataclass(slots=True, eq=False)
class Copying:
    """The endless copies of one node to one bookie. It is its own transfer state."""

    bookie: SimulatedBookie
    flow: FlowControl
    quantum: int = QUANTUM
    expected_bytes: int = ENTRY_BYTES
    woken_by: set[Limiter] = field(default_factory=set)
    has_started: bool = False
    is_queued: bool = False
    copied_count: int = 0
    times: ReplyTimes = field(default_factory=lambda: ReplyTimes(cap=WINDOW_ENTRIES))
    window: WindowLimiter = field(
        default_factory=lambda: WindowLimiter(Window(count_max=WINDOW_ENTRIES, bytes_max=8 << 20))
    )

    @property
    def state(self) -> "Copying":
        return self

    def enqueue(self) -> None:
        self.is_queued = True
        asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self.is_queued = False
        of_bookie = self.flow.of(self.bookie.bookie_id)
        is_by_times = of_bookie.limits.is_by_reply_times
        self.window.window.count_max = self.times.limit if is_by_times else WINDOW_ENTRIES
        chain = LimiterChain(of_bookie.adds, self.window)
        if count := chain.admit(self, self.quantum):
            if not self.bookie.hangs:
                latency_s = self.bookie.serve(count)
                asyncio.get_running_loop().call_later(
                    latency_s, self._acknowledge, count, latency_s
                )
            self.enqueue()

    def _acknowledge(self, count: int, latency_s: float) -> None:
        self.copied_count += count
        self.bookie.copied[int(now_s() * 10)] += count
        is_limiting = self.window.is_limiting
        self.times.note_reply(latency_s, is_limiting=is_limiting, now_s=now_s())
        self.window.release(count * ENTRY_BYTES, count=count)


@dataclass(slots=True, kw_only=True)
class Client:
    """A client that adds entries to one bookie on a fixed schedule."""

    bookie: SimulatedBookie
    adds_per_s: float = 500
    waits_s: list[float] = field(default_factory=list)

    async def write(self, duration_s: float) -> None:
        for _ in range(round(duration_s * self.adds_per_s)):
            self.waits_s.append(self.bookie.serve(1))
            await asyncio.sleep(1 / self.adds_per_s)

    def p99_s(self) -> float:
        return sorted(self.waits_s)[int(len(self.waits_s) * 0.99)]


def start_copying(bookies: list[SimulatedBookie], *, node_count: int = 1) -> list[list[Copying]]:
    """Let each node copy to each of the bookies; return the copies by node."""
    nodes = []
    for _ in range(node_count):
        flow = FlowControl()
        nodes.append([Copying(bookie, flow) for bookie in bookies])
    for copyings in nodes:
        for copying in copyings:
            copying.enqueue()
    return nodes
