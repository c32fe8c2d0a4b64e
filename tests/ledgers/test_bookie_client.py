"""What goes over which connection, what becomes of a bookie that does not answer, and batch reads."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ledgers.bookie_client import BookieClient, BookieClientSettings
from ledgers.bookie_info import Address
from ledgers.bookies import LAST_ENTRY, LacAnswer, Transfer, TransferResult
from ledgers.budget import Budgets
from ledgers.channel import BackOffSettings, back_off_s
from ledgers.entry import HEADER
from ledgers.errors import NoSuchEntryError, UnavailableError
from ledgers.metadata import BookieId
from ledgers.protocol import bookkeeper_wire_pb2 as wire
from ledgers.protocol.frames import frame
from ledgers.protocol.status import Status
from tests.ledgers.scripted_bookie import (
    Peer,
    Script,
    ScriptedBookie,
    run,
    scripted_bookie,
    step,
    v2_batch_reply,
    v2_reply,
    v3_reply,
)

ENTRY = HEADER.pack(1, 0, -1, 0)
KEY = bytes(20)
SETTINGS = BookieClientSettings()


class ManualClock:
    """Stands still until it is told to move."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def now_s(self) -> float:
        return self._now_s

    def wall_ms(self) -> int:
        return int(self._now_s * 1000)

    async def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s


class NoBulk:
    is_closed = False

    async def transfer(self, transfer: Transfer) -> TransferResult:
        raise AssertionError("no transfer in these tests")

    async def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def client_of(
    *,
    settings: BookieClientSettings = SETTINGS,
    clock: ManualClock | None = None,
    resolve: Callable[[BookieId], Address | None] = lambda bookie: None,
    bulk: NoBulk | None = None,
) -> AsyncIterator[BookieClient]:
    client = BookieClient(
        resolve=resolve,
        budgets=Budgets(),
        bulk=bulk or NoBulk(),
        clock=clock or ManualClock(),
        rng=random.Random(7),
        settings=settings,
    )
    try:
        yield client
    finally:
        await client.close()


async def answer(peer: Peer) -> None:
    """A bookie that stores ENTRY as every entry, in both protocols; batches are one entry long."""
    while True:
        await answer_one(peer, await peer.packet())


async def answer_one(peer: Peer, packet: bytes) -> None:
    match packet[:2]:
        case b"\x02\x07":
            await peer.send(v2_batch_reply(packet, ENTRY))
        case b"\x02\x02":
            await peer.send(v2_reply(packet, entry=ENTRY))
        case b"\x02\x01":
            await peer.send(v2_reply(packet))
        case _:
            await peer.send(v3_reply(packet, entry=ENTRY))


async def reset(peer: Peer) -> None:
    peer.reset()


# --- Which connection ----------------------------------------------------------------------------


Call = Callable[[BookieClient, BookieId], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "versions"),
    [
        pytest.param(lambda c, b: c.read(b, 1, 0), ["v2", "v3"], id="read"),
        pytest.param(lambda c, b: c.add(b, ENTRY, master_key=KEY), ["v2", "v3"], id="add"),
        pytest.param(lambda c, b: c.read(b, 1, LAST_ENTRY), ["v3", "v3"], id="last entry"),
        pytest.param(
            lambda c, b: c.read_fencing(b, 1, 0, master_key=KEY), ["v3", "v3"], id="fencing read"
        ),
        pytest.param(
            lambda c, b: c.read_batch(b, 1, 0, count_max=1, bytes_max=1), ["v2", "v2"], id="batch"
        ),
    ],
)
def test_what_must_be_told_apart_goes_over_v3_whatever_the_settings(
    call: Call, versions: list[str]
) -> None:
    """The first version is seen where the settings say V2, the second where they say V3."""
    seen = []

    async def script(peer: Peer) -> None:
        packet = await peer.packet()
        seen.append("v2" if packet[0] == 2 else "v3")
        await answer_one(peer, packet)

    async def main() -> None:
        for settings in (replace(SETTINGS, protocol="v2"), replace(SETTINGS, protocol="v3")):
            async with scripted_bookie(script) as bookie, client_of(settings=settings) as client:
                await call(client, bookie.id)

    run(main())

    assert seen == versions


