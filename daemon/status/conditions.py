"""The conditions of ``bookmender status``: what is wrong, unknown or worth knowing, and what to do.

Each function is one entry of the table: its name is the code, its docstring says when it has which
severity, what it means, its usual causes, what to do and how it clears, and its result says whether
it holds. ``bookmender status --explain``, docs/runbook.md and the alert rules of deploy/prometheus
have the same texts. Codes are stable. To add a condition, add its function, and run ``make docs``.
"""

from collections import Counter

import msgspec
from msgspec.structs import replace

from auditor.fsck.verdicts import Grade
from daemon.messages import message
from daemon.operations.archive import BEHIND_S
from daemon.operations.holds import hold_record
from daemon.status.answers import ConditionRecord, Severity
from daemon.status.condition import (
    ASCENDING,
    NAMES_SHOWN_MAX,
    Found,
    condition,
    condition_of_data,
    count_is,
    some,
    with_mute,
)
from daemon.status.condition import CONDITIONS as CONDITIONS
from daemon.status.leader import loss_text
from daemon.status.state import Status
from daemon.words import counted, duration_text, printable
from ledgers.placement import Adherence
from notifications.discovery import STALE_S
from replication.reasons import gravity

OF_SERVICES = ("NO_AUDITOR", "NO_WORKERS", "LEDGER_MAP_LOADING")


def conditions(status: Status) -> tuple[ConditionRecord, ...]:
    """Return all conditions that hold, most severe first, and muted ones last."""
    found = [
        ConditionRecord(code=code, **told._asdict())
        for code, entry in CONDITIONS.items()
        if (told := entry.rule(status)) is not None
    ]
    if not status.bookies.is_any_registered:
        # Rule S8: an empty list of bookies is unknown. The other facts stay visible, but no
        # conclusion is drawn from them. The nodes may be unknown for the same reason.
        known = (each for each in found[1:] if each.code not in OF_SERVICES)
        found[1:] = (replace(each, severity="INFO") for each in known)
    mutes, now_ms = status.orders.mutes, status.taken_ms
    found = [with_mute(each, mutes.get(each.code), now_ms=now_ms) for each in found]
    found.sort(key=lambda each: -ASCENDING.index(each.severity))
    return tuple(sorted(found, key=lambda each: each.muted_until_ms is not None))


# --- The table ------------------------------------------------------------------------------------


@condition_of_data
def no_bookies(status: Status) -> Found | None:
    """UNKNOWN - No bookie is registered, so nothing can be concluded. An empty list does not prove
    that all bookies failed: no bookie counts as lost, and all other conditions are INFO.
    Causes: ZooKeeper or the network failed, and all bookie sessions expired. The configured address
    names another cluster. All bookies are stopped.
    Do: Check ZooKeeper and the network, then the bookies. Check metadata_service_uri.
    Clears: when a bookie registers."""
    if status.bookies.is_any_registered:
        return None
    services = status.services
    others = "" if services.nodes or services.leader else ", nor an auditor or worker"
    return Found(
        "UNKNOWN",
        f"No bookie is registered in ZooKeeper{others}. Nothing can be concluded from that.",
        "Check ZooKeeper, the network and the configured address, then the bookies.",
    )


@condition_of_data
def ledgers_unavailable(status: Status) -> Found | None:
    """ERROR - Ledgers have entries without a copy on a registered bookie. These entries can neither
    be read nor repaired. Entries that may exist in an open ledger count as existing.
    Causes: More bookies of one ensemble failed, or are in maintenance, than the write quorum
    tolerates.
    Do: Start the bookies that bookmender status names. Where one bookie is enough for some ledgers,
    it shows for how many.
    Clears: some seconds after enough bookies are registered again, when the leader has counted."""
    unavailable = status.leader_state.unavailable
    if unavailable is None or not unavailable.count:
        return None
    count, first = unavailable.count, unavailable.first
    is_complete = status.leader_state.is_count_complete
    ordered = sorted(unavailable.restored_by.items(), key=lambda each: (-each[1], each[0]))
    enough = [bookie for bookie, n in ordered if n == count]
    useful = [f"{bookie} (enough for {counted(n, 'ledger')})" for bookie, n in ordered if n]
    if enough:
        start = some(enough) if len(enough) == 1 else f"one of {some(enough)}"
    else:
        start = some(useful or [bookie for bookie, _ in ordered]) or "the absent bookies"
    ledgers = f" (ledger {some(first, total=count)})" if first else ""
    return Found(
        "ERROR",
        f"{'' if is_complete else 'At least '}{count_is(count, 'ledger')} unavailable: no "
        f"registered bookie has a copy of some entries{ledgers}.",
        f"Start {start}.",
        {
            "ledger_count": count,
            "is_count_complete": is_complete,
            "first_ledgers": list(first),
            "restored_by": dict(unavailable.restored_by),
        },
    )


