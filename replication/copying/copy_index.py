"""Copying the entries of one bookie index of one fragment to a target.

Just the entries that the index stored are copied, each from any good replica, in bulk. An entry
that one replica did not give is asked of the next (``sources``). What remains in the end is said
entry by entry: without a copy, or unknown. A ledger of ten million entries is copied slice by
slice; what is held at a time does not grow with it.
"""

import asyncio
from array import array
from collections.abc import Container, Iterator, Mapping, Sequence

from ledgers.bookies import Answer, Bookies, Transfer, TransferResult
from ledgers.entry import EntryDigest
from ledgers.errors import BookmenderError, BusyError, UnavailableError
from ledgers.metadata import BookieId
from replication.copying.copy_job import CopyJob, CopyOutcome
from replication.copying.sources import SliceProgress, assign
from replication.copying.with_lac import transfer_with_lac
from replication.planning.questions import NOTHING_ASKED, Questions

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
    job: CopyJob, *, bookies: Bookies, digest: EntryDigest, asked: Questions = NOTHING_ASKED
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
        self, job: CopyJob, bookies: Bookies, digest: EntryDigest, asked: Questions
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
        self._bad_sources: set[BookieId] = set()
        self._kept_back: Sequence[int] = ()

    @property
    def outcome(self) -> CopyOutcome:
        return CopyOutcome(
            entry_count=self._entry_count,
            entry_bytes=self._entry_bytes,
            target_error=self._target_error,
            without_copy=tuple(sorted(self._without_copy)),
            unknown=tuple(sorted(self._unknown)),
            kept_back=tuple(self._kept_back),
            gave_all_asked=self._gave_all_asked,
            bad_sources=frozenset(self._bad_sources),
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
        self._kept_back = kept_back_of(ends, lost=self._without_copy)
        if not self._kept_back:
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
        standing = self._bookies.standing
        while entry_ids:
            reads = assign(entry_ids, progress, self._job, standing)
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
                self._bad_sources |= self._job.others.intersection(_without_good_copy(failures))
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
        return await transfer_with_lac(self._bookies, transfer, self._job.lac)

    def _may_resume(self, error: BookmenderError) -> bool:
        """Whether to send the target what it has not acknowledged yet, after a pause."""
        is_worth_it = isinstance(error, BusyError) or self._entry_count >= RESUME_WORTH_ENTRIES
        if not (isinstance(error, UnavailableError) and is_worth_it and self._resumes_left):
            return False
        self._resumes_left -= 1
        return True


def kept_back_of(ends: Sequence[int], *, lost: Container[int]) -> Sequence[int]:
    """The end that is not written where entries between them are lost: none where the other is lost
    itself."""
    is_told = any(end in lost for end in ends[:-1])  # it tells of all the rest
    return () if is_told else ends[-1:]


def slices_of(run: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in parts that may be held in memory."""
    for start in range(0, len(run), SLICE_ENTRIES):
        yield array("q", run[start : start + SLICE_ENTRIES])


def _besides(
    asked: Questions, reads: Mapping[BookieId, Sequence[int]]
) -> dict[BookieId, Sequence[int]]:
    """What is asked of each bookie that is not read of it anyway; ids ascend."""
    besides: dict[BookieId, Sequence[int]] = {}
    for bookie, runs in asked.items():
        entry_ids = {entry_id for run in runs for entry_id in run}
        if left := entry_ids.difference(reads.get(bookie, ())):
            besides[bookie] = sorted(left)
    return besides


def _refuses(failures: Failures, asked: Questions) -> bool:
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
