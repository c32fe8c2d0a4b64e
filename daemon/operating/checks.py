"""The periodic checks as operators see and order them: how far each is, and asking for one now.

Whoever asks only writes: the leader follows. For a check of ledgers it is the time of the last run
that is taken back, as Java's ``forceauditchecks`` does; for the audit of the bookies the recovery
delay is written again as it is, as its ``triggeraudit`` does.
"""

from contextlib import suppress
from dataclasses import replace

from auditor.checks.kinds import KINDS, OVERDUE, CheckKind
from auditor.checks.overdue import look_interval_s
from auditor.checks.records import (
    CheckRun,
    check_path,
    checks_path,
    last_run_ms,
    read_check,
)
from auditor.checks.schedule import FORCED_MS, due_in_s
from auditor.election import current_leader
from auditor.records import last_audit
from daemon.operating.check_rows import CheckRow, Checks
from daemon.operating.progress import Show
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.errors import NodeExistsError, NoNodeError, SettingsError
from ledgers.store import ANY_VERSION
from replication.cluster.membership import live_nodes
from replication.cluster.order_book import OrderBook, checks_place
from replication.cluster.orders import ChecksOrder, Orders
from replication.queue import payloads

POLL_S = 1.0
BOOKIES = "bookies"
"""The audit of the bookies against all ledgers: at each loss, and from time to time."""
FORCIBLE = (BOOKIES, *(kind.name for kind in KINDS))
ABOUT_BOOKIES = "compares the list of bookies with what all ledgers name, and marks what is lost"
ABOUT_OVERDUE = "looks for ledgers that have been marked for too long"


# --- Looking -----------------------------------------------------------------------------------------


async def read_checks(cluster: Visit, *, clock: Clock) -> Checks:
    orders = await OrderBook(cluster.store, cluster.ur).read()
    now_ms = clock.wall_ms()
    rows = [
        await _bookies_row(cluster, now_ms),
        *[await _row(cluster, kind, now_ms) for kind in KINDS],
        await _overdue_row(cluster),
    ]
    leader, concerns = await _leader(cluster)
    return Checks(
        rows=tuple(rows),
        leader=leader,
        is_paused=orders.paused_checks is not None,
        concerns=(*concerns, *await _waits(cluster, orders)),
    )


async def _row(cluster: Visit, kind: CheckKind, now_ms: int) -> CheckRow:
    last_ms = await last_run_ms(cluster.store, cluster.ur, kind.name, kind.audit)
    record = await read_check(cluster.store, cluster.ur, kind.name)
    interval_s = kind.interval_of(cluster.settings.checks)
    is_forced = last_ms == FORCED_MS
    due_s = due_in_s(last_ms, interval_s=interval_s, now_ms=now_ms)
    finished_ms = record.last.finished_ms if record.last else None
    return CheckRow(
        name=kind.name,
        about=kind.about,
        interval_s=interval_s,
        last_ms=finished_ms if is_forced else last_ms,
        is_forced=is_forced,
        due_ms=None if due_s is None else now_ms + int(max(0.0, due_s) * 1000),
        running=record.unfinished(last_ms),
        last=record.last,
    )


async def _bookies_row(cluster: Visit, now_ms: int) -> CheckRow:
    audit = await last_audit(cluster.store, cluster.ur)
    interval_s = cluster.settings.auditor.bookie_check_interval_s
    last = None
    if audit is not None:
        counts = {"marked": audit.mark_count, "unreadable": audit.unreadable_count}
        last = CheckRun(
            started_ms=audit.finished_ms,
            finished_ms=audit.finished_ms,
            ledger_count=audit.ledger_count,
            counts={kind: count for kind, count in counts.items() if count},
        )
    return CheckRow(
        name=BOOKIES,
        about=ABOUT_BOOKIES,
        interval_s=interval_s,
        last_ms=audit.finished_ms if audit else None,
        due_ms=audit.finished_ms + int(interval_s * 1000) if audit else now_ms,
        last=last,
    )


async def _overdue_row(cluster: Visit) -> CheckRow:
    last = (await read_check(cluster.store, cluster.ur, OVERDUE)).last
    after_s = cluster.settings.checks.overdue_after_s
    last_ms = last.finished_ms if last else None
    interval_s = look_interval_s(after_s) if after_s else 0.0
    return CheckRow(
        name=OVERDUE,
        about=ABOUT_OVERDUE,
        interval_s=interval_s,
        last_ms=last_ms,
        due_ms=None if not after_s else (last_ms or 0) + int(interval_s * 1000),
        last=last,
    )


