"""The conditions of ``bookmender status``: what is wrong, unknown or worth knowing, and what to do.

``conditions`` is a pure function of a ``Status``. It lists every condition that holds. The health
is the worst severity among them. Codes are stable; docs/status.md lists them and ``explanations``
describes each.
"""

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.backlog import UnavailableLedgers
from auditor.fsck.verdicts import Grade
from daemon.messages import message
from daemon.operations.bookies import BookieRow
from daemon.operations.holds import hold_record
from daemon.status.state import Status
from daemon.words import counted, duration_text, printable
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.orders import HoldOrder
from replication.reasons import gravity

NAMES_SHOWN_MAX = 5


class Severity(enum.IntEnum):
    """In ascending order: the health is the highest severity of the conditions, and OK if none is
    above INFO."""

    INFO = 0
    """A fact that is no problem, such as an ordered maintenance."""
    UNKNOWN = 1
    """``status`` cannot tell whether something is wrong."""
    WARN = 2
    """Something is wrong. The daemons work on it, or an operator should act soon."""
    ERROR = 3
    """Data is unavailable, or nothing improves without an operator."""


class Code(enum.StrEnum):
    """Stable names of the conditions. Conditions of equal severity are listed in this order."""

    NO_BOOKIES = "NO_BOOKIES"
    LEDGERS_UNAVAILABLE = "LEDGERS_UNAVAILABLE"
    SAFETY_HOLD = "SAFETY_HOLD"
    NO_WRITABLE_BOOKIES = "NO_WRITABLE_BOOKIES"
    BOOKIES_LOST = "BOOKIES_LOST"
    BOOKIES_REFORMATTED = "BOOKIES_REFORMATTED"
    BOOKIES_ABSENT = "BOOKIES_ABSENT"
    NO_AUDITOR = "NO_AUDITOR"
    NO_WORKERS = "NO_WORKERS"
    AUTORECOVERY_DISABLED = "AUTORECOVERY_DISABLED"
    REPAIRS_BLOCKED = "REPAIRS_BLOCKED"
    LEDGERS_UNDER_REPLICATED = "LEDGERS_UNDER_REPLICATED"
    LEDGERS_DAMAGED = "LEDGERS_DAMAGED"
    LEDGER_METADATA_UNREADABLE = "LEDGER_METADATA_UNREADABLE"
    LEDGER_END_UNPROVEN = "LEDGER_END_UNPROVEN"
    DRAIN_BLOCKED = "DRAIN_BLOCKED"
    ORDERS_UNREADABLE = "ORDERS_UNREADABLE"
    RECORD_UNREADABLE = "RECORD_UNREADABLE"
    RECOVERY_DELAY_UNREADABLE = "RECOVERY_DELAY_UNREADABLE"
    FEED_STALLED = "FEED_STALLED"
    LEDGER_MAP_LOADING = "LEDGER_MAP_LOADING"
    AVAILABILITY_UNKNOWN = "AVAILABILITY_UNKNOWN"
    BOOKIES_IN_MAINTENANCE = "BOOKIES_IN_MAINTENANCE"
    BOOKIES_DRAINING = "BOOKIES_DRAINING"
    FSCK_FOUND_DAMAGE = "FSCK_FOUND_DAMAGE"
    FSCK_INCONCLUSIVE = "FSCK_INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition that holds. ``fact`` and ``action`` are one line each. ``data``: the numbers
    and names of ``fact``, for programs."""

    code: Code
    severity: Severity
    fact: str
    action: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code.value,
            "severity": self.severity.name,
            "fact": self.fact,
            "action": self.action,
            "data": self.data,
        }


def conditions(status: Status) -> tuple[Condition, ...]:
    """Return all conditions that hold, most severe first."""
    found = [
        *_bookie_conditions(status),
        *_service_conditions(status),
        *_order_conditions(status),
        *_queue_conditions(status),
        *_ledger_conditions(status),
        *_fsck_conditions(status),
        *_feed_conditions(status),
    ]
    if not status.bookies.is_any_registered:
        # Rule S8: an empty list of bookies is unknown. The other facts stay visible, but no
        # conclusion is drawn from them.
        found = [_no_bookies(status), *(replace(each, severity=Severity.INFO) for each in found)]
    order = list(Code)
    return tuple(sorted(found, key=lambda each: (-each.severity, order.index(each.code))))


def health(found: Sequence[Condition]) -> str:
    """Return OK, UNKNOWN, WARN or ERROR."""
    worst = _worst(found)
    return "OK" if worst is Severity.INFO else worst.name


def exit_code(found: Sequence[Condition]) -> int:
    """Return 0 for OK, 1 for WARN and ERROR, 3 for UNKNOWN."""
    return {Severity.INFO: 0, Severity.UNKNOWN: 3}.get(_worst(found), 1)


def _worst(found: Sequence[Condition]) -> Severity:
    return max((each.severity for each in found), default=Severity.INFO)


def count_is(count: int, unit: str) -> str:
    """Return ``1 bookie is`` or ``2 bookies are``."""
    return f"{counted(count, unit)} {'is' if count == 1 else 'are'}"


def some(names: Sequence[object], *, total: int | None = None) -> str:
    """Return the first names, and how many more there are: ``1, 2, 3 and 4 more``.

    ``total``: the number of all names, if ``names`` has only some of them.
    """
    shown = ", ".join(map(str, names[:NAMES_SHOWN_MAX]))
    more = (len(names) if total is None else total) - min(len(names), NAMES_SHOWN_MAX)
    return f"{shown} and {more:,} more" if more > 0 else shown


# --- Bookies and the availability of their ledgers ------------------------------------------------


def _no_bookies(status: Status) -> Condition:
    services = status.services
    others = "" if services.nodes or services.leader else ", nor an auditor or worker"
    return Condition(
        code=Code.NO_BOOKIES,
        severity=Severity.UNKNOWN,
        fact=f"No bookie is registered in ZooKeeper{others}. Nothing can be concluded from that.",
        action="Check ZooKeeper, the network and the configured address, then the bookies.",
    )


def _bookie_conditions(status: Status) -> Iterator[Condition]:
    bookies, state, obstacle = status.bookies, status.leader_state, status.marking_obstacle
    if bookies.is_any_registered and not bookies.writable:
        yield Condition(
            code=Code.NO_WRITABLE_BOOKIES,
            severity=Severity.ERROR,
            fact=f"No bookie accepts writes. Read-only: {some(bookies.read_only)}.",
            action="Free disk space on the read-only bookies, or start a writable bookie.",
            data={"read_only": list(bookies.read_only)},
        )
    if bookies.lost:
        yield _lost(status)
    if bookies.reformatted:
        count = len(bookies.reformatted)
        yield Condition(
            code=Code.BOOKIES_REFORMATTED,
            severity=Severity.WARN,
            fact=f"{count_is(count, 'bookie')} reformatted and may have lost data: "
            f"{some(bookies.reformatted)}. The affected ledgers are not marked "
            f"yet{f': {obstacle}' if obstacle else ''}.",
            action="Remove what prevents the marking."
            if obstacle
            else "Nothing: the leader marks them soon.",
            data={"bookies": list(bookies.reformatted), "obstacle": obstacle or None},
        )
    if bookies.absent:
        yield Condition(
            code=Code.BOOKIES_ABSENT,
            severity=Severity.WARN,
            fact=f"{count_is(len(bookies.absent), 'bookie')} absent: {some(bookies.absent)}. "
            f"{_next_loss(status)}.",
            action="Start the bookie. Announce planned work with: bookmender bookie maintenance "
            "ID --for 2h",
            data={"bookies": list(bookies.absent), "untracked": sorted(state.untracked)},
        )
    if bookies.in_maintenance:
        yield _in_maintenance(status)
    if unfinished := [
        row
        for row in bookies.ordered
        if row.drain is not None and (row.progress is None or not row.progress.is_drained)
    ]:
        yield _draining(unfinished)
    if state.unavailable is not None and state.unavailable.count:
        yield _unavailable(state.unavailable, is_complete=state.is_count_complete)
    if len(status.named_unregistered) > 1 and state.unavailable is None:
        names = counted(len(status.named_unregistered), "bookie")
        if status.services.leader_node is not None:
            why, action = "the leader has not counted yet", "Wait some seconds."
        else:
            why = "no bookmender node leads and counts"
            action = "Start a bookie, or let a bookmender node lead."
        yield Condition(
            code=Code.AVAILABILITY_UNKNOWN,
            severity=Severity.UNKNOWN,
            fact=f"{names} that are not registered may have the only copies of some entries: "
            f"{why}.",
            action=action,
            data={"bookies": list(status.named_unregistered)},
        )


def _lost_with_ledgers(status: Status) -> list[BookieId]:
    """Return the lost bookies that ledgers name or may name."""
    is_named_by_none = status.leader_state.is_named_by_none
    return [bookie for bookie in status.bookies.lost if not is_named_by_none(bookie)]


def _lost(status: Status) -> Condition:
    lost, named, obstacle = status.bookies.lost, _lost_with_ledgers(status), status.marking_obstacle
    is_one = len(lost) == 1
    why = ""
    if not named:
        why = f" No ledger names {'it' if is_one else 'them'}, so no copy is missing."
    elif obstacle and not dict(status.queue.by_bookie).keys() >= set(named):
        why = f" {'Its' if is_one else 'Their'} ledgers are not marked: {obstacle}."
    return Condition(
        code=Code.BOOKIES_LOST,
        severity=Severity.WARN if named else Severity.INFO,
        fact=f"{count_is(len(lost), 'bookie')} lost: {some(lost)}.{why}",
        action="Start bookies whose data is intact. Ledgers of the others are copied to other "
        "bookies."
        if named
        else f"Start {'it' if is_one else 'them'}, or run: bookmender bookie decommission "
        f"{lost[0] if is_one else 'ID'}",
        data={"bookies": list(lost), "named_by_ledgers": named},
    )


def _next_loss(status: Status) -> str:
    if status.leader_state.pending_losses:
        loss = status.leader_state.pending_losses[0]
        return f"Next: {loss.bookie} {loss.to_text(now_ms=status.taken_ms)}"
    if status.services.leader is None:
        return "No auditor is tracking the recovery delay"
    they = "it" if len(status.bookies.absent) == 1 else "they"
    return f"The leader has not recorded when {they} disappeared"


def _in_maintenance(status: Status) -> Condition:
    rows, until_ms = status.bookies.in_maintenance, status.bookies.maintenance_until_ms
    assert until_ms is not None
    named, unavailable = status.named_in_maintenance, status.leader_state.unavailable
    is_one = len(rows) == 1
    its = "Its" if is_one else "Their"
    if not named:
        effect = f"No ledger names {'it' if is_one else 'them'}."
    elif unavailable is not None and not unavailable.count:
        effect = f"{its} ledgers are short of copies, but each entry has an available copy."
    else:
        effect = f"{its} ledgers are short of copies."
    left = duration_text((until_ms - status.taken_ms) / 1000)
    bookies = [row.bookie for row in rows]
    return Condition(
        code=Code.BOOKIES_IN_MAINTENANCE,
        severity=Severity.INFO,
        fact=f"{count_is(len(rows), 'bookie')} absent for maintenance, for at most {left}: "
        f"{some(bookies)}. {effect}",
        action="When the bookie runs again: bookmender bookie maintenance ID --end",
        data={"bookies": bookies, "until_ms": until_ms, "named_by_ledgers": list(named)},
    )


def _draining(rows: Sequence[BookieRow]) -> Condition:
    bookies, known = [row.bookie for row in rows], [row.progress for row in rows if row.progress]
    left, most = sum(p.ledgers_left for p in known), sum(p.ledgers_most for p in known)
    is_known = len(known) == len(rows)
    progress = (
        f"{left:,} of {counted(most, 'ledger')} left" if left else "only unreadable ledgers left"
    )
    return Condition(
        code=Code.BOOKIES_DRAINING,
        severity=Severity.INFO,
        fact=f"{count_is(len(rows), 'bookie')} draining: {some(bookies)}; "
        f"{progress if is_known else 'the leader has not counted their ledgers yet'}.",
        action="Nothing. bookmender bookie drain shows the progress.",
        data={"bookies": bookies, "ledgers_left": left if is_known else None},
    )


def _unavailable(unavailable: UnavailableLedgers, *, is_complete: bool) -> Condition:
    count, first = unavailable.count, unavailable.first
    ordered = sorted(unavailable.restored_by.items(), key=lambda each: (-each[1], each[0]))
    enough = [bookie for bookie, n in ordered if n == count]
    useful = [f"{bookie} (enough for {counted(n, 'ledger')})" for bookie, n in ordered if n]
    if enough:
        start = some(enough) if len(enough) == 1 else f"one of {some(enough)}"
    else:
        start = some(useful or [bookie for bookie, _ in ordered]) or "the absent bookies"
    return Condition(
        code=Code.LEDGERS_UNAVAILABLE,
        severity=Severity.ERROR,
        fact=f"{'' if is_complete else 'At least '}{count_is(count, 'ledger')} unavailable: no "
        "registered bookie has a copy of some "
        f"entries{f' (ledger {some(first, total=count)})' if first else ''}.",
        action=f"Start {start}.",
        data={
            "ledger_count": count,
            "is_count_complete": is_complete,
            "first_ledgers": list(first),
            "restored_by": dict(unavailable.restored_by),
        },
    )


# --- Services and orders --------------------------------------------------------------------------


def _service_conditions(status: Status) -> Iterator[Condition]:
    services = status.services
    if not status.bookies.is_any_registered:
        return  # the nodes may be unknown for the same reason
    if services.leader is None:
        node = "auditor.enabled = true" if services.nodes else "bookmender daemon"
        yield Condition(
            code=Code.NO_AUDITOR,
            severity=Severity.UNKNOWN,
            fact="No auditor leads yet, but one is registered. Losses are not noticed."
            if services.has_auditor
            else "No auditor is running, neither bookmender's nor Java's. Losses are not noticed.",
            action="Wait some seconds for the election."
            if services.has_auditor
            else f"Start a node with {node}.",
            data={"is_auditor_registered": services.has_auditor},
        )
    if status.queue.total and not services.has_worker:
        yield from _no_workers(status)
    if status.is_map_loading:
        note = status.leader_state.ledger_map
        read, expected = (note.read_count, note.expected_count) if note else (0, 0)
        of = f" of about {expected:,}" if expected else ""
        yield Condition(
            code=Code.LEDGER_MAP_LOADING,
            severity=Severity.UNKNOWN,
            fact=f"The leader has read {read:,}{of} ledgers so far, and may find more that are "
            "under-replicated.",
            action="Nothing: wait until the leader has read all ledger metadata.",
            data={"read_count": read, "expected_count": expected or None},
        )


def _no_workers(status: Status) -> Iterator[Condition]:
    """Yield a condition for queued ledgers without a bookmender worker, unless Java may repair
    them.

    Java's workers are visible only through their locks, and do not read the private queue.
    """
    services, queue = status.services, status.queue
    is_nobody_visible = not (services.nodes or services.leader or queue.locked_count)
    if queue.private_damaged_count or (queue.marked_count and is_nobody_visible):
        severity = Severity.ERROR
    elif queue.private_count:
        severity = Severity.INFO
    elif services.leader_node is not None and not queue.locked_count:
        severity = Severity.WARN
    else:
        return
    private = (
        " Java's workers do not read bookmender's private queue." if queue.private_count else ""
    )
    yield Condition(
        code=Code.NO_WORKERS,
        severity=severity,
        fact=f"No bookmender worker is running. {count_is(queue.total, 'ledger')} queued, "
        f"{queue.locked_count:,} locked.{private}",
        action="Start a node with a worker: bookmender daemon",
        data={"queued_count": queue.total, "private_count": queue.private_count},
    )


def _order_conditions(status: Status) -> Iterator[Condition]:
    orders, bookies, state = status.orders, status.bookies, status.leader_state
    if orders.hold is not None:
        yield _hold(status, orders.hold)
    if orders.is_disabled:
        is_needed = status.queue.needs_repair or _lost_with_ledgers(status) or bookies.reformatted
        yield Condition(
            code=Code.AUTORECOVERY_DISABLED,
            severity=Severity.WARN if is_needed else Severity.INFO,
            fact="Auto-recovery is disabled, Java's too. No ledger is marked or repaired.",
            action="Switch it on again: bookmender enable",
        )
    if paths := orders.unreadable:
        names = [path.rpartition("/orders/")[2] for path in paths]
        yield Condition(
            code=Code.ORDERS_UNREADABLE,
            severity=Severity.WARN,
            fact=f"{count_is(len(paths), 'order')} unreadable: {some(names)}.",
            action="Give the order again or cancel it. The lines below name the command for each.",
            data={"znodes": list(paths)},
        )
    if records := status.reports.unreadable_records:
        unknown = dict.fromkeys(each.unknown for each in records)
        yield Condition(
            code=Code.RECORD_UNREADABLE,
            severity=Severity.WARN,
            fact=f"{count_is(len(records), 'record')} unreadable: "
            f"{some([each.path for each in records])}. So it is unknown: "
            f"{'; '.join(list(unknown)[:NAMES_SHOWN_MAX])}.",
            action="Find out what wrote it, or which ACL denies access. The daemon writes a "
            "record again when it has the data. You may delete a record that stays unreadable.",
            data={"znodes": [each.path for each in records], "unknown": list(unknown)},
        )
    if error := state.recovery_delay_error:
        delay = duration_text(state.recovery_delay_s)
        yield Condition(
            code=Code.RECOVERY_DELAY_UNREADABLE,
            severity=Severity.WARN,
            fact=f"{printable(error)}. A bookmender leader keeps the last delay that it read, or "
            f"else uses {delay}.",
            action="Write seconds: bookmender shell lostbookierecoverydelay -set SECONDS",
            data={"recovery_delay_s": state.recovery_delay_s, "error": error},
        )


def _hold(status: Status, hold: HoldOrder) -> Condition:
    services, bookies, marked_count = status.services, status.bookies, status.queue.marked_count
    is_enabled = not status.orders.is_disabled
    is_ignored = services.is_java_leader and is_enabled
    by = "an operator" if hold.is_by_operator else "the leader"
    facts = [
        "Marking for lost bookies and fencing are on hold for "
        f"{duration_text((status.taken_ms - hold.since_ms) / 1000)} by "
        f"{by}{f' ({printable(hold.reason)})' if hold.reason else ''}",
        _end_of_hold(status, hold),
    ]
    if marked_count and services.has_worker and is_enabled:
        facts.append(f"{counted(marked_count, 'ledger')} marked before can be repaired")
    if is_ignored:
        facts.append(f"Java's leader ({printable(services.leader or '')}) ignores the hold")
    return Condition(
        code=Code.SAFETY_HOLD,
        severity=Severity.WARN if hold.is_by_operator else Severity.ERROR,
        fact=f"{'. '.join(facts)}.",
        action=f"{'' if hold.is_by_operator else 'Start the absent bookies. '}To end the hold: "
        "bookmender hold end"
        + (" To stop Java's leader: bookmender disable" if is_ignored else ""),
        data={
            **hold_record(hold),
            "absent": sorted({*hold.bookies} & {*bookies.lost, *bookies.absent}),
            "is_ignored_by_leader": is_ignored,
        },
    )


def _end_of_hold(status: Status, hold: HoldOrder) -> str:
    """Return when the hold ends, as a sentence without a full stop.

    A bookmender leader ends its own hold some time after the bookies returned. An operator's hold
    lasts.
    """
    bookies = status.bookies
    is_own = bool(hold.bookies) and not hold.is_by_operator
    are_back = not {*hold.bookies} & {*bookies.lost, *bookies.absent}
    if is_own and are_back and bookies.is_any_registered and status.services.leader_node:
        return "It ends soon, because the bookies are back"
    if hold.until_ms is None:
        end = "It lasts until it is ended"
    else:
        end = f"It ends in {duration_text((hold.until_ms - status.taken_ms) / 1000)}"
    return f"{end}, or soon after the bookies are back" if is_own else end


# --- Ledgers --------------------------------------------------------------------------------------


def _queue_conditions(status: Status) -> Iterator[Condition]:
    queue = status.queue
    if queue.marked_count:
        windows, action = "", _repair_action(status)
        if notes := queue.waiting_for_maintenance:
            left_ms = min(note.next_try_ms for note in notes) - status.taken_ms
            when = f", next try in {duration_text(left_ms / 1000)}" if left_ms > 0 else ""
            windows = f" All wait for maintenance windows to end{when}."
            action = "Wait, or start a bookie and run: bookmender bookie maintenance ID --end"
        yield Condition(
            code=Code.LEDGERS_UNDER_REPLICATED,
            severity=Severity.WARN,
            fact=f"{count_is(queue.marked_count, 'ledger')} under-replicated.{windows}",
            action=action,
            data={
                "ledger_count": queue.marked_count,
                "are_all_waiting_for_maintenance": bool(windows),
            },
        )
    if count := queue.private_damaged_count:
        yield Condition(
            code=Code.LEDGERS_DAMAGED,
            severity=Severity.WARN,
            fact=f"{count_is(count, 'ledger')} damaged in a way that only bookmender's workers "
            "detect and repair.",
            action=_repair_action(status),
            data={"ledger_count": count},
        )
    if blocked := queue.blocked:
        counts = Counter(note.reason.value for note in sorted(blocked, key=_gravity))
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        first = min(blocked, key=_gravity)
        are_all = len(blocked) >= queue.total
        # Ledgers that are only to be moved have all their copies.
        code, severities = (
            (Code.REPAIRS_BLOCKED, (Severity.WARN, Severity.ERROR))
            if queue.needs_repair
            else (Code.DRAIN_BLOCKED, (Severity.INFO, Severity.WARN))
        )
        yield Condition(
            code=code,
            severity=severities[are_all],
            fact=f"Blocked: {len(blocked):,} of {counted(queue.total, 'queued ledger')} "
            f"({reasons}).",
            action=f"Ledger {first.ledger_id}: "
            f"{printable(message(first.ledger_id, first.blocked).text)}. Others: bookmender queue "
            "list",
            data={
                "ledger_count": len(blocked),
                "by_reason": dict(counts),
                "first_ledgers": [note.ledger_id for note in blocked[:NAMES_SHOWN_MAX]],
            },
        )


def _repair_action(status: Status) -> str:
    """Return what an operator can do for under-replicated or damaged ledgers, in accordance with
    the actions of other conditions that hold."""
    queue, services = status.queue, status.services
    if status.orders.is_disabled:
        return "Nothing is repaired while auto-recovery is disabled: bookmender enable"
    if len(queue.blocked) >= queue.total:
        return "All are blocked: act on REPAIRS_BLOCKED."
    if not services.has_worker and any(_no_workers(status)):
        return "Nothing is repaired without a worker: act on NO_WORKERS."
    if queue.blocked:
        return "Act on REPAIRS_BLOCKED. Workers repair the other ledgers meanwhile."
    return "Nothing to do while workers repair. bookmender queue list shows each ledger."


def _gravity(note: WaitingNote) -> int:
    return gravity(note.reason)


def _ledger_conditions(status: Status) -> Iterator[Condition]:
    audit, unproven = status.reports.audit, status.reports.unproven
    count, first = (audit.unreadable_count, audit.unreadable) if audit is not None else (0, ())
    ledger_map = status.leader_state.ledger_map
    hidden = () if ledger_map is None else ledger_map.hidden
    if count or hidden:
        facts, actions = [], []
        if count:
            ledgers = f": ledger {some(first, total=count)}" if first else ""
            facts.append(f"The metadata of {counted(count, 'ledger')} cannot be read{ledgers}.")
            actions.append(
                "bookmender ledger show ID shows the error. bookmender ledger restore ID undoes a "
                "bad write."
            )
        if hidden:
            paths = some(list(map(printable, hidden)))
            facts.append(f"ACLs hide directories of ledgers: {paths}.")
            actions.append("Grant the nodes read access to the directories with setAcl.")
        yield Condition(
            code=Code.LEDGER_METADATA_UNREADABLE,
            severity=Severity.ERROR,
            fact=" ".join(facts),
            action=" ".join(actions),
            data={
                "ledger_count": count,
                "first_ledgers": list(first),
                "hidden_directories": list(hidden),
            },
        )
    if unproven:
        yield Condition(
            code=Code.LEDGER_END_UNPROVEN,
            severity=Severity.ERROR,
            fact=f"The last entry of {counted(len(unproven), 'ledger')} cannot be proven: ledger "
            f"{some(unproven)}.",
            action="bookmender ledger show ID shows why, and how to close the ledger.",
            data={
                "ledger_count": len(unproven),
                "first_ledgers": list(unproven[:NAMES_SHOWN_MAX]),
            },
        )


def _fsck_conditions(status: Status) -> Iterator[Condition]:
    """Yield what the last fsck runs found wrong.

    Only another run can show that the ledgers are repaired. The severity is WARN until all of them
    were marked and no ledger needs repair any more.
    """
    runs = [r for r in (status.reports.fsck, status.reports.fsck_closer) if r is not None]
    if wrong := [run for run in runs if run.wrong]:
        are_marked = all((run.marked or 0) >= run.wrong for run in wrong)
        are_handled = are_marked and not status.queue.needs_repair
        if are_handled:
            action = "Run fsck again to see whether they are repaired."
        elif are_marked:
            action = "Wait until workers have repaired them, then run fsck again."
        else:
            action = (
                "Mark those that can be repaired: bookmender fsck mark DIR. Later run fsck again."
            )
        yield Condition(
            code=Code.FSCK_FOUND_DAMAGE,
            severity=Severity.INFO if are_handled else Severity.WARN,
            fact=" ".join(
                f"fsck run {run.run} (level {run.level.value}) found "
                f"{counted(run.wrong, 'ledger')} wrong; {run.marked or 0:,} marked for repair "
                "since."
                for run in wrong
            ),
            action=action,
            data={"runs": {r.run: {"wrong": r.wrong, "marked": r.marked or 0} for r in wrong}},
        )
    unknown = {run.run: run.counts.verdicts.get(Grade.UNKNOWN.value, 0) for run in runs}
    if unknown := {run: count for run, count in unknown.items() if count}:
        told = " ".join(
            f"fsck run {r} could not judge {counted(n, 'ledger')}." for r, n in unknown.items()
        )
        yield Condition(
            code=Code.FSCK_INCONCLUSIVE,
            severity=Severity.INFO,
            fact=told,
            action="Its report says why. Make every bookie answer, and run fsck again.",
            data={"runs": unknown},
        )


# --- The change feed ------------------------------------------------------------------------------


def _feed_conditions(status: Status) -> Iterator[Condition]:
    if (stall := status.feed_stall) is not None:
        yield Condition(
            code=Code.FEED_STALLED,
            severity=Severity.WARN,
            fact=stall.fact(now_ms=status.taken_ms),
            action=stall.action(),
            data=stall.to_json(),
        )
