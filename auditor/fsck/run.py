"""A run of fsck: plans once, checks each part, and rechecks what seemed wrong.

The driver writes the results, part by part, to its own folder, so executors need no shared file
system. What is written is final. After a kill, the next call with the same name continues the run.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.budget import SharedPace, fixed_pace
from auditor.fsck.ledger_list import estimate_work, is_estimated, list_ledger_ids
from auditor.fsck.options import FeedChanges, FsckJob, FsckOptions, FsckProgress, Level, OnProgress
from auditor.fsck.results.folder import ClientPosition, keep_position
from auditor.fsck.results.plan import (
    CHECKED_FILE,
    PART_MAX,
    VERDICT_COLUMNS,
    Part,
    after_run,
    cut_by_work,
    doubtful_ledgers,
    plan_rows,
    read_checked,
    wrong_among,
)
from auditor.fsck.results.rows import SCHEMA, counts_of, replace_table
from auditor.fsck.results.run_folder import AGAIN, FIRST, PartCounts, RunFolder
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
        plan = folder.plan
        return sum(plan.sizes) <= count_max and sum(plan.work) <= WORK_HERE_MAX
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
    is_begun = folder.is_begun
    if is_begun:
        folder.check_options(options, client=job.client)
        job = replace(job, changes=folder.changes)
    run = _Run(folder=folder, options=options, job=job, dispatch=dispatch, on_progress=on_progress)
    with dispatch.warmed_up(check_work([], options, fixed_pace)):  # the first tasks wait in Spark
        if not is_begun:
            run.begin()
        run.check()
    run.recheck()
    return run.end()


@dataclass(kw_only=True)
class _Run:
    """One run, in the driver."""

    folder: RunFolder
    options: FsckOptions
    job: FsckJob
    dispatch: Dispatch
    on_progress: OnProgress
    first: dict[int, PartCounts] = field(default_factory=dict)
    """The counts of the first check of each part."""
    second: dict[int, PartCounts] = field(default_factory=dict)
    """The counts of the recheck of each part."""
    entries_read: int = 0
    bytes_read: int = 0

    def begin(self) -> None:
        """Find the ledgers once, and store which part each belongs to."""
        options, job = self.options, self.job
        started_ms = time.time_ns() // 1_000_000
        checked = read_checked(self.folder.state)
        hidden: list[str] = []

        def on_hidden(error: UnauthorizedError) -> None:
            """A directory that ACLs hide does not stop the check of all other ledgers."""
            if len(hidden) < HIDDEN_MAX:
                hidden.append(str(error.context["path"]))

        def on_estimated(count: int) -> None:
            self._report("estimating", (count, len(ledger_ids)), (count, len(ledger_ids)))

        if job.is_changed_only:
            assert job.changes is not None
            ledger_ids = ledgers_to_check(job.changes, checked, options.level)
        else:
            listing = list_ledger_ids(
                options,
                on_listed=lambda count: self._report("listing", (count, 0)),
                on_hidden=on_hidden,
            )
            ledger_ids = asyncio.run(listing)
        work = None
        if is_estimated(options.level):
            work = asyncio.run(estimate_work(options, ledger_ids, on_estimated))
        is_timed, slot_count = job.time_budget_s > 0, self.dispatch.slot_count
        rows = plan_rows(ledger_ids, checked, options.level, work=work, oldest_first=is_timed)
        parts = cut_by_work(rows, options, slot_count=slot_count, keeps_order=is_timed)
        self.folder.begin(parts, options, started_ms=started_ms, changes=job.changes, hidden=hidden)

    def check(self) -> None:
        """Check every part that is not done, or as many as the time budget allows."""
        plan, sizes, weights = self.folder.plan, self.folder.plan.sizes, self.folder.plan.work
        self.first, self.second = self.folder.counts(FIRST), self.folder.counts(AGAIN)
        for counts in chain(self.first.values(), self.second.values()):
            self._add_read(counts)
        stop_s = time.monotonic() + (self.job.time_budget_s or float("inf"))
        ledgers, work = sum(sizes[n] for n in self.first), sum(weights[n] for n in self.first)
        expected, work_expected = sum(sizes), sum(weights)

        def pending() -> Iterator[Part]:
            for number in range(len(sizes)):
                if time.monotonic() >= stop_s:
                    return
                if number not in self.first:
                    yield plan.part(number)

        def report() -> None:
            self._report("checking", (ledgers, expected), (work, work_expected))

        report()
        with closing(self._rows_by_part(pending(), report)) as parts:
            for number, rows in parts:
                needs_recheck = rows["needs_recheck"]
                counts = self.first[number] = self.folder.write(
                    FIRST,
                    number,
                    rows.filter(pc.invert(needs_recheck)).select(SCHEMA.names),
                    rows.filter(needs_recheck).select(SCHEMA.names),
                    gone=sizes[number] - rows.num_rows,
                )
                self._add_read(counts)
                ledgers, work = ledgers + sizes[number], work + weights[number]

    def recheck(self) -> None:
        """Recheck everything that seemed wrong, without time limit."""
        asked = {n: counts.to_recheck for n, counts in self.first.items() if counts.to_recheck}
        done, expected = sum(asked.get(n, 0) for n in self.second), sum(asked.values())

        def pending() -> Iterator[Recheck]:
            left = deque(sorted(asked.keys() - self.second.keys()))
            while left:
                rows: dict[int, pa.Table] = {}
                full_scan: frozenset[int] = frozenset()
                while left and sum(asked[n] for n in rows) < RECHECK_TASK_LEDGERS:
                    number = left.popleft()
                    rows[number] = self.folder.rows_to_recheck(number)
                    full_scan |= self.folder.plan.part(number).full_scan
                yield Recheck.at(rows, full_scan)

        def report() -> None:
            self._report("rechecking", (done, expected), (done, expected))

        report()
        with closing(self._rows_by_part(pending(), report)) as parts:
            for number, rows in parts:
                counts = self.second[number] = self.folder.write(
                    AGAIN, number, rows.select(SCHEMA.names), gone=asked[number] - rows.num_rows
                )
                self._add_read(counts)
                done += asked[number]

    def _rows_by_part(
        self, checks: Iterator[Check], report: Callable[[], None]
    ) -> Generator[tuple[int, pa.Table], None, None]:
        """Yield the rows (``ROWS``) of each part, as the checks complete. A part whose ledgers are
        all deleted has none. Calls ``report`` after each check.

        At level ``metadata`` no bookie is asked, so no budget is shared.
        """
        options = self.options
        is_asking = options.level is not Level.METADATA
        pace = SharedPace(run=self.job.run) if is_asking else fixed_pace
        results = self.dispatch.results(checks, lambda some: check_work(some, options, pace), ROWS)
        with closing(results):
            for done, rows in results:
                for number in chain.from_iterable(check.parts for check in done):
                    yield number, rows.filter(pc.equal(rows["part"], number))
                report()

    def end(self) -> Summary:
        """Write and publish the results, and return their summary."""
        self._report("writing")
        folder, job, changes, level = self.folder, self.job, self.job.changes, self.options.level
        numbers = range(len(folder.plan.sizes))
        left = folder.plan.ledger_ids(n for n in numbers if n not in self.first)
        checked = after_run(
            read_checked(folder.state),
            folder.verdicts(VERDICT_COLUMNS),
            level,
            listed=None if job.is_changed_only else folder.plan.ledger_ids(numbers),
            deleted=changes.deleted if changes else (),
        )
        replace_table(folder.state / CHECKED_FILE, checked)
        parts = [*self.first.values(), *self.second.values()]
        counts = sum((part.final for part in parts), start=counts_of(SCHEMA.empty_table()))
        summary = Summary(
            run=job.run,
            level=level,
            started_ms=folder.begun_with["started_ms"],
            finished_ms=time.time_ns() // 1_000_000,
            counts=replace(counts, entries_read=self.entries_read, bytes_read=self.bytes_read),
            left=len(left),
            left_wrong=wrong_among(checked, left),
            gone=sum(part.gone for part in parts),
            is_changed_only=job.is_changed_only,
            hidden=tuple(folder.begun_with["hidden"]),
        )
        folder.publish()
        write_summary(job.output, summary)
        if changes is not None and changes.is_whole:
            keep_position(folder.state, changes.client, ClientPosition.after(changes, level))
        folder.end()
        return summary

    def _add_read(self, counts: PartCounts) -> None:
        """Count what was read. First checks count too if a recheck followed."""
        self.entries_read += counts.final.entries_read + counts.to_recheck_entries
        self.bytes_read += counts.final.bytes_read + counts.to_recheck_bytes

    def _report(
        self, phase: str, ledgers: tuple[int, int] = (0, 0), work: tuple[int, int] = (0, 0)
    ) -> None:
        """Report the progress. ``ledgers``, ``work``: the amounts done and expected."""
        self.on_progress(
            FsckProgress(
                phase=phase,
                ledgers_done=ledgers[0],
                ledgers_expected=ledgers[1],
                work_done=work[0],
                work_expected=work[1],
                entries_read=self.entries_read,
                bytes_read=self.bytes_read,
            )
        )
