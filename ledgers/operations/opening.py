"""Opens a ledger without recovery: finds its key and the known end.

Does not fence and does not write. The end of a ledger that is not closed is a lower bound, which
the bookies of its last ensemble report (``tail_verdict``, shared with recovery).
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
    """The state of a ledger when it was opened.

    ``lac``: the last entry of a closed ledger, else the last entry known to be acknowledged.
    ``length``: payload bytes, approximate if the ledger is not closed.
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
    """The end of a ledger according to the header of an entry.

    ``length`` includes the payload of this entry, which lies beyond the LAC.
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
    """Open the ledger with this metadata. Sends no request if it is closed.

    ``fallback``: see ``ledger_digest``. Raises UnauthorizedError if a bookie denies access,
    UnavailableError if too few bookies answer.
    """
    metadata = versioned.metadata
    digest = ledger_digest(metadata, fallback)
    if metadata.is_closed:
        tail = Tail(lac=metadata.last_entry_id, length=metadata.length)
    else:
        tail = await _ask_for_lac(versioned.ledger_id, metadata, digest, bookies, clock)
    return OpenedLedger(versioned=versioned, lac=tail.lac, length=tail.length, digest=digest)


def ledger_digest(metadata: LedgerMetadata, fallback: EntryDigest | None = None) -> EntryDigest:
    """Return the digest with the ledger's key, which is stored in its metadata.

    Metadata version 1 stores none; then ``fallback`` applies, the operator's setting. The key is
    never guessed: a bookie may adopt a wrong key and deny access to the right one. Raises
    UnauthorizedError if neither is known.
    """
    if metadata.password is not None and metadata.digest_type is not None:
        return _shared_digest(metadata.digest_type, metadata.password)
    if fallback is None:
        raise UnauthorizedError("the metadata holds no password and none is configured for such")
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
    bookies count when the others alone cannot have acknowledged an entry (``covers``). The LAC is
    never lower than the end of the previous segment, because a segment begins only after all
    earlier entries are confirmed. Raises UnauthorizedError if any result does.
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
    """Return the greater of the explicit LAC and the LAC of the last entry. Raises
    DigestMismatchError if one is bad."""
    tails = [Tail()]
    if answer.last_entry is not None:
        header = digest.check(answer.last_entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
        tails.append(Tail(lac=header.lac, length=header.length))
    if answer.lac_record is not None:
        lac = digest.lac_of_record(answer.lac_record, ledger_id=ledger_id)
        tails.append(Tail(lac=lac, length=tails[-1].length))
    return max(tails, key=lambda tail: tail.lac)
