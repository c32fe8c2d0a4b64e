"""Requests that are not answered in time, and the fate of their connection."""

import pytest

from ledgers.connection import BrokenConnectionError
from ledgers.errors import NoAnswerError, UnavailableError
from ledgers.wire import v2, v3
from tests.ledgers.connection_cases import Desk, add, connected, errors_of, read, start
from tests.ledgers.scripted_bookie import Peer, in_loop, pass_time, step, v2_reply, v3_reply


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
