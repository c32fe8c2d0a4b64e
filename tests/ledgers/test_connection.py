"""One connection, against a bookie on loopback that resets, stalls, repeats itself or babbles."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from ledgers.bookie_info import Address
from ledgers.budget import ReadBudget
from ledgers.connection import BrokenConnectionError, Connection, ConnectionSettings
from ledgers.entry import HEADER
from ledgers.errors import CorruptionError, RejectedError, UnavailableError
from ledgers.metadata import BookieId
from ledgers.protocol import v2, v3
from ledgers.protocol.messages import Add, Codec, ListEntries, Read, ReadBatch, Reply, Request
from ledgers.protocol.status import Status
from tests.ledgers.scripted_bookie import (
    Peer,
    Script,
    pass_time,
    run,
    scripted_bookie,
    step,
    v2_batch_reply,
    v2_reply,
    v3_reply,
)

SETTINGS = ConnectionSettings(request_timeout_s=5.0, queue_timeout_s=30.0)


@dataclass(frozen=True)
class Dialect:
    """A protocol: ours, and the bookie's side of it."""

    codec: Codec
    reply: Callable[[bytes, Status, bytes], bytes]


V2 = Dialect(v2, v2_reply)
V3 = Dialect(v3, v3_reply)
BOTH = pytest.mark.parametrize("dialect", [V2, V3], ids=["V2", "V3"])


@asynccontextmanager
async def connected(
    script: Script,
    dialect: Dialect,
    *,
    reads: ReadBudget | None = None,
    settings: ConnectionSettings = SETTINGS,
) -> AsyncIterator[Connection]:
    async with scripted_bookie(script) as bookie:
        connection = await Connection.open(
            bookie.id,
            bookie.address,
            codec=dialect.codec,
            reads=reads or ReadBudget(count_max=64),
            settings=settings,
            on_broken=lambda connection, cause: None,
        )
        try:
            yield connection
        finally:
            await connection.close()


def read(entry_id: int) -> Read:
    return Read(ledger_id=1, entry_id=entry_id)


def add(entry_id: int, *, payload_bytes: int = 0) -> Add:
    entry = HEADER.pack(1, entry_id, -1, payload_bytes) + bytes(payload_bytes)
    return Add(entry=entry, master_key=bytes(20))


def start(connection: Connection, *requests: Request) -> list[asyncio.Task[Reply]]:
    """Requests under way, each in a task of its own."""
    return [asyncio.create_task(connection.request(request)) for request in requests]


async def errors_of(tasks: list[asyncio.Task[Reply]]) -> list[BaseException | None]:
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) else None for each in outcomes]


# --- Replies find their requests ---------------------------------------------------------------


@BOTH
def test_replies_may_come_in_any_order(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(3)]
        for index in (2, 0, 1):
            await peer.send(dialect.reply(packets[index], Status.EOK, b"entry %d" % index))
        await peer.is_left()

    async def main() -> list[Reply]:
        async with connected(script, dialect) as connection:
            return await asyncio.gather(*start(connection, read(0), read(1), read(2)))

    replies = run(main())

    assert [reply.entries for reply in replies] == [(b"entry 0",), (b"entry 1",), (b"entry 2",)]


