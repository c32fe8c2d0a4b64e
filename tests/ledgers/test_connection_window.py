"""Rule S10: requests in flight are bounded, and count until they are over."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.bulk.limiters import ReadBudget
from ledgers.connection import ConnectionSettings
from ledgers.errors import RejectedError, UnavailableError
from ledgers.wire import v3
from ledgers.wire.messages import Status
from tests.ledgers.connection_cases import SETTINGS, Desk, add, connected, errors_of, read, start
from tests.ledgers.scripted_bookie import Peer, in_loop, pass_time, step, v3_reply


@in_loop
async def test_reads_beyond_the_budget_wait_for_a_reply() -> None:
    desk = Desk()
    async with connected(desk.script, v3, reads=ReadBudget(count_max=2)) as connection:
        tasks = start(connection, *(read(i) for i in range(3)))
        assert await desk.sees(2)

        await desk.answer(1)

        assert await desk.sees(3)
        await desk.answer(0)
        await desk.answer(2)
        await asyncio.gather(*tasks)


@in_loop
async def test_reads_are_limited_by_their_bytes() -> None:
    desk = Desk()
    reads = ReadBudget(count_max=64, bytes_max=1000)
    settings = replace(SETTINGS, read_bytes_guess=100)
    async with connected(desk.script, v3, reads=reads, settings=settings) as connection:
        tasks = start(connection, *(read(0) for _ in range(20)))

        assert await desk.sees(10)

        await connection.close()
        await errors_of(tasks)


@in_loop
async def test_a_cancelled_read_is_still_in_flight() -> None:
    """The bookie continues, so the next read waits for that reply (rule S10)."""
    desk = Desk()
    async with connected(desk.script, v3, reads=ReadBudget(count_max=1)) as connection:
        first, second = start(connection, read(0), read(1))
        assert await desk.sees(1)

        first.cancel()

        assert await desk.sees(1)
        await desk.answer(0)
        assert await desk.sees(2)
        await desk.answer(1)
        await second


@pytest.mark.parametrize("is_answered_late", [True, False])
@in_loop
async def test_a_read_that_timed_out_is_still_in_flight(is_answered_late: bool) -> None:
    """It counts until its reply arrives after all, or until long after the timeout."""
    desk = Desk()
    settings = replace(SETTINGS, late_reply_timeout_s=20)
    reads = ReadBudget(count_max=1)
    async with connected(desk.script, v3, reads=reads, settings=settings) as connection:
        slow, other, second = start(connection, read(0), add(0), read(1))
        assert await desk.sees(2)
        await desk.answer(1)
        await other

        pass_time(5)

        with pytest.raises(UnavailableError, match="no answer in time"):
            await slow
        assert await desk.sees(2)
        if is_answered_late:
            await desk.answer(0)
        else:
            pass_time(20)
        assert await desk.sees(3)
        await desk.answer(2)
        await second


@pytest.mark.parametrize(
    ("settings", "payload_bytes"),
    [
        pytest.param(replace(SETTINGS, adds_in_flight_max=2), 0, id="by number"),
        pytest.param(replace(SETTINGS, added_bytes_in_flight_max=2500), 1000, id="by size"),
    ],
)
@in_loop
async def test_adds_beyond_the_window_wait_for_a_reply(
    settings: ConnectionSettings, payload_bytes: int
) -> None:
    desk = Desk()
    async with connected(desk.script, v3, settings=settings) as connection:
        tasks = start(connection, *(add(i, payload_bytes=payload_bytes) for i in range(3)))
        assert await desk.sees(2)

        await desk.answer(0)

        assert await desk.sees(3)
        await desk.answer(1)
        await desk.answer(2)
        await asyncio.gather(*tasks)


@in_loop
async def test_the_wait_for_the_window_is_bounded() -> None:
    desk = Desk()
    settings = replace(SETTINGS, request_timeout_s=100, queue_timeout_s=30)
    reads = ReadBudget(count_max=1)
    async with connected(desk.script, v3, reads=reads, settings=settings) as connection:
        first, second = start(connection, read(0), read(1))
        assert await desk.sees(1)

        pass_time(30)

        with pytest.raises(UnavailableError, match="too many requests in flight"):
            await second
        await desk.answer(0)
        await first


@in_loop
async def test_the_window_is_empty_after_any_outcome_of_a_request() -> None:
    reads = ReadBudget(count_max=9)
    async with connected(Peer.is_left, v3, reads=reads) as connection:
        tasks = start(connection, *(read(i) for i in range(20)))
        await step()
        tasks[3].cancel()
        await connection.close()
        await errors_of(tasks)

    assert (reads.count, reads.entry_bytes) == (0, 0)


@in_loop
async def test_an_entry_too_large_for_any_frame_is_refused() -> None:
    """It takes nothing of the window."""

    async def script(peer: Peer) -> None:
        await peer.send(v3_reply(await peer.packet()))
        await peer.is_left()

    settings = replace(SETTINGS, frame_bytes_max=1000, adds_in_flight_max=1)
    async with connected(script, v3, settings=settings) as connection:
        with pytest.raises(RejectedError, match="does not fit"):
            await connection.request(add(0, payload_bytes=1000))

        assert (await connection.request(add(0))).status is Status.EOK
