"""Copying the entries of one bookie index of one fragment to a target.

Just the entries that the index stored are copied, each from any good replica, in bulk. An entry
that one replica did not give is asked of the next (``sources``). What remains in the end is said
entry by entry: without a copy, or unknown. A ledger of ten million entries is copied slice by
slice; what is held at a time does not grow with it.

A copy that is to be made, and what came of it: values.

Whom to ask for the entries of a copy, from what was answered so far and how each source does.

Copies whose LAC is rewritten on the way, entry by entry (rule S12).

For a target that stands in the last ensemble of a ledger which is not closed. A reader asks the
bookies of that ensemble for their last entry and takes the LAC in its header for what the writer
had confirmed. An entry of an earlier fragment carries an old LAC. So the header gets one that is
known now, and the digest is computed again, as BookKeeper's LedgerFragmentReplicator does. That
happens only where no other bookie is left, so these copies go one request at a time instead of in
bulk.
"""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct

from ledgers.bookies import Answer, Bookies, SourceHealth, Transfer, TransferResult
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, BusyError, UnavailableError, UnreadableError
from ledgers.model import LAC_NONE, BookieId, Fragment, LedgerMetadata, write_set
from ledgers.quorum import Result
from replication.copy_checks import NOTHING_ASKED, ReadPlan
from replication.entry_runs import EntryRuns


class CopyJob(Struct, frozen=True, kw_only=True):
    """Entries of a fragment that ``target`` is to hold at bookie index ``index``.

    ``target`` may be the bookie that stands there already (an in-place repair, rule S15).
    ``former``: bookies of the ledger's other ensembles, asked before an entry is called lost.
    ``lac``: written into the header of each entry (``replace_lac``); None: the bytes pass as they are.
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]
    available: frozenset[BookieId]
    former: tuple[BookieId, ...] = ()
    entry_bytes_hint: int = 1024
    lac: int | None = None

    @property
    def others(self) -> frozenset[BookieId]:
        """The members of the fragment whose copies it leaves where they are."""
        return frozenset(self.fragment.ensemble).difference(
            (self.target, self.fragment.ensemble[self.index])
        )

    @property
    def parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """What is to be written first, and the ends, which in place come after it (see
        ``copy_index``)."""
        if self.target != self.fragment.ensemble[self.index]:
            return self.entry_ids, ()
        return split_ends(self.fragment, self.index, self.entry_ids)


def split_ends(
    fragment: Fragment, index: int, entry_ids: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Those between the first and the last entry that the index stores, and those of these two.
    Nothing is listed: a bookie that came back empty lacks all, and there may be ten million."""
    stored = fragment.entries_of(index)
    first, last = stored.first, stored.last
    if first is None or last is None:  # it stores none
        return entry_ids, ()
    ends = [end for end in dict.fromkeys((first, last)) if end in entry_ids]
    if isinstance(entry_ids, EntryRuns):
        return entry_ids.between(first + 1, last - 1), ends
    return entry_ids[bisect_right(entry_ids, first) : bisect_left(entry_ids, last)], ends


class CopyOutcome(Struct, frozen=True, kw_only=True):
    """``target_error``: the target failed, another is to be chosen. Entry ids in the sets
    ascend."""

    entry_count: int = 0
    entry_bytes: int = 0
    target_error: BookmenderError | None = None
    without_copy: tuple[int, ...] = ()
    """Entries of which no bookie that is there holds a good copy; one that is away still may."""
    unknown: tuple[int, ...] = ()
    """Entries for which a bookie that is there did not answer."""
    withheld: tuple[int, ...] = ()
    """An end that was not written, so that a check goes on to see what is without a copy."""
    gave_all_asked: bool = False
    """Whether something was asked besides, and bookies gave all of that."""
    suspects: frozenset[BookieId] = frozenset()
    """Members of the fragment that should have an entry, and do not have a good copy of it."""

    @property
    def is_complete(self) -> bool:
        return self.target_error is None and not self.without_copy and not self.unknown


SOURCE_RUN_ENTRIES = 64
"""So many of an index's entries in a row come from one source, where several have them: consecutive
ones can be read in batches."""
IDLE_BYTES = 64 * 1024
"""What an idle source counts for, so that a slow one is not preferred for being idle."""
REPLY_MIN_S = 0.001
"""Sources that reply sooner are equally good."""

History = tuple[tuple[BookieId, Answer], ...]
"""Who was asked for an entry, in this order, and the answer."""


@dataclass(slots=True)
class SliceProgress:
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