def test_a_registered_address_comes_before_what_the_id_says() -> None:
    async def main() -> None:
        async with scripted_bookie(answer) as bookie:
            addresses = {BookieId("rack-1-host-2"): bookie.address, BookieId("b:1"): bookie.address}
            async with client_of(resolve=addresses.get) as client:
                assert await client.read(BookieId("rack-1-host-2"), 1, 0) == ENTRY
                assert await client.read(BookieId("b:1"), 1, 0) == ENTRY
                assert await client.read(bookie.id, 1, 0) == ENTRY
                with pytest.raises(UnavailableError, match="nobody knows"):
                    await client.read(BookieId("rack-9-host-9"), 1, 0)

    run(main())


# --- A bookie that cannot be reached -------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure_count", "jitter", "expected_s"),
    [
        pytest.param(1, 0.0, 0.05, id="half the first pause at least"),
        pytest.param(1, 1.0, 0.1, id="the first pause at most"),
        pytest.param(2, 1.0, 0.2, id="it doubles"),
        pytest.param(4, 0.0, 0.4, id="and doubles"),
        pytest.param(7, 1.0, 5.0, id="up to the longest"),
        pytest.param(10_000, 1.0, 5.0, id="however long it lasts"),
    ],
)
def test_the_pause_after_failures(failure_count: int, jitter: float, expected_s: float) -> None:
    settings = BackOffSettings(first_s=0.1, max_s=5.0)

    assert back_off_s(failure_count, settings, jitter=jitter) == pytest.approx(expected_s)


def test_a_bookie_that_resets_connections_is_left_alone_for_a_while() -> None:
    """As one does that is starting: it accepts connections before it serves."""

    async def main() -> None:
        clock = ManualClock()
        async with (
            scripted_bookie(reset, reset, answer) as bookie,
            client_of(clock=clock) as client,
        ):
            for attempt in (1, 2):
                with pytest.raises(UnavailableError, match="connection broke"):
                    await client.read(bookie.id, 1, 0)
                with pytest.raises(UnavailableError, match="not reachable a moment ago"):
                    await client.read(bookie.id, 1, 0)
                assert bookie.connection_count == attempt
                await clock.sleep(SETTINGS.back_off.max_s)

            assert await client.read(bookie.id, 1, 0) == ENTRY

    run(main())


def test_the_pause_grows_from_failure_to_failure() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with scripted_bookie(reset) as bookie, client_of(clock=clock) as client:

            async def attempt() -> int:
                with pytest.raises(UnavailableError):
                    await client.read(bookie.id, 1, 0)
                return bookie.connection_count

            assert await attempt() == 1
            await clock.sleep(SETTINGS.back_off.first_s)
            assert await attempt() == 2
            await clock.sleep(SETTINGS.back_off.first_s)
            assert await attempt() == 2  # the second pause is longer than the first may be

    run(main())


def test_a_bookie_that_refuses_connections_is_left_alone_until_it_registers_again() -> None:
    async def main() -> None:
        async with scripted_bookie(answer) as bookie:
            address: Address | None = Address("127.0.0.1", 1)  # nobody listens on port 1
            async with client_of(resolve=lambda _: address) as client:
                with pytest.raises(UnavailableError, match="cannot connect"):
                    await client.read(bookie.id, 1, 0)
                address = bookie.address
                with pytest.raises(UnavailableError, match="not reachable a moment ago"):
                    await client.read(bookie.id, 1, 0)

                client.bookie_returned(bookie.id)

                assert await client.read(bookie.id, 1, 0) == ENTRY

    run(main())


