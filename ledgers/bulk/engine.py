"""The bulk data path's way in: many transfers at once over shared connections to the bookies.

Promises of rule S10: reads in flight and bytes asked of one bookie stay within its ``ReadBudget``,
which the control path draws on too, and what is on its way to one target within a window of its
own. Digests are always checked and the bytes passed on are the bytes read (rules S7, S12).
Connections speak V2 only, for reads or for adds, never both. Nothing is retried here.
"""

import asyncio
from collections.abc import Iterator, Sequence

from ledgers.bookies import SourceHealth, Transfer, TransferResult
from ledgers.bulk.connection import Common, Lane
from ledgers.bulk.flow_control import BookieFlow, FlowControl
from ledgers.bulk.limiters import Budgets, Pace, ReadBudget, Way, Window, WindowGate
from ledgers.bulk.source import IMPATIENT_CHECKS, IMPATIENT_S, BatchReads, SingleReads
from ledgers.bulk.target import TargetLane
from ledgers.bulk.transfer import BATCH_ENTRY_BYTES_MAX, Job, Totals, Writing, has_runs
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.model import BookieId

TIMEOUT_S = 5.0
CHECKS_PER_TIMEOUT = 4
CHECK_INTERVAL_MAX_S = IMPATIENT_S / IMPATIENT_CHECKS
WRITES_IN_FLIGHT_MAX = 1_000
"""At 500, two sources at their ceiling left the target waiting: a quarter slower."""
WRITES_BYTES_MAX = 8 * 1024 * 1024
MEMORY_BYTES_MAX = 32 * 1024 * 1024
"""Of all entries on their way, whatever the number of sources and targets. Measured with entries of
1 byte to 5 MiB, a process grows by less than 64 MB."""
MEMORY_ENTRIES_MAX = 32_768
"""Likewise: each costs some 250 bytes besides its own."""


