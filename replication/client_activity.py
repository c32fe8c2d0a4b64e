"""The record of client activity: ``<ur>/bookmender/activity``, versioned JSON, written by the
leader.

The leader watches open ledgers for new entries (``auditor.activity``) and lists the bookies with
active clients. Workers limit their rates accordingly (``ledgers.bulk.flow_control``). The leader
rewrites the record every few seconds; an older record is ignored, because its leader may be dead.
"""

import asyncio
from dataclasses import dataclass
from typing import Annotated

import structlog
from msgspec import Meta

from ledgers.bulk.flow_control import Activity
from ledgers.clock import Clock
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import Watching
from replication.records import Record, read_stored
from replication.znodes import INT_MAX, ClusterPaths

log = structlog.get_logger()

WRITTEN_EVERY_S = 3.0
"""Maximum interval between two writes while the leader watches."""
STALE_AFTER_S = 10.0
AGE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientActivity(Record):
    """The bookies with and without active clients. A bookie in neither set is unknown.
    ``copying_node_count``: number of nodes that copy now and share the rates, at least 1."""

    active: frozenset[BookieId] = frozenset()
    quiet: frozenset[BookieId] = frozenset()
    copying_node_count: Annotated[int, Meta(ge=1, le=INT_MAX)] = 1

    def of(self, bookie: BookieId) -> Activity:
        if bookie in self.active:
            return Activity.ACTIVE
        return Activity.QUIET if bookie in self.quiet else Activity.UNKNOWN


async def read_activity(
    store: MetadataStore, paths: ClusterPaths, *, now_ms: int
) -> ClientActivity | None:
    """Return the current record; None if it is missing, too old or unreadable. ``now_ms``: the time
    by ZooKeeper's clock. Raises UnavailableError."""
    stored = await read_stored(store, paths.activity, ClientActivity.parse)
    is_old = stored.stat is None or now_ms - stored.stat.mtime_ms > STALE_AFTER_S * 1_000
    return None if is_old else stored.value


class ActivitySource(Watching):
    """The current record, kept up to date by ``run``. ``current`` is None while there is none."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        """``clock``: a clock whose wall time is ZooKeeper's (``nodes.SharedClock``)."""
        super().__init__(clock)
        self._store, self._paths = store, paths
        self.current: ClientActivity | None = None
        self._read_s = 0.0

    async def run(self) -> None:
        """Keep the record up to date until the session ends. Raises SessionLostError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._store.watch(self._paths.activity), self._read))
            tasks.create_task(self._age())

    async def _read(self) -> None:
        found = await read_activity(self._store, self._paths, now_ms=self._clock.wall_ms())
        self._read_s = self._clock.now_s()
        self._show(found)

    def _log_failure(self, error: BookmenderError) -> None:
        log.debug("activity.read_failed", error=str(error))  # an old record is dropped in time

    async def _age(self) -> None:
        while True:
            await self._clock.sleep(AGE_INTERVAL_S)
            if self._clock.now_s() - self._read_s > STALE_AFTER_S:
                self._show(None)

    def _show(self, found: ClientActivity | None) -> None:
        if found != self.current:
            self.current = found
            self._notify_change()
