"""Outages of our own ZooKeeper connection, after which bookies need time to register again.

A bookie whose session ended in the same outage is healthy and returns by itself. A bookie that is
found absent right after an outage is therefore not lost before this time is over, whatever the
recovery delay.
"""

import math
from dataclasses import dataclass

import structlog

from ledgers.clock import Clock
from ledgers.store import MetadataStore

log = structlog.get_logger()

JOINED_MAX_S = 300.0
"""Outages count as one until this long after the first of them began. A bookie absent for longer
has another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The last outage. ``settled_s``: a bookie that has not returned by then is absent for another
    reason.

    Times are monotonic seconds.
    """

    began_s: float = -math.inf
    settled_s: float = -math.inf

    def excuses_until_s(self, since_s: float) -> float:
        """Return until when a bookie absent since ``since_s`` is not lost; -inf if the outage does
        not explain its absence."""
        return self.settled_s if self.began_s <= since_s <= self.settled_s else -math.inf


class Outages:
    """Tracks outages across the sessions of the auditor, because an outage may end a session.
    ``return_s``: the time that bookies have to return."""

    def __init__(self, clock: Clock, *, return_s: float) -> None:
        self._clock = clock
        self._return_s = return_s
        self._began_s: float | None = None
        self._ended = Outage()

    @property
    def last(self) -> Outage:
        """The last outage. An outage that is still going on counts as if it ended now."""
        return self._ended if self._began_s is None else self._ending(self._began_s)

    async def follow(self, store: MetadataStore) -> None:
        """Track the outages of one session. Its start ends the outage that ended the session
        before.

        Raises SessionLostError.
        """
        while True:
            self.end()
            await store.wait_disconnected()
            self.begin()
            await store.wait_connected()

    def begin(self) -> None:
        """Record that the connection is lost. May be called repeatedly.

        If bookies still have time to return from the last outage, the new outage continues it, up
        to ``JOINED_MAX_S`` from its beginning: it ends the sessions of bookies that were about to
        return.
        """
        if self._began_s is None:
            now_s, last = self._clock.now_s(), self._ended
            is_joined = now_s <= last.settled_s and now_s - last.began_s < JOINED_MAX_S
            self._began_s = last.began_s if is_joined else now_s

    def end(self) -> None:
        """Record that the connection is back. May be called repeatedly."""
        if self._began_s is not None:
            self._ended = self._ending(self._began_s)
            self._began_s = None
            log.info("outage.ended", return_s=self._return_s)

    def _ending(self, began_s: float) -> Outage:
        return Outage(began_s=began_s, settled_s=self._clock.now_s() + self._return_s)
