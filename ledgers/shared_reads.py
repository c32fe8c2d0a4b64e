"""Reads shared by many callers, where each caller needs a value that is newer than its call."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class _Line(Generic[V]):
    """The reads of one key, numbered from 1. ``lock`` allows one read at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    """Number of the read that began last."""
    ended: int = 0
    """Number of the read that succeeded last."""
    value: V | None = None
    """Result of read ``ended``."""


class SharedReads(Generic[K, V]):
    """Joins calls for the same key into few reads.

    A caller never gets the value of a read that was already in flight when it called, because that
    value may be older than the call. All callers that wait until the next read begins share its
    value:

    1. A caller notes the number of the next read, then waits for the lock.
    2. With the lock, it starts a read only if no read with this number or a later one has
       succeeded.
    """

    def __init__(self, read: Callable[[K], Awaitable[V]]) -> None:
        self._read = read
        self._lines: dict[K, _Line[V]] = {}

    async def get(self, key: K) -> V:
        """Return the value by a read that began after this call. Raises what the read raises."""
        line = self._lines.setdefault(key, _Line())
        wanted = line.begun + 1
        async with line.lock:
            if line.ended < wanted:
                line.begun += 1
                number = line.begun
                line.value = await self._read(key)
                line.ended = number
            return line.value  # type: ignore[return-value]  # a read succeeded
