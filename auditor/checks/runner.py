"""Runs the periodic checks: those that are due, one at a time, each to its end.

A run covers all ledgers in the order of their ids, one part at a time. After each part its cursor
and counts are stored, so that another leader can continue. While no check may run (``pause_of``) it
waits. The time of the last run is written only after every ledger was checked. Java's auditor
writes it also if it was disabled in between, and never if it could not open some ledger.

``Timetable`` decides when a check is due, from the time of its last run. Times that end in ``_ms``
are wall-clock milliseconds, as the znodes hold them, which outlive leaders. Times that end in
``_s`` are elapsed time. Source: BookKeeper's Auditor, scheduleCheckAllLedgersTask and similar
methods.

The metrics are set on the leader only.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

import structlog
from prometheus_client import Counter, Gauge, Histogram

from auditor.checks.base import Check, PartRun
from auditor.checks.records import CheckRecord, CheckRecords, CheckRun
from auditor.ledger_map import LedgerMap
from auditor.settings import ChecksSettings
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope, until_answered, wait_woken, wake_on
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Event, History, Kind
from replication.orders import Orders
from replication.znodes import ClusterPaths

FORCED_MS = 0
"""A last run at this time means that an operator requested the check. For Java it is a run long
ago.
"""


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
    age_s = max(0, now_ms - last_ms) / 1000
    return interval_s - age_s


def is_requested(before_ms: int | None, last_ms: int | None) -> bool:
    """True if the time of the last run went backwards, which requests the check.

    ``bookkeeper shell forceauditchecks`` sets it back by 21 days. Java's auditor itself reads these
    times only when it starts.
    """
    return before_ms is not None and (last_ms is None or last_ms < before_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The due time of a check, in elapsed time (None: never). ``last_ms``: the last run that it was
    computed from."""

    last_ms: int | None
    due_s: float | None


class Timetable:
    """Computes when each check of one leader is due.

    The wall clock is read once for each finished run. From then on elapsed time decides, so that
    setting the clock back later postpones nothing.
    """

    def __init__(self) -> None:
        self._due: dict[str, Due] = {}

    def update(
        self,
        name: str,
        last_ms: int | None,
        *,
        interval_s: float,
        now_s: float,
        now_ms: int,
        is_unfinished: bool = False,
    ) -> None:
        """Set what the znode says now. ``is_unfinished``: an earlier leader left a run, which
        continues at once."""
        known = self._due.get(name)
        if known is not None and known.last_ms == last_ms:
            return
        wait_s = due_in_s(last_ms, interval_s=interval_s, now_ms=now_ms)
        is_resumed = known is None and is_unfinished and interval_s > 0
        if is_resumed or (known is not None and is_requested(known.last_ms, last_ms)):
            wait_s = -inf
        self._due[name] = Due(last_ms=last_ms, due_s=None if wait_s is None else now_s + wait_s)

    def forget(self, name: str) -> None:
        """Forget a check that was run: the time that is written then is no request, even if it is
        earlier."""
        self._due.pop(name, None)

    def forget_intervals(self) -> None:
        """Forget all checks, because intervals changed; but keep those that were requested or are
        resumed, which are due at once."""
        self._due = {name: due for name, due in self._due.items() if due.due_s == -inf}

    def next(self) -> tuple[str, float] | None:
        """Return the check that is due first, and when. Of equals, the first one set. None if none
        is ever due."""
        dues = [(name, due.due_s) for name, due in self._due.items() if due.due_s is not None]
        return min(dues, key=lambda each: each[1], default=None)


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
_ALL = (RUNNING, PAUSED, LEFT, REMAINING, COUNTED, FINISHED, INTERVAL)


def show_running(check: str, run: CheckRun, *, checked: int = 0) -> None:
    """Set the metrics of a run. ``checked``: ledgers checked since the last call."""
    LEDGERS.labels(check).inc(checked)
    RUNNING.labels(check).set(1)
    PAUSED.labels(check).set(bool(run.pause))
    LEFT.labels(check).set(run.ledgers_left)
    REMAINING.labels(check).set(run.remaining_s or 0)


