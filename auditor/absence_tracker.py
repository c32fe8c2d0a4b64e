"""Keeps what a leader knows of absent bookies, and records it for the next leader: since when each
is absent, and why ledgers were marked.

``absence`` and ``causes`` decide; this module keeps their input current and writes it when it
changes. Observe mode uses the same classes and writes nothing.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

import structlog

from auditor.absence import (
    NO_OUTAGE,
    Outage,
    Outages,
    StoredAbsences,
    UnavailableLedgers,
    excused_until_s,
    left_s,
    lost_bookies,
    still_absent,
)
from auditor.findings import Cause, Why, read_causes, updated_causes
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.records import Records, read_absences
from auditor.underreplication import Missing
from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import wait_woken
from replication.cluster import ClusterView
from replication.znodes import ClusterPaths

log = structlog.get_logger()

WRITE_S = 60.0
"""Interval of the writes that only confirm that bookies are still absent. The next leader continues
from the last one."""
COUNTS_WRITE_S = 5.0
"""Minimum interval between writes that only change the counts of ledgers."""
RETRY_S = 5.0
"""Wait after a failed write."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """``naming``: by absent bookie, the number of ledgers that name it. Other fields as in
    ``StoredAbsences``."""

    naming: Mapping[BookieId, int] = field(default_factory=dict)
    are_all_named: bool = False
    unavailable: UnavailableLedgers | None = None

    def tell_first(self, before: Self) -> bool:
        """True if these counts know what ``before`` left open: then they are written at once."""
        is_known = self.unavailable is not None and before.unavailable is None
        return is_known or (self.are_all_named and not before.are_all_named)


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
        """Since when each bookie is absent, except bookies under maintenance."""
        self._on_purpose: frozenset[BookieId] = frozenset()
        """Bookies absent under maintenance. The number of ledgers that name them is recorded for
        people."""
        self._overruled_s = -math.inf
        self._written: frozenset[BookieId] = frozenset()
        """Bookies that the record names."""
        self._written_counts = _Counts()
        self._written_excused_s: Mapping[BookieId, float] = {}
        self._tried_s = -math.inf
        self._are_all_named = False
        self._write_due_s = math.inf
        self._was_seen = asyncio.Event()

    async def resume(self) -> None:
        """Continue from the record of the leader before."""
        stored = await read_absences(self._store, self._paths)
        now_s = self._clock.now_s()
        self.since_s = stored.resumed(now_s=now_s, wall_ms=self._clock.wall_ms())
        self._written = frozenset(stored.since_ms)
        if stored.since_ms:
            self._write_due_s = now_s

    def see(self, view: ClusterView, *, named: Collection[BookieId], are_all_named: bool) -> None:
        """Update the absences from ``view``. A bookie is known if it has a cookie or a ledger names
        it.

        ``named``: bookies that some ledger names. ``are_all_named``: True if every ledger is known,
        so that ledgers name no other bookie.
        """
        self._are_all_named = are_all_named
        known = view.cookies.keys() | named
        if not are_all_named:
            known |= self.since_s.keys()
        self.since_s = still_absent(
            self.since_s,
            known=known,
            available=view.available,
            excused=view.orders.maintenance.keys(),
            now_s=self._clock.now_s(),
        )
        self._on_purpose = frozenset(view.orders.maintenance.keys() - view.available)
        self._was_seen.set()

    def named_since_s(self, updater: LedgerMapUpdater) -> Mapping[BookieId, float]:
        """Return the part of ``since_s`` that ledgers name; all of it until every ledger was read,
        or if ACLs deny access to some.

        A leftover cookie of a machine that was replaced long ago must not cause a safety hold.
        Monotonic seconds.
        """
        if not updater.completed_count or updater.refusal is not None:
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

    def left_s(self, *, delay_s: float) -> dict[BookieId, float]:
        """Return, by absent bookie that is not lost yet, the seconds until it counts as lost."""
        return left_s(
            {b: since_s for b, since_s in self.since_s.items() if since_s > self._overruled_s},
            now_s=self._clock.now_s(),
            delay_s=delay_s,
            outage=self._outage,
        )

    @property
    def _outage(self) -> Outage:
        return NO_OUTAGE if self._outages is None else self._outages.last

    @property
    def away(self) -> frozenset[BookieId]:
        """All absent bookies, including those under maintenance."""
        return self._on_purpose.union(self.since_s)

    def note_soon(self) -> None:
        """Write the record soon, because the counts have changed."""
        self._was_seen.set()

    async def keep_noted(
        self,
        records: Records,
        naming_count: Callable[[BookieId], int],
        unavailable: Callable[[Collection[BookieId]], UnavailableLedgers | None],
    ) -> None:
        """Write the record when it changes, and regularly while bookies are absent, until
        cancelled.

        Runs beside the audits, however long they take. ``naming_count``: returns how many ledgers
        are known to name a bookie. ``unavailable``: returns the ledgers with entries whose every copy
        is on these bookies; None while they are being counted. Raises SessionLostError or
        LeadershipLostError.
        """
        while True:
            await self._wait_for_news()
            try:
                away = self.away
                naming = {bookie: naming_count(bookie) for bookie in away}
                await self._note(
                    records, away, _Counts(naming, self._are_all_named, unavailable(away))
                )
            except UnavailableError as error:
                self._write_due_s = self._clock.now_s() + RETRY_S
                log.warning("absences.unnoted", error=str(error), retry_s=RETRY_S)

    async def _wait_for_news(self) -> None:
        await wait_woken(self._was_seen, timeout_s=self._write_due_s - self._clock.now_s())
        self._was_seen.clear()

    async def _note(self, records: Records, away: frozenset[BookieId], counts: _Counts) -> None:
        now_s, before = self._clock.now_s(), self._written_counts
        if away and counts != before:
            pause_s = 0.0 if counts.tell_first(before) else COUNTS_WRITE_S
            self._write_due_s = min(self._write_due_s, self._tried_s + pause_s)
        excused_s = excused_until_s(
            self.since_s, overruled_s=self._overruled_s, outage=self._outage
        )
        is_news = (away, excused_s) != (self._written, self._written_excused_s)
        if not is_news and now_s < self._write_due_s:
            return
        self._tried_s = now_s
        await records.write_absences(
            StoredAbsences.of(
                self.since_s,
                now_s=now_s,
                wall_ms=self._clock.wall_ms(),
                naming=counts.naming,
                are_all_named=counts.are_all_named,
                unavailable=counts.unavailable,
                excused_until_s=excused_s,
            )
        )
        self._written, self._written_counts = away, counts
        self._written_excused_s = excused_s
        self._write_due_s = now_s + WRITE_S if away else math.inf


class MarkCauses:
    """Why ledgers are marked, by bookie. Call ``resume`` first."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store, self._paths = store, paths
        self._clock = clock
        self._causes: Mapping[BookieId, Cause] = {}
        """The causes as they are stored."""

    async def resume(self) -> None:
        """Read the stored causes."""
        self._causes = await read_causes(self._store, self._paths)

    def lost_since_s(self) -> dict[BookieId, float]:
        """Return since when the lost bookies are absent whose ledgers this leader or an earlier one
        marked."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        return {
            bookie: now_s - max(0, now_ms - cause.since_ms) / 1000
            for bookie, cause in self._causes.items()
            if cause.why is Why.LOST and cause.ended_ms is None
        }

    async def note(self, records: Records, missing: Missing) -> None:
        """Record the causes of ``missing`` if they changed: a bookie's ledgers begin to be marked,
        or a bookie is no longer missing."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        current = {
            bookie: Cause(why=Why.REBORN, since_ms=now_ms)
            for bookie, birth in missing.reformatted.items()
            if birth.was_known
        }
        for bookie, since_s in missing.lost_since_s.items():
            since_ms = now_ms - round((now_s - since_s) * 1000)
            current[bookie] = Cause(why=Why.LOST, since_ms=max(0, since_ms))
        causes = updated_causes(self._causes, current, now_ms=now_ms)
        if causes != self._causes:
            await records.write_causes(causes)
            self._causes = causes
