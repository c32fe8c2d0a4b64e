"""Marks the ledgers that a run found damaged, so that workers repair them.

Damage that Java's workers can detect is marked in the shared queue, other damage in bookmender's
private queue (``java_visibility``). A mark names the bookies. A finding beside it says why, and
makes workers check all entries that these bookies should have.

It does not mark unknown copies, and copies that the ack quorum allows to be missing. It leaves
absent bookies to the leader, which keeps the recovery delay. It does not mark copies that differ,
because fsck cannot know which is right.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict, entries_text
from auditor.mark_reasons import Findings, JavaVisibility, java_visibility
from ledgers.bookies import Answer
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, known_fragments
from replication.cluster import ClusterView, ViewSource
from replication.copy_reader import ReadFailures

CHECK_NAME = "fsck"
"""The reason of the mark, as the queue listing shows it."""
MARKED_FINDINGS = {
    Finding.MISSING: Answer.ABSENT,
    Finding.READ_ERROR: Answer.UNREADABLE,
    Finding.BAD_DIGEST: Answer.MISMATCH,
}
"""Findings that are marked, and the answers that they come from."""
MARKED_AT_ONCE = 100
SHOWN_MAX = 3
"""Number of observations in the text for operators."""

T = TypeVar("T")
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
    damage: Mapping[BookieId, ReadFailures]
    detail: str
    metadata_version: int
    mtime_ms: int
    last_entry_id: int = -1

    @property
    def bookies(self) -> tuple[BookieId, ...]:
        """The bookies with bad copies, ascending."""
        return tuple(sorted(self.damage))


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
    damage: dict[BookieId, ReadFailures] = defaultdict(ReadFailures)
    clauses = []
    for each in verdict.evidence:
        if each.finding not in MARKED_FINDINGS or each.bookie is None:
            continue
        answer = MARKED_FINDINGS[each.finding]
        # It covers one fragment, and only its first and last entry are known to be bad.
        damage[each.bookie].add(dict.fromkeys((each.first_entry_id, each.last_entry_id), answer))
        finding = each.finding.value.replace("_", " ")
        clauses.append(f"{each.bookie}: {finding}, {entries_text(each)}")
    if not damage:
        return None
    if (more := len(clauses) - SHOWN_MAX) > 0:
        clauses[SHOWN_MAX:] = [f"and {more} more"]
    return DamagedLedger(
        ledger_id=verdict.ledger_id,
        grade=verdict.grade,
        damage=damage,
        detail="; ".join(clauses),
        metadata_version=verdict.metadata_version,
        mtime_ms=verdict.mtime_ms,
        last_entry_id=verdict.last_entry_id,
    )


async def current_visibility(
    ledger: DamagedLedger, manager: LedgerManager, view: ClusterView
) -> JavaVisibility | None:
    """Return which damage Java's workers can detect; None if the ledger must not be marked, because
    it is deleted or unreadable, or its metadata was written since the verdict."""
    try:
        found = await manager.find(ledger.ledger_id)
    except (CorruptionError, UnauthorizedError):
        return None
    judged_by = (ledger.metadata_version, ledger.mtime_ms)
    if found is None or (found.stat.version, found.stat.mtime_ms) != judged_by:
        return None
    fragments = known_fragments(ledger.ledger_id, found.metadata, lac=ledger.last_entry_id)
    return java_visibility(fragments, ledger.damage, registered=view.available)


async def preview_marks(
    ledgers: Sequence[DamagedLedger],
    manager: LedgerManager,
    view: ClusterView,
    show: Show = lambda left: None,
) -> MarkPreview:
    """Return what a ``DamageMarker`` would do. Writes nothing."""

    async def look(ledger: DamagedLedger) -> JavaVisibility | None:
        return await current_visibility(ledger, manager, view)

    found = await _for_each(ledgers, look, show)
    to_mark = [ledger for ledger, seen in zip(ledgers, found, strict=True) if seen is not None]
    return MarkPreview(
        ledgers=tuple(to_mark),
        changed=len(ledgers) - len(to_mark),
        own=sum(each is not None and each.needs_private_mark for each in found),
    )


@dataclass
class DamageMarker:
    """Writes findings and marks.

    ``findings`` writes under the guards of the session, which has joined the cluster. ``views`` are
    up to date.
    """

    findings: Findings
    manager: LedgerManager
    views: ViewSource

    async def mark(
        self, ledgers: Sequence[DamagedLedger], show: Show = lambda left: None
    ) -> MarkCounts:
        """Mark the ledgers in this order, some at a time. Repeating it is harmless: marks are
        merged."""
        counts: Counter[str] = Counter()

        async def mark(ledger: DamagedLedger) -> None:
            visibility = await current_visibility(ledger, self.manager, self.views.current)
            if visibility is None:
                counts["changed"] += 1
                return
            is_new = await self.findings.mark(
                ledger.ledger_id, CHECK_NAME, visibility, ledger.detail
            )
            counts["new" if is_new else "known"] += 1
            counts["own"] += visibility.needs_private_mark

        await _for_each(ledgers, mark, show)
        return MarkCounts(**counts)


async def _for_each(
    ledgers: Sequence[DamagedLedger], work: Callable[[DamagedLedger], Awaitable[T]], show: Show
) -> list[T]:
    """Return the results in the order of the ledgers."""
    done: list[T] = []
    for start in range(0, len(ledgers), MARKED_AT_ONCE):
        done += await asyncio.gather(*map(work, ledgers[start : start + MARKED_AT_ONCE]))
        show(len(ledgers) - len(done))
    return done
