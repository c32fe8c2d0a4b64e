"""The Auditor: while it leads, it sees bookies go, waits out the recovery delay, and marks.

One loop: read who is there, decide who is lost, and when somebody is who was not handled yet (or a
check is due, or asked for), scan the metadata and mark. Whatever fails is tried again; whatever was
handled is remembered only while the leadership lasts, so that a new leader misses nothing.
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter

from auditor.absence import lost_bookies, next_loss_s, still_absent
from auditor.endangered import most_endangered_first, most_urgent
from auditor.marking import Marker
from auditor.records import AuditRecord, Records
from auditor.scan import Rebirth, scan_ledgers
from auditor.settings import AuditorSettings
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    SessionLostError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore
from replication.cluster.cluster_view import ClusterView, ViewSource
from replication.queue import payloads

log = structlog.get_logger()
MARKS = Counter("bookmender_marks_total", "Marks of under-replicated ledgers made or extended.")

RETRY_S = 5.0
"""After an audit that failed."""


@dataclass(slots=True)
class _Absences:
    """What this leader knows of bookies that are away. Times are monotonic seconds."""

    since_s: dict[BookieId, float] = field(default_factory=dict)
    overruled_s: float = -math.inf
    """When an operator last asked not to wait out the recovery delay."""
    named: set[BookieId] = field(default_factory=set)
    """Bookies that some ledger named when last scanned, or that were there since, cookie or not."""
    handled: frozenset[BookieId] = frozenset()
    """Lost bookies whose ledgers have been marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delay:
    """The recovery delay, and when it was written (0: it is not stored)."""

    delay_s: int
    mzxid: int


