"""What a run found, given to the daemon: ledgers whose copies are known to be missing or bad are marked.

A mark says which bookies, a finding beside it why, so that workers ask those for all that they should have of the
ledger. Left to others: what is merely unknown; bookies that are gone, whose recovery delay the leader keeps; and
copies that are legally missing, or differ, as nobody knows which is right.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from auditor.findings import Findings
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from auditor.marking import Marker
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId

CHECK_NAME = "fsck"
"""As the queue's list names the reason."""
FAULTS = frozenset({Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR})
PUBLISHED_AT_ONCE = 100
SHOWN_MAX = 3
"""Pieces of evidence in the sentence for operators."""

Show = Callable[[int], None]
"""Told how many are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A ledger to be marked. ``bookies`` ascend. ``metadata_version``, ``mtime_ms``: of the metadata that
    it was judged by; the version alone says little, as most metadata is never written again."""

    ledger_id: int
    grade: Grade
    bookies: tuple[BookieId, ...]
    detail: str
    metadata_version: int
    mtime_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``new``: marks that are, or name more bookies now. ``changed``: ledgers that are gone, or whose metadata
    was written since, or can no longer be read, so that what was found may be mended: not marked."""

    new: int = 0
    known: int = 0
    changed: int = 0


def faults_of(verdicts: Iterable[LedgerVerdict]) -> list[Fault]:
    """The most endangered first."""
    found = [fault for verdict in verdicts if (fault := fault_of(verdict)) is not None]
    return sorted(found, key=lambda fault: (fault.grade.rank, fault.ledger_id))


def fault_of(verdict: LedgerVerdict) -> Fault | None:
    """None where there is nothing that a worker could mend."""
    seen = [each for each in verdict.evidence if each.finding in FAULTS and each.bookie is not None]
    if not seen:
        return None
    return Fault(
        ledger_id=verdict.ledger_id,
        grade=verdict.grade,
        bookies=tuple(sorted({each.bookie for each in seen if each.bookie is not None})),
        detail=_sentence(seen),
        metadata_version=verdict.metadata_version,
        mtime_ms=verdict.mtime_ms,
    )


def _sentence(seen: Sequence[Evidence]) -> str:
    told = "; ".join(map(_clause, seen[:SHOWN_MAX]))
    more = len(seen) - SHOWN_MAX
    return f"{told}; and {more} more" if more > 0 else told


def _clause(each: Evidence) -> str:
    where = f"entries {each.first_entry_id} to {each.last_entry_id}"
    if each.first_entry_id == each.last_entry_id:
        where = f"entry {each.first_entry_id}"
    return f"{each.bookie}: {each.finding.value.replace('_', ' ')}, {where} ({each.entry_count})"


class Publisher:
    """In a session that has joined: ``marker`` and ``findings`` write through its guards."""

    def __init__(self, marker: Marker, findings: Findings, manager: LedgerManager) -> None:
        self._marker, self._findings, self._manager = marker, findings, manager

    async def publish(self, faults: Sequence[Fault], show: Show = lambda left: None) -> Published:
        """In this order, some at a time. Once more is harmless: it merges into what is there."""
        total = Published()
        left = len(faults)
        for part in _parts(faults, PUBLISHED_AT_ONCE):
            outcomes = await asyncio.gather(*map(self._publish_one, part))
            total = Published(
                new=total.new + outcomes.count(True),
                known=total.known + outcomes.count(False),
                changed=total.changed + outcomes.count(None),
            )
            left -= len(part)
            show(left)
        return total

    async def _publish_one(self, fault: Fault) -> bool | None:
        """Whether the mark is news; None: not marked."""
        if not await self._is_unchanged(fault):
            return None
        await self._findings.write(fault.ledger_id, CHECK_NAME, fault.bookies, fault.detail)
        return await self._marker.mark(fault.ledger_id, fault.bookies)

    async def _is_unchanged(self, fault: Fault) -> bool:
        try:
            found = await self._manager.find(fault.ledger_id)
        except (CorruptionError, UnauthorizedError):
            return False
        if found is None:
            return False
        judged_by = (fault.metadata_version, fault.mtime_ms)
        return (found.stat.version, found.stat.mtime_ms) == judged_by


def _parts(faults: Sequence[Fault], size: int) -> Iterator[list[Fault]]:
    rest = iter(faults)
    while part := list(islice(rest, size)):
        yield part
