"""Which copies of a ledger are missing, from its metadata, the bookies' states and their answers.

``check`` does it all: ``plan_reads`` decides what to ask of each bookie, ``probe_bookies`` asks,
and ``judge`` interprets the answers. Answers are three-valued (rule S5): only an explicit "no" is a
missing copy; a digest mismatch counts as one (rule S7); without an answer the copy is unknown.

Every registered bookie is asked for the first and the last entry that it stores of each fragment,
and for a share of the entries between them, as set. All entries are asked for if one of these is
missing, or if the bookie is a suspect; for example, its cookie is newer than the ledger (rule S6).

``EntryLists`` asks bookies for the list of the entries that they store: one request instead of many
reads. A list proves nothing about the content of entries, so what is missing is read, and so are
the first and last entries of the rest. A bookie 4.18.0 with little memory for its index was seen to
hang on such a request, and DbLedgerStorage never answers it. So a bookie that did not answer is not
asked again for a while.
"""

import asyncio
import enum
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import ceil
from typing import overload

from msgspec import Struct

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.errors import BookmenderError, NoSuchEntryError
from ledgers.model import BookieId, Fragment, StripedEntries
from replication.entry_runs import NO_ENTRIES, EntryRuns, merged

ReadPlan = Mapping[BookieId, Sequence[Sequence[int]]]
"""Runs of entry ids to ask of each bookie: ascending, and disjoint."""
NOTHING_ASKED: ReadPlan = {}

SILENT_ENTRIES_MAX = 1_000
"""A bookie that left so many reads unanswered is not asked any more; its copies are unknown."""


def plan_reads(
    fragments: Sequence[Fragment],
    *,
    available: Collection[BookieId],
    suspects: Collection[BookieId],
    share: float = 0.0,
    rng: random.Random | None = None,
) -> ReadPlan:
    """Return what to ask of each available bookie: ends and a sample, or all entries of a suspect.

    A bookie that is in an ensemble twice, which conflicting repairs by Java may cause, is asked
    once for each entry.

    ``suspects``: bookies whose copies are read entry by entry, because their first and last entries
    prove nothing. ``share``: the share of the other copies' entries to ask for besides the ends, 0
    to 1; ``rng`` chooses them, and is needed only for a share between.
    """
    asked: dict[BookieId, list[Sequence[int]]] = {}
    twice: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            entries = fragment.entries_of(index)
            if bookie in available and entries:
                is_all = bookie in suspects or share >= 1
                runs = [entries] if is_all else _ends_and_sample(entries, share, rng)
                asked.setdefault(bookie, []).extend(runs)
                if bookie in fragment.ensemble[:index]:
                    twice.add(bookie)
    for bookie in twice:
        asked[bookie] = [EntryRuns(sorted(set(chain.from_iterable(asked[bookie]))))]
    return {bookie: tuple(runs) for bookie, runs in asked.items()}


def _ends_and_sample(
    entries: StripedEntries, share: float, rng: random.Random | None
) -> list[Sequence[int]]:
    first, last = entries[0], entries[-1]
    if first == last:
        return [[first]]
    if share <= 0 or len(entries) == 2:
        return [[first, last]]
    inner = entries[1:-1]
    assert rng is not None, "a sample is drawn"
    count = min(ceil(share * len(entries)), len(inner))
    return [[first], Sample(inner, size=count, phase=rng.randrange(len(inner))), [last]]


