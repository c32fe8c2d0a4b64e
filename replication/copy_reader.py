"""Reads the copies of a ledger from its bookies, and judges the answers. Writes and fences nothing.

Workers, the auditor's checks and fsck all read through ``CopyReader``. ``plan_reads`` decides what
to ask of each bookie, the reader asks all bookies at once, and ``ReadFailures`` holds what a
bookie did not return. Answers are three-valued (rule S5): only an explicit "no" is a missing copy;
a digest mismatch counts as one (rule S7); without an answer the copy is unknown.

The callers differ in how certain an answer must be, and in what they judge:

- A worker takes each answer as it is: a wrong "no" costs one needless copy. It judges the copies at
  one bookie index as a whole (``inspect_copies``, ``judge``).
- A check reads damaged entries a second time (``auditor/checks/copies.py``).
- fsck lets the reader repeat reads until each answer is reliable, and counts the
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
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, zip_longest
from math import ceil
from typing import overload

from msgspec import Struct
from msgspec import field as struct_field

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.digest import NO_FINGERPRINT, EntryDigest, Fingerprints
from ledgers.model import BookieId, Fragment, LedgerMetadata, StripedEntries
from replication.entry_runs import NO_ENTRIES, EntryRuns, merged

ReadPlan = Mapping[BookieId, Sequence[Sequence[int]]]
"""Runs of entry ids to ask of each bookie: ascending, and disjoint."""
NOTHING_ASKED: ReadPlan = {}

UNANSWERED_MAX = 1_000
"""Without retries, a bookie that left so many reads unanswered is not asked for the rest."""
RETRIES_MAX = 3
RETRY_WAIT_S = 0.5
CONFIRM_AFTER_S = 2.0
"""Pause before a check or fsck reads damage a second time. It outlasts momentary problems."""
INSPECTIONS_MAX = 3
"""Maximum number of inspections of a ledger whose metadata keeps changing. After that, its damage
counts as unknown."""


# --- Reading --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReadAnswers:
    """The answers to the reads of a plan. ``failures`` has only bookies that did not return
    everything; the ``fingerprints`` are of the good copies."""

    failures: dict[BookieId, ReadFailures] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


@dataclass
class CopyReader:
    """Reads copies of one ledger during one inspection, and counts what it read.

    Without a ``retry_clock``, every answer counts as it is. A bookie that left ``UNANSWERED_MAX``
    reads unanswered is unresponsive.

    With one, a "no such entry" and a digest mismatch count at once, and a read error when the
    bookie gave it twice. Other failed reads are repeated, at most ``RETRIES_MAX`` times; what is
    unanswered after that is unknown. A bookie that answers none of the reads of a transfer is
    unresponsive.

    Unresponsive bookies get no more requests. Their answers to earlier transfers remain.
    """

    ledger_id: int
    _: KW_ONLY
    bookies: Bookies
    digest: EntryDigest
    entry_bytes: int
    """Estimated stored size of an entry, to bound the bytes in flight (rule S10)."""
    retry_clock: Clock | None = None
    unresponsive: set[BookieId] = field(default_factory=set, init=False)
    """Bookies that get no more requests: their copies that were not read are unknown."""
    entry_count: int = field(default=0, init=False)
    """Good entries; an entry that was read twice counts twice."""
    byte_count: int = field(default=0, init=False)
    mismatch_count: int = field(default=0, init=False)

    def is_key_suspect(self, metadata: LedgerMetadata) -> bool:
        """True if the metadata holds no key, no entry was good, and some did not match: our default
        key may be wrong (rule S7)."""
        is_any_good = self.entry_count > 0
        return metadata.password is None and self.mismatch_count > 0 and not is_any_good

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
            if self.retry_clock is not None and any(failures.values()):
                failures = await self._retry(self.retry_clock, reads, result)
            total.fingerprints = result.fingerprints
            for bookie, answers in failures.items():
                # If this process can open no file, that says nothing about the bookie.
                is_asked = bookie not in result.not_asked
                if not answers:
                    continue
                if is_asked and self.retry_clock and _answered_nothing(reads[bookie], answers):
                    self.unresponsive.add(bookie)
                    continue
                known = total.failures.setdefault(bookie, ReadFailures())
                mismatched_before = len(known.mismatched)
                known.add(answers)
                self.mismatch_count += len(known.mismatched) - mismatched_before
                if is_asked and not self.retry_clock and len(known.unknown) >= UNANSWERED_MAX:
                    self.unresponsive.add(bookie)
        return total

    async def _retry(
        self, clock: Clock, reads: Mapping[BookieId, Sequence[int]], result: TransferResult
    ) -> dict[BookieId, dict[int, Answer]]:
        """Repeat failed reads until each entry is returned, or its failure is reliable. Return the
        remaining failures. Adds to the fingerprints of the result."""
        failures = {bookie: dict(answers) for bookie, answers in result.failures.items()}
        errors = Counter[tuple[BookieId, int]]()
        """Read errors by bookie and entry."""

        def count_errors(found: Mapping[BookieId, Mapping[int, Answer]]) -> None:
            for bookie, answers in found.items():
                errors.update((bookie, e) for e, a in answers.items() if a is Answer.UNREADABLE)

        def unreliable(bookie: BookieId) -> list[int]:
            """Return the entries, ascending, for which the answer proves nothing yet."""
            return [
                entry_id
                for entry_id, answer in sorted(failures[bookie].items())
                if answer is Answer.UNKNOWN
                or (answer is Answer.UNREADABLE and errors[bookie, entry_id] < 2)
            ]

        count_errors(failures)
        for _ in range(RETRIES_MAX):
            repeated = {
                bookie: entry_ids
                for bookie, answers in failures.items()
                if bookie not in self.unresponsive
                if bookie in result.not_asked or not _answered_nothing(reads[bookie], answers)
                if (entry_ids := unreliable(bookie))
            }
            if not repeated:
                break
            await clock.sleep(RETRY_WAIT_S)
            again = await self._transfer(repeated, bool(result.fingerprints))
            count_errors(again.failures)
            for bookie, entry_ids in repeated.items():
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
            answers.update(dict.fromkeys(unreliable(bookie), Answer.UNKNOWN))
        return failures

    async def _transfer(
        self, reads: Mapping[BookieId, Sequence[int]], compares: bool
    ) -> TransferResult:
        result = await self.bookies.transfer(
            Transfer(
                ledger_id=self.ledger_id,
                digest=self.digest,
                reads=reads,
                entry_bytes_hint=self.entry_bytes,
                takes_fingerprints=compares,
            )
        )
        self.entry_count += result.entry_count
        self.byte_count += result.entry_bytes
        if self.retry_clock is not None:
            self.unresponsive |= result.unresponsive
        return result


def _answered_nothing(entry_ids: Sequence[int], answers: Mapping[int, Answer]) -> bool:
    return len(answers) == len(entry_ids) and all(a is Answer.UNKNOWN for a in answers.values())


class ReadFailures(Struct, frozen=True, kw_only=True):
    """The entries that one bookie was asked for and did not return, by reason."""

    absent: EntryRuns = struct_field(default_factory=EntryRuns)
    mismatched: EntryRuns = struct_field(default_factory=EntryRuns)
    unreadable: EntryRuns = struct_field(default_factory=EntryRuns)
    unknown: EntryRuns = struct_field(default_factory=EntryRuns)

    def add(self, answers: Mapping[int, Answer]) -> None:
        """Add answers about other entries than those before."""
        kinds = {
            Answer.ABSENT: self.absent,
            Answer.MISMATCH: self.mismatched,
            Answer.UNREADABLE: self.unreadable,
            Answer.UNKNOWN: self.unknown,
        }
        for entry_id, answer in answers.items():
            kinds[answer].append(entry_id)

    def between(self, first: int, last: int) -> ReadFailures:
        """Return the failures from ``first`` to ``last``, both inclusive."""
        return self.map(lambda runs: runs.between(first, last))

    def map(self, change: Callable[[EntryRuns], EntryRuns]) -> ReadFailures:
        """Return the failures after a change of the entries of each reason."""
        return ReadFailures(
            absent=change(self.absent),
            mismatched=change(self.mismatched),
            unreadable=change(self.unreadable),
            unknown=change(self.unknown),
        )

    @property
    def bad(self) -> EntryRuns:
        """Entries whose copy is known to be missing or damaged."""
        return merged(self.absent, self.damaged)

    @property
    def bad_count(self) -> int:
        return len(self.absent) + len(self.mismatched) + len(self.unreadable)

    @property
    def damaged(self) -> EntryRuns:
        """Copies that exist and are not good."""
        return merged(self.mismatched, self.unreadable)

    @property
    def is_empty(self) -> bool:
        return not self.bad_count and not self.unknown

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


class CopyFinding(ReadFailures, frozen=True, kw_only=True):
    """The verdict on one bookie index, and the entries that its bookie failed to return, when
    MISSING."""

    fragment: Fragment
    index: int
    verdict: Verdict
    absent: EntryRuns = NO_ENTRIES
    mismatched: EntryRuns = NO_ENTRIES
    unreadable: EntryRuns = NO_ENTRIES
    unknown: EntryRuns = NO_ENTRIES

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
            found, verdict, bad = failures.get(bookie), Verdict.GOOD, GAVE_ALL
            if bookie not in available:
                verdict = Verdict.BOOKIE_ABSENT
            # Nearly always all was given, which saves computing the entries.
            elif found is not GAVE_ALL and (entries := fragment.entries_of(index)):
                # A bookie is in an ensemble once, so all failures within the fragment belong to
                # this index.
                found = None if found is None else found.between(entries[0], entries[-1])
                if found is None or found.unknown:
                    verdict = Verdict.UNKNOWN
                elif found.bad_count:
                    verdict, bad = Verdict.MISSING, found
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