class BulkTransfers:
    """Carries out transfers. Belongs to one loop.

    ``resolve``: where a bookie answers; by default its id is read as ``host:port``. ``timeout_s``:
    how long a bookie may leave a transfer without any reply, or a connection unestablished.
    ``writes_in_flight_max``, ``writes_bytes_max``: per target, from before an entry is asked of its
    source until the target acknowledged it. ``memory_entries_max``, ``memory_bytes_max``: likewise,
    of all together. ``reads_batches``: whether runs of entries are read in batches, of bookies that
    know them. ``yields``: as of ``FlowControl``. ``paces_reads``: whether the pace is also that of
    reading alone.

    ``flow`` is told whose clients are active; ``pace`` is an operator's.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        resolve: Resolve = spelled_address,
        timeout_s: float = TIMEOUT_S,
        writes_in_flight_max: int = WRITES_IN_FLIGHT_MAX,
        writes_bytes_max: int = WRITES_BYTES_MAX,
        memory_entries_max: int = MEMORY_ENTRIES_MAX,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        reads_batches: bool = True,
        yields: bool = True,
        paces_reads: bool = False,
    ) -> None:
        self._budgets = budgets
        self._reads_batches = reads_batches
        self._common = Common(
            resolve=resolve,
            timeout_s=timeout_s,
            writes_in_flight_max=writes_in_flight_max,
            writes_bytes_max=writes_bytes_max,
        )
        self.flow = FlowControl(yields=yields)
        self._sources: dict[BookieId, Source] = {}
        self._targets: dict[BookieId, TargetLane] = {}
        self._next_check: asyncio.TimerHandle | None = None
        self.totals = Totals()
        self.pace = Pace()
        self.memory = WindowGate(Window(count_max=memory_entries_max, bytes_max=memory_bytes_max))
        # A worker's pace is of copying: the reads of its checks are let pass.
        self._check_way = Way(self.pace, self.memory) if paces_reads else Way(self.memory)

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """Never raises for what a bookie did: the result says it. Cancelled, it ends at once."""
        job = Job(transfer, self.totals, way=self._way(transfer), check_way=self._check_way)
        if job.undecided_count == 0:
            return TransferResult()
        try:
            self._start(job)
            return await job.done
        finally:
            job.abandon()

    def source_health(self, bookie: BookieId) -> SourceHealth:
        """How the bookie does as a source."""
        source = self._sources.get(bookie)
        return SourceHealth() if source is None else source.source_health

    def pause(self) -> None:
        """Issue no new reads; what was asked before is still taken in and passed on."""
        self._common.is_paused = True

    def resume(self) -> None:
        self._common.is_paused = False
        for source in self._sources.values():
            source.wake()

    def bookie_returned(self, bookie: BookieId) -> None:
        """It registered anew: connect at once, and find out again whether it knows batch reads."""
        for lane in self._lanes():
            if lane.bookie == bookie:
                lane.forget_failures()

    async def close(self) -> None:
        """Drop every connection. What still runs ends as if its bookies had gone. Any number of
        times."""
        self._common.is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        self.pace.close()
        self.flow.close()
        for lane in self._lanes():
            await lane.close()

    def _way(self, transfer: Transfer) -> Way:
        """Scarcest first. Before it comes the pace of the source."""
        if transfer.target is None:
            return self._check_way
        adds = self.flow.of(transfer.target).adds
        return Way(adds, self.pace, self._target(transfer.target).gate, self.memory)

    def _start(self, job: Job) -> None:
        transfer = job.transfer
        for lane in self._lanes_to(transfer):
            lane.leave_if_elsewhere()
        if transfer.target is not None:
            job.writing = Writing(job, self._target(transfer.target))
        for asked, writing in ((transfer.reads, job.writing), (transfer.checks, None)):
            for bookie, entry_ids in asked.items():
                if entry_ids:
                    source = self._source(bookie)
                    is_batched = self._is_batched(transfer, bookie, entry_ids)
                    lane = source.batches if is_batched else source.singles
                    job.readings.append(lane.reading(job, entry_ids, writing))
        if job.writing is not None:
            job.writing.lane.begin(job.writing)
        for reading in job.readings:
            if not job.is_over:
                reading.lane.begin(reading)
        if self._next_check is None:
            self._check_progress()

    def _is_batched(self, transfer: Transfer, bookie: BookieId, entry_ids: Sequence[int]) -> bool:
        """Whether these entries are best read in batches."""
        may_batch = self._reads_batches and not self._source(bookie).batches.is_refused
        is_worth_it = transfer.entry_bytes_hint <= BATCH_ENTRY_BYTES_MAX and has_runs(entry_ids)
        return may_batch and is_worth_it

    def _source(self, bookie: BookieId) -> "Source":
        source = self._sources.get(bookie)
        if source is None:
            flow, budget = self.flow.of(bookie), self._budgets.reads(bookie)
            source = self._sources[bookie] = Source(bookie, self._common, budget, flow)
            flow.on_change(source.wake)
        return source

    def _target(self, bookie: BookieId) -> TargetLane:
        lane = self._targets.get(bookie)
        if lane is None:
            flow = self.flow.of(bookie)
            lane = self._targets[bookie] = TargetLane(bookie, self._common, flow)
            flow.on_change(lane.keep_to_limit)
        return lane

    def _check_progress(self) -> None:
        """The one timer: as long as there is anything to watch over."""
        loop = asyncio.get_running_loop()
        lanes = self._lanes()
        for lane in lanes:
            lane.leave_if_elsewhere()
            lane.check_progress(loop.time())
            lane.close_if_idle(loop.time())
        self.memory.unpark_if_free()
        self._next_check = None
        if any(lane.is_open or lane.is_busy for lane in lanes):
            delay_s = min(self._common.timeout_s / CHECKS_PER_TIMEOUT, CHECK_INTERVAL_MAX_S)
            self._next_check = loop.call_later(delay_s, self._check_progress)

    def _lanes_to(self, transfer: Transfer) -> Iterator[Lane]:
        """Yield the lanes that were made so far to the bookies of a transfer."""
        for bookie in {*transfer.reads, *transfer.checks}:
            if bookie in self._sources:
                yield from self._sources[bookie].lanes
        if transfer.target in self._targets:
            yield self._targets[transfer.target]

    def _lanes(self) -> list[Lane]:
        sources = self._sources.values()
        return [*(lane for source in sources for lane in source.lanes), *self._targets.values()]


class Source:
    """One bookie to read from: a connection for single entries, and one for batches."""

    def __init__(
        self, bookie: BookieId, common: Common, budget: ReadBudget, flow: BookieFlow
    ) -> None:
        self._budget = budget
        self.singles = SingleReads(bookie, common, budget, flow)
        self.batches = BatchReads(bookie, common, budget, flow, self.singles)

    @property
    def source_health(self) -> SourceHealth:
        """On both connections. The budget's bytes are what is asked of it, on whatever
        connection."""
        singles, batches = self.singles, self.batches
        return SourceHealth(
            is_ailing=singles.is_ailing or batches.is_ailing,
            waiting_bytes=singles.waiting_bytes + batches.waiting_bytes + self._budget.entry_bytes,
            reply_s=max(singles.reply_s, batches.reply_s),
        )

    def wake(self) -> None:
        for lane in self.lanes:
            lane.wake()

    @property
    def lanes(self) -> tuple[SingleReads, BatchReads]:
        return self.singles, self.batches
