"""Groups of tasks, waits with a timeout, and work in parts."""

import asyncio
import math

import pytest

from ledgers.errors import UnavailableError
from ledgers.tasks import gather_in_parts, task_scope, wait_woken
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import run


@in_virtual_time
async def test_tasks_end_with_their_block() -> None:
    async with task_scope() as scope:
        task = scope.start(asyncio.sleep(60))
        await asyncio.sleep(1)

    assert task.cancelled()
    assert asyncio.get_running_loop().time() == 1


@in_virtual_time
async def test_an_error_of_a_task_ends_the_block_and_is_not_wrapped() -> None:
    async def fail() -> None:
        raise UnavailableError("time-out")

    async def wait_for(other: asyncio.Task[None]) -> None:
        async with task_scope() as scope:
            scope.start(fail())
            await other

    other = asyncio.create_task(asyncio.sleep(60))
    with pytest.raises(UnavailableError):
        await wait_for(other)


@in_virtual_time
async def test_an_error_of_the_block_is_not_wrapped() -> None:
    async def fail() -> None:
        async with task_scope() as scope:
            scope.start(asyncio.sleep(60))
            raise UnavailableError("time-out")

    with pytest.raises(UnavailableError):
        await fail()


@in_virtual_time
async def test_a_cancelled_block_cancels_its_tasks() -> None:
    started: list[asyncio.Task[None]] = []

    async def block() -> None:
        async with task_scope() as scope:
            started.append(scope.start(asyncio.sleep(60)))
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started[0].cancelled()


@pytest.mark.parametrize("timeout_s", [None, math.inf, 3.0])
@in_virtual_time
async def test_a_waiting_caller_is_woken(timeout_s: float | None) -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_later(2, wake.set)

    assert await wait_woken(wake, timeout_s=timeout_s)
    assert asyncio.get_running_loop().time() == 2
    assert wake.is_set()


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(2.0, 2), (0.0, 0), (-1.0, 0)])
@in_virtual_time
async def test_a_waiting_caller_continues_when_the_time_is_over(
    timeout_s: float, waited_s: float
) -> None:
    assert not await wait_woken(asyncio.Event(), timeout_s=timeout_s)
    assert asyncio.get_running_loop().time() == waited_s


def test_values_are_processed_in_parts_and_keep_their_order() -> None:
    under_way, most = 0, 0

    async def work(value: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(10 - value)
        under_way -= 1
        return 2 * value

    assert run(gather_in_parts(work, range(5), at_once=2)) == [0, 2, 4, 6, 8]
    assert most == 2