async def _leader(cluster: Visit) -> tuple[str | None, list[str]]:
    """Who leads, and what is to be said of that."""
    leader = await current_leader(cluster.store, cluster.ur)
    if leader is None:
        return None, ["nobody leads, so no check runs: bookmender daemon"]
    name = leader.candidate or "unknown (its vote cannot be read)"
    nodes = await live_nodes(cluster.store, cluster.ur)
    if leader.session_id in {node.session_id for node in nodes}:
        return name, []
    return name, [
        f"the leader is Java's AutoRecovery ({name}): it reads when a check ran last only as it begins "
        "to lead, so that one asked for now runs after that"
    ]


async def _waits(cluster: Visit, orders: Orders) -> list[str]:
    found = []
    if orders.paused_checks is not None:
        found.append("the checks are paused: bookmender check resume")
    if await cluster.store.exists(payloads.disable_path(cluster.ur)) is not None:
        found.append("auto-recovery is disabled, so no check runs: bookmender enable")
    if orders.is_held:
        found.append("a safety hold stands, so no check runs: bookmender hold")
    return found


# --- Ordering ----------------------------------------------------------------------------------------


async def force_check(cluster: Visit, name: str) -> None:
    """Ask for it. That it was asked for already, or runs now, is no error.

    Raises ConflictError: somebody has just changed the same thing.
    """
    if name == BOOKIES:
        await _trigger_audit(cluster)
        return
    kind = next(kind for kind in KINDS if kind.name == name)
    if kind.audit is None:
        await _force_own(cluster, name)
        return
    path, data = (
        payloads.audit_time_path(cluster.ur, kind.audit),
        payloads.audit_time_to_bytes(FORCED_MS),
    )
    try:
        await cluster.store.create(path, data, with_parents=True)
    except NodeExistsError:
        await cluster.store.set(path, data, version=ANY_VERSION)


async def _force_own(cluster: Visit, name: str) -> None:
    """Of a check that Java does not know: the time stands in its record, which the leader writes
    too."""
    path = check_path(cluster.ur, name)
    # The version before the record, so that a record that the leader writes in between is never
    # overwritten with its older self: the progress of its run would be lost with it.
    stat = await cluster.store.exists(path)
    record = await read_check(cluster.store, cluster.ur, name)
    data = replace(record, last_ms=FORCED_MS).to_json()
    if stat is not None:
        await cluster.store.set(path, data, version=stat.version)
        return
    with suppress(NodeExistsError):
        await cluster.store.create(checks_path(cluster.ur), with_parents=True)
    await cluster.store.create(path, data)


async def _trigger_audit(cluster: Visit) -> None:
    path = payloads.recovery_delay_path(cluster.ur)
    try:
        data, stat = await cluster.store.get(path)
    except NoNodeError as error:
        raise SettingsError(
            "there is no recovery delay yet: no auditor has ever led here", path=path
        ) from error
    await cluster.store.set(path, data, version=stat.version)


async def pause_checks(cluster: Visit, *, clock: Clock) -> bool:
    """Whether they were not paused before. Raises ConflictError."""
    book, place = OrderBook(cluster.store, cluster.ur), checks_place(cluster.ur)
    standing = await book.standing(place)
    if standing is not None and standing.order is not None:
        return False
    await book.give(place, ChecksOrder(since_ms=clock.wall_ms()), over=standing)
    return True


async def resume_checks(cluster: Visit) -> bool:
    """Whether they were paused. Raises ConflictError."""
    book, place = OrderBook(cluster.store, cluster.ur), checks_place(cluster.ur)
    standing = await book.standing(place)
    if standing is None:
        return False
    await book.withdraw(place, over=standing)
    return True


async def wait_checked(
    cluster: Visit, name: str, *, after_ms: int | None, show: Show, clock: Clock
) -> CheckRun:
    """Until a run of ours has ended that is not the one which ended at ``after_ms``; that run."""
    while True:
        row = (await read_checks(cluster, clock=clock)).row(name)
        if row.last is not None and row.last.finished_ms != after_ms:
            return row.last
        if row.running is not None:
            left, pause = row.running.ledgers_left, row.running.pause
            show(left, waiting=left if pause else 0, beside=pause and f"waits: {pause}")
        await clock.sleep(POLL_S)
