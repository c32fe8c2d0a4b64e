"""Rule S10: what one process may ask of one bookie, shared fairly between its tasks."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from ledgers.bulk.limiters import (
    Budgets,
    Limiter,
    LimiterChain,
    RateLimiter,
    ReadBudget,
    Window,
    WindowLimiter,
    reads_in_flight_max,
)
from ledgers.model import BookieId
from tests.replication.cluster import in_virtual_time


@pytest.mark.parametrize(
    ("setting", "reader_count", "expected"),
    [
        pytest.param(64, 1, 64, id="the setting rules a small cluster"),
        pytest.param(64, 31, 64, id="just before the share is smaller"),
        pytest.param(64, 40, 50, id="readers share 2,000"),
        pytest.param(64, 400, 5, id="a large cluster"),
        pytest.param(64, 5_000, 1, id="never less than one"),
        pytest.param(64, 0, 64, id="no reader counted yet"),
        pytest.param(10_000, 1, 500, id="never more than the ceiling"),
        pytest.param(0, 1, 1, id="zero would stop all repair"),
    ],
)
def test_the_bound_is_the_setting_or_the_fair_share(
    setting: int, reader_count: int, expected: int
) -> None:
    assert reads_in_flight_max(setting, reader_count=reader_count) == expected


async def _settle() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_virtual_time
async def test_no_waiter_overtakes_a_large_read() -> None:
    budget = ReadBudget(count_max=10, bytes_max=100)
    budget.take(1, 50)
    large = asyncio.create_task(budget.acquire(90))
    await _settle()

    assert not budget.take(1, 1)

    budget.release(50)
    await large
    assert budget.take(1, 10)


@in_virtual_time
async def test_a_higher_bound_serves_waiters_at_once() -> None:
    budgets = Budgets(reads_in_flight_max=1)
    budget = budgets.reads(BookieId("bookie-1:3181"))
    await budget.acquire(1)
    waiting = asyncio.create_task(budget.acquire(1))
    await _settle()
    assert not waiting.done()

    budgets.reads_in_flight_max = 2

    await waiting


@pytest.mark.parametrize("seed", range(5))
@in_virtual_time
async def test_limits_hold_and_all_are_served_under_random_load(seed: int) -> None:
    random_ = random.Random(seed)
    budget = ReadBudget(count_max=4, bytes_max=1_000)
    in_flight: list[int] = []

    async def read() -> None:
        entry_bytes = random_.choice([1, 10, 400, 999, 5_000])
        await budget.acquire(entry_bytes)
        in_flight.append(entry_bytes)
        assert len(in_flight) <= 4
        assert sum(in_flight) <= 1_000 or len(in_flight) == 1
        try:
            for _ in range(random_.randrange(4)):
                await asyncio.sleep(0)
        finally:
            in_flight.remove(entry_bytes)
            budget.release(entry_bytes)

    tasks = [asyncio.create_task(read()) for _ in range(200)]
    for task in random_.sample(tasks, 30):
        for _ in range(random_.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    failed = [t for t in tasks if not t.cancelled() and t.exception()]
    assert not failed, failed[0].exception()
    assert (budget.count, budget.entry_bytes, len(budget._waiters)) == (0, 0, 0)


# --- Limiters that transfers to two targets share -------------------------------------------------


QUANTUM = 16
ENTRY_BYTES = 1_000
PACE_PER_S = 12_000
"""An operator's rate limit for all targets together."""


@dataclass(slots=True, eq=False)
class Copying:
    """A part of a transfer without end, whose target acknowledges after a while. It is its own
    transfer state."""

    chain: LimiterChain
    reply_s: float
    quantum: int = QUANTUM
    expected_bytes: int = ENTRY_BYTES
    woken_by: set[Limiter] = field(default_factory=set)
    has_started: bool = False
    acknowledged_count: int = 0
    is_queued: bool = False
    flying_count: int = 0

    @property
    def state(self) -> "Copying":
        return self

    def enqueue(self) -> None:
        self.is_queued = True
        asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self.flying_count >= 4 * QUANTUM:
            self.is_queued = False
        elif count := self.chain.admit(self, self.quantum):
            self.flying_count += count
            asyncio.get_running_loop().call_later(self.reply_s, self._acknowledge, count)
            self.enqueue()

    def _acknowledge(self, count: int) -> None:
        self.flying_count -= count
        self.acknowledged_count += count
        self.chain.release(count * self.expected_bytes, count=count)
        if not self.is_queued:
            self.enqueue()


@pytest.mark.parametrize(
    ("copying_counts", "slow_window", "slow_reply_s"),
    [
        pytest.param((40, 40), 62, 0.01, id="as many to each"),
        pytest.param((40, 40), QUANTUM, 0.01, id="a window of one turn"),
        pytest.param((80, 20), 32, 0.02, id="a few to the slow target"),
        pytest.param((50, 50), 250, 0.05, id="a distant target"),
    ],
)
@in_virtual_time
async def test_a_small_window_is_not_starved_by_another_target(
    copying_counts: tuple[int, int], slow_window: int, slow_reply_s: float
) -> None:
    """The other target uses the whole rate."""
    pace = RateLimiter()
    pace.set(entries_per_s=PACE_PER_S, bytes_per_s=0)
    memory = WindowLimiter(Window(count_max=32_768, bytes_max=32 << 20))
    windows = [WindowLimiter(Window(count_max=n, bytes_max=8 << 20)) for n in (1_000, slow_window)]
    fast, slow = (
        [Copying(LimiterChain(pace, window, memory), reply_s) for _ in range(count)]
        for window, reply_s, count in zip(
            windows, (0.003, slow_reply_s), copying_counts, strict=True
        )
    )
    for copying in (*fast, *slow):
        copying.enqueue()
    for _ in range(40):
        await asyncio.sleep(0.25)
        for window in (*windows, memory):
            window.wake_if_half_free()
    pace.close()

    assert all(copying.acknowledged_count for copying in slow)
    could_s = slow_window / slow_reply_s  # were it alone
    slow_rate = sum(copying.acknowledged_count for copying in slow) / 10
    assert slow_rate > 0.15 * min(could_s, PACE_PER_S / 2)


@pytest.mark.parametrize(
    "share", [0.6, 1.0, 1.2], ids=["most of the window", "all", "more than all"]
)
@in_virtual_time
async def test_an_entry_that_needs_most_of_a_window_gets_it(share: float) -> None:
    window = WindowLimiter(Window(count_max=1_000, bytes_max=100 * ENTRY_BYTES))
    small = [Copying(LimiterChain(window), 0.003 + 0.0001 * n) for n in range(20)]
    entry_bytes = int(share * 100 * ENTRY_BYTES)
    large = Copying(LimiterChain(window), 0.01, quantum=1, expected_bytes=entry_bytes)
    for copying in (*small, large):
        copying.enqueue()

    await asyncio.sleep(10)

    assert large.acknowledged_count > 10
    assert all(copying.acknowledged_count > 10 for copying in small)
