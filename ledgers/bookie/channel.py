"""A connection that is made when it is first needed, and made again after it broke.

A bookie that could not be reached is left alone for a while that doubles from failure to failure.
Requests in that while fail at once: a reader goes to the next bookie, whoever retries waits anyway.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ledgers.bookie.connection import Connection
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NoAnswerError, UnavailableError
from ledgers.formats.bookie_info import Address
from ledgers.metadata import BookieId

OnBroken = Callable[[Connection, Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOffSettings:
    """The pause after a failed connection: first, at most. Half of it to all of it, at random."""

    first_s: float = 0.1
    max_s: float = 5.0

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s, self


def back_off_s(failure_count: int, settings: BackOffSettings, *, jitter: float) -> float:
    """How long to leave the bookie alone after so many failures in a row. 0 <= jitter < 1."""
    assert failure_count >= 1, failure_count
    doublings = min(failure_count - 1, 32)  # 2.0**1024 would overflow
    pause_s = min(settings.first_s * 2.0**doublings, settings.max_s)
    return pause_s * (1 + jitter) / 2


class Channel:
    """At most one connection, shared by all callers, and what is known of its failures."""

    def __init__(
        self,
        bookie: BookieId,
        connect: Callable[[OnBroken], Awaitable[Connection]],
        *,
        locate: Callable[[], Address],
        clock: Clock,
        rng: random.Random,
        settings: BackOffSettings,
    ) -> None:
        """``locate``: where the bookie is now, as ``Resolve`` says."""
        self._bookie, self._connect, self._locate = bookie, connect, locate
        self._clock, self._rng, self._settings = clock, rng, settings
        # One attempt at a time; who waits for it shares its outcome. A caller that is cancelled in
        # its attempt takes it along, and the next in line makes another.
        self._attempt = asyncio.Lock()
        self._connection: Connection | None = None
        self._failure: Exception | None = None
        self._failure_count = 0
        self._retry_at_s = 0.0
        self._is_closed = False

    @property
    def current(self) -> Connection | None:
        """The last connection, broken or not, without making one."""
        return self._connection

    async def connection(self) -> Connection:
        """Raises UnavailableError; at once while the bookie is left alone, or no address is known
        to be its own."""
        async with self._attempt:
            await self._leave_if_elsewhere()
            if self._connection is None or self._connection.is_broken:
                self._check_may_connect()
                try:
                    self._connection = await self._connect(self._broke)
                except UnavailableError as error:
                    self._failed(error)
                    raise
            return self._connection

    async def _leave_if_elsewhere(self) -> None:
        """Close a connection to an address that is not the bookie's any more, and fail what is in
        flight there.

        A connection may have been made to a bookie that took over the address before it was seen to
        register. Its answers would be taken for answers of this bookie for as long as the
        connection lives. Raises UnavailableError.
        """
        try:
            address = self._locate()
        except UnavailableError:
            await self._leave()
            raise
        if self._connection is not None and self._connection.address != address:
            await self._leave()

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def retry_now(self) -> None:
        """Forget past failures: the bookie is known to be back."""
        self._failure, self._failure_count, self._retry_at_s = None, 0, 0.0

    async def close(self) -> None:
        """For good."""
        self._is_closed = True
        async with self._attempt:
            if self._connection is not None:
                await self._connection.close()

    def _check_may_connect(self) -> None:
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=self._bookie)
        if self._failure is not None and self._clock.now_s() < self._retry_at_s:
            # Alike from one such failure to the next, as notes and logs tell of it where it
            # changes.
            raise UnavailableError(
                f"left alone, as within the last {self._settings.max_s:g} s it was not reachable: "
                f"{_cause_text(self._failure)}",
                bookie=self._bookie,
            ) from self._failure

    def _broke(self, connection: Connection, cause: Exception) -> None:
        """A bookie that starts accepts connections and resets them: as good as not connected.

        So is one that fell silent: it may well accept the next one, and be silent there.
        """
        if connection.has_answered:
            self.retry_now()
        if not connection.has_answered or isinstance(cause, NoAnswerError):
            self._failed(cause)

    def _failed(self, cause: Exception) -> None:
        self._failure = cause
        self._failure_count += 1
        pause_s = back_off_s(self._failure_count, self._settings, jitter=self._rng.random())
        self._retry_at_s = self._clock.now_s() + pause_s


def _cause_text(failure: BaseException) -> str:
    """What failed, and why, without the ids that whoever tells of it adds."""
    if isinstance(failure, OSError) and failure.errno:
        told = os.strerror(failure.errno).lower()
    else:
        text = str(failure.args[0]) if isinstance(failure, BookmenderError) else str(failure)
        told = text or type(failure).__name__
    return f"{told}: {_cause_text(failure.__cause__)}" if failure.__cause__ else told
