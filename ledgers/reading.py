"""Opens a ledger without recovery and reads its entries.

- ``LedgerReader`` reads entries from any replica that has them. It promises the bytes of the entry,
  with a verified digest, or an error that contains the reply of each replica. The caller must know
  which entries may be read (``OpenedLedger.lac``).
- ``find_end`` opens a ledger: its key, and its end as far as it is known. If the ledger is not
  closed, the end is a lower bound, reported by the bookies of the last ensemble (``tail_verdict``,
  which recovery uses too).
- ``last_entry_of`` and ``highest_entry_id`` report which entries bookies store of a ledger. This
  shows whether a writer is active, but proves no end.

Nothing here fences or writes; ``fencing`` does.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial

from ledgers.bookies import LAST_ENTRY, Answer, Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    DigestMismatchError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.manager import VersionedMetadata
from ledgers.model import LAC_NONE, BookieId, LedgerMetadata, Segment, covers, write_set
from ledgers.quorum import Results, ask, first_value, is_damaged, raise_if_denied, replies_text
from ledgers.tasks import read_ahead

SPECULATIVE_S = 2.0
"""A read without a reply for this long is also sent to the next replica, as in Java."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """An entry. ``length``: payload bytes of the ledger up to and including this entry."""

    entry_id: int
    length: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LedgerReader:
    """Reads entries of one ledger from the ensembles of one version of its metadata."""

    ledger_id: int
    metadata: LedgerMetadata
    _: KW_ONLY
    digest: EntryDigest
    bookies: Bookies
    clock: Clock

    async def read(self, entry_id: int) -> bytes:
        """Return the stored entry. After an error the next replica is asked. Raises
        NoSuchEntryError if all answered "no", DigestMismatchError if some have a bad copy instead,
        else UnavailableError."""
        entry, results = await ask(
            replicas_in(
                self.metadata.segment_of(entry_id),
                entry_id,
                write_quorum=self.metadata.write_quorum,
            ),
            partial(self._read, entry_id=entry_id),
            first_value,
            clock=self.clock,
            hedge_s=SPECULATIVE_S,
        )
        if entry is None:
            raise _unreadable(results, ledger_id=self.ledger_id, entry_id=entry_id)
        return entry

    async def entries(
        self, first_entry_id: int, last_entry_id: int, *, is_latest_first: bool = False
    ) -> AsyncGenerator[LedgerEntry, None]:
        """Yield the entries of a range, inclusive at both ends. Reads a limited number ahead. Use
        it within ``contextlib.aclosing`` if the loop over it may end early."""
        entry_ids = range(first_entry_id, last_entry_id + 1)
        if is_latest_first:
            entry_ids = entry_ids[::-1]
        async with aclosing(read_ahead(entry_ids, self.read)) as entries:
            async for entry in entries:
                header = EntryHeader.of(entry)
                yield LedgerEntry(
                    entry_id=header.entry_id,
                    length=header.length,
                    payload=self.digest.payload(entry),
                )

    async def _read(self, bookie: BookieId, *, entry_id: int) -> bytes:
        entry = await self.bookies.read(bookie, self.ledger_id, entry_id)
        self.digest.check(entry, ledger_id=self.ledger_id, entry_id=entry_id)
        return entry


def replicas_in(segment: Segment, entry_id: int, *, write_quorum: int) -> list[BookieId]:
    """Return the bookies of the entry's write set, in the order in which readers ask them."""
    indexes = write_set(entry_id, ensemble_size=len(segment.ensemble), write_quorum=write_quorum)
    return [segment.ensemble[index] for index in indexes]


