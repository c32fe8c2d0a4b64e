"""The two checks that read copies: ``AllLedgersCheck`` reads a sample of every copy of every
ledger, and ``ReplicasCheck`` counts the good copies of every entry of every closed ledger.

``CopyInspector`` inspects for both, without writing or fencing. Its results are certain enough to
act on. An entry counts as damaged on a bookie only if the bookie said so twice, some time apart,
and the metadata was the same afterwards. An entry without an answer is unknown, never damaged (rule
S5). Bookies that are not registered are not asked. Open fragments are left out, because their
entries may still be on their way.

Java's AuditorCheckAllLedgersTask counts a timeout as a missing copy, stops at the first ledger that
it cannot open, and verifies no digests. Java's AuditorReplicasCheckTask only counts, and asks for
entry lists, which bookies with DbLedgerStorage never answer. Ours reads every entry, unless entry
lists are switched on, and marks what it finds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from auditor.checks.base import Check, FindingReporter, check_each
from auditor.checks.records import ALL_LEDGERS, REPLICAS
from auditor.finding_marker import (
    Damage,
    JavaVisibility,
    java_visibility,
)
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.errors import NoSuchLedgerError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, Fragment, LedgerMetadata, closed_fragments
from ledgers.reading import ledger_digest
from replication.cluster import ViewSource
from replication.copy_reader import (
    CONFIRM_AFTER_S,
    INSPECTIONS_MAX,
    CopyReader,
    EntryLists,
    ReadFailures,
    ReadPlan,
    plan_reads,
)
from replication.entry_runs import EntryRuns, overlaps
from replication.inspection import entry_bytes_guess
from replication.marks import MarkTree

LARGE_ENTRIES = 1_000
"""Reading more entries than this of one ledger takes much memory."""
LARGE_AT_ONCE = 8
"""Such ledgers that are read at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The copies of a ledger's closed fragments, as inspected by a check. ``damaged`` holds damage
    that a second read confirmed, by bookie."""

    metadata: LedgerMetadata
    fragments: tuple[Fragment, ...]
    damaged: Mapping[BookieId, ReadFailures] = field(default_factory=dict)
    unknown: frozenset[BookieId] = frozenset()
    """Bookies that did not answer some read."""
    is_key_suspect: bool = False
    """No entry matches the configured key, and the metadata holds no key (rule S7). Then nothing is
    known."""

    @property
    def visibility(self) -> JavaVisibility:
        """Return the damage that Java's workers can detect. The check asked registered bookies
        only."""
        damage = {
            bookie: Damage(entries=copy.bad, not_returned=copy.not_returned)
            for bookie, copy in self.damaged.items()
        }
        return java_visibility(self.fragments, damage, registered=damage)

    @property
    def detail(self) -> str:
        """A sentence for an operator."""
        return "; ".join(
            _damage_text(bookie, verb, entries)
            for bookie, copy in sorted(self.damaged.items())
            for verb, entries in (
                ("lacks", copy.absent),
                ("holds damaged", copy.mismatched),
                ("cannot read", copy.unreadable),
            )
            if entries
        )


def _damage_text(bookie: BookieId, verb: str, entries: EntryRuns) -> str:
    if len(entries) == 1:
        return f"{bookie} {verb} entry {entries[0]}"
    return f"{bookie} {verb} {len(entries)} of the entries {entries[0]} to {entries[-1]}"


class CopyInspector:
    """Inspects copies of many ledgers at a time. All checks of a leader share one."""

    def __init__(
        self,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        views: ViewSource,
        clock: Clock,
        rng: random.Random,
        fallback_digest: EntryDigest,
        entry_lists: bool = False,
    ) -> None:
        """``entry_lists``: see ``ReplicationSettings``."""
        self._manager = manager
        self._bookies = bookies
        self._views = views
        self._clock = clock
        self._rng = rng
        self._fallback_digest = fallback_digest
        self._lists = EntryLists(bookies, clock) if entry_lists else None
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def metadata(self, ledger_id: int) -> VersionedMetadata | None:
        """Return None if the ledger is deleted. Raises CorruptionError."""
        try:
            return await self._manager.read(ledger_id)
        except NoSuchLedgerError:
            return None

    async def inspect_sample(self, versioned: VersionedMetadata, share: float) -> CopyReport | None:
        """Read the first and the last entry of each copy, and ``share`` of the entries between.
        Return None if the ledger is deleted."""
        return await self._inspect(versioned, share=share)

    async def inspect_all(self, versioned: VersionedMetadata) -> CopyReport | None:
        """Read every entry of each copy. With entry lists, read only the ends of a copy whose list
        is complete."""
        return await self._inspect(versioned, share=0.0 if self._lists else 1.0, lists=self._lists)

    async def inspect_bookies(
        self, versioned: VersionedMetadata, bookies: Collection[BookieId], *, sample_entries: int
    ) -> CopyReport | None:
        """Inspect as ``inspect_sample``, but only copies on these bookies.

        ``sample_entries``: about how many entries between the ends are read of the whole ledger; at
        least one of each copy.
        """
        metadata = versioned.metadata
        # Of an open ledger only what lies before its last segment is read.
        entry_count = max(metadata.last_entry_id + 1, metadata.last_segment.first_entry_id, 1)
        share = min(1.0, sample_entries / entry_count)
        return await self._inspect(versioned, share=share, among=frozenset(bookies))

    async def _inspect(
        self,
        versioned: VersionedMetadata,
        *,
        share: float,
        lists: EntryLists | None = None,
        among: frozenset[BookieId] | None = None,
    ) -> CopyReport | None:
        """``among``: the bookies to ask; None: all that are registered."""
        for _ in range(INSPECTIONS_MAX):
            closed = closed_fragments(versioned.ledger_id, versioned.metadata)
            copies = await self._read_twice(
                versioned, closed, await self._read_plan(closed, share, lists, among)
            )
            if not copies.damaged:
                return copies
            await self._manager.sync(versioned.ledger_id)
            current = await self.metadata(versioned.ledger_id)
            if current is None or current.stat.mzxid == versioned.stat.mzxid:
                return copies if current else None
            versioned = current  # a worker or a writer changed the metadata: inspect again
        return replace(copies, damaged={}, unknown=copies.unknown.union(copies.damaged))

    async def _read_plan(
        self,
        closed: Sequence[Fragment],
        share: float,
        lists: EntryLists | None,
        among: frozenset[BookieId] | None,
    ) -> ReadPlan:
        """Return which entries to read: the ends, and a share of those between; with entry lists,
        all entries of a copy unless its list is complete."""
        available = self._views.current.available
        if among is not None:
            available &= among
        suspects: Collection[BookieId] = ()
        if lists:
            whole = await lists.are_complete(closed, available) if closed else {}
            suspects = available - {bookie for bookie, is_whole in whole.items() if is_whole}
        return plan_reads(
            closed, available=available, suspects=suspects, share=share, rng=self._rng
        )

    async def _read_twice(
        self, versioned: VersionedMetadata, closed: tuple[Fragment, ...], plan: ReadPlan
    ) -> CopyReport:
        """Read the plan, and read again what is damaged. Only damage found twice is reported."""
        copies = CopyReport(metadata=versioned.metadata, fragments=closed)
        if not plan:
            return copies
        first, reader = await self._read(versioned, plan)
        copies = replace(copies, unknown=_unanswered(first, reader))
        damaged = _damaged(first)
        if not damaged:
            return copies
        if versioned.metadata.password is None and reader.has_only_mismatches:
            return replace(copies, unknown=frozenset(), is_key_suspect=True)
        await self._clock.sleep(CONFIRM_AFTER_S)
        second, reader = await self._read(
            versioned, {bookie: (failures.bad,) for bookie, failures in damaged.items()}
        )
        return replace(
            copies,
            damaged=_damaged(second),
            unknown=copies.unknown | _unanswered(second, reader),
        )

    async def _read(
        self, versioned: VersionedMetadata, plan: ReadPlan
    ) -> tuple[Mapping[BookieId, ReadFailures], CopyReader]:
        digest = ledger_digest(versioned.metadata, self._fallback_digest)
        reader = CopyReader(
            versioned.ledger_id,
            bookies=self._bookies,
            digest=digest,
            entry_bytes=entry_bytes_guess(versioned.metadata, digest),
        )
        asked_count = sum(len(run) for runs in plan.values() for run in runs)
        async with self._large if asked_count > LARGE_ENTRIES else nullcontext():
            return (await reader.read(plan)).failures, reader


def _damaged(failures: Mapping[BookieId, ReadFailures]) -> dict[BookieId, ReadFailures]:
    return {bookie: failed for bookie, failed in failures.items() if failed.has_bad}


def _unanswered(
    failures: Mapping[BookieId, ReadFailures], reader: CopyReader
) -> frozenset[BookieId]:
    unknown = frozenset(bookie for bookie, failed in failures.items() if failed.unknown)
    return unknown | reader.unresponsive


def max_damaged_count(copies: CopyReport) -> int:
    """Return how many bookies have a damaged copy of the worst entry."""
    return max(
        (_max_damaged_in(fragment, copies.damaged) for fragment in copies.fragments), default=0
    )


def _max_damaged_in(fragment: Fragment, damaged: Mapping[BookieId, ReadFailures]) -> int:
    """Return how many bookies have a damaged copy of the fragment's worst entry."""
    assert fragment.last_entry_id is not None, fragment
    first, last = fragment.first_entry_id, fragment.last_entry_id
    bad = [
        damaged[bookie].bad.between(first, last)
        for bookie in fragment.ensemble
        if bookie in damaged
    ]
    return max((depth for _, depth in overlaps(bad)), default=0)