@condition
def safety_hold(status: Status) -> Found | None:
    """ERROR if the leader began it, WARN if an operator did - Marking and fencing are paused after
    a mass failure. No further ledger is marked for lost bookies, and no open ledger is fenced.
    Ledgers marked before are still repaired. A Java leader ignores holds.
    Causes: Many bookies disappeared within a short time ([hold] in the settings), often because of
    the network, a rack or a faulty rollout. Or an operator ran bookmender hold --begin.
    Do: Find out why so many bookies are absent, and start them. If they are lost for good, end the
    hold with bookmender hold --end --yes: then all their ledgers are repaired.
    Clears: soon after the bookies are back, at the end of its time, or with bookmender hold
    --end."""
    hold, services, bookies = status.orders.hold, status.services, status.bookies
    if hold is None:
        return None
    is_enabled = not status.orders.is_disabled
    is_ignored = services.is_java_leader and is_enabled
    still_absent = {*hold.bookies} & {*bookies.lost, *bookies.absent}
    # A bookmender leader ends its own hold some time after the bookies returned.
    is_own = bool(hold.bookies) and not hold.is_by_operator
    lasted = duration_text((status.taken_ms - hold.since_ms) / 1000)
    why = f" ({printable(hold.reason)})" if hold.reason else ""
    facts = [
        f"Marking for lost bookies and fencing are on hold for {lasted} by "
        f"{'an operator' if hold.is_by_operator else 'the leader'}{why}"
    ]
    if is_own and not still_absent and bookies.is_any_registered and services.leader_node:
        facts.append("It ends soon, because the bookies are back")
    else:
        end = "It lasts until it is ended"
        if hold.until_ms is not None:
            end = f"It ends in {duration_text((hold.until_ms - status.taken_ms) / 1000)}"
        facts.append(f"{end}, or soon after the bookies are back" if is_own else end)
    if (marked_count := status.queue.marked_count) and services.has_worker and is_enabled:
        facts.append(f"{counted(marked_count, 'ledger')} marked before can be repaired")
    if is_ignored:
        facts.append(f"Java's leader ({printable(services.leader or '')}) ignores the hold")
    return Found(
        "WARN" if hold.is_by_operator else "ERROR",
        f"{'. '.join(facts)}.",
        f"{'' if hold.is_by_operator else 'Start the absent bookies. '}To end the hold"
        + (", and have their ledgers repaired" if still_absent else "")
        + f": bookmender hold --end{' --yes' if still_absent else ''}"
        + (" To stop Java's leader: bookmender disable" if is_ignored else ""),
        {
            **hold_record(hold),
            "absent": sorted(still_absent),
            "is_ignored_by_leader": is_ignored,
        },
    )


@condition_of_data
def no_writable_bookies(status: Status) -> Found | None:
    """ERROR - No bookie accepts writes. All registered bookies are read-only. Clients cannot write,
    and repairs have no target.
    Causes: Full disks. Bookies that were switched to read-only by hand.
    Do: Free disk space, end the read-only mode, or add a bookie.
    Clears: when a writable bookie is registered."""
    bookies = status.bookies
    if bookies.writable or not bookies.is_any_registered:
        return None
    return Found(
        "ERROR",
        f"No bookie accepts writes. Read-only: {some(bookies.read_only)}.",
        "Free disk space on the read-only bookies, or start a writable bookie.",
        {"read_only": list(bookies.read_only)},
    )


@condition
def bookies_lost(status: Status) -> Found | None:
    """WARN; INFO if no ledger names these bookies - Bookies were absent longer than the recovery
    delay. Their ledgers are marked, and their copies are written to other bookies. A bookie that no
    ledger names any more has only its cookie left.
    Causes: A host or a disk failed. A bookie was stopped without a maintenance window, or removed
    without bookmender bookie decommission.
    Do: Start the bookie if its data is intact; that is faster than copying. If it never returns,
    wait until no ledger names it, then run bookmender bookie decommission ID.
    Clears: when the bookie registers again or is decommissioned."""
    lost, named, obstacle = (
        status.bookies.lost,
        list(status.lost_with_ledgers),
        status.marking_obstacle,
    )
    if not lost:
        return None
    it, its, id_ = ("it", "Its", str(lost[0])) if len(lost) == 1 else ("them", "Their", "ID")
    why, action = "", f"Start {it}, or run: bookmender bookie decommission {id_}"
    if not named:
        why = f" No ledger names {it}, so no copy is missing."
    elif status.orders.hold is not None or status.orders.is_disabled:
        cause = "AUTORECOVERY_DISABLED" if status.orders.is_disabled else "SAFETY_HOLD"
        action = f"Start {it}. If that is impossible, act on {cause}, so that copies are made."
    else:
        action = f"Start {it} if the data is intact; else wait until other bookies have the copies."
    if named and obstacle and not dict(status.queue.by_bookie).keys() >= set(named):
        why = f" {its} ledgers are not marked: {obstacle}."
    return Found(
        "WARN" if named else "INFO",
        f"{count_is(len(lost), 'bookie')} lost: {some(lost)}.{why}",
        action,
        {"bookies": list(lost), "named_by_ledgers": named},
    )


