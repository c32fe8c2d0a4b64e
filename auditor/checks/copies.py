"""The two checks that read copies: ``AllLedgersCheck`` reads a sample of every copy of every
ledger, and ``ReplicasCheck`` counts the good copies of every entry of every closed ledger.

``CopyReader`` reads for both, without writing or fencing. Its results are certain enough to act on.
An entry counts as damaged on a bookie only if the bookie said so twice, some time apart, and the
metadata was the same afterwards. An entry without an answer is unknown, never damaged (rule S5).
Bookies that are not registered are not asked. Open fragments are left out, because their entries
may still be on their way.

Java's AuditorCheckAllLedgersTask counts a timeout as a missing copy, stops at the first ledger that
it cannot open, and verifies no digests. Java's AuditorReplicasCheckTask only counts, and asks for
entry lists, which bookies with DbLedgerStorage never answer. Ours reads every entry, unless entry
lists are switched on, and marks what it finds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from heapq import merge

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
from ledgers.model import BookieId, Fragment, LedgerMetadata, fragments
from ledgers.reading import ledger_digest
from replication.cluster import ViewSource
from replication.copy_checks import EntryLists, ReadFailures, ReadPlan, plan_reads, probe_bookies
from replication.entry_runs import EntryRuns, merged
from replication.inspection import entry_bytes_guess
from replication.marks import MarkTree

SECOND_LOOK_S = 2.0
"""Pause before damage is read again, also by fsck. It outlasts momentary problems."""
LOOKS_MAX = 3
"""How often a ledger whose metadata keeps changing is read, also by fsck. After that, its damage
counts as unknown."""
LARGE_ENTRIES = 1_000
"""Reading more entries than this of one ledger takes much memory."""
LARGE_AT_ONCE = 8
"""Such ledgers that are read at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCopy:
    """The damaged entries of one ledger on one bookie: ``absent``, digest ``mismatched``, or
    ``unreadable`` for the bookie. Not all three are empty."""

    absent: EntryRuns
    mismatched: EntryRuns
    unreadable: EntryRuns

    @property
    def entries(self) -> EntryRuns:
        return merged(merged(self.absent, self.mismatched), self.unreadable)

    @property
    def damage(self) -> Damage:
        return Damage(entries=self.entries, not_returned=merged(self.absent, self.unreadable))

    @classmethod
    def of(cls, refused: ReadFailures) -> "DamagedCopy | None":
        """Return None if the bookie permanently refused no entry."""
        copy = cls(
            absent=refused.absent,
            mismatched=refused.mismatched,
            unreadable=refused.unreadable,
        )
        return copy if copy.entries else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The copies of a ledger's closed fragments, as read by a check. ``damaged`` holds damage that
    a second read confirmed."""

    metadata: LedgerMetadata
    fragments: tuple[Fragment, ...]
    damaged: Mapping[BookieId, DamagedCopy] = field(default_factory=dict)
    unknown: frozenset[BookieId] = frozenset()
    """Bookies that did not answer some read."""
    is_key_suspect: bool = False
    """No entry matches the configured key, and the metadata holds no key (rule S7). Then nothing is
    known."""

    @property
    def visibility(self) -> JavaVisibility:
        """Return the damage that Java's workers can detect. The check asked registered bookies
        only."""
        damage = {bookie: copy.damage for bookie, copy in self.damaged.items()}
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


class CopyReader:
    """Reads copies of many ledgers at a time. All checks of a leader share one."""

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

    async def read_sample(self, versioned: VersionedMetadata, share: float) -> CopyReport | None:
        """Read the first and the last entry of each copy, and ``share`` of the entries between.
        Return None if the ledger is deleted."""
        return await self._read(versioned, share=share)

    async def read_all(self, versioned: VersionedMetadata) -> CopyReport | None:
        """Read every entry of each copy. With entry lists, read only the ends of a copy whose list
        is complete."""
        return await self._read(versioned, share=0.0 if self._lists else 1.0, lists=self._lists)

    async def read_bookies(
        self, versioned: VersionedMetadata, bookies: Collection[BookieId], *, sample_entries: int
    ) -> CopyReport | None:
        """Read as ``read_sample``, only from these bookies. ``sample_entries``: about how many
        entries between the ends are read of the whole ledger; at least one of each copy."""
        metadata = versioned.metadata
        # Of an open ledger only what lies before its last segment is read.
        entry_count = max(metadata.last_entry_id + 1, metadata.last_segment.first_entry_id, 1)
        share = min(1.0, sample_entries / entry_count)
        return await self._read(versioned, share=share, among=frozenset(bookies))

    async def _read(
        self,
        versioned: VersionedMetadata,
        *,
        share: float,
        lists: EntryLists | None = None,
        among: frozenset[BookieId] | None = None,
    ) -> CopyReport | None:
        """``among``: the bookies to ask; None: all that are registered."""
        for _ in range(LOOKS_MAX):
            copies = await self._read_twice(versioned, share, lists, among)
            if not copies.damaged:
                return copies
            await self._manager.sync(versioned.ledger_id)
            current = await self.metadata(versioned.ledger_id)
            if current is None or current.stat.mzxid == versioned.stat.mzxid:
                return copies if current else None
            versioned = current  # a worker or a writer changed the metadata: read again
        return replace(copies, damaged={}, unknown=copies.unknown.union(copies.damaged))

    async def _read_twice(
        self,
        versioned: VersionedMetadata,
        share: float,
        lists: EntryLists | None,
        among: frozenset[BookieId] | None,
    ) -> CopyReport:
        found = closed_fragments(versioned)
        copies = CopyReport(metadata=versioned.metadata, fragments=found)
        asked = await self._read_plan(found, share, lists, among)
        first = await self._read_planned(versioned, found, asked)
        copies = replace(copies, unknown=_unanswered(first))
        suspects = _damaged(first)
        if not suspects:
            return copies
        if versioned.metadata.password is None and _is_nothing_good(asked, first):
            return replace(copies, unknown=frozenset(), is_key_suspect=True)
        await self._clock.sleep(SECOND_LOOK_S)
        again = {bookie: (copy.entries,) for bookie, copy in suspects.items()}
        second = await self._read_planned(versioned, found, again)
        return replace(
            copies, damaged=_damaged(second), unknown=copies.unknown | _unanswered(second)
        )

    async def _read_plan(
        self,
        found: Sequence[Fragment],
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
            whole = await lists.are_complete(found, available) if found else {}
            suspects = available - {bookie for bookie, is_whole in whole.items() if is_whole}
        return plan_reads(found, available=available, suspects=suspects, share=share, rng=self._rng)

    async def _read_planned(
        self, versioned: VersionedMetadata, found: Sequence[Fragment], asked: ReadPlan
    ) -> dict[BookieId, ReadFailures]:
        if not asked:
            return {}
        digest = ledger_digest(versioned.metadata, self._fallback_digest)
        asked_count = sum(len(run) for runs in asked.values() for run in runs)
        async with self._large if asked_count > LARGE_ENTRIES else nullcontext():
            return await probe_bookies(
                found,
                asked,
                bookies=self._bookies,
                digest=digest,
                entry_bytes=entry_bytes_guess(versioned.metadata, digest),
            )


def _damaged(refusals: Mapping[BookieId, ReadFailures]) -> dict[BookieId, DamagedCopy]:
    """Return the bookies that permanently refused some entry."""
    return {
        bookie: copy for bookie, refused in refusals.items() if (copy := DamagedCopy.of(refused))
    }


def _unanswered(refusals: Mapping[BookieId, ReadFailures]) -> frozenset[BookieId]:
    return frozenset(bookie for bookie, refused in refusals.items() if refused.unknown)


def closed_fragments(versioned: VersionedMetadata) -> tuple[Fragment, ...]:
    """Return the fragments that never change again. This asks no bookie: if a later segment exists,
    every entry before it is acknowledged."""
    metadata = versioned.metadata
    settled = metadata.last_segment.first_entry_id - 1
    found = fragments(versioned.ledger_id, metadata, lac=settled)
    return tuple(fragment for fragment in found if fragment.is_closed)


def max_damaged_count(copies: CopyReport) -> int:
    """Return how many bookies have a damaged copy of the worst entry."""
    return max(
        (_max_damaged_in(fragment, copies.damaged) for fragment in copies.fragments), default=0
    )


def _max_damaged_in(fragment: Fragment, damaged: Mapping[BookieId, DamagedCopy]) -> int:
    """Return the deepest overlap of the damaged runs in one fragment. Works on runs, because a
    bookie may lack millions of entries."""
    assert fragment.last_entry_id is not None, fragment
    first, last = fragment.first_entry_id, fragment.last_entry_id
    lacking = [
        damaged[bookie].entries.between(first, last)
        for bookie in fragment.ensemble
        if bookie in damaged
    ]
    depth = deepest = 0
    for _, step in merge(*map(_edges, lacking)):
        depth += step
        deepest = max(deepest, depth)
    return deepest


def _edges(entries: EntryRuns) -> Iterator[tuple[int, int]]:
    """Yield where runs begin (1) and end (-1), ascending. At the same place the end comes first,
    also after merging."""
    for run in entries.each_run():
        yield run.start, 1
        yield run.stop, -1


def _is_nothing_good(asked: ReadPlan, refusals: Mapping[BookieId, ReadFailures]) -> bool:
    """True if no entry read was good, and some did not match their digest."""
    return any(refused.mismatched for refused in refusals.values()) and all(
        sum(map(len, asked[bookie]))
        == sum(map(len, (refused.absent, refused.mismatched, refused.unreadable, refused.unknown)))
        for bookie, refused in refusals.items()
    )


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

    def __init__(self, reader: CopyReader, reports: FindingReporter, marks: MarkTree) -> None:
        self._reader = reader
        self._reports = reports
        self._marks = marks

    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Count ledgers by ``worst_entry``, ``found``, ``marked``, ``unknown`` and ``unreadable``
        as in ``AllLedgersCheck``, and ``skipped`` (marked, not closed, or empty)."""
        return await check_each(self.kind, ledger_ids, self._check_one)

    async def _check_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        if versioned is None:
            return Counter(deleted=1)
        if not _has_entries_for_good(versioned.metadata) or await self._marks.holds(ledger_id):
            return Counter(skipped=1)
        copies = await self._reader.read_all(versioned)
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
    """``share``: share of a copy's entries, 0 to 1, that are read besides the first and the last."""

    kind = ALL_LEDGERS
    part_size = 100
    """With 1,000 reads per second and two reads of a copy, a part takes half a second."""
    call_size = 1

    def __init__(self, reader: CopyReader, reports: FindingReporter, *, share: float) -> None:
        self._reader = reader
        self._reports = reports
        self._share = share

    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Count ledgers: ``found`` and ``marked``; ``unknown``: some copy did not answer;
        ``unreadable``: the metadata cannot be read, or no entry matches the key."""
        return await check_each(self.kind, ledger_ids, self._check_one)

    async def _check_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        copies = (
            None if versioned is None else await self._reader.read_sample(versioned, self._share)
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
