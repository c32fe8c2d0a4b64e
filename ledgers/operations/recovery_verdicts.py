"""What the answers of fenced bookies prove about an entry, and which answers count (rule S5). Pure
functions."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeVar

from ledgers.bookies import Answer
from ledgers.errors import UnreadableError
from ledgers.metadata import BookieId, Segment
from ledgers.operations.asking import Result, Results, given

T = TypeVar("T")
Proof = bytes | Literal[Answer.ABSENT]
"""The entry, or ABSENT: the entry cannot be acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredEnd:
    """The end of a ledger, as found by recovery. ``segments``: segments whose ensembles recovery
    changed.

    ``members``: the last ensemble as it was fenced. ``believed``: members whose answers the end is
    based on, because they counted as fenced or their "no" counted.
    """

    last_entry_id: int
    length: int
    members: tuple[BookieId, ...]
    believed: frozenset[BookieId]
    segments: tuple[Segment, ...] = ()
    given_up: "GivenUp | None" = None

    @property
    def new_members(self) -> frozenset[BookieId]:
        """Bookies that replaced failed ones during recovery."""
        return frozenset(b for s in self.segments for b in s.ensemble).difference(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Entries cut off by an operator's order although they may be acknowledged.

    The range is inclusive: from ``first_entry_id``, which has no good copy, to the last entry that
    any bookie returned. ``replies``: the reply of each bookie for the first entry.
    """

    first_entry_id: int
    last_entry_id: int
    replies: str


def is_damaged(result: Result[T]) -> bool:
    """Return True if the bookie stores the entry but cannot deliver it: wrong digest, or I/O
    error."""
    return result.answer is Answer.MISMATCH or isinstance(result.error, UnreadableError)


def recovery_verdict(
    results: Results[bytes],
    *,
    write_quorum: int,
    ack_quorum: int,
    distrusted: Collection[BookieId] = (),
    awaited: Collection[BookieId] = (),
    gives_up_damaged: bool = False,
) -> Proof | None:
    """Return what the fenced bookies of a write set prove: the entry, its absence, or None for
    nothing yet.

    One good copy suffices, because the entry may be acknowledged. W - A + 1 explicit "no" prove
    that it is not: fewer than A bookies are left that could have acknowledged it, and those that
    answered "no" are fenced. Errors, timeouts and bad digests prove nothing. Absence is proven only
    after all ``awaited`` bookies have replied or failed. ``gives_up_damaged``: a damaged copy
    counts as missing, by an operator's order.
    """
    if (entry := given(results)) is not None:
        return entry
    if any(bookie not in results for bookie in awaited):
        return None
    absent_count = sum(
        (result.answer is Answer.ABSENT or (gives_up_damaged and is_damaged(result)))
        and bookie not in distrusted
        for bookie, result in results.items()
    )
    return Answer.ABSENT if absent_count > write_quorum - ack_quorum else None


def counted(results: Results[T], unbelieved: Collection[BookieId]) -> frozenset[BookieId]:
    """Return the bookies that returned a good entry or a trusted "no". Only these are known to be
    fenced."""
    return frozenset(
        bookie
        for bookie, result in results.items()
        if result.answer in (Answer.PRESENT, Answer.ABSENT) and bookie not in unbelieved
    )


def has_every_answer(results: Results[T]) -> bool:
    """Return True if every bookie returned an entry, good or bad, or answered "no"."""
    return all(result.answer is not Answer.UNKNOWN for result in results.values())


def fenced_text(results: Results[T]) -> str:
    """Return the bookies that are known to be fenced, as text. Others may be fenced if only their
    reply was lost."""
    fenced = [bookie for bookie, result in results.items() if result.answer is not Answer.UNKNOWN]
    return ", ".join(sorted(fenced)) or "none"
