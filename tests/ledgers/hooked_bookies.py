"""Bookies whose calls a test watches, delays and breaks."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ledgers.bookies import LacAnswer
from ledgers.clock import Clock
from ledgers.digest import EntryHeader
from ledgers.model import BookieId
from tests.memory.bookies import MemoryBookies

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. ``entry``: the entry of an add."""

    operation: str
    bookie: BookieId
    ledger_id: int
    entry_id: int = -1
    is_recovery: bool = False
    is_high_priority: bool = False
    entry: bytes = b""


Hook = Callable[[Call], Awaitable[None]]
"""May take time, and may raise what the caller is then told."""


async def nothing(call: Call) -> None:
    pass


class HookedBookies(MemoryBookies):
    """Bookies that run ``before`` ahead of a request, and ``after`` ahead of its reply."""

    def __init__(self, bookies: Iterable[BookieId], *, clock: Clock) -> None:
        super().__init__(bookies, clock=clock)
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.calls: list[Call] = []

    def called(self, operation: str) -> list[Call]:
        return [call for call in self.calls if call.operation == operation]

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        call = Call(operation="read", bookie=bookie, ledger_id=ledger_id, entry_id=entry_id)
        return await self._carry_out(call, partial(super().read, bookie, ledger_id, entry_id))

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        call = Call(
            operation="read_fencing",
            bookie=bookie,
            ledger_id=ledger_id,
            entry_id=entry_id,
            is_high_priority=is_high_priority,
        )
        request = partial(
            super().read_fencing,
            bookie,
            ledger_id,
            entry_id,
            master_key=master_key,
            is_high_priority=is_high_priority,
        )
        return await self._carry_out(call, request)

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        call = Call(operation="read_lac", bookie=bookie, ledger_id=ledger_id)
        return await self._carry_out(call, partial(super().read_lac, bookie, ledger_id))

    async def add(
        self,
        bookie: BookieId,
        entry: bytes,
        *,
        master_key: bytes,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        header = EntryHeader.of(entry)
        call = Call(
            operation="add",
            bookie=bookie,
            ledger_id=header.ledger_id,
            entry_id=header.entry_id,
            is_recovery=is_recovery,
            is_high_priority=is_high_priority,
            entry=entry,
        )
        request = partial(
            super().add,
            bookie,
            entry,
            master_key=master_key,
            is_recovery=is_recovery,
            is_high_priority=is_high_priority,
        )
        await self._carry_out(call, request)

    async def _carry_out(self, call: Call, request: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(call)
        await self.before(call)
        result = await request()
        await self.after(call)
        return result
