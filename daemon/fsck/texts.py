"""Texts that ``bookmender fsck`` prints: progress, the result of a run, marks, and the history
of a ledger. As lines for people, and as records for programs."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from auditor.fsck.damage_marker import DamagedLedger, MarkPreview
from auditor.fsck.options import FeedChanges, FsckProgress
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade, evidence_text
from daemon.fsck.advice import advice_for, counts_text, headline, tails_text
from daemon.fsck.runner import MarkResult
from daemon.words import counted, duration_text, printable
from ledgers.sizes import size_text

if TYPE_CHECKING:
    from auditor.fsck.results.run_folder import RunVerdict

SHOWN_MAX = 20
START_WORKER = "start a node whose worker is enabled: bookmender daemon"

# --- Progress -------------------------------------------------------------------------------------


class Meter:
    """Describes a run's progress, with rates and the remaining time of the current phase.

    The rates are those of the whole phase: tasks of equal size end at nearly the same time, so the
    progress of the last minute depends on how many of them it contains. In a continued run, what
    was done before it was killed counts in no rate.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.phase = ""

    def text(self, progress: FsckProgress) -> str:
        now_s = self._now_s()
        if progress.phase != self.phase:
            self.phase = progress.phase
            self._first, self._since_s = progress, now_s
        parts = [counted(progress.ledgers_done, "ledger")]
        if progress.ledgers_expected:
            parts = [f"{progress.ledgers_done:,} of {progress.ledgers_expected:,} ledgers"]
        if progress.entries_read:
            parts.append(f"{progress.entries_read:,} entries, {size_text(progress.bytes_read)}")
        elapsed_s = now_s - self._since_s
        entries = progress.entries_read - self._first.entries_read
        size = progress.bytes_read - self._first.bytes_read
        if elapsed_s > 0 and entries > 0:
            parts.append(
                f"{entries / elapsed_s:,.0f} entries/s, {size_text(round(size / elapsed_s))}/s"
            )
        left = progress.work_expected - progress.work_done
        done = progress.work_done - self._first.work_done
        if left > 0 and done > 0:
            parts.append(f"{duration_text(left * elapsed_s / done)} to go")
        return "; ".join(parts)


# --- The result of a run --------------------------------------------------------------------------


def summary_lines(summary: Summary) -> list[str]:
    only = ", changed ledgers only" if summary.is_changed_only else ""
    lines = [
        printable(headline(summary)),
        f"run {summary.run}, level {summary.level.value}{only}: {counts_text(summary.counts)}",
    ]
    for count, what in (
        (summary.left, "left for the next run: the time was up"),
        (summary.gone, "deleted during the run"),
    ):
        if count:
            lines.append(f"{counted(count, 'ledger')} {what}")
    if tails := tails_text(summary.counts):
        lines.append(tails)
    for advice in advice_for(summary):
        lines += ["", advice.title, f"  {advice.text}"]
    return lines


def mark_lines(
    damaged: Sequence[DamagedLedger], outcome: MarkResult | MarkPreview | None
) -> list[str]:
    """Return lines about the marks. ``outcome``: what was marked, or would be marked; None if the
    cluster could not be asked."""
    if not damaged:
        return ["nothing to mark"]
    if isinstance(outcome, MarkResult):
        counts = outcome.counts
        known = f", {counts.known:,} were marked already" if counts.known else ""
        return [
            f"{counted(counts.new, 'ledger')} marked{known}{_changed(counts.changed)}",
            *_private_lines(counts.own, has_worker=outcome.has_worker),
        ]
    would_mark = damaged if outcome is None else outcome.ledgers
    lines = [
        printable(f"would mark ledger {each.ledger_id} ({each.grade.value}): {each.detail}")
        for each in would_mark[:SHOWN_MAX]
    ]
    if len(would_mark) > SHOWN_MAX:
        lines.append(f"and {len(would_mark) - SHOWN_MAX:,} more")
    text = f"{counted(len(would_mark), 'ledger')} would be marked"
    if outcome is None:
        return [*lines, f"{text}, unless something has changed; --mark marks them"]
    text += _changed(outcome.changed)
    lines.append(f"{text}; --mark marks them" if would_mark else text)
    return [*lines, *_private_lines(outcome.own)]