def show_finished(check: str, run: CheckRun) -> None:
    """Set the metrics of a finished run, perhaps of an earlier leader."""
    assert run.finished_ms is not None, run
    for gauge in (RUNNING, PAUSED, LEFT, REMAINING):
        gauge.labels(check).set(0)
    FINISHED.labels(check).set(run.finished_ms / 1000)
    for kind, count in run.counts.items():
        COUNTED.labels(check, kind).set(count)


def clear() -> None:
    """Remove the metrics, because this node does not lead any more."""
    for gauge in _ALL:
        gauge.clear()


log = structlog.get_logger()

WRITE_INTERVAL_S = 5.0
"""Minimum interval between two writes of progress. A new leader repeats what was done since the
last."""
LOG_INTERVAL_S = 60.0


class Progress:
    """The progress of one run. ``record`` is written regularly, and whenever a pause begins or
    ends."""

    def __init__(
        self, check: str, record: CheckRecord, *, records: CheckRecords, clock: Clock
    ) -> None:
        assert record.running is not None, record
        self._check = check
        self._records = records
        self._clock = clock
        self.record = record
        self._written_s = -inf
        self._logged_s = clock.now_s()

    @property
    def run(self) -> CheckRun:
        assert self.record.running is not None
        return self.record.running

    async def advance(
        self,
        part: Sequence[int],
        counts: collections.Counter[str],
        *,
        ledgers_left: int,
        took_s: float,
    ) -> None:
        """Count a part that was checked. Raises SessionLostError or LeadershipLostError."""
        run = self.run
        self._change(
            replace(
                run,
                cursor=part[-1] + 1,
                ledger_count=run.ledger_count + len(part),
                ledgers_left=ledgers_left,
                active_ms=run.active_ms + int(took_s * 1000),
                counts=dict(collections.Counter(run.counts) + counts),
            )
        )
        show_running(self._check, self.run, checked=len(part))
        now_s = self._clock.now_s()
        if now_s - self._written_s >= WRITE_INTERVAL_S:
            await self._write()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            self._log("check.progressed")

    async def set_pause(self, pause: str) -> None:
        """Set the reason of the pause; empty: the run continues. Raises as ``advance`` does."""
        if pause == self.run.pause:
            return
        self._change(replace(self.run, pause=pause))
        show_running(self._check, self.run)
        log.info("check.paused" if pause else "check.resumed", check=self._check, why=pause)
        await self._write()

    def _change(self, run: CheckRun) -> None:
        self.record = replace(self.record, running=run)

    async def _write(self) -> None:
        self._written_s = self._clock.now_s()
        try:
            await self._records.write(self._check, self.record)
        except UnavailableError as error:  # not essential: the next write contains everything
            log.warning("check.progress_write_failed", check=self._check, error=str(error))

    def _log(self, event: str) -> None:
        run = self.run
        log.info(
            event,
            check=self._check,
            ledger_count=run.ledger_count,
            ledgers_left=run.ledgers_left,
            ledgers_per_s=round(run.ledgers_per_s or 0.0, 1),
            remaining_s=round(run.remaining_s or 0.0),
            counts=dict(run.counts),
        )


T = TypeVar("T")


RETRY_S = 5.0
"""Wait after ZooKeeper did not answer."""
DENIED_RETRY_S = 600.0
"""Wait after ACLs denied access. No watch reports that an ACL has changed."""
POLL_S = 2.0
"""Interval between two looks at conditions that no watch reports."""
IDS_AT_ONCE = 10_000
"""Ledger ids taken from the ledger map at a time."""


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


