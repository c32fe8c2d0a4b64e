"""Slots for ledgers under repair, which are lent while a repair waits."""

import asyncio

import pytest

from replication.slots import LATE_TIMES_MAX, Slots, kept_for_losses


async def test_a_slot_is_lent_after_the_wait_and_acquired_again_later() -> None:
    slots = Slots(1)
    await slots.acquire()

    async with slots.lent_after(1.0):
        await asyncio.sleep(0.9)
        assert slots.lent_count == 0
        await slots.acquire()  # waits for the loan
        assert now_s() == 1.0
        slots.release()
        assert slots.lent_count == 1

    assert slots.lent_count == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slots.acquire(), 100)


async def test_a_slot_is_not_lent_if_the_work_ends_in_time() -> None:
    slots = Slots(1)
    await slots.acquire()

    async with slots.lent_after(1.0):
        await asyncio.sleep(0.9)
    await asyncio.sleep(10)

    assert slots.lent_count == 0
    slots.release()
    await slots.wait_free()


async def test_the_lender_gets_a_slot_again_when_one_is_free() -> None:
    slots = Slots(1)
    await slots.acquire()
    async with slots.lent():
        await slots.acquire()
        asyncio.get_running_loop().call_later(5, slots.release)

    assert now_s() == 5


@pytest.mark.parametrize(
    ("given_back", "waited_s"),
    [
        pytest.param((1.0, 2.0), 2.0, id="half of them are free"),
        pytest.param((1.0,), 10.0, id="it lasts too long"),
        pytest.param((), 10.0, id="no slot is returned"),
    ],
)
async def test_when_all_slots_are_used_half_of_them_are_waited_for(
    given_back: tuple[float, ...], waited_s: float
) -> None:
    slots = Slots(4)
    for _ in range(4):
        await slots.acquire()
    for at_s in given_back:
        asyncio.get_running_loop().call_later(at_s, slots.release)

    await slots.wait_half_free(10.0)

    assert now_s() == waited_s


async def test_while_a_slot_is_free_no_others_are_waited_for() -> None:
    slots = Slots(4)
    for _ in range(3):
        await slots.acquire()

    await slots.wait_half_free(10.0)

    assert now_s() == 0


async def test_the_number_of_lent_slots_is_bounded() -> None:
    async def be_long(slots: Slots) -> None:
        await slots.acquire()
        async with slots.lent_after(1.0):
            await asyncio.sleep(1_000)
        slots.release()

    slots = Slots(2)
    waiting = [asyncio.ensure_future(be_long(slots)) for _ in range(100)]
    await asyncio.sleep(500)
    assert slots.lent_count == 2 * LATE_TIMES_MAX
    await asyncio.gather(*waiting)
    assert slots.lent_count == 0


async def test_inner_slots_leave_some_outer_ones_free_even_when_lent() -> None:
    async def be_long(slots: Slots) -> None:
        await slots.acquire()
        async with slots.lent_after(1.0):
            await asyncio.sleep(1_000)
        slots.release()

    slots = Slots(4)
    inner = Slots(3, within=slots)
    waiting = [asyncio.ensure_future(be_long(inner)) for _ in range(100)]
    await asyncio.sleep(500)

    assert inner.is_full
    assert slots.lent_count == inner.lent_count == 3 * LATE_TIMES_MAX
    await asyncio.wait_for(slots.acquire(), 1)
    assert slots.is_full
    slots.release()

    await asyncio.gather(*waiting)
    assert slots.lent_count == inner.lent_count == 0


async def test_inner_slots_count_among_the_outer_ones() -> None:
    slots = Slots(4)
    inner = Slots(3, within=slots)
    for _ in range(3):
        await slots.acquire()
    await inner.acquire()

    assert slots.is_full
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inner.acquire(), 100)
    inner.release()
    await asyncio.wait_for(inner.acquire(), 1)


@pytest.mark.parametrize(("count", "kept"), [(1, 0), (2, 1), (4, 1), (7, 1), (8, 2), (128, 32)])
def test_a_quarter_of_the_slots_is_reserved_for_losses(count: int, kept: int) -> None:
    assert kept_for_losses(count) == kept


def now_s() -> float:
    return asyncio.get_running_loop().time()