@condition
def bookies_reformatted(status: Status) -> Found | None:
    """WARN - Bookies were reformatted, and their ledgers are not marked yet. Their cookies are
    newer than ledgers that name them, so they may have lost entries of these ledgers.
    Causes: A disk was replaced or formatted. A safety hold, disabled auto-recovery or an incomplete
    ledger map delays the marking. After an import of ZooKeeper's data all cookies look new.
    Do: Remove what prevents the marking; status names it. After an import of ZooKeeper's data run
    bookmender bookie trust-identities.
    Clears: when the leader has marked all ledgers of the bookie."""
    bookies, obstacle = status.bookies.reformatted, status.marking_obstacle
    if not bookies:
        return None
    return Found(
        "WARN",
        f"{count_is(len(bookies), 'bookie')} reformatted and may have lost data: {some(bookies)}. "
        f"The affected ledgers are not marked yet{f': {obstacle}' if obstacle else ''}.",
        "Remove what prevents the marking." if obstacle else "Nothing: the leader marks them soon.",
        {"bookies": list(bookies), "obstacle": obstacle or None},
    )


@condition
def bookies_absent(status: Status) -> Found | None:
    """WARN - Bookies are not registered, but not lost yet. They are absent for less than the
    recovery delay, or for an unknown time. Their ledgers are not marked yet.
    Causes: A restart, a crash, a network fault, or an expired ZooKeeper session.
    Do: Start the bookie before it counts as lost. Announce planned work with bookmender bookie
    maintenance ID --for 2h. If no auditor is running, start one.
    Clears: when the bookie registers again. After the recovery delay it becomes BOOKIES_LOST."""
    absent, state = status.bookies.absent, status.leader_state
    if not absent:
        return None
    if losses := state.pending_losses:
        next_loss = f"Next: {losses[0].bookie} {loss_text(losses[0], now_ms=status.taken_ms)}"
    elif status.services.leader is None:
        next_loss = "No auditor is tracking the recovery delay"
    else:
        they = "it" if len(absent) == 1 else "they"
        next_loss = f"The leader has not recorded when {they} disappeared"
    return Found(
        "WARN",
        f"{count_is(len(absent), 'bookie')} absent: {some(absent)}. {next_loss}.",
        "Start the bookie. Announce planned work with: bookmender bookie maintenance ID --for 2h",
        {"bookies": list(absent), "untracked": sorted(state.untracked)},
    )


@condition
def no_auditor(status: Status) -> Found | None:
    """UNKNOWN - No auditor leads, so losses are not noticed. Neither a bookmender nor a Java
    auditor is elected, so no ledger is marked, and an empty queue proves nothing.
    Causes: No node is running, or all nodes have auditor.enabled = false. An election takes some
    seconds after the leader's session has ended.
    Do: Start a node with bookmender daemon, and auditor.enabled = true.
    Clears: when an auditor is elected."""
    services = status.services
    if services.leader is not None:
        return None
    if services.has_auditor:
        fact = "No auditor leads yet, but one is registered."
        action = "Wait some seconds for the election."
    else:
        fact = "No auditor is running, neither bookmender's nor Java's."
        node = "auditor.enabled = true" if services.nodes else "bookmender daemon"
        action = f"Start a node with {node}."
    return Found(
        "UNKNOWN",
        f"{fact} Losses are not noticed.",
        action,
        {"is_auditor_registered": services.has_auditor},
    )


@condition
def no_workers(status: Status) -> Found | None:
    """ERROR if certain, WARN if Java's workers may be there, INFO if only drains or repairs by hand
    wait - Ledgers are queued and no worker is visible. Java's workers are visible only through
    their locks, and they never read bookmender's private queue (drains, repairs by hand, damage
    that Java does not see).
    Causes: No node is running, or all nodes have replication.enabled = false.
    Do: Start a node with a worker: bookmender daemon.
    Clears: when a worker registers, or the queue is empty."""
    services, queue = status.services, status.queue
    if not queue.total or services.has_worker:
        return None
    is_nobody_visible = not (services.nodes or services.leader or queue.locked_count)
    if queue.private_damaged_count or (queue.marked_count and is_nobody_visible):
        severity: Severity = "ERROR"
    elif queue.private_count:
        severity = "INFO"
    elif services.leader_node is not None and not queue.locked_count:
        severity = "WARN"
    else:
        return None  # Java may repair them
    private = (
        " Java's workers do not read bookmender's private queue." if queue.private_count else ""
    )
    return Found(
        severity,
        f"No bookmender worker is running. {count_is(queue.total, 'ledger')} queued, "
        f"{queue.locked_count:,} locked.{private}",
        "Start a node with a worker: bookmender daemon",
        {"queued_count": queue.total, "private_count": queue.private_count},
    )