@BOTH
def test_a_reply_may_come_in_two_parts_cut_anywhere(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        for cut in range(1, 40):
            data = dialect.reply(await peer.packet(), Status.EOK, b"some entry's bytes")
            await peer.send(data[:cut])
            await step()
            await peer.send(data[cut:])
        await peer.is_left()

    async def main() -> None:
        async with connected(script, dialect) as connection:
            for _ in range(1, 40):
                reply = await connection.request(read(7))
                assert reply.entries == (b"some entry's bytes",)

    run(main())


@BOTH
def test_a_refusal_is_a_reply_too(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(dialect.reply(await peer.packet(), Status.ENOENTRY, b""))
        await peer.is_left()

    async def main() -> Reply:
        async with connected(script, dialect) as connection:
            return await connection.request(read(0))

    assert run(main()).status is Status.ENOENTRY


@BOTH
def test_replies_that_nobody_asked_for_are_ignored(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        while True:
            packet = await peer.packet()
            await peer.send(dialect.reply(packet, Status.EOK, b"first"))
            await peer.send(dialect.reply(packet, Status.EOK, b"again"))

    async def main() -> list[Reply]:
        async with connected(script, dialect) as connection:
            return [await connection.request(read(entry_id)) for entry_id in range(3)]

    assert [reply.entries for reply in run(main())] == [(b"first",)] * 3


def test_equal_v2_requests_get_their_replies_in_turn() -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(2)]
        await peer.send(v2_reply(packets[0], entry=b"one"))
        await peer.send(v2_reply(packets[1], entry=b"two"))
        await peer.is_left()

    async def main() -> list[Reply]:
        async with connected(script, V2) as connection:
            return await asyncio.gather(*start(connection, read(5), read(5)))

    assert [reply.entries for reply in run(main())] == [(b"one",), (b"two",)]


@BOTH
def test_the_reply_to_a_cancelled_request_goes_to_nobody(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        packets = [await peer.packet() for _ in range(2)]
        await peer.send(dialect.reply(packets[0], Status.EOK, b"for the cancelled"))
        await peer.send(dialect.reply(packets[1], Status.EOK, b"for the other"))
        await peer.is_left()

    async def main() -> Reply:
        async with connected(script, dialect) as connection:
            (cancelled,) = start(connection, read(5))
            await step()
            cancelled.cancel()
            return await connection.request(read(5))

    assert run(main()).entries == (b"for the other",)


@BOTH
def test_a_thousand_requests_at_once_are_all_answered(dialect: Dialect) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.send(dialect.reply(await peer.packet(), Status.EOK, b""))

    async def main() -> list[Reply]:
        async with connected(script, dialect) as connection:
            return await asyncio.gather(*start(connection, *(add(i) for i in range(1000))))

    assert [reply.status for reply in run(main())] == [Status.EOK] * 1000


def test_a_reply_may_be_somewhat_longer_than_the_longest_request() -> None:
    """The largest entry that was added over V2 comes back over V3 in a longer frame."""

    async def script(peer: Peer) -> None:
        await peer.send(v3_reply(await peer.packet(), entry=bytes(1100)))
        await peer.is_left()

    async def main() -> Reply:
        async with connected(script, V3, settings=replace(SETTINGS, frame_bytes_max=1000)) as to:
            return await to.request(read(0))

    assert run(main()).entries == (bytes(1100),)


# --- Broken connections --------------------------------------------------------------------------


async def reset(peer: Peer) -> None:
    await peer.packet()
    await peer.packet()
    peer.reset()


async def babble(peer: Peer) -> None:
    await peer.packet()
    await peer.packet()
    await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.is_left()


@BOTH
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        pytest.param(reset, ConnectionError, id="reset"),
        pytest.param(babble, CorruptionError, id="garbage"),
    ],
)
def test_a_broken_connection_fails_its_requests_at_once(
    script: Script, cause: type[Exception], dialect: Dialect
) -> None:
    async def main() -> None:
        async with connected(script, dialect) as connection:
            errors = await errors_of(start(connection, read(0), read(1)))

            assert [type(error) for error in errors] == [BrokenConnectionError] * 2
            assert all(error and isinstance(error.__cause__, cause) for error in errors)
            assert connection.is_broken
            with pytest.raises(BrokenConnectionError):
                await connection.request(read(2))

    run(main())


@BOTH
def test_closing_fails_those_who_wait(dialect: Dialect) -> None:
    async def main() -> None:
        async with connected(Peer.is_left, dialect) as connection:
            tasks = start(connection, read(0), add(1))
            await step()

            await connection.close()

            assert [type(error) for error in await errors_of(tasks)] == [BrokenConnectionError] * 2

    run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        async with scripted_bookie(Peer.is_left) as bookie:
            pass
        with pytest.raises(UnavailableError, match="cannot connect"):
            await Connection.open(
                bookie.id,
                bookie.address,
                codec=v3,
                reads=ReadBudget(count_max=1),
                settings=SETTINGS,
                on_broken=lambda connection, cause: None,
            )

    run(main())


def test_a_host_that_cannot_be_a_host() -> None:
    async def main() -> None:
        with pytest.raises(UnavailableError, match="cannot connect"):
            await Connection.open(
                BookieId("x"),
                Address("no..host", 3181),
                codec=v3,
                reads=ReadBudget(count_max=1),
                settings=SETTINGS,
                on_broken=lambda connection, cause: None,
            )

    run(main())


# --- Deadlines -------------------------------------------------------------------------------------


def test_a_v3_request_without_an_answer_fails_alone() -> None:
    async def script(peer: Peer) -> None:
        ignored = await peer.packet()
        await peer.send(v3_reply(await peer.packet(), entry=b"in time"))
        packet = await peer.packet()
        await peer.send(v3_reply(ignored, entry=b"late") + v3_reply(packet, entry=b"next"))
        await peer.is_left()

    async def main() -> None:
        async with connected(script, V3) as connection:
            (ignored, answered) = start(connection, read(0), read(1))
            await answered

            pass_time(5)

            with pytest.raises(UnavailableError, match="no answer in time"):
                await ignored
            assert (await connection.request(read(0))).entries == (b"next",)

    run(main())


def test_a_v2_request_without_an_answer_takes_the_connection_along() -> None:
    """Its late reply could be taken for that to the next equal request."""

    async def script(peer: Peer) -> None:
        await peer.packet()
        await peer.send(v2_reply(await peer.packet(), entry=b"in time"))
        await peer.is_left()

    async def main() -> None:
        async with connected(script, V2) as connection:
            (ignored, answered) = start(connection, read(0), read(1))
            await answered

            pass_time(5)

            with pytest.raises(UnavailableError, match="no answer in time"):
                await ignored
            assert connection.is_broken

    run(main())


def test_a_v2_batch_read_without_an_answer_fails_alone() -> None:
    async def script(peer: Peer) -> None:
        await peer.packet()
        await peer.send(v2_batch_reply(await peer.packet(), b"in time"))
        await peer.is_left()

    async def main() -> None:
        batch = ReadBatch(ledger_id=1, first_entry_id=0, count_max=9, bytes_max=9)
        async with connected(script, V2) as connection:
            (ignored, answered) = start(connection, batch, batch)
            assert (await answered).entries == (b"in time",)

            pass_time(5)

            with pytest.raises(UnavailableError, match="no answer in time"):
                await ignored
            assert not connection.is_broken

    run(main())


def test_a_connection_that_is_silent_altogether_is_dropped() -> None:
    """The host may be gone without a word; connecting anew finds out."""

    async def main() -> None:
        async with connected(Peer.is_left, V3) as connection:
            tasks = start(connection, read(0), add(0))
            await step()

            pass_time(5)

            assert [type(error) for error in await errors_of(tasks)] == [
                UnavailableError,
                BrokenConnectionError,
            ]
            assert connection.is_broken

    run(main())


def test_silence_about_a_list_of_entries_is_no_silence() -> None:
    """DbLedgerStorage never answers that one; the connection stays good for others."""

    async def main() -> None:
        async with connected(Peer.is_left, V3) as connection:
            (ignored,) = start(connection, ListEntries(ledger_id=1))
            await step()

            pass_time(5)

            with pytest.raises(UnavailableError, match="no answer in time"):
                await ignored
            assert not connection.is_broken

    run(main())


# --- Room ------------------------------------------------------------------------------------------


class Desk:
    """A bookie that notes what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self._peer: Peer | None = None
        self._arrivals = asyncio.Semaphore(0)

    async def script(self, peer: Peer) -> None:
        self._peer = peer
        while True:
            self.packets.append(await peer.packet())
            self._arrivals.release()

    async def sees(self, count: int) -> bool:
        """Whether that many requests have come, and after a while still no more."""
        while len(self.packets) < count:
            await self._arrivals.acquire()
        await step()
        return len(self.packets) == count

    async def answer(self, index: int) -> None:
        assert self._peer is not None
        await self._peer.send(v3_reply(self.packets[index]))


def test_reads_beyond_the_budget_wait_for_a_reply() -> None:
    async def main() -> None:
        desk = Desk()
        async with connected(desk.script, V3, reads=ReadBudget(count_max=2)) as connection:
            tasks = start(connection, *(read(i) for i in range(3)))
            assert await desk.sees(2)

            await desk.answer(1)

            assert await desk.sees(3)
            await desk.answer(0)
            await desk.answer(2)
            await asyncio.gather(*tasks)

    run(main())


@pytest.mark.parametrize(
    ("request_", "in_flight"),
    [
        pytest.param(read(0), 10, id="a read of unknown size"),
        pytest.param(ListEntries(ledger_id=1), 10, id="a list of entries"),
        pytest.param(
            ReadBatch(ledger_id=1, first_entry_id=0, count_max=9, bytes_max=400),
            2,
            id="a batch read, by what it may bring",
        ),
    ],
)
def test_reads_are_limited_by_their_bytes(request_: Request, in_flight: int) -> None:
    async def main() -> None:
        desk = Desk()
        dialect = V2 if isinstance(request_, ReadBatch) else V3
        reads = ReadBudget(count_max=64, bytes_max=1000)
        settings = replace(SETTINGS, read_bytes_guess=100)
        async with connected(desk.script, dialect, reads=reads, settings=settings) as connection:
            tasks = start(connection, *(request_ for _ in range(20)))

            assert await desk.sees(in_flight)

            await connection.close()
            await errors_of(tasks)

    run(main())


def test_a_cancelled_read_is_still_in_flight() -> None:
    """The bookie reads on, so the next one waits for its reply all the same (rule S10)."""

    async def main() -> None:
        desk = Desk()
        async with connected(desk.script, V3, reads=ReadBudget(count_max=1)) as connection:
            first, second = start(connection, read(0), read(1))
            assert await desk.sees(1)

            first.cancel()

            assert await desk.sees(1)
            await desk.answer(0)
            assert await desk.sees(2)
            await desk.answer(1)
            await second

    run(main())


@pytest.mark.parametrize("is_answered_late", [True, False])
def test_a_read_that_was_not_answered_in_time_is_still_in_flight(is_answered_late: bool) -> None:
    """Until its reply comes after all, or long after."""

    async def main() -> None:
        desk = Desk()
        settings = replace(SETTINGS, late_reply_timeout_s=20)
        reads = ReadBudget(count_max=1)
        async with connected(desk.script, V3, reads=reads, settings=settings) as connection:
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

    run(main())


@pytest.mark.parametrize(
    ("settings", "payload_bytes"),
    [
        pytest.param(replace(SETTINGS, adds_in_flight_max=2), 0, id="by number"),
        pytest.param(replace(SETTINGS, added_bytes_in_flight_max=2500), 1000, id="by size"),
    ],
)
def test_adds_beyond_the_room_wait_for_a_reply(
    settings: ConnectionSettings, payload_bytes: int
) -> None:
    async def main() -> None:
        desk = Desk()
        async with connected(desk.script, V3, settings=settings) as connection:
            tasks = start(connection, *(add(i, payload_bytes=payload_bytes) for i in range(3)))
            assert await desk.sees(2)

            await desk.answer(0)

            assert await desk.sees(3)
            await desk.answer(1)
            await desk.answer(2)
            await asyncio.gather(*tasks)

    run(main())


def test_the_wait_for_room_is_bounded() -> None:
    async def main() -> None:
        desk = Desk()
        settings = replace(SETTINGS, request_timeout_s=100, queue_timeout_s=30)
        reads = ReadBudget(count_max=1)
        async with connected(desk.script, V3, reads=reads, settings=settings) as connection:
            first, second = start(connection, read(0), read(1))
            assert await desk.sees(1)

            pass_time(30)

            with pytest.raises(UnavailableError, match="too much in flight"):
                await second
            await desk.answer(0)
            await first

    run(main())


def test_all_room_is_given_back_whatever_became_of_the_request() -> None:
    async def main() -> None:
        reads = ReadBudget(count_max=9)
        async with connected(Peer.is_left, V3, reads=reads) as connection:
            tasks = start(connection, *(read(i) for i in range(20)))
            await step()
            tasks[3].cancel()
            await connection.close()
            await errors_of(tasks)

        assert (reads.count, reads.entry_bytes) == (0, 0)

    run(main())


def test_an_entry_that_fits_into_no_frame_is_refused_and_takes_no_room() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(v3_reply(await peer.packet()))
        await peer.is_left()

    async def main() -> None:
        settings = replace(SETTINGS, frame_bytes_max=1000, adds_in_flight_max=1)
        async with connected(script, V3, settings=settings) as connection:
            with pytest.raises(RejectedError, match="does not fit"):
                await connection.request(add(0, payload_bytes=1000))

            assert (await connection.request(add(0))).status is Status.EOK

    run(main())
