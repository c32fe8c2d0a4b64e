"""Runs many transfers at once over shared connections to the bookies. Entry point of the package.

Promises:

- Rule S10: the reads in flight at one bookie and the bytes they request stay within its
  ``ReadBudget``, which the control path uses too. Entries in flight to a target stay within a
  window.
- A slow bookie costs only the transfers that need it: its windows follow the rate at which it
  replies (``limiters.BookieWindow``).
- Rules S7 and S12: digests are always verified, and entries are written with the bytes as read.
  ``source`` and ``batch_reads`` verify each reply with a ``DigestCheck`` of ``frames``.

Connections speak the V2 protocol, each either for reads or for adds. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ledgers.bookies import SourceHealth, Transfer, TransferResult
from ledgers.bulk.batch_reads import BATCH_ENTRY_BYTES_MAX, BatchReadConnection, has_runs
from ledgers.bulk.connection import BulkConnection, SharedState
from ledgers.bulk.flow_control import BookieFlow, FlowControl
from ledgers.bulk.limiters import (
    Budgets,
    LimiterChain,
    RateLimiter,
    ReadBudget,
    Window,
    WindowLimiter,
)
from ledgers.bulk.source import IMPATIENT_CHECKS, IMPATIENT_S, ReadPart, SourceConnection
from ledgers.bulk.target import TargetConnection, WritePart
from ledgers.bulk.transfer import Totals, TransferState
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.health import BookieHealth
from ledgers.host_names import Connector, connect
from ledgers.model import BookieId

TIMEOUT_S = 5.0
CHECKS_PER_TIMEOUT = 4
CHECK_INTERVAL_MAX_S = IMPATIENT_S / IMPATIENT_CHECKS
WRITES_IN_FLIGHT_MAX = 1_000
"""With 500, two sources were a quarter slower, because the target was idle at times."""
WRITES_BYTES_MAX = 8 * 1024 * 1024
MEMORY_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of all entries in flight, for any number of sources and targets. In measurements with
entries of 1 byte to 5 MiB a process grew by less than 64 MB."""
MEMORY_ENTRIES_MAX = 32_768
"""Entries in flight of the whole process. Each costs about 250 bytes in addition to its own."""