@dataclass(frozen=True, slots=True)
class Sample(Sequence[int]):
    """``size`` of ``entries``, evenly spread; ``phase`` decides which.

    ``1 <= size <= len(entries)`` and ``0 <= phase < len(entries)``, so no entry occurs twice.
    Builds no list, because half of ten million entries may be asked for.
    """

    entries: Sequence[int]
    size: int
    phase: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            return [self[rank] for rank in range(*position.indices(self.size))]
        if not 0 <= position < self.size:
            raise IndexError(position)
        return self.entries[(position * len(self.entries) + self.phase) // self.size]


@dataclass(slots=True, kw_only=True)
class ReadFailures:
    """The entries that one bookie was asked for and did not give, by reason."""

    absent: EntryRuns = field(default_factory=EntryRuns)
    mismatched: EntryRuns = field(default_factory=EntryRuns)
    unreadable: EntryRuns = field(default_factory=EntryRuns)
    unknown: EntryRuns = field(default_factory=EntryRuns)
    is_silent: bool = False
    """True if it left so many reads unanswered that it was not asked for the rest."""

    def add(self, answers: Mapping[int, Answer]) -> None:
        """Add answers about entries that are greater than those before."""
        kinds = {
            Answer.ABSENT: self.absent,
            Answer.MISMATCH: self.mismatched,
            Answer.UNREADABLE: self.unreadable,
            Answer.UNKNOWN: self.unknown,
        }
        for entry_id in sorted(answers):
            kinds[answers[entry_id]].append(entry_id)

    def extend(self, others: "ReadFailures") -> None:
        """Add failures of entries that are greater than those before."""
        self.absent.extend(others.absent)
        self.mismatched.extend(others.mismatched)
        self.unreadable.extend(others.unreadable)
        self.unknown.extend(others.unknown)

    def between(self, first: int, last: int) -> "ReadFailures":
        """Return the failures from ``first`` to ``last``, both inclusive."""
        return ReadFailures(
            absent=self.absent.between(first, last),
            mismatched=self.mismatched.between(first, last),
            unreadable=self.unreadable.between(first, last),
            unknown=self.unknown.between(first, last),
            is_silent=self.is_silent,
        )

    def only(self, is_wanted: Callable[[int], bool]) -> "ReadFailures":
        """Return the failures of the wanted entries."""
        return ReadFailures(
            absent=EntryRuns(filter(is_wanted, self.absent)),
            mismatched=EntryRuns(filter(is_wanted, self.mismatched)),
            unreadable=EntryRuns(filter(is_wanted, self.unreadable)),
            unknown=EntryRuns(filter(is_wanted, self.unknown)),
            is_silent=self.is_silent,
        )

    @property
    def has_bad(self) -> bool:
        """True if any copy is known to be missing or damaged."""
        return bool(self.absent or self.mismatched or self.unreadable)

    @property
    def is_empty(self) -> bool:
        return not self.has_bad and not self.unknown

    def __contains__(self, entry_id: int) -> bool:
        return any(
            entry_id in runs
            for runs in (self.absent, self.mismatched, self.unreadable, self.unknown)
        )


GAVE_ALL = ReadFailures()
"""No failure: the usual result. Shared, so nothing may be added to it."""


async def probe_bookies(
    fragments: Sequence[Fragment],
    asked: ReadPlan,
    *,
    bookies: Bookies,
    digest: EntryDigest,
    entry_bytes: int,
) -> dict[BookieId, ReadFailures]:
    """Ask the bookies, and return the failures of every bookie that was asked.

    All bookies are asked at once, in a single transfer unless there is very much to ask.
    ``fragments``: of one ledger, not empty.
    """
    refusals = dict.fromkeys(asked, GAVE_ALL)
    slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
    for parts in zip_longest(*slices, fillvalue=()):
        reads = {
            bookie: part
            for bookie, part in zip(asked, parts, strict=True)
            if part and not refusals[bookie].is_silent
        }
        if not reads:
            continue
        result = await bookies.transfer(
            Transfer(
                ledger_id=fragments[0].ledger_id,
                digest=digest,
                reads=reads,
                entry_bytes_hint=entry_bytes,
            )
        )
        for bookie, answers in result.failures.items():
            if refusals[bookie] is GAVE_ALL:
                refusals[bookie] = ReadFailures()
            refusals[bookie].add(answers)
            if len(refusals[bookie].unknown) >= SILENT_ENTRIES_MAX:
                refusals[bookie].is_silent = True
    return refusals


def transfer_slices(runs: Iterable[Sequence[int]], *, sharing: int = 1) -> Iterator[list[int]]:
    """Yield the ids of ascending, disjoint runs in lists; one transfer may contain ``sharing``
    lists."""
    count_max = TRANSFER_ENTRIES_MAX // sharing
    part: list[int] = []
    for run in runs:
        for start in range(0, len(run), count_max):
            ids = run[start : start + count_max]
            room = count_max - len(part)
            part.extend(ids[:room])
            if len(part) == count_max:
                yield part
                part = list(ids[room:])
    if part:
        yield part


class Verdict(enum.Enum):
    """The state of the copies at one bookie index of one fragment."""

    GOOD = "good"
    LOST = "lost"
    """Its bookie is not registered: every entry of the index lacks a copy."""
    AWAY = "away"
    """Its bookie is absent or unresponsive within a maintenance window, so it does not count as
    lost."""
    DRAINING = "draining"
    """Its bookie is draining: its copies count as missing although it serves them (rule S16)."""
    MISSING = "missing"
    """Its bookie is registered, and entries are explicitly absent, damaged or unreadable."""
    UNKNOWN = "unknown"
    """Its bookie is registered and did not answer."""


class IndexFinding(Struct, frozen=True, kw_only=True):
    """The verdict on one bookie index. ``absent``, ``mismatched``, ``unreadable``: entries, when
    MISSING."""

    fragment: Fragment
    index: int
    verdict: Verdict
    absent: EntryRuns = NO_ENTRIES
    mismatched: EntryRuns = NO_ENTRIES
    unreadable: EntryRuns = NO_ENTRIES

    @property
    def damaged(self) -> EntryRuns:
        """Copies that exist and are not good."""
        return merged(self.mismatched, self.unreadable)

    @property
    def bad_count(self) -> int:
        return len(self.absent) + len(self.mismatched) + len(self.unreadable)

    def is_bad(self, entry_id: int) -> bool:
        return any(entry_id in bad for bad in (self.absent, self.mismatched, self.unreadable))

    @property
    def bookie(self) -> BookieId:
        return self.fragment.ensemble[self.index]

    @property
    def entries(self) -> StripedEntries:
        """All entries of the fragment that this index should store."""
        return self.fragment.entries_of(self.index)


def judge(
    fragments: Sequence[Fragment],
    refusals: Mapping[BookieId, ReadFailures],
    *,
    available: Collection[BookieId],
) -> tuple[IndexFinding, ...]:
    """Return a finding for every bookie index of every fragment, in order.

    ``refusals``: the failures of every bookie that was asked.
    """
    return tuple(
        _judge_index(fragment, index, refusals.get(bookie), is_available=bookie in available)
        for fragment in fragments
        for index, bookie in enumerate(fragment.ensemble)
    )


def _judge_index(
    fragment: Fragment, index: int, refused: ReadFailures | None, *, is_available: bool
) -> IndexFinding:
    def finding(verdict: Verdict) -> IndexFinding:
        return IndexFinding(fragment=fragment, index=index, verdict=verdict)

    if not is_available:
        return finding(Verdict.LOST)
    if refused is GAVE_ALL:  # nearly always; saves computing the entries
        return finding(Verdict.GOOD)
    entries = fragment.entries_of(index)
    if not entries:
        return finding(Verdict.GOOD)
    if refused is None or refused.is_silent:
        return finding(Verdict.UNKNOWN)
    # A bookie is in an ensemble once, so all failures within the fragment belong to this index.
    first, last = entries[0], entries[-1]
    if refused.unknown.between(first, last):
        return finding(Verdict.UNKNOWN)
    absent, mismatched, unreadable = (
        runs.between(first, last)
        for runs in (refused.absent, refused.mismatched, refused.unreadable)
    )
    if not absent and not mismatched and not unreadable:
        return finding(Verdict.GOOD)
    return IndexFinding(
        fragment=fragment,
        index=index,
        verdict=Verdict.MISSING,
        absent=absent,
        mismatched=mismatched,
        unreadable=unreadable,
    )


async def check(
    fragments: Sequence[Fragment],
    *,
    bookies: Bookies,
    digest: EntryDigest,
    available: Collection[BookieId],
    suspects: Collection[BookieId],
    entry_bytes: int,
    share: float = 0.0,
    rng: random.Random | None = None,
) -> tuple[IndexFinding, ...]:
    """Ask the bookies and judge. A missing answer is a finding, never an error.

    ``entry_bytes``: estimated stored size of an entry, to bound the reads in flight (rule S10). The
    other arguments are those of ``plan_reads``.
    """
    asked = plan_reads(fragments, available=available, suspects=suspects, share=share, rng=rng)
    refusals = await probe_bookies(
        fragments, asked, bookies=bookies, digest=digest, entry_bytes=entry_bytes
    )
    findings = judge(fragments, refusals, available=available)
    lacking = frozenset(f.bookie for f in findings if f.verdict is Verdict.MISSING)
    lacking -= frozenset(suspects)
    if not lacking or share >= 1:
        return findings
    # An entry is missing. Only reading all entries of the index shows which others are.
    asked = plan_reads(fragments, available=lacking, suspects=lacking)
    refusals |= await probe_bookies(
        fragments, asked, bookies=bookies, digest=digest, entry_bytes=entry_bytes
    )
    return judge(fragments, refusals, available=available)


UNANSWERED_PAUSE_S = 3_600.0
"""How long a bookie that did not answer is not asked for a list again."""


class EntryLists:
    """Asks bookies for their lists of entries. One for each worker, so that an unresponsive bookie
    costs one timeout."""

    def __init__(self, bookies: Bookies, clock: Clock) -> None:
        self._bookies = bookies
        self._clock = clock
        self._not_asked_until_s: dict[BookieId, float] = {}

    async def lacking(
        self, fragments: Sequence[Fragment], asked: Collection[BookieId]
    ) -> frozenset[BookieId]:
        """Return the bookies whose list lacks entries that they should have."""
        complete = await self.are_complete(fragments, asked)
        return frozenset(bookie for bookie, is_complete in complete.items() if not is_complete)

    async def are_complete(
        self, fragments: Sequence[Fragment], asked: Collection[BookieId]
    ) -> dict[BookieId, bool]:
        """Return for each bookie that gave a list whether its list is complete."""
        now_s = self._clock.now_s()
        members = sorted({bookie for f in fragments for bookie in f.ensemble} & set(asked))
        ready = [b for b in members if self._not_asked_until_s.get(b, now_s) <= now_s]
        lacks = await asyncio.gather(*(self._lacks(fragments, bookie) for bookie in ready))
        told = zip(ready, lacks, strict=True)
        return {b: not is_lacking for b, is_lacking in told if is_lacking is not None}

    async def _lacks(self, fragments: Sequence[Fragment], bookie: BookieId) -> bool | None:
        """Return whether the bookie's list lacks entries; None if it gave no list."""
        try:
            listed = await self._bookies.list_entries(bookie, fragments[0].ledger_id)
        except NoSuchEntryError:
            return lacks(fragments, bookie, ())
        except BookmenderError:
            self._not_asked_until_s[bookie] = self._clock.now_s() + UNANSWERED_PAUSE_S
            return None
        return lacks(fragments, bookie, listed)


def lacks(fragments: Sequence[Fragment], bookie: BookieId, listed: Sequence[range]) -> bool:
    """Return True if the ascending runs lack an entry that the bookie should have."""
    gaps = _gaps(listed)
    return any(
        fragment.entries_of(index).between(first, last)
        for fragment in fragments
        for index, member in enumerate(fragment.ensemble)
        if member == bookie
        for first, last in gaps
    )


def _gaps(listed: Sequence[range]) -> list[tuple[int, int]]:
    """Return the first and last id, inclusive, of each gap before, between and after the runs."""
    starts = [0, *(run.stop for run in listed)]
    stops = [*(run.start for run in listed), _BEYOND_ALL]
    return [(start, stop - 1) for start, stop in zip(starts, stops, strict=True) if start < stop]


_BEYOND_ALL = 1 << 62
