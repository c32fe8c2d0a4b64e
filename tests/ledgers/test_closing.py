"""Clients of bookies that are closed while they connect: nothing stays open, and nothing is opened
later."""

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

import pytest

from ledgers.bookies import Transfer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.codec.registration import Address
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from tests.ledgers.bulk_cases import DIGEST
from tests.replication.cluster import in_virtual_time

P = TypeVar("P", bound=asyncio.BaseProtocol)

BOOKIE = BookieId("bookie:3181")


class SilentTransport:
    """A connection on which nothing arrives."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self.is_open = True
        protocol.connection_made(cast(asyncio.Transport, self))

    def write(self, data: bytes) -> None:
        assert self.is_open

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            lost = cast(asyncio.Protocol, self._protocol).connection_lost
            asyncio.get_running_loop().call_soon(lost, None)


BEFORE, MADE, CONNECTED = "before the connection", "before it is handed over", "connected"


@pytest.mark.parametrize("goes_on", [False, True], ids=["stuck", "goes on while it is closed"])
@pytest.mark.parametrize("step", [BEFORE, MADE, CONNECTED])
@pytest.mark.parametrize("is_bulk", [False, True], ids=["requests", "transfers"])
@in_virtual_time
async def test_nothing_stays_open_wherever_the_client_is_closed(
    is_bulk: bool, step: str, goes_on: bool
) -> None:
    made: list[SilentTransport] = []
    reached, gate = asyncio.Event(), asyncio.Event()

    async def wait_at(here: str) -> None:
        if step == here:
            reached.set()
            await gate.wait()

    async def connect(factory: Callable[[], P], address: Address) -> tuple[asyncio.Transport, P]:
        await wait_at(BEFORE)
        protocol = factory()
        made.append(SilentTransport(protocol))
        try:
            await wait_at(MADE)
        except asyncio.CancelledError:
            made[-1].abort()
            raise
        asyncio.get_running_loop().call_soon(reached.set)
        return cast(asyncio.Transport, made[-1]), protocol

    budgets = Budgets(reads_in_flight_max=8)
    bulk = BulkTransfers(budgets, connector=connect)
    client = BookieClient(bulk)

    async def ask() -> None:
        if not is_bulk:
            with pytest.raises(BookmenderError):
                await client.read(BOOKIE, 1, 1)
            return
        transfer = Transfer(ledger_id=1, digest=DIGEST, reads={BOOKIE: range(3)})
        assert (await client.transfer(transfer)).entry_count == 0

    asking = asyncio.create_task(ask())
    await reached.wait()

    closing = asyncio.create_task(client.close())
    if goes_on:
        asyncio.get_running_loop().call_soon(gate.set)
    await closing
    await asking

    assert not any(transport.is_open for transport in made)
    made_count = len(made)
    await ask()
    await asyncio.sleep(60.0)
    assert len(made) == made_count