@condition
def autorecovery_disabled(status: Status) -> Found | None:
    """WARN; INFO until the time of bookmender disable --for is over - Auto-recovery is switched
    off. Neither bookmender nor Java marks ledgers or begins repairs. Repairs that have begun are
    completed.
    Causes: bookmender disable, or BookKeeper's shell (autorecovery -disable), often during an
    upgrade.
    Do: When the work is done, run bookmender enable. Give planned work an end: bookmender disable
    --for 2h.
    Clears: with bookmender enable, or when a bookmender leader ends it in time."""
    orders = status.orders
    if not orders.is_disabled:
        return None
    left_ms = (orders.disabled_until_ms or 0) - status.taken_ms
    end = ""
    if left_ms > 0:
        end = f" The leader enables it again in {duration_text(left_ms / 1000)}."
    elif orders.disabled_until_ms is not None:
        end = " Its time is over, and the leader enables it soon, unless Java's auditor leads."
    return Found(
        "INFO" if left_ms > 0 else "WARN",
        "Auto-recovery is disabled, Java's too. No ledger is marked, and no repair begins; those "
        f"that have begun are completed.{end}",
        "When the work is done: bookmender enable",
        {"until_ms": orders.disabled_until_ms},
    )


@condition_of_data
def repairs_blocked(status: Status) -> Found | None:
    """ERROR if all queued ledgers are blocked, else WARN - Time alone does not help some queued
    ledgers. Workers found an obstacle that needs a bookie or a person, and try again now and then.
    Causes: no-copy, no-coverage: bookies with the needed copies are absent. no-target: too few
    bookies accept copies. misplaced: no bookie in the wanted place accepts copies. end-unproven,
    recovery-unended: the last entry of an open ledger is not proven. end-damaged: an entry at the
    end of an open ledger has damaged copies only. digest-suspect: no copy matches the digest.
    corrupt-metadata, access-denied, write-refused: damaged metadata, or an ACL.
    journal-unwritable: a node cannot write its state directory.
    Do: bookmender queue shows the reason of each ledger, bookmender plan LEDGER the details.
    Start or add bookies, or open the ACL. bookmender repair LEDGER tries at once.
    Clears: when the ledgers are repaired or deleted."""
    return _blocked(status, ("WARN", "ERROR")) if status.queue.needs_repair else None


@condition
def ledgers_under_replicated(status: Status) -> Found | None:
    """WARN - Ledgers are marked as short of copies. Workers lease them one by one, copy the missing
    entries and remove the marks.
    Causes: Lost or reformatted bookies, and damage found by checks or fsck.
    Do: Nothing while the number falls. bookmender queue shows what each ledger misses.
    bookmender limits shows the rate limits.
    Clears: when all marks are removed."""
    queue = status.queue
    if not queue.marked_count:
        return None
    windows, action = "", _repair_action(status)
    if notes := queue.waiting_for_maintenance:
        left_ms = min(note.next_try_ms for note in notes) - status.taken_ms
        when = f", next try in {duration_text(left_ms / 1000)}" if left_ms > 0 else ""
        windows = f" All wait for maintenance windows to end{when}."
        action = "Wait, or start a bookie and run: bookmender bookie maintenance ID --end"
    return Found(
        "WARN",
        f"{count_is(queue.marked_count, 'ledger')} under-replicated.{windows}",
        action,
        {"ledger_count": queue.marked_count, "are_all_waiting_for_maintenance": bool(windows)},
    )


@condition
def ledgers_damaged(status: Status) -> Found | None:
    """WARN - Ledgers have damage that Java does not see. A check or fsck found missing or bad
    copies that Java's workers would not notice. Java would delete the marks, so these ledgers are
    in bookmender's private queue.
    Causes: Bad disks, lost entries in the middle of a ledger, entries that a crash removed.
    Do: Nothing while a bookmender worker runs. Examine the disks of the named bookies: bookmender
    queue.
    Clears: when the ledgers are repaired."""
    if not (count := status.queue.private_damaged_count):
        return None
    return Found(
        "WARN",
        f"{count_is(count, 'ledger')} damaged in a way that only bookmender's workers detect and "
        "repair.",
        _repair_action(status),
        {"ledger_count": count},
    )


