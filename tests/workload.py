"""Writes ledgers of many shapes with our own client, and keeps writing to some of them.

The shapes are the same in every run.
"""

import asyncio
import enum
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from daemon.admin_session import AdminSession
from daemon.local.writing import (
    LARGE,
    LARGE_EVERY,
    LEDGERS_AT_ONCE,
    OPEN_SIZE,
    PASSWORD,
    READS_IN_FLIGHT_MAX,
    SIZES,
    payload,
)
from ledgers.appending import BookiePool
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Bookies
from ledgers.client import open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.digest import EntryHeader
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, DigestType
from ledgers.placement import Candidate, RandomPlacement
from ledgers.registration import Registration
from ledgers.tasks import task_scope
from ledgers.writing import LedgerOptions, LedgerWriter


class Ending(enum.Enum):
    """The ways in which the writing of a ledger ends."""

    CLOSED = "closed"
    ABANDONED = "abandoned"
    """The ledger is left open, and its writer has ended."""
    LIVE = "live"
    """The ledger is left open, and its writer keeps writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of one ledger. ``change_at``: at this entry a bookie fails, and the writer replaces
    it."""

    number: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest_type: DigestType
    metadata_version: int
    entry_bytes: int
    entry_count: int
    change_at: int | None = None
    ending: Ending = Ending.CLOSED

    def payload(self, entry_id: int) -> bytes:
        """Return ``entry_bytes`` bytes that differ for every entry."""
        return payload(self.number, entry_id, self.entry_bytes)


QUORUMS = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 2, 2), (5, 3, 2))
CHANGE_EVERY = 9
OPEN_COUNT = 5
LIVE_COUNT = 2


def shapes(ledger_count: int, *, quorums: Sequence[tuple[int, int, int]] = QUORUMS) -> list[Shape]:
    """Return ``ledger_count`` shapes. The last five ledgers are left open, two of them with a live
    writer.

    ``quorums``: ensemble size, write quorum and ack quorum, used in turn.
    """
    kinds = zip(
        itertools.cycle(quorums),
        itertools.cycle(SIZES),
        itertools.cycle(DigestType),
        itertools.cycle((3, 3, 2)),
        strict=False,
    )
    numbered = zip(range(ledger_count), kinds, strict=False)
    return [_shape(number, ledger_count, *kind) for number, kind in numbered]


def _shape(
    number: int,
    ledger_count: int,
    quorums: tuple[int, int, int],
    size: tuple[int, int],
    digest_type: DigestType,
    metadata_version: int,
) -> Shape:
    from_end = ledger_count - number
    ending = Ending.CLOSED
    if from_end <= OPEN_COUNT:
        ending = Ending.LIVE if from_end <= LIVE_COUNT else Ending.ABANDONED
        quorums, size = (3, 3, 2), OPEN_SIZE
    elif number % LARGE_EVERY == LARGE_EVERY - 1:
        size = LARGE
    ensemble_size, write_quorum, ack_quorum = quorums
    entry_bytes, entry_count = size
    may_change = ensemble_size <= 4 and entry_count >= 4 and ending is Ending.CLOSED
    return Shape(
        number=number,
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        metadata_version=metadata_version,
        entry_bytes=entry_bytes,
        entry_count=entry_count,
        change_at=entry_count // 2 if may_change and number % CHANGE_EVERY == 0 else None,
        ending=ending,
    )


LIVE_PAUSE_S = 0.02


@dataclass(slots=True)
class Written:
    """A ledger and the number of its acknowledged entries, which have the ids 0 to ``acknowledged -
    1``."""

    shape: Shape
    ledger_id: int
    acknowledged: int = 0
    is_closed: bool = False
    ended_by: str | None = None
    """The error that stopped a live writer; None if there was none."""

    def payload(self, entry_id: int) -> bytes:
        return self.shape.payload(entry_id)


@asynccontextmanager
async def open_workload(seen: AdminSession, rng: random.Random) -> AsyncIterator["Workload"]:
    """Open a workload with a bookie client of its own, as a writing application would."""
    clock = SystemClock()
    async with open_bookies(
        reads_in_flight_max=READS_IN_FLIGHT_MAX, connector=bookie_connector(seen.settings.security)
    ) as bookies:
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


