"""What a leader of ours would do now, and how that compares with the marks that stand: values, no
I/O."""

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.endangered import Endangered
from auditor.index.ledger_index import IndexedLedger
from auditor.own_queue import OwnQueue
from ledgers.metadata import BookieId
from replication.cluster.orders import HoldOrder


class Absence(enum.Enum):
    """Shown by commands: never change a value."""

    LOST = "lost"
    WAITING = "waiting"
    """Away, for less than the recovery delay."""
    REBORN = "reborn"
    """There, and set up after ledgers were put on it: it may have lost them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBookie:
    """``left_s``: of the recovery delay; 0 unless ``WAITING``. ``ledger_count``: of those it
    endangers."""

    bookie: BookieId
    absence: Absence
    left_s: float
    ledger_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Between the marks that we would make and those that stand in the shared queue. Ids ascend in
    ``surplus``.

    ``unmarked``: ours alone, most endangered first; likewise ``partly_marked``: their marks stand,
    and lack a lost replica. ``surplus``: standing marks that we would not make; a worker may be
    about to take them back.
    """

    agreed_count: int
    unmarked: tuple[int, ...]
    partly_marked: tuple[int, ...]
    surplus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Of one moment. ``endangered``: ledgers that miss copies, most endangered first."""

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
    """Those with most ledgers first."""
    endangered: tuple[Endangered, ...]
    lost_bytes: int
    """About so much their lost copies weigh."""
    marked_count: int
    """In the shared queue, whoever leads."""
    difference: Difference
    own: OwnQueue = field(default_factory=OwnQueue)
    """What none of these counts has: marks that Java's workers do not see."""
    is_disabled: bool
    hold: HoldOrder | None
    """The one that stands, or that we would begin; None while nothing would be held."""
    is_hold_ordered: bool
    """False of one that we would begin."""

    @property
    def is_kept_from_marking(self) -> bool:
        """Nothing would be marked now, whatever is endangered."""
        return self.is_disabled or self.hold is not None

    @property
    def queued_count(self) -> int:
        """Ledgers that are marked, in either queue."""
        return self.marked_count + len(self.own)

    @property
    def would_mark(self) -> Sequence[Endangered]:
        return () if self.is_kept_from_marking else self.endangered

    @property
    def by_copies_left(self) -> dict[int, int]:
        """Endangered ledgers, by how many copies are left of their worst entry; the fewest
        first."""
        return dict(sorted(Counter(each.copies_left for each in self.endangered).items()))


def compare(
    endangered: Sequence[Endangered], marks: Mapping[int, Collection[BookieId]]
) -> Difference:
    """``marks``: the replicas that each mark names, by ledger; of a mark that cannot be read
    none."""
    unmarked = tuple(each.ledger_id for each in endangered if each.ledger_id not in marks)
    partly_marked = tuple(
        each.ledger_id
        for each in endangered
        if each.ledger_id in marks and not set(each.lost) <= set(marks[each.ledger_id])
    )
    surplus = marks.keys() - {each.ledger_id for each in endangered}
    return Difference(
        agreed_count=len(endangered) - len(unmarked) - len(partly_marked),
        unmarked=unmarked,
        partly_marked=partly_marked,
        surplus=tuple(sorted(surplus)),
    )


def lost_bytes(ledger: IndexedLedger, lost: Collection[BookieId]) -> float:
    """About what the copies of lost bookies weigh: entries spread evenly, segments equally long."""
    ensemble_size = len(ledger.ensembles[0])
    lost_count = sum(bookie in lost for ensemble in ledger.ensembles for bookie in ensemble)
    share = lost_count / (ensemble_size * len(ledger.ensembles))
    return ledger.length * ledger.write_quorum * share


def missing_bookies(
    lost: Collection[BookieId],
    waiting_s: Mapping[BookieId, float],
    reborn: Collection[BookieId],
    *,
    endangered: Sequence[Endangered],
    naming: Mapping[BookieId, int],
) -> tuple[MissingBookie, ...]:
    """``waiting_s``: what is left of the delay. ``naming``: ledgers that name each of these.

    One that was set up anew, and endangers nothing, is left out: it is as any other.
    """
    counts = Counter(bookie for each in endangered for bookie in each.lost)
    rows = [
        *(_row(bookie, Absence.LOST, counts[bookie]) for bookie in lost),
        *(_row(b, Absence.WAITING, naming[b], left_s) for b, left_s in waiting_s.items()),
        *(_row(b, Absence.REBORN, counts[b]) for b in reborn if counts[b] and b not in lost),
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ledger_count, row.bookie)))


def _row(
    bookie: BookieId, absence: Absence, ledger_count: int, left_s: float = 0.0
) -> MissingBookie:
    return MissingBookie(bookie=bookie, absence=absence, left_s=left_s, ledger_count=ledger_count)
