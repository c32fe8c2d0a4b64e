"""``bookmender status``."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from auditor.fsck.levels import Level
from auditor.fsck.results.advice import counts_text
from auditor.fsck.results.summary import Summary
from auditor.records import AuditRecord
from daemon.admin_session import run_in_session
from daemon.cli.hold import hold_text
from daemon.cli.main import config_option, output_option
from daemon.cli.orders import disregards, unreadable_texts
from daemon.cli.progress import counted, duration_text, printable
from daemon.messages import message
from daemon.status.gathering import gather_status
from daemon.status.leader import (
    away_text,
    check_texts,
    delay_text,
    index_text,
    lost_text,
)
from daemon.status.pace import pace_text
from daemon.status.state import VERDICTS, Status
from daemon.status.verdict import verdict_text
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.nodes import Role
from replication.orders import HoldOrder
from replication.reasons import Reason, gravity

LEDGERS_SHOWN_MAX = 8
BOOKIES_SHOWN_MAX = 20
NEITHER = "none is registered either"
"""As with bookies, ZooKeeper may have forgotten them for a moment: they may well be running."""


@click.command()
@config_option
@output_option
def status(config: Path | None, output: str) -> None:
    found = run_in_session(config, gather_status)
    if output == "json":
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        click.echo(render(found, now_ms=time.time_ns() // 1_000_000))
    sys.exit(found.exit_code)


status.help = "\n".join(
    [
        "What is at risk, who works on it, and what waits and why.",
        "",
        "The verdict is one word:",
        "",
        "\b",
        *(f"  {verdict:<17} {meaning}" for verdict, meaning in VERDICTS.items()),
        "",
        "As JSON, besides: leader, leader_node (null while Java leads), nodes; bookies (away: those that have",
        "time left before they are lost, or of which nobody tells; on_purpose: those away under maintenance,",
        "and until_ms, when the last of their windows is over); queue: total of the ledgers that are marked, in the",
        "queue shared with Java (marked) or in our own alone (own_marked; own_damaged: of these, with damage that Java",
        "does not see), those marked by_missing_bookies, by_lost_bookie (for_windows_by_lost_bookie: of these, those",
        "that wait for a maintenance window to end), by_cause (lost, reformatted: set up anew, the name",
        "of a check, unknown: another auditor's);",
        "auditing, of a leader of ours: index (is_complete; ledgers and unreadable as of written_ms, when it was",
        "built, or so far; read of expected while it is built), recovery_delay_s (recovery_delay_error: why it is",
        "that of the settings, though lostBookieRecoveryDelay stands),",
        "pending_losses (lost_ms: when each will be lost; is_excused: held back till then after an outage of ZooKeeper,",
        "whatever the recovery delay), away_named_by (how many ledgers name each bookie that",
        "is away; told every few seconds; is_complete: every ledger was counted), copyless_ledgers (how many have",
        "entries whose every copy is on these; what may be in an open ledger counts as if it were; null: not counted",
        "yet; copyless_first: the first of them; copyless_enough_for: how many of them can be read again once this",
        "bookie alone is back), running_checks (ledgers_left, remaining_s, counts);",
        "copying: speed (full, yielding: at the bookies whose clients are active, or of which nothing is known), as this",
        "host's settings have it where no order does (bookmender limits);",
        "hold, last_audit, last_fsck (the summary of its last run; marked: ledgers marked since, if any were),",
        "closer_fsck (of an earlier one that looked more closely and found something wrong, if none as close came",
        "after), ordered_bookies, unproven_ends, waiting (overtaken: ledgers that are due, as a bookie came or an order",
        "changed since the try that is told of).",
        "",
        "Whether every copy that nobody missed yet is there, it cannot know: a check of all ledgers",
        "does, or bookmender fsck, whose last run changes no verdict: the line tells what it found. Exits 0 when whole, or short of copies only while operators have bookies",
        "away (maintenance); 1 when not; 3 when it could not tell (no-bookies, no-auditor, indexing, no ZooKeeper; and",
        "maintenance of several bookies, where no leader of ours has counted yet whether each entry has a copy left).",
    ]
)


def render(found: Status, *, now_ms: int) -> str:
    """The same for people, a fact a line."""
    auditing = found.auditing
    lines = [] if found.hold is None else _hold(found, found.hold, now_ms=now_ms)
    lines += [
        f"verdict   {verdict_text(found, now_ms=now_ms)}",
        f"leader    {_leader(found)}",
        *([f"delay     {told}"] if (told := delay_text(auditing)) else []),
        *([f"index     {index_text(auditing.index)}"] if auditing.index else []),
        f"nodes     {_nodes(found)}",
        _bookies(found, now_ms=now_ms),
        f"queue     {counted(found.queued_count, 'ledger')} marked, {found.under_repair} locked for repair, "
        f"{found.waiting_count} waiting",
    ]
    lines += [
        f"          {count} missing {missing} {'bookie' if missing == 1 else 'bookies'}"
        for missing, count in found.by_missing
    ]
    if auditing.by_cause:
        causes = ", ".join(f"{count} {cause}" for cause, count in auditing.by_cause)
        lines.append(f"          because: {causes}")
    lines += [f"          {text}" for text in _own_queue(found)]
    if found.queued_count and found.has_worker and not found.is_disabled:
        lines.append(f"pace      {pace_text(found.pace)}")
    if found.foreign_locks:
        lines.append(f"locks     {_foreign_locks(found.foreign_locks, now_ms=now_ms)}")
    orders = [row.to_text(now_ms=now_ms) for row in found.ordered]
    orders += unreadable_texts(found.unreadable_orders)
    lines += [f"{'' if index else 'orders':<10}{text}" for index, text in enumerate(orders)]
    if found.audit is not None:
        lines.append(f"audit     {_audit(found.audit, now_ms=now_ms)}")
    if found.fsck is not None:
        lines.append(f"fsck      {_fsck(found.fsck, now_ms=now_ms)}")
    if found.fsck_closer is not None:
        closer = _fsck(found.fsck_closer, now_ms=now_ms)
        lines.append(f"          {closer}; none as close came after")
    lines += [f"checking  {text}" for text in check_texts(auditing.checks)]
    if found.unproven:
        lines.append(f"ends      {_unproven(found.unproven)}")
    if found.waiting:
        lines.append("waiting   (bookmender queue list tells of each)")
        lines.append(_due(sorted(found.overtaken)))
        rest = [note for note in found.waiting if note.ledger_id not in found.overtaken]
        lines += [_waiting(each, rest, now_ms=now_ms) for each in sorted(Reason, key=gravity)]
    return "\n".join(line for line in lines if line)


def _hold(found: Status, hold: HoldOrder, *, now_ms: int) -> list[str]:
    has_worker = any(node.role is Role.WORKER for node in found.nodes)
    is_worked_on = has_worker and not found.is_disabled
    marked_count = found.marked_count if is_worked_on else 0
    are_back = (
        found.has_bookies
        and found.leader_node is not None
        and not set(hold.bookies) & {*found.lost, *found.away}
    )
    told = hold_text(hold, now_ms=now_ms, marked_count=marked_count, are_back=are_back)
    lines = [f"HOLD      {told}"]
    if found.leader is not None and found.leader_node is None and not found.is_disabled:
        lines.append(f"          {disregards(found.leader, 'holds')}")
    return lines


def _own_queue(found: Status) -> list[str]:
    """Which part of it all stands in our private queue alone."""
    damaged_count = found.own_damaged_count
    others_count = found.own_marked_count - damaged_count
    lines = []
    if damaged_count:
        text = f"{damaged_count} of them in our private queue, with damage that Java's workers do not see"
        alone = (
            "" if found.has_worker else "; only a bookmender daemon mends it, and none is running"
        )
        lines.append(text + alone)
    if others_count:
        lines.append(
            f"{others_count} of them in our private queue, to be drained or repaired by hand"
        )
    return lines


def _bookies(found: Status, *, now_ms: int) -> str:
    """Those first that are lost for good, then those that came back empty, then those that have
    time left."""
    why = _unmarked_why(found)
    text = f"bookies   {len(found.writable)} writable, {len(found.read_only)} read-only"
    text += f", {len(found.lost)} lost" if found.has_bookies else ": who is lost is not known"
    if found.wiped:
        text += f", {len(found.wiped)} wiped"
    if found.away:
        text += f", {len(found.away)} away"
    if found.has_bookies and found.on_purpose:
        text += f", {len(found.on_purpose)} away on purpose"
    lines = [
        *(f"lost: {_lost(bookie, found, unmarked_why=why)}" for bookie in found.lost),
        *(f"wiped: {_wiped(bookie, unmarked_why=why)}" for bookie in found.wiped),
        *(f"away: {_away(bookie, found, now_ms=now_ms)}" for bookie in _by_loss(found)),
    ]
    more = [f"and {len(lines) - BOOKIES_SHOWN_MAX} more"] if len(lines) > BOOKIES_SHOWN_MAX else []
    return "\n          ".join([text, *lines[:BOOKIES_SHOWN_MAX], *more])


def _lost(bookie: BookieId, found: Status, *, unmarked_why: str) -> str:
    return lost_text(
        bookie,
        found.auditing,
        marked_count=dict(found.by_bookie).get(bookie, 0),
        for_windows=dict(found.for_windows).get(bookie, 0),
        unmarked_why=unmarked_why,
    )


def _wiped(bookie: BookieId, *, unmarked_why: str) -> str:
    told = f"{bookie}, set up anew, and may have lost what it had; its ledgers are not marked for that yet"
    return f"{told}: {unmarked_why}" if unmarked_why else told


def _by_loss(found: Status) -> list[BookieId]:
    """Those that are away and not lost, the next one to be lost first."""
    due_ms = found.auditing.loss_due_ms
    return sorted(found.away, key=lambda bookie: (due_ms.get(bookie) or math.inf, bookie))


def _away(bookie: BookieId, found: Status, *, now_ms: int) -> str:
    marked_count = dict(found.by_bookie).get(bookie, 0)
    return away_text(
        bookie, found.auditing, marked_count=marked_count, leader=found.leader, now_ms=now_ms
    )


def _unmarked_why(found: Status) -> str:
    """What keeps ledgers from being marked for a lost bookie; empty where they are to be any
    moment."""
    if found.hold is not None:
        return "a safety hold stands"
    if found.is_disabled:
        return "auto-recovery is disabled"
    if found.leader is None:
        return "no auditor is running"
    return "the leader has not read every ledger's metadata yet" if found.is_indexing else ""


def _audit(audit: AuditRecord, *, now_ms: int) -> str:
    text = f"{age_s(audit.finished_ms, now_ms)} s ago, {counted(audit.ledger_count, 'ledger')}"
    if not audit.unreadable_count:
        return text
    shown = ", ".join(map(str, audit.unreadable[:LEDGERS_SHOWN_MAX]))
    return f"{text}, the metadata of {audit.unreadable_count} unreadable: {shown}"


def _fsck(summary: Summary, *, now_ms: int) -> str:
    age = duration_text(age_s(summary.finished_ms, now_ms))
    blind = ", no copy was looked at" if summary.level is Level.METADATA else ""
    left = f"; {summary.left:,} left for lack of time" if summary.left else ""
    if summary.left_wrong:
        left += f", {summary.left_wrong:,} of them wrong before"
    if summary.marked:
        left += f"; {summary.marked:,} marked for the daemon"
    return f"{age} ago, level {summary.level.value}{blind}: {counts_text(summary.counts)}{left}"


def _unproven(ledger_ids: Sequence[int]) -> str:
    return (
        f"{len(ledger_ids):,} cannot be proven: ledger {_some(ledger_ids)}; bookmender ledger show ID says "
        "why, and what helps"
    )


def _some(ledger_ids: Sequence[int]) -> str:
    more = ", …" if len(ledger_ids) > LEDGERS_SHOWN_MAX else ""
    return ", ".join(map(str, ledger_ids[:LEDGERS_SHOWN_MAX])) + more


def _due(ledger_ids: Sequence[int]) -> str:
    """Of those that are tried before their time: what was in the way may be so no more."""
    if not ledger_ids:
        return ""
    return (
        f"  {len(ledger_ids)} due, as a bookie came or an order changed since the last try: "
        f"ledger {_some(ledger_ids)}"
    )


def _waiting(reason: Reason, waiting: Sequence[WaitingNote], *, now_ms: int) -> str:
    """One line for all ledgers that wait for the same reason, with what is said of the first."""
    notes = [note for note in waiting if note.reason is reason]
    if not notes:
        return ""
    longest = duration_text(max(age_s(note.since_ms, now_ms) for note in notes))
    return (
        f"  {len(notes)} {reason.value}, for up to {longest}, {_when(notes, now_ms=now_ms)}: "
        f"ledger {_some([note.ledger_id for note in notes])}\n"
        f"      {printable(message(notes[0].ledger_id, notes[0].blocked).text)}"
    )


def _when(notes: Sequence[WaitingNote], *, now_ms: int) -> str:
    """What comes next of those that wait for the same reason: of a grace its end, which what failed
    waits for, too."""
    if all(note.grace_until_ms for note in notes):
        left_s = min(seconds_until(note.grace_until_ms, now_ms) for note in notes)
        if notes[0].reason.is_a_grace:
            return f"grace over in {duration_text(left_s)}" if left_s else "grace over"
        if left_s:
            return f"next try in {duration_text(left_s)}, when its grace is over"
    next_s = min(seconds_until(note.next_try_ms, now_ms) for note in notes)
    return f"next try in {duration_text(next_s)}" if next_s else "next try due"


def _foreign_locks(locks: Sequence[LockedLedger], *, now_ms: int) -> str:
    oldest = locks[0]
    return (
        f"{len(locks)} held by others than our nodes, the longest for "
        f"{age_s(oldest.since_ms, now_ms)} s: ledger {oldest.ledger_id}, "
        f"by {printable(oldest.holder or 'a holder without a name')}"
    )


def age_s(since_ms: int, now_ms: int) -> int:
    return max(0, now_ms - since_ms) // 1000


def seconds_until(due_ms: int, now_ms: int) -> int:
    """Rounded up; 0 when it is over, or was never set."""
    return -(-max(0, due_ms - now_ms) // 1000)


def _leader(found: Status) -> str:
    if found.leader is None:
        return "none: no auditor is running" if found.has_bookies else NEITHER
    leader, node = printable(found.leader), found.leader_node
    return f"{leader} (pid {node.pid})" if node else f"{leader} (Java's AutoRecovery)"


def _nodes(found: Status) -> str:
    """Each half of a process once: until it expires, the session before its present one is there as
    well."""
    processes: dict[tuple[str, int], dict[str, None]] = {}
    for node in found.nodes:
        processes.setdefault((node.host, node.pid), {})[node.role.value] = None
    shown = ", ".join(
        f"{printable(host)} (pid {pid}: {' and '.join(roles)})"
        for (host, pid), roles in processes.items()
    )
    if not shown and not found.has_bookies:
        return NEITHER
    return shown or "none: start one with bookmender daemon"
