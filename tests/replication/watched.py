"""Fakes that a test can inspect, and that run hooks: copied entries, and changes of metadata."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ledgers.bookies import Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import CorruptionError
from ledgers.model import BookieId, LedgerMetadata
from ledgers.store import Operation, OperationResult, SetData
from tests.memory.bookies import MemoryBookies
from tests.memory.store import MemoryTree
from tests.replication.nodes import ROOT


class RecordingBookies(MemoryBookies):
    """Bookies that remember the requests of the bulk path. Two hooks run meanwhile.

    The transfer continues after the views have seen the hooks' changes.
    """

    def __init__(self, bookies: Sequence[BookieId], *, clock: Clock) -> None:
        super().__init__(bookies, clock=clock)
        self.transfers: list[tuple[Transfer, TransferResult]] = []
        self.before_transfer: Callable[[Transfer], Awaitable[None]] | None = None
        self.after_transfer: Callable[[Transfer], Awaitable[None]] | None = None

    async def transfer(self, transfer: Transfer) -> TransferResult:
        if self.before_transfer is not None:
            await self.before_transfer(transfer)
            await settle()
        result = await super().transfer(transfer)
        self.transfers.append((transfer, result))
        if self.after_transfer is not None:
            await self.after_transfer(transfer)
            await settle()
        return result

    def asked(self, bookie: BookieId) -> list[int]:
        """Return the entries read from the bookie to be judged or copied, in order, with
        repetitions."""
        return [
            entry_id
            for transfer, _ in self.transfers
            for asked in (transfer.reads, transfer.checks)
            for entry_id in asked.get(bookie, ())
        ]

    @property
    def copied_count(self) -> int:
        """Return the number of entries that a target acknowledged."""
        return sum(result.entry_count for transfer, result in self.transfers if transfer.target)

    @property
    def copied_bytes(self) -> int:
        return sum(result.entry_bytes for transfer, result in self.transfers if transfer.target)

    @property
    def targets(self) -> list[BookieId]:
        """Return the targets in the order of their first write."""
        return list(dict.fromkeys(t.target for t, _ in self.transfers if t.target is not None))


class WatchedTree(MemoryTree):
    """Reports every write of existing ledger metadata to ``watcher``: the ledger, before, after."""

    watcher: Callable[[int, LedgerMetadata, LedgerMetadata], None] | None = None

    def apply(self, session_id: int, operations: Sequence[Operation]) -> list[OperationResult]:
        writes = [
            (ledger_id, _parsed(self.nodes[operation.path].data), operation.data)
            for operation in operations
            if isinstance(operation, SetData)
            and (ledger_id := Layout.HIERARCHICAL.ledger_id(ROOT, operation.path)) is not None
            and self.nodes.find(operation.path) is not None
        ]
        results = super().apply(session_id, operations)
        for ledger_id, before, data in writes:
            after = _parsed(data)
            if self.watcher is not None and before is not None and after is not None:
                self.watcher(ledger_id, before, after)
        return results


def _parsed(data: bytes) -> LedgerMetadata | None:
    """Return the metadata; None if a test damaged it on purpose."""
    try:
        return parse_metadata(data)
    except CorruptionError:
        return None


async def settle(turns: int = 100) -> None:
    """Let everything that is ready continue, without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)
