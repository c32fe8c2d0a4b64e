"""Keeps the history bounded: the leader deletes segments that are too old, or too many in total.

A live session bounds its own segments. Those of ended sessions and of commands have no other owner.
A segment's age is that of its last write, by ZooKeeper's stamps. The size is only estimated by the
number of segments, because reading them all would cost more than it saves.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from ledgers.clock import Clock
from ledgers.errors import NoNodeError, UnauthorizedError, UnavailableError
from ledgers.store import Delete, MetadataStore, MultiFailed, Stat
from ledgers.tasks import gather_in_parts
from replication.history import READS_AT_ONCE
from replication.records import children_if_allowed, log_denied
from replication.transactions import Batcher
from replication.znodes import ClusterPaths

log = structlog.get_logger()

CLEAN_S = 600.0
KEPT_MS = 30 * 86_400_000
SEGMENTS_MAX = 1_000
"""Segments of all sessions and commands together: at most 64 MB, usually a tenth of that."""


def outdated(segments: Mapping[str, Stat], *, now_ms: int) -> list[str]:
    """Return the names of the segments to delete, oldest first."""
    by_age = sorted(segments, key=lambda name: segments[name].mtime_ms)
    surplus = max(0, len(by_age) - SEGMENTS_MAX)
    return [
        name
        for place, name in enumerate(by_age)
        if place < surplus or now_ms - segments[name].mtime_ms > KEPT_MS
    ]


@dataclass(frozen=True, slots=True)
class HistoryCleaner:
    """Deletes through ``batcher``, whose guards prove the leadership (rule S9)."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    clock: Clock

    async def run(self) -> None:
        """Clean regularly, until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            await self.clock.sleep(CLEAN_S)
            try:
                await self.clean()
            except UnavailableError as error:
                log.info("history.clean_failed", error=str(error), retry_s=CLEAN_S)

    async def clean(self) -> None:
        """Delete what is outdated. Raises UnavailableError."""
        directory, segments = self.paths.history, dict[str, Stat]()

        async def read_stat(name: str) -> None:
            with suppress(UnauthorizedError):
                if stat := await self.store.exists(f"{directory}/{name}"):
                    segments[name] = stat

        names = sorted(await children_if_allowed(self.store, directory))
        await gather_in_parts(read_stat, names, at_once=READS_AT_ONCE)
        for name in outdated(segments, now_ms=self.clock.wall_ms()):
            try:
                await self.batcher.send([Delete(path=f"{directory}/{name}")])
            except MultiFailed as failure:
                if isinstance(failure.cause, UnauthorizedError):  # others are not affected
                    log_denied(directory)
                elif not isinstance(failure.cause, NoNodeError):
                    raise failure.cause from failure
