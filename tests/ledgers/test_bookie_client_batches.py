"""Batch reads, and how it is found out whether a bookie knows them."""

import asyncio
from collections.abc import Awaitable

import pytest

from ledgers.client import BookieClient
from ledgers.errors import NoSuchEntryError, UnavailableError
from ledgers.wire.messages import Status
from tests.ledgers.client_cases import (
    ENTRY,
    SETTINGS,
    ManualClock,
    answer,
    answer_one,
    client_of,
    reset,
)
from tests.ledgers.scripted_bookie import (
    Peer,
    Script,
    ScriptedBookie,
    run,
    scripted_bookie,
    step,
    v2_batch_reply,
    v3_reply,
)


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


@pytest.mark.compat(
    "G25",
    verdict="better",
    why="each entry has its own answer; an entry that a successful batch lacks is unknown",
)
def test_a_good_batch_without_an_entry_proves_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(v2_batch_reply(await peer.packet()))

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            with pytest.raises(UnavailableError, match="without an entry"):
                await read_batch(client, bookie)

    run(main())
