"""A run of fsck: plans once, checks each part, and rechecks what seemed wrong.

The driver writes the results, part by part, to its own folder, so executors need no shared file
system. What is written is final. After a kill, the next call with the same name continues the run.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.budget import BeginPace, FixedPace, SharedPace
from auditor.fsck.ledger_list import estimate_work, is_estimated, list_ledger_ids
from auditor.fsck.options import FeedChanges, FsckJob, FsckOptions, FsckProgress, Level, OnProgress
from auditor.fsck.results.checked import (
    VERDICT_COLUMNS,
    after_run,
    doubtful_ledgers,
    read_checked,
    without,
    write_checked,
    wrong_among,
)
from auditor.fsck.results.plan import (
    PART_MAX,
    cut_by_work,
    ledgers_to_estimate,
    plan_rows,
    with_work,
)
from auditor.fsck.results.positions import ClientPosition, keep_position
from auditor.fsck.results.rows import SCHEMA, counts_of
from auditor.fsck.results.run_folder import PartCounts, RunFolder
from auditor.fsck.results.summary import Counts, Summary, write_summary
from auditor.fsck.tasks import ROWS, Check, FirstCheck, Recheck, Work, check_work, hide_pandas
from ledgers.errors import UnauthorizedError

HIDDEN_MAX = 20
"""Hidden directories that a summary names."""
RECHECK_TASK_LEDGERS = 500
"""Approximate number of ledgers in one task of the recheck."""

T = TypeVar("T")
C = TypeVar("C", bound=Check)


class Dispatch(Protocol):
    """Runs tasks: on Spark (``spark.dispatch``), or in this process."""

    @property
    def slot_count(self) -> int:
        """The number of tasks that can run at once; at least 1."""
        ...

    def warmed_up(self, work: Work) -> AbstractContextManager[None]:
        """Prepare during the block for tasks that need what ``work`` needs."""
        ...

    def results(
        self, tasks: Iterable[T], work: Callable[[Sequence[T]], Work], schema: pa.Schema
    ) -> Generator[tuple[Sequence[T], pa.Table], None, None]:
        """Yield tasks with their rows, as they complete. The caller closes the generator. Raises
        UnavailableError."""
        ...


class InThisProcess:
    """Runs one task at a time in this process. For a few ledgers, Spark would only start."""

    slot_count = 1

    def warmed_up(self, work: Work) -> AbstractContextManager[None]:
        return nullcontext()

    def results(
        self, tasks: Iterable[T], work: Callable[[Sequence[T]], Work], schema: pa.Schema
    ) -> Generator[tuple[Sequence[T], pa.Table], None, None]:
        hide_pandas()
        for task in tasks:
            yield [task], pa.Table.from_batches(work([task])(0), schema)


WORK_HERE_MAX = 100_000
"""The most copies that a run reads without Spark. They take about as long as Spark's start."""


def fits_in_this_process(options: FsckOptions, job: FsckJob) -> bool:
    """Return True if a run that checks only changes has so little to read that Spark is not worth
    its start. Raises UnavailableError, SettingsError."""
    folder = RunFolder(job.output, job.run)
    if job.changes is None or job.changes.is_whole:
        return False
    if folder.is_begun:
        plan = folder.plan
        return plan.ledger_count <= PART_MAX[options.level] and plan.work <= WORK_HERE_MAX
    checked = read_checked(folder.state)
    ledger_ids = ledgers_to_check(job.changes, checked, options.level)
    if len(ledger_ids) > PART_MAX[options.level] or not is_estimated(options.level):
        return len(ledger_ids) <= PART_MAX[options.level]
    return sum(asyncio.run(estimate_work(options, ledger_ids))) <= WORK_HERE_MAX


def run_fsck(
    dispatch: Dispatch, options: FsckOptions, job: FsckJob, on_progress: OnProgress
) -> Summary:
    """Check every ledger, or what changed (``job.changes``). Write the results to ``job.output``,
    and return the summary.

    Continues the run of this name if it was begun there (``unfinished_runs``). Raises
    SettingsError, also if that run had other options; UnavailableError if the run was interrupted
    and can be continued.
    """
    folder = RunFolder(job.output, job.run)
    if folder.is_begun:
        folder.check_options(options, client=job.client)
        job = replace(job, changes=folder.changes)
    with dispatch.warmed_up(check_work([], options, FixedPace)):  # the first tasks wait in Spark
        if not folder.is_begun:
            _begin(folder, options, job, dispatch, on_progress)
        run = _Run(folder, options, job, dispatch, on_progress)
        run.check()
    run.recheck()
    return run.end()