def test_a_connection_that_had_served_is_made_again_at_once() -> None:
    async def serve_one(peer: Peer) -> None:
        await answer_one(peer, await peer.packet())

    async def main() -> None:
        async with scripted_bookie(serve_one) as bookie, client_of() as client:
            for _ in range(3):
                assert await client.read(bookie.id, 1, 0) == ENTRY
                await step()  # the bookie closes the connection

            assert bookie.connection_count == 3

    run(main())


def test_callers_share_one_connection_and_its_failure() -> None:
    async def main() -> None:
        async with scripted_bookie(reset) as bookie, client_of() as client:
            reads = [client.read(bookie.id, 1, entry_id) for entry_id in range(20)]

            outcomes = await asyncio.gather(*reads, return_exceptions=True)

            assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
            assert bookie.connection_count == 1

    run(main())


def test_a_caller_that_gives_up_connecting_leaves_the_attempt_to_the_next() -> None:
    async def main() -> None:
        async with scripted_bookie(answer) as bookie, client_of() as client:
            first = asyncio.create_task(client.read(bookie.id, 1, 0))
            second = asyncio.create_task(client.read(bookie.id, 1, 0))
            await asyncio.sleep(0)

            first.cancel()

            assert await second == ENTRY

    run(main())


def test_a_closed_client_asks_nobody() -> None:
    async def main() -> None:
        bulk = NoBulk()
        async with scripted_bookie(answer) as bookie, client_of(bulk=bulk) as client:
            await client.read(bookie.id, 1, 0)
            await client.close()

            assert bulk.is_closed
            with pytest.raises(UnavailableError, match="closed by us"):
                await client.read(bookie.id, 1, 0)

    run(main())


# --- Batch reads -----------------------------------------------------------------------------------


def bookie_without_batches() -> tuple[Script, list[str]]:
    """Before 4.17: it closes the connection. And what its connections carried first."""
    carried: list[str] = []

    async def script(peer: Peer) -> None:
        packet = await peer.packet()
        is_batch = packet[:2] == b"\x02\x07"
        carried.append("batch" if is_batch else "single")
        if not is_batch:
            await answer_one(peer, packet)
            await answer(peer)

    return script, carried


def read_batch(client: BookieClient, bookie: ScriptedBookie) -> Awaitable[list[bytes]]:
    return client.read_batch(bookie.id, 1, 0, count_max=10, bytes_max=1 << 20)


def test_a_bookie_without_batch_reads_is_read_singly_and_asked_only_once() -> None:
    async def main() -> None:
        script, carried = bookie_without_batches()
        async with scripted_bookie(script) as bookie, client_of() as client:
            answers = await asyncio.gather(*(read_batch(client, bookie) for _ in range(5)))
            answers.append(await read_batch(client, bookie))

            assert answers == [[ENTRY]] * 6
            assert sorted(carried) == ["batch", "single"]

    run(main())


def test_a_bookie_that_registers_again_is_asked_for_batches_again() -> None:
    async def main() -> None:
        script, carried = bookie_without_batches()
        async with scripted_bookie(script) as bookie, client_of() as client:
            await read_batch(client, bookie)

            client.bookie_returned(bookie.id)
            await read_batch(client, bookie)

            assert carried == ["batch", "single", "batch"]

    run(main())


def test_a_bookie_that_was_connected_to_anew_is_asked_for_batches_again() -> None:
    """It may be another version by now. That it refused before is no failure to back off from."""
    carried: list[str] = []

    async def script(peer: Peer) -> None:
        packet = await peer.packet()
        carried.append("batch" if packet[:2] == b"\x02\x07" else "single")
        if carried[-1] == "single":
            await answer_one(peer, packet)

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            for _ in range(2):
                assert await read_batch(client, bookie) == [ENTRY]
                await step()  # the bookie closes the connection for single reads

    run(main())

    assert carried == ["batch", "single"] * 2


