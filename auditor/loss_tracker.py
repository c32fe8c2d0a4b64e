"""Decides which bookies are lost or reformatted now, and whether a safety hold applies.

The auditor acts on these decisions, and observe mode reports them. The tracker only reads:
``SafetyHolds`` writes the orders of safety holds, and the auditor writes the records from which the
next leader continues.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from auditor.absence import Outages, RecoveryDelay
from auditor.absence_tracker import AbsenceTracker, LossHistory
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.records import read_identities
from auditor.safety_hold import SafetyHolds
from auditor.settings import AuditorSettings
from auditor.underreplication import BookieLosses, reformatted_bookies
from ledgers.clock import Clock
from ledgers.model import BookieId
from ledgers.registration import HIDDEN_CZXID
from ledgers.store import MetadataStore
from replication.cluster import ClusterView, ViewSource
from replication.orders import HoldOrder
from replication.znodes import ClusterPaths


class LossTracker:
    """The lost and reformatted bookies, as one leadership knows them. Call ``prepare`` first."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        updater: LedgerMapUpdater,
        views: ViewSource,
        holds: SafetyHolds,
        settings: AuditorSettings,
        clock: Clock,
        outages: Outages | None = None,
    ) -> None:
        """The caller runs ``updater`` and ``views``. ``outages``: as for ``AbsenceTracker``."""
        self._store, self._paths = store, paths
        self._updater = updater
        self._views = views
        self._holds = holds
        default_s = settings.lost_bookie_recovery_delay_s
        self.delay = RecoveryDelay(store, paths, default_s=default_s, clock=clock)
        self.absences = AbsenceTracker(store, paths, clock, outages)
        self.history = LossHistory(store, paths, clock)
        self.identities: dict[BookieId, int] = {}
        """By bookie, the cookie (czxid) with which its ledgers were last inspected."""
        self.hold: HoldOrder | None = None
        """The safety hold in force: nothing may be marked then."""
        self._first_seen: dict[BookieId, int] = {}
        """By bookie, the cookie (czxid) with which this tracker first saw it."""
        self._is_overruled = False
        """An operator asked to treat all bookies that are absent now as lost."""
        self._was_updated = False
        self._clock = clock
        self._looked_s: float | None = None
        """Time of the caller's last decision about lost bookies."""

    async def prepare(self) -> None:
        """Continue from the records of the leader before."""
        await self.delay.read()
        await self.absences.resume()
        await self.read_records()

    async def read_records(self) -> None:
        """Read for which cookies and losses leaders marked ledgers."""
        self.identities = await read_identities(self._store, self._paths)
        await self.history.resume()

    async def delay_changes(self) -> AsyncGenerator[None, None]:
        """Yield after each change of the recovery delay. Ends with the session."""
        async with aclosing(self.delay.changes()) as changes:
            async for before, current in changes:
                self._is_overruled |= current.is_asking_for_audit(before)
                yield

    async def refresh(self) -> ClusterView:
        """Update the absences from the current view, and return that view.

        If an operator asked to treat absent bookies as lost, read a new view first: the request
        covers bookies that this session has not yet seen absent.
        """
        view = await self._views.refresh() if self._is_overruled else self._views.current
        self.update(view)
        if self._is_overruled:
            self._is_overruled = False
            self.absences.overrule()
        return view

    def update(self, view: ClusterView) -> None:
        """Update the absences from ``view``."""
        updater = self._updater
        self.absences.update(
            view, named=updater.ledger_map.bookies, are_counts_complete=updater.is_complete
        )
        for bookie, cookie in view.cookies.items():
            if cookie.czxid != HIDDEN_CZXID:
                self._first_seen.setdefault(bookie, cookie.czxid)
        self._was_updated = True

    async def update_hold(self, view: ClusterView) -> None:
        """Begin, extend or end a safety hold if that is due. Raises UnavailableError if it is
        unknown whether a hold is in force; then nothing may be marked."""
        self.hold = await self._holds.update(
            view,
            self.absences.named_since_s(self._updater),
            lost_since_s=self.history.lost_since_s(),
        )
        self._looked_s = self._clock.now_s()

    def losses(self, view: ClusterView) -> BookieLosses:
        """Return the lost and the reformatted bookies, whether or not a hold is in force."""
        return BookieLosses(
            lost_since_s=self.absences.lost_since_s(delay_s=self.delay.current.delay_s),
            reformatted=reformatted_bookies(
                view.cookies,
                self.identities,
                first_seen=self._first_seen,
                trusted=view.orders.trusted_cookies,
            ),
        )

    def delay_left_s(self) -> dict[BookieId, float]:
        """Return the rest of the recovery delay of each bookie that is absent and not lost yet."""
        return self.absences.delay_left_s(delay_s=self.delay.current.delay_s)

    @property
    def is_loss_pending(self) -> bool:
        """True if the recovery delay of an absent bookie is not over, or if no view was seen
        yet."""
        return not self._was_updated or bool(self.delay_left_s())

    @property
    def wait_s(self) -> float:
        """Seconds until something else may be decided without any event.

        A bookie may become lost while a round is under way, after ``losses`` was called. The
        time counts from ``update_hold``, so that the next round comes at once.
        """
        delay_s = self.delay.current.delay_s
        left_s = self.absences.delay_left_s(delay_s=delay_s, looked_s=self._looked_s)
        return min((self._holds.wait_s, *left_s.values()))
