"""A bound on what is under way at once."""

import asyncio

from ledgers.zookeeper.slots import Slots


def test_no_more_than_the_bound_are_under_way_and_in_the_order_they_came() -> None:
    running, most, order = 0, 0, []

    async def work(slots: Slots, number: int) -> None:
        nonlocal running, most
        async with slots:
            order.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    async def scenario() -> None:
        slots = Slots(3)
        await asyncio.gather(*(work(slots, number) for number in range(20)))

    asyncio.run(scenario())

    assert most == 3
    assert order == list(range(20))


def test_whoever_gives_up_waiting_leaves_the_slot_to_the_next() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        done: list[str] = []

        async def work(name: str) -> None:
            async with slots:
                done.append(name)

        async with slots:
            tasks = [asyncio.ensure_future(work(name)) for name in ("impatient", "patient")]
            await asyncio.sleep(0)
            tasks[0].cancel()
        await asyncio.wait(tasks)

        assert done == ["patient"]

    asyncio.run(scenario())


def test_a_slot_granted_to_one_who_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        done: list[str] = []

        async def work(name: str) -> None:
            async with slots:
                done.append(name)

        async with slots:
            tasks = [asyncio.ensure_future(work(name)) for name in ("unlucky", "lucky")]
            await asyncio.sleep(0)
        tasks[0].cancel()  # after the slot was handed to it, before it could run
        await asyncio.wait(tasks)

        assert done == ["lucky"]

    asyncio.run(scenario())


def test_an_error_within_frees_the_slot() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        for _ in range(2):
            try:
                async with slots:
                    raise ValueError
            except ValueError:
                pass

    asyncio.run(asyncio.wait_for(scenario(), 5))
