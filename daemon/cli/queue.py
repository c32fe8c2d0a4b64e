"""``bookmender queue``: shows the marked ledgers."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from daemon.admin_session import run_in_session
from daemon.cli.output import echo_list, list_options
from daemon.operations.queue import (
    QUEUE_LIMIT,
    MarkReasonRecord,
    QueuedLedgerRecord,
    QueueRecord,
    read_queue,
)
from daemon.status.records import age_s, seconds_until
from daemon.words import counted, printable


@click.command()
@list_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=QUEUE_LIMIT,
    show_default=True,
    help="Maximum number of ledgers.",
)
def queue(config: Path | None, output: str, limit: int) -> None:
    """Show the marked ledgers, and why each one waits.

    For each ledger the list shows the missing bookies, the reasons of the mark, and what blocks
    the repair.

    The list contains the queue shared with Java and bookmender's private queue. The private queue
    holds drains, repairs by hand, and damage that Java does not detect.

    Exit codes: 0 no ledger is marked. 1 some are. 3 unknown.
    """
    found = run_in_session(config, partial(read_queue, limit=limit))
    echo_list(output, found, rows="ledgers", text=lambda: _text(found))
    sys.exit(1 if found.marked else 0)


def _text(found: QueueRecord) -> str:
    now_ms = time.time_ns() // 1_000_000
    is_cut = found.marked > len(found.ledgers)
    more = f", the first {len(found.ledgers)} shown" if is_cut else ""
    lines = [line_of(row, now_ms=now_ms) for row in found.ledgers]
    return "\n".join([*lines, f"{counted(found.marked, 'ledger')} marked{more}"])


def line_of(row: QueuedLedgerRecord, *, now_ms: int) -> str:
    """Return a row as text."""
    line = f"ledger {row.ledger_id}: {_meant(row)}"
    reasons = [_reason(reason, now_ms=now_ms) for reason in row.reasons]
    if told := "; ".join(filter(None, reasons)):
        line += f" [{told}]"
    if lock := row.lock:
        line += f" (locked by {lock.holder or 'an unknown holder'}"
        line += "" if lock.is_ours else ", which is not a bookmender node,"
        line += f" for {age_s(lock.since_ms, now_ms)} s)"
    if note := row.waiting:
        line += f" — {note.reason}: {note.detail}"
        if next_s := seconds_until(note.next_try_ms, now_ms):
            line += f"; try {note.tries + 1} in {next_s} s"
        elif left_s := seconds_until(note.grace_until_ms, now_ms):
            line += f"; grace ends in {left_s} s"
    return printable(line)


def _meant(row: QueuedLedgerRecord) -> str:
    """Return what the mark asks for.

    A mark in the private queue names bookies to drain, bookies with bad copies, or none if it was
    made by hand.
    """
    if row.missing is None:
        return row.mark_unreadable or ""
    named = ", ".join(row.missing)
    if not row.is_private:
        return f"misses {named or 'nothing'}"
    if {reason.cause for reason in row.reasons if reason.bookie} - {"drained", "hand"}:
        return f"bad copies on {named}"
    drained, by_hand = _of_cause(row.reasons, "drained"), _of_cause(row.reasons, "hand")
    told = [f"drain of {drained}"] if drained else []
    if by_hand or not drained:
        told.append(f"check by hand{' on ' if by_hand else ''}{by_hand}")
    return "; ".join(told)


def _of_cause(reasons: Sequence[MarkReasonRecord], cause: str) -> str:
    return ", ".join(each.bookie for each in reasons if each.cause == cause and each.bookie)


def _reason(reason: MarkReasonRecord, *, now_ms: int) -> str:
    """Return one reason as text; empty if it is unknown."""
    bookie, detail = reason.bookie, reason.detail
    age = "" if reason.since_ms is None else f"{age_s(reason.since_ms, now_ms)} s"
    match reason.cause:
        case "unknown":
            return ""
        case "lost":
            told = f"lost for {age}" if not detail else f"lost {age} ago, {detail}"
        case "reformatted":
            told = f"reformatted {age} ago"
        case "drained":
            told = f"draining for {age}"
        case "hand":
            told = "by hand" if not detail else f"by hand, {detail}"
        case check:
            told = f"{check} check, {age} ago: {detail}"
    return told if bookie is None else f"{bookie}: {told}"
