"""Callers that wait for a change learn of it once."""

import asyncio
from contextlib import aclosing

from ledgers.tasks import Changing
from tests.replication.cluster import in_virtual_time


class Switch(Changing):
    def press(self) -> None:
        self._notify_change()


@in_virtual_time
async def test_a_change_wakes_all_waiting_callers() -> None:
    switch = Switch()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(switch.wait_change(0))
        await asyncio.sleep(1)
        switch.press()

    assert asyncio.get_running_loop().time() == 1


@in_virtual_time
async def test_a_change_before_the_wait_is_not_missed() -> None:
    switch = Switch()
    seen = switch.change_count
    switch.press()

    await switch.wait_change(seen)

    assert asyncio.get_running_loop().time() == 0


@in_virtual_time
async def test_a_wait_after_a_change_is_for_the_next_one() -> None:
    switch = Switch()
    switch.press()

    await switch.wait_change(switch.change_count, timeout_s=5)

    assert asyncio.get_running_loop().time() == 5


@in_virtual_time
async def test_changes_while_no_caller_waits_count_as_one() -> None:
    switch = Switch()
    async with aclosing(switch.changes()) as changes:
        first = asyncio.create_task(anext(changes))
        await asyncio.sleep(1)
        switch.press()
        await first

        switch.press()
        switch.press()
        await anext(changes)
        third = asyncio.create_task(anext(changes))
        await asyncio.sleep(1)

        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


@in_virtual_time
async def test_a_change_before_a_follower_starts_is_not_missed() -> None:
    switch = Switch()
    async with aclosing(switch.changes()) as changes:
        switch.press()

        async with asyncio.timeout(1):
            await anext(changes)
