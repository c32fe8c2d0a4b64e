"""Many small transactions in few packets (rule S14).

A transaction of one ledger is a handful of operations that must hold together. Sent alone each is a
round trip and a log entry of ZooKeeper; joined in multis they cost a tenth. A multi is all or
nothing, so that one ledger's conflict would fail its neighbours: a failed batch is sent again one
by one, and the conflict reaches only its owner.

A batch leaves at once when a sender is free, and fills while all are busy: no timer, no added
latency.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ledgers.errors import BookmenderError, SessionLostError
from ledgers.store import (
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    Stat,
)

BATCH_TRANSACTIONS_MAX = 25
BATCH_BYTES_MAX = 256 * 1024
SENDER_COUNT = 2
"""Batches in flight: enough to keep ZooKeeper busy; more would only make them smaller."""

Results = list[Stat | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What must hold for any write of ours to be right, and the error that says it does not."""

    check: Check
    error: type[BookmenderError]


@dataclass(slots=True)
class _Transaction:
    operations: Sequence[Operation]
    byte_count: int
    done: "asyncio.Future[Results]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Batcher:
    """Joins transactions into multis. Every multi begins with the ``guards``, checked once.

    The guards prove the session, or the leadership, ours (rules S3, S9).
    """

    def __init__(self, store: MetadataStore, guards: Sequence[Guard]) -> None:
        self._store = store
        self.guards = tuple(guards)
        self._waiting: deque[_Transaction] = deque()
        self._arrived = asyncio.Event()

    async def commit(self, operations: Sequence[Operation]) -> Results:
        """Apply all operations or none. Results are those of ``MetadataStore.multi``.

        Raises MultiFailed (``index`` counts within ``operations``), UnknownOutcomeError when the
        reply was lost, a guard's error. Needs ``run`` to be running.
        """
        transaction = _Transaction(operations, sum(map(_operation_bytes, operations)))
        self._waiting.append(transaction)
        self._arrived.set()
        return await transaction.done

    async def run(self) -> None:
        """Send until cancelled, with ``SENDER_COUNT`` batches in flight."""
        try:
            async with asyncio.TaskGroup() as senders:
                for _ in range(SENDER_COUNT):
                    senders.create_task(self._send_batches())
        finally:
            for transaction in self._waiting:
                transaction.fail(SessionLostError("stopped before the transaction was sent"))

    async def _send_batches(self) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(0)  # let the ledgers that are ready in this turn join in
            batch = self._next_batch()
            if not self._waiting:
                self._arrived.clear()
            if batch:
                await self._send_or_fail(batch)

    async def _send_or_fail(self, batch: list[_Transaction]) -> None:
        try:
            await self._send(batch)
        finally:
            for transaction in batch:  # those without a result: we are being stopped
                transaction.fail(SessionLostError("stopped while the transaction was under way"))

    def _next_batch(self) -> list[_Transaction]:
        batch: list[_Transaction] = []
        byte_count = 0
        while self._waiting and len(batch) < BATCH_TRANSACTIONS_MAX:
            byte_count += self._waiting[0].byte_count
            if batch and byte_count > BATCH_BYTES_MAX:
                break
            transaction = self._waiting.popleft()
            if not transaction.done.done():  # else cancelled while it waited: never sent
                batch.append(transaction)
        return batch

    async def _send(self, batch: list[_Transaction]) -> None:
        operations = [operation for transaction in batch for operation in transaction.operations]
        try:
            results = await self._multi(operations)
        except MultiFailed as failure:
            if len(batch) == 1:
                batch[0].fail(failure)
            else:
                for transaction in batch:
                    await self._send([transaction])
        except BookmenderError as error:
            for transaction in batch:
                transaction.fail(error)
        else:
            for transaction in batch:
                count = len(transaction.operations)
                if not transaction.done.done():
                    transaction.done.set_result(results[:count])
                results = results[count:]

    async def _multi(self, operations: Sequence[Operation]) -> Results:
        guard_count = len(self.guards)
        try:
            results = await self._store.multi([*(g.check for g in self.guards), *operations])
        except MultiFailed as failure:
            if failure.index < guard_count:
                guard = self.guards[failure.index]
                raise guard.error("a znode of ours is gone", path=guard.check.path) from failure
            raise MultiFailed(failure.index - guard_count, failure.cause) from failure
        return results[guard_count:]


def _operation_bytes(operation: Operation) -> int:
    match operation:
        case Create(path=path, data=data) | SetData(path=path, data=data):
            return len(path) + len(data) + 64
        case Delete(path=path) | Check(path=path):
            return len(path) + 64
