"""Something that changes, and those who wait for that."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress


class Changing:
    """Counts its changes. Whoever waits names the count they saw: so none is missed. One loop's."""

    def __init__(self) -> None:
        self.change_count = 0
        self._changed = asyncio.Event()

    async def wait_change(self, seen: int, *, timeout_s: float | None = None) -> None:
        """Until ``change_count`` differs from ``seen``, or the time is over; None: there is no
        end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.change_count == seen:
                    await self._changed.wait()

    def changes(self) -> AsyncGenerator[None, None]:
        """It has changed since this was called. Changes while nobody asks for the next one make one
        together."""
        return self._changes_since(self.change_count)

    async def _changes_since(self, seen: int) -> AsyncGenerator[None, None]:
        while True:
            await self.wait_change(seen)
            seen = self.change_count
            yield

    def _tell_change(self) -> None:
        """Called once what changed is there to be seen."""
        self.change_count += 1
        self._changed.set()
        self._changed.clear()  # the next to wait does so for the next change
