"""Reads the copies of a ledger from its bookies, and judges the answers. Writes and fences nothing.

Workers, the auditor's checks and fsck all read through ``CopyReader``. ``plan_reads`` decides what
to ask of each bookie, the reader asks all bookies at once, and ``ReadFailures`` holds what a
bookie did not return. Answers are three-valued (rule S5): only an explicit "no" is a missing copy;
a digest mismatch counts as one (rule S7); without an answer the copy is unknown.

The callers differ in how certain an answer must be, and in what they judge:

- A worker takes each answer as it is: a wrong "no" costs one needless copy. It judges the copies at
  one bookie index as a whole (``inspect_copies``, ``judge``).
- A check reads damaged entries a second time (``auditor/checks/copies.py``).
- fsck lets the reader repeat reads until each answer is reliable (``Retries``), and counts the
  copies of each entry (``auditor/fsck``).

Every registered bookie is asked for the first and the last entry that it stores of each fragment,
and for a share of the entries between them, as set. All entries are asked for if one of these is
missing, or if the bookie is a suspect; for example, its cookie is newer than the ledger (rule S6).
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import ceil
from typing import overload

from msgspec import Struct

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.digest import NO_FINGERPRINT, EntryDigest, Fingerprints
from ledgers.model import BookieId, Fragment, StripedEntries
from replication.entry_runs import NO_ENTRIES, EntryRuns, merged

ReadPlan = Mapping[BookieId, Sequence[Sequence[int]]]
"""Runs of entry ids to ask of each bookie: ascending, and disjoint."""
NOTHING_ASKED: ReadPlan = {}

UNANSWERED_MAX = 1_000
"""Without retries, a bookie that left so many reads unanswered is not asked for the rest."""
CONFIRM_AFTER_S = 2.0
"""Pause before a check or fsck reads damage a second time. It outlasts momentary problems."""
INSPECTIONS_MAX = 3
"""Maximum number of inspections of a ledger whose metadata keeps changing. After that, its damage
counts as unknown."""


# --- Reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Repeats reads until their answers are reliable: at most ``count_max`` times, ``wait_s``
    apart."""

    clock: Clock
    count_max: int
    wait_s: float


@dataclass(slots=True)
class ReadAnswers:
    """The answers to the reads of a plan. ``failures`` has only bookies that did not return
    everything; the ``fingerprints`` are of the good copies."""

    failures: dict[BookieId, ReadFailures] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


