"""``Slots``: how many ledgers a worker repairs at once, not counting ledgers that only wait.

A ledger whose bookie does not answer does nothing until its requests time out. If it kept its slot
meanwhile, a few such ledgers would stop all others, so it lends the slot.

Some slots are reserved for ledgers that lost copies. Other ledgers (of draining bookies, or
repaired by hand) may be many, and slow if they are throttled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

LATE_TIMES_MAX = 9
"""Slow ledgers may lend this many times the number of slots. Ledgers of an unresponsive bookie must
not fill the slots, and a throttled node must not lock the whole queue."""


def kept_for_losses(count: int) -> int:
    """Return how many slots are reserved for ledgers that lost copies: none of one."""
    return max(1, count // 4) if count > 1 else 0


class Slots:
    """A number of slots. A holder may lend its slot while it waits. Belongs to one event loop.

    ``within``: the set of slots that these are part of. Taking one of these takes one of those,
    too.
    """

    def __init__(self, count: int, *, within: "Slots | None" = None) -> None:
        self._sets: tuple[Slots, ...] = (self,) if within is None else (self, *within._sets)
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._taken_count = self._late_count = self.lent_count = 0
        self._is_half_free = asyncio.Event()
        self._is_half_free.set()

    @property
    def is_full(self) -> bool:
        """True if ``acquire`` would have to wait."""
        return any(each._free.locked() for each in self._sets)

    async def wait_free(self) -> None:
        """Wait until a slot is free, without taking it."""
        async with self._free:
            pass

    async def wait_half_free(self, timeout_s: float) -> None:
        """If all slots are taken, wait until half of them are free or the time is over."""
        if not self._free.locked():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_half_free.wait()

    async def acquire(self) -> None:
        taken: list[Slots] = []
        try:
            for each in self._sets:
                await each._free.acquire()
                taken.append(each)
                each._count_taken(1)
        except BaseException:  # cancelled: nothing stays taken
            _free_all(taken)
            raise

    def release(self) -> None:
        _free_all(self._sets)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Lend the caller's slot to others until the block ends."""
        self._lend(late_count=0)
        try:
            yield
        finally:
            await self._claim(late_count=0)

    def lent_after(self, patience_s: float) -> "DelayedLoan":
        """Lend the caller's slot once the block has taken that long, up to a bound."""
        return DelayedLoan(self, patience_s)

    def _count_taken(self, change: int) -> None:
        self._taken_count += change
        if 2 * self._taken_count <= self._count:
            self._is_half_free.set()
        else:
            self._is_half_free.clear()

    def _lend(self, *, late_count: int) -> None:
        for each in self._sets:
            each.lent_count += 1
            each._late_count += late_count
        self.release()

    async def _claim(self, *, late_count: int) -> None:
        for each in self._sets:
            each.lent_count -= 1
            each._late_count -= late_count
        await self.acquire()


def _free_all(taken: "list[Slots] | tuple[Slots, ...]") -> None:
    for each in taken:
        each._free.release()
        each._count_taken(-1)


class DelayedLoan(AbstractAsyncContextManager[None]):
    """``Slots.lent_after``. A class instead of a generator, because it must be cheap: there are two
    for each ledger, and nearly every block ends in time."""

    __slots__ = ("_alarm", "_is_lent", "_slots")

    def __init__(self, slots: Slots, patience_s: float) -> None:
        self._slots = slots
        self._is_lent = False
        self._alarm = asyncio.get_running_loop().call_later(patience_s, self._lend)

    def _lend(self) -> None:
        sets = self._slots._sets
        if all(each._late_count < LATE_TIMES_MAX * each._count for each in sets):
            self._is_lent = True
            self._slots._lend(late_count=1)

    async def __aexit__(self, *_: object) -> None:
        self._alarm.cancel()
        if self._is_lent:
            await self._slots._claim(late_count=1)
