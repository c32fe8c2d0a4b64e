"""What ``bookmender fsck`` tells: how far a run is, what it found, what would be marked, how two
runs differ."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from auditor.fsck.levels import FsckProgress, OnProgress
from auditor.fsck.publishing import Fault, Foreseen
from auditor.fsck.results.advice import (
    advice_for,
    counts_text,
    entries_text,
    headline,
    tails_text,
)
from auditor.fsck.results.reading import Change, Changes, PastVerdict, Said
from auditor.fsck.results.rows import to_record
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Evidence, Grade, LedgerVerdict
from daemon.cli.progress import Eta, counted, duration_text, printable
from daemon.fsck.running import Marked
from ledgers.sizes import size_text

SHOWN_MAX = 20
HOW_TO_START = "start a node with bookmender daemon, its worker switched on"
LINE_INTERVAL_S = 10.0
"""Between two lines where no terminal shows a bar."""

# --- How far it is --------------------------------------------------------------------------------


class Meter:
    """Words for a run's progress, with rates and the time that is left by what was seen of this
    phase.

    Where a run goes on that was killed, what was read before counts in no rate.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._phase = ""
        self._eta = Eta()
        self._since_s = 0.0
        self._read_before = (0, 0)

    def text(self, progress: FsckProgress) -> str:
        now_s = self._now_s()
        if progress.phase != self._phase:
            self._phase, self._eta, self._since_s = progress.phase, Eta(), now_s
            self._read_before = (progress.entries_read, progress.bytes_read)
        parts = [_ledgers(progress)]
        if progress.entries_read:
            parts.append(f"{progress.entries_read:,} entries, {size_text(progress.bytes_read)}")
        elapsed_s = now_s - self._since_s
        entries, size = (
            now - before
            for now, before in zip(
                (progress.entries_read, progress.bytes_read), self._read_before, strict=True
            )
        )
        if elapsed_s > 0 and entries > 0:
            parts.append(
                f"{entries / elapsed_s:,.0f} entries/s, {size_text(round(size / elapsed_s))}/s"
            )
        left = progress.work_expected - progress.work_done
        if progress.work_expected:
            remaining_s = self._eta.remaining_s(left, now_s=now_s)
            if left and remaining_s is not None:
                parts.append(f"{duration_text(remaining_s)} to go")
        return "; ".join(parts)


def _ledgers(progress: FsckProgress) -> str:
    if progress.ledgers_expected:
        return f"{progress.ledgers_done:,} of {progress.ledgers_expected:,} ledgers"
    return counted(progress.ledgers_done, "ledger")


