"""Creates the ledgers of the feed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from checkpoints.chain import Kind
from checkpoints.errors import RestoredError
from checkpoints.feed_ledgers import KIND_FIELD
from ledgers.appending import BookiePool
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NotEnoughBookiesError
from ledgers.manager import LedgerManager
from ledgers.model import FEED_MARKER, BookieId
from ledgers.writing import LedgerOptions, LedgerWriter

ENSEMBLE_SIZE = 3
ANSWER_TIMEOUT_S = 2.0
"""A bookie that takes longer is not asked whether it knows a new ledger id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLedgers:
    """Reserves ids of ledgers, and creates the ledgers."""

    manager: LedgerManager
    bookies: Bookies
    pool: BookiePool
    clock: Clock
    random: Random
    _in_use: set[int] = field(default_factory=set)

    def is_in_use(self, ledger_id: int) -> bool:
        """True while the ledger is written, from its reservation on."""
        return ledger_id in self._in_use

    @asynccontextmanager
    async def reserved(self, *, skips_used: bool = True) -> AsyncIterator[int]:
        """Reserve a ledger id for a ledger that is written within the block.

        A restored ZooKeeper hands out ids of ledgers whose entries bookies still have. Readers
        would take these entries for ours. So such ids are skipped; or RestoredError is raised
        unless ``skips_used``. An id that a client chose for its ledger is skipped in any case.
        """
        while True:
            ledger_id = await self.manager.new_ledger_id()
            if await self.manager.find(ledger_id) is not None:
                continue
            if not await self._is_used(ledger_id):
                break
            if not skips_used:
                raise RestoredError("bookies have entries of a new ledger id", ledger_id=ledger_id)
        self._in_use.add(ledger_id)
        try:
            yield ledger_id
        finally:
            self._in_use.discard(ledger_id)

    async def would_choose(self, bookies: Collection[BookieId]) -> bool:
        """Return True if all these bookies may be chosen for a new ledger."""
        return {each.bookie for each in await self.pool.writable()}.issuperset(bookies)

    async def _is_used(self, ledger_id: int) -> bool:
        """Return True if a writable bookie has entries of this ledger id."""

        async def has_entries(bookie: BookieId) -> bool:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await self.bookies.read_lac(bookie, ledger_id)
            except (BookmenderError, TimeoutError):  # an explicit no, or no proof
                return False
            return answer.last_entry is not None

        writable = await self.pool.writable()
        return any(await asyncio.gather(*(has_entries(each.bookie) for each in writable)))

    @asynccontextmanager
    async def create(self, kind: Kind, ledger_id: int) -> AsyncIterator[LedgerWriter]:
        """Create a ledger on as many bookies as there are, at most ``ENSEMBLE_SIZE``."""
        writable = await self.pool.writable()
        for size in range(ENSEMBLE_SIZE, 0, -1):
            try:
                self.pool.placement.choose_ensemble(
                    writable, size, write_quorum=size, ack_quorum=size // 2 + 1
                )
                break
            except NotEnoughBookiesError:
                if size == 1:
                    raise
        options = LedgerOptions(
            ensemble_size=size,
            write_quorum=size,
            ack_quorum=size // 2 + 1,
            custom=(FEED_MARKER, (KIND_FIELD, kind.value.encode())),
            has_ctime=True,
        )
        async with LedgerWriter.create(
            options,
            manager=self.manager,
            bookies=self.bookies,
            pool=self.pool,
            clock=self.clock,
            random=self.random,
            ledger_id=ledger_id,
        ) as writer:
            yield writer
