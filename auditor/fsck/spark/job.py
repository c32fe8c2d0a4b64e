"""A run of fsck: plans once, looks at each part, and looks again at what seemed wrong.

The driver writes the results, part by part, to its own folder, so executors need no shared file
system. What is written is final. After a kill, the next call with the same name continues the run.
"""

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkContext

from auditor.fsck.budget import BeginPace, FixedPace, SharedPace
from auditor.fsck.ledger_ids import is_weighed, list_ledger_ids, weigh
from auditor.fsck.levels import FsckJob, FsckOptions, FsckProgress, Level, OnProgress
from auditor.fsck.results.checked import (
    VERDICT_COLUMNS,
    after_run,
    read_checked,
    write_checked,
    wrong_among,
)
from auditor.fsck.results.plan import cut_by_weight, plan_rows, to_be_weighed, with_weights
from auditor.fsck.results.rows import SCHEMA, counts_of
from auditor.fsck.results.run_folder import PartCounts, RunFolder
from auditor.fsck.results.summary import Counts, Summary, write_summary
from auditor.fsck.spark.dispatch import ROWS, Dispatch, FirstLook, Look, SecondLook, looking

SECOND_LOOK_LEDGERS = 500
"""Approximate number of ledgers in one task of the second look."""

L = TypeVar("L", bound=Look)


def run_fsck(
    context: SparkContext, options: FsckOptions, job: FsckJob, on_progress: OnProgress
) -> Summary:
    """Check every ledger, write the results to ``job.output``, and return the summary.

    Continues the run of this name if it was begun there (``unfinished_runs``). Raises
    SettingsError, also if that run had other options; UnavailableError if the run was interrupted
    and can be continued.
    """
    folder = RunFolder(job.output, job.run)
    dispatch = Dispatch(context, f"fsck {job.run}")
    if folder.is_begun:
        folder.check_order(options)
    with dispatch.warming_up(looking([], options, FixedPace)):  # the first tasks wait in Spark
        if not folder.is_begun:
            _begin(folder, options, job, dispatch, on_progress)
        run = _Run(folder, options, job, dispatch, on_progress)
        run.look()
    run.look_again()
    return run.end()


def _begin(
    folder: RunFolder,
    options: FsckOptions,
    job: FsckJob,
    dispatch: Dispatch,
    on_progress: OnProgress,
) -> None:
    """List the ledgers once, and store which part each belongs to."""
    started_ms = _now_ms()

    def on_listed(count: int) -> None:
        on_progress(FsckProgress(phase="listing", ledgers_done=count))

    listed = asyncio.run(
        list_ledger_ids(
            options.metadata_service_uri, timeouts=options.timeouts, on_listed=on_listed
        )
    )
    rows = plan_rows(listed, read_checked(folder.state), options, job, now_ms=started_ms)
    if is_weighed(options.level):
        rows = _weighed(rows, options, on_progress)
    parts = cut_by_weight(rows, options, job, slot_count=dispatch.slot_count)
    folder.begin(parts, options, started_ms=started_ms)


