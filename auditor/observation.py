"""What our leader would do now, compared with the existing marks: values, no I/O."""

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.ledger_map import MappedLedger
from auditor.marker import PrivateQueue
from auditor.underreplication import UnderreplicatedLedger
from ledgers.model import BookieId
from replication.orders import HoldOrder


class Absence(enum.Enum):
    """Shown by commands: never change a value."""

    LOST = "lost"
    WAITING = "waiting"
    """Absent for less than the recovery delay."""
    REBORN = "reformatted"
    """Registered, but reformatted after ledgers were placed on it, so it may have lost them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBookie:
    """``left_s``: rest of the recovery delay; 0 unless ``WAITING``. ``ledger_count``: ledgers that
    it endangers, or would endanger."""

    bookie: BookieId
    absence: Absence
    left_s: float
    ledger_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between the marks that we would make and those in the shared queue. Ids ascend in
    ``surplus``.

    ``unmarked``: ledgers that we would mark and that have no mark, most endangered first.
    ``partly_marked``: ledgers whose marks lack a lost replica, in the same order. ``surplus``:
    marks that we would not make; a worker may be about to delete them.
    """

    agreed_count: int
    unmarked: tuple[int, ...]
    partly_marked: tuple[int, ...]
    surplus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state at one moment. ``underreplicated``: ledgers that miss copies, most endangered first."""

    seen_ms: int
    """Wall clock."""
    is_index_complete: bool
    ledger_count: int
    unreadable: tuple[int, ...]
    """Ledgers whose metadata cannot be read, ascending."""
    writable_count: int
    read_only_count: int
    recovery_delay_s: int
    missing: tuple[MissingBookie, ...]
    """Bookies with most ledgers first."""
    underreplicated: tuple[UnderreplicatedLedger, ...]
    lost_bytes: int
    """Approximate size of the lost copies."""
    marked_count: int
    """Marks in the shared queue, whichever node leads."""
    difference: Difference
    own: PrivateQueue = field(default_factory=PrivateQueue)
    """Marks that Java's workers do not see. None of the counts above includes them."""
    is_disabled: bool
    hold: HoldOrder | None
    """The hold in force, or the one that we would begin; None if there is neither."""
    is_hold_ordered: bool
    """False if we would only begin the hold."""

    @property
    def is_kept_from_marking(self) -> bool:
        """True if nothing would be marked now, whatever is endangered."""
        return self.is_disabled or self.hold is not None

    @property
    def queued_count(self) -> int:
        """Number of ledgers marked in either queue."""
        return self.marked_count + len(self.own)

    @property
    def would_mark(self) -> Sequence[UnderreplicatedLedger]:
        return () if self.is_kept_from_marking else self.underreplicated

    @property
    def by_copies_left(self) -> dict[int, int]:
        """Number of endangered ledgers by the copies left of their worst entry, fewest first."""
        return dict(sorted(Counter(each.copies_left for each in self.underreplicated).items()))


def compare(
    underreplicated: Sequence[UnderreplicatedLedger], marks: Mapping[int, Collection[BookieId]]
) -> Difference:
    """Return how the marks differ from those we would make. ``marks``: by ledger, the replicas that
    its mark names; none if the mark cannot be read."""
    unmarked = tuple(each.ledger_id for each in underreplicated if each.ledger_id not in marks)
    partly_marked = tuple(
        each.ledger_id
        for each in underreplicated
        if each.ledger_id in marks and not set(each.lost) <= set(marks[each.ledger_id])
    )
    surplus = marks.keys() - {each.ledger_id for each in underreplicated}
    return Difference(
        agreed_count=len(underreplicated) - len(unmarked) - len(partly_marked),
        unmarked=unmarked,
        partly_marked=partly_marked,
        surplus=tuple(sorted(surplus)),
    )


def lost_bytes(ledger: MappedLedger, lost: Collection[BookieId]) -> float:
    """Return about how large the lost copies are, assuming equal entries and equally long
    segments."""
    ensemble_size = len(ledger.ensembles[0])
    lost_count = sum(bookie in lost for ensemble in ledger.ensembles for bookie in ensemble)
    share = lost_count / (ensemble_size * len(ledger.ensembles))
    return ledger.length * ledger.write_quorum * share


def missing_bookies(
    lost: Collection[BookieId],
    waiting_s: Mapping[BookieId, float],
    reformatted: Collection[BookieId],
    *,
    underreplicated: Sequence[UnderreplicatedLedger],
    naming: Mapping[BookieId, int],
) -> tuple[MissingBookie, ...]:
    """Return the missing bookies, those with most ledgers first.

    ``waiting_s``: rest of the recovery delay. ``naming``: number of ledgers that name each of
    these. A reformatted bookie that endangers no ledger is left out, as it is like any other.
    """
    counts = Counter(bookie for each in underreplicated for bookie in each.lost)
    rows = [
        *(_row(bookie, Absence.LOST, counts[bookie]) for bookie in lost),
        *(_row(b, Absence.WAITING, naming[b], left_s) for b, left_s in waiting_s.items()),
        *(_row(b, Absence.REBORN, counts[b]) for b in reformatted if counts[b] and b not in lost),
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ledger_count, row.bookie)))


def _row(
    bookie: BookieId, absence: Absence, ledger_count: int, left_s: float = 0.0
) -> MissingBookie:
    return MissingBookie(bookie=bookie, absence=absence, left_s=left_s, ledger_count=ledger_count)
