"""The wall-clock time that all nodes agree on: ZooKeeper's.

Safety holds, maintenance windows, notes of the next try: one host writes until when they last, and
others act on it. By its own clock, a host that is an hour ahead would take a hold for over, and
fence. So every session takes its wall-clock time from ZooKeeper: the server stamps each write
(``mtime``), and elapsed time is added to the stamp of a write of our own. Where the servers' clocks
differ, the leading server's counts.
"""

import structlog

from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.store import ANY_VERSION, MetadataStore

log = structlog.get_logger()

SKEW_TOLD_S = 5.0
"""A host's clock that is so far off is reported."""
ROUND_TRIP_GOOD_S = 0.2
TRIES_MAX = 3
"""Writes whose replies took longer are repeated; the one with the shortest round trip counts."""
SYNCHRONISE_INTERVAL_S = 3_600.0
"""Between two looks at ZooKeeper's clock: monotonic clocks drift by some seconds a day."""


class SharedClock:
    """A ``Clock`` whose wall-clock time is ZooKeeper's, once synchronised; until then, this
    host's."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._server_ms, self._at_s = 0.0, 0.0
        """ZooKeeper's time, and the monotonic time at which it was so."""
        self._is_synchronised = False
        self._has_told = False

    def now_s(self) -> float:
        return self._own.now_s()

    def wall_ms(self) -> int:
        """Milliseconds since 1970, by ZooKeeper."""
        if not self._is_synchronised:
            return self._own.wall_ms()
        return int(self._server_ms + (self.now_s() - self._at_s) * 1000)

    async def sleep(self, duration_s: float) -> None:
        await self._own.sleep(duration_s)

    @property
    def skew_s(self) -> float:
        """How far this host's clock is ahead of ZooKeeper's; negative: behind."""
        return (self._own.wall_ms() - self.wall_ms()) / 1000

    async def synchronise(self, store: MetadataStore, path: str, data: bytes) -> None:
        """Write ``data`` to a znode of our own, and take the time from the server's stamp.

        The time is off by half a round trip at most. Raises UnavailableError, NoNodeError.
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
        self._tell_skew()

    async def keep_synchronised(self, store: MetadataStore, path: str, data: bytes) -> None:
        """Look at ZooKeeper's clock now and then, until cancelled. Raises SessionLostError."""
        while True:
            await self.sleep(SYNCHRONISE_INTERVAL_S)
            try:
                await self.synchronise(store, path, data)
            except UnavailableError as error:
                log.info("clock.not_synchronised", error=str(error))

    def _tell_skew(self) -> None:
        is_off = abs(self.skew_s) >= SKEW_TOLD_S
        if is_off and not self._has_told:
            log.warning(
                "clock.skewed",
                skew_s=round(self.skew_s, 1),
                next_step="synchronise this host's clock; until then ZooKeeper's time is used",
            )
        self._has_told = is_off
