"""``bookmender queue``: shows the marked ledgers, why they are marked, and what blocks their
repair."""

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from auditor.mark_reasons import MarkExplainer
from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.blocked import access_denied_text, current_notes
from daemon.cli.main import config_option
from daemon.cli.output import echo_list, list_output_option
from daemon.status.records import age_s, lock_record, note_record, seconds_until
from daemon.words import counted, printable
from replication.ledger_record import WaitingNotes
from replication.marks import LockedLedger, MarkedLedger, marked_ledger_ids, read_locks, read_marks
from replication.nodes import live_nodes
from replication.znodes import MarkPaths

COLUMNS = ("ledger_id", "missing", "ctime_ms", "is_private", "lock.holder", "waiting.reason")


@click.group()
def queue() -> None:
    """Show the ledgers marked as under-replicated."""


@queue.command("list")
@config_option
@list_output_option
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Maximum number of ledgers.",
)
def list_queue(config: Path | None, output: str, limit: int) -> None:
    """List the marked ledgers, and why each one waits.

    For each ledger the list shows the missing bookies, the reasons of the mark, and what blocks
    the repair.

    The list contains the queue shared with Java and bookmender's private queue. The private queue
    holds drains, repairs by hand, and damage that Java does not detect.

    Exit codes: 0 no ledger is marked. 1 some are. 3 unknown.
    """

    async def look(cluster: AdminSession) -> tuple[int, list[dict[str, Any]]]:
        shared, private = (
            await _marked(cluster, cluster.paths),
            await _marked(cluster, cluster.paths.private),
        )
        marked = private | shared
        chosen = [marked[ledger_id] for ledger_id in sorted(marked)[:limit]]
        return len(marked), await queue_rows(
            cluster, chosen, only_private=private.keys() - shared.keys()
        )

    total, rows = run_in_session(config, look)
    now_ms = time.time_ns() // 1_000_000
    more = f", the first {len(rows)} shown" if total > len(rows) else ""
    echo_list(
        output,
        {"marked": total, "ledgers": rows},
        rows="ledgers",
        columns=COLUMNS,
        text=lambda: "\n".join(
            [
                *(line_of(row, now_ms=now_ms) for row in rows),
                f"{counted(total, 'ledger')} marked{more}",
            ]
        ),
    )
    sys.exit(1 if total else 0)


async def _marked(cluster: AdminSession, paths: MarkPaths) -> dict[int, MarkedLedger]:
    """Return the marked ledgers of one of the two queues, by id."""
    marks = await read_marks(cluster.store, paths, await marked_ledger_ids(cluster.store, paths))
    return {marked.ledger_id: marked for marked in marks}


async def queue_rows(
    cluster: AdminSession, marked: Sequence[MarkedLedger], *, only_private: Collection[int]
) -> list[dict[str, Any]]:
    """Return the rows of the output. ``only_private``: ledgers that have no mark in the
    shared queue."""
    ledger_ids = [ledger.ledger_id for ledger in marked]
    held = await read_locks(cluster.store, cluster.paths, ledger_ids)
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    locks = {lock.ledger_id: lock for lock in held}
    noted = await WaitingNotes(cluster.store, cluster.paths).read_all(ledger_ids)
    notes = {note.ledger_id: note for note in await current_notes(cluster, noted)}
    reasons = await MarkExplainer.read(cluster.store, cluster.paths, ledger_ids)
    return [
        {
            "ledger_id": ledger.ledger_id,
            "missing": list(ledger.mark.replicas) if ledger.mark else None,
            "mark_unreadable": None if ledger.mark else _unreadable(ledger),
            "ctime_ms": ledger.mark.ctime_ms if ledger.mark else None,
            "is_private": ledger.ledger_id in only_private,
            "reasons": [
                reason.to_json()
                for reason in reasons.explain(
                    ledger.ledger_id, ledger.mark, is_private=ledger.ledger_id in only_private
                )
            ],
            "is_locked": ledger.ledger_id in locks,
            "lock": _lock_record(locks.get(ledger.ledger_id), ours),
            "waiting": note_record(note) if (note := notes.get(ledger.ledger_id)) else None,
        }
        for ledger in marked
    ]


def _unreadable(ledger: MarkedLedger) -> str:
    """Return why the mark cannot be read. If access is denied, the text includes ZooKeeper's
    hint."""
    if ledger.refusal:
        return access_denied_text(ledger)
    return "its mark is unreadable, but the ledger is checked anyway"


def _lock_record(lock: LockedLedger | None, ours: Collection[int]) -> dict[str, Any] | None:
    return None if lock is None else {**lock_record(lock), "is_ours": lock.session_id in ours}


def line_of(row: dict[str, Any], *, now_ms: int) -> str:
    """Return a row as text."""
    line = f"ledger {row['ledger_id']}: {_meant(row)}"
    reasons = [_reason(reason, now_ms=now_ms) for reason in row["reasons"]]
    if told := "; ".join(reason for reason in reasons if reason):
        line += f" [{told}]"
    if lock := row["lock"]:
        line += f" (locked by {lock['holder'] or 'an unknown holder'}"
        line += "" if lock["is_ours"] else ", which is not a bookmender node,"
        line += f" for {age_s(lock['since_ms'], now_ms)} s)"
    if note := row["waiting"]:
        line += f" — {note['reason']}: {note['detail']}"
        if next_s := seconds_until(note["next_try_ms"], now_ms):
            line += f"; try {note['tries'] + 1} in {next_s} s"
        elif left_s := seconds_until(note["grace_until_ms"], now_ms):
            line += f"; grace ends in {left_s} s"
    return printable(line)


def _meant(row: dict[str, Any]) -> str:
    """Return what the mark asks for.

    A mark in the private queue names bookies to drain, bookies with bad copies, or none if it was
    made by hand.
    """
    if row["missing"] is None:
        return str(row["mark_unreadable"])
    named = ", ".join(row["missing"])
    if row["is_private"]:
        causes = {reason["cause"] for reason in row["reasons"] if reason["bookie"]}
        if causes - {"drained", "hand"}:
            return f"bad copies on {named}"
        return "; ".join(_meant_by_hand(row["reasons"]))
    return f"misses {named or 'nothing'}"


def _meant_by_hand(reasons: Sequence[dict[str, Any]]) -> list[str]:
    """Return what an operator ordered: bookies to drain, and bookies to check."""
    drained = [reason["bookie"] for reason in reasons if reason["cause"] == "drained"]
    by_hand = [
        reason["bookie"] for reason in reasons if reason["cause"] == "hand" and reason["bookie"]
    ]
    told = [f"drain of {', '.join(drained)}"] if drained else []
    if by_hand or not drained:
        told.append(f"check by hand{' on ' if by_hand else ''}{', '.join(by_hand)}")
    return told


def _reason(reason: dict[str, Any], *, now_ms: int) -> str:
    """Return one reason as text; empty if it is unknown."""
    bookie, detail = reason["bookie"], reason["detail"]
    age = "" if reason["since_ms"] is None else f"{age_s(reason['since_ms'], now_ms)} s"
    match reason["cause"]:
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
