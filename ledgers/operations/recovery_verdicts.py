"""What the answers of fenced bookies prove of an entry, and which answers count. Pure functions (rule S5)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeVar

from ledgers.bookies import Answer
from ledgers.errors import UnreadableError
from ledgers.metadata import BookieId, Segment
from ledgers.operations.asking import Result, Results, given

T = TypeVar("T")
Proof = bytes | Literal[Answer.ABSENT]
"""The entry, or that it cannot have been acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredEnd:
    """Where a ledger ends. ``segments``: the ensembles that recovery changed on the way.

    ``members``: the last ensemble as it was fenced. ``believed``: its members whose answers the end rests on, as
    they counted as fenced or their "no" counted.
    """

    last_entry_id: int
    length: int
    members: tuple[BookieId, ...]
    believed: frozenset[BookieId]
    segments: tuple[Segment, ...] = ()
    given_up: "GivenUp | None" = None

    @property
    def new_members(self) -> frozenset[BookieId]:
        """Bookies that took over from failed ones."""
        return frozenset(b for s in self.segments for b in s.ensemble).difference(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Entries that are cut off though they may have been acknowledged: an operator accepted the loss.

    From ``first_entry_id``, of which there is no good copy, to the last entry that any bookie shows, both
    inclusive. ``replies``: what each bookie said of the first one.
    """

    first_entry_id: int
    last_entry_id: int
    replies: str


def is_damaged(result: Result[T]) -> bool:
    """Whether the bookie has the entry, and it is of no use: a wrong digest, or an I/O error."""
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
    """What the fenced bookies of an entry's write set prove: the entry, its absence, or nothing yet.

    One good copy is enough: the entry may have been acknowledged. It cannot have been once W - A + 1
    bookies explicitly do not have it: fewer than A are left that might, and those that said no
    are fenced. Errors, time-outs and bad digests prove nothing. No absence is proven before the ``awaited``
    have replied, whatever they reply. ``gives_up_damaged``: a damaged copy counts as none, by an operator's word.
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
    """Return the bookies that gave a good entry, or a "no" that is believed: no others are known to be fenced."""
    return frozenset(
        bookie
        for bookie, result in results.items()
        if result.answer in (Answer.PRESENT, Answer.ABSENT) and bookie not in unbelieved
    )


def has_every_answer(results: Results[T]) -> bool:
    """Whether every bookie gave what it has, be it good or not, or denied to have any."""
    return all(result.answer is not Answer.UNKNOWN for result in results.values())


def fenced_text(results: Results[T]) -> str:
    """Return the bookies that are known to refuse the writer from now on. Others may, where only the answer was lost."""
    fenced = [bookie for bookie, result in results.items() if result.answer is not Answer.UNKNOWN]
    return ", ".join(sorted(fenced)) or "none"
