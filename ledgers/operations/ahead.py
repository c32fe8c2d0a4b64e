"""Entries read in order, several in flight.

How many is found out on the way, as in TCP's slow start: two at first, one more with each entry
that arrived, never more than a bound in entries and one in bytes. So the short tail of an abandoned
ledger costs no reads beyond its end, and entries of 5 MB do not fill the memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

ENTRIES_MAX = 64
BYTES_MAX = 8 * 1024 * 1024


async def read_ahead(
    entry_ids: Iterable[int],
    read: Callable[[int], Awaitable[bytes | None]],
    *,
    entries_max: int = ENTRIES_MAX,
    bytes_max: int = BYTES_MAX,
) -> AsyncGenerator[bytes, None]:
    """What ``read`` gives for these ids, in their order, until it gives None or raises.

    A failure counts only when its turn has come: what lies behind the end decides nothing. Use it
    within ``contextlib.aclosing``, so that the reads in flight end with the loop over it.
    """
    remaining = iter(entry_ids)
    # Not a TaskGroup: it would have to be left open across the yield, where another task might
    # close it. The finally below is its equal here.
    flying: deque[asyncio.Future[bytes | None]] = deque()
    window, largest_bytes = 2, 1
    try:
        while True:
            while len(flying) < min(window, max(1, bytes_max // largest_bytes)):
                entry_id = next(remaining, None)
                if entry_id is None:
                    break
                flying.append(asyncio.ensure_future(read(entry_id)))
            if not flying:
                return
            entry = await flying[0]
            flying.popleft()
            if entry is None:
                return
            window = min(window + 1, entries_max)
            largest_bytes = max(largest_bytes, len(entry))
            yield entry
    finally:
        for future in flying:
            future.cancel()
        await asyncio.gather(*flying, return_exceptions=True)