@condition_of_data
def ledger_metadata_unreadable(status: Status) -> Found | None:
    """ERROR - The metadata of some ledgers cannot be read. It is unknown which bookies these
    ledgers name, so they are not repaired, and a drain cannot prove that it is complete. All other
    ledgers are handled as usual.
    Causes: Damaged znodes, metadata of a newer BookKeeper version, or an ACL that hides a ledger or
    a directory of ledgers from the leader.
    Do: bookmender ledger show ID shows the error. bookmender ledger restore ID can undo a bad write
    of this host. If an ACL denies access, change it with setAcl.
    Clears: when the metadata and the directories are readable, or deleted."""
    audit, ledger_map = status.reports.audit, status.leader_state.ledger_map
    count, first = (audit.unreadable_count, audit.unreadable) if audit is not None else (0, ())
    hidden = () if ledger_map is None else ledger_map.hidden
    facts, actions = [], []
    if count:
        ledgers = f": ledger {some(first, total=count)}" if first else ""
        facts.append(f"The metadata of {counted(count, 'ledger')} cannot be read{ledgers}.")
        actions.append(
            "bookmender ledger show ID shows the error. bookmender ledger restore ID undoes a bad "
            "write."
        )
    if hidden:
        paths = some(list(map(printable, hidden)))
        facts.append(f"ACLs hide directories of ledgers: {paths}.")
        actions.append("Grant the nodes read access to the directories with setAcl.")
    if not facts:
        return None
    return Found(
        "ERROR",
        " ".join(facts),
        " ".join(actions),
        {"ledger_count": count, "first_ledgers": list(first), "hidden_directories": list(hidden)},
    )


@condition_of_data
def ledger_end_unproven(status: Status) -> Found | None:
    """ERROR - No recovery can prove the last entry of some ledgers. They are not closed, and later
    entries may have existed. So they are not closed automatically.
    Causes: Several bookies of one ensemble were reformatted before the ledger was closed, or the
    ack quorum is 0, so that no client can recover the ledger, not even Java's.
    Do: bookmender ledger show ID shows which bookies could still help. If they never return,
    bookmender ledger close ID --accept-loss shows what would be given up. With --yes it closes the
    ledger.
    Clears: when the ledgers are closed or deleted."""
    if not (unproven := status.reports.unproven):
        return None
    return Found(
        "ERROR",
        f"The last entry of {counted(len(unproven), 'ledger')} cannot be proven: ledger "
        f"{some(unproven)}.",
        "bookmender ledger show ID shows why, and how to close the ledger.",
        {"ledger_count": len(unproven), "first_ledgers": list(unproven[:NAMES_SHOWN_MAX])},
    )


@condition
def drain_blocked(status: Status) -> Found | None:
    """WARN if all ledgers that are left are blocked, else INFO - Ledgers to drain or to repair by
    hand are blocked. Nothing is short of copies, but these ledgers cannot be moved.
    Causes: no-target: too few other bookies accept copies. A ledger has no good copy elsewhere, or
    its metadata cannot be written.
    Do: Add bookies, or cancel the drain with bookmender bookie drain ID --cancel. bookmender queue
    shows each ledger.
    Clears: when the ledgers can be moved, or the drain is cancelled."""
    return None if status.queue.needs_repair else _blocked(status, ("INFO", "WARN"))


@condition
def orders_unreadable(status: Status) -> Found | None:
    """WARN - Operator orders cannot be read. Nodes keep the last order that they could read. A node
    that read none assumes the careful order, which status tells for each. An unreadable hold, or
    pause of the checks, is always in force. Unreadable trust in identities is not.
    Causes: A znode that was written by hand or by a newer release, or an ACL.
    Do: bookmender status names the command that cancels each order. Give the order again
    afterwards.
    Clears: when the order is replaced or its znode is deleted."""
    if not (paths := status.orders.unreadable):
        return None
    names = [path.rpartition("/orders/")[2] for path in paths]
    return Found(
        "WARN",
        f"{count_is(len(paths), 'order')} unreadable: {some(names)}.",
        "Give the order again or cancel it. The lines below name the command for each.",
        {"znodes": list(paths)},
    )


@condition
def record_unreadable(status: Status) -> Found | None:
    """WARN - Records of bookmender cannot be read, so some facts are unknown. Nothing stops, but a
    more severe condition may be hidden.
    Causes: A znode below underreplication/bookmender that was written by hand or by another
    release, or an ACL.
    Do: Find out what wrote the znode. If an ACL denies access, grant the nodes all permissions. To
    remove the record at once, delete its znode. The next run of a check or of fsck writes its
    records again: bookmender check NAME.
    Clears: when the daemon has written the record again, or its znode is deleted. The leader
    rewrites its own records within about a minute."""
    if not (records := status.reports.unreadable_records):
        return None
    paths, unknown = [r.path for r in records], list(dict.fromkeys(r.unknown for r in records))
    return Found(
        "WARN",
        f"{count_is(len(records), 'record')} unreadable: {some(paths)}. So it is unknown: "
        f"{'; '.join(unknown[:NAMES_SHOWN_MAX])}.",
        "Find out what wrote it, or which ACL denies access. The daemon writes a record again when "
        "it has the data. You may delete a record that stays unreadable.",
        {"znodes": paths, "unknown": unknown},
    )


