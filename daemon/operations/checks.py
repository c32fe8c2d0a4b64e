"""The periodic checks of the leader: shows them, asks for a run, pauses and resumes them.

A request is only written, and the leader reads it. For a check of ledgers the time of the last run
is reset, as Java's ``forceauditchecks`` does. For the audit of bookies the recovery delay is
written again, as Java's ``triggeraudit`` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from auditor.checks.placement import UNCOMPARED
from auditor.checks.records import (
    KINDS,
    CheckKind,
    CheckRun,
    read_audit_time,
    read_check,
    read_stored_check,
)
from auditor.checks.records import CheckRecord as StoredCheck
from auditor.checks.runner import FORCED_MS, due_in_s
from auditor.election import current_leader
from auditor.records import AuditRecord
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.operations.orders import UNREADABLE_VOTE, unreadable_texts, withdraw_order
from daemon.operations.waiting import Show
from daemon.words import counted, duration_text, printable
from ledgers.clock import Clock
from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.placement import Adherence
from ledgers.store import ANY_VERSION
from replication import znodes
from replication.nodes import live_nodes
from replication.orders import ChecksOrder, OrderStore, checks_znode, hold_znode
from replication.records import REWRITE_HINT, read_stored


class RunRecord(Answer, frozen=True, kw_only=True):
    """A run of a check."""

    started_ms: int
    finished_ms: int | None
    ledger_count: int
    ledgers_left: int
    ledgers_per_s: float | None
    remaining_s: float | None
    pause: str | None
    """Why the run is paused."""
    counts: dict[str, int]
    """Outcomes by kind."""

    @classmethod
    def of(cls, run: CheckRun) -> Self:
        return cls(
            started_ms=run.started_ms,
            finished_ms=run.finished_ms,
            ledger_count=run.ledger_count,
            ledgers_left=run.ledgers_left,
            ledgers_per_s=run.ledgers_per_s,
            remaining_s=run.remaining_s,
            pause=run.pause or None,
            counts=dict(run.counts),
        )


class CheckRecord(Answer, frozen=True, kw_only=True):
    """One periodic check. ``interval_s``: 0: it runs only on request."""

    check: str
    about: str
    interval_s: float
    last_run_ms: int | None
    is_forced: bool
    """A run was requested and has not finished since."""
    next_due_ms: int | None
    running: RunRecord | None
    last: RunRecord | None
    unreadable_records: list[str]


class ChecksRecord(Answer, frozen=True, kw_only=True):
    """All checks. ``concerns``: what keeps them from running."""

    leader: str | None
    is_paused: bool
    concerns: list[str]
    unreadable_orders: list[str]
    checks: list[CheckRecord]


class RequestedCheck(Answer, frozen=True, kw_only=True):
    """A run that was requested. ``run``: null unless its end was waited for."""

    check: str
    leader: str | None
    run: RunRecord | None


class PausedRecord(Answer, frozen=True, kw_only=True):
    """``has_changed``: false if it was so before."""

    is_paused: bool
    has_changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One periodic check. ``interval_s``: by this host's settings; 0: it runs only on request."""

    name: str
    about: str
    interval_s: float
    last_ms: int | None = None
    """Time at which bookmender or Java last completed the check. None: no completed run is
    known."""
    is_forced: bool = False
    """True if a run was requested and has not finished since."""
    due_ms: int | None = None
    """Wall-clock time of the next run. None: never."""
    running: CheckRun | None = None
    last: CheckRun | None = None
    """The last run that a bookmender leader completed."""
    unreadable: tuple[str, ...] = ()
    """Znodes of the check that cannot be read. What they tell is unknown."""

    def record(self) -> CheckRecord:
        return CheckRecord(
            check=self.name,
            about=self.about,
            interval_s=self.interval_s,
            last_run_ms=self.last_ms,
            is_forced=self.is_forced,
            next_due_ms=self.due_ms,
            running=RunRecord.of(self.running) if self.running else None,
            last=RunRecord.of(self.last) if self.last else None,
            unreadable_records=list(self.unreadable),
        )

    def to_text(self, *, now_ms: int) -> str:
        last = "last run unknown" if self.unreadable else "never run"
        if self.last_ms is not None:
            last = f"last run {duration_text((now_ms - self.last_ms) / 1000)} ago"
        lines = [f"{self.name}: {last}; {self._due_text(now_ms)}"]
        lines += [
            f"  its record cannot be read ({path}): {REWRITE_HINT}" for path in self.unreadable
        ]
        if self.running is not None:
            lines.append(f"  {run_text(self.running)}")
        if self.last is not None:
            took = duration_text(self.last.active_ms / 1000)
            lines.append(
                f"  its last run checked {counted(self.last.ledger_count, 'ledger')} in {took}: "
                f"{counts_text(self.last.counts)}"
            )
        return "\n".join(lines)

    def _due_text(self, now_ms: int) -> str:
        if self.running is not None:
            return "running"
        if self.is_forced:
            return "requested"
        if self.due_ms is None:
            return "not scheduled"
        if self.due_ms <= now_ms:
            return "due now"
        return f"due in {duration_text((self.due_ms - now_ms) / 1000)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All checks at one moment. ``concerns``: what keeps them from running, as sentences."""

    rows: tuple[CheckRow, ...]
    leader: str | None
    is_paused: bool
    concerns: tuple[str, ...]
    unreadable_orders: tuple[str, ...] = ()
    """Znodes of unreadable orders that concern checks."""

    def row(self, name: str) -> CheckRow:
        return next(row for row in self.rows if row.name == name)

    def record(self) -> ChecksRecord:
        return ChecksRecord(
            leader=self.leader,
            is_paused=self.is_paused,
            concerns=list(self.concerns),
            unreadable_orders=list(self.unreadable_orders),
            checks=[row.record() for row in self.rows],
        )

    def to_text(self, *, now_ms: int) -> str:
        return "\n".join(row.to_text(now_ms=now_ms) for row in self.rows)


