"""Copying the entries of one bookie index of one fragment to a target.

Just the entries that the index stored are copied, each from any good replica, in bulk. An entry that
one replica did not give is asked of the next (``assign``, a pure decision but for its notes). What
remains in the end is said entry by entry: without a copy, or unknown. A ledger of ten million
entries is copied slice by slice; what is held at a time does not grow with it.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ledgers.bookies import Answer, Bookies, Standing, Transfer
from ledgers.entry import EntryDigest
from ledgers.errors import BookmenderError, BusyError, UnavailableError
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import write_set

SLICE_ENTRIES = 2_048
SLICES_AT_ONCE = 2
"""So that the last replies of one slice are not waited for before the next is begun."""
STRETCH_ENTRIES = 64
"""So many of an index's entries in a row come from one source, where several have them: consecutive
ones can be read in batches."""
IDLE_BYTES = 64 * 1024
"""What an idle source counts for, so that a slow one is not preferred for being idle."""
REPLY_MIN_S = 0.001
"""Sources that reply sooner are equally good."""
LACKING_MAX = 100_000
"""A copy that lacks more entries than that is given up: nothing is gained by counting on."""
RESUMES_MAX = 3
RESUME_PAUSE_S = 0.5
RESUME_WORTH_ENTRIES = SLICE_ENTRIES
"""After that many acknowledged entries a target whose connection broke is tried again, rather than
another from the beginning (its registration is compared before the metadata is written, rule S3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """Entries of a fragment that ``target`` is to hold at bookie index ``index``.

    ``target`` may be the bookie that stands there already (an in-place repair, rule S15).
    ``former``: bookies of the ledger's other ensembles, asked before an entry is called lost.
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]
    available: frozenset[BookieId]
    former: tuple[BookieId, ...] = ()
    entry_bytes_hint: int = 1024

    @property
    def runs(self) -> list[Sequence[int]]:
        """The entries in the order in which they are to be written.

        In place the ends come last, when all else is there. They are what a check asks for: once
        they were written, nothing would tell of the entries between them that are missing still.
        """
        if self.target != self.fragment.ensemble[self.index]:
            return [self.entry_ids]
        stored = self.fragment.entries_of(self.index)
        ends = {stored.first, stored.last}
        return [
            [entry_id for entry_id in self.entry_ids if entry_id not in ends],
            [entry_id for entry_id in self.entry_ids if entry_id in ends],
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """``target_error``: the target failed, another is to be chosen. Entry ids in the sets ascend."""

    entry_count: int = 0
    entry_bytes: int = 0
    target_error: BookmenderError | None = None
    without_copy: tuple[int, ...] = ()
    """Entries of which no bookie that is there holds a good copy; one that is away still may."""
    unknown: tuple[int, ...] = ()
    """Entries for which a bookie that is there did not answer."""

    @property
    def is_complete(self) -> bool:
        return self.target_error is None and not self.without_copy and not self.unknown


History = tuple[tuple[BookieId, Answer], ...]
"""Who was asked for an entry, in this order, and the answer."""


@dataclass(slots=True)
class Progress:
    """What became of the entries of one slice.

    ``tried``: the history of each entry that was asked for in vain. Entries that were refused alike
    share theirs.
    """

    tried: dict[int, History] = field(default_factory=dict)
    without_copy: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def note(self, failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[int]:
        """Remember who failed to give what; the entries that are still to be had."""
        shared: dict[History, History] = {}
        for bookie, answers in failures.items():
            for entry_id, answer in answers.items():
                history = (*self.tried.get(entry_id, ()), (bookie, answer))
                self.tried[entry_id] = shared.setdefault(history, history)
        return sorted({entry_id for answers in failures.values() for entry_id in answers})


async def copy_index(job: CopyJob, *, bookies: Bookies, digest: EntryDigest) -> CopyOutcome:
    """Copy run by run, as far as each of them can be copied whole."""
    copy = _Copy(job, bookies, digest)
    for run in job.runs:
        await copy.copy_run(run)
        if copy.is_lacking:
            break
    return copy.outcome


class _Copy:
    """One copy on its way, slice by slice."""

    def __init__(self, job: CopyJob, bookies: Bookies, digest: EntryDigest) -> None:
        self._job, self._bookies, self._digest = job, bookies, digest
        self._resumes_left = RESUMES_MAX
        self._entry_count = self._entry_bytes = 0
        self._target_error: BookmenderError | None = None
        self._without_copy: list[int] = []
        self._unknown: list[int] = []

    @property
    def outcome(self) -> CopyOutcome:
        return CopyOutcome(
            entry_count=self._entry_count,
            entry_bytes=self._entry_bytes,
            target_error=self._target_error,
            without_copy=tuple(sorted(self._without_copy)),
            unknown=tuple(sorted(self._unknown)),
        )

    @property
    def is_lacking(self) -> bool:
        """Whether something stood in the way so far."""
        return bool(self._target_error or self._without_copy or self._unknown)

    async def copy_run(self, run: Sequence[int]) -> None:
        if len(run) <= SLICE_ENTRIES:  # nearly always, and worth a task saved
            await self._copy_slice(array("q", run))
            return
        slices = slices_of(run)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SLICES_AT_ONCE):
                tasks.create_task(self._copy_slices(slices))

    async def _copy_slices(self, slices: Iterator[Sequence[int]]) -> None:
        for entry_ids in slices:
            await self._copy_slice(entry_ids)
            if self._is_hopeless:
                return

    @property
    def _is_hopeless(self) -> bool:
        """Whether nothing is gained by going on."""
        lacking_count = len(self._without_copy) + len(self._unknown)
        return self._target_error is not None or lacking_count > LACKING_MAX

    async def _copy_slice(self, entry_ids: Sequence[int]) -> None:
        progress = Progress()
        standing = self._bookies.standing
        while entry_ids:
            reads = assign(entry_ids, progress, self._job, standing)
            if not reads.entry_ids:
                break
            result = await self._bookies.transfer(
                Transfer(
                    ledger_id=self._job.fragment.ledger_id,
                    digest=self._digest,
                    reads=reads.entry_ids,
                    target=self._job.target,
                    entry_bytes_hint=self._job.entry_bytes_hint,
                    has_alternatives=reads.have_alternatives,
                )
            )
            self._entry_count += result.entry_count
            self._entry_bytes += result.entry_bytes
            entry_ids = progress.note(result.failures)
            if result.target_error is not None:
                if not self._may_resume(result.target_error):
                    self._target_error = self._target_error or result.target_error
                    return
                await asyncio.sleep(RESUME_PAUSE_S)
                entry_ids = sorted({*entry_ids, *result.unwritten})
        self._without_copy += progress.without_copy
        self._unknown += progress.unknown

    def _may_resume(self, error: BookmenderError) -> bool:
        """Whether to send the target what it has not acknowledged yet, after a pause."""
        is_worth_it = isinstance(error, BusyError) or self._entry_count >= RESUME_WORTH_ENTRIES
        if not (isinstance(error, UnavailableError) and is_worth_it and self._resumes_left):
            return False
        self._resumes_left -= 1
        return True


def slices_of(run: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in parts that may be held in memory."""
    for start in range(0, len(run), SLICE_ENTRIES):
        yield array("q", run[start : start + SLICE_ENTRIES])


# --- Whom to ask -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Whom to ask for which entries next; ascending ids."""

    entry_ids: Mapping[BookieId, Sequence[int]]
    have_alternatives: bool
    """Whether others may still be asked for every one of them."""


def assign(
    entry_ids: Sequence[int],
    progress: Progress,
    job: CopyJob,
    standing: Callable[[BookieId], Standing],
) -> Reads:
    """Whom to ask for each entry next; entries that nobody is left to ask for are noted.

    Of several sources, stretch by stretch, the one that has the least before it; one that failed
    lately only where there is no other.
    """
    loads = _Loads(standing, entry_bytes=job.entry_bytes_hint)
    reads: dict[BookieId, list[Sequence[int]]] = {}
    have_alternatives = True
    to_ask: list[tuple[Sequence[BookieId], Sequence[int]]] = []
    for (residue, history), ids in _groups(entry_ids, progress, job).items():
        sources, is_last_chance = _sources(residue, history, job)
        if sources:
            to_ask.append((sources, ids))
            have_alternatives &= not is_last_chance
        else:
            unanswered = any(answer in _PROVES_NOTHING for _, answer in history)
            (progress.unknown if unanswered else progress.without_copy).extend(ids)
    for start in range(0, len(entry_ids), STRETCH_ENTRIES):
        for sources, ids in to_ask:  # in turn, so that loads are even over all of them
            if stretch := ids[start : start + STRETCH_ENTRIES]:
                source = loads.take(sources, len(stretch))
                reads.setdefault(source, []).append(stretch)
    return Reads(
        entry_ids={source: _joined(stretches) for source, stretches in reads.items()},
        have_alternatives=have_alternatives,
    )


def _joined(stretches: Sequence[Sequence[int]]) -> Sequence[int]:
    """Their ids, ascending. Those of one stretch do already, and small ledgers have no more."""
    if len(stretches) == 1:
        return stretches[0]
    return array("q", sorted(chain.from_iterable(stretches)))


_PROVES_NOTHING = frozenset({Answer.UNKNOWN, Answer.UNREADABLE})
"""Where a bookie answered so, it may have the entry (rule S5)."""


def _groups(
    entry_ids: Sequence[int], progress: Progress, job: CopyJob
) -> Mapping[tuple[int, History], Sequence[int]]:
    """The entries by what decides whom they may be asked of: their write set, and who was asked.

    Entries that are E apart have the same write set; where E = W all have.
    """
    size = job.fragment.ensemble_size
    write_sets = 1 if size == job.fragment.write_quorum else size
    if write_sets == 1 and not progress.tried:
        return {(0, ()): entry_ids}
    groups: dict[tuple[int, History], array[int]] = {}
    for entry_id in entry_ids:
        key = (entry_id % write_sets, progress.tried.get(entry_id, ()))
        groups.setdefault(key, array("q")).append(entry_id)
    return groups


def _sources(entry_id: int, history: History, job: CopyJob) -> tuple[Sequence[BookieId], bool]:
    """Who may be asked for it now, and whether nobody else is left after that.

    Other replicas come first; then the bookie that is being replaced, if it is there (what is damaged
    on it need not be all of it); then former members of the ledger; and at last, once more, the
    first one that did not answer: it was not given much time.
    """
    tried = {bookie for bookie, _ in history}
    replicas = [bookie for bookie in _replicas(entry_id, job) if bookie not in tried]
    others = [
        bookie
        for bookie in (job.fragment.ensemble[job.index], *job.former)
        if bookie in job.available and bookie not in tried and bookie != job.target
    ]
    if replicas:
        turn = job.fragment.ledger_id % len(replicas)
        return [*replicas[turn:], *replicas[:turn]], len(replicas) + len(others) == 1
    if others:
        return others[:1], len(others) == 1
    silent = [bookie for bookie, answer in history if answer is Answer.UNKNOWN]
    is_first_time = len(history) == len(tried) > 1
    return (silent[:1] if is_first_time else []), True


class _Loads:
    """What each source has before it, with what is being assigned to it now."""

    def __init__(self, standing: Callable[[BookieId], Standing], *, entry_bytes: int) -> None:
        self._standing = standing
        self._entry_bytes = entry_bytes
        self._known: dict[BookieId, Standing] = {}
        self._assigned_bytes: Counter[BookieId] = Counter()

    def take(self, sources: Sequence[BookieId], count: int) -> BookieId:
        """The best of them, which is to be asked for that many entries; the first among equals."""
        source = min(sources, key=self._load) if len(sources) > 1 else sources[0]
        self._assigned_bytes[source] += count * self._entry_bytes
        return source

    def _load(self, bookie: BookieId) -> tuple[bool, float]:
        if bookie not in self._known:
            self._known[bookie] = self._standing(bookie)
        standing = self._known[bookie]
        waiting_bytes = standing.waiting_bytes + self._assigned_bytes[bookie] + IDLE_BYTES
        return standing.is_ailing, waiting_bytes * max(standing.reply_s, REPLY_MIN_S)


def _replicas(entry_id: int, job: CopyJob) -> list[BookieId]:
    """Who is there of the entry's write set, without the one that is being replaced or refilled."""
    fragment = job.fragment
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    bookies = (fragment.ensemble[index] for index in indexes if index != job.index)
    return [bookie for bookie in bookies if bookie in job.available]
