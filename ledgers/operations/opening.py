"""Opening a ledger without recovery: its key, and where it ends as far as is known.

Fences nothing and writes nothing. Of a ledger that is not closed, the end is what the bookies of
its last ensemble tell (``tail_verdict``, which recovery shares): a lower bound.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from ledgers.bookies import LAST_ENTRY, Answer, Bookies, LacAnswer
from ledgers.clock import Clock
from ledgers.entry import EntryDigest
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.manager import VersionedMetadata
from ledgers.metadata import LAC_NONE, BookieId, LedgerMetadata
from ledgers.operations.asking import Results, ask, said
from ledgers.operations.recovery_verdicts import is_damaged
from ledgers.striping import covers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLedger:
    """A ledger as it was when opened.

    ``lac``: the last entry of a closed ledger; else the last one known to be acknowledged, and more
    may be. ``length`` in payload bytes; of a ledger that is not closed a rough figure.
    """

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
    """What an entry's header says of the ledger's end when it was sent.

    ``length`` counts that entry's payload, although the LAC before it is what was acknowledged.
    """

    lac: int = LAC_NONE
    length: int = 0


async def find_end(
    versioned: VersionedMetadata,
    *,
    bookies: Bookies,
    clock: Clock,
    fallback: EntryDigest | None = None,
) -> OpenedLedger:
    """Open the ledger of which this is the metadata. Of a closed one nobody is asked.

    ``fallback``: see ``ledger_digest``. Raises UnauthorizedError when a bookie will not have us;
    UnavailableError when too few bookies answered to tell.
    """
    metadata = versioned.metadata
    digest = ledger_digest(metadata, fallback)
    if metadata.is_closed:
        tail = Tail(lac=metadata.last_entry_id, length=metadata.length)
    else:
        tail = await _ask_for_lac(versioned.ledger_id, metadata, digest, bookies, clock)
    return OpenedLedger(versioned=versioned, lac=tail.lac, length=tail.length, digest=digest)


def ledger_digest(metadata: LedgerMetadata, fallback: EntryDigest | None = None) -> EntryDigest:
    """The ledger's own key and digest, as tools take them: from its metadata.

    Metadata version 1 holds none; then ``fallback``, what the cluster's operator says. It is never
    guessed: a bookie may take a wrong key for the right one and lock that out. Raises
    UnauthorizedError when neither is known.
    """
    if metadata.password is not None and metadata.digest_type is not None:
        return _shared_digest(metadata.digest_type, metadata.password)
    if fallback is None:
        raise UnauthorizedError("the metadata holds no password and none is configured for such")
    return fallback


_shared_digest = lru_cache(maxsize=1_024)(EntryDigest)
"""Clusters know few passwords, and a key is a hash that takes its time."""


def tail_verdict(
    results: Results[Tail],
    metadata: LedgerMetadata,
    *,
    distrusted: Collection[BookieId] = (),
    knows_damaged: bool = False,
) -> Tail | None:
    """The greatest LAC that these bookies of the last ensemble told; None while too few are known.

    Known is a bookie that gave a good entry or an explicit no, and whose no can be believed. Enough
    are known when no entry can have been acknowledged by the others alone (``covers``). A bad
    digest leaves its bookie unknown (Java takes it for known), unless ``knows_damaged``. Never below the end of the
    segment before: a segment is only begun where all before it is confirmed. Raises
    UnauthorizedError when any bookie does.
    """
    for result in results.values():
        if isinstance(result.error, UnauthorizedError):
            raise result.error
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
        ack_quorum=metadata.ack_quorum,
    ):
        return None
    told = [result.value for result in results.values() if result.value is not None]
    latest = max(told, key=lambda tail: tail.lac, default=Tail())
    return replace(latest, lac=max(latest.lac, segment.first_entry_id - 1))


async def _ask_for_lac(
    ledger_id: int,
    metadata: LedgerMetadata,
    digest: EntryDigest,
    bookies: Bookies,
    clock: Clock,
) -> Tail:
    async def read_lac(bookie: BookieId) -> Tail:
        answer = await bookies.read_lac(bookie, ledger_id)
        return _tail_of(answer, ledger_id=ledger_id, digest=digest)

    tail, results = await ask(
        metadata.last_segment.ensemble,
        read_lac,
        lambda results: tail_verdict(results, metadata),
        clock=clock,
    )
    if tail is None:
        raise UnavailableError(
            "too few bookies answered to tell the last entry",
            ledger_id=ledger_id,
            replies=said(results),
        )
    return tail


def _tail_of(answer: LacAnswer, *, ledger_id: int, digest: EntryDigest) -> Tail:
    """The later of the explicit LAC and the last entry's. Raises DigestMismatchError if one is bad."""
    tails = [Tail()]
    if answer.last_entry is not None:
        header = digest.check(answer.last_entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
        tails.append(Tail(lac=header.lac, length=header.length))
    if answer.lac_record is not None:
        lac = digest.lac_of_record(answer.lac_record, ledger_id=ledger_id)
        tails.append(Tail(lac=lac, length=tails[-1].length))
    return max(tails, key=lambda tail: tail.lac)
