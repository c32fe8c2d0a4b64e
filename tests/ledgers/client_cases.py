"""A client, and bookies that it asks."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.bookies import SourceHealth, Transfer, TransferResult
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient, BookieClientSettings
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.digest import HEADER
from ledgers.model import BookieId
from tests.ledgers.scripted_bookie import (
    Peer,
    v2_batch_reply,
    v2_reply,
    v3_reply,
)

ENTRY = HEADER.pack(1, 0, -1, 0)
KEY = bytes(20)
SETTINGS = BookieClientSettings()


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


class NoBulk:
    is_closed = False

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return SourceHealth()

    async def transfer(self, transfer: Transfer) -> TransferResult:
        raise AssertionError("no transfer in these tests")

    async def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def client_of(
    *,
    settings: BookieClientSettings = SETTINGS,
    clock: ManualClock | None = None,
    resolve: Resolve = spelled_address,
    bulk: NoBulk | None = None,
) -> AsyncIterator[BookieClient]:
    client = BookieClient(
        resolve=resolve,
        budgets=Budgets(reads_in_flight_max=64),
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
    """Answer as a bookie that returns ENTRY for every entry, in both protocols; batches have one
    entry."""
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
