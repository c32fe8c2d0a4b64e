"""Runs the periodic checks: those that are due, one at a time, each to its end.

A run covers all ledgers in the order of their ids, one part at a time. After each part its cursor
and counts are stored, so that another leader can continue. While no check may run (``pause_of``) it
waits. The time of the last run is written only after every ledger was checked. Java's auditor
writes it also if it was disabled in between, and never if it could not open some ledger.

Times that end in ``_ms`` are wall-clock milliseconds, as the znodes hold them, which outlive
leaders. Times that end in ``_s`` are elapsed time. Source: BookKeeper's Auditor,
scheduleCheckAllLedgersTask and similar methods.

The metrics are set on the leader only.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from math import inf
from typing import TypeVar

import structlog
from prometheus_client import Counter, Gauge, Histogram

from auditor.checks.records import Check, CheckRecord, CheckRecords, CheckRun
from auditor.ledger_map import LedgerMap
from auditor.settings import ChecksSettings
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    LeadershipLostError,
    NoSuchLedgerError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.tasks import task_scope, until_answered, wait_woken, wake_on
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Event, History, Kind
from replication.orders import Orders

log = structlog.get_logger()
LEDGERS = Counter(
    "bookmender_check_ledgers_total", "Ledgers that a check has checked, by check.", ["check"]
)
RUN_S = Histogram(
    "bookmender_check_run_seconds",
    "Duration of finished runs of a check that this node led to their end, without pauses.",
    ["check"],
    buckets=(0.1, 1, 10, 60, 300, 900, 3600, 7200, 14400, 28800, 86400, 259200, 604800),
)
RUNNING = Gauge(
    "bookmender_check_running",
    "1 while a run of the check is in progress or paused, else 0.",
    ["check"],
)
PAUSED = Gauge(
    "bookmender_check_paused", "1 while a run of the check is paused, else 0.", ["check"]
)
LEFT = Gauge(
    "bookmender_check_ledgers_left", "Ledgers that the current run has not checked yet.", ["check"]
)
REMAINING = Gauge(
    "bookmender_check_remaining_seconds",
    "Estimated seconds until the current run ends, without pauses.",
    ["check"],
)
COUNTED = Gauge(
    "bookmender_check_counted",
    "Outcomes of the last finished run, by kind.",
    ["check", "kind"],
)
FINISHED = Gauge(
    "bookmender_check_finished_timestamp_seconds",
    "Unix time at which the last finished run ended.",
    ["check"],
)
INTERVAL = Gauge(
    "bookmender_check_interval_seconds",
    "Interval of the check, from the settings of the leader; 0: it runs on request only.",
    ["check"],
)

RETRY_S = 5.0
"""Wait after ZooKeeper did not answer."""
DENIED_RETRY_S = 600.0
"""Wait after ACLs denied access. No watch reports that an ACL has changed."""
POLL_S = 2.0
"""Interval between two looks at conditions that no watch reports."""
WRITE_INTERVAL_S = 5.0
"""Minimum interval between two writes of progress. A new leader repeats what was done since the
last."""
LOG_INTERVAL_S = 60.0
IDS_AT_ONCE = 10_000
"""Ledger ids taken from the ledger map at a time."""
LEDGERS_PER_TURN = 100
"""Ledgers that a check may judge without I/O before other tasks get a turn."""

FORCED_MS = 0
"""A last run at this time means that an operator requested the check; for Java it was long ago."""

T = TypeVar("T")


def due_in_s(last_ms: int | None, *, interval_s: float, now_ms: int) -> float | None:
    """Return the seconds until a check is due; negative if it is overdue; None: never.

    ``last_ms``: None if it never ran. ``interval_s`` of 0: only on request. A last run in the
    future, after the clock was set back, counts as a run now.
    """
    if last_ms == FORCED_MS:
        return -inf
    if interval_s == 0:
        return None
    if last_ms is None:
        return -inf
    return interval_s - max(0, now_ms - last_ms) / 1000


def pause_of(orders: Orders, *, is_disabled: bool, is_audit_pending: bool) -> str:
    """Return why no check may run now; empty if checks may run.

    Checks mark ledgers, so they wait while nothing may be marked. As in Java, they also wait while
    an absent bookie is not lost yet: its ledgers would be marked too early.
    """
    if orders.paused_checks is not None:
        return "by order"
    if is_disabled:
        return "auto-recovery is disabled"
    if orders.is_held:
        return "a safety hold is in force"
    return "an absent bookie is not lost yet" if is_audit_pending else ""


async def check_safely(check: Check, ledger_id: int) -> collections.Counter[str]:
    """Check one ledger and return its counts: ``deleted`` or ``unreadable`` if its metadata is,
    ``failed`` after an unexpected error, which does not end the check of other ledgers. Raises
    UnavailableError, SessionLostError or LeadershipLostError."""
    try:
        return await check.check_ledger(ledger_id)
    except (UnavailableError, SessionLostError, LeadershipLostError):
        raise
    except NoSuchLedgerError:
        return collections.Counter(deleted=1)
    except (CorruptionError, UnauthorizedError) as error:
        name, text = check.kind.name, str(error)
        log.warning("check.ledger_unreadable", check=name, ledger_id=ledger_id, error=text)
        return collections.Counter(unreadable=1)
    except Exception as error:
        name, text = check.kind.name, repr(error)
        log.error("check.ledger_failed", check=name, ledger_id=ledger_id, error=text)
        return collections.Counter(failed=1)


@dataclass(slots=True, kw_only=True)
class CheckState:
    """One check: when it is due, and how far its run is.

    The wall clock is read once for each finished run. From then on elapsed time decides, so that
    setting the clock back later postpones nothing.
    """

    check: Check
    due_s: float | None = None
    """None: never, as far as is known."""
    is_known: bool = False
    """True if ``due_s`` was computed from ``last_ms``, the time of the last run."""
    last_ms: int | None = None
    is_denied: bool = False
    """True while ACLs deny access to the znodes of the check. It does not run then."""
    record: CheckRecord = field(default_factory=CheckRecord)
    """As last read, or as changed by the run since."""
    written_s: float = -inf
    logged_s: float = -inf

    @property
    def run(self) -> CheckRun:
        assert self.record.running is not None, self.record
        return self.record.running

    def update(
        self,
        last_ms: int | None,
        *,
        interval_s: float,
        now_s: float,
        now_ms: int,
        is_unfinished: bool = False,
    ) -> None:
        """Set the time of the last run as the znode says now. ``is_unfinished``: an earlier leader
        left a run, which continues at once.

        A time that went backwards requests the check: ``bookkeeper shell forceauditchecks`` sets it
        back by 21 days. Java's auditor itself reads these times only when it starts.
        """
        if self.is_known and self.last_ms == last_ms:
            return
        wait_s = due_in_s(last_ms, interval_s=interval_s, now_ms=now_ms)
        is_resumed = not self.is_known and is_unfinished and interval_s > 0
        is_requested = (
            self.is_known
            and self.last_ms is not None
            and (last_ms is None or last_ms < self.last_ms)
        )
        if is_resumed or is_requested:
            wait_s = -inf
        self.due_s = None if wait_s is None else now_s + wait_s
        self.is_known, self.last_ms = True, last_ms

    def set_run(self, run: CheckRun) -> None:
        """Set the progress of the run, and its metrics."""
        self.record = replace(self.record, running=run)
        name = self.check.kind.name
        RUNNING.labels(name).set(1)
        PAUSED.labels(name).set(bool(run.pause))
        LEFT.labels(name).set(run.ledgers_left)
        REMAINING.labels(name).set(run.remaining_s or 0)


@dataclass(kw_only=True)
class CheckRunner:
    """Runs the checks of a leader. ``run`` ends by cancellation or with the session."""

    checks: InitVar[Sequence[Check]]
    """If several are due at the same time, the first runs first."""
    ledger_map: LedgerMap
    is_ledger_map_ready: Callable[[], bool]
    """Returns True if every ledger is known."""
    views: ViewSource
    records: CheckRecords
    is_audit_pending: Callable[[], bool]
    """Returns True if the recovery delay of an absent bookie is not over."""
    settings: ChecksSettings
    clock: Clock
    history: History = NO_HISTORY

    def __post_init__(self, checks: Sequence[Check]) -> None:
        self.store, self.paths = self.records.store, self.records.paths
        self._states = [CheckState(check=check) for check in checks]
        self._wake = asyncio.Event()

    def apply(self, settings: ChecksSettings) -> None:
        """Use these intervals from now on. Checks that were requested or are resumed stay due."""
        if settings != self.settings:
            self.settings = settings
            for state in self._states:
                state.is_known = state.is_known and state.due_s == -inf
            self._wake.set()

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError."""
        # Operators set the time of the last run back to request a check.
        kinds = [state.check.kind for state in self._states]
        watched = [
            self.paths.check(kind.name) if kind.audit is None else self.paths.audit_time(kind.audit)
            for kind in kinds
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for path in (*watched, self.paths.disable):
                    tasks.create_task(wake_on(self.store.watch(path), self._wake))
                tasks.create_task(wake_on(self.views.changes(), self._wake))
                while True:
                    try:
                        wait_s = await self.run_once()
                    except (UnavailableError, UnauthorizedError) as error:
                        is_denied = isinstance(error, UnauthorizedError)
                        wait_s = DENIED_RETRY_S if is_denied else RETRY_S
                        log.warning("check.failed", error=str(error), retry_s=wait_s)
                    await wait_woken(self._wake, timeout_s=wait_s)
        finally:  # this node does not lead any more
            for gauge in (RUNNING, PAUSED, LEFT, REMAINING, COUNTED, FINISHED, INTERVAL):
                gauge.clear()

    async def run_once(self) -> float:
        """Run the check that is due. Return the seconds until the next call, perhaps infinity."""
        self._wake.clear()
        for state in self._states:
            await self._read(state)
        retry_s = DENIED_RETRY_S if any(state.is_denied for state in self._states) else inf
        dues = [(state.due_s, state) for state in self._states if state.due_s is not None]
        if not dues:
            return retry_s
        due_s, state = min(dues, key=lambda each: each[0])
        wait_s = due_s - self.clock.now_s()
        if wait_s > 0:
            return min(wait_s, retry_s)
        if not self.is_ledger_map_ready():
            return POLL_S
        await self._run_check(state)
        return 0.0

    async def _read(self, state: CheckState) -> None:
        """Read the check's record and the time of its last run. Without access it does not run."""
        kind = state.check.kind
        now_s, now_ms = self.clock.now_s(), self.clock.wall_ms()
        try:
            state.record, last_ms = await self.records.read(kind)
        except UnauthorizedError as error:
            if not state.is_denied:  # once, not at each attempt
                log.warning(
                    "check.access_denied", check=kind.name, error=str(error), retry_s=DENIED_RETRY_S
                )
            state.is_denied, state.is_known, state.due_s = True, False, None
            return
        state.is_denied = False
        interval_s = kind.interval_of(self.settings)
        INTERVAL.labels(kind.name).set(interval_s)
        state.update(
            last_ms,
            interval_s=interval_s,
            now_s=now_s,
            now_ms=now_ms,
            is_unfinished=state.record.unfinished(last_ms) is not None,
        )
        if (last := state.record.last) is None or last.finished_ms is None:
            return
        for gauge in (RUNNING, PAUSED, LEFT, REMAINING):  # no run is in progress
            gauge.labels(kind.name).set(0)
        FINISHED.labels(kind.name).set(last.finished_ms / 1000)
        for outcome, count in last.counts.items():
            COUNTED.labels(kind.name, outcome).set(count)

    # --- One run ----------------------------------------------------------------------------------

    async def _run_check(self, state: CheckState) -> None:
        """Run the check to its end, including all pauses."""
        check, kind = state.check, state.check.kind
        ledger_count = len(self.ledger_map)
        run = state.record.unfinished(state.last_ms) or CheckRun(
            started_ms=self.clock.wall_ms(), ledgers_left=ledger_count
        )
        state.record = replace(state.record, running=run)
        state.written_s, state.logged_s = -inf, self.clock.now_s()
        log.info("check.began", check=kind.name, cursor=run.cursor, ledger_count=ledger_count)
        await check.begin(run)
        cursor, size = run.cursor, check.part_size
        while ledger_ids := self.ledger_map.ledger_ids(cursor, count_max=IDS_AT_ONCE):
            for start in range(0, len(ledger_ids), size):
                await self._check_part(state, ledger_ids[start : start + size])
            cursor = ledger_ids[-1] + 1
        await check.finish(state.run)
        finished = state.record.finished(self.clock.wall_ms())
        await self._retried(lambda: self.records.write(kind, finished))
        # The time that was written is no request, even if it is earlier than the one before.
        state.is_known = False
        assert finished.last is not None
        run, counts = finished.last, dict(finished.last.counts)
        RUN_S.labels(kind.name).observe(run.active_ms / 1000)
        log.info(
            "check.finished",
            check=kind.name,
            ledger_count=run.ledger_count,
            active_s=run.active_ms // 1000,
            counts=counts,
        )
        self.history.record(
            Event(
                kind=Kind.CHECK_FINISHED,
                cause=kind.name,
                ledger_count=run.ledger_count,
                counts=counts,
            )
        )

    async def _check_part(self, state: CheckState, part: Sequence[int]) -> None:
        """Check one part. After an interruption or a pause, continue with unfinished ledgers."""
        left, counts, took_s = dict.fromkeys(part), collections.Counter[str](), 0.0
        while left:
            while pause := await self._retried(self._pause):
                await self._set_pause(state, pause)
                await wait_woken(self._wake, timeout_s=POLL_S)
            await self._set_pause(state, "")
            began_s = self.clock.now_s()
            await self._retried(lambda: self._check_until_pause(state.check, left, counts))
            took_s += self.clock.now_s() - began_s
        run, now_s = state.run, self.clock.now_s()
        run = replace(
            run,
            cursor=part[-1] + 1,
            ledger_count=run.ledger_count + len(part),
            ledgers_left=max(0, len(self.ledger_map) - run.ledger_count - len(part)),
            active_ms=run.active_ms + int(took_s * 1000),
            counts=dict(collections.Counter(run.counts) + counts),
        )
        state.set_run(run)
        LEDGERS.labels(state.check.kind.name).inc(len(part))
        if now_s - state.written_s >= WRITE_INTERVAL_S:
            await self._write_progress(state)
        if now_s - state.logged_s >= LOG_INTERVAL_S:
            state.logged_s = now_s
            log.info(
                "check.progressed",
                check=state.check.kind.name,
                ledger_count=run.ledger_count,
                ledgers_left=run.ledgers_left,
                ledgers_per_s=round(run.ledgers_per_s or 0.0, 1),
                remaining_s=round(run.remaining_s or 0.0),
                counts=dict(run.counts),
            )

    async def _check_until_pause(
        self, check: Check, left: dict[int, None], counts: collections.Counter[str]
    ) -> None:
        """Check the ledgers of ``left``, and remove each that is finished, until a pause begins."""
        ledger_ids = iter(list(left))

        async def check_some() -> None:
            for number, ledger_id in enumerate(ledger_ids, start=1):
                counts.update(await check_safely(check, ledger_id))
                del left[ledger_id]
                if number % LEDGERS_PER_TURN == 0:
                    await asyncio.sleep(0)

        if not left:
            return
        async with task_scope() as scope:
            checking = [scope.start(check_some()) for _ in range(min(check.at_once, len(left)))]

            async def cancel_at_pause() -> None:
                while not await self._pause():
                    await wait_woken(self._wake, timeout_s=POLL_S)
                for task in checking:
                    task.cancel()

            scope.start(cancel_at_pause())
            await asyncio.wait(checking)

    async def _set_pause(self, state: CheckState, pause: str) -> None:
        """Store the reason of the pause; empty: the run continues."""
        if pause == state.run.pause:
            return
        state.set_run(replace(state.run, pause=pause))
        name = state.check.kind.name
        log.info("check.paused" if pause else "check.resumed", check=name, why=pause)
        await self._write_progress(state)

    async def _write_progress(self, state: CheckState) -> None:
        state.written_s = self.clock.now_s()
        try:
            await self.records.write(state.check.kind, state.record)
        except UnavailableError as error:  # not essential: the next write contains everything
            name = state.check.kind.name
            log.warning("check.progress_write_failed", check=name, error=str(error))

    async def _pause(self) -> str:
        self._wake.clear()  # what happens from here on sets it again
        return pause_of(
            self.views.current.orders,
            is_disabled=await self.store.exists(self.paths.disable) is not None,
            is_audit_pending=self.is_audit_pending(),
        )

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``work`` until ZooKeeper answers. Raises all errors but UnavailableError."""
        return await until_answered(
            work,
            event="check.delayed",
            clock=self.clock,
            retry_min_s=RETRY_S,
            retry_max_s=RETRY_S,
        )
