"""Each kind of damage to one ledger with three copies, and the verdict that fsck should give.

These are only values, so that they can be compared with the documentation's table of levels.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from auditor.fsck.ledger_inspector import sampled
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.codec.metadata import serialize_metadata
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, Segment
from tests.fsck.damage import Copy

METADATA, ENDS, SAMPLE, FULL = Level
ENTRY_COUNT = 30
FIRST, LAST = 0, ENTRY_COUNT - 1
SAMPLE_SHARE = 0.2
SEED = 7
"""The seed of the sample."""
NONEXISTENT = BookieId("127.0.0.1:9")
"""A bookie that never existed."""

Pick = Callable[[int], int]
"""Chooses an entry by the ledger's id."""
Others = Collection[BookieId]
Change = Callable[[VersionedMetadata, Others], bytes]
"""Changes the znode's bytes, given the bookies that the ledger does not name."""


def first(ledger_id: int) -> int:
    return FIRST


def last(ledger_id: int) -> int:
    return LAST


def in_sample(ledger_id: int) -> int:
    return min(_sample(ledger_id))


def hidden(ledger_id: int) -> int:
    """Return an entry that is neither at an end nor in the sample."""
    return min(set(range(1, LAST)) - _sample(ledger_id))


def _sample(ledger_id: int) -> set[int]:
    return {*sampled(FIRST, LAST, share=SAMPLE_SHARE, seed=SEED ^ ledger_id)} - {FIRST, LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A verdict in short."""

    grade: Grade = Grade.WHOLE
    findings: tuple[Finding, ...] = ()
    rests_on_unknown: bool = False


REPAIRED = Told()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of damage. ``seen_from``: the least close level that finds it."""

    name: str
    seen_from: Level
    grade: Grade
    findings: tuple[Finding, ...]
    rests_on_unknown: bool = False
    repaired: Told | None = None
    """The verdict of level full after the daemon's repairs. None: the same as before."""
    change: Change | None = None
    """The change of the metadata, if any."""

    def told(self, level: Level) -> Told:
        if level.depth < self.seen_from.depth:
            return Told()
        return Told(
            grade=self.grade, findings=self.findings, rests_on_unknown=self.rests_on_unknown
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDamage(Kind):
    """Damage to files of stopped bookies: ``how`` at the entry ``at``, on these bookie indexes."""

    how: Callable[[Copy, int], None]
    at: Pick = first
    copies: tuple[int, ...] = (0,)


ONE, TWO, ALL = (0,), (0, 1), (0, 1, 2)


def _replaced_at_the_end(versioned: VersionedMetadata, others: Others) -> bytes:
    """Replace the first bookie at the end. An ack quorum of the others was enough to close."""
    metadata = versioned.metadata
    ensemble = (min(others), *metadata.last_segment.ensemble[1:])
    return serialize_metadata(
        metadata.with_segment(Segment(first_entry_id=ENTRY_COUNT, ensemble=ensemble))
    )


COPY_DAMAGES = (
    CopyDamage(
        name="a ledger's data removed on one bookie",
        how=Copy.remove,
        copies=ONE,
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="a ledger's data removed on two bookies",
        how=Copy.remove,
        copies=TWO,
        seen_from=ENDS,
        grade=Grade.AT_RISK,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="a ledger's data removed on all bookies",
        how=Copy.remove,
        copies=ALL,
        seen_from=ENDS,
        grade=Grade.LOST,
        findings=(Finding.MISSING,),
    ),
    CopyDamage(
        name="the last entry missing on one bookie",
        how=Copy.forget,
        at=last,
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="an entry of the sample missing on one bookie",
        how=Copy.forget,
        at=in_sample,
        seen_from=SAMPLE,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="an entry between missing on one bookie",
        how=Copy.forget,
        at=hidden,
        seen_from=FULL,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="an entry between missing on all bookies",
        how=Copy.forget,
        at=hidden,
        copies=ALL,
        seen_from=FULL,
        grade=Grade.LOST,
        findings=(Finding.MISSING,),
    ),
    CopyDamage(
        name="a bit of the first entry flipped on one bookie",
        how=Copy.flip,
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.BAD_DIGEST,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="a bit of an entry between flipped on two bookies",
        how=Copy.flip,
        at=hidden,
        copies=TWO,
        seen_from=FULL,
        grade=Grade.AT_RISK,
        findings=(Finding.BAD_DIGEST,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="a bit of the last entry flipped on all bookies",
        how=Copy.flip,
        at=last,
        copies=ALL,
        seen_from=ENDS,
        grade=Grade.LOST,
        findings=(Finding.BAD_DIGEST,),
        # The entries before it are good. They were moved away from bookies that damage what they
        # store.
        repaired=Told(grade=Grade.LOST, findings=(Finding.BAD_DIGEST, Finding.STRAY)),
    ),
    CopyDamage(
        name="the first entry unreadable on one bookie",
        how=Copy.garble,
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.READ_ERROR,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="an entry between unreadable on two bookies",
        how=Copy.garble,
        at=hidden,
        copies=TWO,
        seen_from=FULL,
        grade=Grade.AT_RISK,
        findings=(Finding.READ_ERROR,),
        repaired=REPAIRED,
    ),
    CopyDamage(
        name="an entry between missing on a bookie that the writer replaced",
        how=Copy.forget,
        at=hidden,
        change=_replaced_at_the_end,
        seen_from=FULL,
        grade=Grade.DEGRADED,
        findings=(Finding.ACK_QUORUM_ONLY,),
    ),
    CopyDamage(
        name="another payload with a right digest on one bookie",
        how=Copy.replace,
        seen_from=FULL,
        grade=Grade.WHOLE,
        findings=(Finding.SUSPECT,),
    ),
    CopyDamage(
        name="another length with a right digest on one bookie",
        how=Copy.lengthen,
        at=hidden,
        seen_from=FULL,
        grade=Grade.WHOLE,
        findings=(Finding.SUSPECT,),
    ),
)


def _cut_short(versioned: VersionedMetadata, others: Others) -> bytes:
    return versioned.data[: len(versioned.data) // 2]


def _of_future_version(versioned: VersionedMetadata, others: Others) -> bytes:
    return versioned.data.replace(b"Version\t3\n", b"Version\t99\n")


def _naming_a_nonexistent_bookie(versioned: VersionedMetadata, others: Others) -> bytes:
    return _with_first(versioned.metadata, NONEXISTENT)


def _naming_a_bookie_without_it(versioned: VersionedMetadata, others: Others) -> bytes:
    return _with_first(versioned.metadata, min(others))


def _with_first(metadata: LedgerMetadata, bookie: BookieId) -> bytes:
    segments = tuple(segment.with_bookies({0: bookie}) for segment in metadata.segments)
    return serialize_metadata(replace(metadata, segments=segments))


def _moved(versioned: VersionedMetadata, others: Others) -> bytes:
    """Move the second part to three bookies that have nothing.

    The old bookies are former members.
    """
    ensemble = tuple(sorted(others)[:3])
    segment = Segment(first_entry_id=ENTRY_COUNT // 2, ensemble=ensemble)
    return serialize_metadata(versioned.metadata.with_segment(segment))


CHANGES = (
    Kind(
        name="unreadable metadata",
        change=_cut_short,
        seen_from=METADATA,
        grade=Grade.UNKNOWN,
        findings=(Finding.UNREADABLE_METADATA,),
        rests_on_unknown=True,
    ),
    Kind(
        name="metadata of a future version",
        change=_of_future_version,
        seen_from=METADATA,
        grade=Grade.UNKNOWN,
        findings=(Finding.UNREADABLE_METADATA,),
        rests_on_unknown=True,
    ),
    Kind(
        name="metadata that names a nonexistent bookie",
        change=_naming_a_nonexistent_bookie,
        seen_from=METADATA,
        grade=Grade.DEGRADED,
        findings=(Finding.BOOKIE_GONE,),
        rests_on_unknown=True,
        repaired=REPAIRED,
    ),
    Kind(
        name="metadata that names a bookie that never had it",
        change=_naming_a_bookie_without_it,
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
        repaired=REPAIRED,
    ),
    Kind(
        name="copies only on former members",
        change=_moved,
        seen_from=ENDS,
        grade=Grade.AT_RISK,
        findings=(Finding.MISSING, Finding.STRAY),
        # Of an earlier fragment they are members still: bookies delete ledgers, no entries.
        repaired=Told(findings=(Finding.STRAY,)),
    ),
)
KINDS: tuple[Kind, ...] = (*COPY_DAMAGES, *CHANGES)
