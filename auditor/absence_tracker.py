"""Tracks absent bookies during one leadership, and records them for the next leader.

``AbsenceTracker`` knows since when each bookie is absent, and ``LossHistory`` for which losses
ledgers were marked. ``absence`` and ``mark_reasons`` decide; this module keeps their input current
and writes it when it changes. Observe mode uses the same classes and writes nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import structlog

from auditor.absence import (
    NO_OUTAGE,
    Outage,
    Outages,
    StoredAbsences,
    delay_left_s,
    excused_until_s,
    lost_bookies,
    still_absent,
)
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.mark_reasons import (
    LossKind,
    LossRecord,
    LossRecords,
    loss_events,
    updated_losses,
)
from auditor.records import Records
from auditor.unavailable_ledgers import UnavailableLedgers
from auditor.underreplication import BookieLosses
from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import wait_woken
from replication.cluster import ClusterView
from replication.history import Event
from replication.records import read_stored
from replication.znodes import ClusterPaths

log = structlog.get_logger()

WRITE_S = 60.0
"""Interval of the writes that only confirm that bookies are still absent. The next leader continues
from the last one."""
COUNTS_WRITE_S = 5.0
"""Minimum interval between writes that only change the counts of ledgers."""
RETRY_S = 5.0
"""Wait after a failed write."""


class AbsenceTracker:
    """The absent bookies, as one leadership knows them. Call ``resume`` first. Times are monotonic
    seconds."""

    def __init__(
        self,
        store: MetadataStore,
        paths: ClusterPaths,
        clock: Clock,
        outages: Outages | None = None,
    ) -> None:
        """``outages``: of the connection through which the bookies are watched; None: outages are
        ignored."""
        self._store, self._paths = store, paths
        self._clock = clock
        self._outages = outages
        self.since_s: dict[BookieId, float] = {}
        """Since when each bookie is absent, except bookies in maintenance."""
        self._in_maintenance: frozenset[BookieId] = frozenset()
        """Bookies that are in maintenance and not registered. The number of ledgers that name them
        is recorded for people."""
        self._overruled_s = -math.inf
        self._written: frozenset[BookieId] = frozenset()
        """Bookies that the record names."""
        self._written_since: frozenset[BookieId] = frozenset()
        """Bookies in ``_written`` whose absence has a beginning in the record: not those in
        maintenance."""
        self._written_counts = _Counts()
        self._written_excused_s: Mapping[BookieId, float] = {}
        self._tried_s = -math.inf
        self._are_counts_complete = False
        self._write_due_s = math.inf
        self._was_updated = asyncio.Event()

    async def resume(self) -> None:
        """Continue from the record of the leader before."""
        record = await read_stored(self._store, self._paths.absences, StoredAbsences.parse)
        stored = record.value or StoredAbsences()
        now_s = self._clock.now_s()
        self.since_s = stored.resumed(now_s=now_s, wall_ms=self._clock.wall_ms())
        self._written = self._written_since = frozenset(stored.since_ms)
        if stored.since_ms or record.is_corrupt:
            self._write_due_s = now_s

    def update(
        self, view: ClusterView, *, named: Collection[BookieId], are_counts_complete: bool
    ) -> None:
        """Update the absences from ``view``. A bookie is known if it has a cookie or a ledger names
        it.

        ``named``: bookies that some ledger names. ``are_counts_complete``: True if every ledger is
        known, so that ledgers name no other bookie.
        """
        self._are_counts_complete = are_counts_complete
        known = view.cookies.keys() | named
        if not are_counts_complete:
            known |= self.since_s.keys()
        self.since_s = still_absent(
            self.since_s,
            known=known,
            available=view.available,
            excused=view.orders.maintenance.keys(),
            now_s=self._clock.now_s(),
        )
        self._in_maintenance = frozenset(view.orders.maintenance.keys() - view.available)
        self._was_updated.set()

    def named_since_s(self, updater: LedgerMapUpdater) -> Mapping[BookieId, float]:
        """Return the part of ``since_s`` that ledgers name; all of it until every ledger was read,
        or if ACLs deny access to some.

        A leftover cookie of a machine that was replaced long ago must not cause a safety hold.
        Monotonic seconds.
        """
        if not updater.completed_count or updater.refusal is not None or updater.hidden:
            return self.since_s
        named = updater.ledger_map.bookies
        return {bookie: since_s for bookie, since_s in self.since_s.items() if bookie in named}

    def overrule(self) -> None:
        """Count all bookies that are absent now as lost: an operator asked not to wait any
        longer."""
        self._overruled_s = self._clock.now_s()

    def lost_since_s(self, *, delay_s: float) -> dict[BookieId, float]:
        """Return the lost bookies, and since when each is absent."""
        lost = lost_bookies(
            self.since_s,
            now_s=self._clock.now_s(),
            delay_s=delay_s,
            overruled_s=self._overruled_s,
            outage=self._outage,
        )
        return {bookie: self.since_s[bookie] for bookie in lost}

    def delay_left_s(
        self, *, delay_s: float, looked_s: float | None = None
    ) -> dict[BookieId, float]:
        """Return, by absent bookie that is not lost yet, the seconds until it counts as lost.

        ``looked_s``: when the caller last asked for lost bookies; None: now. A bookie that was not
        lost then, but is lost by now, is included, with 0 seconds.
        """
        now_s = self._clock.now_s()
        looked_s = now_s if looked_s is None else looked_s
        left = delay_left_s(
            {b: since_s for b, since_s in self.since_s.items() if since_s > self._overruled_s},
            now_s=looked_s,
            delay_s=delay_s,
            outage=self._outage,
        )
        return {bookie: max(0.0, s - (now_s - looked_s)) for bookie, s in left.items()}

    @property
    def _outage(self) -> Outage:
        return NO_OUTAGE if self._outages is None else self._outages.last

    @property
    def all_absent(self) -> frozenset[BookieId]:
        """All bookies that are not registered, including those in maintenance."""
        return self._in_maintenance.union(self.since_s)

    def write_soon(self) -> None:
        """Write the record soon, because the counts have changed."""
        self._was_updated.set()

    async def keep_recorded(
        self,
        records: Records,
        ledger_count: Callable[[BookieId], int],
        unavailable: Callable[[Collection[BookieId]], UnavailableLedgers | None],
    ) -> None:
        """Write the record when it changes, and regularly while bookies are absent, until
        cancelled.

        Runs beside the audits, however long they take. ``ledger_count``: returns how many ledgers
        are known to name a bookie. ``unavailable``: returns the ledgers with entries whose every
        copy is on these bookies; None while they are being counted. Raises SessionLostError or
        LeadershipLostError.
        """
        while True:
            await self._wait_update()
            try:
                absent = self.all_absent
                ledger_counts = {bookie: ledger_count(bookie) for bookie in absent}
                await self._write_if_due(
                    records,
                    absent,
                    _Counts(ledger_counts, self._are_counts_complete, unavailable(absent)),
                )
            except UnavailableError as error:
                self._write_due_s = self._clock.now_s() + RETRY_S
                log.warning("absences.write_failed", error=str(error), retry_s=RETRY_S)

    async def _wait_update(self) -> None:
        await wait_woken(self._was_updated, timeout_s=self._write_due_s - self._clock.now_s())
        self._was_updated.clear()

    async def _write_if_due(
        self, records: Records, absent: frozenset[BookieId], counts: _Counts
    ) -> None:
        now_s, before = self._clock.now_s(), self._written_counts
        if absent and counts != before:
            pause_s = 0.0 if counts.completes(before) else COUNTS_WRITE_S
            self._write_due_s = min(self._write_due_s, self._tried_s + pause_s)
        excused_s = excused_until_s(
            self.since_s, overruled_s=self._overruled_s, outage=self._outage
        )
        # A bookie stays absent when its maintenance window ends, but its recovery delay begins.
        since = frozenset(self.since_s)
        written = (self._written, self._written_since, self._written_excused_s)
        has_changed = (absent, since, excused_s) != written
        if not has_changed and now_s < self._write_due_s:
            return
        self._tried_s = now_s
        await records.write_absences(
            StoredAbsences.of(
                self.since_s,
                now_s=now_s,
                wall_ms=self._clock.wall_ms(),
                ledger_counts=counts.ledger_counts,
                are_counts_complete=counts.are_counts_complete,
                unavailable=counts.unavailable,
                excused_until_s=excused_s,
            )
        )
        self._written, self._written_counts = absent, counts
        self._written_since, self._written_excused_s = since, excused_s
        self._write_due_s = now_s + WRITE_S if absent else math.inf


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of ledgers. Fields as in ``StoredAbsences``."""

    ledger_counts: Mapping[BookieId, int] = field(default_factory=dict)
    are_counts_complete: bool = False
    unavailable: UnavailableLedgers | None = None

    def completes(self, before: Self) -> bool:
        """True if these counts know what ``before`` left open. Then they are written at once."""
        is_known = self.unavailable is not None and before.unavailable is None
        return is_known or (self.are_counts_complete and not before.are_counts_complete)