@condition
def recovery_delay_unreadable(status: Status) -> Found | None:
    """WARN - The znode lostBookieRecoveryDelay cannot be read. The leader keeps the last delay that
    it read. A new leader uses the delay of the last audit or auditor.lost_bookie_recovery_delay_s,
    whichever is longer.
    Causes: BookKeeper's shell writes any value that it is given, such as 2h. Or an ACL denies
    access.
    Do: Write a number: bookmender shell lostbookierecoverydelay -set SECONDS.
    Clears: when the znode holds a number, or is deleted."""
    error, delay_s = status.leader_state.recovery_delay_error, status.leader_state.recovery_delay_s
    if not error:
        return None
    return Found(
        "WARN",
        f"{printable(error)}. A bookmender leader keeps the last delay that it read, or else uses "
        f"{duration_text(delay_s)}.",
        "Write seconds: bookmender shell lostbookierecoverydelay -set SECONDS",
        {"recovery_delay_s": delay_s, "error": error},
    )


@condition
def feed_stalled(status: Status) -> Found | None:
    """WARN - The change feed is enabled, but nothing is published in it. Changes of ledgers wait
    for a minute or longer, and clients of the feed learn of them later. Marks and repairs go on.
    Causes: The bookies of the feed's ledgers are absent, or fewer than needed accept writes. An ACL
    of ZooKeeper hides the root of the ledgers from the leader. Bookies or ZooKeeper are slow.
    ZooKeeper was restored from a backup. Java's auditor leads.
    Do: bookmender status names the cause and the next step. If data of the feed is lost for good,
    bookmender feed disable and bookmender feed enable begin it again; then its clients compare
    their state with all ledgers.
    Clears: some seconds after the next checkpoint, and when the feed is disabled."""
    if (stall := status.feed_stall) is None:
        return None
    return Found("WARN", stall.fact(now_ms=status.taken_ms), stall.action(), stall.to_json())


@condition
def archive_stalled(status: Status) -> Found | None:
    """WARN - The archive of all metadata is enabled, but nothing is archived. If ZooKeeper loses
    its data now, later changes cannot be restored.
    Causes: The place of the archive cannot be written. The change feed is disabled. No node of
    bookmender stands for election.
    Do: bookmender archive status names the cause and the next step.
    Clears: some seconds after a node archives again, and when the archive is disabled."""
    archive = status.archive
    if archive is None or not archive.obstacle:
        return None
    return Found("WARN", archive.obstacle, archive.action, msgspec.to_builtins(archive))


@condition
def archive_behind(status: Status) -> Found | None:
    """WARN - The archive of all metadata lacks changes that are older than a minute. If ZooKeeper
    loses its data now, they cannot be restored.
    Causes: The place of the archive or ZooKeeper is slow. There are too many changes. The feed is
    stalled, or Java's auditor leads, which writes none.
    Do: Look at FEED_STALLED, and at the node that archives (bookmender archive status).
    Clears: when the archive has caught up."""
    archive = status.archive
    if archive is None or archive.obstacle or (archive.lag_s or 0) < BEHIND_S:
        return None
    assert archive.lag_s is not None
    lag = duration_text(archive.lag_s)
    fact = f"The archive lacks the changes of the last {lag}."
    if archive.archived_ms is None:
        fact = f"Nothing can be restored yet: after {lag} the archive has no complete base."
    return Found(
        "WARN",
        fact,
        "Look at the node that archives: bookmender archive status",
        {"lag_s": archive.lag_s},
    )


@condition
def notify_stale(status: Status) -> Found | None:
    """WARN - A server of notifications has heard nothing new for half a minute. Its clients know
    that they may not be told of changes.
    Causes: The server cannot reach the bookies of the change feed. The feed is stalled, or Java's
    auditor leads, which writes none.
    Do: Look at FEED_STALLED, and at the log of the server (bookmender notify servers).
    Clears: some seconds after the server hears from the feed again, or when it ends."""
    stale = [
        each
        for each in status.notify_servers
        # A server that has just started has not heard from the feed yet.
        if each.age_s >= STALE_S and each.written_ms - each.started_ms >= STALE_S * 1000
    ]
    if not stale:
        return None
    names = ", ".join(printable(each.url) for each in stale[:3])
    return Found(
        "WARN",
        f"{counted(len(stale), 'server')} of notifications heard nothing new for "
        f"{duration_text(max(each.age_s for each in stale))}: {names}.",
        "Look at its log, and at the feed: bookmender notify servers",
        {"servers": [each.url for each in stale]},
    )


