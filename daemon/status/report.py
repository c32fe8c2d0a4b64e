"""A status as text for people, and as answers for programs."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import structs

from auditor.fsck.options import Level
from auditor.fsck.results.summary import Summary
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord
from daemon.fsck.advice import counts_text
from daemon.messages import message
from daemon.operations.checks import RunRecord, run_text
from daemon.operations.holds import HoldRecord
from daemon.operations.orders import unreadable_texts
from daemon.status.answers import (
    AbsentInMaintenance,
    AbsentNamedBy,
    AuditSummary,
    BlockedRecord,
    BookiesByState,
    ConditionRecord,
    ConditionsRecord,
    LeaderStateRecord,
    LedgerMapCounts,
    MuteRecord,
    ProgressRecord,
    QueueCounts,
    RunningCheckRecord,
    SampleRecord,
    StatusRecord,
    UnavailableRecord,
    WaitingRecord,
)
from daemon.status.condition import exit_code, health, some
from daemon.status.conditions import conditions
from daemon.status.leader import LeaderState, loss_text
from daemon.status.pace import pace_text
from daemon.status.records import (
    ForeignLockRecord,
    LiveNodeRecord,
    NoteRecord,
    UnprovenEndsRecord,
    age_s,
    seconds_until,
)
from daemon.status.state import Services, Status
from daemon.words import counted, duration_text, printable
from ledgers.model import BookieId
from ledgers.sizes import size_text
from ledgers.typed import convert
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.reasons import Reason, gravity

BOOKIES_SHOWN_MAX = 20
LEDGERS_LISTED_MAX = 1_000
"""Maximum number of waiting ledgers, and of ledgers with unproven ends, in the JSON."""


# --- Text -----------------------------------------------------------------------------------------


def to_text(status: Status) -> str:
    """Return the health, the conditions and what to do, then the facts in short blocks."""
    found = conditions(status)
    lines = [
        f"{'' if index else label:<10}{line}"
        for label, block in facts(status).items()
        for index, line in enumerate(block)
    ]
    return "\n".join([_first_line(found, status), *_condition_lines(found), "", *lines])


def facts(status: Status) -> dict[str, list[str]]:
    """Return the facts behind the conditions: lines by label, in the order of the text."""
    return {
        "leader": [_leader(status.services)],
        "map": _ledger_map(status.leader_state.ledger_map),
        "nodes": [_nodes(status.services)],
        "bookies": list(_bookies(status)),
        "orders": _orders(status),
        "queue": list(_queue(status)),
        "waiting": list(_waiting(status)),
        "audit": _audit(status.reports.audit, now_ms=status.taken_ms),
        "fsck": list(_fsck(status)),
        "checks": [
            f"{r.name}: {run_text(r.running)}" for r in status.leader_state.checks if r.running
        ],
    }


def _first_line(found: Sequence[ConditionRecord], status: Status) -> str:
    loud = [e for e in found if e.severity != "INFO" and e.muted_until_ms is None]
    codes = ", ".join(each.code for each in loud)
    muted = ", ".join(each.code for each in found if each.muted_until_ms is not None)
    facts = [codes, f"(muted: {muted})" if muted else ""]
    if status.is_whole and not loud:
        facts[0] = "All ledgers are whole."
    return f"{health(found)}  {' '.join(filter(None, facts))}".rstrip()


def _condition_lines(found: Sequence[ConditionRecord]) -> Iterator[str]:
    width = max((len(each.code) for each in found), default=0)
    for each in found:
        muted = "" if each.muted_until_ms is None else "(muted) "
        yield f"{each.code:<{width}}  {each.severity:<7}  {muted}{each.fact}"
        if not muted:
            yield f"    {each.action}"


def _leader(services: Services) -> str:
    if services.leader is None:
        return "none"
    node = services.leader_node
    return f"{printable(services.leader)} " + (
        f"(pid {node.pid})" if node else "(Java's AutoRecovery)"
    )


def _nodes(services: Services) -> str:
    """Return the nodes with their services.

    A service of a process appears once, even if an expiring session of it is still registered.
    """
    processes: dict[tuple[str, int], dict[str, None]] = {}
    for node in services.nodes:
        processes.setdefault((node.host, node.pid), {})[node.role.value] = None
    shown = (
        f"{printable(host)} (pid {pid}: {' and '.join(roles)})"
        for (host, pid), roles in processes.items()
    )
    return ", ".join(shown) or "none"


def _ledger_map(note: LedgerMapRecord | None) -> list[str]:
    if note is None:
        return []
    if note.is_complete:
        return ["complete"]
    if note.hidden:
        return [f"incomplete, ACLs hide {some(list(map(printable, note.hidden)))}"]
    of = f" of about {note.expected_count:,}" if note.expected_count else ""
    return [f"loading, {note.read_count:,}{of} ledgers read"]


def _bookies(status: Status) -> Iterator[str]:
    bookies = status.bookies
    counts = [f"{len(bookies.writable)} writable", f"{len(bookies.read_only)} read-only"]
    if bookies.is_any_registered:
        counts.append(f"{len(bookies.lost)} lost")
    for count, state in (
        (len(bookies.reformatted), "reformatted"),
        (len(bookies.absent), "absent"),
        (len(bookies.in_maintenance), "absent for maintenance"),
    ):
        if count:
            counts.append(f"{count} {state}")
    yield ", ".join(counts)
    lines = [
        *(_lost(bookie, status) for bookie in bookies.lost),
        *(f"{bookie} reformatted" for bookie in bookies.reformatted),
        *(_absent(bookie, status) for bookie in _by_time_of_loss(status)),
    ]
    yield from lines[:BOOKIES_SHOWN_MAX]
    if len(lines) > BOOKIES_SHOWN_MAX:
        yield f"and {len(lines) - BOOKIES_SHOWN_MAX} more"


def _lost(bookie: BookieId, status: Status) -> str:
    """Return what is left to do for a lost bookie. The numbers are from different moments."""
    state, queue = status.leader_state, status.queue
    marked = dict(queue.by_bookie).get(bookie, 0)
    in_maintenance = dict(queue.by_bookie_in_maintenance).get(bookie, 0)
    named = state.named_by.get(bookie)
    facts = []
    if state.is_named_by_none(bookie):
        facts.append("named by no ledger")
    elif named is not None:
        least = "" if state.is_count_complete else "at least "
        age = f" {duration_text(state.counted_age_s)} ago" if state.counted_age_s >= 1 else ""
        facts.append(f"named by {least}{counted(named, 'ledger')}{_and_unreadable(state)}{age}")
    if marked or not state.is_named_by_none(bookie):
        facts.append(f"{marked:,} marked")
    if in_maintenance:
        facts.append(f"{in_maintenance:,} of them waiting for other bookies in maintenance")
    return f"{bookie} lost: {', '.join(facts)}"


def _and_unreadable(state: LeaderState) -> str:
    """Return that ledgers with unreadable metadata may name the bookie too; empty without any."""
    count = state.ledger_map.unreadable_count if state.ledger_map else 0
    return f" and perhaps {count:,} unreadable {'one' if count == 1 else 'ones'}" if count else ""


def _by_time_of_loss(status: Status) -> list[BookieId]:
    due_ms = status.leader_state.loss_due_ms
    return sorted(
        status.bookies.absent, key=lambda bookie: (due_ms.get(bookie) or math.inf, bookie)
    )


def _absent(bookie: BookieId, status: Status) -> str:
    state = status.leader_state
    for loss in state.pending_losses:
        if loss.bookie == bookie:
            return f"{bookie} absent: {loss_text(loss, now_ms=status.taken_ms)}"
    marked = dict(status.queue.by_bookie).get(bookie, 0)
    delay = duration_text(state.recovery_delay_s)
    return f"{bookie} absent for an unknown time (recovery delay {delay}), {marked:,} marked"


def _orders(status: Status) -> list[str]:
    muted = {each.code for each in conditions(status) if each.muted_until_ms is not None}
    return [
        *(row.to_text(now_ms=status.taken_ms) for row in status.bookies.ordered),
        *(_mute(mute, status, is_muted=mute.code in muted) for mute in _mutes(status)),
        *unreadable_texts(status.orders.unreadable),
    ]


def _mute(mute: MuteRecord, status: Status, *, is_muted: bool) -> str:
    left = duration_text((mute.until_ms - status.taken_ms) / 1000)
    why = f" ({mute.reason})" if mute.reason else ""
    holds = mute.code in {each.code for each in conditions(status)}
    doubt = "; it counts nevertheless, because it is worse now" if holds and not is_muted else ""
    return printable(f"{mute.code} is muted by {mute.by} for another {left}{why}{doubt}")


def _progress(status: Status) -> Iterator[str]:
    """Return how many ledgers are queued, where each counts once, and what is left."""
    now = progress_record(status)
    if not now.queued:
        yield "empty"
        return
    parts = (
        (now.copying, "in repair"),
        (now.next, "next" if status.services.has_worker else "not tried yet"),
        (now.waiting, "waits" if now.waiting == 1 else "wait"),
        (now.needs_help, "needs help" if now.needs_help == 1 else "need help"),
    )
    shown = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    yield f"{counted(now.queued, 'ledger')}: {shown}"
    facts = []
    if now.bytes_left:
        facts.append(f"{size_text(now.bytes_left)} left")
    if now.bytes_per_s:
        facts.append(f"{size_text(now.bytes_per_s)}/s")
    if now.left_s is not None:
        facts.append(f"about {duration_text(now.left_s)} left")
    if facts:
        yield ", ".join(facts)


def _queue(status: Status) -> Iterator[str]:
    queue = status.queue
    yield from _progress(status)
    if several := [each for each in queue.by_missing if each[0] > 1]:
        yield ", ".join(f"{count:,} missing {missing} bookies" for missing, count in several)
    causes = status.leader_state.by_cause
    if [cause for cause, _ in causes] not in ([], ["lost"]):
        yield f"causes: {', '.join(f'{count:,} {cause}' for cause, count in causes)}"
    if queue.private_damaged_count:
        yield f"{queue.private_damaged_count:,} in bookmender's private queue, damaged"
    if others := queue.private_count - queue.private_damaged_count:
        yield f"{others:,} in bookmender's private queue, to drain or repair by hand"
    if queue.total and status.services.has_worker and not status.orders.is_disabled:
        bookies = status.bookies
        registered = len(bookies.writable) + len(bookies.read_only)
        yield f"pace: {pace_text(status.copying, bookie_count=registered)}"
    if queue.foreign_locks:
        yield _foreign_locks(queue.foreign_locks, now_ms=status.taken_ms)


def _foreign_locks(locks: Sequence[LockedLedger], *, now_ms: int) -> str:
    oldest = locks[0]
    return (
        f"{counted(len(locks), 'lock')} not held by bookmender, the longest for "
        f"{age_s(oldest.since_ms, now_ms)} s: ledger {oldest.ledger_id}, "
        f"by {printable(oldest.holder or 'a holder without a name')}"
    )


def _waiting(status: Status) -> Iterator[str]:
    queue, now_ms = status.queue, status.taken_ms
    if due := sorted(queue.overtaken - queue.locked):
        yield (
            f"{len(due):,} due, because a bookie registered or an order changed since the last "
            f"try: ledger {some(due)}"
        )
    for reason in sorted(Reason, key=gravity):
        notes = [note for note in queue.postponed if note.reason is reason]
        if notes:
            longest = duration_text(max(age_s(note.since_ms, now_ms) for note in notes))
            yield (
                f"{len(notes):,} {reason.value}, for up to {longest}, "
                f"{_next_try(notes, now_ms=now_ms)}: ledger "
                f"{some([note.ledger_id for note in notes])}"
            )
            yield f"    {printable(message(notes[0].ledger_id, notes[0].blocked).text)}"


def _next_try(notes: Sequence[WaitingNote], *, now_ms: int) -> str:
    """Return when the first of these ledgers, which wait for the same reason, is tried again."""
    if all(note.grace_until_ms for note in notes):
        left_s = min(seconds_until(note.grace_until_ms, now_ms) for note in notes)
        if notes[0].reason.is_a_grace:
            return f"grace over in {duration_text(left_s)}" if left_s else "grace over"
        if left_s:
            return f"next try in {duration_text(left_s)}, when its grace is over"
    next_s = min(seconds_until(note.next_try_ms, now_ms) for note in notes)
    return f"next try in {duration_text(next_s)}" if next_s else "next try due"


def _audit(audit: AuditRecord | None, *, now_ms: int) -> list[str]:
    if audit is None:
        return []
    age = duration_text(age_s(audit.finished_ms, now_ms))
    return [f"{age} ago, {counted(audit.ledger_count, 'ledger')}"]


def _fsck(status: Status) -> Iterator[str]:
    reports = status.reports
    for run in reports.fsck_runs:
        since = "" if run is reports.fsck else "; no run at this level since"
        yield _fsck_run(run, now_ms=status.taken_ms) + since


def _fsck_run(run: Summary, *, now_ms: int) -> str:
    age = duration_text(age_s(run.finished_ms, now_ms))
    facts = [counts_text(run.counts)]
    if run.is_changed_only:
        facts[0] += " (changed ones only)"
    if run.left:
        wrong = f", {run.left_wrong:,} of them wrong before" if run.left_wrong else ""
        facts.append(f"{run.left:,} left for lack of time{wrong}")
    if run.marked:
        facts.append(f"{run.marked:,} marked for repair")
    level = run.level.value + (" (no copy was read)" if run.level is Level.METADATA else "")
    return f"{age} ago, level {level}: {'; '.join(facts)}"


# --- Answers --------------------------------------------------------------------------------------


def status_record(status: Status) -> StatusRecord:
    """Return the whole state as an answer."""
    found = conditions(status)
    services, bookies, queue, reports = (
        status.services,
        status.bookies,
        status.queue,
        status.reports,
    )
    waiting = queue.waiting[:LEDGERS_LISTED_MAX]
    hold, audit = status.orders.hold, reports.audit
    return StatusRecord(
        health=health(found),
        exit_code=exit_code(found),
        is_whole=status.is_whole,
        conditions=list(found),
        mutes=_mutes(status),
        taken_ms=status.taken_ms,
        leader=services.leader,
        leader_node=LiveNodeRecord.of(services.leader_node) if services.leader_node else None,
        nodes=list(map(LiveNodeRecord.of, services.nodes)),
        bookies=BookiesByState(
            writable=list(bookies.writable),
            read_only=list(bookies.read_only),
            lost=list(bookies.lost),
            absent=list(bookies.absent),
            reformatted=list(bookies.reformatted),
            in_maintenance=AbsentInMaintenance(
                absent=[row.bookie for row in bookies.in_maintenance],
                until_ms=bookies.maintenance_until_ms,
            ),
        ),
        ordered_bookies=[row.record() for row in bookies.ordered],
        hold=None if hold is None else HoldRecord.of(hold),
        is_disabled=status.orders.is_disabled,
        disabled_until_ms=status.orders.disabled_until_ms,
        unreadable_orders=list(status.orders.unreadable),
        unreadable_records=[each.path for each in reports.unreadable_records],
        progress=progress_record(status),
        queue=QueueCounts(
            total=queue.total,
            marked=queue.marked_count,
            private=queue.private_count,
            private_damaged=queue.private_damaged_count,
            locked=queue.locked_count,
            by_missing_count={str(missing): count for missing, count in queue.by_missing},
            by_missing_bookie=dict(queue.by_bookie),
            waiting_for_maintenance_by_missing_bookie=dict(queue.by_bookie_in_maintenance),
            by_cause=dict(status.leader_state.by_cause),
            foreign_locks=list(map(ForeignLockRecord.of, queue.foreign_locks)),
        ),
        waiting=WaitingRecord(
            count=queue.waiting_count,
            ledgers=list(map(NoteRecord.of, waiting)),
            overtaken=sorted(queue.overtaken.intersection(n.ledger_id for n in waiting)),
        ),
        leader_state=_leader_state(status.leader_state),
        copying=status.copying,
        last_audit=None
        if audit is None
        else AuditSummary(
            finished_ms=audit.finished_ms,
            ledgers=audit.ledger_count,
            marks=audit.mark_count,
            unreadable=audit.unreadable_count,
            unreadable_ledgers=list(audit.unreadable),
        ),
        last_fsck=reports.fsck.to_record() if reports.fsck else None,
        closer_fsck=reports.fsck_closer.to_record() if reports.fsck_closer else None,
        unproven_ends=UnprovenEndsRecord(
            count=len(reports.unproven), ledgers=list(reports.unproven[:LEDGERS_LISTED_MAX])
        ),
    )


def progress_record(status: Status) -> ProgressRecord:
    queue, measured = status.queue, status.progress
    postponed = queue.postponed
    copying = len(queue.locked.difference(note.ledger_id for note in postponed))
    blocked = sum(note.reason.needs_help for note in postponed)
    unreadable = queue.waiting_count - len(queue.waiting)
    waiting = len(postponed) - blocked + unreadable
    return ProgressRecord(
        queued=queue.total,
        copying=copying,
        next=max(0, queue.total - copying - waiting - blocked),
        waiting=waiting,
        needs_help=blocked,
        bytes_left=measured.bytes_left if measured else None,
        bytes_per_s=measured.bytes_per_s if measured else None,
        left_s=measured.left_s if measured else None,
        samples=convert(
            measured.samples if measured else (), list[SampleRecord], from_attributes=True
        ),
    )


def _mutes(status: Status) -> list[MuteRecord]:
    mutes = sorted(status.orders.mutes.items())
    return [
        MuteRecord(
            code=code,
            since_ms=mute.since_ms,
            until_ms=mute.until_ms,
            by=mute.by,
            reason=mute.reason,
        )
        for code, mute in mutes
        if status.taken_ms < mute.until_ms
    ]


def _leader_state(state: LeaderState) -> LeaderStateRecord:
    ledger_map = state.ledger_map
    return LeaderStateRecord(
        ledger_map=None
        if ledger_map is None
        else LedgerMapCounts(
            is_complete=ledger_map.is_complete,
            ledgers=ledger_map.ledger_count,
            unreadable=ledger_map.unreadable_count,
            read=ledger_map.read_count,
            expected=ledger_map.expected_count or None,
            written_ms=ledger_map.written_ms,
        ),
        recovery_delay_s=state.recovery_delay_s,
        recovery_delay_error=state.recovery_delay_error or None,
        pending_losses=list(state.pending_losses),
        running_checks=[
            RunningCheckRecord(check=row.name, **structs.asdict(RunRecord.of(row.running)))
            for row in state.checks
            if row.running
        ],
        absent_named_by=AbsentNamedBy(
            ledgers=dict(sorted(state.named_by.items())),
            is_complete=state.is_count_complete,
            counted_age_s=round(state.counted_age_s, 1),
        ),
        unavailable_ledgers=convert(
            state.unavailable, UnavailableRecord | None, from_attributes=True
        ),
    )


def conditions_record(status: Status) -> ConditionsRecord:
    found = conditions(status)
    return ConditionsRecord(health=health(found), taken_ms=status.taken_ms, conditions=list(found))


def blocked_ledgers_record(status: Status) -> BlockedRecord:
    blocked = status.queue.blocked
    return BlockedRecord(
        count=len(blocked),
        by_reason=dict(Counter(note.reason.value for note in blocked)),
        taken_ms=status.taken_ms,
        ledgers=list(map(NoteRecord.of, blocked[:LEDGERS_LISTED_MAX])),
    )
