"""A client, and bookies that it asks."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.connection import ConnectionSettings
from ledgers.digest import HEADER
from ledgers.health import BookieHealth
from tests.ledgers.scripted_bookie import Peer, v2_reply, v3_reply

ENTRY = HEADER.pack(1, 0, -1, 0)
KEY = bytes(20)
SETTINGS = ConnectionSettings()


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def now_s(self) -> float:
        return self._now_s

    def wall_ms(self) -> int:
        return int(self._now_s * 1000)

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s

    async def sleep(self, duration_s: float) -> None:
        self.advance(duration_s)


@asynccontextmanager
async def client_of(
    *,
    settings: ConnectionSettings = SETTINGS,
    clock: ManualClock | None = None,
    resolve: Resolve = spelled_address,
    bulk: BulkTransfers | None = None,
) -> AsyncIterator[BookieClient]:
    bulk = bulk or BulkTransfers(
        Budgets(reads_in_flight_max=64),
        resolve=resolve,
        health=BookieHealth(clock or ManualClock(), rng=random.Random(7)),
    )
    client = BookieClient(bulk, settings=settings)
    try:
        yield client
    finally:
        await client.close()


async def answer(peer: Peer) -> None:
    """Answer as a bookie that returns ENTRY for every entry, in both protocols."""
    while True:
        await answer_one(peer, await peer.packet())


async def answer_one(peer: Peer, packet: bytes) -> None:
    match packet[:2]:
        case b"\x02\x01":
            await peer.send(v2_reply(packet))
        case _:
            await peer.send(v3_reply(packet, entry=ENTRY))


async def reset(peer: Peer) -> None:
    peer.reset()
