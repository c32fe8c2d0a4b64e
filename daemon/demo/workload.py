"""Writing the demonstration's ledgers through our own client, and going on with some of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from daemon.demo.shapes import Ending, Shape, shapes_to_try
from daemon.settings import Settings
from daemon.visit import Visit, visit
from ledgers.bookie.opening import open_bookies
from ledgers.bookies import Bookies
from ledgers.clock import Clock, SystemClock
from ledgers.entry import EntryHeader
from ledgers.errors import BookmenderError, NotEnoughBookiesError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId
from ledgers.operations.creation import LedgerOptions
from ledgers.operations.ensembles import BookiePool
from ledgers.operations.writer import LedgerWriter
from ledgers.placement import Candidate, RandomPlacement
from ledgers.registration import Registration

LEDGERS_AT_ONCE = 12
LIVE_PAUSE_S = 0.02
PASSWORD = b"demo"


@dataclass(slots=True)
class Written:
    """A ledger, and how many of its entries were acknowledged: ids 0 to ``acknowledged - 1``."""

    shape: Shape
    ledger_id: int
    acknowledged: int = 0
    ended_by: str | None = None
    """Why a live writer stopped before it was told to; None when it did not."""


@asynccontextmanager
async def open_workload(seen: Visit, rng: random.Random) -> AsyncIterator["Workload"]:
    """A client of the bookies of our own, as a writing application has one."""
    clock = SystemClock()
    async with open_bookies(clock=clock, rng=rng) as bookies:
        workload = Workload(
            manager=seen.manager,
            registration=seen.registration,
            bookies=bookies,
            clock=clock,
            rng=rng,
        )
        try:
            yield workload
        finally:
            await workload.abandon()


def write_ledgers(uri: str, ledger_count: int, *, open_count: int = 0) -> list[Written]:
    """Write so many ledgers that survive the loss of a bookie, and close all but ``open_count``, the last ones.

    Raises NotEnoughBookiesError with fewer than three writable bookies.
    """

    async def write() -> list[Written]:
        settings, rng = Settings(metadata_service_uri=uri), random.Random()
        async with visit(settings) as seen, open_workload(seen, rng) as workload:
            bookie_count = len((await seen.registration.read()).writable)
            wanted = shapes_to_try(ledger_count, open_count=open_count, bookie_count=bookie_count)
            if not wanted:
                raise NotEnoughBookiesError(
                    "ledgers that survive the loss of a bookie need three writable ones"
                )
            await workload.write(wanted)
            return workload.written

    return asyncio.run(write())


class FailingBookie:
    """The bookies, of which one fails its writer from an entry on: the writer replaces it."""

    def __init__(self, bookies: Bookies, *, from_entry_id: int) -> None:
        self._bookies, self._from_entry_id = bookies, from_entry_id
        self._failing: BookieId | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bookies, name)

    async def add(self, bookie: BookieId, entry: bytes, **options: Any) -> None:
        if EntryHeader.of(entry).entry_id >= self._from_entry_id:
            self._failing = self._failing or bookie
            if bookie == self._failing:
                raise UnavailableError("fails for the sake of the demonstration", bookie=bookie)
        await self._bookies.add(bookie, entry, **options)


@dataclass(slots=True)
class Workload:
    """Writes the shapes, keeps the live writers going until ``stop``."""

    manager: LedgerManager
    registration: Registration
    bookies: Bookies
    clock: Clock
    rng: random.Random
    written: list[Written] = field(default_factory=list)
    _open: AsyncExitStack = field(default_factory=AsyncExitStack)
    _live: list[tuple[LedgerWriter, asyncio.Task[None]]] = field(default_factory=list)

    async def write(self, wanted: Sequence[Shape]) -> None:
        """Write all of them, several at once; live writers go on in the background."""
        slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

        async def write_one(shape: Shape) -> None:
            async with slots:
                await self._write_closed(shape)

        async with asyncio.TaskGroup() as tasks:
            for shape in wanted:
                if shape.ending is Ending.CLOSED:
                    tasks.create_task(write_one(shape))
        for shape in wanted:
            if shape.ending is not Ending.CLOSED:
                await self._write_open(shape)

    async def stop(self) -> None:
        """End the live writers, closing their ledgers, and abandon the others."""
        for writer, task in self._live:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                continue  # somebody recovered the ledger: it is closed
            await writer.close()
        await self.abandon()

    async def abandon(self) -> None:
        """Leave every ledger as it is, its writer gone. Any number of times."""
        for _, task in self._live:
            task.cancel()
        self._live.clear()
        await self._open.aclose()

    async def _write_closed(self, shape: Shape) -> None:
        async with self._writer(shape) as writer:
            await self._fill(writer, shape)
            await writer.close()

    async def _write_open(self, shape: Shape) -> None:
        writer = await self._open.enter_async_context(self._writer(shape))
        written = await self._fill(writer, shape)
        if shape.ending is Ending.LIVE:
            task = asyncio.create_task(self._go_on(writer, written))  # owned: ended by ``stop``
            self._live.append((writer, task))

    async def _fill(self, writer: LedgerWriter, shape: Shape) -> Written:
        written = Written(shape=shape, ledger_id=writer.ledger_id)
        self.written.append(written)
        payloads = map(shape.payload, range(shape.entry_count))
        if shape.ending is Ending.CLOSED:
            await asyncio.gather(*[await writer.send(payload) for payload in payloads])
        else:  # one by one, so that each says that the one before it is acknowledged
            for payload in payloads:
                await writer.add(payload)
        written.acknowledged = shape.entry_count
        return written

    async def _go_on(self, writer: LedgerWriter, written: Written) -> None:
        try:
            while True:
                await writer.add(written.shape.payload(written.acknowledged))
                written.acknowledged += 1
                await self.clock.sleep(LIVE_PAUSE_S)
        except BookmenderError as error:
            written.ended_by = str(error)

    def _writer(self, shape: Shape) -> AbstractAsyncContextManager[LedgerWriter]:
        bookies = self.bookies
        if shape.change_at is not None:
            bookies = cast(Bookies, FailingBookie(bookies, from_entry_id=shape.change_at))
        return LedgerWriter.create(
            LedgerOptions(
                ensemble_size=shape.ensemble_size,
                write_quorum=shape.write_quorum,
                ack_quorum=shape.ack_quorum,
                digest_type=shape.digest_type,
                password=PASSWORD,
                metadata_version=shape.metadata_version,
            ),
            manager=self.manager,
            bookies=bookies,
            pool=BookiePool(writable=self._writable, placement=RandomPlacement(self.rng)),
            clock=self.clock,
            random=self.rng,
        )

    async def _writable(self) -> list[Candidate]:
        view = await self.registration.read()
        return [Candidate(bookie=bookie) for bookie in view.writable]
