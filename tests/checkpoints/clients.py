"""A feed and clients in memory, for tests of the recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from checkpoints.model import (
    Checkpoint,
    CommittedVersion,
    Span,
    SpanFilter,
    ledger_id_of,
    ledger_key,
)
from checkpoints.receipts import ReceiptStore
from checkpoints.recovery import RecoveryService, RecoverySettings
from tests.memory.feed import MemoryCheckpointSource, MemoryReceipts
from tests.virtual_time import LoopClock

CLIENT = "catalogue"


def span(ledger_id: int, end: int, *, begin: int = 0, is_deleted: bool = False) -> Span:
    return Span(ledger_key(ledger_id), begin, end, None if is_deleted else end % 97)


class Feed:
    """A source that makes its checkpoints itself: ids are multiples of ten."""

    def __init__(self) -> None:
        self.source = MemoryCheckpointSource()
        self.clock = LoopClock()
        self.receipts = MemoryReceipts()
        self.versions: dict[int, int] = {}
        """The latest version of each ledger."""

    async def commit(self, *ledger_ids: int, deleted: frozenset[int] = frozenset()) -> Checkpoint:
        """Commit a checkpoint: a change of each of these ledgers, at ids that follow each other."""
        previous_id = self.source.last_id
        spans = [
            span(
                ledger_id,
                previous_id + number,
                begin=self.versions.get(ledger_id, 0),
                is_deleted=ledger_id in deleted,
            )
            for number, ledger_id in enumerate(ledger_ids, start=1)
        ]
        last_version = max((each.end for each in spans), default=previous_id)
        checkpoint = Checkpoint(
            id=max(previous_id + 10, last_version),
            previous_id=previous_id,
            time_ms=self.clock.wall_ms(),
            spans=spans,
        )
        self.versions |= {
            ledger_id: each.end for ledger_id, each in zip(ledger_ids, spans, strict=True)
        }
        await self.source.commit(checkpoint)
        return checkpoint

    @asynccontextmanager
    async def client(
        self,
        *,
        settings: RecoverySettings | None = None,
        wanted: SpanFilter | None = None,
        store: ReceiptStore | None = None,
    ) -> AsyncIterator[Client]:
        """Run a process of the client, and subscribe."""
        store = store or await self.receipts.open(CLIENT)
        async with RecoveryService.open(
            self.source, store, settings=settings, clock=self.clock, wanted=wanted
        ) as service:
            client = Client(service, store)
            await client.subscribe()
            yield client


class Client:
    """A listener that notes what it is given. ``missed``, ``given``: versions by ledger."""

    def __init__(self, service: RecoveryService, store: ReceiptStore) -> None:
        self.service, self.store = service, store
        self.missed: dict[int, int] = {}
        self.given: dict[int, int] = {}
        self.events: list[CommittedVersion] = []

    async def subscribe(self) -> None:
        """Subscribe, and note what was missed."""
        self.result = await self.service.subscribe(self)
        self.missed = {}
        for committed in self.result:
            ledger_id = ledger_of(committed)
            assert ledger_id not in self.missed, "an object was offered twice"
            self.missed[ledger_id] = committed.version

    async def receive(self, committed: CommittedVersion) -> None:
        self.events.append(committed)
        self.given[ledger_of(committed)] = committed.version

    def submit(self, versions: Mapping[int, int]) -> None:
        """Submit receipts without waiting for them."""
        for ledger_id, version in versions.items():
            self.service.submit_receipt(ledger_key(ledger_id), version)

    async def stored(self, ledger_id: int, version: int) -> None:
        """Submit a receipt, and wait until it is stored."""
        await self.service.submit_receipt(ledger_key(ledger_id), version)


def ledger_of(committed: CommittedVersion) -> int:
    ledger_id = ledger_id_of(committed.key)
    assert ledger_id is not None
    return ledger_id


async def settle() -> None:
    """Let the tasks of services work until all of them wait for something new."""
    for _ in range(100):
        await asyncio.sleep(0)
