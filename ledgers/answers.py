"""Calls that are repeated until they succeed, because a missing answer proves nothing (rule S8).

For loops that live as long as their session. An overloaded ZooKeeper, or a connection that broke
several times, must not end such a loop and all that depends on it.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, UnavailableError

T = TypeVar("T")

log = structlog.get_logger()

RETRY_MIN_S, RETRY_MAX_S = 1.0, 10.0
"""Default first and longest wait between two tries. Each wait is twice the one before."""


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
    """Repeat ``call`` until it succeeds, and return its result.

    ``call`` is a read, or a write that may safely happen twice. ``errors``: errors after which the
    call is repeated. Each is logged as ``event`` with ``fields``. Other errors are raised, such as
    SessionLostError.
    """
    retry_s = retry_min_s
    while True:
        try:
            return await call()
        except errors as error:
            log.warning(event, error=str(error), retry_s=retry_s, **fields)
        await clock.sleep(retry_s)
        retry_s = min(2 * retry_s, retry_max_s)