def _changed(count: int) -> str:
    return f", {count:,} left out: changed or deleted since the run" if count else ""


def _private_lines(count: int, *, has_worker: bool = True) -> list[str]:
    if not count:
        return []
    text = (
        f"{counted(count, 'ledger')} of these in bookmender's private queue: Java's workers cannot "
        "detect this damage, so only a bookmender worker repairs it"
    )
    return [text if has_worker else f"{text}; no such worker is running: {START_WORKER}"]


def marks_record(
    damaged: Sequence[DamagedLedger], outcome: MarkResult | MarkPreview | None
) -> dict[str, Any]:
    """Return the marks as a record. ``changed``, ``own``: null if the cluster could not be
    asked."""
    if isinstance(outcome, MarkResult):
        return {
            "marked": outcome.counts.new,
            "known": outcome.counts.known,
            "changed": outcome.counts.changed,
            "own": outcome.counts.own,
            "has_worker": outcome.has_worker,
        }
    would_mark = damaged if outcome is None else outcome.ledgers
    return {
        "would_mark": len(would_mark),
        "changed": None if outcome is None else outcome.changed,
        "own": None if outcome is None else outcome.own,
        "first_ledgers": [
            {
                "ledger_id": each.ledger_id,
                "verdict": each.grade.value,
                "bookies": list(each.bookies),
                "detail": each.detail,
            }
            for each in would_mark[:SHOWN_MAX]
        ],
    }


def run_changes_record(changes: FeedChanges, *, is_acknowledged: bool) -> dict[str, Any]:
    """Return what a run that follows the change feed was told, and if it is acknowledged."""
    return {
        "client": changes.client,
        "is_whole": changes.is_whole,
        "position": changes.position,
        "changed": len(changes.ledger_ids),
        "deleted": sum(changes.are_deleted),
        "is_acknowledged": is_acknowledged,
    }


# --- One ledger -----------------------------------------------------------------------------------


def history_lines(history: Sequence["RunVerdict"]) -> list[str]:
    """Return lines on what runs found for a ledger, the last run first."""
    lines: list[str] = []
    for each in history:
        summary, verdict = each.summary, each.verdict
        checked_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(verdict.checked_ms / 1000))
        since, deleted = "; at a closer level", each.later_runs_deleted
        if not lines:
            others = each.later_runs - deleted
            since = f"; {counted(others, 'later run')} did not check it" if others else ""
            if deleted:
                since += f"; the rows of {counted(deleted, 'later run')} were deleted"
        lines.append(f"run {summary.run}, level {summary.level.value}, at {checked_at}{since}:")
        parts = [verdict.grade.value]
        # A ledger can be whole and wrong: enough copies match their digests, but the copies differ.
        if verdict.is_wrong and verdict.grade is Grade.WHOLE:
            parts.append("copies differ")
        parts.append(verdict.state or "metadata unreadable")
        if verdict.state:
            parts += [f"last entry {verdict.last_entry_id:,}", size_text(verdict.length)]
        if verdict.is_tail_unseen:
            parts.append("later entries not checked")
        if verdict.rests_on_unknown:
            parts.append("some copies unknown")
        lines.append(f"  {', '.join(parts)}")
        lines += [f"    {printable(evidence_text(evidence))}" for evidence in verdict.evidence]
        if verdict.evidence_left_out:
            lines.append(f"    and {verdict.evidence_left_out:,} more")
    return lines


def history_record(ledger_id: int, history: Sequence["RunVerdict"]) -> dict[str, Any]:
    """Return the JSON of ``fsck show``: the verdicts on one ledger, with the columns of the results
    and the run that each comes from."""
    from auditor.fsck.results.rows import to_record  # needs pyarrow

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
            for each in history
        ],
    }
