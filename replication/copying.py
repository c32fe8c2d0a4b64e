"""Copying the entries of one bookie index of one fragment to a target (``copy_index``).

Only the entries that the index stored are copied, each from a good replica, in bulk. If a replica
does not return an entry, the next one is asked (``assign``). Remaining entries are reported as
without a copy, or as unknown. A ledger of ten million entries is copied slice by slice, so the
memory in use does not grow with it.

``transfer_replacing_lac`` copies entry by entry and rewrites each LAC (rule S12). It serves targets
in the last ensemble of an open ledger. A reader asks these bookies for their last entry, and
believes the LAC in its header. But an entry of an earlier fragment carries an old LAC. So the
header gets a LAC that is known now, and the digest is computed again, as BookKeeper's
LedgerFragmentReplicator does. This is needed only if no other bookie is left, so its speed does not
matter.
"""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct
from prometheus_client import Counter

from ledgers.bookies import Answer, Bookies, SourceHealth, Transfer, TransferResult
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, BusyError, UnavailableError, UnreadableError
from ledgers.model import LAC_NONE, BookieId, Fragment, LedgerMetadata, write_set
from ledgers.quorum import Result
from replication.copy_reader import NOTHING_ASKED, ReadPlan
from replication.entry_runs import EntryRuns


class CopyJob(Struct, frozen=True, kw_only=True):
    """Entries of a fragment that ``target`` must store at bookie index ``index``.

    ``target`` may be the bookie that has this index already (an in-place repair, rule S15).
    ``former``: bookies of the ledger's other ensembles, asked before an entry is reported lost.
    ``lac``: written into the header of each entry (``replace_lac``); None: entries stay unchanged.
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
        """The bookies of the ensemble whose copies this job leaves where they are."""
        return frozenset(self.fragment.ensemble).difference(
            (self.target, self.fragment.ensemble[self.index])
        )

    @property
    def parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """The entries to copy first, and the first and last one, which an in-place repair copies
        afterwards (see ``copy_index``)."""
        if self.target != self.fragment.ensemble[self.index]:
            return self.entry_ids, ()
        return split_ends(self.fragment, self.index, self.entry_ids)


def split_ends(
    fragment: Fragment, index: int, entry_ids: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Split entry ids into those between the first and the last entry of the index, and these two.

    Builds no list, because an empty bookie lacks all entries, and there may be ten million.
    """
    stored = fragment.entries_of(index)
    first, last = stored.first, stored.last
    if first is None or last is None:  # the index stores no entry
        return entry_ids, ()
    ends = [end for end in dict.fromkeys((first, last)) if end in entry_ids]
    if isinstance(entry_ids, EntryRuns):
        return entry_ids.between(first + 1, last - 1), ends
    return entry_ids[bisect_right(entry_ids, first) : bisect_left(entry_ids, last)], ends


class CopyOutcome(Struct, frozen=True, kw_only=True):
    """The result of a copy. ``target_error``: the target failed, so choose another one. Entry ids
    ascend."""

    entry_count: int = 0
    entry_bytes: int = 0
    target_error: BookmenderError | None = None
    without_copy: tuple[int, ...] = ()
    """Entries of which no registered bookie has a good copy; an absent bookie may have one."""
    unknown: tuple[int, ...] = ()
    """Entries for which a registered bookie did not answer."""
    withheld: tuple[int, ...] = ()
    """The first or last entry, if it was not written, so that checks find what is without a copy.
    """
    gave_all_asked: bool = False
    """True if additional reads were asked for, and bookies returned all of them."""
    suspects: frozenset[BookieId] = frozenset()
    """Bookies of the fragment that should have an entry, and do not have a good copy of it."""

    @property
    def is_complete(self) -> bool:
        return self.target_error is None and not self.without_copy and not self.unknown


SOURCE_RUN_ENTRIES = 64
"""Length of a run of entries that is read from one source, if several sources have them:
consecutive entries can be read in batches."""
IDLE_BYTES = 64 * 1024
"""Load of an idle source, so that a slow source is not preferred only because it is idle."""
REPLY_MIN_S = 0.001
"""Sources that reply sooner are equally good."""

History = tuple[tuple[BookieId, Answer], ...]
"""The bookies asked for an entry, in order, and their answers."""


