"""A ledger's copies, asked for and, where something seems wrong, asked for again. Writes and fences
nothing.

What comes of it is certain enough to be acted on: an entry is bad on a bookie only if that said so
twice, a while apart, and the metadata then still was what it had been asked by. That a bookie said
nothing is unknown, never bad (rule S5); one that is not registered is not asked. Open fragments are
left out: their entries may be on their way still.

Counts the copies of every entry of every closed ledger; the worst entry decides what is said of
it.

Java's AuditorReplicasCheckTask asks for lists of entries, which bookies with DbLedgerStorage never
answer, counts, and leaves it at that. Ours reads every entry, unless lists are switched on, and
marks what it finds.

Reads entries of every copy of every ledger, and marks the ledgers that lack some.

Java's AuditorCheckAllLedgersTask takes a time-out for a missing copy, ends with the first ledger
that it cannot open, and does not look at what it reads: ours verifies digests, and marks only what
was said twice.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from heapq import merge

from auditor.checks.base import Check, Reports, look_at_each
from auditor.checks.records import ALL_LEDGERS, REPLICAS
from auditor.underreplication import Damage, Sight, java_visibility
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
"""After the first one, fsck's too: what is a matter of a moment is over by then."""
LOOKS_MAX = 3
"""At metadata that keeps changing, fsck's too; what seemed bad is unknown then."""
LARGE_ENTRIES = 1_000
"""A ledger of which more is asked takes much memory for as long as it is looked at:"""
LARGE_AT_ONCE = 8
"""of such ones only so many are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """What a bookie does not have of a ledger, or has damaged, or cannot read; not all three are
    empty."""

    absent: EntryRuns
    mismatched: EntryRuns
    unreadable: EntryRuns

    @property
    def entries(self) -> EntryRuns:
        return merged(merged(self.absent, self.mismatched), self.unreadable)

    @property
    def damage(self) -> Damage:
        return Damage(bad=self.entries, refused=merged(self.absent, self.unreadable))

    @classmethod
    def of(cls, refused: ReadFailures) -> "Bad | None":
        """None where it refused nothing for good."""
        bad = cls(
            absent=refused.absent,
            mismatched=refused.mismatched,
            unreadable=refused.unreadable,
        )
        return bad if bad.entries else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What is known of the copies in a ledger's closed fragments. ``bad``: only what was said
    twice."""

    metadata: LedgerMetadata
    fragments: tuple[Fragment, ...]
    bad: Mapping[BookieId, Bad] = field(default_factory=dict)
    unknown: frozenset[BookieId] = frozenset()
    """Bookies that were asked and left something unanswered."""
    is_key_suspect: bool = False
    """No entry fits the configured key, and the metadata holds none (rule S7): nothing is known."""

    @property
    def sight(self) -> Sight:
        """Only bookies that are registered were asked."""
        damage = {bookie: bad.damage for bookie, bad in self.bad.items()}
        return java_visibility(self.fragments, damage, registered=damage)

    @property
    def detail(self) -> str:
        """A sentence for an operator."""
        return "; ".join(
            _told(bookie, verb, entries)
            for bookie, bad in sorted(self.bad.items())
            for verb, entries in (
                ("lacks", bad.absent),
                ("holds damaged", bad.mismatched),
                ("cannot read", bad.unreadable),
            )
            if entries
        )


def _told(bookie: BookieId, verb: str, entries: EntryRuns) -> str:
    if len(entries) == 1:
        return f"{bookie} {verb} entry {entries[0]}"
    return f"{bookie} {verb} {len(entries)} of the entries {entries[0]} to {entries[-1]}"


