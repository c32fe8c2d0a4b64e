"""Draining: the leader finds the ledgers that name a draining bookie and marks them in our own queue.

Their copies are all there, so that a Java worker would find the ledgers whole and take the marks away:
they never go into the shared queue (rule S16). Workers of ours count a draining member as missing.
All draining bookies are looked for in one scan, and marked as if they were lost together: fewest copies
left first, then the order that was given first, then the largest.

A scan is repeated, after growing pauses, as long as the order stands: a bookie that still takes writes
comes into new ledgers. Between scans the marks that are left say how far it is, in a record for people.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from prometheus_client import Gauge

from auditor.endangered import most_endangered_first
from auditor.marking import Marker
from auditor.records import DrainProgress, DrainRecord, Records, last_drains
from auditor.scan import Scan, may_be_named, scan_ledgers
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoSuchLedgerError,
    SessionLostError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore
from replication.cluster.cluster_view import ClusterView, ViewSource
from replication.cluster.orders import DrainOrder
from replication.cluster.own_state import own_path
from replication.queue import payloads
from replication.queue.listing import marked_ledger_ids

log = structlog.get_logger()
LEFT = Gauge(
    "bookmender_draining_ledgers",
    "Ledgers that name a draining bookie still, as this leader knows; 0 on every other node.",
)

RETRY_S = 5.0
"""After a scan that failed, and between two looks at a disable switch that is set."""
RESCAN_MIN_S = 60.0
"""Between two scans while marks are left; longer by ``_pause_s`` where scanning changes nothing."""
RESCAN_MAX_S = 3_600.0
REST_PER_SCAN = 9.0
"""A scan is followed by nine times its duration: in a large cluster it takes minutes."""
POLL_S = 2.0
"""Between two looks at which marks are left, and the first pause before a scan that is to prove that
none was left behind."""
POLLED_LEDGERS_PER_S = 5_000
"""Many marks are a long listing, so they are looked at less often."""
DOUBT_POLL_S = 60.0
"""Between two looks at whether the ledgers in doubt are still there and unreadable."""
DOUBTFUL_TOLD_MAX = 20
"""Ledgers in doubt that are told by id, and looked at again, for one bookie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scanned:
    """What the last scan was asked for, and when the next one is due. Times are monotonic seconds."""

    orders: Mapping[BookieId, DrainOrder]
    writable: frozenset[BookieId]
    """The draining bookies that took writes as it began."""
    ledger_count: int
    """Ledgers that named one of them."""
    named: frozenset[BookieId]
    """The draining bookies that some ledger named."""
    finished_ms: int
    """Wall-clock, for people."""
    unreadable_count: int
    doubtful: Mapping[BookieId, Sequence[int]]
    """Per draining bookie, the ledgers that cannot be read and may name it."""
    futile_count: int
    """Scans in a row, this one the last, that found no fewer ledgers than the one before."""
    rescan_due_s: float
    """While marks are left."""
    proof_due_s: float
    """Once none is: soon, or as ever where this scan found no ledger."""

    def progress(self, bookie: BookieId, *, left: int, most: int) -> DrainProgress:
        """Of one of the draining bookies; ``left``, ``most``: ledgers now, and ever before.

        That no mark is left says that workers are done; a scan is the proof.
        """
        is_named, doubtful = bookie in self.named, self.doubtful.get(bookie, ())
        return DrainProgress(
            since_ms=self.orders[bookie].since_ms,
            ledgers_left=left,
            ledgers_most=max(left, most),
            is_drained=not is_named and not doubtful,
            is_in_doubt=not is_named and bool(doubtful),
            unreadable_count=len(doubtful),
            unreadable=_told_ids(doubtful),
        )