@condition
def ledger_map_loading(status: Status) -> Found | None:
    """UNKNOWN - The leader has not read all ledger metadata yet. It marks ledgers only as far as it
    has read, so an empty queue proves nothing.
    Causes: A new leader was elected, or its ZooKeeper session was renewed.
    Do: Wait. status shows how many ledgers are read.
    Clears: when the ledger map is complete."""
    if not status.is_map_loading:
        return None
    note = status.leader_state.ledger_map
    read, expected = (note.read_count, note.expected_count) if note else (0, 0)
    of = f" of about {expected:,}" if expected else ""
    return Found(
        "UNKNOWN",
        f"The leader has read {read:,}{of} ledgers so far, and may find more that are "
        "under-replicated.",
        "Nothing: wait until the leader has read all ledger metadata.",
        {"read_count": read, "expected_count": expected or None},
    )


@condition
def availability_unknown(status: Status) -> Found | None:
    """UNKNOWN - Several bookies are not registered, and no leader has counted unavailable ledgers.
    Some entries may have all their copies on these bookies.
    Causes: A bookie registered or disappeared some seconds ago, or the leader is Java's auditor,
    which does not count.
    Do: Wait some seconds. If Java leads or no auditor runs, start one of the bookies to be safe.
    Clears: when a bookmender leader has counted, or fewer than two bookies are not registered."""
    bookies = status.named_unregistered
    if len(bookies) <= 1 or status.leader_state.unavailable is not None:
        return None
    if status.services.leader_node is not None:
        why, action = "the leader has not counted yet", "Wait some seconds."
    else:
        why = "no bookmender node leads and counts"
        action = "Start a bookie, or let a bookmender node lead."
    return Found(
        "UNKNOWN",
        f"{counted(len(bookies), 'bookie')} that are not registered may have the only copies of "
        f"some entries: {why}.",
        action,
        {"bookies": list(bookies)},
    )


@condition
def bookies_in_maintenance(status: Status) -> Found | None:
    """INFO - Bookies are absent within their maintenance window. Their ledgers are not marked, and
    are short of copies until the bookies return.
    Causes: bookmender bookie maintenance ID --for DURATION.
    Do: Start the bookie before its window ends, then run bookmender bookie maintenance ID --end.
    Clears: when the bookie registers again. After its window the bookie counts as absent or
    lost."""
    rows, until_ms = status.bookies.in_maintenance, status.bookies.maintenance_until_ms
    if until_ms is None:
        return None
    named, unavailable = status.named_in_maintenance, status.leader_state.unavailable
    it, its = ("it", "Its") if len(rows) == 1 else ("them", "Their")
    effect = f"{its} ledgers are short of copies."
    if not named:
        effect = f"No ledger names {it}."
    elif unavailable is not None and not unavailable.count:
        effect = f"{effect[:-1]}, but each entry has an available copy."
    left = duration_text((until_ms - status.taken_ms) / 1000)
    bookies = [row.bookie for row in rows]
    return Found(
        "INFO",
        f"{count_is(len(rows), 'bookie')} absent for maintenance, for at most {left}: "
        f"{some(bookies)}. {effect}",
        "When the bookie runs again: bookmender bookie maintenance ID --end",
        {"bookies": bookies, "until_ms": until_ms, "named_by_ledgers": list(named)},
    )


@condition
def bookies_draining(status: Status) -> Found | None:
    """INFO - Data is being moved off bookies. Workers copy the ledgers of these bookies to others;
    no copy is missing meanwhile.
    Causes: bookmender bookie drain ID.
    Do: bookmender bookie drain shows what is left. When a bookie is drained, stop it and run
    bookmender bookie decommission ID.
    Clears: when no ledger names the bookies, or the drain is cancelled."""
    rows = [
        row
        for row in status.bookies.ordered
        if row.drain is not None and (row.progress is None or not row.progress.is_drained)
    ]
    if not rows:
        return None
    bookies, known = [row.bookie for row in rows], [row.progress for row in rows if row.progress]
    is_known = len(known) == len(rows)
    left, most = sum(p.ledgers_left for p in known), sum(p.ledgers_most for p in known)
    progress = "the leader has not counted their ledgers yet"
    if is_known and left:
        progress = f"{left:,} of {counted(most, 'ledger')} left"
    elif is_known:
        progress = "only unreadable ledgers left"
    return Found(
        "INFO",
        f"{count_is(len(rows), 'bookie')} draining: {some(bookies)}; {progress}.",
        "Nothing. bookmender bookie drain shows the progress.",
        {"bookies": bookies, "ledgers_left": left if is_known else None},
    )


