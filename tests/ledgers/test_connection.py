"""Replies are assigned to their requests, and a broken connection fails all of them."""

import asyncio

import pytest

from ledgers.bulk.limiters import ReadBudget
from ledgers.connection import BrokenConnectionError, Connection
from ledgers.errors import CorruptionError, UnavailableError
from ledgers.wire import v2, v3
from ledgers.wire.messages import Reply, Status
from tests.ledgers.connection_cases import SETTINGS, add, connected, errors_of, read, start
from tests.ledgers.scripted_bookie import (
    Peer,
    Script,
    in_loop,
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