NO_COPY, BELOW_ACK_QUORUM, BELOW_WRITE_QUORUM = "no_copy", "below_ack_quorum", "below_write_quorum"
_TEXTS = {
    NO_COPY: "an entry has no copy left",
    BELOW_ACK_QUORUM: "an entry has fewer copies than the ack quorum",
    BELOW_WRITE_QUORUM: "an entry has fewer copies than the write quorum",
}


class ReplicasCheck(Check):
    """``marks``: the shared queue. Marked ledgers are known to lack copies, and are skipped."""

    kind = REPLICAS
    part_size = 20
    """Small, because every entry is read."""
    call_size = 1

    def __init__(self, inspector: CopyInspector, reports: FindingReporter, marks: MarkTree) -> None:
        self._inspector = inspector
        self._reports = reports
        self._marks = marks

    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Count ledgers by ``worst_entry``, ``found``, ``marked``, ``unknown`` and ``unreadable``
        as in ``AllLedgersCheck``, and ``skipped`` (marked, not closed, or empty)."""
        return await check_each(self.kind, ledger_ids, self._check_one)

    async def _check_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._inspector.metadata(ledger_id)
        if versioned is None:
            return Counter(deleted=1)
        if not _has_entries_for_good(versioned.metadata) or await self._marks.holds(ledger_id):
            return Counter(skipped=1)
        copies = await self._inspector.inspect_all(versioned)
        if copies is None:
            return Counter(deleted=1)
        if copies.is_key_suspect:
            return Counter(unreadable=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if (worst := worst_entry(copies)) is not None:
            counts[worst] += 1
            detail = f"{_TEXTS[worst]}: {copies.detail}"
            counts += await self._reports.report(self.kind, ledger_id, copies.visibility, detail)
        return counts


def worst_entry(copies: CopyReport) -> str | None:
    """Return the class of the entry with the fewest copies; None if no copy is damaged.

    Copies without an answer count as good: a bookie that cannot be reached has lost nothing yet.
    """
    lacking = max_damaged_count(copies)
    left = copies.metadata.write_quorum - lacking
    if lacking == 0:
        return None
    if left <= 0:
        return NO_COPY
    return BELOW_ACK_QUORUM if left < copies.metadata.ack_quorum else BELOW_WRITE_QUORUM


def _has_entries_for_good(metadata: LedgerMetadata) -> bool:
    return metadata.is_closed and metadata.last_entry_id >= 0


class AllLedgersCheck(Check):
    """``share``: share of a copy's entries, 0 to 1, that are read besides its first and last."""

    kind = ALL_LEDGERS
    part_size = 100
    """With 1,000 reads per second and two reads of a copy, a part takes half a second."""
    call_size = 1

    def __init__(self, inspector: CopyInspector, reports: FindingReporter, *, share: float) -> None:
        self._inspector = inspector
        self._reports = reports
        self._share = share

    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Count ledgers: ``found`` and ``marked``; ``unknown``: some copy did not answer;
        ``unreadable``: the metadata cannot be read, or no entry matches the key."""
        return await check_each(self.kind, ledger_ids, self._check_one)

    async def _check_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._inspector.metadata(ledger_id)
        copies = (
            None
            if versioned is None
            else await self._inspector.inspect_sample(versioned, self._share)
        )
        if copies is None:
            return Counter(deleted=1)
        if copies.is_key_suspect:
            return Counter(unreadable=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if copies.damaged:
            counts += await self._reports.report(
                self.kind, ledger_id, copies.visibility, copies.detail
            )
        return counts
