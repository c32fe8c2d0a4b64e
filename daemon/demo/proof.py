"""The proof: reads every copy of every entry from every bookie that the metadata names.

The proof uses nothing that the daemons reported. It reads metadata and entries itself, verifies
digests, and compares the payloads of each ledger with what was written.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ledgers.bookies import Bookies, Transfer
from ledgers.clock import Clock
from ledgers.errors import BookmenderError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata, fragments
from ledgers.reading import LedgerReader, OpenedLedger, find_end, replicas_in
from replication.copy_reader import transfer_slices

LEDGERS_AT_ONCE = 20


class Evidence(Protocol):
    """A ledger whose content is known. Its entries from 0 to ``acknowledged - 1`` were
    acknowledged."""

    ledger_id: int
    acknowledged: int

    def payload(self, entry_id: int) -> bytes: ...


@dataclass(slots=True)
class LedgerProof:
    """The result for one ledger. ``lost``: acknowledged entries that no bookie can return."""

    written: Evidence
    metadata: LedgerMetadata
    copies_expected: int = 0
    copies_good: int = 0
    lost: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    """Entries whose payload differs from what was written."""
    out_of_reach: list[int] = field(default_factory=list)
    """Acknowledged entries whose only copies are on bookies that are down."""

    @property
    def is_whole(self) -> bool:
        return self.copies_good == self.copies_expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """Reads all ledgers that were written. ``down``: the bookies that were killed and not started
    again."""

    manager: LedgerManager
    bookies: Bookies
    clock: Clock
    down: frozenset[BookieId]

    async def prove(self, written: Sequence[Evidence]) -> list[LedgerProof]:
        slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

        async def prove_one(ledger: Evidence) -> LedgerProof:
            async with slots:
                return await self._prove(ledger)

        return await asyncio.gather(*map(prove_one, written))

    async def _prove(self, written: Evidence) -> LedgerProof:
        versioned = await self.manager.read(written.ledger_id)
        opened = await find_end(versioned, bookies=self.bookies, clock=self.clock)
        proof = LedgerProof(written=written, metadata=versioned.metadata)
        for fragment in fragments(written.ledger_id, versioned.metadata, lac=opened.lac):
            if fragment.last_entry_id is None:  # open: which copies it should have is not decided
                continue
            for index, bookie in enumerate(fragment.ensemble):
                entries = fragment.entries_of(index)
                proof.copies_expected += len(entries)
                if bookie in self.down:
                    continue
                for entry_ids in transfer_slices([entries]):
                    result = await self.bookies.transfer(
                        Transfer(
                            ledger_id=written.ledger_id,
                            digest=opened.digest,
                            reads={bookie: entry_ids},
                        )
                    )
                    proof.copies_good += result.entry_count
        await self._compare(opened, proof)
        return proof

    async def _compare(self, opened: OpenedLedger, proof: LedgerProof) -> None:
        """Read every acknowledged entry through the reader that applications would use."""
        metadata, last = opened.metadata, proof.written.acknowledged - 1
        if metadata.is_closed and opened.lac < last:
            proof.lost += range(opened.lac + 1, last + 1)
            last = opened.lac
        reader = LedgerReader(
            proof.written.ledger_id,
            metadata,
            digest=opened.digest,
            bookies=self.bookies,
            clock=self.clock,
        )
        for entry_id in range(last + 1):
            segment = metadata.segment_of(entry_id)
            holders = replicas_in(segment, entry_id, write_quorum=metadata.write_quorum)
            if self.down.issuperset(holders):
                proof.out_of_reach.append(entry_id)
                continue
            try:
                entry = await reader.read(entry_id)
            except BookmenderError:
                proof.lost.append(entry_id)
                continue
            if opened.digest.payload(entry) != proof.written.payload(entry_id):
                proof.wrong.append(entry_id)
