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

from auditor.fsck.budget import SharedPace, fixed_pace
from auditor.fsck.ledger_list import estimate_work, is_estimated, list_ledger_ids
from auditor.fsck.options import FeedChanges, FsckJob, FsckOptions, FsckProgress, Level, OnProgress
from auditor.fsck.results.folder import ClientPosition, keep_position
from auditor.fsck.results.plan import (
    PART_MAX,
    VERDICT_COLUMNS,
    Part,
    after_run,
    cut_by_work,
    doubtful_ledgers,
    plan_rows,
    read_checked,
    write_checked,
    wrong_among,
)
from auditor.fsck.results.rows import SCHEMA, counts_of
from auditor.fsck.results.run_folder import PartCounts, RunFolder
from auditor.fsck.results.summary import Summary, write_summary
from auditor.fsck.tasks import ROWS, Check, Recheck, Work, check_work, hide_pandas
from ledgers.errors import UnauthorizedError

HIDDEN_MAX = 20
"""Hidden directories that a summary names."""
RECHECK_TASK_LEDGERS = 500
"""Approximate number of ledgers in one task of the recheck."""
WORK_HERE_MAX = 100_000
"""The most copies that a run reads without Spark. They take about as long as Spark's start."""

T = TypeVar("T")


class Dispatch(Protocol):
    """Runs tasks: on Spark (``spark.dispatch``), or in this process."""

    @property
    def slot_count(self) -> int:
        """The number of tasks that can run at once; 0: there shall be only one task."""
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

    slot_count = 0

    def warmed_up(self, work: Work) -> AbstractContextManager[None]:
        return nullcontext()

    def results(
        self, tasks: Iterable[T], work: Callable[[Sequence[T]], Work], schema: pa.Schema
    ) -> Generator[tuple[Sequence[T], pa.Table], None, None]:
        hide_pandas()
        for task in tasks:
            yield [task], pa.Table.from_batches(work([task])(0), schema)


def fits_in_this_process(options: FsckOptions, job: FsckJob) -> bool:
    """Return True if a run that checks only changes has so little to read that Spark is not worth
    its start. Raises UnavailableError, SettingsError."""
    if job.changes is None or job.changes.is_whole:
        return False
    folder, count_max = RunFolder(job.output, job.run), PART_MAX[options.level]
    if folder.is_begun:
        return folder.plan.ledger_count <= count_max and sum(folder.plan.work) <= WORK_HERE_MAX
    ledger_ids = ledgers_to_check(job.changes, read_checked(folder.state), options.level)
    if len(ledger_ids) > count_max or not is_estimated(options.level):
        return len(ledger_ids) <= count_max
    return sum(asyncio.run(estimate_work(options, ledger_ids))) <= WORK_HERE_MAX