class Drainer:
    """The leader's. ``marker`` marks in the own queue. ``run`` ends by cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        ur: str,
        manager: LedgerManager,
        views: ViewSource,
        marker: Marker,
        records: Records,
        clock: Clock,
    ) -> None:
        self._store = store
        self._ur = ur
        self._manager = manager
        self._views = views
        self._marker = marker
        self._records = records
        self._clock = clock
        self._scanned: _Scanned | None = None
        self._left: dict[int, tuple[BookieId, ...]] = {}
        """Ledgers that the last scan found and whose marks were there when last looked at: the
        draining bookies that each named."""
        self._progress: dict[BookieId, DrainProgress] | None = None
        """As it was told last, by an earlier leader perhaps; None until that was read."""

    async def run(self) -> None:
        """Raises SessionLostError or LeadershipLostError when that is over."""
        while True:
            seen = self._views.change_count
            wait_s = await self._try_run_once()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._views.wait_change(seen)

    async def _try_run_once(self) -> float | None:
        try:
            return await self.run_once()
        except SessionLostError:
            raise
        except UnavailableError as error:
            log.warning("drain.failed", error=str(error), retry_s=RETRY_S)
            return RETRY_S

    async def run_once(self) -> float | None:
        """Scan or look at the marks, as is due; returns after how many seconds to come again.

        None: not before the orders change.
        """
        view = self._views.current
        if not view.orders.draining:
            self._scanned, self._left = None, {}
            await self._tell()
            return None
        if await self._store.exists(payloads.disable_path(self._ur)) is not None:
            return RETRY_S
        marked = await marked_ledger_ids(self._store, own_path(self._ur))
        self._left = {i: self._left[i] for i in marked if i in self._left}
        if self._is_scan_due(view) or await self._is_doubt_over():
            await self._scan(view)
        await self._tell()
        return self._wait_s()

    def _is_scan_due(self, view: ClusterView) -> bool:
        last = self._scanned
        if last is None or last.orders != view.orders.draining:
            return True
        if _writable(view) - last.writable:
            return True
        return self._clock.now_s() >= (last.rescan_due_s if self._left else last.proof_due_s)

    async def _is_doubt_over(self) -> bool:
        """Whether one of the ledgers in doubt is gone, or can be read: a scan will say what it names."""
        assert self._scanned is not None
        looked_at = {i for found in self._scanned.doubtful.values() for i in _told_ids(found)}
        for ledger_id in looked_at:
            try:
                await self._manager.read(ledger_id)
            except CorruptionError:
                continue
            except NoSuchLedgerError:
                pass
            return True
        return False

    def _wait_s(self) -> float:
        assert self._scanned is not None
        now_s = self._clock.now_s()
        if not self._left:
            wait_s = max(0.0, self._scanned.proof_due_s - now_s)
            return min(wait_s, DOUBT_POLL_S) if self._scanned.doubtful else wait_s
        poll_s = POLL_S + len(self._left) / POLLED_LEDGERS_PER_S
        return max(0.0, min(poll_s, self._scanned.rescan_due_s - now_s))

    async def _scan(self, view: ClusterView) -> None:
        """Find every ledger that names a draining bookie, and mark those that are not marked yet."""
        orders, began_s = view.orders.draining, self._clock.now_s()
        scan = await scan_ledgers(self._manager, lost=orders.keys(), available=view.available)
        new = [found for found in scan.endangered if found.ledger_id not in self._left]
        since = {bookie: float(order.since_ms) for bookie, order in orders.items()}
        await self._marker.mark_all(most_endangered_first(new, since))
        self._left = {found.ledger_id: found.lost for found in scan.endangered}
        doubtful = await may_be_named(self._store, self._manager, scan.unreadable, orders.keys())
        self._scanned = self._summary(view, scan, doubtful, began_s=began_s)
        log.info(
            "drain.scanned",
            bookies=sorted(orders),
            writable=sorted(self._scanned.writable),
            ledger_count=len(scan.endangered),
            mark_count=len(new),
            duration_s=round(self._clock.now_s() - began_s, 3),
        )

    def _summary(
        self,
        view: ClusterView,
        scan: Scan,
        doubtful: Mapping[BookieId, Sequence[int]],
        *,
        began_s: float,
    ) -> _Scanned:
        last, now_s = self._scanned, self._clock.now_s()
        is_futile = (
            last is not None
            and last.orders == view.orders.draining
            and len(scan.endangered) >= last.ledger_count
        )
        futile_count = last.futile_count + 1 if is_futile and last is not None else 0
        rest_s = REST_PER_SCAN * (now_s - began_s)
        proof_s = POLL_S if scan.endangered else RESCAN_MIN_S
        return _Scanned(
            orders=view.orders.draining,
            writable=_writable(view),
            ledger_count=len(scan.endangered),
            named=frozenset(bookie for found in scan.endangered for bookie in found.lost),
            finished_ms=self._clock.wall_ms(),
            unreadable_count=len(scan.unreadable),
            doubtful=doubtful,
            futile_count=futile_count,
            rescan_due_s=now_s + max(rest_s, _pause_s(RESCAN_MIN_S, futile_count)),
            proof_due_s=now_s + max(rest_s, _pause_s(proof_s, futile_count)),
        )

    async def _tell(self) -> None:
        """Write how far it is, where that has changed."""
        LEFT.set(len(self._left))
        told = await self._told()
        progress = self._current_progress(told)
        if progress == told:
            return
        for bookie, now in progress.items():
            before = told.get(bookie)
            if now.is_drained and not (before is not None and before.is_drained):
                log.info("drain.finished", bookie=bookie, ledger_count=now.ledgers_most)
        await self._records.write_drains(
            DrainRecord(
                scanned_ms=0 if self._scanned is None else self._scanned.finished_ms,
                unreadable_count=0 if self._scanned is None else self._scanned.unreadable_count,
                bookies=progress,
            )
        )
        self._progress = progress

    async def _told(self) -> dict[BookieId, DrainProgress]:
        if self._progress is None:
            record = await last_drains(self._store, self._ur)
            self._progress = {} if record is None else dict(record.bookies)
        return self._progress

    def _current_progress(
        self, told: Mapping[BookieId, DrainProgress]
    ) -> dict[BookieId, DrainProgress]:
        if self._scanned is None:
            return {}
        left = Counter(bookie for named in self._left.values() for bookie in named)
        return {
            bookie: self._scanned.progress(
                bookie, left=left[bookie], most=_most_so_far(told.get(bookie), order)
            )
            for bookie, order in self._scanned.orders.items()
        }


def _told_ids(doubtful: Sequence[int]) -> tuple[int, ...]:
    return tuple(doubtful[:DOUBTFUL_TOLD_MAX])


def _most_so_far(told: DrainProgress | None, order: DrainOrder) -> int:
    return told.ledgers_most if told is not None and told.since_ms == order.since_ms else 0


def _writable(view: ClusterView) -> frozenset[BookieId]:
    """The draining bookies that new ledgers may still be put on."""
    return view.writable & view.orders.draining.keys()


def _pause_s(least_s: float, futile_count: int) -> float:
    """Twice as long after each scan that changed nothing: nobody works, or nothing is to be done."""
    return min(RESCAN_MAX_S, least_s * (1 << min(futile_count, 20)))