class CopyReader:
    """Looks at many ledgers at once. One for all checks of a leader."""

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
        """None for a ledger that is gone. Raises CorruptionError."""
        try:
            return await self._manager.read(ledger_id)
        except NoSuchLedgerError:
            return None

    async def sample(self, versioned: VersionedMetadata, share: float) -> Copies | None:
        """The ends of each copy, and ``share`` of the entries between them. None: the ledger is
        gone."""
        return await self._look(versioned, share=share)

    async def all(self, versioned: VersionedMetadata) -> Copies | None:
        """Every entry of each copy; with entry lists, the ends alone of one whose list says it is
        whole."""
        return await self._look(versioned, share=0.0 if self._lists else 1.0, lists=self._lists)

    async def of(
        self, versioned: VersionedMetadata, bookies: Collection[BookieId], *, sample_entries: int
    ) -> Copies | None:
        """As ``sample``, of these bookies alone, with about ``sample_entries`` entries between the
        ends in the whole ledger, at least one of each copy."""
        metadata = versioned.metadata
        # Of an open ledger only what lies before its last segment is read.
        entry_count = max(metadata.last_entry_id + 1, metadata.last_segment.first_entry_id, 1)
        share = min(1.0, sample_entries / entry_count)
        return await self._look(versioned, share=share, among=frozenset(bookies))

    async def _look(
        self,
        versioned: VersionedMetadata,
        *,
        share: float,
        lists: EntryLists | None = None,
        among: frozenset[BookieId] | None = None,
    ) -> Copies | None:
        """``among``: the bookies to ask; None: all that are registered."""
        for _ in range(LOOKS_MAX):
            copies = await self._look_twice(versioned, share, lists, among)
            if not copies.bad:
                return copies
            await self._manager.sync(versioned.ledger_id)
            current = await self.metadata(versioned.ledger_id)
            if current is None or current.stat.mzxid == versioned.stat.mzxid:
                return copies if current else None
            versioned = current  # a worker, or a writer, changed it: what was asked is out of date
        return replace(copies, bad={}, unknown=copies.unknown.union(copies.bad))

    async def _look_twice(
        self,
        versioned: VersionedMetadata,
        share: float,
        lists: EntryLists | None,
        among: frozenset[BookieId] | None,
    ) -> Copies:
        found = closed_fragments(versioned)
        copies = Copies(metadata=versioned.metadata, fragments=found)
        asked = await self._questions(found, share, lists, among)
        first = await self._ask(versioned, found, asked)
        copies = replace(copies, unknown=_unanswered(first))
        suspects = _bad(first)
        if not suspects:
            return copies
        if versioned.metadata.password is None and _gave_nothing(asked, first):
            return replace(copies, unknown=frozenset(), is_key_suspect=True)
        await self._clock.sleep(SECOND_LOOK_S)
        again = {bookie: (bad.entries,) for bookie, bad in suspects.items()}
        second = await self._ask(versioned, found, again)
        return replace(copies, bad=_bad(second), unknown=copies.unknown | _unanswered(second))

    async def _questions(
        self,
        found: Sequence[Fragment],
        share: float,
        lists: EntryLists | None,
        among: frozenset[BookieId] | None,
    ) -> ReadPlan:
        """Ends, and a share of what is between; with entry lists all of a copy, unless its list
        says that it is whole."""
        available = self._views.current.available
        if among is not None:
            available &= among
        suspects: Collection[BookieId] = ()
        if lists:
            whole = await lists.whole(found, available) if found else {}
            suspects = available - {bookie for bookie, is_whole in whole.items() if is_whole}
        return plan_reads(found, available=available, suspects=suspects, share=share, rng=self._rng)

    async def _ask(
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


def _bad(refusals: Mapping[BookieId, ReadFailures]) -> dict[BookieId, Bad]:
    """Of those bookies that refused something for good."""
    return {bookie: bad for bookie, refused in refusals.items() if (bad := Bad.of(refused))}


def _unanswered(refusals: Mapping[BookieId, ReadFailures]) -> frozenset[BookieId]:
    return frozenset(bookie for bookie, refused in refusals.items() if refused.unknown)


def closed_fragments(versioned: VersionedMetadata) -> tuple[Fragment, ...]:
    """Those that never change again. Nobody is asked: that a segment was begun says that all before
    it is acknowledged."""
    metadata = versioned.metadata
    settled = metadata.last_segment.first_entry_id - 1
    found = fragments(versioned.ledger_id, metadata, lac=settled)
    return tuple(fragment for fragment in found if fragment.is_closed)


def most_bad(copies: Copies) -> int:
    """Of how many bookies the worst entry is bad."""
    return max((_most_bad(fragment, copies.bad) for fragment in copies.fragments), default=0)


def _most_bad(fragment: Fragment, bad: Mapping[BookieId, Bad]) -> int:
    """Sweeps over the runs: a bookie that came back empty may lack millions of entries."""
    assert fragment.last_entry_id is not None, fragment
    first, last = fragment.first_entry_id, fragment.last_entry_id
    lacking = [
        bad[bookie].entries.between(first, last) for bookie in fragment.ensemble if bookie in bad
    ]
    depth = deepest = 0
    for _, step in merge(*map(_edges, lacking)):
        depth += step
        deepest = max(deepest, depth)
    return deepest


def _edges(entries: EntryRuns) -> Iterator[tuple[int, int]]:
    """Where runs begin and end, ascending. Of two at one place the end comes first, also when
    merged."""
    for run in entries.each_run():
        yield run.start, 1
        yield run.stop, -1


def _gave_nothing(asked: ReadPlan, refusals: Mapping[BookieId, ReadFailures]) -> bool:
    """Whether no entry at all was good, and some were not what their digest says."""
    return any(refused.mismatched for refused in refusals.values()) and all(
        sum(map(len, asked[bookie]))
        == sum(map(len, (refused.absent, refused.mismatched, refused.unreadable, refused.unknown)))
        for bookie, refused in refusals.items()
    )


NO_COPY, BELOW_ACK_QUORUM, BELOW_WRITE_QUORUM = "no_copy", "below_ack_quorum", "below_write_quorum"
_TOLD = {
    NO_COPY: "an entry has no copy left",
    BELOW_ACK_QUORUM: "an entry has fewer copies than the ack quorum",
    BELOW_WRITE_QUORUM: "an entry has fewer copies than the write quorum",
}


class ReplicasCheck(Check):
    """``marks``: the shared queue. What is in it is known to lack copies, and is passed over."""

    kind = REPLICAS
    part_size = 20
    """Every entry is read: a part of as many ledgers as for a sample would take for ever."""
    look_size = 1

    def __init__(self, reader: CopyReader, reports: Reports, marks: MarkTree) -> None:
        self._reader = reader
        self._reports = reports
        self._marks = marks

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Counts ledgers by ``worst_entry``; ``found``, ``marked``, ``unknown`` and ``unopened`` as
        ``AllLedgersCheck`` does; ``skipped``: open or empty ones, and those that are marked."""
        return await look_at_each(self.kind, ledger_ids, self._look_at_one)

    async def _look_at_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        if versioned is None:
            return Counter(gone=1)
        if not _has_entries_for_good(versioned.metadata) or await self._marks.holds(ledger_id):
            return Counter(skipped=1)
        copies = await self._reader.all(versioned)
        if copies is None:
            return Counter(gone=1)
        if copies.is_key_suspect:
            return Counter(unopened=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if (worst := worst_entry(copies)) is not None:
            counts[worst] += 1
            detail = f"{_TOLD[worst]}: {copies.detail}"
            counts += await self._reports.report(self.kind, ledger_id, copies.sight, detail)
        return counts


def worst_entry(copies: Copies) -> str | None:
    """What the entry with the fewest copies has; None where none lacks any.

    Copies that nobody knows of count as there: a bookie that cannot be reached has lost nothing
    yet.
    """
    lacking = most_bad(copies)
    left = copies.metadata.write_quorum - lacking
    if lacking == 0:
        return None
    if left <= 0:
        return NO_COPY
    return BELOW_ACK_QUORUM if left < copies.metadata.ack_quorum else BELOW_WRITE_QUORUM


def _has_entries_for_good(metadata: LedgerMetadata) -> bool:
    return metadata.is_closed and metadata.last_entry_id >= 0


class AllLedgersCheck(Check):
    """``share``: of a copy's entries how many are read besides the first and the last, 0 to 1."""

    kind = ALL_LEDGERS
    part_size = 100
    """At a pace of 1,000 reads a second, and with two reads of a copy, half a second."""
    look_size = 1

    def __init__(self, reader: CopyReader, reports: Reports, *, share: float) -> None:
        self._reader = reader
        self._reports = reports
        self._share = share

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Counts ledgers: ``found`` and ``marked``; ``unknown``, of which some copy was not told;
        ``unopened``, of which none was."""
        return await look_at_each(self.kind, ledger_ids, self._look_at_one)

    async def _look_at_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        copies = None if versioned is None else await self._reader.sample(versioned, self._share)
        if copies is None:
            return Counter(gone=1)
        if copies.is_key_suspect:
            return Counter(unopened=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if copies.bad:
            counts += await self._reports.report(self.kind, ledger_id, copies.sight, copies.detail)
        return counts
