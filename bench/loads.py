"""The ledgers that lose a bookie: the same ones for every contender, written, read back, deleted.

Ensembles go round the bookies in turn, so that each contender loses exactly as much.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from daemon.demo.shapes import Shape
from daemon.demo.workload import Written
from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient, BookieClientSettings
from ledgers.bookies import Bookies
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from ledgers.fragments import fragments
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId, DigestType
from ledgers.operations.creation import LedgerOptions
from ledgers.operations.ensembles import Targets
from ledgers.operations.opening import ledger_digest
from ledgers.operations.writer import LedgerWriter
from ledgers.placement import Candidate, RandomPlacement
from ledgers.store import ANY_VERSION
from replication.check import Verdict, check

T = TypeVar("T")
R = TypeVar("R")
ENSEMBLE_SIZE = 3
VICTIM_INDEX = 2
"""Of the cluster's bookies the one that is killed; it stands in the ensembles 0, 1 and 2."""
LEDGERS_AT_ONCE = 50
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``ledger_count`` closed ledgers, each of ``entry_count`` entries of ``entry_bytes``."""

    name: str
    ledger_count: int
    entry_count: int
    entry_bytes: int = 1_024

    def shape(self, number: int) -> Shape:
        return Shape(
            number=number,
            ensemble_size=ENSEMBLE_SIZE,
            write_quorum=ENSEMBLE_SIZE,
            ack_quorum=ENSEMBLE_SIZE,  # all copies are there before one is lost
            digest_type=DigestType.CRC32C,
            metadata_version=3,
            entry_bytes=self.entry_bytes,
            entry_count=self.entry_count,
        )

    def lost_count(self, bookies: Sequence[BookieId]) -> int:
        """Of the ledgers, how many name the victim."""
        victim = bookies[VICTIM_INDEX]
        return sum(victim in ensemble(number, bookies) for number in range(self.ledger_count))


def ensemble(number: int, bookies: Sequence[BookieId]) -> list[BookieId]:
    return [bookies[(number + step) % len(bookies)] for step in range(ENSEMBLE_SIZE)]


class Ledgers:
    """Writes, proves and deletes ledgers, as an application would."""

    def __init__(self, manager: LedgerManager, bookies: Bookies) -> None:
        self._manager, self._bookies = manager, bookies
        self._clock, self._rng = SystemClock(), random.Random(SEED)

    async def write(self, load: Load, on: Sequence[BookieId]) -> list[Written]:
        async def write_one(number: int) -> Written:
            candidates = [Candidate(bookie=bookie) for bookie in ensemble(number, on)]
            return await self._write(load.shape(number), candidates)

        return await _gather(write_one, range(load.ledger_count))

    async def assert_whole(self, written: Sequence[Written], victim: BookieId) -> None:
        """Raises UnavailableError unless each copy that the metadata names is there, digests right."""

        async def is_whole(ledger: Written) -> bool:
            return await self._is_whole(ledger, victim)

        verdicts = await _gather(is_whole, written)
        if not all(verdicts):
            raise UnavailableError(
                "ledgers are not whole after their repair",
                ledger_ids=[w.ledger_id for w, ok in zip(written, verdicts, strict=True) if not ok],
            )

    async def delete(self, written: Sequence[Written]) -> None:
        async def delete_one(ledger: Written) -> None:
            await self._manager.delete(ledger.ledger_id, version=ANY_VERSION)

        await _gather(delete_one, written)

    async def _is_whole(self, written: Written, victim: BookieId) -> bool:
        versioned = await self._manager.read(written.ledger_id)
        metadata = versioned.metadata
        findings = await check(
            fragments(written.ledger_id, metadata, lac=written.acknowledged - 1),
            bookies=self._bookies,
            digest=ledger_digest(metadata),
            available=metadata.bookies - {victim},
            distrusted=metadata.bookies,  # every entry is read, not just the ends
        )
        return all(finding.verdict is Verdict.GOOD for finding in findings)

    async def _write(self, shape: Shape, candidates: list[Candidate]) -> Written:
        async def writable() -> list[Candidate]:
            return candidates

        async with LedgerWriter.create(
            LedgerOptions(
                ensemble_size=shape.ensemble_size,
                write_quorum=shape.write_quorum,
                ack_quorum=shape.ack_quorum,
                digest_type=shape.digest_type,
            ),
            manager=self._manager,
            bookies=self._bookies,
            targets=Targets(writable=writable, placement=RandomPlacement(self._rng)),
            clock=self._clock,
            random=self._rng,
        ) as writer:
            for entry_id in range(shape.entry_count):
                last = await writer.send(shape.payload(entry_id))
            await last
            await writer.close()
            return Written(shape=shape, ledger_id=writer.ledger_id, acknowledged=shape.entry_count)


@asynccontextmanager
async def open_ledgers(manager: LedgerManager) -> AsyncIterator[Ledgers]:
    """With connections of its own: a bookie that was killed and came back is met afresh."""
    budgets = Budgets()
    bookies = BookieClient(
        resolve=lambda bookie: None,
        budgets=budgets,
        bulk=BulkTransfers(budgets),
        clock=SystemClock(),
        rng=random.Random(SEED),
        settings=BookieClientSettings(),
    )
    try:
        yield Ledgers(manager, bookies)
    finally:
        await bookies.close()


async def _gather(action: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

    async def act(item: T) -> R:
        async with slots:
            return await action(item)

    return await asyncio.gather(*map(act, items))
