"""Whether the feed is stalled, and how far its clients are behind: for operators.

``FeedReporter`` is a task of the leader. It writes the record ``<ur>/bookmender/feed-state`` while
the feed is stalled, and once more when it goes on. In normal operation nothing is written. It sets
the metric of the lag of each client whose receipts are in ZooKeeper.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from prometheus_client import Gauge

from auditor.ledger_map_updater import LedgerMapUpdater
from checkpoints.errors import RestoredError
from checkpoints.leader_state import LeaderState
from checkpoints.model import CheckpointId
from checkpoints.receipts import ClientSummary
from checkpoints.stores.zookeeper import ZooKeeperClientTable
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    LeadershipLostError,
    NoNodeError,
    SessionLostError,
)
from ledgers.store import ANY_VERSION, Create, MetadataStore, MultiFailed, SetData
from ledgers.tasks import task_scope
from replication.records import Count, Record, TimeMs, read_record
from replication.transactions import Batcher
from replication.znodes import ClusterPaths

log = structlog.get_logger()
STALLED = Gauge(
    "bookmender_feed_stalled_seconds",
    "How long the leader has published nothing in the feed although something waits; 0 while it is "
    "not stalled.",
)
CLIENT_LAG = Gauge(
    "bookmender_feed_client_lag_seconds",
    "Age of the oldest checkpoint that lacks a receipt of this client. Only clients whose receipts "
    "are in ZooKeeper, at most 50. After a change of the leader it is a lower bound.",
    ["client"],
)

STALLED_AFTER_S = 60.0
CHECK_S = 1.0
WRITE_INTERVAL_S = 10.0
"""Interval of writes while the feed is stalled."""
DETAIL_CHARS_MAX = 1_000
CLIENTS_INTERVAL_S = 30.0
CLIENTS_MAX = 50
RECENT_MAX = 10_000
"""Checkpoints that are remembered for the lag of clients."""


class StallReason(enum.Enum):
    """Why nothing is published."""

    ACCESS_DENIED = "access-denied"
    """An ACL denies access to the root of the ledgers. All changes are unknown."""
    LEDGER_MAP = "ledger-map"
    """The leader still reads the metadata of all ledgers."""
    WRITE_FAILED = "write-failed"
    """The feed's ledgers cannot be written or read."""
    RESTORED = "zookeeper-restored"
    """ZooKeeper's transactions are older than the log, as after a restore from a backup."""
    SLOW = "slow"
    """No error occurred. Bookies or ZooKeeper answer slowly, or there are too many changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStateRecord(Record):
    """``session_id``: of the leader that wrote it. ``stalled_since_ms``: None if the feed is not
    stalled. ``detail``: the error, if there is one. ``path``: the znode that it concerns."""

    session_id: int
    written_ms: TimeMs
    pending_count: Count = 0
    stalled_since_ms: TimeMs | None = None
    reason: StallReason | None = None
    detail: str = ""
    path: str = ""

    @property
    def is_stalled(self) -> bool:
        return self.stalled_since_ms is not None


async def read_feed_state(store: MetadataStore, paths: ClusterPaths) -> FeedStateRecord | None:
    """Return None if the record is absent or unreadable."""
    return await read_record(store, paths.feed_state, FeedStateRecord.parse)


class FeedReporter:
    """Tells operators when the feed stalls, why, and when it goes on, and the lag of its clients.

    The publisher tells it what happens, and sets ``error``.
    """

    def __init__(
        self,
        state: LeaderState,
        updater: LedgerMapUpdater,
        *,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        clock: Clock,
    ) -> None:
        """``batcher``: proves the leadership."""
        self._state, self._updater = state, updater
        self._store, self._batcher, self._paths, self._clock = store, batcher, paths, clock
        self._table = ZooKeeperClientTable(store, folder=paths.feed_clients)
        self.error: Exception | None = None
        """The last failure since something was published."""
        self._waits_since_s: float | None = None
        """Since when something waits and nothing is published; None: nothing waits."""
        self._recent: deque[tuple[CheckpointId, int]] = deque(maxlen=RECENT_MAX)
        """Ids and times of the latest checkpoints, to find how far a client is behind."""
        self._written: FeedStateRecord | None = None
        """The record in ZooKeeper, as far as known. A resumption is written until a write succeeds.
        Otherwise the record would say for ever that the feed is stalled."""
        self._retry_ms = 0
        """After a failed write: when the next one follows."""
        self._logged: StallReason | None = None
        self._metered: set[str] = set()

    # --- What the publisher does ----------------------------------------------------------------

    def waits(self) -> None:
        """Note that something is to be published."""
        if self._waits_since_s is None:
            self._waits_since_s = self._clock.now_s()

    def idles(self) -> None:
        """Note that nothing is to be published, or that the feed is disabled."""
        self._waits_since_s = self.error = None

    def published(self, checkpoint_id: CheckpointId, time_ms: int) -> None:
        """Note a checkpoint of this leader. More may wait."""
        self.remember(checkpoint_id, time_ms)
        self.error, self._waits_since_s = None, self._clock.now_s()

    def remember(self, checkpoint_id: CheckpointId, time_ms: int) -> None:
        """Add the latest checkpoint; nothing if it was added before."""
        if not self._recent or checkpoint_id > self._recent[-1][0]:
            self._recent.append((checkpoint_id, time_ms))

    def forget(self) -> None:
        """Forget all checkpoints: another feed begins."""
        self._recent.clear()

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            async with task_scope() as scope:
                scope.start(self._meter_clients())
                while True:
                    await self.report_stall()
                    await self._clock.sleep(CHECK_S)
        finally:
            STALLED.set(0)
            self._show_lags({})

    # --- Stalls -----------------------------------------------------------------------------------

    def stall_state(self) -> FeedStateRecord:
        """Return whether the feed is stalled now, and why."""
        now_ms, waits_since_s = self._clock.wall_ms(), self._waits_since_s
        waited_s = 0.0 if waits_since_s is None else self._clock.now_s() - waits_since_s
        record = FeedStateRecord(
            session_id=self._store.session_id,
            written_ms=now_ms,
            pending_count=self._state.pending_count,
        )
        if waited_s < STALLED_AFTER_S:
            return record
        error: Exception | None = self._updater.refusal
        if error is not None:
            reason = StallReason.ACCESS_DENIED
        elif isinstance(error := self.error, RestoredError):
            reason = StallReason.RESTORED
        elif error is not None:
            reason = StallReason.WRITE_FAILED
        else:
            reason = StallReason.SLOW if self._updater.is_gapless else StallReason.LEDGER_MAP
        known = error if isinstance(error, BookmenderError) else None
        return replace(
            record,
            stalled_since_ms=max(0, now_ms - round(waited_s * 1000)),
            reason=reason,
            detail="" if known is None else str(known)[:DETAIL_CHARS_MAX],
            path="" if known is None else str(known.context.get("path", "")),
        )

    async def report_stall(self) -> None:
        """Log and write what has changed."""
        state = self.stall_state()
        since_ms = state.stalled_since_ms
        STALLED.set(0 if since_ms is None else max(0, state.written_ms - since_ms) / 1000)
        if state.reason is not self._logged:
            if state.reason is None:
                log.info("feed.resumed")
            else:
                log.warning(
                    "feed.stalled",
                    reason=state.reason.value,
                    error=state.detail or None,
                    pending_count=state.pending_count,
                    next_step="see the condition FEED_STALLED of the cluster's status",
                )
            self._logged = state.reason
        if not self._is_due(state):
            return
        try:
            await self._write(state.to_json())
        except (SessionLostError, LeadershipLostError):
            raise
        except BookmenderError as error:
            log.warning("feed.state_write_failed", error=str(error), retry_s=WRITE_INTERVAL_S)
            self._retry_ms = state.written_ms + round(WRITE_INTERVAL_S * 1000)
        else:
            self._written, self._retry_ms = state, 0

    async def _write(self, data: bytes) -> None:
        path = self._paths.feed_state
        for write in (
            SetData(path=path, data=data, version=ANY_VERSION),
            Create(path=path, data=data),
        ):
            try:
                await self._batcher.send([write])
            except MultiFailed as failure:
                if isinstance(write, Create) or not isinstance(failure.cause, NoNodeError):
                    raise failure.cause from failure
            else:
                return

    def _is_due(self, state: FeedStateRecord) -> bool:
        before = self._written
        if state.written_ms < self._retry_ms:
            return False
        if before is None or not before.is_stalled:
            return state.is_stalled
        is_due = state.written_ms - before.written_ms >= WRITE_INTERVAL_S * 1000
        return is_due or not state.is_stalled or state.reason is not before.reason

    # --- Clients ----------------------------------------------------------------------------------

    async def _meter_clients(self) -> None:
        while True:
            try:
                await self.meter_clients_once()
            except SessionLostError:
                raise
            except BookmenderError as error:
                log.debug("feed.clients_unread", error=str(error))
                self._show_lags({})  # rather no lag than an old one
            await self._clock.sleep(CLIENTS_INTERVAL_S)

    async def meter_clients_once(self) -> None:
        """Set the metric of the lag of each client of the present feed."""
        clients: Sequence[ClientSummary] = ()
        if self._state.chain.is_enabled and self._state.generation:
            clients = await self._table.list(count_max=CLIENTS_MAX, skip_unreadable=True)
        self._show_lags(self.lags(clients))

    def lags(self, clients: Sequence[ClientSummary]) -> dict[str, float]:
        """Return the lag of each client of this feed that has a low watermark: the age of the first
        checkpoint after it, in seconds. A lower bound if older checkpoints are not remembered."""
        found = {}
        for client in clients:
            if client.generation != self._state.generation or client.low_watermark is None:
                continue
            first = bisect_right(self._recent, client.low_watermark, key=lambda each: each[0])
            found[client.name] = 0.0
            if first < len(self._recent):
                age_ms = self._clock.wall_ms() - self._recent[first][1]
                found[client.name] = max(0.0, age_ms / 1000)
        return found

    def _show_lags(self, lags_s: dict[str, float]) -> None:
        for name in self._metered - lags_s.keys():
            CLIENT_LAG.remove(name)
        for name, lag_s in lags_s.items():
            CLIENT_LAG.labels(client=name).set(lag_s)
        self._metered = set(lags_s)