def test_a_bookie_that_comes_back_as_an_older_version_is_read_singly() -> None:
    batch_count = 0

    async def script(peer: Peer) -> None:
        nonlocal batch_count
        while True:
            packet = await peer.packet()
            batch_count += packet[:2] == b"\x02\x07"
            if batch_count == 2:
                batch_count += 1
                return
            await answer_one(peer, packet)
            if batch_count == 1:
                return

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            assert await read_batch(client, bookie) == [ENTRY]
            await step()  # the bookie closes the connection
            assert await read_batch(client, bookie) == [ENTRY]

            assert bookie.connection_count == 3

    run(main())


def test_a_refusal_is_not_believed_of_a_bookie_that_answers_nothing_else() -> None:
    """It may be going down, and come back as one that knows batch reads."""

    async def main() -> None:
        clock = ManualClock()
        async with (
            scripted_bookie(reset, reset, answer) as bookie,
            client_of(clock=clock) as client,
        ):
            with pytest.raises(UnavailableError):
                await read_batch(client, bookie)

            await clock.sleep(SETTINGS.back_off.max_s)
            await read_batch(client, bookie)

            assert bookie.connection_count == 3  # the last one carried the batch

    run(main())


def test_a_single_read_that_finds_nothing_confirms_the_refusal_too() -> None:
    probes = 0

    async def script(peer: Peer) -> None:
        nonlocal probes
        while True:
            packet = await peer.packet()
            if packet[:2] == b"\x02\x07":
                probes += 1
                return
            await peer.send(v3_reply(packet, Status.ENOENTRY))

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            for _ in range(3):
                with pytest.raises(NoSuchEntryError):
                    await read_batch(client, bookie)

    run(main())

    assert probes == 1


def test_a_batch_is_never_asked_to_be_larger_than_the_cap() -> None:
    sizes = []

    async def script(peer: Peer) -> None:
        while True:
            packet = await peer.packet()
            sizes.append(int.from_bytes(packet[32:40], "big"))
            await peer.send(v2_batch_reply(packet, ENTRY))

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            await client.read_batch(bookie.id, 1, 0, count_max=10, bytes_max=1 << 40)
            await client.read_batch(bookie.id, 1, 0, count_max=10, bytes_max=1000)

    run(main())

    assert sizes == [256 * 1024, 1000]


def test_a_good_batch_without_an_entry_proves_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(v2_batch_reply(await peer.packet()))

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            with pytest.raises(UnavailableError, match="without an entry"):
                await read_batch(client, bookie)

    run(main())


# --- LACs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "bodies", "expected"),
    [
        pytest.param(0, {"lastEntryBody": b"e"}, LacAnswer(last_entry=b"e"), id="an entry"),
        pytest.param(
            501,
            {"lacBody": b"l"},
            LacAnswer(lac_record=b"l"),
            id="a record, and trouble with the entry",
        ),
        pytest.param(403, {}, NoSuchEntryError, id="neither"),
        pytest.param(501, {}, UnavailableError, id="trouble with both"),
    ],
)
def test_a_lac_reply_counts_for_what_it_holds(
    status: int, bodies: dict[str, bytes], expected: LacAnswer | type[Exception]
) -> None:
    async def script(peer: Peer) -> None:
        request = wire.Request.FromString(await peer.packet())
        response = wire.Response(header=request.header, status=status)
        response.readLacResponse.CopyFrom(wire.ReadLacResponse(status=status, ledgerId=1, **bodies))
        await peer.send(frame(response.SerializeToString()))
        await peer.is_left()

    async def main() -> LacAnswer:
        async with scripted_bookie(script) as bookie, client_of() as client:
            return await client.read_lac(bookie.id, 1)

    if isinstance(expected, LacAnswer):
        assert run(main()) == expected
    else:
        with pytest.raises(expected):
            run(main())
