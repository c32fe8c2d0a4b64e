"""Marks the ledgers that a run found damaged, so that workers repair them.

Damage that Java's workers can detect is marked in the shared queue, other damage in bookmender's
private queue (``java_visibility``). A mark names the bookies. A finding beside it says why, and
makes workers check all entries that these bookies should have.

It does not mark unknown copies, and copies that the ack quorum allows to be missing. It leaves
absent bookies to the leader, which keeps the recovery delay. It does not mark copies that differ,
because fsck cannot know which is right.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from auditor.finding_marker import Damage, FindingMarker, JavaVisibility, java_visibility
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict, entries_text
from auditor.mark_reasons import Findings
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, known_fragments
from replication.cluster import ClusterView, ViewSource
from replication.entry_runs import EntryRuns

CHECK_NAME = "fsck"
"""The reason of the mark, as the queue listing shows it."""
NOT_RETURNED = frozenset({Finding.MISSING, Finding.READ_ERROR})
"""Findings in which the bookie returned no bytes, neither right nor wrong."""
MARKED_FINDINGS = NOT_RETURNED | {Finding.BAD_DIGEST}
MARKED_AT_ONCE = 100
SHOWN_MAX = 3
"""Number of observations in the text for operators."""

Show = Callable[[int], None]
"""Receives the number of ledgers left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedLedger:
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

    def visibility(
        self, versioned: VersionedMetadata, registered: Collection[BookieId]
    ) -> JavaVisibility:
        """Return which damage Java's workers can detect. ``versioned``: the metadata that the
        verdict is based on."""
        found = known_fragments(self.ledger_id, versioned.metadata, lac=self.last_entry_id)
        return java_visibility(found, self.damage, registered=registered)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkCounts:
    """How many damaged ledgers were marked, and how many were not.

    ``new``: ledgers with a new mark, or whose mark names more bookies now. ``known``: ledgers whose
    mark named these bookies already. ``own``: those of them that have a mark in the private queue,
    which Java's workers do not see. ``changed``: ledgers that were not marked. Their metadata was
    written since, so the damage may be repaired, or the ledger is deleted or unreadable.
    """

    new: int = 0
    known: int = 0
    changed: int = 0
    own: int = 0

    def __add__(self, other: "MarkCounts") -> "MarkCounts":
        return MarkCounts(
            new=self.new + other.new,
            known=self.known + other.known,
            changed=self.changed + other.changed,
            own=self.own + other.own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkPreview:
    """The marks that a ``DamageMarker`` would make. ``ledgers``: also those that are marked
    already. The counts have the meaning of ``MarkCounts``."""

    ledgers: tuple[DamagedLedger, ...] = ()
    changed: int = 0
    own: int = 0


def damaged_ledgers(verdicts: Iterable[LedgerVerdict]) -> list[DamagedLedger]:
    """Return the ledgers to mark, the most urgent first."""
    found = [each for verdict in verdicts if (each := damaged_ledger(verdict)) is not None]
    return sorted(found, key=lambda ledger: (ledger.grade.rank, ledger.ledger_id))


def damaged_ledger(verdict: LedgerVerdict) -> DamagedLedger | None:
    """Return the ledger to mark; None if a worker could repair nothing."""
    evidence = [
        each
        for each in verdict.evidence
        if each.finding in MARKED_FINDINGS and each.bookie is not None
    ]
    if not evidence:
        return None
    return DamagedLedger(
        ledger_id=verdict.ledger_id,
        grade=verdict.grade,
        damage=_damage(evidence),
        detail=_sentence(evidence),
        metadata_version=verdict.metadata_version,
        mtime_ms=verdict.mtime_ms,
        last_entry_id=verdict.last_entry_id,
    )


def _damage(evidence: Sequence[Evidence]) -> dict[BookieId, Damage]:
    """Return the damage by bookie. An observation covers one fragment, and only its first and last
    entry are known to be bad."""
    bad: dict[BookieId, set[int]] = defaultdict(set)
    not_returned: dict[BookieId, set[int]] = defaultdict(set)
    for each in evidence:
        assert each.bookie is not None, each
        ends = {each.first_entry_id, each.last_entry_id}
        bad[each.bookie] |= ends
        if each.finding in NOT_RETURNED:
            not_returned[each.bookie] |= ends
    return {
        bookie: Damage(
            entries=EntryRuns(sorted(ends)), not_returned=EntryRuns(sorted(not_returned[bookie]))
        )
        for bookie, ends in bad.items()
    }


def _sentence(evidence: Sequence[Evidence]) -> str:
    shown = "; ".join(map(_clause, evidence[:SHOWN_MAX]))
    more = len(evidence) - SHOWN_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


def _clause(each: Evidence) -> str:
    return f"{each.bookie}: {each.finding.value.replace('_', ' ')}, {entries_text(each)}"


async def current_visibility(
    ledger: DamagedLedger, manager: LedgerManager, view: ClusterView
) -> JavaVisibility | None:
    """Return how to mark the ledger; None if it must not be marked, because it is deleted or
    unreadable, or its metadata was written since the verdict."""
    try:
        found = await manager.find(ledger.ledger_id)
    except (CorruptionError, UnauthorizedError):
        return None
    judged_by = (ledger.metadata_version, ledger.mtime_ms)
    if found is None or (found.stat.version, found.stat.mtime_ms) != judged_by:
        return None
    return ledger.visibility(found, view.available)


async def preview_marks(
    ledgers: Sequence[DamagedLedger],
    manager: LedgerManager,
    view: ClusterView,
    show: Show = lambda left: None,
) -> MarkPreview:
    """Return what a ``DamageMarker`` would do. Writes nothing."""
    to_mark: list[DamagedLedger] = []
    own, left = 0, len(ledgers)
    for part in _parts(ledgers, MARKED_AT_ONCE):
        found = await asyncio.gather(*(current_visibility(each, manager, view) for each in part))
        to_mark += [
            ledger for ledger, visibility in zip(part, found, strict=True) if visibility is not None
        ]
        own += sum(each is not None and each.needs_private_mark for each in found)
        left -= len(part)
        show(left)
    return MarkPreview(ledgers=tuple(to_mark), changed=len(ledgers) - len(to_mark), own=own)


class DamageMarker:
    """Writes findings and marks.

    ``queues`` and ``findings`` write under the guards of the session, which has joined the cluster.
    ``views`` are up to date.
    """

    def __init__(
        self, queues: FindingMarker, findings: Findings, manager: LedgerManager, views: ViewSource
    ) -> None:
        self._queues, self._findings = queues, findings
        self._manager, self._views = manager, views

    async def mark(
        self, ledgers: Sequence[DamagedLedger], show: Show = lambda left: None
    ) -> MarkCounts:
        """Mark the ledgers in this order, some at a time. Repeating it is harmless: marks are
        merged."""
        total = MarkCounts()
        left = len(ledgers)
        for part in _parts(ledgers, MARKED_AT_ONCE):
            outcomes = await asyncio.gather(*map(self._mark_one, part))
            total = sum(outcomes, start=total)
            left -= len(part)
            show(left)
        return total

    async def _mark_one(self, ledger: DamagedLedger) -> MarkCounts:
        visibility = await current_visibility(ledger, self._manager, self._views.current)
        if visibility is None:
            return MarkCounts(changed=1)
        await self._findings.write(ledger.ledger_id, CHECK_NAME, ledger.bookies, ledger.detail)
        is_new = await self._queues.mark(ledger.ledger_id, visibility)
        return MarkCounts(
            new=int(is_new), known=int(not is_new), own=int(visibility.needs_private_mark)
        )


def _parts(ledgers: Sequence[DamagedLedger], size: int) -> Iterator[list[DamagedLedger]]:
    rest = iter(ledgers)
    while part := list(islice(rest, size)):
        yield part