def run_text(run: CheckRun) -> str:
    """Return the progress of a running check as text."""
    text = f"{counted(run.ledger_count, 'ledger')} checked, about {run.ledgers_left:,} left"
    if run.remaining_s is not None:
        text += f", {duration_text(run.remaining_s)} to go at {run.ledgers_per_s:,.0f} per second"
    if run.counts:
        text += f"; {counts_text(run.counts)}"
    return f"{text}; paused: {run.pause}" if run.pause else text


def counts_text(counts: Mapping[str, int]) -> str:
    """Return what a check found, and what the words for that mean."""
    if not any(counts.values()):
        return "nothing found"
    return ", ".join(
        f"{count:,} {kind.replace('_', ' ')}"
        + (f" ({meaning})" if (meaning := _MEANINGS.get(kind.removeprefix("open_"))) else "")
        for kind, count in counts.items()
    )


_MEANINGS = {
    UNCOMPARED: "no source of racks is configured, so there is nothing to compare",
    Adherence.FAIL.value: "their copies break the placement policy",
    Adherence.SOFT.value: "they follow what the policy requires, not all that it desires",
    Adherence.STRICT.value: "they follow the policy",
}


POLL_S = 1.0


BOOKIES = "bookies"
"""The audit that compares the bookies with all ledgers: after each loss, and periodically."""


FORCIBLE = (BOOKIES, *(kind.name for kind in KINDS))


ABOUT_BOOKIES = (
    "compares the registered bookies with those that ledgers name, and marks ledgers of lost ones"
)


async def read_checks(cluster: AdminSession, *, clock: Clock) -> Checks:
    orders = await OrderStore(cluster.store, cluster.paths).read()
    now_ms = clock.wall_ms()
    rows = [
        await _bookies_row(cluster, now_ms),
        *[await _row(cluster, kind, now_ms) for kind in KINDS],
    ]
    leader, concerns = await _leader(cluster)
    if orders.paused_checks is not None:
        concerns.append("The checks are paused. Resume them: bookmender check --resume")
    if await cluster.store.exists(cluster.paths.disable) is not None:
        concerns.append("Auto-recovery is disabled, so no check runs. Enable it: bookmender enable")
    if orders.is_held:
        concerns.append("A safety hold is in force, so no check runs: bookmender hold")
    of_checks = {checks_znode(cluster.paths).path, hold_znode(cluster.paths).path}
    unreadable = tuple(path for path in orders.unreadable if path in of_checks)
    return Checks(
        rows=tuple(rows),
        leader=leader,
        is_paused=orders.paused_checks is not None,
        concerns=(*concerns, *unreadable_texts(unreadable)),
        unreadable_orders=unreadable,
    )


async def _row(cluster: AdminSession, kind: CheckKind, now_ms: int) -> CheckRow:
    stored = await read_stored_check(cluster.store, cluster.paths, kind.name)
    record, last_ms = stored.value or StoredCheck(), None
    unreadable = [cluster.paths.check(kind.name)] if stored.is_unreadable else []
    if kind.audit is None:
        last_ms = record.last_ms
    else:
        time = await read_audit_time(cluster.store, cluster.paths, kind.audit)
        last_ms = time.value
        unreadable += [cluster.paths.audit_time(kind.audit)] if time.is_unreadable else []
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
        unreadable=tuple(unreadable),
    )