def _begin(
    folder: RunFolder,
    options: FsckOptions,
    job: FsckJob,
    dispatch: Dispatch,
    on_progress: OnProgress,
) -> None:
    """Find the ledgers once, and store which part each belongs to."""
    started_ms = _now_ms()
    checked = read_checked(folder.state)
    hidden: list[str] = []
    if job.changes is None or job.changes.is_whole:
        ledger_ids = _listed(options, on_progress, hidden)
    else:
        ledger_ids = ledgers_to_check(job.changes, checked, options.level)
    rows = plan_rows(ledger_ids, checked, options, job, now_ms=started_ms)
    if is_estimated(options.level):
        rows = _estimated(rows, options, on_progress)
    parts = cut_by_work(rows, options, job, slot_count=dispatch.slot_count)
    folder.begin(parts, options, started_ms=started_ms, changes=job.changes, hidden=hidden)


def ledgers_to_check(changes: FeedChanges, checked: pa.Table, level: Level) -> "array[int]":
    """Return the changed ledgers that exist, and those that were wrong or unknown when they were
    last checked. Ascending."""
    doubtful = doubtful_ledgers(checked, level).to_pylist()
    return array("q", sorted({*changes.existing, *doubtful}.difference(changes.deleted)))


def _listed(options: FsckOptions, on_progress: OnProgress, hidden: list[str]) -> "array[int]":
    """Return the ledgers of the cluster. Adds the first directories that ACLs hide to ``hidden``:
    one of them does not stop the check of all other ledgers."""

    def on_hidden(error: UnauthorizedError) -> None:
        if len(hidden) < HIDDEN_MAX:
            hidden.append(str(error.context["path"]))

    def on_listed(count: int) -> None:
        on_progress(FsckProgress(phase="listing", ledgers_done=count))

    return asyncio.run(
        list_ledger_ids(
            options.metadata_service_uri,
            options.security,
            timeouts=options.timeouts,
            on_listed=on_listed,
            on_hidden=on_hidden,
        )
    )


def _estimated(rows: pa.Table, options: FsckOptions, on_progress: OnProgress) -> pa.Table:
    ledger_ids = ledgers_to_estimate(rows)

    def on_estimated(count: int) -> None:
        expected = len(ledger_ids)
        on_progress(
            FsckProgress(
                phase="estimating",
                ledgers_done=count,
                ledgers_expected=expected,
                work_done=count,
                work_expected=expected,
            )
        )

    return with_work(rows, asyncio.run(estimate_work(options, ledger_ids, on_estimated)))


