"""Draining: the leader marks the ledgers that name a draining bookie, in our private queue.

Their copies are all there, so that a Java worker would find the ledgers whole and take the marks
away: they never go into the shared queue (rule S16). Workers of ours count a draining member as
missing. All draining bookies are marked for as if they were lost together: fewest copies left
first, then the order that was given first, then the largest.

Which ledgers name one the index knows, those too that are put on a bookie that still takes writes.
A bookie is drained when the index is complete and no ledger names it, nor may. How far it is stands
in a record for people.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import Gauge

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.marker import MARKS, Marker
from auditor.records import DrainProgress, DrainRecord, Records, last_drains
from auditor.scan import may_be_named
from auditor.underreplication import UnderreplicatedLedger, fewest_copies_first, underreplicated
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication.cluster import ViewSource
from replication.marks import marked_ledger_ids
from replication.orders import DrainOrder
from replication.znodes import ClusterPaths

log = structlog.get_logger()
LEFT = Gauge(
    "bookmender_draining_ledgers",
    "Ledgers that name a draining bookie still, as this leader knows; 0 on every other node.",
)

RETRY_S = 5.0
"""After a failure, and between two looks at a disable switch that is set."""
LOOK_S, LOOK_SOON_S = 2.0, 0.25
"""Between two looks at the index; and while it is being built."""
LOOKED_AT_PER_S = 50_000
"""Ledgers that are left; where they are many, the looks are fewer."""
RELIST_S = 60.0
"""Between two looks at which marks stand, and at which ledgers that cannot be read may name the
bookies."""
DOUBTFUL_KEPT_MAX = 20
"""Ledgers in doubt that the record names, for one bookie."""


@dataclass(slots=True, kw_only=True)
class _Listed:
    """What was read besides the index. ``due_s``: when it is to be read again, monotonic."""

    orders: Mapping[BookieId, DrainOrder]
    marked: set[int]
    """In our private queue, those made since included."""
    unreadable: frozenset[int]
    doubtful: Mapping[BookieId, Sequence[int]] = field(default_factory=dict)
    """Per draining bookie, the ledgers that cannot be read and may name it."""
    due_s: float


class Drainer:
    """The leader's. ``marker`` marks in the private queue. ``run`` ends by cancellation or with the
    session."""

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
    ) -> None:
        """``updater`` is run by somebody else."""
        self._store = store
        self._paths = paths
        self._manager = manager
        self._updater = updater
        self._views = views
        self._marker = marker
        self._records = records
        self._clock = clock
        self._listed: _Listed | None = None
        self._progress: dict[BookieId, DrainProgress] | None = None
        """As it was told last, by an earlier leader perhaps; None until that was read."""

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError when that is over."""
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
        """Mark what is not marked yet; returns after how many seconds to come again.

        None: not before the orders change.
        """
        orders = self._views.current.orders.draining
        if not orders:
            self._listed = None
            await self._tell({}, {})
            return None
        if await self._store.exists(self._paths.disable) is not None:
            return RETRY_S
        listed = await self._list(orders)
        named = self._named(orders)
        await self._mark(sorted(named.keys() - listed.marked), orders, listed)
        await self._tell(named, self._current_progress(named, listed, await self._told()))
        look_s = LOOK_S if self._updater.is_complete else LOOK_SOON_S
        return look_s + len(named) / LOOKED_AT_PER_S

    def _named(self, orders: Collection[BookieId]) -> dict[int, list[BookieId]]:
        """The ledgers that name draining bookies, and which."""
        named: dict[int, list[BookieId]] = {}
        for bookie in orders:
            for ledger_id in self._updater.ledger_map.naming(bookie):
                named.setdefault(ledger_id, []).append(bookie)
        return named

    async def _list(self, orders: Mapping[BookieId, DrainOrder]) -> _Listed:
        """What stands in the queue, and what is in doubt; as it was listed before, if that will do.

        A mark may be gone whose ledger names the bookie still: somebody took it away, or a worker
        that did not know of the order yet. Such a ledger is marked again, but not in a hot loop.
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

    # --- What is told ------------------------------------------------------------------------------

    async def _tell(
        self, named: Collection[int], progress: Mapping[BookieId, DrainProgress]
    ) -> None:
        """Write how far it is, where that has changed."""
        LEFT.set(len(named))
        told = await self._told()
        if progress == told:
            return
        for bookie, now in progress.items():
            before = told.get(bookie)
            if now.is_drained and not (before is not None and before.is_drained):
                log.info("drain.finished", bookie=bookie, ledger_count=now.ledgers_most)
        await self._records.write_drains(
            DrainRecord(
                scanned_ms=self._clock.wall_ms() if self._updater.is_complete else 0,
                unreadable_count=len(self._updater.ledger_map.unreadable) if progress else 0,
                bookies=progress,
            )
        )
        self._progress = dict(progress)

    async def _told(self) -> dict[BookieId, DrainProgress]:
        if self._progress is None:
            record = await last_drains(self._store, self._paths)
            self._progress = {} if record is None else dict(record.bookies)
        return self._progress

    def _current_progress(
        self,
        named: Mapping[int, Sequence[BookieId]],
        listed: _Listed,
        told: Mapping[BookieId, DrainProgress],
    ) -> dict[BookieId, DrainProgress]:
        """While the index is being built the orders of before are told of as they were."""
        if not self._updater.is_complete:
            return {bookie: told[bookie] for bookie in listed.orders if bookie in told}
        left = Counter(bookie for bookies in named.values() for bookie in bookies)
        return {
            bookie: _progress(
                order,
                left=left[bookie],
                most=_most_so_far(told.get(bookie), order),
                doubtful=listed.doubtful.get(bookie, ()),
            )
            for bookie, order in listed.orders.items()
        }


def _progress(order: DrainOrder, *, left: int, most: int, doubtful: Sequence[int]) -> DrainProgress:
    """``left``, ``most``: ledgers that name the bookie now, and ever before."""
    return DrainProgress(
        since_ms=order.since_ms,
        ledgers_left=left,
        ledgers_most=max(left, most),
        is_drained=not left and not doubtful,
        is_in_doubt=not left and bool(doubtful),
        unreadable_count=len(doubtful),
        unreadable=tuple(doubtful[:DOUBTFUL_KEPT_MAX]),
    )


def _most_so_far(told: DrainProgress | None, order: DrainOrder) -> int:
    return told.ledgers_most if told is not None and told.since_ms == order.since_ms else 0
