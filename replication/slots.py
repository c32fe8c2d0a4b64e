"""How many ledgers are at work at once, not counting those that merely wait.

A ledger that needs a bookie which hangs is at nothing until its requests time out. Were it to keep its
place meanwhile, a few such ledgers would bring all others to a stop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

LATE_TIMES_MAX = 9
"""So many times the places are lent by ledgers that take long: those of a bookie that hangs are not to
fill them, and a node that is merely throttled is not to take the whole queue for itself."""


class Slots:
    """So many places. Who holds one may lend it while it waits. One loop's."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._late_max = LATE_TIMES_MAX * count
        self._late_count = 0
        self.lent_count = 0

    async def wait_free(self) -> None:
        """Until there is a place, without taking it."""
        async with self._free:
            pass

    async def take(self) -> None:
        await self._free.acquire()

    def give_back(self) -> None:
        self._free.release()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """A place of the caller's is others' until the block ends."""
        self._lend()
        try:
            yield
        finally:
            await self._claim()

    def lent_after(self, patience_s: float) -> "LateLoan":
        """Likewise, but only once the block has taken that long, and not without bounds."""
        return LateLoan(self, patience_s)

    def lend_late(self) -> bool:
        """Whether one of those that take long may lend its place; then it is lent."""
        if self._late_count >= self._late_max:
            return False
        self._late_count += 1
        self._lend()
        return True

    async def claim_late(self) -> None:
        self._late_count -= 1
        await self._claim()

    def _lend(self) -> None:
        self.lent_count += 1
        self._free.release()

    async def _claim(self) -> None:
        self.lent_count -= 1
        await self._free.acquire()


class LateLoan(AbstractAsyncContextManager[None]):
    """``Slots.lent_after``. A class, for nearly every block ends in time, and there are two a ledger."""

    __slots__ = ("_alarm", "_is_lent", "_slots")

    def __init__(self, slots: Slots, patience_s: float) -> None:
        self._slots = slots
        self._is_lent = False
        self._alarm = asyncio.get_running_loop().call_later(patience_s, self._lend)

    def _lend(self) -> None:
        self._is_lent = self._slots.lend_late()

    async def __aexit__(self, *_: object) -> None:
        self._alarm.cancel()
        if self._is_lent:
            await self._slots.claim_late()
