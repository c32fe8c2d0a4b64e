"""Choice of the connection for a request, and handling of a bookie that does not answer."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ledgers.bookies import LAST_ENTRY, LacAnswer
from ledgers.client import V3_ENTRY_BYTES_MAX, BookieClient
from ledgers.codec.registration import Address, spelled_address
from ledgers.connection import ConnectionSettings
from ledgers.errors import (
    AuthenticationRequiredError,
    NoAnswerError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.health import PAUSE_MAX_S, pause_s
from ledgers.model import BookieId
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire.framing import frame
from ledgers.wire.messages import Status
from tests.ledgers.client_cases import ENTRY, KEY, ManualClock, answer, answer_one, client_of, reset
from tests.ledgers.scripted_bookie import Peer, in_loop, run, scripted_bookie, step, v3_reply

# --- Which connection -----------------------------------------------------------------------------


Call = Callable[[BookieClient, BookieId], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "version"),
    [
        pytest.param(lambda c, b: c.read(b, 1, 0), "v3", id="read"),
        pytest.param(lambda c, b: c.add(b, ENTRY, master_key=KEY), "v3", id="add"),
        pytest.param(lambda c, b: c.read(b, 1, LAST_ENTRY), "v3", id="last entry"),
        pytest.param(lambda c, b: c.read_fencing(b, 1, 0, master_key=KEY), "v3", id="fencing read"),
        pytest.param(
            lambda c, b: c.add(b, ENTRY + bytes(V3_ENTRY_BYTES_MAX), master_key=KEY),
            "v2",
            id="add of a large entry",
        ),
    ],
)
def test_calls_that_need_distinct_replies_use_v3(call: Call, version: str) -> None:
    seen = []

    async def script(peer: Peer) -> None:
        packet = await peer.packet()
        seen.append("v2" if packet[0] == 2 else "v3")
        await answer_one(peer, packet)

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            await call(client, bookie.id)

    run(main())

    assert seen == [version]


@in_loop
async def test_a_registered_address_overrides_the_one_in_the_id() -> None:
    async with scripted_bookie(answer) as bookie:
        addresses = {BookieId("rack-1-host-2"): bookie.address, BookieId("b:1"): bookie.address}
        async with client_of(
            resolve=lambda bookie: addresses.get(bookie) or spelled_address(bookie)
        ) as client:
            assert await client.read(BookieId("rack-1-host-2"), 1, 0) == ENTRY
            assert await client.read(BookieId("b:1"), 1, 0) == ENTRY
            assert await client.read(bookie.id, 1, 0) == ENTRY
            with pytest.raises(UnavailableError, match="no known address"):
                await client.read(BookieId("rack-9-host-9"), 1, 0)


# --- A bookie that cannot be reached --------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure_count", "jitter", "expected_s"),
    [
        pytest.param(1, 0.0, 0.05, id="at least the first pause divided by two"),
        pytest.param(1, 1.0, 0.1, id="the first pause at most"),
        pytest.param(2, 1.0, 0.2, id="it doubles"),
        pytest.param(4, 0.0, 0.4, id="and doubles"),
        pytest.param(7, 1.0, 5.0, id="up to the longest"),
        pytest.param(10_000, 1.0, 5.0, id="however long it lasts"),
    ],
)
def test_the_pause_after_failures(failure_count: int, jitter: float, expected_s: float) -> None:
    assert pause_s(failure_count, jitter=jitter) == pytest.approx(expected_s)


@in_loop
async def test_a_bookie_that_resets_connections_is_avoided_for_a_while() -> None:
    """A starting bookie does this: it accepts connections before it can serve."""
    clock = ManualClock()
    async with scripted_bookie(reset, reset, answer) as bookie, client_of(clock=clock) as client:
        for attempt in (1, 2):
            with pytest.raises(UnavailableError, match="connection broke"):
                await client.read(bookie.id, 1, 0)
            with pytest.raises(UnavailableError, match="not reachable: connection reset by peer"):
                await client.read(bookie.id, 1, 0)
            assert bookie.connection_count == attempt
            await clock.sleep(PAUSE_MAX_S)

        assert await client.read(bookie.id, 1, 0) == ENTRY


@in_loop
async def test_a_refusing_bookie_is_avoided_until_it_registers_again() -> None:
    async with scripted_bookie(answer) as bookie:
        address = Address("127.0.0.1", 1)  # no process listens on port 1
        async with client_of(resolve=lambda _: address) as client:
            with pytest.raises(UnavailableError, match="cannot connect"):
                await client.read(bookie.id, 1, 0)
            address = bookie.address
            with pytest.raises(
                UnavailableError, match="not reachable: cannot connect: connection refused"
            ):
                await client.read(bookie.id, 1, 0)

            client.bookie_returned(bookie.id)

            assert await client.read(bookie.id, 1, 0) == ENTRY


@in_loop
async def test_a_connection_that_had_served_is_made_again_at_once() -> None:
    async def serve_one(peer: Peer) -> None:
        await answer_one(peer, await peer.packet())

    async with scripted_bookie(serve_one) as bookie, client_of() as client:
        for _ in range(3):
            assert await client.read(bookie.id, 1, 0) == ENTRY
            await step()  # the bookie closes the connection

        assert bookie.connection_count == 3


@in_loop
async def test_a_bookie_that_stopped_answering_is_avoided_for_a_while() -> None:
    """Although its connection had served."""

    async def fall_silent(peer: Peer) -> None:
        await answer_one(peer, await peer.packet())
        await peer.is_left()

    clock = ManualClock()
    settings = ConnectionSettings(request_timeout_s=0.01)
    async with (
        scripted_bookie(fall_silent, answer) as bookie,
        client_of(clock=clock, settings=settings) as client,
    ):
        assert await client.read(bookie.id, 1, 0) == ENTRY
        with pytest.raises(NoAnswerError, match="no answer in time"):
            await client.read(bookie.id, 1, 0)

        with pytest.raises(UnavailableError, match="not reachable: no answer in time"):
            await client.read(bookie.id, 1, 0)
        assert bookie.connection_count == 1


@in_loop
async def test_callers_share_one_connection_and_its_failure() -> None:
    async with scripted_bookie(reset) as bookie, client_of() as client:
        reads = [client.read(bookie.id, 1, entry_id) for entry_id in range(20)]

        outcomes = await asyncio.gather(*reads, return_exceptions=True)

        assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
        assert bookie.connection_count == 1


# --- LACs -----------------------------------------------------------------------------------------


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
def test_the_fields_of_a_lac_reply_decide(
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


# --- Authentication -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(lambda c, b: c.read(b, 1, 0), AuthenticationRequiredError, id="read"),
        pytest.param(lambda c, b: c.room(b), AuthenticationRequiredError, id="space"),
        pytest.param(lambda c, b: c.read_lac(b, 1), AuthenticationRequiredError, id="LAC"),
        pytest.param(
            lambda c, b: c.read_fencing(b, 1, 0, master_key=KEY),
            UnauthorizedError,
            id="here it may be the key",
        ),
    ],
)
@in_loop
async def test_a_refusal_of_a_request_without_key_means_authentication(
    call: Call, error: type[Exception]
) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.send(v3_reply(await peer.packet(), Status.EUA))

    async with scripted_bookie(refuse) as bookie, client_of() as client:
        with pytest.raises(error) as told:
            await call(client, bookie.id)
        assert type(told.value) is error
