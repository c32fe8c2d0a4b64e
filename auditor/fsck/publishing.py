"""Marks the ledgers that a run found damaged, so that the daemon repairs them.

Damage that Java's workers can detect is marked in the shared queue, other damage in our private queue
(``java_visibility``). A mark names the bookies. A finding beside it says why, and makes workers check
all entries that these bookies should have.

Not marked are: unknown copies; unregistered bookies, whose recovery delay the leader keeps; copies
that are legally missing; and copies that differ, as nobody knows which is right.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from auditor.finding_marker import (
    Damage,
    FindingMarker,
    JavaVisibility,
    java_visibility,
)
from auditor.fsck.results.advice import entries_text
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from auditor.mark_reasons import Findings
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, known_fragments
from replication.cluster import ClusterView, ViewSource
from replication.entry_runs import EntryRuns

CHECK_NAME = "fsck"
"""The reason of the mark, as the queue listing shows it."""
REFUSALS = frozenset({Finding.MISSING, Finding.READ_ERROR})
"""Findings in which the bookie returned no bytes, neither right nor wrong."""
FAULTS = REFUSALS | {Finding.BAD_DIGEST}
PUBLISHED_AT_ONCE = 100
SHOWN_MAX = 3
"""Number of observations in the text for operators."""

Show = Callable[[int], None]
"""Receives the number of ledgers left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A damaged ledger to mark.

    ``metadata_version``, ``mtime_ms``: of the metadata that the verdict is based on. The version
    alone says little: most metadata is never written again. ``last_entry_id``: if the ledger is not
    closed, the last entry known to be acknowledged.
    """

    ledger_id: int
    grade: Grade
    damage: Mapping[BookieId, Damage]
    detail: str
    metadata_version: int
    mtime_ms: int
    last_entry_id: int = -1

    @property
    def bookies(self) -> tuple[BookieId, ...]:
        """The bookies with bad copies, ascending."""
        return tuple(sorted(self.damage))

    def sight(
        self, versioned: VersionedMetadata, registered: Collection[BookieId]
    ) -> JavaVisibility:
        """Return which damage Java's workers can detect. ``versioned``: the metadata that the
        verdict is based on."""
        found = known_fragments(self.ledger_id, versioned.metadata, lac=self.last_entry_id)
        return java_visibility(found, self.damage, registered=registered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Counts of the outcomes.

    ``new``: ledgers with a new mark, or a mark that names more bookies now. ``known``: ledgers that
    were marked so before. ``changed``: not marked, because the ledger is deleted or unreadable, or
    its metadata was written since and the damage may be repaired. ``own``: marked ledgers with a
    mark in our private queue, which Java's workers do not read.
    """

    new: int = 0
    known: int = 0
    changed: int = 0
    own: int = 0

    def __add__(self, other: "Published") -> "Published":
        return Published(
            new=self.new + other.new,
            known=self.known + other.known,
            changed=self.changed + other.changed,
            own=self.own + other.own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What would be published now. ``faults``: ledgers that would be marked, or are marked already.
    The counts are as in ``Published``."""

    faults: tuple[Fault, ...] = ()
    changed: int = 0
    own: int = 0


def faults_of(verdicts: Iterable[LedgerVerdict]) -> list[Fault]:
    """Return the ledgers to mark, the most endangered first."""
    found = [fault for verdict in verdicts if (fault := fault_of(verdict)) is not None]
    return sorted(found, key=lambda fault: (fault.grade.rank, fault.ledger_id))


def fault_of(verdict: LedgerVerdict) -> Fault | None:
    """Return the ledger to mark; None if a worker could repair nothing."""
    seen = [each for each in verdict.evidence if each.finding in FAULTS and each.bookie is not None]
    if not seen:
        return None
    return Fault(
        ledger_id=verdict.ledger_id,
        grade=verdict.grade,
        damage=_damage(seen),
        detail=_sentence(seen),
        metadata_version=verdict.metadata_version,
        mtime_ms=verdict.mtime_ms,
        last_entry_id=verdict.last_entry_id,
    )


def _damage(seen: Sequence[Evidence]) -> dict[BookieId, Damage]:
    """Return the damage by bookie. An observation covers one fragment, and only its first and last
    entry are known to be bad."""
    bad: dict[BookieId, set[int]] = defaultdict(set)
    refused: dict[BookieId, set[int]] = defaultdict(set)
    for each in seen:
        assert each.bookie is not None, each
        ends = {each.first_entry_id, each.last_entry_id}
        bad[each.bookie] |= ends
        if each.finding in REFUSALS:
            refused[each.bookie] |= ends
    return {
        bookie: Damage(
            entries=EntryRuns(sorted(ends)), not_returned=EntryRuns(sorted(refused[bookie]))
        )
        for bookie, ends in bad.items()
    }


def _sentence(seen: Sequence[Evidence]) -> str:
    told = "; ".join(map(_clause, seen[:SHOWN_MAX]))
    more = len(seen) - SHOWN_MAX
    return f"{told}; and {more} more" if more > 0 else told


def _clause(each: Evidence) -> str:
    return f"{each.bookie}: {each.finding.value.replace('_', ' ')}, {entries_text(each)}"


async def sight_now(
    fault: Fault, manager: LedgerManager, view: ClusterView
) -> JavaVisibility | None:
    """Return how to mark the ledger; None if it must not be marked, because it is deleted or
    unreadable, or its metadata was written since the verdict."""
    try:
        found = await manager.find(fault.ledger_id)
    except (CorruptionError, UnauthorizedError):
        return None
    judged_by = (fault.metadata_version, fault.mtime_ms)
    if found is None or (found.stat.version, found.stat.mtime_ms) != judged_by:
        return None
    return fault.sight(found, view.available)


async def foresee(
    faults: Sequence[Fault],
    manager: LedgerManager,
    view: ClusterView,
    show: Show = lambda left: None,
) -> Foreseen:
    """Return what a ``Publisher`` would do. Writes nothing."""
    source_health: list[Fault] = []
    own, left = 0, len(faults)
    for part in _parts(faults, PUBLISHED_AT_ONCE):
        sights = await asyncio.gather(*(sight_now(fault, manager, view) for fault in part))
        source_health += [
            fault for fault, sight in zip(part, sights, strict=True) if sight is not None
        ]
        own += sum(sight is not None and sight.needs_private_mark for sight in sights)
        left -= len(part)
        show(left)
    return Foreseen(faults=tuple(source_health), changed=len(faults) - len(source_health), own=own)


class Publisher:
    """Writes findings and marks.

    ``queues`` and ``findings`` write under the guards of the session, which has joined the cluster.
    ``views`` are up to date.
    """

    def __init__(
        self, queues: FindingMarker, findings: Findings, manager: LedgerManager, views: ViewSource
    ) -> None:
        self._queues, self._findings = queues, findings
        self._manager, self._views = manager, views

    async def publish(self, faults: Sequence[Fault], show: Show = lambda left: None) -> Published:
        """Mark the ledgers in this order, some at a time. Repeating it is harmless: marks are
        merged."""
        total = Published()
        left = len(faults)
        for part in _parts(faults, PUBLISHED_AT_ONCE):
            outcomes = await asyncio.gather(*map(self._publish_one, part))
            total = sum(outcomes, start=total)
            left -= len(part)
            show(left)
        return total

    async def _publish_one(self, fault: Fault) -> Published:
        sight = await sight_now(fault, self._manager, self._views.current)
        if sight is None:
            return Published(changed=1)
        await self._findings.write(fault.ledger_id, CHECK_NAME, fault.bookies, fault.detail)
        is_news = await self._queues.mark(fault.ledger_id, sight)
        return Published(
            new=int(is_news), known=int(not is_news), own=int(sight.needs_private_mark)
        )


def _parts(faults: Sequence[Fault], size: int) -> Iterator[list[Fault]]:
    rest = iter(faults)
    while part := list(islice(rest, size)):
        yield part