@dataclass(slots=True)
class SliceProgress:
    """The state of the entries of one slice.

    ``tried``: the history of each entry that no source has given yet. Entries with equal histories
    share one object.
    """

    tried: dict[int, History] = field(default_factory=dict)
    without_copy: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def note(self, failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[int]:
        """Record failed reads. Returns the failed entries, to be assigned to other sources."""
        shared: dict[History, History] = {}
        for bookie, answers in failures.items():
            for entry_id, answer in answers.items():
                history = (*self.tried.get(entry_id, ()), (bookie, answer))
                self.tried[entry_id] = shared.setdefault(history, history)
        return sorted({entry_id for answers in failures.values() for entry_id in answers})


class Reads(Struct, frozen=True, kw_only=True):
    """The entries to read next from each bookie; ids ascend."""

    entry_ids: Mapping[BookieId, Sequence[int]]
    have_alternatives: bool
    """True if another bookie remains to be asked for each of them."""


def assign(
    entry_ids: Sequence[int],
    progress: SliceProgress,
    job: CopyJob,
    source_health: Callable[[BookieId], SourceHealth],
) -> Reads:
    """Decide which bookie to ask for each entry next. Entries without a source left are recorded in
    ``progress``.

    Each run of entries goes to the source with the least load; a source that failed lately only if
    there is no other.
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
        for sources, ids in to_ask:  # alternate, so that all groups share the load evenly
            if run := ids[start : start + SOURCE_RUN_ENTRIES]:
                source = loads.pick(sources, len(run))
                reads.setdefault(source, []).append(run)
    return Reads(
        entry_ids={source: _joined(runs) for source, runs in reads.items()},
        have_alternatives=have_alternatives,
    )


def _joined(runs: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return all ids, ascending. Small ledgers have only one run."""
    if len(runs) == 1:
        return runs[0]
    return array("q", sorted(chain.from_iterable(runs)))


_PROVES_NOTHING = frozenset({Answer.UNKNOWN, Answer.UNREADABLE})
"""Answers after which the bookie may still have the entry (rule S5)."""


def _groups(
    entry_ids: Sequence[int], progress: SliceProgress, job: CopyJob
) -> Mapping[tuple[int, History], Sequence[int]]:
    """Group the entries by write set and history, which decide their possible sources.

    Entries at a distance of the ensemble size have the same write set; if it equals the write
    quorum, all have.
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
    """Return the possible sources of an entry, and whether this is the last chance to read it.

    The order: other replicas; the bookie that is being replaced, if it is registered (its other
    entries may be good); former bookies of the ledger. At the end, the first bookie that did not
    answer is asked once more, because its first timeout was short.
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
    """The load of each source, including what is being assigned to it."""

    def __init__(
        self, source_health: Callable[[BookieId], SourceHealth], *, entry_bytes: int
    ) -> None:
        self._source_health = source_health
        self._entry_bytes = entry_bytes
        self._known: dict[BookieId, SourceHealth] = {}
        self._assigned_bytes: dict[BookieId, int] = {}

    def pick(self, sources: Sequence[BookieId], count: int) -> BookieId:
        """Return the least loaded source and add ``count`` entries to its load. The first of
        equals."""
        source = min(sources, key=self._load) if len(sources) > 1 else sources[0]
        self._assigned_bytes[source] = self._assigned_to(source) + count * self._entry_bytes
        return source

    def _load(self, bookie: BookieId) -> tuple[bool, float]:
        if bookie not in self._known:
            self._known[bookie] = self._source_health(bookie)
        source_health = self._known[bookie]
        waiting_bytes = source_health.waiting_bytes + self._assigned_to(bookie) + IDLE_BYTES
        return source_health.is_unhealthy, waiting_bytes * max(source_health.reply_s, REPLY_MIN_S)

    def _assigned_to(self, bookie: BookieId) -> int:
        return self._assigned_bytes.get(bookie, 0)


def _replicas(entry_id: int, job: CopyJob) -> list[BookieId]:
    """Return the registered bookies of the entry's write set, without the index of this job."""
    fragment = job.fragment
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    bookies = (fragment.ensemble[index] for index in indexes if index != job.index)
    return [bookie for bookie in bookies if bookie in job.available]


COPIES_AT_ONCE = 64
"""Entries in flight, each read and then written."""


def lac_for_copies(metadata: LedgerMetadata) -> int:
    """Return the LAC for the headers of copies: one less than the last segment proves.

    The writer of the last segment had all entries before its first one acknowledged. A recovery by
    Java takes the ledger's length from the header with the greatest LAC, but the length in a copy's
    header belongs to an earlier entry. With this LAC, a recovery must read one more acknowledged
    entry, and uses the length of that one.
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
    """Do what ``Bookies.transfer`` to a target does, but rewrite the LAC of each entry."""
    copying = _EntryByEntryTransfer(bookies, transfer, lac)
    await copying.run()
    return copying.result


class _EntryByEntryTransfer:
    def __init__(self, bookies: Bookies, transfer: Transfer, lac: int) -> None:
        assert transfer.target is not None, transfer.ledger_id
        self._bookies, self._transfer, self._lac = bookies, transfer, lac
        self._target = transfer.target
        self._slots = asyncio.Semaphore(COPIES_AT_ONCE)
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
        """Return a good copy, or None after recording the failure."""
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


COPY_FAILURES = Counter(
    "bookmender_copy_failures_total",
    "Failures while copying, by kind: entries that a source does not store (absent), holds damaged "
    "(mismatch), cannot read (unreadable) or did not answer for (unknown), and requests to a "
    "target that failed (target).",
    ["kind"],
)
_READ_FAILED: Mapping[Answer, Counter] = {
    answer: COPY_FAILURES.labels(kind=answer.value)
    for answer in Answer
    if answer is not Answer.PRESENT
}
_TARGET_FAILED = COPY_FAILURES.labels(kind="target")

SLICE_ENTRIES = 2_048
SLICES_AT_ONCE = 2
"""Two slices overlap, so that the last replies of one do not delay the next."""
LACKING_MAX = 100_000
"""A copy that lacks more entries is given up."""
RESUMES_MAX = 3
RESUME_PAUSE_S = 0.5
RESUME_WORTH_ENTRIES = SLICE_ENTRIES
"""After so many acknowledged entries, a target whose connection broke is tried again instead of
another one from the beginning. Its registration is compared before the metadata is written (rule
S3)."""

Failures = Mapping[BookieId, Mapping[int, Answer]]
"""Failed reads by source and entry, as in ``TransferResult``."""


async def copy_index(
    job: CopyJob, *, bookies: Bookies, digest: EntryDigest, asked: ReadPlan = NOTHING_ASKED
) -> CopyOutcome:
    """Copy every entry of which a good copy exists.

    A check, ours or Java's, reads the first and the last entry of an index. If an in-place repair
    (rule S15) wrote these early, an incomplete index would look complete:

    1. A repair writes the first and the last entry, and stops: an entry between them is missing.
    2. The next worker reads only those two, finds no fault, and deletes the mark.

    So an in-place repair writes these two ends last:

    - none of them while an entry between them may still be read (a replica did not answer);
    - both when all entries between them are stored;
    - all but one when entries between them have no copy anywhere. That may stay so for ever, so
      only one entry is withheld. If the other end is itself lost, none is withheld: its absence
      makes checks read the rest.

    ``asked``: reads to add to the first transfer.
    """
    copy = _Copy(job, bookies, digest, asked)
    inner, ends = job.parts
    await copy.copy_run(inner)
    if ends and not copy.is_cut_short:
        await copy.copy_ends(ends)
    return copy.outcome


class _Copy:
    """One copy in progress, slice by slice."""

    def __init__(
        self, job: CopyJob, bookies: Bookies, digest: EntryDigest, asked: ReadPlan
    ) -> None:
        self._job, self._bookies, self._digest = job, bookies, digest
        self._asked = asked
        """Additional reads that have not been sent yet."""
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
        """True if entries were not written although a good copy of them may exist."""
        return self._is_hopeless or bool(self._unknown)

    async def copy_ends(self, ends: Sequence[int]) -> None:
        """Copy the first and the last entry, after all entries between them."""
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
        """True if there is no point in going on."""
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
                # If the target failed, not all reads were sent.
                is_read = result.target_error is None
                self._gave_all_asked = is_read and not _refuses(failures, asked)
                failures = _without(failures, checks)
            if failures:  # seldom
                _count_failures(failures)
                self._suspects |= self._job.others.intersection(_without_good_copy(failures))
            entry_ids = progress.note(failures)
            if result.target_error is not None:
                _TARGET_FAILED.inc()
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
        """Return True if the target should be tried again after a pause."""
        is_worth_it = isinstance(error, BusyError) or self._entry_count >= RESUME_WORTH_ENTRIES
        if not (isinstance(error, UnavailableError) and is_worth_it and self._resumes_left):
            return False
        self._resumes_left -= 1
        return True


def withheld_end(ends: Sequence[int], *, lost: Container[int]) -> Sequence[int]:
    """Return the end to withhold when entries between the ends are lost; none if the other end is
    lost itself."""
    is_told = any(end in lost for end in ends[:-1])  # its absence makes checks read the rest
    return () if is_told else ends[-1:]


def slices_of(run: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the ids in parts that fit into memory."""
    for start in range(0, len(run), SLICE_ENTRIES):
        yield array("q", run[start : start + SLICE_ENTRIES])


def _besides(
    asked: ReadPlan, reads: Mapping[BookieId, Sequence[int]]
) -> dict[BookieId, Sequence[int]]:
    """Return the additional reads that the transfer does not contain already; ids ascend."""
    besides: dict[BookieId, Sequence[int]] = {}
    for bookie, runs in asked.items():
        entry_ids = {entry_id for run in runs for entry_id in run}
        if left := entry_ids.difference(reads.get(bookie, ())):
            besides[bookie] = sorted(left)
    return besides


def _count_failures(failures: Failures) -> None:
    for answers in failures.values():
        for answer in answers.values():
            _READ_FAILED[answer].inc()


def _refuses(failures: Failures, asked: ReadPlan) -> bool:
    """Return True if any of the additional reads failed."""
    return any(
        entry_id in run
        for bookie, failed in failures.items()
        for entry_id in failed
        for run in asked.get(bookie, ())
    )


def _without_good_copy(failures: Failures) -> Iterator[BookieId]:
    """Yield the bookies that gave an answer other than unknown for any entry."""
    for bookie, answers in failures.items():
        if any(answer is not Answer.UNKNOWN for answer in answers.values()):
            yield bookie


def _without(failures: Failures, checks: Mapping[BookieId, Sequence[int]]) -> Failures:
    """Return the failures without those of additional reads."""
    return {
        bookie: {e: answer for e, answer in failed.items() if e not in checks.get(bookie, ())}
        for bookie, failed in failures.items()
    }
