"""Takes the leader's decisions without leading: which bookies are lost, what would be held, what
would be marked.

The observer writes nothing: no vote, no lock, no other znode. The leader's own code decides
(``noting``, ``holding``, ``underreplicated``). Only the records of an earlier leader of ours may be
missing: beside Java alone, absences count from the observer's start, and no earlier cookie is
known.
"""

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from auditor.absence import Delay, log_refusal, read_delay
from auditor.absence_tracker import AbsenceTracker, MarkCauses
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.marker import PrivateQueue, read_private_queue
from auditor.observation import Observation, compare, lost_bytes, missing_bookies
from auditor.records import read_identities
from auditor.safety_hold import SafetyHoldPolicy
from auditor.settings import AuditorSettings
from auditor.underreplication import (
    Missing,
    UnderreplicatedLedger,
    fewest_copies_first,
    reformatted_bookies,
)
from ledgers.clock import Clock
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication import znodes
from replication.cluster import ClusterView, ViewSource
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import HoldOrder

SLICE = 500
"""Ledgers processed in one go, which takes some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Danger:
    """The ledgers that ``missing`` endangers, computed at this ``change_count`` of the index."""

    missing: Missing
    change_count: int
    underreplicated: tuple[UnderreplicatedLedger, ...]
    lost_bytes: int


class Observer:
    """Observes during one session. The caller runs ``updater`` and ``views``."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        ur: str,
        updater: LedgerMapUpdater,
        views: ViewSource,
        settings: AuditorSettings,
        judge: SafetyHoldPolicy,
        clock: Clock,
    ) -> None:
        self._store = store
        self._ur = ur
        self._updater = updater
        self._views = views
        self._settings = settings
        self._judge = judge
        self._clock = clock
        self._absences = AbsenceTracker(store, ur, clock)
        self._causes = MarkCauses(store, ur, clock)
        self._delay: Delay | None = None
        self._hold: HoldOrder | None = None
        """The hold order that a leader would have written."""
        self._danger: _Danger | None = None
        self._marks: dict[int, Collection[BookieId]] = {}
        """The shared queue as last read: by ledger, the replicas that its mark names."""
        self._own = PrivateQueue()
        """Our private queue as last read."""

    async def prepare(self) -> None:
        """Continue the absences that a leader of ours recorded, if there is one."""
        await self._absences.resume()

    async def look(self) -> Observation:
        """Return what the leader would do now. Raises UnavailableError if something could not be
        read completely."""
        view = self._views.current
        delay_s = await self._follow_delay()
        updater = self._updater
        self._absences.see(
            view, named=updater.ledger_map.bookies, are_all_named=updater.is_complete
        )
        hold = await self._follow_hold(view)
        missing = await self._missing(view, delay_s=delay_s)
        danger = await self._weigh(missing)
        await self._read_marks(danger.underreplicated)
        ledger_map, waiting_s = self._updater.ledger_map, self._waiting_s(missing, delay_s)
        return Observation(
            seen_ms=self._clock.wall_ms(),
            is_index_complete=self._updater.is_complete,
            ledger_count=len(ledger_map),
            unreadable=tuple(sorted(ledger_map.unreadable)),
            writable_count=len(view.writable),
            read_only_count=len(view.available) - len(view.writable),
            recovery_delay_s=delay_s,
            missing=missing_bookies(
                missing.lost_since_s,
                waiting_s,
                missing.reformatted,
                underreplicated=danger.underreplicated,
                naming={bookie: ledger_map.naming_count(bookie) for bookie in waiting_s},
            ),
            underreplicated=danger.underreplicated,
            lost_bytes=danger.lost_bytes,
            marked_count=len(self._marks),
            difference=compare(danger.underreplicated, self._marks),
            own=await self._read_own_queue(),
            is_disabled=await self._store.exists(znodes.disable_path(self._ur)) is not None,
            hold=hold,
            is_hold_ordered=hold is not None and view.orders.is_held,
        )

    @property
    def wait_s(self) -> float:
        """Seconds until ``look`` may return something else without any event."""
        delay_s = self._delay.delay_s if self._delay else 0
        loss_s = self._absences.next_loss_s(delay_s=delay_s)
        return min(math.inf if loss_s is None else loss_s, self._judge.wait_s)

    # --- Missing bookies --------------------------------------------------------------------------

    async def _follow_delay(self) -> int:
        """Return the recovery delay in seconds. If it was written again unchanged, count absent
        bookies as lost."""
        before = self._delay
        self._delay = await read_delay(
            self._store, self._ur, default_s=self._settings.lost_bookie_recovery_delay_s
        )
        if self._delay != before:
            log_refusal(self._delay)
        if before is not None and self._delay.is_asking_for_audit(before):
            self._absences.overrule()
        return self._delay.delay_s

    async def _follow_hold(self, view: ClusterView) -> HoldOrder | None:
        """Return the hold in force; None if there is none. An existing order has priority over the
        one that we would have written."""
        await self._causes.resume()  # a leader of ours may have changed them
        census = self._judge.census(
            view,
            self._absences.named_since_s(self._updater),
            lost_since_s=self._causes.lost_since_s(),
        )
        standing = self._hold if view.orders.hold is None else view.orders.hold
        self._hold = self._judge.wanted(standing, census)
        return None if self._hold is None or self._hold.is_released else self._hold

    async def _missing(self, view: ClusterView, *, delay_s: int) -> Missing:
        """Return the missing bookies, even during a hold: those that would be missing without
        it."""
        return Missing(
            lost_since_s=self._absences.lost_since_s(delay_s=delay_s),
            reformatted=reformatted_bookies(
                view.cookies,
                await read_identities(self._store, self._ur),
                trusted=view.orders.trusted_cookies,
            ),
        )

    def _waiting_s(self, missing: Missing, delay_s: int) -> dict[BookieId, float]:
        """Return the rest of the recovery delay for bookies that are absent and not lost yet."""
        now_s = self._clock.now_s()
        return {
            bookie: max(0.0, since_s + delay_s - now_s)
            for bookie, since_s in self._absences.since_s.items()
            if bookie not in missing.lost_since_s
        }

    # --- UnderreplicatedLedger ledgers -----------------------------------------------------------------------

    async def _weigh(self, missing: Missing) -> _Danger:
        """Return the endangered ledgers. They are computed again only after a change."""
        was = self._danger
        is_same = was is not None and was.change_count == self._updater.change_count
        if was is None or not is_same or was.missing != missing:
            self._danger = was = await self._underreplicated(missing)
        return was

    async def _underreplicated(self, missing: Missing) -> _Danger:
        ledger_map, change_count = self._updater.ledger_map, self._updater.change_count
        naming = list({i for bookie in missing.bookies for i in ledger_map.naming(bookie)})
        found: list[UnderreplicatedLedger] = []
        weight = 0.0
        for start in range(0, len(naming), SLICE):
            for ledger_id in naming[start : start + SLICE]:
                ledger = ledger_map.get(ledger_id)
                danger = None if ledger is None else missing.danger(ledger)
                if ledger is not None and danger is not None:
                    found.append(danger)
                    weight += lost_bytes(ledger, danger.lost)
            await asyncio.sleep(0)
        return _Danger(
            missing=missing,
            change_count=change_count,
            underreplicated=tuple(fewest_copies_first(found, missing.lost_since_s)),
            lost_bytes=round(weight),
        )

    async def _read_marks(self, underreplicated: Sequence[UnderreplicatedLedger]) -> None:
        """Read all existing marks, except those that already named all we would name: a mark only
        gains replicas.

        If such a mark was deleted, its ledger was repaired and is no longer endangered. A later
        mark of it is then read again.
        """
        listed = await marked_ledger_ids(self._store, self._ur)
        agreed = {
            each.ledger_id
            for each in underreplicated
            if set(each.lost) <= set(self._marks.get(each.ledger_id, ()))
        }
        marks = {i: self._marks[i] for i in listed if i in agreed}
        rest = [i for i in listed if i not in agreed]
        for marked in await read_marks(self._store, self._ur, rest):
            marks[marked.ledger_id] = () if marked.mark is None else marked.mark.replicas
        self._marks = marks

    async def _read_own_queue(self) -> PrivateQueue:
        """Read our private queue. The shared queue must be read before."""
        self._own = await read_private_queue(
            self._store, self._ur, shared=self._marks, known_damaged=self._own.damaged
        )
        return self._own