class _Run:
    """One run that was begun."""

    def __init__(
        self,
        folder: RunFolder,
        options: FsckOptions,
        job: FsckJob,
        dispatch: Dispatch,
        on_progress: OnProgress,
    ) -> None:
        self._folder, self._options, self._job = folder, options, job
        self._dispatch, self._on_progress = dispatch, on_progress
        self._plan = folder.plan
        self._first = folder.first_checks()
        self._second = folder.rechecks()
        self._read = Counts()
        """Entries and bytes read in all checks; no other counts."""
        for counts in chain(self._first.values(), self._second.values()):
            self._add_read(counts)
        self._stop_s = time.monotonic() + (job.time_budget_s or float("inf"))

    # --- The first check -------------------------------------------------------------------------

    def check(self) -> None:
        """Check every part that is not done, or as many as the time budget allows."""
        self._report_checks()
        with closing(self._results(self._pending_checks())) as results:
            for checks, rows in results:
                for check in checks:
                    self._write_first(check.part, _rows_of(rows, check.part))
                self._report_checks()

    def _pending_checks(self) -> Iterator[FirstCheck]:
        for number in range(self._plan.part_count):
            if time.monotonic() >= self._stop_s:
                return
            if number not in self._first:
                yield FirstCheck.at(self._plan.part(number))

    def _write_first(self, number: int, rows: pa.Table) -> None:
        verdicts = rows.filter(pc.is_valid(rows["verdict"]))
        needs_recheck = verdicts["needs_recheck"]
        counts = self._first[number] = self._folder.write_first_check(
            number,
            verdicts.filter(pc.invert(needs_recheck)).select(SCHEMA.names),
            verdicts.filter(needs_recheck).select(SCHEMA.names),
            skipped=rows.num_rows - verdicts.num_rows,
            gone=self._plan.size_of(number) - rows.num_rows,
        )
        self._add_read(counts)

    # --- The recheck -----------------------------------------------------------------------------

    def recheck(self) -> None:
        """Recheck everything that seemed wrong, without time limit."""
        self._report_rechecks()
        with closing(self._results(self._pending_rechecks())) as results:
            for checks, rows in results:
                for number in chain.from_iterable(check.rows for check in checks):
                    self._write_second(number, _rows_of(rows, number))
                self._report_rechecks()

    def _write_second(self, number: int, rows: pa.Table) -> None:
        gone = self._first[number].to_recheck - rows.num_rows
        counts = self._second[number] = self._folder.write_recheck(
            number, rows.select(SCHEMA.names), gone=gone
        )
        self._add_read(counts)

    def _pending_rechecks(self) -> Iterator[Recheck]:
        waiting: dict[int, pa.Table] = {}
        full_scan: frozenset[int] = frozenset()
        for number, first in sorted(self._first.items()):
            if not first.to_recheck or number in self._second:
                continue
            waiting[number] = self._folder.rows_to_recheck(number)
            full_scan |= self._plan.part(number).full_scan
            if sum(rows.num_rows for rows in waiting.values()) >= RECHECK_TASK_LEDGERS:
                yield Recheck.at(waiting, full_scan)
                waiting, full_scan = {}, frozenset()
        if waiting:
            yield Recheck.at(waiting, full_scan)

    # --- The end ---------------------------------------------------------------------------------

    def end(self) -> Summary:
        """Write and publish the results, and return their summary."""
        self._report("writing")
        verdicts = self._folder.verdicts(VERDICT_COLUMNS)
        state = self._folder.state
        parts = range(self._plan.part_count)
        listed = self._plan.ledger_ids(parts)
        left = self._plan.ledger_ids(set(parts).difference(self._first))
        changes = self._job.changes
        is_changed_only = changes is not None and not changes.is_whole
        before = read_checked(state)
        if changes is not None:
            before = without(before, changes.deleted)
        checked = after_run(
            before, verdicts, self._options, listed=None if is_changed_only else listed
        )
        write_checked(state, checked)
        summary = Summary(
            run=self._job.run,
            level=self._options.level,
            started_ms=self._folder.started_ms,
            finished_ms=_now_ms(),
            counts=self._counts(),
            skipped=sum(counts.skipped for counts in self._first.values()),
            left=len(left),
            left_wrong=wrong_among(checked, left),
            gone=sum(counts.gone for counts in chain(self._first.values(), self._second.values())),
            is_changed_only=is_changed_only,
            hidden=self._folder.hidden,
        )
        self._folder.publish()
        write_summary(self._job.output, summary)
        if changes is not None and changes.is_whole:
            position = ClientPosition(
                level=self._options.level,
                generation=changes.generation,
                position=changes.position,
                log=changes.log,
            )
            keep_position(state, changes.client, position)
        self._folder.end()
        return summary

    def _counts(self) -> Counts:
        """Return the counts of all final rows, with everything read: first checks count too if a
        recheck followed."""
        total = counts_of(SCHEMA.empty_table())
        for counts in chain(self._first.values(), self._second.values()):
            total = total + counts.final
        return replace(
            total, entries_read=self._read.entries_read, bytes_read=self._read.bytes_read
        )

    # --- Below: helpers --------------------------------------------------------------------------

    def _results(self, checks: Iterator[C]) -> Generator[tuple[Sequence[C], pa.Table], None, None]:
        options, begin_pace = self._options, self._begin_pace
        return self._dispatch.results(
            checks, lambda some: check_work(some, options, begin_pace), ROWS
        )

    @property
    def _begin_pace(self) -> BeginPace:
        """The pace of executors. At level ``metadata`` no bookie is asked, so no budget is
        shared."""
        return FixedPace if self._options.level is Level.METADATA else SharedPace(run=self._job.run)

    def _add_read(self, counts: PartCounts) -> None:
        self._read = self._read + Counts(
            entries_read=counts.final.entries_read + counts.to_recheck_entries,
            bytes_read=counts.final.bytes_read + counts.to_recheck_bytes,
        )

    def _report_checks(self) -> None:
        plan = self._plan
        done, work_done = (sum(map(of, self._first)) for of in (plan.size_of, plan.work_of))
        self._report("checking", (done, plan.ledger_count), (work_done, plan.work))

    def _report_rechecks(self) -> None:
        done = sum(self._first[number].to_recheck for number in self._second)
        ledgers = (done, sum(counts.to_recheck for counts in self._first.values()))
        self._report("rechecking", ledgers, ledgers)

    def _report(
        self, phase: str, ledgers: tuple[int, int] = (0, 0), work: tuple[int, int] = (0, 0)
    ) -> None:
        """Report the progress. ``ledgers``, ``work``: the amounts done and expected."""
        self._on_progress(
            FsckProgress(
                phase=phase,
                ledgers_done=ledgers[0],
                ledgers_expected=ledgers[1],
                work_done=work[0],
                work_expected=work[1],
                entries_read=self._read.entries_read,
                bytes_read=self._read.bytes_read,
            )
        )


def _rows_of(rows: pa.Table, part: int) -> pa.Table:
    return rows.filter(pc.equal(rows["part"], part))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
