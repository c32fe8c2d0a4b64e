"""Whether the feed is stalled, and how far its clients are behind: for operators.

``StallReporter`` writes the record ``<ur>/bookmender/feed-state`` while the feed is stalled, and
once more when it goes on. In normal operation nothing is written. ``ClientMeter`` sets the metric
of the lag of each client whose receipts are in ZooKeeper. Both are tasks of the leader.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import Gauge

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
from ledgers.store import ANY_VERSION, Create, MetadataStore, MultiFailed, Operation, SetData
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


class StallReporter:
    """Tells operators when the feed stalls, why, and when it goes on."""

    def __init__(
        self,
        state: Callable[[], FeedStateRecord],
        *,
        batcher: Batcher,
        paths: ClusterPaths,
        clock: Clock,
    ) -> None:
        """``batcher``: proves the leadership."""
        self._state, self._batcher, self._paths, self._clock = state, batcher, paths, clock
        self._written: FeedStateRecord | None = None
        """The record in ZooKeeper, as far as known. A resumption is written until a write succeeds.
        Otherwise the record would say for ever that the feed is stalled."""
        self._retry_ms = 0
        """After a failed write: when the next one follows."""
        self._logged: StallReason | None = None

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            while True:
                await self.run_once()
                await self._clock.sleep(CHECK_S)
        finally:
            STALLED.set(0)

    async def run_once(self) -> None:
        """Log and write what has changed."""
        state = self._state()
        since_ms = state.stalled_since_ms
        STALLED.set(0 if since_ms is None else max(0, state.written_ms - since_ms) / 1000)
        if state.reason is not self._logged:
            self._log(state)
        if self._is_due(state):
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
        try:
            await self._send(SetData(path=path, data=data, version=ANY_VERSION))
        except NoNodeError:
            await self._send(Create(path=path, data=data))

    async def _send(self, write: Operation) -> None:
        try:
            await self._batcher.send([write])
        except MultiFailed as failure:
            raise failure.cause from failure

    def _log(self, state: FeedStateRecord) -> None:
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

    def _is_due(self, state: FeedStateRecord) -> bool:
        before = self._written
        if state.written_ms < self._retry_ms:
            return False
        if before is None or not before.is_stalled:
            return state.is_stalled
        is_due = state.written_ms - before.written_ms >= WRITE_INTERVAL_S * 1000
        return is_due or not state.is_stalled or state.reason is not before.reason


class RecentCheckpoints:
    """Ids and times of the latest checkpoints, to find how far a client is behind."""

    def __init__(self) -> None:
        self._recent: deque[tuple[CheckpointId, int]] = deque(maxlen=RECENT_MAX)

    def add(self, checkpoint_id: CheckpointId, time_ms: int) -> None:
        """Add the latest checkpoint; nothing if it was added before."""
        if not self._recent or checkpoint_id > self._recent[-1][0]:
            self._recent.append((checkpoint_id, time_ms))

    def clear(self) -> None:
        """Forget all: another feed begins."""
        self._recent.clear()

    def lag_s(self, low_watermark: CheckpointId, *, now_ms: int) -> float:
        """Return the age of the first checkpoint after the watermark; 0 if there is none. A lower
        bound if older checkpoints are not remembered."""
        first = bisect_right(self._recent, low_watermark, key=lambda each: each[0])
        if first == len(self._recent):
            return 0.0
        return max(0.0, (now_ms - self._recent[first][1]) / 1000)


class ClientMeter:
    """Sets the metric of the lag of each client."""

    def __init__(
        self,
        recent: RecentCheckpoints,
        generation: Callable[[], int],
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        clock: Clock,
    ) -> None:
        """``generation``: of the feed that is written now; 0: none is."""
        self._recent, self._generation, self._clock = recent, generation, clock
        self._table = ZooKeeperClientTable(store, folder=paths.feed_clients)
        self._metered: set[str] = set()

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError."""
        try:
            while True:
                try:
                    await self.run_once()
                except SessionLostError:
                    raise
                except BookmenderError as error:
                    log.debug("feed.clients_unread", error=str(error))
                    self._show({})  # rather no lag than an old one
                await self._clock.sleep(CLIENTS_INTERVAL_S)
        finally:
            self._show({})

    async def run_once(self) -> None:
        generation = self._generation()
        clients = (
            await self._table.list(count_max=CLIENTS_MAX, skip_unreadable=True)
            if generation
            else ()
        )
        now_ms = self._clock.wall_ms()
        self._show(lags(clients, self._recent, generation=generation, now_ms=now_ms))

    def _show(self, lags_s: dict[str, float]) -> None:
        for name in self._metered - lags_s.keys():
            CLIENT_LAG.remove(name)
        for name, lag_s in lags_s.items():
            CLIENT_LAG.labels(client=name).set(lag_s)
        self._metered = set(lags_s)


def lags(
    clients: Sequence[ClientSummary],
    recent: RecentCheckpoints,
    *,
    generation: int,
    now_ms: int,
) -> dict[str, float]:
    """Return the lag of each client of this generation that has a low watermark."""
    return {
        each.name: recent.lag_s(each.low_watermark, now_ms=now_ms)
        for each in clients
        if each.generation == generation and each.low_watermark is not None
    }