class Reads(Struct, frozen=True, kw_only=True):
    """Whom to ask for which entries next; ascending ids."""

    entry_ids: Mapping[BookieId, Sequence[int]]
    have_alternatives: bool
    """Whether others may still be asked for every one of them."""


def assign(
    entry_ids: Sequence[int],
    progress: SliceProgress,
    job: CopyJob,
    source_health: Callable[[BookieId], SourceHealth],
) -> Reads:
    """Whom to ask for each entry next; entries that nobody is left to ask for are noted.

    Of several sources, stretch by stretch, the one that has the least before it; one that failed
    lately only where there is no other.
    """
    loads = _Loads(source_health, entry_bytes=job.entry_bytes_hint)
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
    for start in range(0, len(entry_ids), SOURCE_RUN_ENTRIES):
        for sources, ids in to_ask:  # in turn, so that loads are even over all of them
            if stretch := ids[start : start + SOURCE_RUN_ENTRIES]:
                source = loads.pick(sources, len(stretch))
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
    entry_ids: Sequence[int], progress: SliceProgress, job: CopyJob
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

    Other replicas come first; then the bookie that is being replaced, if it is there (what is
    damaged on it need not be all of it); then former members of the ledger; and at last, once more,
    the first one that did not answer: it was not given much time.
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

    def __init__(
        self, source_health: Callable[[BookieId], SourceHealth], *, entry_bytes: int
    ) -> None:
        self._source_health = source_health
        self._entry_bytes = entry_bytes
        self._known: dict[BookieId, SourceHealth] = {}
        self._assigned_bytes: dict[BookieId, int] = {}

    def pick(self, sources: Sequence[BookieId], count: int) -> BookieId:
        """The best of them, which is to be asked for that many entries; the first among equals."""
        source = min(sources, key=self._load) if len(sources) > 1 else sources[0]
        self._assigned_bytes[source] = self._assigned_to(source) + count * self._entry_bytes
        return source

    def _load(self, bookie: BookieId) -> tuple[bool, float]:
        if bookie not in self._known:
            self._known[bookie] = self._source_health(bookie)
        source_health = self._known[bookie]
        waiting_bytes = source_health.waiting_bytes + self._assigned_to(bookie) + IDLE_BYTES
        return source_health.is_ailing, waiting_bytes * max(source_health.reply_s, REPLY_MIN_S)

    def _assigned_to(self, bookie: BookieId) -> int:
        return self._assigned_bytes.get(bookie, 0)


def _replicas(entry_id: int, job: CopyJob) -> list[BookieId]:
    """Who is there of the entry's write set, without the one that is being replaced or refilled."""
    fragment = job.fragment
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    bookies = (fragment.ensemble[index] for index in indexes if index != job.index)
    return [bookie for bookie in bookies if bookie in job.available]


AT_ONCE = 64
"""Entries under way, each read and then written."""


def lac_for_copies(metadata: LedgerMetadata) -> int:
    """One less than the LAC that the last segment proves: its writer had all entries before that
    acknowledged.

    A recovery by Java takes the ledger's length from the header with the greatest LAC, and the
    length in a copy's header is that of an earlier entry. So a recovery always has to read one
    acknowledged entry more, and takes that one's.
    """
    return max(LAC_NONE, metadata.last_segment.first_entry_id - 2)


def replace_lac(entry: bytes, lac: int, digest: EntryDigest) -> bytes:
    """Return the same entry with this LAC in its header. Ids, length and payload stay."""
    header = EntryHeader.of(entry)
    return digest.pack(
        ledger_id=header.ledger_id,
        entry_id=header.entry_id,
        lac=lac,
        length=header.length,
        payload=digest.payload(entry),
    )


async def transfer_replacing_lac(bookies: Bookies, transfer: Transfer, lac: int) -> TransferResult:
    """As ``Bookies.transfer`` to a target, with the LAC of each entry rewritten. ``checks`` are
    read too."""
    copying = _Copying(bookies, transfer, lac)
    await copying.run()
    return copying.result