class BulkTransfers:
    """Runs transfers. Belongs to one event loop. ``rate_limit`` is the operator's."""

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
        limits_check_rate: bool = False,
        connector: Connector = connect,
        health: BookieHealth | None = None,
    ) -> None:
        """``timeout_s``: maximum time without a reply to a transfer, and to connect. ``writes_*``:
        per target, from before an entry is requested until it is acknowledged. ``memory_*``: the
        same for all targets together. ``reads_batches``: whether runs of entries are read in
        batches. ``limits_check_rate``: whether ``rate_limit`` applies to entries that are only
        verified."""
        self.budgets, self.resolve, self.connector = budgets, resolve, connector
        self.health = health or BookieHealth()
        self._reads_batches = reads_batches
        self._shared = SharedState(
            resolve=resolve,
            health=self.health,
            timeout_s=timeout_s,
            writes_in_flight_max=writes_in_flight_max,
            writes_bytes_max=writes_bytes_max,
            connector=connector,
        )
        self.flow = FlowControl(yields=yields)
        self._sources: dict[BookieId, Source] = {}
        self._targets: dict[BookieId, TargetConnection] = {}
        self._next_check: asyncio.TimerHandle | None = None
        self.totals = Totals()
        self.rate_limit = RateLimiter()
        self.memory = WindowLimiter(
            Window(count_max=memory_entries_max, bytes_max=memory_bytes_max)
        )
        self._check_limiters = (
            LimiterChain(self.rate_limit, self.memory)
            if limits_check_rate
            else LimiterChain(self.memory)
        )

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """Run one transfer. Errors of bookies are in the result. Cancelling ends it at once."""
        limiters = self._check_limiters
        if transfer.target is not None:  # without the rate limit of its sources: ``flow_control``
            adds = self.flow.of(transfer.target).adds
            window = self._target(transfer.target).limiter
            limiters = LimiterChain(adds, self.rate_limit, window, self.memory)
        state = TransferState(
            transfer, self.totals, limiters=limiters, check_limiters=self._check_limiters
        )
        if state.undecided_count == 0:
            return TransferResult()
        try:
            self._start(state)
            return await state.done
        finally:
            state.abandon()

    def source_health(self, bookie: BookieId) -> SourceHealth:
        """Return the health of the bookie as a source."""
        source = self._sources.get(bookie)
        if source is None:
            return SourceHealth()
        # The bytes in flight are those of the budget, because it covers all connections.
        waiting_bytes = sum(connection.waiting_bytes for connection in source.connections)
        return SourceHealth(
            is_unhealthy=self.health.is_unhealthy(bookie),
            waiting_bytes=waiting_bytes + self.budgets.reads(bookie).entry_bytes,
            reply_s=max(connection.reply_s for connection in source.connections),
        )

    def pause(self) -> None:
        """Send no new reads. Replies to earlier reads are still received and written."""
        self._shared.is_paused = True

    def resume(self) -> None:
        self._shared.is_paused = False
        for source in self._sources.values():
            source.wake()

    def bookie_returned(self, bookie: BookieId) -> None:
        """Allow connections to this bookie, which registered again, and try batch reads again."""
        self.health.forget(bookie)
        if bookie in self._sources:  # it may also have been upgraded
            self._sources[bookie].batches.refused_until_s = 0.0

    async def close(self) -> None:
        """Disconnect. Running transfers end as if their bookies had failed."""
        self._shared.is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        self.rate_limit.close()
        self.flow.close()
        for connection in self._connections():
            await connection.close()

    def _start(self, state: TransferState) -> None:
        transfer = state.transfer
        for bookie in {*transfer.reads, *transfer.checks}:
            if bookie in self._sources:
                for connection in self._sources[bookie].connections:
                    connection.drop_if_address_changed()
        if transfer.target in self._targets:
            self._targets[transfer.target].drop_if_address_changed()
        write_part = None
        if transfer.target is not None:
            write_part = state.write_part = WritePart(state, self._target(transfer.target))
        parts: list[ReadPart] = []
        for asked, destination in ((transfer.reads, write_part), (transfer.checks, None)):
            for bookie, entry_ids in asked.items():
                if entry_ids:
                    source = self._source(bookie)
                    is_batched = (
                        self._reads_batches
                        and not source.batches.is_refused
                        and transfer.entry_bytes_hint <= BATCH_ENTRY_BYTES_MAX
                        and has_runs(entry_ids)
                    )
                    reader: SourceConnection = source.batches if is_batched else source.singles
                    parts.append(reader.make_part(state, entry_ids, destination))
        state.read_parts.extend(parts)
        if write_part is not None:
            write_part.connection.begin(write_part)
        for part in parts:
            if not state.is_over:
                part.connection.begin(part)
        if self._next_check is None:
            self._check_progress()

    def _source(self, bookie: BookieId) -> Source:
        source = self._sources.get(bookie)
        if source is None:
            flow, budget = self.flow.of(bookie), self.budgets.reads(bookie)
            source = self._sources[bookie] = Source(bookie, self._shared, budget, flow)
            flow.listeners.append(source.wake)
        return source

    def _target(self, bookie: BookieId) -> TargetConnection:
        target = self._targets.get(bookie)
        if target is None:
            flow = self.flow.of(bookie)
            target = self._targets[bookie] = TargetConnection(bookie, self._shared, flow)
            flow.listeners.append(target.apply_limit)
        return target

    def _check_progress(self) -> None:
        """Check all connections for timeouts. The only timer; runs while any is open or busy."""
        loop = asyncio.get_running_loop()
        connections = self._connections()
        for connection in connections:
            connection.drop_if_address_changed()
            connection.check_progress(loop.time())
            connection.close_if_idle(loop.time())
        self.memory.wake_if_half_free()
        self._next_check = None
        if any(connection.is_open or connection.is_busy for connection in connections):
            delay_s = min(self._shared.timeout_s / CHECKS_PER_TIMEOUT, CHECK_INTERVAL_MAX_S)
            self._next_check = loop.call_later(delay_s, self._check_progress)

    def _connections(self) -> list[BulkConnection[Any]]:
        of_sources = (c for source in self._sources.values() for c in source.connections)
        return [*of_sources, *self._targets.values()]


class Source:
    """The two connections for reads from one bookie: for single entries, and for batches."""

    def __init__(
        self, bookie: BookieId, shared: SharedState, budget: ReadBudget, flow: BookieFlow
    ) -> None:
        self.singles = SourceConnection(bookie, shared, budget, flow)
        self.batches = BatchReadConnection(bookie, shared, budget, flow, self.singles)
        self.connections = (self.singles, self.batches)

    def wake(self) -> None:
        for connection in self.connections:
            connection.wake()
