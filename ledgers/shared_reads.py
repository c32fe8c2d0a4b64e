"""Reads that many callers share, though each caller needs an answer that is newer than its call."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class _Line(Generic[V]):
    """The callers for one key. Reads are numbered; ``lock`` lets one go on at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    ended: int = 0
    value: V | None = None
    """Of the read that ended last."""


class SharedReads(Generic[K, V]):
    """Joins calls for the same key into few reads.

    A caller never gets the answer of a read that was under way when it called: the server may have
    given that answer before the caller's reason to ask came to be. It gets the next one, together
    with all that call until that one begins.
    """

    def __init__(self, read: Callable[[K], Awaitable[V]]) -> None:
        self._read = read
        self._lines: dict[K, _Line[V]] = {}

    async def get(self, key: K) -> V:
        """The value by a read that began after this call. Raises what the read raises."""
        line = self._lines.setdefault(key, _Line())
        wanted = line.begun + 1
        async with line.lock:
            if line.ended < wanted:
                line.begun += 1
                number = line.begun
                line.value = await self._read(key)
                line.ended = number
            return line.value  # type: ignore[return-value]  # a read has ended
