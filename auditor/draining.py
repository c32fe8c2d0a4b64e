"""Draining: the leader marks the ledgers that name a draining bookie, in our private queue.

These ledgers have all their copies. A Java worker would find them healthy and delete their marks,
so they are never marked in the shared queue (rule S16). Our workers count a draining bookie's
copies as missing. All draining bookies are treated as if they were lost together: fewest copies
left first, then the earliest order, then the largest ledgers.

The ledger map says which ledgers name a bookie, including ledgers placed on a draining bookie that
still takes writes. A bookie is drained when the ledger map is complete, no ledger names the bookie,
and no unreadable ledger may name it. The progress is recorded for people.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import Gauge
from pyroaring import BitMap64

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.marker import MARKS, Marker
from auditor.records import DrainProgress, DrainRecord, Records, read_drains
from auditor.scan import may_be_named
from auditor.underreplication import fewest_copies_first, underreplicated
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Cause, Event, History, Kind
from replication.marks import marked_ledger_ids
from replication.orders import DrainOrder

log = structlog.get_logger()
LEFT = Gauge(
    "bookmender_draining_ledgers",
    "Ledgers that still name a draining bookie. 0 on all nodes except the leader.",
)

RETRY_S = 5.0
"""Wait after a failure, and while auto-recovery is disabled."""
LOOK_S, LOOK_SOON_S = 2.0, 0.25
"""Interval between two rounds, and while the ledger map is being built."""
LOOKED_AT_PER_S = 50_000
"""With many ledgers left, rounds are rarer."""
RELIST_S = 60.0
"""Interval between two listings of the queue, and of the unreadable ledgers that may name a
draining bookie."""
DOUBTFUL_KEPT_MAX = 20
"""Unreadable ledgers in the record of one bookie."""


@dataclass(slots=True, kw_only=True)
class _Listed:
    """Data that was read besides the ledger map. ``due_s``: monotonic time of the next reading."""

    orders: Mapping[BookieId, DrainOrder]
    marked: BitMap64
    """Ledgers in our private queue, including those marked since."""
    unreadable: frozenset[int]
    doubtful: Mapping[BookieId, Sequence[int]] = field(default_factory=dict)
    """By draining bookie, the unreadable ledgers that may name it."""
    due_s: float


@dataclass(kw_only=True)
class Drainer:
    """Marks for the drains of a leader. The caller runs ``updater``. ``marker`` marks in the
    private queue. ``run`` ends by cancellation or with the session."""

    updater: LedgerMapUpdater
    views: ViewSource
    marker: Marker
    records: Records
    history: History = NO_HISTORY
    _listed: _Listed | None = field(default=None, init=False)
    _recorded: Mapping[BookieId, DrainProgress] | None = field(default=None, init=False)
    """The recorded progress, perhaps of an earlier leader; None until it was read."""

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError."""
        while True:
            seen = self.views.change_count
            try:
                wait_s = await self.run_once()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("drain.failed", error=str(error), retry_s=RETRY_S)
                wait_s = RETRY_S
            await self.views.wait_change(seen, timeout_s=wait_s)

    async def run_once(self) -> float | None:
        """Mark what is not marked yet. Return the seconds until the next round; None: no limit."""
        orders, ledger_map = self.views.current.orders.draining, self.updater.ledger_map
        if self._recorded is None:
            record = await read_drains(self.records.store, self.records.paths)
            self._recorded = {} if record is None else record.bookies
        if not orders:
            self._listed = None
            LEFT.set(0)
            await self._record({})
            return None
        if await self.records.store.exists(self.records.paths.disable) is not None:
            return RETRY_S
        listed = await self._list(orders)
        named = ledger_map.naming_any(orders)
        await self._mark(named - listed.marked, orders, listed)
        LEFT.set(len(named))
        progress, is_complete = dict[BookieId, DrainProgress](), self.updater.is_complete
        for bookie, order in orders.items():
            before = self._recorded.get(bookie)
            if not is_complete:  # while the ledger map is being built, what was recorded stays
                progress |= {} if before is None else {bookie: before}
                continue
            left, doubtful = ledger_map.naming_count(bookie), listed.doubtful.get(bookie, ())
            most = before.ledgers_most if before and before.since_ms == order.since_ms else 0
            progress[bookie] = DrainProgress(
                since_ms=order.since_ms,
                ledgers_left=left,
                ledgers_most=max(left, most),
                is_drained=not left and not doubtful,
                is_in_doubt=not left and bool(doubtful),
                unreadable_count=len(doubtful),
                unreadable=tuple(doubtful[:DOUBTFUL_KEPT_MAX]),
            )
        await self._record(progress)
        return (LOOK_S if is_complete else LOOK_SOON_S) + len(named) / LOOKED_AT_PER_S

    async def _list(self, orders: Mapping[BookieId, DrainOrder]) -> _Listed:
        """Return which ledgers are marked and unreadable; from the last listing if that is recent.

        A mark may be deleted although the ledger still names the bookie: by an operator, or by a
        worker that did not know the order yet. Such a ledger is marked again, but not in a busy
        loop.
        """
        last, now_s = self._listed, self.marker.clock.now_s()
        store, manager = self.records.store, self.updater.manager
        unreadable = self.updater.ledger_map.unreadable
        if (
            last is not None
            and last.orders == orders
            and last.unreadable == unreadable
            and now_s < last.due_s
        ):
            return last
        marked = BitMap64(await marked_ledger_ids(store, self.marker.paths))
        doubtful = await may_be_named(store, manager, sorted(unreadable), orders.keys())
        self._listed = _Listed(
            orders=orders,
            marked=marked,
            unreadable=unreadable,
            doubtful=doubtful,
            due_s=now_s + RELIST_S,
        )
        return self._listed

    async def _mark(
        self, ledger_ids: BitMap64, orders: Mapping[BookieId, DrainOrder], listed: _Listed
    ) -> None:
        """Mark these ledgers, if they still name a draining bookie."""
        ledgers = filter(None, map(self.updater.ledger_map.get, ledger_ids))
        new = [each for ledger in ledgers if (each := underreplicated(ledger, orders)) is not None]
        if not new:
            return
        began_s = self.marker.clock.now_s()
        since = {bookie: float(order.since_ms) for bookie, order in orders.items()}
        count = await self.marker.mark_all(fewest_copies_first(new, since))
        MARKS.labels(cause="drained").inc(count)
        if count:
            self.history.record(
                Event(
                    kind=Kind.LEDGERS_MARKED,
                    bookies=tuple(sorted(orders)),
                    cause=Cause.DRAINED,
                    ledger_count=count,
                )
            )
        listed.marked.update(each.ledger_id for each in new)
        log.info(
            "drain.marked",
            bookies=sorted(orders),
            mark_count=count,
            duration_s=round(self.marker.clock.now_s() - began_s, 3),
        )

    async def _record(self, progress: Mapping[BookieId, DrainProgress]) -> None:
        """Write the progress if it has changed."""
        recorded = self._recorded or {}
        if progress == recorded:
            return
        for bookie, now in progress.items():
            before = recorded.get(bookie)
            if now.is_drained and not (before is not None and before.is_drained):
                log.info("drain.finished", bookie=bookie, ledger_count=now.ledgers_most)
        await self.records.write(
            DrainRecord(
                scanned_ms=self.marker.clock.wall_ms() if self.updater.is_complete else 0,
                unreadable_count=len(self.updater.ledger_map.unreadable) if progress else 0,
                bookies=progress,
            )
        )
        self._recorded = progress