class Auditor:
    """The leader's work. ``run`` ends only by cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        ur: str,
        manager: LedgerManager,
        views: ViewSource,
        marker: Marker,
        records: Records,
        settings: AuditorSettings,
        clock: Clock,
    ) -> None:
        self._store = store
        self._ur = ur
        self._manager = manager
        self._views = views
        self._marker = marker
        self._records = records
        self._settings = settings
        self._clock = clock
        self._absences = _Absences()
        self._identities: dict[BookieId, int] = {}
        """Per bookie, the cookie (czxid) whose ledgers have been looked at."""
        self._check_due_s = 0.0
        self._is_overruled = False
        """An operator asks for an audit of every bookie that is away now."""
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Audit until cancelled. Raises SessionLostError or LeadershipLostError when that is over."""
        await self._prepare()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wake_on_bookies())
            tasks.create_task(self._wake_on_delay())
            tasks.create_task(self._wake_on_switch())
            while True:
                wait_s = await self._try_run_once()
                await self._wait(wait_s)

    async def _try_run_once(self) -> float:
        try:
            return await self.run_once()
        except SessionLostError:
            raise
        except UnavailableError as error:
            log.warning("audit.failed", error=str(error), retry_s=RETRY_S)
            return RETRY_S

    async def run_once(self) -> float:
        """Audit if there is a reason to; returns after how many seconds to look again at the latest."""
        self._wake.clear()
        view = await self._views.refresh() if self._is_overruled else self._views.current
        delay_s = (await self._recovery_delay()).delay_s
        now_s = self._clock.now_s()
        absences = self._absences
        if self._is_overruled:
            self._is_overruled = False
            absences.overruled_s = now_s
        absences.named |= view.available
        absences.since_s = still_absent(
            absences.since_s,
            known=view.cookies.keys() | absences.named,
            available=view.available,
            excused=view.orders.maintenance.keys(),
            now_s=now_s,
        )
        lost = lost_bookies(
            absences.since_s, now_s=now_s, delay_s=delay_s, overruled_s=absences.overruled_s
        )
        absences.handled &= absences.since_s.keys()
        reborn = self._reborn(view)
        if lost - absences.handled or reborn or now_s >= self._check_due_s:
            if await self._is_disabled():
                return self._settings.bookie_check_interval_s  # or until the switch wakes us
            await self._audit(lost, reborn)
            if absences.named - absences.since_s.keys():
                return 0.0  # the scan found absent bookies that nobody had told us of
        loss_s = next_loss_s(absences.since_s, now_s=self._clock.now_s(), delay_s=delay_s)
        check_s = self._check_due_s - self._clock.now_s()
        return max(0.0, check_s if loss_s is None else min(loss_s, check_s))

    def _reborn(self, view: ClusterView) -> dict[BookieId, Rebirth]:
        """Bookies that were set up since we last looked.

        One that comes back under its old id may have lost everything (its disk was replaced): its
        return withdraws no mark, and where there is none, calls for one (rule S6).
        """
        return {
            bookie: Rebirth(czxid=stat.czxid, was_known=bookie in self._identities)
            for bookie, stat in view.cookies.items()
            if self._identities.get(bookie) != stat.czxid
        }

    async def _audit(self, lost: frozenset[BookieId], reborn: Mapping[BookieId, Rebirth]) -> None:
        """Scan and mark. Raises UnavailableError when it could not be completed: it is still due."""
        due_s = self._check_due_s
        # Before the audit: one that is asked for while this one is under way comes after it.
        self._check_due_s = self._clock.now_s() + self._settings.bookie_check_interval_s
        try:
            await self._scan_and_mark(lost, reborn)
        except UnavailableError:
            self._check_due_s = min(due_s, self._check_due_s)
            raise
        self._absences.handled |= lost
        if reborn:
            self._identities |= {bookie: birth.czxid for bookie, birth in reborn.items()}
            await self._records.write_identities(self._identities)

    async def _scan_and_mark(
        self, lost: frozenset[BookieId], reborn: Mapping[BookieId, Rebirth]
    ) -> None:
        started_s = self._clock.now_s()
        if news := lost - self._absences.handled:
            log.info("bookies.lost", bookies=sorted(news))
        scan = await scan_ledgers(
            self._manager, lost=lost, available=self._views.current.available, reborn=reborn
        )
        ordered = most_endangered_first(scan.endangered, self._absences.since_s)
        marks = await self._marker.mark_all(ordered)
        MARKS.inc(marks)
        await self._records.write_urgent(most_urgent(ordered), now_ms=self._clock.wall_ms())
        self._absences.named = scan.absent_members | self._views.current.available
        await self._records.write_audit(
            AuditRecord(
                finished_ms=self._clock.wall_ms(),
                ledger_count=scan.ledger_count,
                mark_count=marks,
                unreadable_count=len(scan.unreadable),
                unreadable=tuple(scan.unreadable),
            )
        )
        log.info(
            "audit.finished",
            ledger_count=scan.ledger_count,
            unreadable_count=len(scan.unreadable),
            endangered_count=len(scan.endangered),
            mark_count=marks,
            duration_s=round(self._clock.now_s() - started_s, 3),
        )

    async def _prepare(self) -> None:
        """The znode of the recovery delay holds for the whole cluster; the first leader makes it."""
        self._identities = await self._records.identities()
        delay = payloads.recovery_delay_to_bytes(self._settings.lost_bookie_recovery_delay_s)
        with contextlib.suppress(NodeExistsError):
            await self._store.create(
                payloads.recovery_delay_path(self._ur), delay, with_parents=True
            )

    async def _recovery_delay(self) -> "_Delay":
        """As it stands. A missing or unreadable value counts as the setting's."""
        default_s, mzxid = self._settings.lost_bookie_recovery_delay_s, 0
        try:
            data, stat = await self._store.get(payloads.recovery_delay_path(self._ur))
            mzxid = stat.mzxid
            return _Delay(delay_s=payloads.parse_recovery_delay(data), mzxid=mzxid)
        except NoNodeError:
            pass
        except CorruptionError as error:
            log.error("recovery_delay.unreadable", error=str(error))
        return _Delay(delay_s=default_s, mzxid=mzxid)

    async def _is_disabled(self) -> bool:
        return await self._store.exists(payloads.disable_path(self._ur)) is not None

    async def _wait(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _wake_on_bookies(self) -> None:
        seen = self._views.change_count
        while True:
            await self._views.wait_change(seen)
            seen = self._views.change_count
            self._wake.set()

    async def _wake_on_delay(self) -> None:
        """A new delay counts at once, and each write asks for an audit.

        Written unchanged it says not to wait any longer for those that are away, as with Java
        (Auditor's LostBookieRecoveryDelayChangedCb): so an operator triggers an audit.
        """
        known: _Delay | None = None
        async with aclosing(self._store.watch(payloads.recovery_delay_path(self._ur))) as events:
            async for _ in events:
                current = await self._recovery_delay()
                if known is not None and current.mzxid != known.mzxid:
                    self._check_due_s = self._clock.now_s()
                    self._is_overruled = self._is_overruled or current.delay_s == known.delay_s
                known = current
                self._wake.set()

    async def _wake_on_switch(self) -> None:
        """What happened while auto-recovery was disabled is handled when it is enabled again."""
        async with aclosing(self._store.watch(payloads.disable_path(self._ur))) as events:
            async for _ in events:
                self._wake.set()