def _unreadable(results: Results[bytes], *, ledger_id: int, entry_id: int) -> BookmenderError:
    """Return the error that follows from the answers of all replicas."""
    answers = {result.answer for result in results.values()}
    error = {
        frozenset({Answer.ABSENT}): NoSuchEntryError,
        frozenset({Answer.MISMATCH}): DigestMismatchError,
        frozenset({Answer.ABSENT, Answer.MISMATCH}): DigestMismatchError,
    }.get(frozenset(answers), UnavailableError)
    return error(
        "no replica returned the entry",
        ledger_id=ledger_id,
        entry_id=entry_id,
        replies=replies_text(results),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLedger:
    """The state of a ledger when it was opened. ``lac``: the last entry if it is closed, else the
    last known to be acknowledged. ``length``: payload bytes, approximate if it is not closed."""

    versioned: VersionedMetadata
    lac: int
    length: int
    digest: EntryDigest

    @property
    def ledger_id(self) -> int:
        return self.versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        return self.versioned.metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of a ledger by an entry's header. ``length`` includes the entry, beyond the LAC."""

    lac: int = LAC_NONE
    length: int = 0


async def find_end(
    versioned: VersionedMetadata,
    *,
    bookies: Bookies,
    clock: Clock,
    fallback: EntryDigest | None = None,
) -> OpenedLedger:
    """Open the ledger with this metadata, without a request if it is closed. Raises
    UnauthorizedError if bookies deny access and none returns an entry, UnavailableError (too few
    answer)."""
    metadata, ledger_id = versioned.metadata, versioned.ledger_id
    digest = ledger_digest(metadata, fallback)

    async def read_lac(bookie: BookieId) -> Tail:
        """Return the greater LAC: the explicit one or the last entry's."""
        answer, tails = await bookies.read_lac(bookie, ledger_id), [Tail()]
        if answer.last_entry is not None:
            header = digest.check(answer.last_entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
            tails.append(Tail(lac=header.lac, length=header.length))
        if answer.lac_record is not None:
            lac = digest.lac_of_record(answer.lac_record, ledger_id=ledger_id)
            tails.append(Tail(lac=lac, length=tails[-1].length))
        return max(tails, key=lambda tail: tail.lac)

    if metadata.is_closed:
        lac, length = metadata.last_entry_id, metadata.length
        return OpenedLedger(versioned=versioned, lac=lac, length=length, digest=digest)
    tail, results = await ask(
        metadata.last_segment.ensemble,
        read_lac,
        lambda results: tail_verdict(results, metadata),
        clock=clock,
    )
    if tail is None:
        raise_if_denied(results)
        raise UnavailableError(
            "too few bookies answered to find the last entry",
            ledger_id=ledger_id,
            replies=replies_text(results),
        )
    return OpenedLedger(versioned=versioned, lac=tail.lac, length=tail.length, digest=digest)


def ledger_digest(metadata: LedgerMetadata, fallback: EntryDigest | None = None) -> EntryDigest:
    """Return the digest with the key in the metadata; ``fallback``, the operator's setting, for
    version 1, which stores none. It is never guessed: a bookie may adopt a wrong key and deny
    access to the right one. Raises UnauthorizedError if neither is known."""
    if metadata.password is not None and metadata.digest_type is not None:
        return _shared_digest(metadata.digest_type, metadata.password)
    if fallback is None:
        raise UnauthorizedError(
            "the metadata contains no password, and none is configured for such ledgers"
        )
    return fallback


_shared_digest = lru_cache(maxsize=1_024)(EntryDigest)
"""Cached, because clusters use few passwords and the key is an expensive hash."""


def tail_verdict(
    results: Results[Tail],
    metadata: LedgerMetadata,
    *,
    distrusted: Collection[BookieId] = (),
    knows_damaged: bool = False,
) -> Tail | None:
    """Return the greatest LAC reported by bookies of the last ensemble; None while too few bookies
    count.

    A bookie counts if it returned a good entry or an explicit "no", and is not ``distrusted``. A
    bookie with a bad digest counts only with ``knows_damaged`` (in Java it always counts). Enough
    bookies count when the others alone cannot have acknowledged an entry (``covers``). With an ack
    quorum below 1 all must count, and then the LAC is a lower bound only. The LAC is never lower
    than the end of the previous segment, because a segment begins only after all earlier entries
    are confirmed.

    A bookie that denies access counts as unknown. If the metadata contains no key, none counts
    until a good entry proves the configured key (rule S7).
    """
    is_denied = any(isinstance(result.error, UnauthorizedError) for result in results.values())
    if is_denied and metadata.password is None and first_value(results) is None:
        return None
    segment = metadata.last_segment
    known = {
        index
        for index, bookie in enumerate(segment.ensemble)
        if bookie in results
        and (
            results[bookie].answer in (Answer.PRESENT, Answer.ABSENT)
            or (knows_damaged and is_damaged(results[bookie]))
        )
        and bookie not in distrusted
    }
    if not covers(
        known,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=max(1, metadata.ack_quorum),
    ):
        return None
    tails = [result.value for result in results.values() if result.value is not None]
    latest = max(tails, key=lambda tail: tail.lac, default=Tail())
    return replace(latest, lac=max(latest.lac, segment.first_entry_id - 1))


NO_ENTRY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEntry:
    """The last stored entry, and the LAC in its header. Both are ``NO_ENTRY`` without one."""

    last_entry_id: int
    lac: int
    stored_bytes: int = 0


async def last_entry_of(
    bookies: Bookies, bookie: BookieId, ledger_id: int, *, digest: EntryDigest | None = None
) -> LastEntry | None:
    """Return the last entry of the bookie; None without an answer with a good digest."""
    try:
        entry = await bookies.read(bookie, ledger_id, LAST_ENTRY)
        if digest is not None:
            digest.check(entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
        header = EntryHeader.of(entry)
        return LastEntry(last_entry_id=header.entry_id, lac=header.lac, stored_bytes=len(entry))
    except NoSuchEntryError:
        return LastEntry(last_entry_id=NO_ENTRY, lac=NO_ENTRY)
    except BookmenderError:
        return None


async def last_entry_id(
    bookies: Bookies, bookie: BookieId, ledger_id: int, *, digest: EntryDigest | None = None
) -> int | None:
    """Return the id of the last entry that one bookie stores. See ``last_entry_of``."""
    last = await last_entry_of(bookies, bookie, ledger_id, digest=digest)
    return None if last is None else last.last_entry_id


async def highest_entry_id(
    bookies: Bookies,
    members: Collection[BookieId],
    ledger_id: int,
    *,
    digest: EntryDigest | None = None,
) -> tuple[int, frozenset[BookieId]]:
    """Return the highest entry id that any member stores (``NO_ENTRY``: none), and the members that
    did not answer and may store later entries."""
    ids = await asyncio.gather(
        *(last_entry_id(bookies, each, ledger_id, digest=digest) for each in members)
    )
    found = dict(zip(members, ids, strict=True))
    # A bookie whose last entry is damaged did answer.
    unanswered = frozenset(
        [
            bookie
            for bookie, last in found.items()
            if last is None
            and (digest is None or await last_entry_id(bookies, bookie, ledger_id) is None)
        ]
    )
    return max((each for each in ids if each is not None), default=NO_ENTRY), unanswered
