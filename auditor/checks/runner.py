"""Runs the periodic checks: those that are due, one at a time, each to its end.

A run goes through all ledgers in the order of their ids, a part at a time. After a part its cursor
and its counts are kept, so that another leader goes on from there. It waits while it must not go on
(``pause_of``). The time of the last run is written when every ledger was looked at, and not before:
Java's auditor writes it also when it was disabled in between, and never after a ledger that it
could not open.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import structlog

from auditor.checks import meters
from auditor.checks.check import Check
from auditor.checks.looks import Looks
from auditor.checks.progress import Progress
from auditor.checks.records import CheckRecords, CheckRun, check_path
from auditor.checks.schedule import Timetable
from auditor.index.ledger_index import LedgerIndex
from auditor.settings import ChecksSettings
from ledgers.answers import until_answered
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.operations.tasks import task_scope, wait_woken, wake_on
from ledgers.store import MetadataStore
from replication.cluster.cluster_view import ViewSource
from replication.cluster.orders import Orders
from replication.queue import payloads

T = TypeVar("T")

log = structlog.get_logger()

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
        ur: str,
        index: LedgerIndex,
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
        self._ur = ur
        self._index = index
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
                for path in (*watched, payloads.disable_path(self._ur)):
                    tasks.create_task(wake_on(self._store.watch(path), self._wake))
                tasks.create_task(wake_on(self._views.changes(), self._wake))
                while True:
                    await wait_woken(self._wake, timeout_s=await self._try_run_once())
        finally:
            meters.clear()

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
                meters.show_finished(name, record.last)
            self._shown.add(name)

    def _put_off(self, name: str, error: UnauthorizedError) -> None:
        """Until it can be read: nobody knows when the check is due."""
        self._timetable.forget(name)
        if name not in self._shut:  # once, not at each try
            log.warning("check.shut_away", check=name, error=str(error), retry_s=SHUT_RETRY_S)
        self._shut.add(name)

    def _time_path(self, check: Check) -> str:
        """Where it stands when the check last ran, for everybody to take back."""
        if check.kind.audit is None:
            return check_path(self._ur, check.kind.name)
        return payloads.audit_time_path(self._ur, check.kind.audit)

    # --- One run -----------------------------------------------------------------------------------

    async def _run_check(self, check: Check) -> None:
        """To its end, however long it takes; pauses are part of it."""
        name, audit = check.kind.name, check.kind.audit
        record = await self._records.read(name)
        run = record.unfinished(await self._records.last_run_ms(name, audit))
        if run is None:
            run = CheckRun(started_ms=self._clock.wall_ms(), ledgers_left=len(self._index))
        record = replace(record, running=run)
        progress = Progress(name, record, records=self._records, clock=self._clock)
        log.info("check.began", check=name, cursor=run.cursor, ledger_count=len(self._index))
        await check.begin(run)
        for part in self._parts(run.cursor, check.part_size):
            await self._look_at(check, part, progress)
        await check.finish(progress.run)
        await self._finish(check, progress)

    def _parts(self, cursor: int, part_size: int) -> Iterator[list[int]]:
        """Of the index as it is when each is asked for."""
        while ledger_ids := self._index.ledger_ids(cursor, count_max=IDS_AT_ONCE):
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
        left = max(0, len(self._index) - progress.run.ledger_count - len(part))
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
        meters.show_finished(name, run)
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
            is_disabled=await self._store.exists(payloads.disable_path(self._ur)) is not None,
            is_audit_pending=self._is_audit_pending(),
        )
