"""One connection to a bookie: replies find their requests, which have deadlines and bounds."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.bulk.limiters import ReadBudget
from ledgers.connection import BrokenConnectionError, Connection, ConnectionSettings
from ledgers.errors import CorruptionError, NoAnswerError, RejectedError, UnavailableError
from ledgers.wire import v2, v3
from ledgers.wire.messages import Reply, Status
from tests.ledgers.connection_cases import SETTINGS, Desk, add, connected, errors_of, read, start
from tests.ledgers.scripted_bookie import (
    Peer,
    Script,
    in_loop,
    pass_time,
    run,
    scripted_bookie,
    step,
    v2_reply,
    v3_reply,
)

# --- Replies find their requests ------------------------------------------------------------------


def test_replies_may_come_in_any_order() -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(3)]
        for index in (2, 0, 1):
            await peer.send(v3_reply(packets[index], Status.EOK, b"entry %d" % index))
        await peer.is_left()

    async def main() -> list[Reply]:
        async with connected(script, v3) as connection:
            return await asyncio.gather(*start(connection, read(0), read(1), read(2)))

    replies = run(main())

    assert [reply.entry for reply in replies] == [b"entry 0", b"entry 1", b"entry 2"]


def test_unrequested_replies_are_ignored() -> None:
    async def script(peer: Peer) -> None:
        while True:
            packet = await peer.packet()
            await peer.send(v3_reply(packet, Status.EOK, b"first"))
            await peer.send(v3_reply(packet, Status.EOK, b"again"))

    async def main() -> list[Reply]:
        async with connected(script, v3) as connection:
            return [await connection.request(read(entry_id)) for entry_id in range(3)]

    assert [reply.entry for reply in run(main())] == [b"first"] * 3


def test_equal_v2_requests_get_their_replies_in_order() -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(2)]
        await peer.send(v2_reply(packets[0], Status.EFENCED))
        await peer.send(v2_reply(packets[1]))
        await peer.is_left()

    async def main() -> list[Reply]:
        async with connected(script, v2) as connection:
            return await asyncio.gather(*start(connection, add(5), add(5)))

    assert [reply.status for reply in run(main())] == [Status.EFENCED, Status.EOK]


def test_the_reply_to_a_cancelled_request_is_dropped() -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(2)]
        await peer.send(v3_reply(packets[0], Status.EOK, b"for the cancelled"))
        await peer.send(v3_reply(packets[1], Status.EOK, b"for the other"))
        await peer.is_left()

    async def main() -> Reply:
        async with connected(script, v3) as connection:
            (cancelled,) = start(connection, read(5))
            await step()
            cancelled.cancel()
            return await connection.request(read(5))

    assert run(main()).entry == b"for the other"


# --- Broken connections ---------------------------------------------------------------------------


async def reset(peer: Peer) -> None:
    await peer.packet()
    await peer.packet()
    peer.reset()


async def babble(peer: Peer) -> None:
    await peer.packet()
    await peer.packet()
    await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.is_left()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        pytest.param(reset, ConnectionError, id="reset"),
        pytest.param(babble, CorruptionError, id="garbage"),
    ],
)
@in_loop
async def test_a_broken_connection_fails_its_requests_at_once(
    script: Script, cause: type[Exception]
) -> None:
    async with connected(script, v3) as connection:
        errors = await errors_of(start(connection, read(0), read(1)))

        assert [type(error) for error in errors] == [BrokenConnectionError] * 2
        assert all(error and isinstance(error.__cause__, cause) for error in errors)
        assert connection.is_broken
        with pytest.raises(BrokenConnectionError):
            await connection.request(read(2))


@in_loop
async def test_closing_fails_waiting_requests() -> None:
    async with connected(Peer.is_left, v3) as connection:
        tasks = start(connection, read(0), add(1))
        await step()

        await connection.close()

        assert [type(error) for error in await errors_of(tasks)] == [BrokenConnectionError] * 2


def test_a_cancelled_close_does_not_disturb_the_transport() -> None:
    """The transport reports the end of the connection afterwards."""
    failures: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: failures.append(told))
        async with connected(Peer.is_left, v3) as connection:
            closing = asyncio.create_task(connection.close())
            await asyncio.sleep(0)
            closing.cancel()
            await step()

    run(main())

    assert failures == []


@in_loop
async def test_a_port_without_listener_cannot_be_connected() -> None:
    async with scripted_bookie(Peer.is_left) as bookie:
        pass
    with pytest.raises(UnavailableError, match="cannot connect"):
        await Connection(
            bookie.id,
            bookie.address,
            codec=v3,
            reads=ReadBudget(count_max=1),
            settings=SETTINGS,
            on_broken=lambda connection, cause: None,
        ).open()


# --- Requests that are not answered in time -------------------------------------------------------


@in_loop
async def test_a_v3_request_without_an_answer_fails_alone() -> None:
    async def script(peer: Peer) -> None:
        ignored = await peer.packet()
        await peer.send(v3_reply(await peer.packet(), entry=b"in time"))
        packet = await peer.packet()
        await peer.send(v3_reply(ignored, entry=b"late") + v3_reply(packet, entry=b"next"))
        await peer.is_left()

    async with connected(script, v3) as connection:
        (ignored, answered) = start(connection, read(0), read(1))
        await answered

        pass_time(5)

        with pytest.raises(UnavailableError, match="no answer in time"):
            await ignored
        assert (await connection.request(read(0))).entry == b"next"


@in_loop
async def test_a_v2_request_without_an_answer_ends_the_connection() -> None:
    """Its late reply could be mistaken for that to the next equal request."""

    async def script(peer: Peer) -> None:
        await peer.packet()
        await peer.send(v2_reply(await peer.packet()))
        await peer.is_left()

    async with connected(script, v2) as connection:
        (ignored, answered) = start(connection, add(0), add(1))
        await answered

        pass_time(5)

        with pytest.raises(UnavailableError, match="no answer in time"):
            await ignored
        assert connection.is_broken


@in_loop
async def test_a_completely_unresponsive_connection_is_dropped() -> None:
    """The host may be down; a new connection would tell."""
    async with connected(Peer.is_left, v3) as connection:
        tasks = start(connection, read(0), add(0))
        await step()

        pass_time(5)

        assert [type(error) for error in await errors_of(tasks)] == [
            NoAnswerError,
            BrokenConnectionError,
        ]
        assert connection.is_broken


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "in time"])
@in_loop
async def test_a_bookie_whose_replies_are_all_late_counts_as_unresponsive(is_late: bool) -> None:
    """Its connection is good, and delivers the late replies."""
    desk = Desk()

    async with connected(desk.script, v3) as connection:
        early = start(connection, read(0), read(1))
        assert await desk.sees(2)
        await desk.answer(0)
        await early[0]
        pass_time(5)
        assert [type(error) for error in await errors_of(early)] == [type(None), UnavailableError]

        unanswered, other = start(connection, read(2), read(3))
        assert await desk.sees(4)
        await desk.answer(1 if is_late else 3)
        await step()
        pass_time(5)

        (error, _) = await errors_of([unanswered, other])
        assert isinstance(error, NoAnswerError) is is_late
        assert not connection.is_broken


# --- Bounds of requests in flight (rule S10) ------------------------------------------------------


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
