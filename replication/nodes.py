"""Sessions and their clock: one ephemeral znode for each session, below ``<ur>/bookmender/nodes``.

``Membership`` owns this session's znode, the proof of rule S3. Every write under a lock, or as
leader, is a multi that also checks the znode. kazoo may replace an expired session unnoticed, but
it cannot bring this znode back.

``SharedClock`` is the wall-clock time that all nodes agree on: ZooKeeper's. One host writes the end
of a safety hold, a maintenance window or a retry, and other hosts act on it. A host whose clock is
an hour ahead would end a hold too early, and fence. So every session starts from the time stamp
(``mtime``) of its own write, and adds the elapsed time. If the servers' clocks differ, the leading
server's counts.
"""

import asyncio
import enum
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from ledgers.clock import Clock
from ledgers.errors import SessionLostError, UnavailableError
from ledgers.store import ANY_VERSION, Check, MetadataStore, children_if_any
from replication.records import Count, Record, TimeMs, read_stored
from replication.transactions import Guard
from replication.znodes import ClusterPaths

log = structlog.get_logger()

SKEW_TOLD_S = 5.0
"""A clock that differs by this much is reported."""
ROUND_TRIP_GOOD_S = 0.2
TRIES_MAX = 3
"""Slow writes are repeated. The one with the shortest round trip counts."""
SYNCHRONISE_INTERVAL_S = 3_600.0
"""Interval of synchronisation. Monotonic clocks drift by some seconds a day."""


class SharedClock:
    """A ``Clock`` whose wall-clock time is ZooKeeper's; until it is synchronised, this host's."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._server_ms, self._at_s = 0.0, 0.0
        """ZooKeeper's time, and the monotonic time at which it was read."""
        self._is_synchronised = self._is_skewed = False

    def now_s(self) -> float:
        return self._own.now_s()

    def wall_ms(self) -> int:
        """Return the milliseconds since 1970 by ZooKeeper's clock."""
        if not self._is_synchronised:
            return self._own.wall_ms()
        return int(self._server_ms + (self.now_s() - self._at_s) * 1000)

    async def sleep(self, duration_s: float) -> None:
        await self._own.sleep(duration_s)

    @property
    def skew_s(self) -> float:
        """Return how far this host's clock is ahead of ZooKeeper's; negative: behind."""
        return (self._own.wall_ms() - self.wall_ms()) / 1000

    async def synchronise(self, store: MetadataStore, path: str, data: bytes) -> None:
        """Write ``data`` to our own znode, and set this clock by the time stamp that the server
        gives the write.

        The error is at most half a round trip. Raises UnavailableError, NoNodeError.
        """
        best_s = float("inf")
        for _ in range(TRIES_MAX):
            sent_s = self.now_s()
            stat = await store.set(path, data, version=ANY_VERSION)
            replied_s = self.now_s()
            if replied_s - sent_s < best_s:
                best_s = replied_s - sent_s
                self._server_ms, self._at_s = stat.mtime_ms, (sent_s + replied_s) / 2
                self._is_synchronised = True
            if best_s <= ROUND_TRIP_GOOD_S:
                break
        was_skewed, self._is_skewed = self._is_skewed, abs(self.skew_s) >= SKEW_TOLD_S
        if self._is_skewed and not was_skewed:
            log.warning(
                "clock.skewed",
                skew_s=round(self.skew_s, 1),
                next_step="synchronise this host's clock; until then ZooKeeper's time is used",
            )


class Role(enum.Enum):
    """The role that a session belongs to."""

    AUDITOR = "auditor"
    WORKER = "worker"
    HAND = "hand"
    """A repair by hand: it reads from bookies as a worker does, but has no share of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo(Record):
    """A session's description of itself, for people and for dividing limits (rule S10)."""

    role: Role
    host: str
    pid: Count
    bookie_id: str | None = None
    started_ms: TimeMs


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A registered session of bookmender."""

    info: NodeInfo
    session_id: int


@dataclass(slots=True)
class Membership:
    """This session's znode, and what it knows of other sessions."""

    path: str
    _store: MetadataStore
    _paths: ClusterPaths
    _info: NodeInfo
    _known: dict[str, LiveNode | None] = field(default_factory=dict)
    """By znode name; None for an unreadable one. The data of a znode never changes."""

    @classmethod
    async def join(cls, store: MetadataStore, paths: ClusterPaths, info: NodeInfo) -> "Membership":
        path = f"{paths.nodes}/{uuid.uuid4()}"
        await store.create(path, info.to_json(), is_ephemeral=True, with_parents=True)
        return cls(path, store, paths, info)

    async def synchronise(self, clock: SharedClock) -> None:
        """Synchronise the clock by a write to this session's znode."""
        await clock.synchronise(self._store, self.path, self._info.to_json())

    async def keep_synchronised(self, clock: SharedClock) -> None:
        """Synchronise at intervals, until cancelled. Raises SessionLostError."""
        while True:
            await clock.sleep(SYNCHRONISE_INTERVAL_S)
            try:
                await self.synchronise(clock)
            except UnavailableError as error:
                log.info("clock.sync_failed", error=str(error))

    @property
    def uuid(self) -> str:
        """The name of the session's znode."""
        return self.path.rpartition("/")[2]

    @property
    def guard(self) -> Guard:
        """The guard of every write under a lock or as leader (rule S3)."""
        return Guard(check=Check(path=self.path), error=SessionLostError)

    async def live_nodes(self) -> list[LiveNode]:
        """Return all registered sessions, including this one.

        Raises SessionLostError if this session's own znode was deleted. Every write would fail by
        its guard (rule S3), and the other nodes would divide the limits among too few sessions
        (rule S10). So this session ends, and the next one registers again.
        """
        nodes = await live_nodes(self._store, self._paths, self._known)
        if self.uuid not in self._known:
            raise SessionLostError("the znode of this session was deleted", path=self.path)
        return nodes

    async def reader_count(self) -> int:
        """Return the number of processes that read from bookies (rule S10)."""
        executors = await children_if_any(self._store, self._paths.fsck_executors)
        return reader_count(await self.live_nodes(), executor_count=len(executors))

    async def worker_count(self) -> int:
        """Return the number of workers, at least 1."""
        return max(1, sum(node.info.role is Role.WORKER for node in await self.live_nodes()))


def reader_count(nodes: Iterable[LiveNode], *, executor_count: int) -> int:
    """Return how many processes share the limit of reads at a bookie (rule S10): workers, repairs
    by hand, executors of fsck, and one for the checks of the leader."""
    return sum(node.info.role is not Role.AUDITOR for node in nodes) + executor_count + 1


async def live_nodes(
    store: MetadataStore, paths: ClusterPaths, known: dict[str, LiveNode | None] | None = None
) -> list[LiveNode]:
    """Return the registered sessions. ``known``: a cache of their data."""
    known = {} if known is None else known
    names = await children_if_any(store, paths.nodes)
    for gone in known.keys() - set(names):
        del known[gone]
    new = [name for name in names if name not in known]
    # Concurrently, so that the store can batch the reads: N new nodes read N² znodes.
    found = await asyncio.gather(
        *(read_stored(store, f"{paths.nodes}/{name}", NodeInfo.parse) for name in new)
    )
    for name, stored in zip(new, found, strict=True):
        known[name] = None
        if stored.value is not None and stored.stat is not None:
            known[name] = LiveNode(info=stored.value, session_id=stored.stat.ephemeral_owner)
    return [node for name in names if (node := known[name]) is not None]
