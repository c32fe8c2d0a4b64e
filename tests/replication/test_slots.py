"""Places for ledgers at work, lent while they wait."""

import asyncio

import pytest

from replication.slots import LATE_TIMES_MAX, Slots
from tests.virtual_time import run


def test_a_place_is_lent_once_the_wait_is_long_and_taken_again_after_it() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        await slots.take()

        async with slots.lent_after(1.0):
            await asyncio.sleep(0.9)
            assert slots.lent_count == 0
            await slots.take()  # waits for the loan
            assert now_s() == 1.0
            slots.give_back()
            assert slots.lent_count == 1

        assert slots.lent_count == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slots.take(), 100)

    run(scenario())


def test_what_ends_in_time_is_not_lent() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        await slots.take()

        async with slots.lent_after(1.0):
            await asyncio.sleep(0.9)
        await asyncio.sleep(10)

        assert slots.lent_count == 0
        slots.give_back()
        await slots.wait_free()

    run(scenario())


def test_who_has_waited_gets_a_place_again_when_one_is_free() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        await slots.take()
        async with slots.lent():
            await slots.take()
            asyncio.get_running_loop().call_later(5, slots.give_back)

        assert now_s() == 5

    run(scenario())


def test_no_more_than_so_many_of_those_that_take_long_are_lent() -> None:
    async def be_long(slots: Slots) -> None:
        await slots.take()
        async with slots.lent_after(1.0):
            await asyncio.sleep(1_000)
        slots.give_back()

    async def scenario() -> None:
        slots = Slots(2)
        waiting = [asyncio.ensure_future(be_long(slots)) for _ in range(100)]
        await asyncio.sleep(500)
        assert slots.lent_count == 2 * LATE_TIMES_MAX
        await asyncio.gather(*waiting)
        assert slots.lent_count == 0

    run(scenario())


def now_s() -> float:
    return asyncio.get_running_loop().time()
