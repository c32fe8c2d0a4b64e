"""The bulk data path's way in: many transfers at once over shared connections to the bookies.

Promises of rule S10: reads in flight and bytes asked of one bookie stay within its ``ReadBudget``,
which the control path draws on too, and what is on its way to one target within a window of its own.
Digests are always checked and the bytes passed on are the bytes read (rules S7, S12). Connections
speak V2 only, for reads or for adds, never both. Nothing is retried here.
"""

import asyncio

from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.job import Job, Reading, Totals, Writing
from ledgers.bookie.bulk.lane import Common, Resolve
from ledgers.bookie.bulk.source import SourceLane
from ledgers.bookie.bulk.target import TargetLane
from ledgers.bookies import Transfer, TransferResult
from ledgers.metadata import BookieId

TIMEOUT_S = 5.0
CHECKS_PER_TIMEOUT = 4
WRITES_IN_FLIGHT_MAX = 1_000
"""At 500, two sources at their ceiling left the target waiting: a quarter slower."""
WRITES_BYTES_MAX = 8 * 1024 * 1024


class BulkTransfers:
    """Carries out transfers. Belongs to one loop.

    ``resolve``: a registered bookie's address; ids that it does not know are read as ``host:port``.
    ``timeout_s``: how long a bookie may leave a transfer without any reply, or a connection
    unestablished. ``writes_in_flight_max``, ``writes_bytes_max``: per target, from before an entry
    is asked of its source until the target acknowledged it.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        resolve: Resolve = lambda bookie: None,
        timeout_s: float = TIMEOUT_S,
        writes_in_flight_max: int = WRITES_IN_FLIGHT_MAX,
        writes_bytes_max: int = WRITES_BYTES_MAX,
    ) -> None:
        self._budgets = budgets
        self._common = Common(
            resolve=resolve,
            timeout_s=timeout_s,
            writes_in_flight_max=writes_in_flight_max,
            writes_bytes_max=writes_bytes_max,
        )
        self._sources: dict[BookieId, SourceLane] = {}
        self._targets: dict[BookieId, TargetLane] = {}
        self._next_check: asyncio.TimerHandle | None = None
        self.totals = Totals()

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """Never raises for what a bookie did: the result says it. Cancelled, it ends at once."""
        job = Job(transfer, self.totals)
        if job.undecided_count == 0:
            return TransferResult()
        try:
            self._start(job)
            return await job.done
        finally:
            job.abandon()

    def pause(self) -> None:
        """Issue no new reads; what was asked before is still taken in and passed on."""
        self._common.is_paused = True

    def resume(self) -> None:
        self._common.is_paused = False
        for source in self._sources.values():
            source.wake()

    async def close(self) -> None:
        """Drop every connection. What still runs ends as if its bookies had gone. Any number of times."""
        self._common.is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        for lane in (*self._sources.values(), *self._targets.values()):
            await lane.close()

    def _start(self, job: Job) -> None:
        for bookie, entry_ids in job.transfer.reads.items():
            if entry_ids:
                job.readings.append(Reading(job, self._source(bookie), entry_ids))
        if job.transfer.target is not None:
            target = self._target(job.transfer.target)
            job.writing = Writing(job, target)
            target.begin(job.writing)
        for reading in job.readings:
            if not job.is_over:
                reading.lane.begin(reading)
        if self._next_check is None:
            self._check_progress()

    def _source(self, bookie: BookieId) -> SourceLane:
        lane = self._sources.get(bookie)
        if lane is None:
            budget = self._budgets.reads(bookie)
            lane = self._sources[bookie] = SourceLane(bookie, self._common, budget)
        return lane

    def _target(self, bookie: BookieId) -> TargetLane:
        lane = self._targets.get(bookie)
        if lane is None:
            lane = self._targets[bookie] = TargetLane(bookie, self._common)
        return lane

    def _check_progress(self) -> None:
        """The one timer: as long as there is anything to watch over."""
        loop = asyncio.get_running_loop()
        lanes = (*self._sources.values(), *self._targets.values())
        for lane in lanes:
            lane.check_progress(loop.time())
            lane.close_if_idle(loop.time())
        self._next_check = None
        if any(lane.is_open or lane.is_busy for lane in lanes):
            delay_s = self._common.timeout_s / CHECKS_PER_TIMEOUT
            self._next_check = loop.call_later(delay_s, self._check_progress)
