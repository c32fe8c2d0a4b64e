"""Rule S10: what one process may ask of one bookie, shared fairly between its tasks."""

import asyncio
import random

import pytest

from ledgers.bulk.limiters import Budgets, ReadBudget, reads_in_flight_max
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
