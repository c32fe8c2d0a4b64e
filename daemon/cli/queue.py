"""``bookmender queue``: shows the marked ledgers."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import click

from daemon.cli.output import echo_list, list_options, table
from daemon.cli.session import run_in_session
from daemon.operations.queue import (
    QUEUE_LIMIT,
    MarkReasonRecord,
    QueuedLedgerRecord,
    QueueRecord,
    QueueSumsRecord,
    queue_sums,
    read_queue,
)
from daemon.status.records import age_s, seconds_until
from daemon.words import counted, duration_text, printable
from ledgers.sizes import size_text


@click.command()
@list_options
@click.option("--tenant", default="", help="Only ledgers of this tenant.")
@click.option("--topic", metavar="PREFIX", default="", help="Only topics that begin so.")
@click.option("--by", type=click.Choice(("topic", "tenant")), help="Sums instead of ledgers.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=QUEUE_LIMIT,
    show_default=True,
    help="Maximum number of ledgers.",
)
def queue(
    config: Path | None,
    output: str,
    tenant: str,
    topic: str,
    by: Literal["topic", "tenant"] | None,
    limit: int,
) -> None:
    """Show the marked ledgers and why they wait.

    \b
      bookmender queue --by tenant             how much of whose data is affected
      bookmender queue --topic acme/orders     the ledgers of these topics

    For each ledger the list shows the missing bookies, the reasons of the mark, and what blocks
    the repair. The topic is tenant/namespace/topic of Pulsar, or what another application stored in
    the custom metadata of the ledger. SIZE is the length of a closed ledger.

    The list contains the queue shared with Java and bookmender's private queue. The private queue
    holds drains, repairs by hand, and damage that Java does not detect.

    Exit codes: 0 no ledger is marked. 1 some are. 3 unknown.
    """
    # Sums are of all ledgers.
    read = partial(read_queue, tenant=tenant, topic=topic, limit=None if by else limit)
    found = run_in_session(config, read)
    now_ms = time.time_ns() // 1_000_000
    if by:
        sums = queue_sums(found, by=by)
        echo_list(output, sums, rows="sums", text=lambda: sums_text(sums, by=by))
    else:
        echo_list(output, found, rows="ledgers", text=lambda: list_text(found, now_ms=now_ms))
    sys.exit(1 if found.marked else 0)


def list_text(found: QueueRecord, *, now_ms: int) -> str:
    is_cut = found.marked > len(found.ledgers)
    more = f", the first {len(found.ledgers):,} shown" if is_cut else ""
    rows = [
        {
            "LEDGER": str(row.ledger_id),
            "TOPIC": row.topic or "",
            "SIZE": "" if row.bytes is None else size_text(row.bytes),
            "MARKED": f"{duration_text(age_s(row.ctime_ms, now_ms))} ago" if row.ctime_ms else "",
            "WHY": why_text(row, now_ms=now_ms),
        }
        for row in found.ledgers
    ]
    lines = table(rows, numbers=("LEDGER", "SIZE"))
    return "\n".join([*lines, f"{counted(found.marked, 'ledger')} marked{more}"])


def sums_text(found: QueueSumsRecord, *, by: str) -> str:
    rows = [
        {
            by.upper(): each.name or f"(no {by} known)",
            "LEDGERS": f"{each.ledgers:,}",
            "NEED HELP": f"{each.needs_help:,}",
            "SIZE": size_text(each.bytes),
        }
        for each in found.sums
    ]
    lines = table(rows, numbers=("LEDGERS", "NEED HELP", "SIZE"))
    return "\n".join([*lines, f"{counted(found.marked, 'ledger')} marked"])


def why_text(row: QueuedLedgerRecord, *, now_ms: int) -> str:
    """Return why the ledger is marked, and what it waits for."""
    line = _meant(row)
    reasons = [
        f"{each.bookie}: {told}" if each.bookie and row.missing != [each.bookie] else told
        for each in row.reasons
        if (told := _reason(each, now_ms=now_ms))
    ]
    if told := "; ".join(reasons):
        line += f" [{told}]"
    if lock := row.lock:
        line += f" (locked by {lock.holder or 'an unknown holder'}"
        line += "" if lock.is_ours else ", which is not a bookmender node,"
        line += f" for {duration_text(age_s(lock.since_ms, now_ms))})"
    if note := row.waiting:
        line += f" — {note.reason}: {note.detail}"
        if next_s := seconds_until(note.next_try_ms, now_ms):
            line += f"; try {note.tries + 1} in {duration_text(next_s)}"
        elif left_s := seconds_until(note.grace_until_ms, now_ms):
            line += f"; grace ends in {duration_text(left_s)}"
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
    detail = reason.detail
    age = "" if reason.since_ms is None else duration_text(age_s(reason.since_ms, now_ms))
    match reason.cause:
        case "unknown":
            return ""
        case "lost":
            return f"lost for {age}" if not detail else f"lost {age} ago, {detail}"
        case "reformatted":
            return f"reformatted {age} ago"
        case "drained":
            return f"draining for {age}"
        case "hand":
            return "by hand" if not detail else f"by hand, {detail}"
        case check:
            return f"{check} check, {age} ago: {detail}"
