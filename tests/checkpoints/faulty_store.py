"""A receipt store whose calls fail in every way that the interface allows."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from checkpoints.model import CheckpointId, Key, LogId, Version
from checkpoints.receipts import Failure, ReceiptRange, ReceiptStore
from ledgers.clock import Clock
from ledgers.errors import ClientFencedError, UnavailableError

T = TypeVar("T")

LATE_S = 15.0
"""Longer than the service waits for an answer."""
AGAIN_S = 3.0


class StoreFault(enum.Enum):
    BEFORE = "fails before it is applied"
    AFTER = "fails after it was applied"
    LATE = "is applied and answered after the caller gave up"
    TWICE = "is applied again later"


class FaultyStore:
    """Passes calls on to a store. ``fault``: decides on each call. A dead store answers none."""

    def __init__(
        self, store: ReceiptStore, *, clock: Clock, fault: Callable[[], StoreFault | None]
    ) -> None:
        self._store, self._clock, self._fault = store, clock, fault
        self._late: set[asyncio.Future[None]] = set()
        self.call_count = 0
        self.is_dead = False

    async def settle_late(self) -> None:
        """Wait until every late write was applied."""
        while self._late:
            await asyncio.wait(self._late)

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        await self._call(lambda: self._store.store_low_watermark(checkpoint_id))

    async def get_low_watermark(self) -> CheckpointId | None:
        return await self._call(self._store.get_low_watermark)

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        await self._call(lambda: self._store.store_checkpoint_range_receipts(ranges))

    async def get_checkpoint_range_receipts(
        self, antecedent: CheckpointId
    ) -> AsyncGenerator[ReceiptRange, None]:
        async def read() -> list[ReceiptRange]:
            return [each async for each in self._store.get_checkpoint_range_receipts(antecedent)]

        for each in await self._call(read):
            yield each

    async def purge_checkpoint_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        await self._call(lambda: self._store.purge_checkpoint_receipts(ranges))

    async def store_failure(self, failure: Failure) -> None:
        await self._call(lambda: self._store.store_failure(failure))

    async def get_failures(self) -> Sequence[Failure]:
        return await self._call(self._store.get_failures)

    async def delete_failure(self, key: Key, *, up_to: Version) -> None:
        await self._call(lambda: self._store.delete_failure(key, up_to=up_to))

    async def store_log(self, log_id: LogId) -> None:
        await self._call(lambda: self._store.store_log(log_id))

    async def get_log(self) -> LogId | None:
        return await self._call(self._store.get_log)

    async def reset(self) -> None:
        await self._call(self._store.reset)

    async def close(self) -> None:
        await self._store.close()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(0)
        if self.is_dead:
            raise UnavailableError("the process is dead")
        self.call_count += 1
        match self._fault():
            case None:
                return await call()
            case StoreFault.BEFORE:
                raise UnavailableError("not applied")
            case StoreFault.AFTER:
                await call()
                raise UnavailableError("applied")
            case StoreFault.LATE:
                self._apply_later(call, LATE_S)
                await self._clock.sleep(LATE_S)
                raise UnavailableError("late")
            case StoreFault.TWICE:
                self._apply_later(call, AGAIN_S)
                return await call()

    def _apply_later(self, call: Callable[[], Awaitable[object]], after_s: float) -> None:
        async def apply() -> None:
            await self._clock.sleep(after_s)
            with suppress(ClientFencedError):
                await call()

        late = asyncio.ensure_future(apply())
        self._late.add(late)
        late.add_done_callback(self._late.discard)
