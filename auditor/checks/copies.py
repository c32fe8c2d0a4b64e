"""The two checks that read copies: ``AllLedgersCheck`` reads a sample of every copy of every
ledger, and ``ReplicasCheck`` counts the good copies of every entry of every closed ledger.

``CopyInspector`` inspects for both, without writing or fencing. Its results are certain enough to
act on. An entry counts as damaged on a bookie only if the bookie said so twice, some time apart,
and the metadata was the same afterwards. An entry without an answer is unknown, never damaged (rule
S5). Bookies that are not registered are not asked. Open fragments are left out, because their
entries may still be on their way.

Java's AuditorCheckAllLedgersTask counts a timeout as a missing copy, stops at the first ledger that
it cannot open, and verifies no digests. Java's AuditorReplicasCheckTask only counts, and asks for
entry lists, which bookies with DbLedgerStorage never answer. Ours reads every entry, and marks what
it finds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from auditor.checks.records import ALL_LEDGERS, REPLICAS, Check, FindingReporter
from auditor.mark_reasons import JavaVisibility, java_visibility
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, Fragment, LedgerMetadata, closed_fragments
from ledgers.reading import ledger_digest
from replication.cluster import ViewSource
from replication.copy_reader import (
    CONFIRM_AFTER_S,
    INSPECTIONS_MAX,
    CopyReader,
    ReadFailures,
    plan_reads,
)
from replication.entry_runs import overlaps
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
        """The damage that Java's workers can detect. The check asked registered bookies only."""
        return java_visibility(self.fragments, self.damaged, registered=self.damaged)

    @property
    def detail(self) -> str:
        """A sentence for an operator."""
        return "; ".join(
            f"{bookie} {verb} entry {entries[0]}"
            if len(entries) == 1
            else f"{bookie} {verb} {len(entries)} of the entries {entries[0]} to {entries[-1]}"
            for bookie, copy in sorted(self.damaged.items())
            for verb, entries in (
                ("lacks", copy.absent),
                ("holds damaged", copy.mismatched),
                ("cannot read", copy.unreadable),
            )
            if entries
        )


@dataclass(kw_only=True)
class CopyInspector:
    """Inspects copies of many ledgers at a time. All checks of a leader share one."""

    manager: LedgerManager
    bookies: Bookies
    views: ViewSource
    clock: Clock
    rng: random.Random
    fallback_digest: EntryDigest

    def __post_init__(self) -> None:
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def inspect(
        self,
        versioned: VersionedMetadata,
        *,
        share: float,
        among: Collection[BookieId] | None = None,
    ) -> CopyReport:
        """Read the first and the last entry of each copy, and ``share`` of the entries between.
        Read again what is damaged, and report only damage that was found twice.

        ``among``: the bookies to ask; None: all that are registered. Raises NoSuchLedgerError or
        CorruptionError if the metadata was deleted or damaged meanwhile.
        """
        for _ in range(INSPECTIONS_MAX):
            copies = await self._read_twice(versioned, share, among)
            if not copies.damaged:
                return copies
            await self.manager.sync(versioned.ledger_id)
            current = await self.manager.read(versioned.ledger_id)
            if current.stat.mzxid == versioned.stat.mzxid:
                return copies
            versioned = current  # a worker or a writer changed the metadata: inspect again
        return replace(copies, damaged={}, unknown=copies.unknown.union(copies.damaged))

    async def _read_twice(
        self, versioned: VersionedMetadata, share: float, among: Collection[BookieId] | None
    ) -> CopyReport:
        metadata = versioned.metadata
        copies = CopyReport(
            metadata=metadata, fragments=closed_fragments(versioned.ledger_id, metadata)
        )
        available = self.views.current.available
        if among is not None:
            available &= frozenset(among)
        plan = plan_reads(
            copies.fragments, available=available, suspects=(), share=share, rng=self.rng
        )
        if not plan:
            return copies
        digest = ledger_digest(metadata, self.fallback_digest)
        unknown: set[BookieId] = set()
        for is_second in (False, True):
            reader = CopyReader(
                versioned.ledger_id,
                bookies=self.bookies,
                digest=digest,
                entry_bytes=entry_bytes_guess(metadata, digest),
            )
            asked_count = sum(len(run) for runs in plan.values() for run in runs)
            async with self._large if asked_count > LARGE_ENTRIES else nullcontext():
                failures = (await reader.read(plan)).failures
            unknown |= reader.unresponsive.union(
                b for b, failed in failures.items() if failed.unknown
            )
            damaged = {bookie: failed for bookie, failed in failures.items() if failed.bad_count}
            if not damaged or is_second:
                break
            if reader.is_key_suspect(metadata):
                return replace(copies, is_key_suspect=True)
            await self.clock.sleep(CONFIRM_AFTER_S)
            plan = {bookie: (failed.bad,) for bookie, failed in damaged.items()}
        return replace(copies, damaged=damaged, unknown=frozenset(unknown))


