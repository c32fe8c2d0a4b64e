"""Free disk space of the bookies, so that repairs do not fill their disks.

Every possible target is asked. A bookie turns read-only when a disk is 95 % full (its
diskUsageThreshold), and its clients lose it. So copies go only to bookies with more free space than
the floor (rule S11). A bookie that does not answer remains a possible target.
"""

import asyncio
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from ledgers.bookies import Bookies, DiskSpace
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, SecureConnectionError
from ledgers.health import BookieHealth
from ledgers.model import BookieId
from replication.cluster import ViewSource

log = structlog.get_logger()

INTERVAL_S = 60.0
"""Average interval between two questions to a bookie."""
JITTER = 0.2
"""Random variation of the interval, so that the nodes do not ask at the same time."""
NEAR_INTERVAL_S = 10.0
"""Interval for a bookie near the floor, which the copies of a minute could fill."""
NEAR_FACTOR = 2.0
"""A bookie is near the floor if less than this multiple of the floor is free."""
STALE_S = 600.0
"""Time that the last answer of a bookie is used if it does not answer any more."""
START_TIMEOUT_S = 5.0
"""Maximum time that the start of a worker waits for the first answers."""
BOOKIES_AT_ONCE = 16


def spare_bytes(space: DiskSpace | None, *, floor_share: float) -> int | None:
    """Return the free bytes beyond the floor, negative below it; None if unknown or without a
    floor.

    ``floor_share``: of the total space; 0: no floor.
    """
    if space is None or not floor_share:
        return None
    return math.floor(space.free_bytes - floor_share * space.total_bytes)


def is_short(space: DiskSpace | None, *, floor_share: float) -> bool:
    """Return True if less than the floor is known to be free."""
    spare = spare_bytes(space, floor_share=floor_share)
    return spare is not None and spare < 0


@dataclass(slots=True, eq=False)
class DiskSpaceSource:
    """The disk space that the bookies reported last, kept up to date by ``run``.

    ``health``: receives bookies that require authentication.
    """

    bookies: Bookies
    views: ViewSource
    floor_share: float
    clock: Clock
    rng: random.Random
    health: BookieHealth | None = None
    disk_spaces: dict[BookieId, DiskSpace] = field(default_factory=dict, init=False)
    _told_at_s: dict[BookieId, float] = field(default_factory=dict, init=False)
    _landed_bytes: Counter[BookieId] = field(default_factory=Counter, init=False)
    """Bytes of our copies since the last answered question."""
    _due_at_s: dict[BookieId, float] = field(default_factory=dict, init=False)
    _short: frozenset[BookieId] = field(default=frozenset(), init=False)

    def free_bytes(self, bookie: BookieId) -> int | None:
        """Return the free bytes, less our copies since; None if unknown."""
        space = self.disk_spaces.get(bookie)
        return None if space is None else max(0, space.free_bytes - self._landed_bytes[bookie])

    def spare_bytes(self, bookie: BookieId) -> int | None:
        """Return the free bytes beyond the floor, less our copies since; None if unknown."""
        spare = spare_bytes(self.disk_spaces.get(bookie), floor_share=self.floor_share)
        return None if spare is None else spare - self._landed_bytes[bookie]

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        """Count a copy that was written there, until the bookie is asked again."""
        self._landed_bytes[bookie] += byte_count

    async def start(self) -> None:
        """Ask all bookies before the first placement. Does not wait for slow bookies."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.ask_due()

    async def run(self) -> None:
        """Ask bookies at intervals, until cancelled."""
        while True:
            seen = self.views.change_count
            await self.ask_due()
            now_s = self.clock.now_s()
            next_s = min(self._due_at_s.values(), default=now_s + INTERVAL_S)
            await self.views.wait_change(seen, timeout_s=next_s - now_s)

    async def ask_due(self) -> None:
        """Ask the possible targets that are due, and forget other bookies."""
        receiving, now_s = self.views.current.receiving, self.clock.now_s()
        for bookie in self._due_at_s.keys() - receiving:
            del self._due_at_s[bookie], self._landed_bytes[bookie]
        for bookie, told_at_s in list(self._told_at_s.items()):
            if bookie not in receiving or now_s - told_at_s > STALE_S:
                del self._told_at_s[bookie], self.disk_spaces[bookie]
        due = sorted(b for b in receiving if self._due_at_s.get(b, now_s) <= now_s)
        limit = asyncio.Semaphore(BOOKIES_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for bookie in due:
                tasks.create_task(self._ask(bookie, limit))
        self._log_changes()

    async def _ask(self, bookie: BookieId, limit: asyncio.Semaphore) -> None:
        async with limit:
            landed_bytes = self._landed_bytes[bookie]
            try:
                self.disk_spaces[bookie] = await self.bookies.room(bookie)
                self._landed_bytes[bookie] -= landed_bytes
                self._told_at_s[bookie] = self.clock.now_s()
            except SecureConnectionError as error:
                # A bookie that requires authentication only closes connections over V2; this V3
                # request shows the reason.
                if self.health is not None:
                    self.health.note_silence(bookie, str(error.args[0]))
            except BookmenderError as error:  # busy, absent or too old; it is asked again later
                log.debug("bookie.disk_space_unknown", bookie=bookie, error=str(error))
        space, near_share = self.disk_spaces.get(bookie), NEAR_FACTOR * self.floor_share
        interval_s = NEAR_INTERVAL_S if is_short(space, floor_share=near_share) else INTERVAL_S
        jitter = self.rng.uniform(1 - JITTER, 1 + JITTER)
        self._due_at_s[bookie] = self.clock.now_s() + interval_s * jitter

    def _log_changes(self) -> None:
        spaces, before = self.disk_spaces, self._short
        share = self.floor_share
        self._short = frozenset(
            b for b, space in spaces.items() if is_short(space, floor_share=share)
        )
        for bookie in sorted(self._short - before):
            log.warning(
                "bookie.disk_space_low",
                bookie=bookie,
                free_bytes=spaces[bookie].free_bytes,
                total_bytes=spaces[bookie].total_bytes,
                floor_share=share,
            )
        for bookie in sorted(before - self._short):
            log.info("bookie.disk_space_recovered", bookie=bookie)
