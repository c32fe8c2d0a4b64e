"""Outages of our own connection to ZooKeeper, after which bookies need a while to register again.

A bookie whose session ended in the same outage is alive and well, and comes back by itself. So
whoever is found away right after one is not lost before the time to return is over, whatever the
recovery delay.
"""

import math
from dataclasses import dataclass

import structlog

from ledgers.clock import Clock
from ledgers.store import MetadataStore

log = structlog.get_logger()

JOINED_MAX_S = 300.0
"""So long after the first of them began outages count as one; who is still away then is so for a
reason of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The last one. ``settled_s``: who has not returned by then is away for a reason of its own.

    Times are monotonic seconds.
    """

    began_s: float = -math.inf
    settled_s: float = -math.inf

    def excuses_until_s(self, since_s: float) -> float:
        """Before then a bookie that is away since ``since_s`` is not lost; -inf: no outage explains
        it."""
        return self.settled_s if self.began_s <= since_s <= self.settled_s else -math.inf


class Outages:
    """Kept over a half's sessions, as an outage may end one. ``return_s``: the time to return."""

    def __init__(self, clock: Clock, *, return_s: float) -> None:
        self._clock = clock
        self._return_s = return_s
        self._began_s: float | None = None
        self._ended = Outage()

    @property
    def last(self) -> Outage:
        """One that is not known to be over may be over just now."""
        return self._ended if self._began_s is None else self._ending(self._began_s)

    async def follow(self, store: MetadataStore) -> None:
        """One session of it, from its beginning, which ends what ended the session before.

        Raises SessionLostError.
        """
        while True:
            self.end()
            await store.wait_disconnected()
            self.begin()
            await store.wait_connected()

    def begin(self) -> None:
        """The connection is away. Any number of times. While some have time to return from the last
        outage this one goes on with it, for ``JOINED_MAX_S``: it ends the sessions of those that
        are about to."""
        if self._began_s is None:
            now_s, last = self._clock.now_s(), self._ended
            is_joined = now_s <= last.settled_s and now_s - last.began_s < JOINED_MAX_S
            self._began_s = last.began_s if is_joined else now_s

    def end(self) -> None:
        """It is back. Any number of times."""
        if self._began_s is not None:
            self._ended = self._ending(self._began_s)
            self._began_s = None
            log.info("outage.ended", return_s=self._return_s)

    def _ending(self, began_s: float) -> Outage:
        return Outage(began_s=began_s, settled_s=self._clock.now_s() + self._return_s)