def ledgers_to_check(changes: FeedChanges, checked: pa.Table, level: Level) -> "array[int]":
    """Return the changed ledgers that exist, and those that were wrong or unknown when they were
    last checked. Ascending."""
    doubtful = doubtful_ledgers(checked, level).to_pylist()
    return array("q", sorted({*changes.existing, *doubtful}.difference(changes.deleted)))


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
    with dispatch.warmed_up(check_work([], options, fixed_pace)):  # the first tasks wait in Spark
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

    def on_hidden(error: UnauthorizedError) -> None:
        """A directory that ACLs hide does not stop the check of all other ledgers."""
        if len(hidden) < HIDDEN_MAX:
            hidden.append(str(error.context["path"]))

    if job.is_changed_only:
        assert job.changes is not None
        ledger_ids = ledgers_to_check(job.changes, checked, options.level)
    else:
        listing = list_ledger_ids(
            options.metadata_service_uri,
            options.security,
            timeouts=options.timeouts,
            on_listed=lambda count: on_progress(FsckProgress(phase="listing", ledgers_done=count)),
            on_hidden=on_hidden,
        )
        ledger_ids = asyncio.run(listing)

    def on_estimated(count: int) -> None:
        on_progress(
            FsckProgress(
                phase="estimating",
                ledgers_done=count,
                ledgers_expected=len(ledger_ids),
                work_done=count,
                work_expected=len(ledger_ids),
            )
        )

    work = None
    if is_estimated(options.level):
        work = asyncio.run(estimate_work(options, ledger_ids, on_estimated))
    is_timed = job.time_budget_s > 0
    rows = plan_rows(ledger_ids, checked, options.level, work=work, oldest_first=is_timed)
    parts = cut_by_work(rows, options, slot_count=dispatch.slot_count, keeps_order=is_timed)
    folder.begin(parts, options, started_ms=started_ms, changes=job.changes, hidden=hidden)


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
        self._first, self._second = folder.first_checks(), folder.rechecks()
        self._entries_read = self._bytes_read = 0
        for counts in chain(self._first.values(), self._second.values()):
            self._add_read(counts)
        self._stop_s = time.monotonic() + (job.time_budget_s or float("inf"))

    def check(self) -> None:
        """Check every part that is not done, or as many as the time budget allows."""

        def pending() -> Iterator[Part]:
            for number in range(plan.part_count):
                if time.monotonic() >= self._stop_s:
                    return
                if number not in self._first:
                    yield plan.part(number)

        plan = self._plan
        ledgers, work = sum(map(plan.size_of, self._first)), sum(plan.work[n] for n in self._first)
        work_expected = sum(plan.work)

        def report() -> None:
            self._report("checking", (ledgers, plan.ledger_count), (work, work_expected))

        report()
        with closing(self._rows_by_part(pending(), report)) as parts:
            for number, rows in parts:
                needs_recheck = rows["needs_recheck"]
                counts = self._first[number] = self._folder.write_first_check(
                    number,
                    rows.filter(pc.invert(needs_recheck)).select(SCHEMA.names),
                    rows.filter(needs_recheck).select(SCHEMA.names),
                    gone=plan.size_of(number) - rows.num_rows,
                )
                self._add_read(counts)
                ledgers, work = ledgers + plan.size_of(number), work + plan.work[number]

    def recheck(self) -> None:
        """Recheck everything that seemed wrong, without time limit."""

        def pending() -> Iterator[Recheck]:
            waiting: dict[int, pa.Table] = {}
            for number, first in sorted(self._first.items()):
                if first.to_recheck and number not in self._second:
                    waiting[number] = self._folder.rows_to_recheck(number)
                if sum(rows.num_rows for rows in waiting.values()) >= RECHECK_TASK_LEDGERS:
                    yield Recheck.at(waiting, self._full_scan(waiting))
                    waiting = {}
            if waiting:
                yield Recheck.at(waiting, self._full_scan(waiting))

        done = sum(self._first[number].to_recheck for number in self._second)
        expected = sum(counts.to_recheck for counts in self._first.values())

        def report() -> None:
            self._report("rechecking", (done, expected), (done, expected))

        report()
        with closing(self._rows_by_part(pending(), report)) as parts:
            for number, rows in parts:
                asked = self._first[number].to_recheck
                counts = self._second[number] = self._folder.write_recheck(
                    number, rows.select(SCHEMA.names), gone=asked - rows.num_rows
                )
                self._add_read(counts)
                done += asked

    def _full_scan(self, parts: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self._plan.part(number).full_scan for number in parts))

    def _rows_by_part(
        self, checks: Iterator[Check], report: Callable[[], None]
    ) -> Generator[tuple[int, pa.Table], None, None]:
        """Yield the rows (``ROWS``) of each part, as the checks complete. A part whose ledgers are
        all deleted has none. Calls ``report`` after each check.

        At level ``metadata`` no bookie is asked, so no budget is shared.
        """
        options = self._options
        is_asking = options.level is not Level.METADATA
        pace = SharedPace(run=self._job.run) if is_asking else fixed_pace
        results = self._dispatch.results(checks, lambda some: check_work(some, options, pace), ROWS)
        with closing(results):
            for done, rows in results:
                for number in chain.from_iterable(check.parts for check in done):
                    yield number, rows.filter(pc.equal(rows["part"], number))
                report()

    def end(self) -> Summary:
        """Write and publish the results, and return their summary."""
        self._report("writing")
        folder, job, changes = self._folder, self._job, self._job.changes
        listed = self._plan.ledger_ids(range(self._plan.part_count))
        left = self._plan.ledger_ids(set(range(self._plan.part_count)).difference(self._first))
        checked = after_run(
            read_checked(folder.state),
            folder.verdicts(VERDICT_COLUMNS),
            self._options.level,
            listed=None if job.is_changed_only else listed,
            deleted=changes.deleted if changes else (),
        )
        write_checked(folder.state, checked)
        parts = [*self._first.values(), *self._second.values()]
        counts = sum((part.final for part in parts), start=counts_of(SCHEMA.empty_table()))
        summary = Summary(
            run=job.run,
            level=self._options.level,
            started_ms=folder.started_ms,
            finished_ms=_now_ms(),
            counts=replace(counts, entries_read=self._entries_read, bytes_read=self._bytes_read),
            left=len(left),
            left_wrong=wrong_among(checked, left),
            gone=sum(part.gone for part in parts),
            is_changed_only=job.is_changed_only,
            hidden=folder.hidden,
        )
        folder.publish()
        write_summary(job.output, summary)
        if changes is not None and changes.is_whole:
            position = ClientPosition(
                level=self._options.level,
                generation=changes.generation,
                position=changes.position,
                log=changes.log,
            )
            keep_position(folder.state, changes.client, position)
        folder.end()
        return summary

    def _add_read(self, counts: PartCounts) -> None:
        """Count what was read. First checks count too if a recheck followed."""
        self._entries_read += counts.final.entries_read + counts.to_recheck_entries
        self._bytes_read += counts.final.bytes_read + counts.to_recheck_bytes

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
                entries_read=self._entries_read,
                bytes_read=self._bytes_read,
            )
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
