"""One connection to a scripted bookie."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.bulk.limiters import ReadBudget
from ledgers.connection import Connection, ConnectionSettings
from ledgers.digest import HEADER
from ledgers.wire.messages import Add, Codec, Read, Reply, Request
from tests.ledgers.scripted_bookie import Peer, Script, scripted_bookie, step, v3_reply

SETTINGS = ConnectionSettings(request_timeout_s=5.0, queue_timeout_s=30.0)


@asynccontextmanager
async def connected(
    script: Script,
    codec: Codec,
    *,
    reads: ReadBudget | None = None,
    settings: ConnectionSettings = SETTINGS,
) -> AsyncIterator[Connection]:
    async with scripted_bookie(script) as bookie:
        connection = await Connection(
            bookie.id,
            bookie.address,
            codec=codec,
            reads=reads or ReadBudget(count_max=64),
            settings=settings,
            on_broken=lambda connection, cause: None,
        ).open()
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
    """Start requests, each in its own task."""
    return [asyncio.create_task(connection.request(request)) for request in requests]


async def errors_of(tasks: list[asyncio.Task[Reply]]) -> list[BaseException | None]:
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) else None for each in outcomes]


class Desk:
    """A bookie that records its requests, and answers when a test tells it to."""

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
        """Return True if this number of requests has come, and after a while still no more."""
        while len(self.packets) < count:
            await self._arrivals.acquire()
        await step()
        return len(self.packets) == count

    async def answer(self, index: int) -> None:
        assert self._peer is not None
        await self._peer.send(v3_reply(self.packets[index]))