class CheckRunner:
    """Runs the checks of a leader. ``run`` ends by cancellation or with the session."""

    def __init__(
        self,
        checks: Sequence[Check],
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        ledger_map: LedgerMap,
        is_ledger_map_ready: Callable[[], bool],
        views: ViewSource,
        records: CheckRecords,
        is_audit_pending: Callable[[], bool],
        settings: ChecksSettings,
        clock: Clock,
        history: History = NO_HISTORY,
    ) -> None:
        """``checks``: if several are due at the same time, the first runs first.

        ``is_ledger_map_ready``: returns True if every ledger is known. ``is_audit_pending``:
        returns True if the recovery delay of an absent bookie is not over.
        """
        self._checks = {check.kind.name: check for check in checks}
        self._store = store
        self._paths = paths
        self._ledger_map = ledger_map
        self._is_ledger_map_ready = is_ledger_map_ready
        self._views = views
        self._records = records
        self._is_audit_pending = is_audit_pending
        self._settings = settings
        self._clock = clock
        self._history = history
        self._timetable = Timetable()
        self._shown: set[str] = set()
        """Checks whose last run is set in the metrics."""
        self._denied: set[str] = set()
        """Checks whose znodes ACLs denied access to. They do not run."""
        self._wake = asyncio.Event()

    def apply(self, settings: ChecksSettings) -> None:
        """Use these intervals from now on."""
        if settings != self._settings:
            self._settings = settings
            self._timetable.forget_intervals()
            self._wake.set()

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError."""
        watched = [self._time_path(check) for check in self._checks.values()]
        try:
            async with asyncio.TaskGroup() as tasks:
                for path in (*watched, self._paths.disable):
                    tasks.create_task(wake_on(self._store.watch(path), self._wake))
                tasks.create_task(wake_on(self._views.changes(), self._wake))
                while True:
                    await wait_woken(self._wake, timeout_s=await self._try_run_once())
        finally:
            clear()

    async def _try_run_once(self) -> float | None:
        try:
            return await self.run_once()
        except UnavailableError as error:
            log.warning("check.failed", error=str(error), retry_s=RETRY_S)
            return RETRY_S
        except UnauthorizedError as error:
            log.warning("check.failed", error=str(error), retry_s=DENIED_RETRY_S)
            return DENIED_RETRY_S

    async def run_once(self) -> float | None:
        """Run the check that is due. Return the seconds until the next call; None: when something
        changes."""
        self._wake.clear()
        await self._read_times()
        found = self._timetable.next()
        if found is None:
            return DENIED_RETRY_S if self._denied else None
        name, due_s = found
        wait_s = due_s - self._clock.now_s()
        if wait_s > 0:
            return min(wait_s, DENIED_RETRY_S) if self._denied else wait_s
        if not self._is_ledger_map_ready():
            return POLL_S
        await self._run_check(self._checks[name])
        return 0.0

    # --- Times ------------------------------------------------------------------------------------

    async def _read_times(self) -> None:
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        for name, check in self._checks.items():
            try:
                last_ms = await self._records.last_run_ms(name, check.kind.audit)
                record = await self._records.read(name)
            except UnauthorizedError as error:
                self._put_off(name, error)
                continue
            self._denied.discard(name)
            interval_s = check.kind.interval_of(self._settings)
            INTERVAL.labels(name).set(interval_s)
            self._timetable.update(
                name,
                last_ms,
                interval_s=interval_s,
                now_s=now_s,
                now_ms=now_ms,
                is_unfinished=record.unfinished(last_ms) is not None,
            )
            if record.last is not None and name not in self._shown:
                show_finished(name, record.last)
            self._shown.add(name)

    def _put_off(self, name: str, error: UnauthorizedError) -> None:
        """Do not run the check until its znodes can be read."""
        self._timetable.forget(name)
        if name not in self._denied:  # once, not at each attempt
            log.warning("check.access_denied", check=name, error=str(error), retry_s=DENIED_RETRY_S)
        self._denied.add(name)

    def _time_path(self, check: Check) -> str:
        """Return the znode with the time of the last run. Operators set it back to request a
        check."""
        if check.kind.audit is None:
            return self._paths.check(check.kind.name)
        return self._paths.audit_time(check.kind.audit)

    # --- One run ----------------------------------------------------------------------------------

    async def _run_check(self, check: Check) -> None:
        """Run the check to its end, including all pauses."""
        name, audit = check.kind.name, check.kind.audit
        record = await self._records.read(name)
        run = record.unfinished(await self._records.last_run_ms(name, audit))
        if run is None:
            run = CheckRun(started_ms=self._clock.wall_ms(), ledgers_left=len(self._ledger_map))
        record = replace(record, running=run)
        progress = Progress(name, record, records=self._records, clock=self._clock)
        log.info("check.began", check=name, cursor=run.cursor, ledger_count=len(self._ledger_map))
        await check.begin(run)
        for part in self._parts(run.cursor, check.part_size):
            await self._check_part(check, part, progress)
        await check.finish(progress.run)
        await self._finish(check, progress)

    def _parts(self, cursor: int, part_size: int) -> Iterator[list[int]]:
        """Yield the ledgers from ``cursor`` on, one part at a time, as the ledger map is then."""
        while ledger_ids := self._ledger_map.ledger_ids(cursor, count_max=IDS_AT_ONCE):
            for start in range(0, len(ledger_ids), part_size):
                yield ledger_ids[start : start + part_size]
            cursor = ledger_ids[-1] + 1

    async def _check_part(self, check: Check, part: Sequence[int], progress: Progress) -> None:
        """Check one part. After an interruption by ZooKeeper or a pause, continue where it
        stopped."""
        part_run, took_s = PartRun(check, part), 0.0
        while not part_run.is_finished:
            await self._wait_allowed(progress)
            began_s = self._clock.now_s()
            await self._retried(lambda: self._run_unless_paused(part_run))
            took_s += self._clock.now_s() - began_s
        left = max(0, len(self._ledger_map) - progress.run.ledger_count - len(part))
        await progress.advance(part, part_run.counts, ledgers_left=left, took_s=took_s)

    async def _run_unless_paused(self, part_run: PartRun) -> None:
        """Run until the part is finished or a pause begins."""
        async with task_scope() as scope:
            running = scope.start(part_run.run())
            pause = scope.start(self._wait_pause())
            await asyncio.wait((running, pause), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running

    async def _finish(self, check: Check, progress: Progress) -> None:
        name, audit = check.kind.name, check.kind.audit
        record = progress.record.finished(self._clock.wall_ms())
        await self._retried(lambda: self._records.write_finished(name, record, audit))
        self._timetable.forget(name)
        run = record.last
        assert run is not None
        show_finished(name, run)
        RUN_S.labels(name).observe(run.active_ms / 1000)
        log.info(
            "check.finished",
            check=name,
            ledger_count=run.ledger_count,
            active_s=run.active_ms // 1000,
            counts=dict(run.counts),
        )
        self._history.record(
            Event(
                kind=Kind.CHECK_FINISHED,
                cause=name,
                ledger_count=run.ledger_count,
                counts=dict(run.counts),
            )
        )

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``work`` until ZooKeeper answers. Raises SessionLostError, and all errors other
        than UnavailableError."""
        return await until_answered(
            work,
            event="check.delayed",
            clock=self._clock,
            retry_min_s=RETRY_S,
            retry_max_s=RETRY_S,
        )

    # --- Pauses -----------------------------------------------------------------------------------

    async def _wait_allowed(self, progress: Progress) -> None:
        while pause := await self._retried(self._pause):
            await progress.set_pause(pause)
            await wait_woken(self._wake, timeout_s=POLL_S)
        await progress.set_pause("")

    async def _wait_pause(self) -> None:
        while not await self._pause():
            await wait_woken(self._wake, timeout_s=POLL_S)

    async def _pause(self) -> str:
        self._wake.clear()  # what happens from here on sets it again
        return pause_of(
            self._views.current.orders,
            is_disabled=await self._store.exists(self._paths.disable) is not None,
            is_audit_pending=self._is_audit_pending(),
        )