class CopyReader:
    """Reads copies of one ledger during one inspection, and counts what it read.

    Without ``retries``, every answer counts as it is. A bookie that left ``UNANSWERED_MAX`` reads
    unanswered is unresponsive.

    With ``retries``, a "no such entry" and a digest mismatch count at once, and a read error when
    the bookie gave it twice. Other failed reads are repeated; what is unanswered after that is
    unknown. A bookie that answers none of the reads of a transfer is unresponsive.

    Unresponsive bookies get no more requests. Their answers to earlier transfers remain.
    """

    def __init__(
        self,
        ledger_id: int,
        *,
        bookies: Bookies,
        digest: EntryDigest,
        entry_bytes: int,
        retries: Retries | None = None,
    ) -> None:
        """``entry_bytes``: estimated stored size of an entry, to bound the bytes in flight (rule
        S10)."""
        self._ledger_id = ledger_id
        self._bookies = bookies
        self._digest = digest
        self._entry_bytes = entry_bytes
        self._retries = retries
        self.unresponsive: set[BookieId] = set()
        """Bookies that get no more requests: their copies that were not read are unknown."""
        self.entry_count = 0
        """Good entries; an entry that was read twice counts twice."""
        self.byte_count = 0
        self.mismatch_count = 0

    @property
    def has_only_mismatches(self) -> bool:
        """True if no entry was good, and some did not match: the key may be wrong (rule S7)."""
        return self.mismatch_count > 0 and self.entry_count == 0

    async def read(self, plan: ReadPlan, *, compares: bool = False) -> ReadAnswers:
        """Ask all bookies of the plan at once, in a single transfer unless there is very much to
        ask.

        ``compares``: True to get fingerprints. The plan must fit one transfer then, and its entry
        ids should be close together.
        """
        total = ReadAnswers()
        for reads in _transfers(plan):
            reads = {b: ids for b, ids in reads.items() if ids and b not in self.unresponsive}
            if not reads:
                continue
            assert not total.fingerprints, "fingerprints of several transfers"
            result = await self._transfer(reads, compares)
            failures = result.failures
            if self._retries is not None and any(failures.values()):
                failures = await self._retry(self._retries, reads, result)
            total.fingerprints = result.fingerprints
            for bookie, answers in failures.items():
                if answers:
                    # If this process can open no file, that says nothing about the bookie.
                    is_asked = bookie not in result.not_asked
                    self._add(bookie, answers, reads[bookie], total.failures, is_asked=is_asked)
        return total

    def _add(
        self,
        bookie: BookieId,
        answers: Mapping[int, Answer],
        asked: Sequence[int],
        total: dict[BookieId, ReadFailures],
        *,
        is_asked: bool,
    ) -> None:
        """Add a bookie's failures in one transfer, or give the bookie up."""
        if is_asked and self._retries is not None and _answered_nothing(asked, answers):
            self.unresponsive.add(bookie)
            return
        known = total.setdefault(bookie, ReadFailures())
        mismatched_before = len(known.mismatched)
        known.add(answers)
        self.mismatch_count += len(known.mismatched) - mismatched_before
        if is_asked and self._retries is None and len(known.unknown) >= UNANSWERED_MAX:
            self.unresponsive.add(bookie)

    async def _retry(
        self,
        retries: Retries,
        reads: Mapping[BookieId, Sequence[int]],
        result: TransferResult,
    ) -> dict[BookieId, dict[int, Answer]]:
        """Repeat failed reads until each entry is returned, or its failure is reliable. Return the
        remaining failures. Adds to the fingerprints of the result."""
        failures = {bookie: dict(answers) for bookie, answers in result.failures.items()}
        errors = Counter(_unreadable(failures))
        for _ in range(retries.count_max):
            unreliable = {
                bookie: entry_ids
                for bookie, answers in failures.items()
                if bookie not in self.unresponsive
                if bookie in result.not_asked or not _answered_nothing(reads[bookie], answers)
                if (entry_ids := _unreliable(bookie, answers, errors))
            }
            if not unreliable:
                break
            await retries.clock.sleep(retries.wait_s)
            again = await self._transfer(unreliable, bool(result.fingerprints))
            errors.update(_unreadable(again.failures))
            for bookie, entry_ids in unreliable.items():
                still_failed = again.failures.get(bookie, {})
                failures[bookie].update(still_failed)
                for returned in set(entry_ids).difference(still_failed):
                    del failures[bookie][returned]
                if bookie in again.fingerprints:
                    prints, more = result.fingerprints[bookie], again.fingerprints[bookie]
                    for entry_id in entry_ids:
                        if (value := more.of(entry_id)) != NO_FINGERPRINT:
                            prints.values[entry_id - prints.first_entry_id] = value
        for bookie, answers in failures.items():
            for entry_id in _unreliable(bookie, answers, errors):
                answers[entry_id] = Answer.UNKNOWN
        return failures

    async def _transfer(
        self, reads: Mapping[BookieId, Sequence[int]], compares: bool
    ) -> TransferResult:
        result = await self._bookies.transfer(
            Transfer(
                ledger_id=self._ledger_id,
                digest=self._digest,
                reads=reads,
                entry_bytes_hint=self._entry_bytes,
                takes_fingerprints=compares,
            )
        )
        self.entry_count += result.entry_count
        self.byte_count += result.entry_bytes
        if self._retries is not None:
            self.unresponsive |= result.unresponsive
        return result


def _unreliable(
    bookie: BookieId, answers: Mapping[int, Answer], errors: Counter[tuple[BookieId, int]]
) -> list[int]:
    """Return the entries, ascending, for which the bookie's answer proves nothing yet. ``errors``:
    the number of read errors, by bookie and entry."""
    return [
        entry_id
        for entry_id, answer in sorted(answers.items())
        if answer is Answer.UNKNOWN
        or (answer is Answer.UNREADABLE and errors[bookie, entry_id] < 2)
    ]


