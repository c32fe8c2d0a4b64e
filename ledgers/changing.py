"""Notification of tasks that wait for a change."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress


class Changing:
    """Base of objects that count their changes. Belongs to one event loop.

    A waiting task passes the count that it has seen, so it misses no change.
    """

    def __init__(self) -> None:
        self.change_count = 0
        self._changed = asyncio.Event()

    async def wait_change(self, seen: int, *, timeout_s: float | None = None) -> None:
        """Wait until ``change_count`` differs from ``seen``, ``timeout_s`` at most (None: no
        limit)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.change_count == seen:
                    await self._changed.wait()

    def changes(self) -> AsyncGenerator[None, None]:
        """Yield after each change since this call. Changes that happen while the caller is busy
        are merged into one."""
        return self._changes_since(self.change_count)

    async def _changes_since(self, seen: int) -> AsyncGenerator[None, None]:
        while True:
            await self.wait_change(seen)
            seen = self.change_count
            yield

    def _tell_change(self) -> None:
        """Wake the waiting tasks. Called after the change is visible to them."""
        self.change_count += 1
        self._changed.set()
        self._changed.clear()  # later calls wait for the next change
