"""Bookies whose calls a test watches, delays and spoils."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ledgers.bookies import LacAnswer, Room, Standing, Transfer, TransferResult
from ledgers.entry import EntryHeader
from ledgers.memory.bookies import MemoryBookies
from ledgers.metadata import BookieId

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. ``entry``: what an add carries."""

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


class HookedBookies:
    """``before`` runs before a request reaches its bookie, ``after`` before its reply comes back."""

    def __init__(self, bookies: MemoryBookies) -> None:
        self.inner = bookies
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.calls: list[Call] = []

    def called(self, operation: str) -> list[Call]:
        return [call for call in self.calls if call.operation == operation]

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        call = Call(operation="read", bookie=bookie, ledger_id=ledger_id, entry_id=entry_id)
        return await self._carry_out(call, lambda: self.inner.read(bookie, ledger_id, entry_id))

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
        return await self._carry_out(
            call,
            lambda: self.inner.read_fencing(
                bookie,
                ledger_id,
                entry_id,
                master_key=master_key,
                is_high_priority=is_high_priority,
            ),
        )

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        call = Call(operation="read_lac", bookie=bookie, ledger_id=ledger_id)
        return await self._carry_out(call, lambda: self.inner.read_lac(bookie, ledger_id))

    async def read_batch(
        self,
        bookie: BookieId,
        ledger_id: int,
        first_entry_id: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> list[bytes]:
        raise NotImplementedError

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
        await self._carry_out(
            call,
            lambda: self.inner.add(
                bookie,
                entry,
                master_key=master_key,
                is_recovery=is_recovery,
                is_high_priority=is_high_priority,
            ),
        )

    async def write_lac(
        self, bookie: BookieId, ledger_id: int, lac: int, *, master_key: bytes, record: bytes
    ) -> None:
        call = Call(operation="write_lac", bookie=bookie, ledger_id=ledger_id, entry_id=lac)
        await self._carry_out(
            call,
            lambda: self.inner.write_lac(
                bookie, ledger_id, lac, master_key=master_key, record=record
            ),
        )

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        raise NotImplementedError

    async def room(self, bookie: BookieId) -> Room:
        raise NotImplementedError

    def standing(self, bookie: BookieId) -> Standing:
        return self.inner.standing(bookie)

    async def transfer(self, transfer: Transfer) -> TransferResult:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    async def _carry_out(self, call: Call, request: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(call)
        await self.before(call)
        result = await request()
        await self.after(call)
        return result