class FailingBookie:
    """Bookies of which one fails from a given entry on, so that the writer replaces it."""

    def __init__(self, bookies: Bookies, *, from_entry_id: int) -> None:
        self._bookies, self._from_entry_id = bookies, from_entry_id
        self._failing: BookieId | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bookies, name)

    async def add(self, bookie: BookieId, entry: bytes, **options: Any) -> None:
        if EntryHeader.of(entry).entry_id >= self._from_entry_id:
            self._failing = self._failing or bookie
            if bookie == self._failing:
                raise UnavailableError(
                    "made to fail, so that its writer replaces it", bookie=bookie
                )
        await self._bookies.add(bookie, entry, **options)


@dataclass(slots=True)
class Workload:
    """Writes the shapes, and keeps the live writers going until ``stop``."""

    manager: LedgerManager
    registration: Registration
    bookies: Bookies
    clock: Clock
    rng: random.Random
    written: list[Written] = field(default_factory=list)
    _open: AsyncExitStack = field(default_factory=AsyncExitStack)
    _live: list[tuple[LedgerWriter, asyncio.Task[None]]] = field(default_factory=list)

    async def write(self, wanted: Sequence[Shape]) -> None:
        """Write all shapes, several at once. Live writers continue in the background. Raises what
        ``LedgerWriter`` raises."""
        slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

        async def write_one(shape: Shape) -> None:
            async with slots:
                await self._write_closed(shape)

        closed = [shape for shape in wanted if shape.ending is Ending.CLOSED]
        async with task_scope() as scope:
            await asyncio.gather(*(scope.start(write_one(shape)) for shape in closed))
        for shape in wanted:
            if shape.ending is not Ending.CLOSED:
                await self._write_open(shape)

    async def stop(self) -> None:
        """Stop the live writers and close their ledgers, and abandon the other open ledgers."""
        for writer, task in self._live:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                continue  # another client recovered the ledger, so it is closed
            await writer.close()
        await self.abandon()

    async def abandon(self) -> None:
        """Drop all writers and leave every ledger as it is. May be called repeatedly."""
        for _, task in self._live:
            task.cancel()
        self._live.clear()
        await self._open.aclose()

    async def _write_closed(self, shape: Shape) -> None:
        written = await self._begin(shape)
        async with self._writer(written) as writer:
            await self._fill(writer, written)
            await writer.close()
            written.is_closed = True

    async def _write_open(self, shape: Shape) -> None:
        written = await self._begin(shape)
        writer = await self._open.enter_async_context(self._writer(written))
        await self._fill(writer, written)
        if shape.ending is Ending.LIVE:
            task = asyncio.create_task(self._go_on(writer, written))  # ``stop`` ends it
            self._live.append((writer, task))

    async def _begin(self, shape: Shape) -> Written:
        """Record the ledger before it is created, so that every ledger that exists is reported."""
        written = Written(shape=shape, ledger_id=await self.manager.new_ledger_id())
        self.written.append(written)
        return written

    async def _fill(self, writer: LedgerWriter, written: Written) -> None:
        shape = written.shape
        payloads = map(shape.payload, range(shape.entry_count))
        if shape.ending is Ending.CLOSED:
            await asyncio.gather(*[await writer.send(payload) for payload in payloads])
        else:  # one by one: each entry confirms the previous one
            for payload in payloads:
                await writer.add(payload)
        written.acknowledged = shape.entry_count

    async def _go_on(self, writer: LedgerWriter, written: Written) -> None:
        try:
            while True:
                await writer.add(written.shape.payload(written.acknowledged))
                written.acknowledged += 1
                await self.clock.sleep(LIVE_PAUSE_S)
        except BookmenderError as error:
            written.ended_by = str(error)

    def _writer(self, written: Written) -> AbstractAsyncContextManager[LedgerWriter]:
        shape, bookies = written.shape, self.bookies
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
            ledger_id=written.ledger_id,
        )

    async def _writable(self) -> list[Candidate]:
        view = await self.registration.read()
        return [Candidate(bookie=bookie) for bookie in view.writable]
