"""Rule S10: what one process may ask of one bookie, shared fairly between its tasks."""

import asyncio
import random

import pytest

from ledgers.bulk.limiters import Budgets, ReadBudget, reads_in_flight_max
from ledgers.model import BookieId


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


def test_no_more_reads_are_admitted_than_the_count_allows() -> None:
    budget = ReadBudget(count_max=3)

    assert [budget.take(1, 1) for _ in range(4)] == [1, 1, 1, 0]

    budget.release(1)
    assert budget.take(1, 1)


def test_no_more_bytes_are_admitted_than_the_window_allows() -> None:
    budget = ReadBudget(count_max=100, bytes_max=1_000)

    assert budget.take(50, 300) == 3
    assert not budget.take(1, 200)
    assert budget.take(1, 100)


def test_an_entry_larger_than_the_window_is_admitted_alone() -> None:
    budget = ReadBudget(count_max=100, bytes_max=1_000)

    assert budget.take(5, 5_000) == 1
    assert not budget.take(1, 1)

    budget.release(5_000)
    assert budget.take(1, 1)
    assert not budget.take(1, 5_000)


async def _settle() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_waiters_are_served_in_order() -> None:
    async def run() -> None:
        budget = ReadBudget(count_max=1)
        await budget.acquire(10)
        served: list[int] = []

        async def wait(number: int) -> None:
            await budget.acquire(10)
            served.append(number)
            budget.release(10)

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(wait(number))
            await _settle()
            assert not budget.take(1, 1)
            budget.release(10)

        assert served == [0, 1, 2, 3, 4]
        assert (budget.count, budget.entry_bytes) == (0, 0)

    asyncio.run(run())


def test_no_waiter_overtakes_a_large_read() -> None:
    async def run() -> None:
        budget = ReadBudget(count_max=10, bytes_max=100)
        budget.take(1, 50)
        large = asyncio.create_task(budget.acquire(90))
        await _settle()

        assert not budget.take(1, 1)

        budget.release(50)
        await large
        assert budget.take(1, 10)

    asyncio.run(run())


def test_a_cancelled_waiter_lets_the_next_one_through() -> None:
    async def run() -> None:
        budget = ReadBudget(count_max=10, bytes_max=100)
        budget.take(1, 50)
        large = asyncio.create_task(budget.acquire(90))
        small = asyncio.create_task(budget.acquire(10))
        await _settle()
        assert not small.done()

        large.cancel()
        await _settle()

        assert small.done()
        assert (budget.count, budget.entry_bytes) == (2, 60)

    asyncio.run(run())


def test_credit_of_a_cancelled_task_is_not_lost() -> None:
    async def run() -> None:
        budget = ReadBudget(count_max=1)
        budget.take(1, 10)
        waiting = asyncio.create_task(budget.acquire(20))
        await _settle()

        budget.release(10)  # granted, but the task has not run yet
        waiting.cancel()
        await _settle()

        assert waiting.cancelled()
        assert (budget.count, budget.entry_bytes) == (0, 0)

    asyncio.run(run())


def test_a_lower_bound_applies_to_later_requests() -> None:
    budgets = Budgets(reads_in_flight_max=10)
    budget = budgets.reads(BookieId("bookie-1:3181"))
    assert budget.take(10, 1) == 10

    budgets.reads_in_flight_max = 2

    budget.release(8, count=8)
    assert not budget.take(1, 1)
    budget.release(1)
    assert budget.take(1, 1)
    assert budgets.reads(BookieId("bookie-2:3181")).count_max == 2


def test_a_higher_bound_serves_waiters_at_once() -> None:
    async def run() -> None:
        budgets = Budgets(reads_in_flight_max=1)
        budget = budgets.reads(BookieId("bookie-1:3181"))
        await budget.acquire(1)
        waiting = asyncio.create_task(budget.acquire(1))
        await _settle()
        assert not waiting.done()

        budgets.reads_in_flight_max = 2

        await waiting

    asyncio.run(run())


def test_a_turn_grants_a_part_when_others_wait_behind() -> None:
    budget = ReadBudget(count_max=16)
    budget.take(16, 1)
    taken: list[tuple[str, int]] = []
    budget.wait_in_line(1, lambda: taken.append(("bulk", budget.take(16, 1))))
    budget.wait_in_line(1, lambda: taken.append(("check", budget.take(1, 1))))

    budget.release(16, count=16)

    assert taken == [("bulk", 2), ("check", 1)]
    assert budget.count == 3


def test_bookies_have_separate_budgets() -> None:
    budgets = Budgets(reads_in_flight_max=1)

    assert budgets.reads(BookieId("bookie-1:3181")).take(1, 1)
    assert budgets.reads(BookieId("bookie-2:3181")).take(1, 1)
    assert not budgets.reads(BookieId("bookie-1:3181")).take(1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_limits_hold_and_all_are_served_under_random_load(seed: int) -> None:
    async def run() -> None:
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

    asyncio.run(run())