@dataclass
class AllLedgersCheck(Check):
    """``share``: share of a copy's entries, 0 to 1, that are read besides its first and last.

    Counts ledgers: ``found`` and ``marked``; ``unknown``: some copy did not answer; ``unreadable``:
    the metadata cannot be read, or no entry matches the key.
    """

    kind = ALL_LEDGERS
    part_size = at_once = 100
    """With 1,000 reads per second and two reads of a copy, a part takes half a second."""

    inspector: CopyInspector
    reports: FindingReporter
    share: float

    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        versioned = await self.inspector.manager.read(ledger_id)
        copies = await self.inspector.inspect(versioned, share=self.share)
        if copies.is_key_suspect:
            return Counter(unreadable=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if copies.damaged:
            counts += await self.reports.report(
                self.kind, ledger_id, copies.visibility, copies.detail
            )
        return counts


NO_COPY, BELOW_ACK_QUORUM, BELOW_WRITE_QUORUM = "no_copy", "below_ack_quorum", "below_write_quorum"
_TEXTS = {
    NO_COPY: "an entry has no copy left",
    BELOW_ACK_QUORUM: "an entry has fewer copies than the ack quorum",
    BELOW_WRITE_QUORUM: "an entry has fewer copies than the write quorum",
}


@dataclass
class ReplicasCheck(Check):
    """``marks``: the shared queue. Marked ledgers are known to lack copies, and are skipped.

    Counts ledgers by ``worst_entry``, and as ``AllLedgersCheck`` does; ``skipped``: marked, not
    closed, or empty.
    """

    kind = REPLICAS
    part_size = at_once = 20
    """Small, because every entry is read."""

    inspector: CopyInspector
    reports: FindingReporter
    marks: MarkTree

    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        versioned = await self.inspector.manager.read(ledger_id)
        metadata = versioned.metadata
        has_entries_for_good = metadata.is_closed and metadata.last_entry_id >= 0
        if not has_entries_for_good or await self.marks.holds(ledger_id):
            return Counter(skipped=1)
        copies = await self.inspector.inspect(versioned, share=1.0)
        if copies.is_key_suspect:
            return Counter(unreadable=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if (worst := worst_entry(copies)) is not None:
            counts[worst] += 1
            detail = f"{_TEXTS[worst]}: {copies.detail}"
            counts += await self.reports.report(self.kind, ledger_id, copies.visibility, detail)
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


def max_damaged_count(copies: CopyReport) -> int:
    """Return how many bookies have a damaged copy of the worst entry."""
    worst = 0
    for fragment in copies.fragments:
        assert fragment.last_entry_id is not None, fragment
        bad = [
            copies.damaged[bookie].bad.between(fragment.first_entry_id, fragment.last_entry_id)
            for bookie in fragment.ensemble
            if bookie in copies.damaged
        ]
        worst = max(worst, max((depth for _, depth in overlaps(bad)), default=0))
    return worst
