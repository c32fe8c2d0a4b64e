"""Writes ledgers with our own client, as ``bookmender local write`` does, and keeps writing to some
of them."""

import asyncio
import enum
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from daemon.admin_session import AdminSession
from daemon.local import writing
from daemon.local.writing import SIZES, fill
from daemon.local.writing import Written as Written
from ledgers.bookies import Bookies
from ledgers.digest import EntryHeader
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId, DigestType
from ledgers.writing import LedgerWriter

CHANGE_EVERY = 9
LIVE_PAUSE_S = 0.02


class Ending(enum.Enum):
    """The ways in which the writing of a ledger ends."""

    CLOSED = "closed"
    ABANDONED = "abandoned"
    """The ledger is left open, and its writer has ended."""
    LIVE = "live"
    """The ledger is left open, and its writer keeps writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(writing.Shape):
    """The shape of one ledger. ``change_at``: at this entry a bookie fails, and the writer replaces
    it."""

    change_at: int | None = None
    is_live: bool = False


def shapes(ledger_count: int, *, quorums: Sequence[tuple[int, int, int]]) -> list[Shape]:
    """Return shapes of closed ledgers, the same in every run. ``quorums``: ensemble size, write
    quorum and ack quorum, used in turn."""
    kinds = zip(
        range(ledger_count),
        itertools.cycle(quorums),
        itertools.cycle(SIZES),
        itertools.cycle(DigestType),
        itertools.cycle((3, 3, 2)),
        strict=False,
    )
    return [
        Shape(
            number=number,
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest_type=digest_type,
            metadata_version=metadata_version,
            entry_bytes=entry_bytes,
            entry_count=entry_count,
            change_at=entry_count // 2 if entry_count >= 4 and number % CHANGE_EVERY == 0 else None,
        )
        for (
            number,
            (ensemble_size, write_quorum, ack_quorum),
            (entry_bytes, entry_count),
            digest_type,
            metadata_version,
        ) in kinds
    ]


@asynccontextmanager
async def open_workload(seen: AdminSession, rng: random.Random) -> AsyncIterator["Workload"]:
    """Open a workload that abandons its ledgers at the end."""
    async with writing.open_workload(seen, rng) as plain:
        workload = Workload(
            manager=plain.manager,
            registration=plain.registration,
            bookies=plain.bookies,
            clock=plain.clock,
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
class Workload(writing.Workload):
    """Writes the shapes, and keeps the live writers going until ``stop``."""

    errors: list[str] = field(default_factory=list)
    """The errors that stopped live writers."""
    _open: AsyncExitStack = field(default_factory=AsyncExitStack)
    _live: list[tuple[LedgerWriter, asyncio.Task[None]]] = field(default_factory=list)

    async def write_shapes(self, wanted: Sequence[Shape]) -> None:
        """Write all shapes, several at once. Live writers continue in the background. Raises what
        ``LedgerWriter`` raises."""
        await self.write_at_once([shape for shape in wanted if not shape.is_left_open])
        for shape in (each for each in wanted if each.is_left_open):
            written = await self.begin(shape)
            writer = await self._open.enter_async_context(self.writer(written))
            await fill(writer, written)
            if shape.is_live:
                task = asyncio.create_task(self._go_on(writer, written))  # ``stop`` ends it
                self._live.append((writer, task))

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

    async def _go_on(self, writer: LedgerWriter, written: Written) -> None:
        try:
            while True:
                await writer.add(written.payload(written.acknowledged))
                written.acknowledged += 1
                await self.clock.sleep(LIVE_PAUSE_S)
        except BookmenderError as error:
            self.errors.append(f"{written.ledger_id}: {error}")

    def bookies_for(self, shape: writing.Shape) -> Bookies:
        if not isinstance(shape, Shape) or shape.change_at is None:
            return self.bookies
        return cast(Bookies, FailingBookie(self.bookies, from_entry_id=shape.change_at))
