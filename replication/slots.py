"""How many ledgers are at work at once, not counting those that merely wait.

A ledger that needs a bookie which hangs is at nothing until its requests time out. Were it to keep
its place meanwhile, a few such ledgers would bring all others to a stop.

Ledgers that lost copies must not queue behind those that did not (of draining bookies, or repaired
by hand), which may be many, and slow where they are throttled: some places are kept for losses.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

LATE_TIMES_MAX = 9
"""So many times the places are lent by ledgers that take long: those of a bookie that hangs are not
to fill them, and a node that is merely throttled is not to take the whole queue for itself."""


def kept_for_losses(count: int) -> int:
    """So many of the places only ledgers that lost copies may have; none where there is but one."""
    return max(1, count // 4) if count > 1 else 0


class Slots:
    """So many places. Who holds one may lend it while it waits. One loop's.

    ``within``: places of which these are some. Who takes one of these takes one of those.
    """

    def __init__(self, count: int, *, within: "Slots | None" = None) -> None:
        self._within = within
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._taken_count = 0
        self._is_half_free = asyncio.Event()
        self._is_half_free.set()
        self._late_max = LATE_TIMES_MAX * count
        self._late_count = 0
        self.lent_count = 0

    @property
    def is_full(self) -> bool:
        """Whether one would have to be waited for."""
        return self._free.locked() or (self._within is not None and self._within.is_full)

    async def wait_free(self) -> None:
        """Until there is a place, without taking it."""
        async with self._free:
            pass

    async def wait_half_free(self, timeout_s: float) -> None:
        """Where all are taken: until half of them are free again, or it takes longer than that."""
        if not self._free.locked():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_half_free.wait()

    async def acquire(self) -> None:
        await self._free.acquire()
        self._count_taken(1)
        if self._within is None:
            return
        try:
            await self._within.acquire()
        except BaseException:  # cancelled: nothing was taken
            self._release()
            raise

    def release(self) -> None:
        self._release()
        if self._within is not None:
            self._within.release()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """A place of the caller's is others' until the block ends."""
        self._lend()
        try:
            yield
        finally:
            await self._claim()

    def lent_after(self, patience_s: float) -> "DelayedLoan":
        """Likewise, but only once the block has taken that long, and not without bounds."""
        return DelayedLoan(self, patience_s)

    def lend_late(self) -> bool:
        """Whether one of those that take long may lend its place; then it is lent."""
        if not self._may_lend_late:
            return False
        self._count_late(1)
        self._lend()
        return True

    async def claim_late(self) -> None:
        self._count_late(-1)
        await self._claim()

    def _release(self) -> None:
        self._free.release()
        self._count_taken(-1)

    def _count_taken(self, change: int) -> None:
        self._taken_count += change
        if 2 * self._taken_count <= self._count:
            self._is_half_free.set()
        else:
            self._is_half_free.clear()

    @property
    def _may_lend_late(self) -> bool:
        return self._late_count < self._late_max and (
            self._within is None or self._within._may_lend_late
        )

    def _count_late(self, change: int) -> None:
        self._late_count += change
        if self._within is not None:
            self._within._count_late(change)

    def _lend(self) -> None:
        self._count_lent(1)
        self.release()

    async def _claim(self) -> None:
        self._count_lent(-1)
        await self.acquire()

    def _count_lent(self, change: int) -> None:
        self.lent_count += change
        if self._within is not None:
            self._within._count_lent(change)


class DelayedLoan(AbstractAsyncContextManager[None]):
    """``Slots.lent_after``. A class, for nearly every block ends in time, and there are two a
    ledger."""

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