class LossHistory:
    """The losses for which ledgers were marked, by bookie. Call ``resume`` first."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store, self._paths = store, paths
        self._clock = clock
        self._stored: Mapping[BookieId, LossRecord] = {}
        self._is_corrupt = False

    async def resume(self) -> None:
        """Read the stored losses."""
        record = await read_stored(self._store, self._paths.losses, LossRecords.parse)
        self._stored = record.value.bookies if record.value else {}
        self._is_corrupt = record.is_corrupt

    def lost_since_s(self) -> dict[BookieId, float]:
        """Return the lost bookies whose ledgers this leader or an earlier one marked, and since
        when each is absent. Monotonic seconds."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        return {
            bookie: now_s - max(0, now_ms - loss.since_ms) / 1000
            for bookie, loss in self._stored.items()
            if loss.kind is LossKind.LOST and loss.ended_ms is None
        }

    async def record(
        self, records: Records, losses: BookieLosses, *, registered: Collection[BookieId]
    ) -> Sequence[Event]:
        """Write the losses if they changed: the ledgers of a bookie begin to be marked, or a loss
        has ended. Return what is new."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        current = {
            bookie: LossRecord(kind=LossKind.REFORMATTED, since_ms=now_ms)
            for bookie, reformatted in losses.reformatted.items()
            if reformatted.was_known
        }
        for bookie, since_s in losses.lost_since_s.items():
            since_ms = now_ms - round((now_s - since_s) * 1000)
            current[bookie] = LossRecord(kind=LossKind.LOST, since_ms=max(0, since_ms))
        updated = updated_losses(self._stored, current, now_ms=now_ms)
        if updated != self._stored or self._is_corrupt:
            await records.write_losses(updated)
        events = loss_events(self._stored, updated, registered=registered)
        self._stored, self._is_corrupt = updated, False
        return events
