"""Waits for conditions, with a deadline, while a daemon runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from daemon.local.processes import Child
from ledgers.errors import UnavailableError

POLL_S = 0.1


async def wait_until(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool],
    what: str,
    *,
    timeout_s: float,
    child: Child | None = None,
    poll_s: float = POLL_S,
    poll_share: float = 0.0,
) -> None:
    """Wait for the condition. ``poll_share``: the shortest poll interval, as a share of the time
    elapsed. Raises UnavailableError after the timeout, or if the child has ended."""
    began_s = time.monotonic()
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        elapsed_s = time.monotonic() - began_s
        if elapsed_s > timeout_s or (child is not None and not child.is_running):
            log = "" if child is None else f"; the end of {child.log}:\n{child.log_tail()}"
            raise UnavailableError(f"not in time: {what}{log}")
        await asyncio.sleep(max(poll_s, poll_share * elapsed_s))