class _Copying:
    def __init__(self, bookies: Bookies, transfer: Transfer, lac: int) -> None:
        assert transfer.target is not None, transfer.ledger_id
        self._bookies, self._transfer, self._lac = bookies, transfer, lac
        self._target = transfer.target
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._failures: dict[BookieId, dict[int, Answer]] = defaultdict(dict)
        self._unwritten: set[int] = set()
        self._target_error: BookmenderError | None = None
        self._entry_count = self._entry_bytes = 0

    @property
    def result(self) -> TransferResult:
        return TransferResult(
            entry_count=self._entry_count,
            entry_bytes=self._entry_bytes,
            failures=self._failures,
            unwritten=frozenset(self._unwritten),
            target_error=self._target_error,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for asked, is_written in ((self._transfer.reads, True), (self._transfer.checks, False)):
                for source, entry_ids in asked.items():
                    for entry_id in entry_ids:
                        await self._slots.acquire()
                        tasks.create_task(self._copy(source, entry_id, is_written=is_written))

    async def _copy(self, source: BookieId, entry_id: int, *, is_written: bool) -> None:
        try:
            if self._target_error is not None:
                self._unwritten.add(entry_id)
                return
            entry = await self._read(source, entry_id)
            if entry is not None and is_written:
                await self._write(entry_id, entry)
        finally:
            self._slots.release()

    async def _read(self, source: BookieId, entry_id: int) -> bytes | None:
        """None, and what the source said instead, where it gives no good copy."""
        ledger_id = self._transfer.ledger_id
        try:
            entry = await self._bookies.read(source, ledger_id, entry_id)
            self._transfer.digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
        except UnreadableError:
            self._failures[source][entry_id] = Answer.UNREADABLE
            return None
        except BookmenderError as error:
            self._failures[source][entry_id] = Result[bytes](error=error).answer
            return None
        return entry

    async def _write(self, entry_id: int, entry: bytes) -> None:
        digest = self._transfer.digest
        try:
            await self._bookies.add(
                self._target,
                replace_lac(entry, self._lac, digest),
                master_key=digest.master_key,
                is_recovery=True,
            )
        except BookmenderError as error:
            self._target_error = self._target_error or error
            self._unwritten.add(entry_id)
        else:
            self._entry_count += 1
            self._entry_bytes += len(entry)


SLICE_ENTRIES = 2_048
SLICES_AT_ONCE = 2
"""So that the last replies of one slice are not waited for before the next is begun."""
LACKING_MAX = 100_000
"""A copy that lacks more entries than that is given up: nothing is gained by counting on."""
RESUMES_MAX = 3
RESUME_PAUSE_S = 0.5
RESUME_WORTH_ENTRIES = SLICE_ENTRIES
"""After that many acknowledged entries a target whose connection broke is tried again, rather than
another from the beginning (its registration is compared before the metadata is written, rule
S3)."""

Failures = Mapping[BookieId, Mapping[int, Answer]]
"""As in ``TransferResult``."""


async def copy_index(
    job: CopyJob, *, bookies: Bookies, digest: EntryDigest, asked: ReadPlan = NOTHING_ASKED
) -> CopyOutcome:
    """Copy every entry of which there is a good copy. In place, an end is kept back while others
    lack.

    A check, ours or Java's, asks for the ends. An index with both of them there looks whole,
    whatever is missing between them: the next try would unmark the ledger. So in place (rule S15)
    the ends are written last, and

    - none while an entry between them may still be had (some replica did not answer);
    - both when all between them is there;
    - all but one when entries between them have no copy anywhere: that may stay so for ever, and no
      more than one entry should be left at a copy less for it. Where the other end is itself lost none
      is kept back: its absence tells of the rest.

    ``asked``: what to ask bookies in the first transfer, besides what is read of them anyway.
    """
    copy = _Copy(job, bookies, digest, asked)
    inner, ends = job.parts
    await copy.copy_run(inner)
    if ends and not copy.is_cut_short:
        await copy.copy_ends(ends)
    return copy.outcome


class _Copy:
    """One copy on its way, slice by slice."""

    def __init__(
        self, job: CopyJob, bookies: Bookies, digest: EntryDigest, asked: ReadPlan
    ) -> None:
        self._job, self._bookies, self._digest = job, bookies, digest
        self._asked = asked
        """Not put so far."""
        self._gave_all_asked = False
        self._resumes_left = RESUMES_MAX
        self._entry_count = self._entry_bytes = 0
        self._target_error: BookmenderError | None = None
        self._without_copy: list[int] = []
        self._unknown: list[int] = []
        self._suspects: set[BookieId] = set()
        self._withheld: Sequence[int] = ()

    @property
    def outcome(self) -> CopyOutcome:
        return CopyOutcome(
            entry_count=self._entry_count,
            entry_bytes=self._entry_bytes,
            target_error=self._target_error,
            without_copy=tuple(sorted(self._without_copy)),
            unknown=tuple(sorted(self._unknown)),
            withheld=tuple(self._withheld),
            gave_all_asked=self._gave_all_asked,
            suspects=frozenset(self._suspects),
        )

    @property
    def is_cut_short(self) -> bool:
        """Whether entries were not written so far of which there may well be a good copy."""
        return self._is_hopeless or bool(self._unknown)

    async def copy_ends(self, ends: Sequence[int]) -> None:
        """One or both, ascending, after all that lies between them."""
        if not self._without_copy:
            await self.copy_run(ends)
            return
        *others, last = ends
        await self.copy_run(others)
        if self.is_cut_short:
            return
        self._withheld = withheld_end(ends, lost=self._without_copy)
        if not self._withheld:
            await self.copy_run([last])

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
        progress = SliceProgress()
        source_health = self._bookies.source_health
        while entry_ids:
            reads = assign(entry_ids, progress, self._job, source_health)
            if not reads.entry_ids:
                break
            asked, self._asked = self._asked, NOTHING_ASKED
            checks = _besides(asked, reads.entry_ids)
            result = await self._transfer(
                Transfer(
                    ledger_id=self._job.fragment.ledger_id,
                    digest=self._digest,
                    reads=reads.entry_ids,
                    checks=checks,
                    target=self._job.target,
                    entry_bytes_hint=self._job.entry_bytes_hint,
                    has_alternatives=reads.have_alternatives,
                )
            )
            self._entry_count += result.entry_count
            self._entry_bytes += result.entry_bytes
            failures = result.failures
            if asked:
                # Of a target that failed what was to be written was not all read, either.
                is_read = result.target_error is None
                self._gave_all_asked = is_read and not _refuses(failures, asked)
                failures = _without(failures, checks)
            if failures:  # seldom
                self._suspects |= self._job.others.intersection(_without_good_copy(failures))
            entry_ids = progress.note(failures)
            if result.target_error is not None:
                if not self._may_resume(result.target_error):
                    self._target_error = self._target_error or result.target_error
                    return
                await asyncio.sleep(RESUME_PAUSE_S)
                entry_ids = sorted({*entry_ids, *result.unwritten})
        self._without_copy += progress.without_copy
        self._unknown += progress.unknown

    async def _transfer(self, transfer: Transfer) -> TransferResult:
        if self._job.lac is None:
            return await self._bookies.transfer(transfer)
        return await transfer_replacing_lac(self._bookies, transfer, self._job.lac)

    def _may_resume(self, error: BookmenderError) -> bool:
        """Whether to send the target what it has not acknowledged yet, after a pause."""
        is_worth_it = isinstance(error, BusyError) or self._entry_count >= RESUME_WORTH_ENTRIES
        if not (isinstance(error, UnavailableError) and is_worth_it and self._resumes_left):
            return False
        self._resumes_left -= 1
        return True


def withheld_end(ends: Sequence[int], *, lost: Container[int]) -> Sequence[int]:
    """The end that is not written where entries between them are lost: none where the other is lost
    itself."""
    is_told = any(end in lost for end in ends[:-1])  # it tells of all the rest
    return () if is_told else ends[-1:]


def slices_of(run: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in parts that may be held in memory."""
    for start in range(0, len(run), SLICE_ENTRIES):
        yield array("q", run[start : start + SLICE_ENTRIES])


def _besides(
    asked: ReadPlan, reads: Mapping[BookieId, Sequence[int]]
) -> dict[BookieId, Sequence[int]]:
    """What is asked of each bookie that is not read of it anyway; ids ascend."""
    besides: dict[BookieId, Sequence[int]] = {}
    for bookie, runs in asked.items():
        entry_ids = {entry_id for run in runs for entry_id in run}
        if left := entry_ids.difference(reads.get(bookie, ())):
            besides[bookie] = sorted(left)
    return besides


def _refuses(failures: Failures, asked: ReadPlan) -> bool:
    """Whether any of what was asked was not given."""
    return any(
        entry_id in run
        for bookie, failed in failures.items()
        for entry_id in failed
        for run in asked.get(bookie, ())
    )


def _without_good_copy(failures: Failures) -> Iterator[BookieId]:
    """Who says so itself of any entry."""
    for bookie, answers in failures.items():
        if any(answer is not Answer.UNKNOWN for answer in answers.values()):
            yield bookie


def _without(failures: Failures, checks: Mapping[BookieId, Sequence[int]]) -> Failures:
    """Those of entries that are to be written."""
    return {
        bookie: {e: answer for e, answer in failed.items() if e not in checks.get(bookie, ())}
        for bookie, failed in failures.items()
    }
