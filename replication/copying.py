"""Makes the copies of a plan (``Copier``), each of the entries of one bookie index of one fragment.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import structlog
from msgspec import Struct
from msgspec.structs import asdict
from prometheus_client import Counter as Metric

from ledgers.bookies import LAST_ENTRY, Answer, Bookies, SourceHealth, Transfer, TransferResult
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    BusyError,
    RejectedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.model import LAC_NONE, BookieId, LedgerMetadata, write_set
from ledgers.quorum import Result
from replication.copy_reader import NOTHING_ASKED, ReadPlan
from replication.entry_runs import EntryRuns
from replication.inspection import Inspection
from replication.plan import Plan, Repair
from replication.targets import Refusals, TargetSelector

log = structlog.get_logger()
REPAIRED_ENTRIES = Metric(
    "bookmender_repaired_entries_total", "Entries copied to their new bookie and acknowledged."
)
REPAIRED_BYTES = Metric(
    "bookmender_repaired_bytes_total", "Stored bytes of the copied entries, headers included."
)
REPAIRED_PAYLOAD_BYTES = Metric(
    "bookmender_repaired_payload_bytes_total",
    "Payload bytes of the copied entries, in the unit of bookmender_missing_copies_bytes.",
)
COPY_FAILURES = Metric(
    "bookmender_copy_failures_total",
    "Failures while copying, by kind: entries that a source does not store (absent), holds damaged "
    "(mismatch), cannot read (unreadable) or did not answer for (unknown), and requests to a "
    "target that failed (target).",
    ["kind"],
)
_READ_FAILED: Mapping[Answer, Metric] = {
    answer: COPY_FAILURES.labels(kind=answer.value)
    for answer in Answer
    if answer is not Answer.PRESENT
}
_TARGET_FAILED = COPY_FAILURES.labels(kind="target")


# --- All copies of a plan -------------------------------------------------------------------------


@dataclass(eq=False)
class Copier:
    """Makes copies for many ledgers at once. One for each worker."""

    bookies: Bookies
    target_selector: TargetSelector
    refusals: Refusals = field(default_factory=Refusals)

    async def copy_all(
        self, plan: Plan, inspection: Inspection, *, asked: ReadPlan = NOTHING_ASKED
    ) -> "list[CopyOutcome]":
        """``asked``: what to ask with the first copy (``CopyOutcome.gave_all_asked``)."""
        copies = [
            self._copy(repair, inspection, NOTHING_ASKED if rank else asked)
            for rank, repair in enumerate(plan.repairs)
        ]
        with ExitStack() as under_way:  # all at once: the next ledger is planned in this very turn
            for repair in plan.repairs:
                under_way.enter_context(
                    self.target_selector.under_way(repair.target, repair.byte_count)
                )
            if len(copies) == 1:  # nearly always, and worth a task saved
                outcomes = [await copies[0]]
            else:
                outcomes = await asyncio.gather(*copies)
            for repair, outcome in zip(plan.repairs, outcomes, strict=True):
                self.target_selector.landed(repair.target, outcome.entry_bytes)
            return outcomes

    async def _copy(self, repair: Repair, inspection: Inspection, asked: ReadPlan) -> "CopyOutcome":
        view, digest, metadata = inspection.view, inspection.digest, inspection.metadata
        job = CopyJob(
            **asdict(repair),
            available=view.available,
            former=tuple(sorted(metadata.bookies - set(repair.fragment.ensemble))),
            entry_bytes_hint=inspection.entry_bytes,
            lac=lac_for_copies(metadata) if repair.rewrites_lac else None,
        )
        last_entry = await self._last_entry(repair, inspection) if repair.rewrites_lac else None
        outcome = await copy_index(job, bookies=self.bookies, digest=digest, asked=asked)
        if last_entry is not None:
            # Add the target's own last entry again, byte for byte, so that its write cache holds
            # it.
            try:
                await self.bookies.add(
                    repair.target, last_entry, master_key=digest.master_key, is_recovery=True
                )
            except BookmenderError as error:  # the next flush shows it
                log.debug("copy.last_entry_hidden", bookie=repair.target, error=str(error))
        REPAIRED_ENTRIES.inc(outcome.entry_count)
        REPAIRED_BYTES.inc(outcome.entry_bytes)
        REPAIRED_PAYLOAD_BYTES.inc(
            outcome.entry_bytes - outcome.entry_count * digest.overhead_bytes
        )
        if outcome.target_error is not None:
            if isinstance(outcome.target_error, RejectedError):  # it will say the same again
                self.refusals.note(inspection.ledger_id, repair.target, view)
            log.warning(
                "copy.refused",
                ledger_id=inspection.ledger_id,
                bookie=repair.target,
                error=str(outcome.target_error),
            )
        return outcome

    async def _last_entry(self, repair: Repair, inspection: Inspection) -> bytes | None:
        """Read the last entry of a target that belongs to the last ensemble of an open
        ledger, before it gets copies.

        A bookie answers a last-entry read from its write cache, if that holds any entry of the
        ledger. So copies of earlier entries hide later ones until the next flush:

        1. The writer adds entry 20 to the target, and the target flushes it.
        2. We copy entry 5 to the target. A last-entry read now returns entry 5.
        3. A reader, or a recovery by Java, which asks for the last entry, learns too small a LAC
           from the target.

        None: it has no entry, or did not answer. Then there is nothing to hide, or its next flush
        shows it.
        """
        try:
            entry = await self.bookies.read(repair.target, inspection.ledger_id, LAST_ENTRY)
        except BookmenderError:
            return None
        digest, ledger_id = inspection.digest, inspection.ledger_id
        return entry if digest.is_good(entry, ledger_id=ledger_id, entry_id=LAST_ENTRY) else None


# --- One copy -------------------------------------------------------------------------------------


class CopyJob(Repair, frozen=True, kw_only=True):
    """One copy of a plan, and where its entries may be read.

    ``former``: bookies of the ledger's other ensembles, asked before an entry is reported lost.
    ``lac``: written into the header of each entry (``replace_lac``); None: entries stay unchanged.
    """

    available: frozenset[BookieId]
    former: tuple[BookieId, ...] = ()
    entry_bytes_hint: int = 1024
    lac: int | None = None

    @property
    def others(self) -> frozenset[BookieId]:
        """The bookies of the ensemble whose copies this job leaves where they are."""
        return frozenset(self.fragment.ensemble).difference((self.target, self.replaced))

    @property
    def parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """The entries to copy first, and the first and last one, which an in-place repair copies
        afterwards (see ``copy_index``).

        Builds no list, because an empty bookie lacks all entries, and there may be ten million.
        """
        entry_ids, stored = self.entry_ids, self.fragment.entries_of(self.index)
        first, last = stored.first, stored.last
        if not self.is_in_place or first is None or last is None:
            return entry_ids, ()
        ends = [end for end in dict.fromkeys((first, last)) if end in entry_ids]
        if isinstance(entry_ids, EntryRuns):
            return entry_ids.between(first + 1, last - 1), ends
        return entry_ids[bisect_right(entry_ids, first) : bisect_left(entry_ids, last)], ends


class CopyOutcome(Struct, kw_only=True):
    """The result of a copy, or what is known so far while it is made. ``target_error``: the target
    failed, so choose another one. Entry ids ascend at the end."""

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
    outcome = copy.outcome
    inner, ends = job.parts
    await copy.copy_run(inner)
    if ends and not copy.is_cut_short:
        *others, last = ends
        are_inner_lost = bool(outcome.without_copy)
        await copy.copy_run(others if are_inner_lost else ends)
        if are_inner_lost and not copy.is_cut_short:
            if any(end in outcome.without_copy for end in others):
                await copy.copy_run([last])
            else:
                outcome.withheld = (last,)
    outcome.without_copy = tuple(sorted(outcome.without_copy))
    outcome.unknown = tuple(sorted(outcome.unknown))
    return outcome


@dataclass(slots=True)
class _Copy:
    """One copy in progress, slice by slice. ``asked``: additional reads that were not sent yet."""

    job: CopyJob
    bookies: Bookies
    digest: EntryDigest
    asked: ReadPlan
    outcome: CopyOutcome = field(default_factory=CopyOutcome)
    resumes_left: int = RESUMES_MAX

    @property
    def is_hopeless(self) -> bool:
        """True if there is no point in going on."""
        lacking_count = len(self.outcome.without_copy) + len(self.outcome.unknown)
        return self.outcome.target_error is not None or lacking_count > LACKING_MAX

    @property
    def is_cut_short(self) -> bool:
        """True if entries were not written although a good copy of them may exist."""
        return self.is_hopeless or bool(self.outcome.unknown)

    async def copy_run(self, run: Sequence[int]) -> None:
        if len(run) <= SLICE_ENTRIES:  # nearly always, and worth a task saved
            await self._copy_slice(array("q", run))
            return
        starts = range(0, len(run), SLICE_ENTRIES)
        slices = (array("q", run[start : start + SLICE_ENTRIES]) for start in starts)

        async def copy_slices() -> None:
            for entry_ids in slices:
                await self._copy_slice(entry_ids)
                if self.is_hopeless:
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(SLICES_AT_ONCE):
                tasks.create_task(copy_slices())

    async def _copy_slice(self, entry_ids: Sequence[int]) -> None:
        job, total, tried, lacking = self.job, self.outcome, Tried(), CopyOutcome()
        while entry_ids:
            reads, have_alternatives = assign(
                entry_ids, tried, job, self.bookies.source_health, lacking
            )
            if not reads:
                break
            asked, self.asked = self.asked, NOTHING_ASKED
            checks = _besides(asked, reads)
            transfer = Transfer(
                ledger_id=job.fragment.ledger_id,
                digest=self.digest,
                reads=reads,
                checks=checks,
                target=job.target,
                entry_bytes_hint=job.entry_bytes_hint,
                has_alternatives=have_alternatives,
            )
            if job.lac is None:
                result = await self.bookies.transfer(transfer)
            else:
                result = await transfer_replacing_lac(self.bookies, transfer, job.lac)
            total.entry_count += result.entry_count
            total.entry_bytes += result.entry_bytes
            failures = result.failures
            if asked:
                # If the target failed, not all reads were sent.
                is_read = result.target_error is None
                total.gave_all_asked = is_read and not _refuses(failures, asked)
                failures = {
                    bookie: {e: a for e, a in failed.items() if e not in checks.get(bookie, ())}
                    for bookie, failed in failures.items()
                }
            entry_ids = tried.note(failures)
            for bookie, answers in failures.items():  # seldom
                for answer in answers.values():
                    _READ_FAILED[answer].inc()
                if bookie in job.others and set(answers.values()) - {Answer.UNKNOWN}:
                    total.suspects |= {bookie}
            if (error := result.target_error) is not None:
                _TARGET_FAILED.inc()
                is_worth_it = (
                    isinstance(error, BusyError) or total.entry_count >= RESUME_WORTH_ENTRIES
                )
                if not (isinstance(error, UnavailableError) and is_worth_it and self.resumes_left):
                    total.target_error = total.target_error or error
                    return
                self.resumes_left -= 1
                await asyncio.sleep(RESUME_PAUSE_S)
                entry_ids = sorted({*entry_ids, *result.unwritten})
        total.without_copy += lacking.without_copy
        total.unknown += lacking.unknown


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


def _refuses(failures: Mapping[BookieId, Mapping[int, Answer]], asked: ReadPlan) -> bool:
    """Return True if any of the additional reads failed."""
    return any(
        entry_id in run
        for bookie, failed in failures.items()
        for entry_id in failed
        for run in asked.get(bookie, ())
    )


# --- Sources --------------------------------------------------------------------------------------

SOURCE_RUN_ENTRIES = 64
"""Length of a run of entries that is read from one source, if several sources have them:
consecutive entries can be read in batches."""
IDLE_BYTES = 64 * 1024
"""Load of an idle source, so that a slow source is not preferred only because it is idle."""
REPLY_MIN_S = 0.001
"""Sources that reply sooner are equally good."""

_PROVES_NOTHING = frozenset({Answer.UNKNOWN, Answer.UNREADABLE})
"""Answers after which the bookie may still have the entry (rule S5)."""

History = tuple[tuple[BookieId, Answer], ...]
"""The bookies asked for an entry, in order, and their answers."""


class Tried(dict[int, History]):
    """The history of each entry that no source has given yet. Equal histories are one object."""

    def note(self, failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[int]:
        """Record failed reads. Returns the failed entries, to be assigned to other sources."""
        shared: dict[History, History] = {}
        for bookie, answers in failures.items():
            for entry_id, answer in answers.items():
                history = (*self.get(entry_id, ()), (bookie, answer))
                self[entry_id] = shared.setdefault(history, history)
        return sorted({entry_id for answers in failures.values() for entry_id in answers})


def assign(
    entry_ids: Sequence[int],
    tried: Mapping[int, History],
    job: CopyJob,
    source_health: Callable[[BookieId], SourceHealth],
    lacking: CopyOutcome,
) -> tuple[dict[BookieId, Sequence[int]], bool]:
    """Decide which bookie to ask for each entry next.

    Returns the entries to read from each bookie, ascending, and True if another bookie remains to
    be asked for each of them. Entries without a source left are added to ``lacking``. Each run of
    entries goes to the source with the least load; a source that failed lately only if there is no
    other.
    """
    health_of, assigned = cache(source_health), Counter[BookieId]()

    def load(bookie: BookieId) -> tuple[bool, float]:
        health = health_of(bookie)
        waiting_bytes = health.waiting_bytes + assigned[bookie] * job.entry_bytes_hint + IDLE_BYTES
        return health.is_unhealthy, waiting_bytes * max(health.reply_s, REPLY_MIN_S)

    have_alternatives = True
    to_ask: list[tuple[Sequence[BookieId], Sequence[int]]] = []
    for (residue, history), ids in _groups(entry_ids, tried, job).items():
        sources, is_last_chance = _sources(residue, history, job)
        if sources:
            to_ask.append((sources, ids))
            have_alternatives &= not is_last_chance
        elif any(answer in _PROVES_NOTHING for _, answer in history):
            lacking.unknown += tuple(ids)
        else:
            lacking.without_copy += tuple(ids)
    reads: dict[BookieId, list[Sequence[int]]] = {}
    for start in range(0, len(entry_ids), SOURCE_RUN_ENTRIES):
        for sources, ids in to_ask:  # alternate, so that all groups share the load evenly
            if run := ids[start : start + SOURCE_RUN_ENTRIES]:
                source = min(sources, key=load) if len(sources) > 1 else sources[0]
                assigned[source] += len(run)
                reads.setdefault(source, []).append(run)
    return {
        source: runs[0] if len(runs) == 1 else array("q", sorted(chain.from_iterable(runs)))
        for source, runs in reads.items()
    }, have_alternatives


def _groups(
    entry_ids: Sequence[int], tried: Mapping[int, History], job: CopyJob
) -> Mapping[tuple[int, History], Sequence[int]]:
    """Group the entries by write set and history, which decide their possible sources.

    Entries at a distance of the ensemble size have the same write set; if it equals the write
    quorum, all have.
    """
    size = job.fragment.ensemble_size
    write_sets = 1 if size == job.fragment.write_quorum else size
    if write_sets == 1 and not tried:
        return {(0, ()): entry_ids}
    groups: dict[tuple[int, History], array[int]] = {}
    for entry_id in entry_ids:
        key = (entry_id % write_sets, tried.get(entry_id, ()))
        groups.setdefault(key, array("q")).append(entry_id)
    return groups


def _sources(entry_id: int, history: History, job: CopyJob) -> tuple[Sequence[BookieId], bool]:
    """Return the possible sources of an entry, and whether this is the last chance to read it.

    The order: other replicas; the bookie that is being replaced, if it is registered (its other
    entries may be good); former bookies of the ledger. At the end, the first bookie that did not
    answer is asked once more, because its first timeout was short.
    """
    fragment, tried = job.fragment, {bookie for bookie, _ in history}
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    members = (fragment.ensemble[index] for index in indexes if index != job.index)
    replicas = [bookie for bookie in members if bookie in job.available and bookie not in tried]
    others = [
        bookie
        for bookie in (job.replaced, *job.former)
        if bookie in job.available and bookie not in tried and bookie != job.target
    ]
    if replicas:
        turn = fragment.ledger_id % len(replicas)
        return [*replicas[turn:], *replicas[:turn]], len(replicas) + len(others) == 1
    if others:
        return others[:1], len(others) == 1
    silent = [bookie for bookie, answer in history if answer is Answer.UNKNOWN]
    is_first_time = len(history) == len(tried) > 1
    return (silent[:1] if is_first_time else []), True


# --- Copies with another LAC ----------------------------------------------------------------------

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
    ledger_id, digest, target = transfer.ledger_id, transfer.digest, transfer.target
    assert target is not None, ledger_id
    slots = asyncio.Semaphore(COPIES_AT_ONCE)
    failures: dict[BookieId, dict[int, Answer]] = defaultdict(dict)
    unwritten: set[int] = set()
    target_error: BookmenderError | None = None
    entry_count = entry_bytes = 0

    async def copy(source: BookieId, entry_id: int, *, is_written: bool) -> None:
        nonlocal target_error, entry_count, entry_bytes
        if target_error is not None:
            unwritten.add(entry_id)
            return
        try:
            entry = await bookies.read(source, ledger_id, entry_id)
            digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
        except UnreadableError:
            failures[source][entry_id] = Answer.UNREADABLE
            return
        except BookmenderError as error:
            failures[source][entry_id] = Result[bytes](error=error).answer
            return
        if not is_written:
            return
        try:
            await bookies.add(
                target,
                replace_lac(entry, lac, digest),
                master_key=digest.master_key,
                is_recovery=True,
            )
        except BookmenderError as error:
            target_error = target_error or error
            unwritten.add(entry_id)
        else:
            entry_count += 1
            entry_bytes += len(entry)

    async with asyncio.TaskGroup() as tasks:
        for asked, is_written in ((transfer.reads, True), (transfer.checks, False)):
            for source, entry_ids in asked.items():
                for entry_id in entry_ids:
                    await slots.acquire()
                    task = tasks.create_task(copy(source, entry_id, is_written=is_written))
                    task.add_done_callback(lambda _: slots.release())
    return TransferResult(
        entry_count=entry_count,
        entry_bytes=entry_bytes,
        failures=failures,
        unwritten=frozenset(unwritten),
        target_error=target_error,
    )
