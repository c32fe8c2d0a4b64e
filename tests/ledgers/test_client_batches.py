"""Batch reads, and how the client finds out whether a bookie supports them."""

import asyncio
from collections.abc import Awaitable

import pytest

from ledgers.client import BookieClient
from ledgers.connection import BACK_OFF_MAX_S
from ledgers.errors import NoSuchEntryError, UnavailableError
from ledgers.wire.messages import Status
from tests.ledgers.client_cases import (
    ENTRY,
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
    """Yield a bookie from before 4.17, which closes the connection, and the first requests of its
    connections."""
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


def test_a_bookie_without_batch_reads_is_asked_for_one_once() -> None:
    """Afterwards it is read entry by entry."""

    async def main() -> None:
        script, carried = bookie_without_batches()
        async with scripted_bookie(script) as bookie, client_of() as client:
            answers = await asyncio.gather(*(read_batch(client, bookie) for _ in range(5)))
            answers.append(await read_batch(client, bookie))

            assert answers == [[ENTRY]] * 6
            assert sorted(carried) == ["batch", "single"]

    run(main())


def test_a_bookie_that_registers_again_is_asked_for_them_again() -> None:
    async def main() -> None:
        script, carried = bookie_without_batches()
        async with scripted_bookie(script) as bookie, client_of() as client:
            await read_batch(client, bookie)

            client.bookie_returned(bookie.id)
            await read_batch(client, bookie)

            assert carried == ["batch", "single", "batch"]

    run(main())


def test_after_a_new_connection_batches_are_requested_again() -> None:
    """The bookie may be another version; its refusal was no failure to back off from."""
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


def test_a_bookie_back_as_an_older_version_is_read_singly() -> None:
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


def test_a_refusal_by_a_bookie_without_other_answers_is_ignored() -> None:
    """It may be stopping, and return as one that supports batch reads."""

    async def main() -> None:
        clock = ManualClock()
        async with (
            scripted_bookie(reset, reset, answer) as bookie,
            client_of(clock=clock) as client,
        ):
            with pytest.raises(UnavailableError):
                await read_batch(client, bookie)

            await clock.sleep(BACK_OFF_MAX_S)
            await read_batch(client, bookie)

            assert bookie.connection_count == 3  # the last one carried the batch

    run(main())


def test_a_single_read_that_finds_nothing_confirms_the_refusal() -> None:
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


def test_a_batch_is_never_larger_than_the_bound() -> None:
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
def test_a_successful_batch_without_an_entry_proves_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(v2_batch_reply(await peer.packet()))

    async def main() -> None:
        async with scripted_bookie(script) as bookie, client_of() as client:
            with pytest.raises(UnavailableError, match="without an entry"):
                await read_batch(client, bookie)

    run(main())
