"""Keeps the history bounded: the leader deletes segments that are too old, or too many in total.

A live session bounds its own segments. Those of ended sessions and of commands have no other owner.
A segment's age is that of its last write, by ZooKeeper's stamps. The size is only estimated by the
number of segments, because reading them all would cost more than it saves.
"""

from collections.abc import Mapping
from contextlib import suppress

import structlog

from ledgers.clock import Clock
from ledgers.errors import NoNodeError, UnauthorizedError, UnavailableError
from ledgers.store import Delete, MetadataStore, MultiFailed, Stat, children_if_any
from ledgers.tasks import gather_in_parts
from replication.history import READS_AT_ONCE
from replication.transactions import Batcher
from replication.znodes import ACL_HINT, ClusterPaths

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


class HistoryCleaner:
    """Deletes through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths, clock: Clock
    ) -> None:
        self._store, self._batcher, self._directory = store, batcher, paths.history
        self._clock = clock
        self._has_told = False
        """The log already says that access is denied."""

    async def run(self) -> None:
        """Clean regularly, until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            await self._clock.sleep(CLEAN_S)
            try:
                await self.clean()
                self._has_told = False
            except UnavailableError as error:
                log.info("history.clean_failed", error=str(error), retry_s=CLEAN_S)
            except UnauthorizedError as error:
                self._tell_denied(error)

    async def clean(self) -> None:
        """Delete what is outdated. Raises UnavailableError, and UnauthorizedError if an ACL denies
        the listing."""
        names = sorted(await children_if_any(self._store, self._directory))
        stats = await gather_in_parts(self._stat, names, at_once=READS_AT_ONCE)
        segments = {name: stat for name, stat in zip(names, stats, strict=True) if stat is not None}
        for name in outdated(segments, now_ms=self._clock.wall_ms()):
            await self._delete(f"{self._directory}/{name}")

    async def _stat(self, name: str) -> Stat | None:
        with suppress(UnauthorizedError):
            return await self._store.exists(f"{self._directory}/{name}")
        return None

    async def _delete(self, path: str) -> None:
        try:
            await self._batcher.send([Delete(path=path)])
        except MultiFailed as failure:
            if isinstance(failure.cause, UnauthorizedError):  # other segments are not affected
                self._tell_denied(failure.cause)
            elif not isinstance(failure.cause, NoNodeError):
                raise failure.cause from failure

    def _tell_denied(self, error: UnauthorizedError) -> None:
        if not self._has_told:
            log.warning(
                "record.access_denied",
                path=self._directory,
                error=str(error),
                next_step=ACL_HINT,
            )
        self._has_told = True