@condition_of_data
def fsck_found_damage(status: Status) -> Found | None:
    """WARN until all were marked and no queued ledger needs repair, then INFO - An fsck run found
    ledgers wrong. They need a repair or an operator. They may have been repaired since; only
    another run can show that.
    Causes: Lost or damaged copies, reformatted bookies, ledgers on absent bookies.
    Do: DIR/report.html shows the ledgers. bookmender fsck mark DIR marks those that can be
    repaired. Then run fsck again.
    Clears: when another run at that level or a closer one finds nothing wrong."""
    wrong = [run for run in status.reports.fsck_runs if run.wrong]
    if not wrong:
        return None
    are_marked = all((run.marked or 0) >= run.wrong for run in wrong)
    are_handled = are_marked and not status.queue.needs_repair
    action = "Mark those that can be repaired: bookmender fsck mark DIR. Later run fsck again."
    if are_handled:
        action = "Run fsck again to see whether they are repaired."
    elif are_marked:
        action = "Wait until workers have repaired them, then run fsck again."
    return Found(
        "INFO" if are_handled else "WARN",
        " ".join(
            f"fsck run {run.run} (level {run.level.value}) found {counted(run.wrong, 'ledger')} "
            f"wrong; {run.marked or 0:,} marked for repair since."
            for run in wrong
        ),
        action,
        {"runs": {r.run: {"wrong": r.wrong, "marked": r.marked or 0} for r in wrong}},
    )


@condition
def fsck_inconclusive(status: Status) -> Found | None:
    """INFO - An fsck run could not judge some ledgers. It found nothing wrong with them, but could
    not read everything that it needed.
    Causes: Bookies that did not answer, unreadable metadata, ledgers whose end cannot be proven.
    Do: Read the reasons in the report. Make sure that every bookie answers, and run fsck again.
    Clears: when another run can judge every ledger."""
    unknown = {
        run.run: count
        for run in status.reports.fsck_runs
        if (count := run.counts.verdicts.get(Grade.UNKNOWN.value, 0))
    }
    if not unknown:
        return None
    return Found(
        "INFO",
        " ".join(
            f"fsck run {run} could not judge {counted(count, 'ledger')}."
            for run, count in unknown.items()
        ),
        "Its report says why. Make every bookie answer, and run fsck again.",
        {"runs": unknown},
    )


@condition
def ledgers_misplaced(status: Status) -> Found | None:
    """WARN - Copies of closed ledgers are not where the placement policy wants them, by the last
    placement check. No copy is missing, but the loss of one rack may lose entries.
    Causes: Racks were changed or learned after the ledgers were written. A rack was full or down
    while copies were placed.
    Do: Set checks.repairs_placement = true, or compare the racks with bookmender bookie list.
    bookmender check shows the counts.
    Clears: when a later placement check finds all closed ledgers well placed."""
    run = status.reports.placement
    if run is None or not (count := run.counts.get(Adherence.FAIL.value, 0)):
        return None
    marked = run.counts.get("marked", 0)
    age = duration_text((status.taken_ms - (run.finished_ms or run.started_ms)) / 1000)
    return Found(
        "WARN",
        f"{counted(count, 'closed ledger')} broke the placement policy in the check {age} ago; "
        f"{marked:,} marked to be moved.",
        "Nothing: workers move the copies, and a later check looks again."
        if marked
        else "Set checks.repairs_placement = true, so that workers move the copies. bookmender "
        "check placement looks again.",
        {"ledger_count": count, "marked": marked},
    )


def _blocked(status: Status, severities: tuple[Severity, Severity]) -> Found | None:
    """Return that ledgers are blocked. ``severities``: if some are, and if all are. Ledgers that
    are only to be moved have all their copies."""
    queue = status.queue
    if not (blocked := queue.blocked):
        return None
    gravest_first = sorted(blocked, key=lambda note: gravity(note.reason))
    counts = Counter(note.reason.value for note in gravest_first)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    first = gravest_first[0]
    return Found(
        severities[len(blocked) >= queue.total],
        f"Blocked: {len(blocked):,} of {counted(queue.total, 'queued ledger')} ({reasons}).",
        f"Ledger {first.ledger_id}: {printable(message(first.ledger_id, first.blocked).text)}. "
        "Others: bookmender queue",
        {
            "ledger_count": len(blocked),
            "by_reason": dict(counts),
            "first_ledgers": [note.ledger_id for note in blocked[:NAMES_SHOWN_MAX]],
        },
    )


def _repair_action(status: Status) -> str:
    """Return what an operator can do for under-replicated or damaged ledgers, in accordance with
    the actions of other conditions that hold."""
    queue = status.queue
    if status.orders.is_disabled:
        return "Nothing is repaired while auto-recovery is disabled: bookmender enable"
    if len(queue.blocked) >= queue.total:
        return "All are blocked: act on REPAIRS_BLOCKED."
    if no_workers(status) is not None:
        return "Nothing is repaired without a worker: act on NO_WORKERS."
    if queue.blocked:
        return "Act on REPAIRS_BLOCKED. Workers repair the other ledgers meanwhile."
    return "Nothing to do while workers repair. bookmender queue shows each ledger."