async def _bookies_row(cluster: AdminSession, now_ms: int) -> CheckRow:
    path = cluster.paths.last_audit
    stored = await read_stored(cluster.store, path, AuditRecord.parse)
    audit = stored.value
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
        unreadable=(path,) if stored.is_unreadable else (),
    )


async def _leader(cluster: AdminSession) -> tuple[str | None, list[str]]:
    """Return the leader's name, and sentences about it."""
    leader = await current_leader(cluster.store, cluster.paths)
    if leader is None:
        return None, ["No auditor is running, so no check runs. Start one: bookmender daemon"]
    name = leader.candidate or f"unknown ({UNREADABLE_VOTE})"
    nodes = await live_nodes(cluster.store, cluster.paths)
    if leader.session_id in {node.session_id for node in nodes}:
        return name, []
    return name, [
        f"The leader is Java's AutoRecovery ({printable(name)}). It reads requests only when it "
        "becomes leader, so a check requested now runs after the next election."
    ]


# --- Orders ---------------------------------------------------------------------------------------


async def force_check(cluster: AdminSession, name: str) -> None:
    """Request a run. It is no error if one was requested already or is in progress.

    Raises ConflictError if another client has just changed the same znode, and UnavailableError if
    it is the audit of bookies and no auditor has ever run.
    """
    store, paths = cluster.store, cluster.paths
    audits = {kind.name: kind.audit for kind in KINDS}
    if name == BOOKIES:
        await ask_for_audit(cluster)
    elif (audit := audits[name]) is not None:
        path, data = paths.audit_time(audit), znodes.audit_time_to_bytes(FORCED_MS)
        try:
            await store.create(path, data, with_parents=True)
        except NodeExistsError:
            await store.set(path, data, version=ANY_VERSION)
    else:  # Java does not know this check: reset the time in its record, which the leader writes
        path = paths.check(name)
        # Read the version first and the record second. If the leader writes the record in between,
        # the write below fails. In the other order it would replace the leader's record with an
        # older one, and lose the progress of its run.
        stat = await store.exists(path)
        data = replace(await read_check(store, paths, name), last_ms=FORCED_MS).to_json()
        if stat is not None:
            await store.set(path, data, version=stat.version)
        else:
            await store.create(path, data, with_parents=True)
    await cluster.note_order(order_event("check run", cause=name))


async def ask_for_audit(cluster: AdminSession) -> None:
    """Request an audit that treats all absent bookies as lost now, as Java's triggeraudit does.

    It writes the recovery delay again without changing it. The auditor then skips the delay once.
    """
    path = cluster.paths.recovery_delay
    try:
        data, stat = await cluster.store.get(path)
        await cluster.store.set(path, data, version=stat.version)
    except NoNodeError as error:
        raise UnavailableError(
            "no auditor has ever run in this cluster. Start one with: bookmender daemon"
        ) from error
    except ConflictError:
        pass  # another client has just written the delay, which also requests an audit


async def pause_checks(cluster: AdminSession, *, clock: Clock) -> bool:
    """Pause the checks, and return False if they were paused already. Raises ConflictError."""
    order_store, znode = OrderStore(cluster.store, cluster.paths), checks_znode(cluster.paths)
    stored = await order_store.stored(znode)
    if stored is not None and stored.value is not None:
        return False
    await order_store.give(znode, ChecksOrder(since_ms=clock.wall_ms()), over=stored)
    await cluster.note_order(order_event("check pause"))
    return True


async def resume_checks(cluster: AdminSession) -> bool:
    """Resume the checks, and return False if they were not paused. Raises ConflictError."""
    return await withdraw_order(cluster, checks_znode(cluster.paths), order_event("check resume"))


async def wait_checked(
    cluster: AdminSession, name: str, *, after_ms: int | None, show: Show, clock: Clock
) -> CheckRun:
    """Wait until a bookmender run ends that is not the one that ended at ``after_ms``, and return
    it."""
    while True:
        row = (await read_checks(cluster, clock=clock)).row(name)
        if row.last is not None and row.last.finished_ms != after_ms:
            return row.last
        if row.running is not None:
            left, pause = row.running.ledgers_left, row.running.pause
            show(left, waiting=left if pause else 0, beside=pause and f"paused: {pause}")
        await clock.sleep(POLL_S)
