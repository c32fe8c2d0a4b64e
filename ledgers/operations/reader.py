"""Reading a ledger's entries: digest verified, from whichever replica has them.

Promises bytes that are the entry's, or an error that says what each replica said. Knows nothing of
fencing and of the end: what may be read is the caller's to know (``OpenedLedger.lac``).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from ledgers.bookies import Answer, Bookies
from ledgers.clock import Clock
from ledgers.entry import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    DigestMismatchError,
    NoSuchEntryError,
    UnavailableError,
)
from ledgers.metadata import BookieId, LedgerMetadata, Segment
from ledgers.operations.ahead import read_ahead
from ledgers.operations.asking import Results, ask, given, said
from ledgers.striping import write_set

SPECULATIVE_S = 2.0
"""A read that is not answered for so long is sent to the next replica as well, as in Java."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """``length``: payload bytes of the ledger up to and with this entry."""

    entry_id: int
    length: int
    payload: bytes


class LedgerReader:
    """Reads entries of one ledger, by the ensembles of one version of its metadata."""

    def __init__(
        self,
        ledger_id: int,
        metadata: LedgerMetadata,
        *,
        digest: EntryDigest,
        bookies: Bookies,
        clock: Clock,
    ) -> None:
        self._ledger_id, self._metadata, self._digest = ledger_id, metadata, digest
        self._bookies, self._clock = bookies, clock

    async def read(self, entry_id: int) -> bytes:
        """The stored entry, header and digest included; from the next replica after any error.

        Raises NoSuchEntryError when every replica said no, DigestMismatchError when every one that
        has it has it wrong, else UnavailableError.
        """
        entry, results = await ask(
            replicas_in(
                self._metadata.segment_of(entry_id),
                entry_id,
                write_quorum=self._metadata.write_quorum,
            ),
            partial(self._read, entry_id=entry_id),
            given,
            clock=self._clock,
            hedge_s=SPECULATIVE_S,
        )
        if entry is None:
            raise _unreadable(results, ledger_id=self._ledger_id, entry_id=entry_id)
        return entry

    async def entries(
        self, first_entry_id: int, last_entry_id: int
    ) -> AsyncGenerator[LedgerEntry, None]:
        """The entries of a range, inclusive at both ends, read ahead within bounds.

        Use it within ``contextlib.aclosing`` where the loop over it may be left early.
        """
        entry_ids = range(first_entry_id, last_entry_id + 1)
        async with aclosing(read_ahead(entry_ids, self.read)) as entries:
            async for entry in entries:
                header = EntryHeader.of(entry)
                yield LedgerEntry(
                    entry_id=header.entry_id,
                    length=header.length,
                    payload=self._digest.payload(entry),
                )

    async def _read(self, bookie: BookieId, *, entry_id: int) -> bytes:
        entry = await self._bookies.read(bookie, self._ledger_id, entry_id)
        self._digest.check(entry, ledger_id=self._ledger_id, entry_id=entry_id)
        return entry


def replicas_in(segment: Segment, entry_id: int, *, write_quorum: int) -> list[BookieId]:
    """The bookies of the entry's write set in this segment, in the order in which readers ask
    them."""
    indexes = write_set(entry_id, ensemble_size=len(segment.ensemble), write_quorum=write_quorum)
    return [segment.ensemble[index] for index in indexes]


def _unreadable(results: Results[bytes], *, ledger_id: int, entry_id: int) -> BookmenderError:
    """The error that all replicas together amount to."""
    answers = {result.answer for result in results.values()}
    error = {
        frozenset({Answer.ABSENT}): NoSuchEntryError,
        frozenset({Answer.MISMATCH}): DigestMismatchError,
        frozenset({Answer.ABSENT, Answer.MISMATCH}): DigestMismatchError,
    }.get(frozenset(answers), UnavailableError)
    return error(
        "no replica gave the entry", ledger_id=ledger_id, entry_id=entry_id, replies=said(results)
    )