def _weighed(rows: pa.Table, options: FsckOptions, on_progress: OnProgress) -> pa.Table:
    ledger_ids = to_be_weighed(rows)

    def on_weighed(count: int) -> None:
        expected = len(ledger_ids)
        on_progress(
            FsckProgress(
                phase="weighing",
                ledgers_done=count,
                ledgers_expected=expected,
                work_done=count,
                work_expected=expected,
            )
        )

    return with_weights(rows, asyncio.run(weigh(options, ledger_ids, on_weighed)))


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
        self._first = folder.first_looks()
        self._second = folder.second_looks()
        self._read = Counts()
        """Entries and bytes read in all looks; no other counts."""
        for look in chain(self._first.values(), self._second.values()):
            self._note_read(look)
        self._stop_s = time.monotonic() + (job.time_budget_s or float("inf"))

    # --- The first look --------------------------------------------------------------------------

    def look(self) -> None:
        """Look at every part that is not done, or at as many as the time budget allows."""
        self._tell_looking()
        with closing(self._results(self._first_looks())) as results:
            for looks, rows in results:
                for look in looks:
                    self._write_first(look.part, _rows_of(rows, look.part))
                self._tell_looking()

    def _first_looks(self) -> Iterator[FirstLook]:
        for number in range(self._plan.part_count):
            if time.monotonic() >= self._stop_s:
                return
            if number not in self._first:
                yield FirstLook.at(self._plan.part(number))

    def _write_first(self, number: int, rows: pa.Table) -> None:
        verdicts = rows.filter(pc.is_valid(rows["verdict"]))
        seems_wrong = verdicts["seems_wrong"]
        look = self._first[number] = self._folder.write_first_look(
            number,
            verdicts.filter(pc.invert(seems_wrong)).select(SCHEMA.names),
            verdicts.filter(seems_wrong).select(SCHEMA.names),
            skipped=rows.num_rows - verdicts.num_rows,
            gone=self._plan.size_of(number) - rows.num_rows,
        )
        self._note_read(look)

    # --- The second look -------------------------------------------------------------------------

    def look_again(self) -> None:
        """Look again at everything that seemed wrong, without time limit."""
        self._tell_looking_again()
        with closing(self._results(self._second_looks())) as results:
            for looks, rows in results:
                for number in chain.from_iterable(look.rows for look in looks):
                    self._write_second(number, _rows_of(rows, number))
                self._tell_looking_again()

    def _write_second(self, number: int, rows: pa.Table) -> None:
        gone = self._first[number].doubtful - rows.num_rows
        look = self._second[number] = self._folder.write_second_look(
            number, rows.select(SCHEMA.names), gone=gone
        )
        self._note_read(look)

    def _second_looks(self) -> Iterator[SecondLook]:
        waiting: dict[int, pa.Table] = {}
        suspects: frozenset[int] = frozenset()
        for number, first in sorted(self._first.items()):
            if not first.doubtful or number in self._second:
                continue
            waiting[number] = self._folder.doubtful(number)
            suspects |= self._plan.part(number).suspects
            if sum(rows.num_rows for rows in waiting.values()) >= SECOND_LOOK_LEDGERS:
                yield SecondLook.at(waiting, suspects)
                waiting, suspects = {}, frozenset()
        if waiting:
            yield SecondLook.at(waiting, suspects)

    # --- The end ---------------------------------------------------------------------------------

    def end(self) -> Summary:
        """Write and publish the results, and return their summary."""
        self._tell("writing")
        verdicts = self._folder.verdicts(VERDICT_COLUMNS)
        state = self._folder.state
        parts = range(self._plan.part_count)
        listed = self._plan.ledger_ids(parts)
        left = self._plan.ledger_ids(set(parts).difference(self._first))
        checked = after_run(read_checked(state), verdicts, self._options, listed=listed)
        write_checked(state, checked)
        summary = Summary(
            run=self._job.run,
            level=self._options.level,
            started_ms=self._folder.started_ms,
            finished_ms=_now_ms(),
            counts=self._counts(),
            skipped=sum(look.skipped for look in self._first.values()),
            left=len(left),
            left_wrong=wrong_among(checked, left),
            gone=sum(look.gone for look in chain(self._first.values(), self._second.values())),
        )
        self._folder.publish()
        write_summary(self._job.output, summary)
        self._folder.end()
        return summary

    def _counts(self) -> Counts:
        """Return the counts of all final rows, with everything read: first looks count too if a
        second one followed."""
        total = counts_of(SCHEMA.empty_table())
        for look in chain(self._first.values(), self._second.values()):
            total = total + look.certain
        return replace(
            total, entries_read=self._read.entries_read, bytes_read=self._read.bytes_read
        )

    # --- Below: helpers --------------------------------------------------------------------------

    def _results(self, looks: Iterator[L]) -> Generator[tuple[Sequence[L], pa.Table], None, None]:
        options, begin_pace = self._options, self._begin_pace
        return self._dispatch.results(looks, lambda some: looking(some, options, begin_pace), ROWS)

    @property
    def _begin_pace(self) -> BeginPace:
        """The pace of executors. At level ``metadata`` no bookie is asked, so no budget is
        shared."""
        return FixedPace if self._options.level is Level.METADATA else SharedPace(run=self._job.run)

    def _note_read(self, look: PartCounts) -> None:
        self._read = self._read + Counts(
            entries_read=look.certain.entries_read + look.doubtful_entries,
            bytes_read=look.certain.bytes_read + look.doubtful_bytes,
        )

    def _tell_looking(self) -> None:
        plan = self._plan
        done, work_done = (sum(map(of, self._first)) for of in (plan.size_of, plan.weight_of))
        self._tell("looking", (done, plan.ledger_count), (work_done, plan.weight))

    def _tell_looking_again(self) -> None:
        done = sum(self._first[number].doubtful for number in self._second)
        ledgers = (done, sum(look.doubtful for look in self._first.values()))
        self._tell("looking again", ledgers, ledgers)

    def _tell(
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
