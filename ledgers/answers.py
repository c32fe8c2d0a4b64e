"""Calls made again until they are answered, by whoever cannot go on without: nothing follows from
silence (rule S8).

For a loop that owns its work and lives as long as its session: one reply of a ZooKeeper that is
overloaded, or one connection that broke again and again, is no reason to end it, and all that hangs
on it.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, UnavailableError

T = TypeVar("T")

log = structlog.get_logger()

RETRY_MIN_S, RETRY_MAX_S = 1.0, 10.0
"""Between two tries, unless the caller says otherwise; doubled from one to the next."""


async def until_answered(
    call: Callable[[], Awaitable[T]],
    *,
    event: str,
    clock: Clock,
    errors: type[BookmenderError] | tuple[type[BookmenderError], ...] = UnavailableError,
    retry_min_s: float = RETRY_MIN_S,
    retry_max_s: float = RETRY_MAX_S,
    **fields: object,
) -> T:
    """What ``call`` returns, once it does: a read, or a write that may well happen twice.

    ``errors``: those that pass. ``event``, ``fields``: what the log is told of each of them. Raises
    SessionLostError, which does not pass, and whatever else ``call`` raises.
    """
    retry_s = retry_min_s
    while True:
        try:
            return await call()
        except errors as error:
            log.warning(event, error=str(error), retry_s=retry_s, **fields)
        await clock.sleep(retry_s)
        retry_s = min(2 * retry_s, retry_max_s)
