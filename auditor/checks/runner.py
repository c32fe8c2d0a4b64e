"""Runs the periodic checks: those that are due, one at a time, each to its end.

A run goes through all ledgers in the order of their ids, a part at a time. After a part its cursor
and its counts are kept, so that another leader goes on from there. It waits while it must not go on
(``pause_of``). The time of the last run is written when every ledger was looked at, and not before:
Java's auditor writes it also when it was disabled in between, and never after a ledger that it
could not open.

When a check is due: from the time of its last run, which a znode keeps, for Java's auditor as
well.

No clock, no store: values in, values out. Times that end in ``_ms`` are wall-clock milliseconds, as
they stand in the znodes, which outlive leaders; those in ``_s`` are elapsed time. Source:
BookKeeper's Auditor, scheduleCheckAllLedgersTask and its siblings.

The metrics of the periodic checks: of the leader alone, nothing on any other node.

One run under way: how far it is, told in its record, in the metrics and in the log.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

import structlog
from prometheus_client import Counter, Gauge

from auditor.checks.base import Check, Looks
from auditor.checks.records import CheckRecord, CheckRecords, CheckRun
from auditor.ledger_map import LedgerMap
from auditor.settings import ChecksSettings
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope, until_answered, wait_woken, wake_on
from replication.cluster import ViewSource
from replication.orders import Orders
from replication.znodes import ClusterPaths

FORCED_MS = 0
"""Written as the time of the last run: somebody wants the check now. To Java it is a run long
ago."""


def due_in_s(last_ms: int | None, *, interval_s: float, now_ms: int) -> float | None:
    """Seconds until a check is due; negative: for so long it has been. None: never.

    ``last_ms``: None where it never ran. ``interval_s`` of 0: only when it is asked for. A last run
    in the future (the clock was set back) counts as one of this moment.
    """
    if last_ms == FORCED_MS:
        return -inf
    if interval_s == 0:
        return None
    if last_ms is None:
        return -inf
    age_s = max(0, now_ms - last_ms) / 1000
    return interval_s - age_s


def is_taken_back(before_ms: int | None, last_ms: int | None) -> bool:
    """Whether the time of the last run went backwards: somebody wants the check now.

    As ``bookkeeper shell forceauditchecks`` does, by 21 days; Java's auditor itself looks at these
    times when it starts, and never again.
    """
    return before_ms is not None and (last_ms is None or last_ms < before_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """``due_s``: elapsed time, perhaps of the past; None: never. ``last_ms``: what it follows
    from."""

    last_ms: int | None
    due_s: float | None


class Timetable:
    """What one leader knows of when its checks are due.

    The wall clock is looked at once for each run that became known: from then on elapsed time
    decides, so that a clock which is set back later puts nothing off.
    """

    def __init__(self) -> None:
        self._due: dict[str, Due] = {}

    def note(
        self,
        name: str,
        last_ms: int | None,
        *,
        interval_s: float,
        now_s: float,
        now_ms: int,
        is_unfinished: bool = False,
    ) -> None:
        """What the znode says now. ``is_unfinished``: an earlier leader left a run that goes on at
        once."""
        known = self._due.get(name)
        if known is not None and known.last_ms == last_ms:
            return
        wait_s = due_in_s(last_ms, interval_s=interval_s, now_ms=now_ms)
        is_resumed = known is None and is_unfinished and interval_s > 0
        if is_resumed or (known is not None and is_taken_back(known.last_ms, last_ms)):
            wait_s = -inf
        self._due[name] = Due(last_ms=last_ms, due_s=None if wait_s is None else now_s + wait_s)

    def forget(self, name: str) -> None:
        """It was run: the time that is written then is no wish, even if it is an earlier one."""
        self._due.pop(name, None)

    def next(self) -> tuple[str, float] | None:
        """The check that is due first, and when; of equals the one noted first. None: none ever
        is."""
        dues = [(name, due.due_s) for name, due in self._due.items() if due.due_s is not None]
        return min(dues, key=lambda each: each[1], default=None)


LEDGERS = Counter("bookmender_check_ledgers_total", "Ledgers a check has looked at.", ["check"])
RUNNING = Gauge("bookmender_check_running", "1 while a run of the check is not over.", ["check"])
PAUSED = Gauge("bookmender_check_paused", "1 while a run of the check must not go on.", ["check"])
LEFT = Gauge(
    "bookmender_check_ledgers_left", "Ledgers that the run has not looked at yet.", ["check"]
)
REMAINING = Gauge(
    "bookmender_check_remaining_seconds",
    "Until the run is over, by its speed so far; pauses come on top.",
    ["check"],
)
COUNTED = Gauge(
    "bookmender_check_counted",
    "What came of the last completed run that this leader knows of, by kind.",
    ["check", "kind"],
)
FINISHED = Gauge(
    "bookmender_check_finished_timestamp_seconds",
    "When the last completed run that this leader knows of ended.",
    ["check"],
)
_ALL = (RUNNING, PAUSED, LEFT, REMAINING, COUNTED, FINISHED)


def show_running(check: str, run: CheckRun, *, looked_at: int = 0) -> None:
    """``looked_at``: ledgers since it was shown last."""
    LEDGERS.labels(check).inc(looked_at)
    RUNNING.labels(check).set(1)
    PAUSED.labels(check).set(bool(run.pause))
    LEFT.labels(check).set(run.ledgers_left)
    REMAINING.labels(check).set(run.remaining_s or 0)


def show_finished(check: str, run: CheckRun) -> None:
    """Also of a run that an earlier leader completed."""
    assert run.finished_ms is not None, run
    for gauge in (RUNNING, PAUSED, LEFT, REMAINING):
        gauge.labels(check).set(0)
    FINISHED.labels(check).set(run.finished_ms / 1000)
    for kind, count in run.counts.items():
        COUNTED.labels(check, kind).set(count)


def clear() -> None:
    """This node leads no more."""
    for gauge in _ALL:
        gauge.clear()


log = structlog.get_logger()

WRITE_INTERVAL_S = 5.0
"""Between two writes of how far a run is. A new leader goes over what was done since once more."""
LOG_INTERVAL_S = 60.0


class Progress:
    """Of one run. ``record`` is what is told; it is written now and then, and whenever a pause
    changes."""

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
        """These ledgers were looked at. Raises SessionLostError, LeadershipLostError."""
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
        show_running(self._check, self.run, looked_at=len(part))
        now_s = self._clock.now_s()
        if now_s - self._written_s >= WRITE_INTERVAL_S:
            await self._write()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            self._log("check.progressed")

    async def note_pause(self, pause: str) -> None:
        """Empty: it goes on. Raises as ``advance`` does."""
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
        except UnavailableError as error:  # it is a help, no more: the next write tells all of it
            log.warning("check.progress_unwritten", check=self._check, error=str(error))

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
"""After ZooKeeper was not to be had."""
SHUT_RETRY_S = 600.0
"""Between two tries to read what ACLs shut away: nothing tells that one was opened."""
POLL_S = 2.0
"""Between two looks at whether a run may go on, where nothing tells."""
IDS_AT_ONCE = 10_000
"""Taken from the index at a time."""


def pause_of(orders: Orders, *, is_disabled: bool, is_audit_pending: bool) -> str:
    """Why no check may go on now; empty: they may.

    Checks mark. So they wait where nothing may be marked, and, as Java's do, while a bookie that is
    away is not lost yet: its ledgers would be marked before their time.
    """
    if orders.paused_checks is not None:
        return "by order"
    if is_disabled:
        return "auto-recovery is disabled"
    if orders.is_held:
        return "a hold stands"
    return "a bookie is away and not lost yet" if is_audit_pending else ""


class CheckRunner:
    """The leader's. ``run`` ends by cancellation or with the session."""

    def __init__(
        self,
        checks: Sequence[Check],
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        ledger_map: LedgerMap,
        is_index_ready: Callable[[], bool],
        views: ViewSource,
        records: CheckRecords,
        is_audit_pending: Callable[[], bool],
        settings: ChecksSettings,
        clock: Clock,
    ) -> None:
        """``checks``: of those that are due alike, the first runs first.

        ``is_index_ready``: whether every ledger is known. ``is_audit_pending``: whether a bookie is
        away whose recovery delay is not over.
        """
        self._checks = {check.kind.name: check for check in checks}
        self._store = store
        self._paths = paths
        self._ledger_map = ledger_map
        self._is_index_ready = is_index_ready
        self._views = views
        self._records = records
        self._is_audit_pending = is_audit_pending
        self._settings = settings
        self._clock = clock
        self._timetable = Timetable()
        self._shown: set[str] = set()
        """Checks whose last run the metrics tell of, if there was one."""
        self._shut: set[str] = set()
        """Checks of which ACLs shut away when they last ran, or how far they are: they do not
        run."""
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError when that is over."""
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
            log.warning("check.failed", error=str(error), retry_s=SHUT_RETRY_S)
            return SHUT_RETRY_S

    async def run_once(self) -> float | None:
        """Run the check that is due; after how many seconds to look again. None: not before we are
        told."""
        self._wake.clear()
        await self._read_times()
        found = self._timetable.next()
        if found is None:
            return SHUT_RETRY_S if self._shut else None
        name, due_s = found
        wait_s = due_s - self._clock.now_s()
        if wait_s > 0:
            return min(wait_s, SHUT_RETRY_S) if self._shut else wait_s
        if not self._is_index_ready():
            return POLL_S
        await self._run_check(self._checks[name])
        return 0.0

    # --- Times -------------------------------------------------------------------------------------

    async def _read_times(self) -> None:
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        for name, check in self._checks.items():
            try:
                last_ms = await self._records.last_run_ms(name, check.kind.audit)
                record = await self._records.read(name)
            except UnauthorizedError as error:
                self._put_off(name, error)
                continue
            self._shut.discard(name)
            self._timetable.note(
                name,
                last_ms,
                interval_s=check.kind.interval_of(self._settings),
                now_s=now_s,
                now_ms=now_ms,
                is_unfinished=record.unfinished(last_ms) is not None,
            )
            if record.last is not None and name not in self._shown:
                show_finished(name, record.last)
            self._shown.add(name)

    def _put_off(self, name: str, error: UnauthorizedError) -> None:
        """Until it can be read: nobody knows when the check is due."""
        self._timetable.forget(name)
        if name not in self._shut:  # once, not at each try
            log.warning("check.access_denied", check=name, error=str(error), retry_s=SHUT_RETRY_S)
        self._shut.add(name)

    def _time_path(self, check: Check) -> str:
        """Where it stands when the check last ran, for everybody to take back."""
        if check.kind.audit is None:
            return self._paths.check(check.kind.name)
        return self._paths.audit_time(check.kind.audit)

    # --- One run -----------------------------------------------------------------------------------

    async def _run_check(self, check: Check) -> None:
        """To its end, however long it takes; pauses are part of it."""
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
            await self._look_at(check, part, progress)
        await check.finish(progress.run)
        await self._finish(check, progress)

    def _parts(self, cursor: int, part_size: int) -> Iterator[list[int]]:
        """Of the index as it is when each is asked for."""
        while ledger_ids := self._ledger_map.ledger_ids(cursor, count_max=IDS_AT_ONCE):
            for start in range(0, len(ledger_ids), part_size):
                yield ledger_ids[start : start + part_size]
            cursor = ledger_ids[-1] + 1

    async def _look_at(self, check: Check, part: Sequence[int], progress: Progress) -> None:
        """It goes on where it was cut short, be it by ZooKeeper or by what makes a check wait."""
        looks, took_s = Looks(check, part), 0.0
        while not looks.are_through:
            await self._wait_allowed(progress)
            began_s = self._clock.now_s()
            await self._retried(lambda: self._unless_paused(looks))
            took_s += self._clock.now_s() - began_s
        left = max(0, len(self._ledger_map) - progress.run.ledger_count - len(part))
        await progress.advance(part, looks.counts, ledgers_left=left, took_s=took_s)

    async def _unless_paused(self, looks: Looks) -> None:
        """Until they are through, or a pause begins."""
        async with task_scope() as scope:
            making = scope.start(looks.make())
            pause = scope.start(self._wait_pause())
            await asyncio.wait((making, pause), return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                await making

    async def _finish(self, check: Check, progress: Progress) -> None:
        name, audit = check.kind.name, check.kind.audit
        record = progress.record.finished(self._clock.wall_ms())
        await self._retried(lambda: self._records.write_finished(name, record, audit))
        self._timetable.forget(name)
        run = record.last
        assert run is not None
        show_finished(name, run)
        log.info(
            "check.finished",
            check=name,
            ledger_count=run.ledger_count,
            active_s=run.active_ms // 1000,
            counts=dict(run.counts),
        )

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Until ZooKeeper is to be had. Raises SessionLostError, and whatever is not
        Unavailable."""
        return await until_answered(
            work,
            event="check.delayed",
            clock=self._clock,
            retry_min_s=RETRY_S,
            retry_max_s=RETRY_S,
        )

    # --- Pauses ------------------------------------------------------------------------------------

    async def _wait_allowed(self, progress: Progress) -> None:
        while pause := await self._retried(self._pause):
            await progress.note_pause(pause)
            await wait_woken(self._wake, timeout_s=POLL_S)
        await progress.note_pause("")

    async def _wait_pause(self) -> None:
        while not await self._pause():
            await wait_woken(self._wake, timeout_s=POLL_S)

    async def _pause(self) -> str:
        self._wake.clear()  # what happens from here on is looked at the next time
        return pause_of(
            self._views.current.orders,
            is_disabled=await self._store.exists(self._paths.disable) is not None,
            is_audit_pending=self._is_audit_pending(),
        )