@contextmanager
def showing_progress() -> Iterator[OnProgress]:
    """On standard error: a bar on a terminal, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[told]}"),
    )
    meter = Meter()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting Spark", total=None, told="")

        def show(progress: FsckProgress) -> None:
            bar.update(
                task,
                description=progress.phase,
                total=progress.work_expected or None,
                completed=progress.work_done,
                told=meter.text(progress),
            )

        yield show


class _Lines:
    def __init__(self) -> None:
        self._meter = Meter()
        self._due_s = 0.0

    def show(self, progress: FsckProgress) -> None:
        text, now_s = self._meter.text(progress), time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + LINE_INTERVAL_S
            print(f"{progress.phase}: {text}", file=sys.stderr, flush=True)


# --- What it found --------------------------------------------------------------------------------


def summary_lines(summary: Summary) -> list[str]:
    lines = [
        printable(headline(summary)),
        f"run {summary.run}, level {summary.level.value}: {counts_text(summary.counts)}",
    ]
    for count, what in (
        (summary.skipped, "skipped: whole when they were looked at lately, and not changed since"),
        (summary.left, "left for the next run: the time was up"),
        (summary.gone, "deleted meanwhile"),
    ):
        if count:
            lines.append(f"{counted(count, 'ledger')} {what}")
    if tails := tails_text(summary.counts):
        lines.append(tails)
    for advice in advice_for(summary):
        lines += ["", advice.title, f"  {advice.text}"]
    return lines


def faults_lines(faults: Sequence[Fault], came_of_it: Marked | Foreseen | None) -> list[str]:
    """``came_of_it``: marks, or what would be marked now; None where that is not known."""
    if not faults:
        return ["nothing to be marked for the daemon"]
    if isinstance(came_of_it, Marked):
        return _marked_lines(came_of_it)
    if came_of_it is None:
        return [*_fault_lines(faults), f"{_would(faults)} if nothing has changed; --mark does it"]
    told = f"{_would(came_of_it.faults)}{_changed(came_of_it.changed)}"
    return [
        *_fault_lines(came_of_it.faults),
        f"{told}; --mark does it" if came_of_it.faults else told,
        *_own_lines(came_of_it.own),
    ]


def _marked_lines(marked: Marked) -> list[str]:
    published = marked.published
    told = f"{counted(published.new, 'ledger')} marked for the daemon"
    if published.known:
        told += f", {published.known:,} were marked already"
    own = _own_lines(published.own, has_worker=marked.has_worker)
    return [told + _changed(published.changed), *own]


def _changed(count: int) -> str:
    return f", {count:,} not, as they changed or went since they were looked at" if count else ""


def _would(faults: Sequence[Fault]) -> str:
    return f"{counted(len(faults), 'ledger')} would be marked"


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    lines = [
        printable(f"would mark ledger {fault.ledger_id} ({fault.grade.value}): {fault.detail}")
        for fault in faults[:SHOWN_MAX]
    ]
    if len(faults) > SHOWN_MAX:
        lines.append(f"and {len(faults) - SHOWN_MAX:,} more")
    return lines


def _own_lines(count: int, *, has_worker: bool = True) -> list[str]:
    if not count:
        return []
    told = (
        f"{counted(count, 'ledger')} of these in bookmender's private queue: Java's workers would find "
        "them whole, and only a bookmender daemon mends them"
    )
    return [told if has_worker else f"{told}; none is running: {HOW_TO_START}"]


def faults_record(faults: Sequence[Fault], came_of_it: Marked | Foreseen | None) -> dict[str, Any]:
    """``changed``, ``own``: null where nobody could look."""
    if isinstance(came_of_it, Marked):
        return {
            "marked": came_of_it.published.new,
            "known": came_of_it.published.known,
            "changed": came_of_it.published.changed,
            "own": came_of_it.published.own,
            "has_worker": came_of_it.has_worker,
        }
    would_mark = faults if came_of_it is None else came_of_it.faults
    return {
        "would_mark": len(would_mark),
        "changed": None if came_of_it is None else came_of_it.changed,
        "own": None if came_of_it is None else came_of_it.own,
        "first_ledgers": [
            {
                "ledger_id": fault.ledger_id,
                "verdict": fault.grade.value,
                "bookies": list(fault.bookies),
                "detail": fault.detail,
            }
            for fault in would_mark[:SHOWN_MAX]
        ],
    }


# --- One ledger -----------------------------------------------------------------------------------


def past_lines(past: Sequence[PastVerdict]) -> list[str]:
    """What runs said of a ledger, the last first."""
    lines: list[str] = []
    for each in past:
        summary, verdict = each.summary, each.verdict
        looked_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(verdict.checked_ms / 1000))
        since = "; it looked more closely" if lines else _later(each)
        lines.append(f"run {summary.run}, level {summary.level.value}, at {looked_at}{since}:")
        lines.append(f"  {_verdict_text(verdict)}")
        lines += [f"    {printable(_evidence_text(seen))}" for seen in verdict.evidence]
        if verdict.evidence_left_out:
            lines.append(f"    and {verdict.evidence_left_out:,} more")
    return lines


def _later(past: PastVerdict) -> str:
    deleted = past.later_runs_deleted
    others = past.later_runs - deleted
    told = f"; {counted(others, 'later run')} did not look" if others else ""
    return f"{told}; the rows of {counted(deleted, 'later run')} were deleted" if deleted else told


def _verdict_text(verdict: LedgerVerdict) -> str:
    parts = [_graded(verdict), verdict.state or "metadata cannot be read"]
    if verdict.state:
        parts += [f"last entry {verdict.last_entry_id:,}", size_text(verdict.length)]
    if verdict.is_tail_unseen:
        parts.append("what follows was left to its writer")
    if verdict.rests_on_unknown:
        parts.append("rests on what is not known")
    return ", ".join(parts)


def _evidence_text(each: Evidence) -> str:
    finding = each.finding.value.replace("_", " ")
    words = [finding, each.bookie or "", entries_text(each), each.code, each.detail]
    return ", ".join(word for word in words if word)


def past_record(ledger_id: int, past: Sequence[PastVerdict]) -> dict[str, Any]:
    """The verdicts with the columns of the results."""
    return {
        "ledger_id": ledger_id,
        "verdicts": [
            {
                "run": each.summary.run,
                "level": each.summary.level.value,
                "later_runs": each.later_runs,
                "later_runs_deleted": each.later_runs_deleted,
                **to_record(each.verdict),
            }
            for each in past
        ],
    }


# --- Two runs -------------------------------------------------------------------------------------


def changes_lines(changes: Changes) -> list[str]:
    new = "new" if changes.is_newness_told else "new, or not looked at before"
    absent = "gone" if changes.is_absence_told else "not looked at, or gone"
    lines = [
        *_change_lines("changed", changes.changed),
        *_change_lines(new, changes.new),
        *_change_lines(absent, changes.absent),
    ]
    for count, what in (
        (changes.new_fine_count, f"{new}, and whole"),
        (changes.absent_fine_count, f"{absent}; they were whole"),
    ):
        if count:
            lines.append(f"{counted(count, 'ledger')} {what}")
    return lines or ["no ledger of which anything else is said"]


def _change_lines(what: str, changes: Sequence[Change]) -> list[str]:
    lines = [
        f"{what}: ledger {change.ledger_id}: {_said(change)}"
        for change in sorted(changes, key=lambda change: not change.is_worse)[:SHOWN_MAX]
    ]
    more = len(changes) - SHOWN_MAX
    return [*lines, f"{what}: {more:,} more"] if more > 0 else lines


def _said(change: Change) -> str:
    grades = [_graded(said) for said in (change.before, change.after) if said is not None]
    return f"was {grades[0]}" if change.after is None else " -> ".join(grades)


def _graded(said: Said | LedgerVerdict) -> str:
    """Wrong though whole: enough copies are good by their digests, but they differ."""
    is_beside = said.is_wrong and said.grade is Grade.WHOLE
    return f"{said.grade.value}, copies differ" if is_beside else said.grade.value


def changes_record(changes: Changes) -> dict[str, Any]:
    return {
        "has_worsened": changes.has_worsened,
        "is_newness_told": changes.is_newness_told,
        "is_absence_told": changes.is_absence_told,
        "changed": [_change_record(change) for change in changes.changed],
        "new": [_change_record(change) for change in changes.new],
        "new_whole": changes.new_fine_count,
        "absent": [_change_record(change) for change in changes.absent],
        "absent_whole": changes.absent_fine_count,
    }


def _change_record(change: Change) -> dict[str, Any]:
    return {
        "ledger_id": change.ledger_id,
        "before": change.before.grade.value if change.before else None,
        "after": change.after.grade.value if change.after else None,
        "is_worse": change.is_worse,
    }