def _unreadable(failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[tuple[BookieId, int]]:
    return [
        (bookie, entry_id)
        for bookie, answers in failures.items()
        for entry_id, answer in answers.items()
        if answer is Answer.UNREADABLE
    ]


def _answered_nothing(entry_ids: Sequence[int], answers: Mapping[int, Answer]) -> bool:
    return len(answers) == len(entry_ids) and all(a is Answer.UNKNOWN for a in answers.values())


@dataclass(slots=True, kw_only=True)
class ReadFailures:
    """The entries that one bookie was asked for and did not return, by reason."""

    absent: EntryRuns = field(default_factory=EntryRuns)
    mismatched: EntryRuns = field(default_factory=EntryRuns)
    unreadable: EntryRuns = field(default_factory=EntryRuns)
    unknown: EntryRuns = field(default_factory=EntryRuns)

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

    def between(self, first: int, last: int) -> ReadFailures:
        """Return the failures from ``first`` to ``last``, both inclusive."""
        return self._changed(lambda runs: runs.between(first, last))

    def only(self, is_wanted: Callable[[int], bool]) -> ReadFailures:
        """Return the failures of the wanted entries."""
        return self._changed(lambda runs: EntryRuns(filter(is_wanted, runs)))

    def _changed(self, change: Callable[[EntryRuns], EntryRuns]) -> ReadFailures:
        return ReadFailures(
            absent=change(self.absent),
            mismatched=change(self.mismatched),
            unreadable=change(self.unreadable),
            unknown=change(self.unknown),
        )

    @property
    def has_bad(self) -> bool:
        """True if any copy is known to be missing or damaged."""
        return bool(self.absent or self.mismatched or self.unreadable)

    @property
    def bad(self) -> EntryRuns:
        """Entries whose copy is known to be missing or damaged."""
        return merged(self.not_returned, self.mismatched)

    @property
    def not_returned(self) -> EntryRuns:
        """The bad entries that the bookie did not return at all."""
        return merged(self.absent, self.unreadable)

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


# --- What to read ---------------------------------------------------------------------------------


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


def _transfers(plan: ReadPlan) -> Iterator[dict[BookieId, Sequence[int]]]:
    """Yield the reads of each transfer, in ascending order. Nearly always there is one transfer."""
    if sum(len(run) for runs in plan.values() for run in runs) <= TRANSFER_ENTRIES_MAX:
        yield {bookie: _joined(runs) for bookie, runs in plan.items()}
        return
    slices = (transfer_slices(runs, sharing=len(plan)) for runs in plan.values())
    for parts in zip_longest(*slices, fillvalue=()):
        yield dict(zip(plan, parts, strict=True))


def _joined(runs: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the ids of ascending, disjoint runs; as a range, which costs nothing, if they are
    consecutive."""
    count = sum(map(len, runs))
    if count and runs[-1][-1] - runs[0][0] == count - 1:
        return range(runs[0][0], runs[-1][-1] + 1)
    return list(chain.from_iterable(runs))


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


# --- Judging, for repairs -------------------------------------------------------------------------


async def inspect_copies(
    fragments: Sequence[Fragment],
    *,
    bookies: Bookies,
    digest: EntryDigest,
    available: Collection[BookieId],
    suspects: Collection[BookieId],
    entry_bytes: int,
    share: float = 0.0,
    rng: random.Random | None = None,
) -> tuple[CopyFinding, ...]:
    """Read the copies of one ledger's fragments, and judge them. A missing answer is a finding,
    never an error.

    ``fragments``: not empty. ``entry_bytes``: as for ``CopyReader``. The other arguments are those
    of ``plan_reads``.
    """
    reader = CopyReader(
        fragments[0].ledger_id, bookies=bookies, digest=digest, entry_bytes=entry_bytes
    )
    failures: dict[BookieId, ReadFailures] = {}

    async def findings_by(plan: ReadPlan) -> tuple[CopyFinding, ...]:
        failures.update(dict.fromkeys(plan, GAVE_ALL))
        failures.update((await reader.read(plan)).failures)
        for bookie in reader.unresponsive:
            failures.pop(bookie, None)
        return judge(fragments, failures, available=available)

    findings = await findings_by(
        plan_reads(fragments, available=available, suspects=suspects, share=share, rng=rng)
    )
    lacking = frozenset(f.bookie for f in findings if f.verdict is Verdict.MISSING)
    lacking -= frozenset(suspects)
    if not lacking or share >= 1:
        return findings
    # An entry is missing. Only reading all entries of the index shows which others are.
    return await findings_by(plan_reads(fragments, available=lacking, suspects=lacking))


class Verdict(enum.Enum):
    """The state of the copies at one bookie index of one fragment."""

    GOOD = "good"
    BOOKIE_ABSENT = "bookie_absent"
    """Its bookie is not registered: every entry of the index lacks a copy."""
    IN_MAINTENANCE = "in_maintenance"
    """Its bookie is absent or unresponsive within a maintenance window, so its copies do not count
    as missing."""
    DRAINING = "draining"
    """Its bookie is draining: its copies count as missing although it serves them (rule S16)."""
    MISSING = "missing"
    """Its bookie is registered, and entries are explicitly absent, damaged or unreadable."""
    UNKNOWN = "unknown"
    """Its bookie is registered and did not answer."""


class CopyFinding(Struct, frozen=True, kw_only=True):
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
    failures: Mapping[BookieId, ReadFailures],
    *,
    available: Collection[BookieId],
) -> tuple[CopyFinding, ...]:
    """Return a finding for every bookie index of every fragment, in order.

    ``failures``: of every bookie that was asked and is not unresponsive.
    """
    findings = []
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            found = failures.get(bookie)
            verdict = Verdict.GOOD
            if bookie not in available:
                verdict = Verdict.BOOKIE_ABSENT
            # Nearly always all was given, which saves computing the entries.
            elif found is not GAVE_ALL and (entries := fragment.entries_of(index)):
                # A bookie is in an ensemble once, so all failures within the fragment belong to
                # this index.
                found = None if found is None else found.between(entries[0], entries[-1])
                if found is None or found.unknown:
                    verdict = Verdict.UNKNOWN
                elif found.has_bad:
                    verdict = Verdict.MISSING
            bad = found if found is not None and verdict is Verdict.MISSING else GAVE_ALL
            findings.append(
                CopyFinding(
                    fragment=fragment,
                    index=index,
                    verdict=verdict,
                    absent=bad.absent,
                    mismatched=bad.mismatched,
                    unreadable=bad.unreadable,
                )
            )
    return tuple(findings)
