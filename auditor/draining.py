"""Draining: the leader marks the ledgers that name a draining bookie, in our private queue.

These ledgers have all their copies. A Java worker would find them healthy and delete their marks,
so they are never marked in the shared queue (rule S16). Our workers count a draining bookie's
copies as missing. All draining bookies are treated as if they were lost together: fewest copies
left first, then the earliest order, then the largest ledgers.

The ledger map says which ledgers name a bookie, including ledgers placed on a draining bookie that
still takes writes. A bookie is drained when the ledger map is complete, no ledger names the bookie,
and no unreadable ledger may name it. The progress is recorded for people.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import Gauge

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.marker import MARKS, Marker
from auditor.records import DrainProgress, DrainRecord, Records, read_drains
from auditor.scan import may_be_named
from auditor.underreplication import UnderreplicatedLedger, fewest_copies_first, underreplicated
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Cause, Event, History, Kind
from replication.marks import marked_ledger_ids
from replication.orders import DrainOrder
from replication.znodes import ClusterPaths

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
    marked: set[int]
    """Ledgers in our private queue, including those marked since."""
    unreadable: frozenset[int]
    doubtful: Mapping[BookieId, Sequence[int]] = field(default_factory=dict)
    """By draining bookie, the unreadable ledgers that may name it."""
    due_s: float


class Drainer:
    """Marks for the drains of a leader. ``marker`` marks in the private queue. ``run`` ends by
    cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        manager: LedgerManager,
        updater: LedgerMapUpdater,
        views: ViewSource,
        marker: Marker,
        records: Records,
        clock: Clock,
        history: History = NO_HISTORY,
    ) -> None:
        """The caller runs ``updater``."""
        self._store = store
        self._paths = paths
        self._manager = manager
        self._updater = updater
        self._views = views
        self._marker = marker
        self._records = records
        self._clock = clock
        self._history = history
        self._listed: _Listed | None = None
        self._progress: dict[BookieId, DrainProgress] | None = None
        """The last recorded value, perhaps of an earlier leader; None until it was read."""

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError."""
        while True:
            seen = self._views.change_count
            wait_s = await self._try_run_once()
            await self._views.wait_change(seen, timeout_s=wait_s)

    async def _try_run_once(self) -> float | None:
        try:
            return await self.run_once()
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("drain.failed", error=str(error), retry_s=RETRY_S)
            return RETRY_S

    async def run_once(self) -> float | None:
        """Mark what is not marked yet. Return the seconds until the next round; None: when the
        orders change."""
        orders = self._views.current.orders.draining
        if not orders:
            self._listed = None
            await self._record({}, {})
            return None
        if await self._store.exists(self._paths.disable) is not None:
            return RETRY_S
        listed = await self._list(orders)
        named = self._named(orders)
        await self._mark(sorted(named.keys() - listed.marked), orders, listed)
        await self._record(named, self._current_progress(named, listed, await self._recorded()))
        look_s = LOOK_S if self._updater.is_complete else LOOK_SOON_S
        return look_s + len(named) / LOOKED_AT_PER_S

    def _named(self, orders: Collection[BookieId]) -> dict[int, list[BookieId]]:
        """Return the ledgers that name draining bookies, and which they name."""
        named: dict[int, list[BookieId]] = {}
        for bookie in orders:
            for ledger_id in self._updater.ledger_map.naming(bookie):
                named.setdefault(ledger_id, []).append(bookie)
        return named

    async def _list(self, orders: Mapping[BookieId, DrainOrder]) -> _Listed:
        """Return which ledgers are marked, and which are unreadable; from the last listing if that
        is recent.

        A mark may be deleted although the ledger still names the bookie: by an operator, or by a
        worker that did not know the order yet. Such a ledger is marked again, but not in a busy
        loop.
        """
        last, now_s = self._listed, self._clock.now_s()
        unreadable = self._updater.ledger_map.unreadable
        if (
            last is not None
            and last.orders == orders
            and last.unreadable == unreadable
            and now_s < last.due_s
        ):
            return last
        marked = set(await marked_ledger_ids(self._store, self._paths.private))
        doubtful = await may_be_named(self._store, self._manager, sorted(unreadable), orders.keys())
        self._listed = _Listed(
            orders=orders,
            marked=marked,
            unreadable=unreadable,
            doubtful=doubtful,
            due_s=now_s + RELIST_S,
        )
        return self._listed

    async def _mark(
        self, ledger_ids: Sequence[int], orders: Mapping[BookieId, DrainOrder], listed: _Listed
    ) -> None:
        new = [each for i in ledger_ids if (each := self._underreplicated(i, orders)) is not None]
        if not new:
            return
        began_s = self._clock.now_s()
        since = {bookie: float(order.since_ms) for bookie, order in orders.items()}
        count = await self._marker.mark_all(fewest_copies_first(new, since))
        MARKS.labels(cause="drained").inc(count)
        if count:
            self._history.record(
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
            duration_s=round(self._clock.now_s() - began_s, 3),
        )

    def _underreplicated(
        self, ledger_id: int, orders: Collection[BookieId]
    ) -> UnderreplicatedLedger | None:
        ledger = self._updater.ledger_map.get(ledger_id)
        return None if ledger is None else underreplicated(ledger, orders)

    # --- The record ------------------------------------------------------------------------------

    async def _record(
        self, named: Collection[int], progress: Mapping[BookieId, DrainProgress]
    ) -> None:
        """Write the progress if it has changed."""
        LEFT.set(len(named))
        recorded = await self._recorded()
        if progress == recorded:
            return
        for bookie, now in progress.items():
            before = recorded.get(bookie)
            if now.is_drained and not (before is not None and before.is_drained):
                log.info("drain.finished", bookie=bookie, ledger_count=now.ledgers_most)
        await self._records.write(
            DrainRecord(
                scanned_ms=self._clock.wall_ms() if self._updater.is_complete else 0,
                unreadable_count=len(self._updater.ledger_map.unreadable) if progress else 0,
                bookies=progress,
            )
        )
        self._progress = dict(progress)

    async def _recorded(self) -> dict[BookieId, DrainProgress]:
        if self._progress is None:
            record = await read_drains(self._store, self._paths)
            self._progress = {} if record is None else dict(record.bookies)
        return self._progress

    def _current_progress(
        self,
        named: Mapping[int, Sequence[BookieId]],
        listed: _Listed,
        recorded: Mapping[BookieId, DrainProgress],
    ) -> dict[BookieId, DrainProgress]:
        """Return the progress. While the ledger map is being built, return the recorded one."""
        if not self._updater.is_complete:
            return {bookie: recorded[bookie] for bookie in listed.orders if bookie in recorded}
        left = Counter(bookie for bookies in named.values() for bookie in bookies)
        return {
            bookie: _progress(
                order,
                left=left[bookie],
                most=_most_so_far(recorded.get(bookie), order),
                doubtful=listed.doubtful.get(bookie, ()),
            )
            for bookie, order in listed.orders.items()
        }


def _progress(order: DrainOrder, *, left: int, most: int, doubtful: Sequence[int]) -> DrainProgress:
    """``left``, ``most``: ledgers that name the bookie now, and the largest number so far."""
    return DrainProgress(
        since_ms=order.since_ms,
        ledgers_left=left,
        ledgers_most=max(left, most),
        is_drained=not left and not doubtful,
        is_in_doubt=not left and bool(doubtful),
        unreadable_count=len(doubtful),
        unreadable=tuple(doubtful[:DOUBTFUL_KEPT_MAX]),
    )


def _most_so_far(recorded: DrainProgress | None, order: DrainOrder) -> int:
    return (
        recorded.ledgers_most if recorded is not None and recorded.since_ms == order.since_ms else 0
    )
