"""What a run found, given to the daemon: ledgers whose copies are known to be missing or bad are
marked.

In the shared queue what Java's workers see as well, in our own what they would find whole
(``java_sight``). A mark says which bookies, a finding beside it why, so that workers ask those for
all that they should have of the ledger. Left to others: what is merely unknown; bookies that are
gone, whose recovery delay the leader keeps; and copies that are legally missing, or differ, as
nobody knows which is right.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from auditor.findings import Findings
from auditor.fsck.results.advice import entries_text
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from auditor.java_sight import Damage, Sight, java_sight
from auditor.marking import BothQueues
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.fragments import known_fragments
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import BookieId
from replication.cluster.cluster_view import ClusterView, ViewSource
from replication.planning.entry_runs import EntryRuns

CHECK_NAME = "fsck"
"""As the queue's list names the reason."""
REFUSALS = frozenset({Finding.MISSING, Finding.READ_ERROR})
"""A bookie gives no bytes at all, right or wrong."""
FAULTS = REFUSALS | {Finding.BAD_DIGEST}
PUBLISHED_AT_ONCE = 100
SHOWN_MAX = 3
"""Pieces of evidence in the sentence for operators."""

Show = Callable[[int], None]
"""Told how many are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A ledger to be marked. ``metadata_version``, ``mtime_ms``: of the metadata that it was judged
    by; the version alone says little, as most metadata is never written again. ``last_entry_id``:
    of one that is not closed, the last that was known to be acknowledged."""

    ledger_id: int
    grade: Grade
    damage: Mapping[BookieId, Damage]
    detail: str
    metadata_version: int
    mtime_ms: int
    last_entry_id: int = -1

    @property
    def bookies(self) -> tuple[BookieId, ...]:
        """Whose copies are at fault; ascending."""
        return tuple(sorted(self.damage))

    def sight(self, versioned: VersionedMetadata, registered: Collection[BookieId]) -> Sight:
        """``versioned``: what it was judged by."""
        found = known_fragments(self.ledger_id, versioned.metadata, lac=self.last_entry_id)
        return java_sight(found, self.damage, registered=registered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``new``: ledgers whose marks are, or name more bookies now. ``changed``: ledgers that are
    gone, or whose metadata was written since, or can no longer be read, so that what was found may
    be mended: not marked. ``own``: of those that are marked, how many stand in our own queue, which
    Java's workers do not look at."""

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
    """What would be published now. ``faults``: those that would be marked, or are; the others as in
    ``Published``."""

    faults: tuple[Fault, ...] = ()
    changed: int = 0
    own: int = 0


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
        damage=_damage(seen),
        detail=_sentence(seen),
        metadata_version=verdict.metadata_version,
        mtime_ms=verdict.mtime_ms,
        last_entry_id=verdict.last_entry_id,
    )


def _damage(seen: Sequence[Evidence]) -> dict[BookieId, Damage]:
    """An observation is of one fragment, and of its entries the first and the last are known to be
    bad."""
    bad: dict[BookieId, set[int]] = defaultdict(set)
    refused: dict[BookieId, set[int]] = defaultdict(set)
    for each in seen:
        assert each.bookie is not None, each
        ends = {each.first_entry_id, each.last_entry_id}
        bad[each.bookie] |= ends
        if each.finding in REFUSALS:
            refused[each.bookie] |= ends
    return {
        bookie: Damage(bad=EntryRuns(sorted(ends)), refused=EntryRuns(sorted(refused[bookie])))
        for bookie, ends in bad.items()
    }


def _sentence(seen: Sequence[Evidence]) -> str:
    told = "; ".join(map(_clause, seen[:SHOWN_MAX]))
    more = len(seen) - SHOWN_MAX
    return f"{told}; and {more} more" if more > 0 else told


def _clause(each: Evidence) -> str:
    return f"{each.bookie}: {each.finding.value.replace('_', ' ')}, {entries_text(each)}"


async def sight_now(fault: Fault, manager: LedgerManager, view: ClusterView) -> Sight | None:
    """How the ledger is to be marked; None where it is not there any more as it was judged: then it
    is not."""
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
    """What a ``Publisher`` would do; writes nothing."""
    standing: list[Fault] = []
    own, left = 0, len(faults)
    for part in _parts(faults, PUBLISHED_AT_ONCE):
        sights = await asyncio.gather(*(sight_now(fault, manager, view) for fault in part))
        standing += [fault for fault, sight in zip(part, sights, strict=True) if sight is not None]
        own += sum(sight is not None and sight.needs_own_mark for sight in sights)
        left -= len(part)
        show(left)
    return Foreseen(faults=tuple(standing), changed=len(faults) - len(standing), own=own)


class Publisher:
    """In a session that has joined: ``queues`` and ``findings`` write through its guards. ``views``
    were refreshed."""

    def __init__(
        self, queues: BothQueues, findings: Findings, manager: LedgerManager, views: ViewSource
    ) -> None:
        self._queues, self._findings = queues, findings
        self._manager, self._views = manager, views

    async def publish(self, faults: Sequence[Fault], show: Show = lambda left: None) -> Published:
        """In this order, some at a time. Once more is harmless: it merges into what is there."""
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
        return Published(new=int(is_news), known=int(not is_news), own=int(sight.needs_own_mark))


def _parts(faults: Sequence[Fault], size: int) -> Iterator[list[Fault]]:
    rest = iter(faults)
    while part := list(islice(rest, size)):
        yield part
