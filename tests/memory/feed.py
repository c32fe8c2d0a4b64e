"""A source of checkpoints, and the receipts of clients, in memory."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

from checkpoints.model import (
    NO_CHECKPOINT,
    Checkpoint,
    CheckpointId,
    CheckpointListener,
    Key,
    LogId,
    Version,
)
from checkpoints.receipts import FENCED, ClientProcess, Failure, ReceiptRange
from ledgers.errors import ClientFencedError


class MemoryCheckpointSource:
    """Keeps all checkpoints in a list. Clients of several services may share it."""

    def __init__(self, checkpoints: Iterable[Checkpoint] = ()) -> None:
        self._checkpoints = list(checkpoints)
        self._oldest_previous_id = (
            self._checkpoints[0].previous_id if self._checkpoints else NO_CHECKPOINT
        )
        self._listeners: list[CheckpointListener] = []

    @property
    def last_id(self) -> CheckpointId:
        return self._checkpoints[-1].id if self._checkpoints else self._oldest_previous_id

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, and return when every listener has received it."""
        assert checkpoint.previous_id == self.last_id, checkpoint
        assert checkpoint.id > checkpoint.previous_id, checkpoint
        self._checkpoints.append(checkpoint)
        for listener in tuple(self._listeners):
            await listener.receive_checkpoint(checkpoint)

    def delete_up_to(self, checkpoint_id: CheckpointId) -> None:
        """Delete old checkpoints, as retention does."""
        count = bisect_right(self._checkpoints, checkpoint_id, key=lambda each: each.id)
        if count:
            self._oldest_previous_id = self._checkpoints[count - 1].id
            del self._checkpoints[:count]

    def register_checkpoint_listener(self, listener: CheckpointListener) -> None:
        self._listeners.append(listener)

    def remove_checkpoint_listener(self, listener: CheckpointListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        for checkpoint in tuple(reversed(self._checkpoints)):
            if checkpoint.time_ms < earliest_time_ms:
                return
            yield checkpoint
            await asyncio.sleep(0)  # new checkpoints may be committed meanwhile

    async def oldest_previous_id(self) -> CheckpointId:
        return self._oldest_previous_id

    def log_of(self, checkpoint_id: CheckpointId) -> LogId | None:
        return None


@dataclass(slots=True)
class ClientState:
    """The stored data of one client. ``epoch`` counts how often its store was opened.
    ``process``: the id of the process that opened it last."""

    epoch: int = 0
    process: str = ""
    log: LogId | None = None
    low_watermark: CheckpointId | None = None
    end_by_begin: dict[Version, CheckpointId] = field(default_factory=dict)
    failures: dict[Key, Failure] = field(default_factory=dict)


class MemoryReceipts:
    """The table that all clients share. It outlives the stores that are opened on it."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientState] = {}

    async def open(self, client: str, process: ClientProcess | None = None) -> MemoryReceiptStore:
        """Return the store of this client, and fence the one opened before."""
        await asyncio.sleep(0)
        process = process or ClientProcess()
        state = self._clients.setdefault(client, ClientState())
        if process.is_fenced_by(epoch=state.epoch, process=state.process):
            raise ClientFencedError(FENCED)
        state.epoch += 1
        state.process, process.epoch = process.id, state.epoch
        return MemoryReceiptStore(state)

    def state(self, client: str) -> ClientState:
        """Return what is stored of a client that was opened before."""
        return self._clients[client]


class MemoryReceiptStore:
    """A ``ReceiptStore`` in memory."""

    def __init__(self, state: ClientState) -> None:
        self._all = state
        self._epoch = state.epoch

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        state = await self._state()
        state.low_watermark = max(checkpoint_id, state.low_watermark or 0)

    async def get_low_watermark(self) -> CheckpointId | None:
        return (await self._state()).low_watermark

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        stored = (await self._state()).end_by_begin
        for begin, end in ranges:
            stored[begin] = max(end, stored.get(begin, end))

    async def get_checkpoint_range_receipts(
        self, antecedent: CheckpointId
    ) -> AsyncGenerator[ReceiptRange, None]:
        stored = (await self._state()).end_by_begin
        for begin, end in sorted(stored.items(), reverse=True):
            if end > antecedent:
                yield ReceiptRange(begin, end)

    async def purge_checkpoint_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        state = await self._state()
        for each in ranges:
            state.end_by_begin = {
                begin: end
                for begin, end in state.end_by_begin.items()
                if not each.contains(ReceiptRange(begin, end)) or (begin, end) == each
            }

    async def store_failure(self, failure: Failure) -> None:
        failures = (await self._state()).failures
        before = failures.get(failure.key)
        if before is None or before.version <= failure.version:
            failures[failure.key] = failure

    async def get_failures(self) -> Sequence[Failure]:
        failures = (await self._state()).failures.values()
        return sorted(failures, key=lambda failure: failure.version)

    async def delete_failure(self, key: Key, *, up_to: Version) -> None:
        failures = (await self._state()).failures
        failure = failures.get(key)
        if failure is not None and failure.version <= up_to:
            del failures[key]

    async def store_log(self, log_id: LogId) -> None:
        (await self._state()).log = log_id

    async def get_log(self) -> LogId | None:
        return (await self._state()).log

    async def reset(self) -> None:
        state = await self._state()
        state.low_watermark, state.log, state.end_by_begin, state.failures = None, None, {}, {}

    async def close(self) -> None:
        pass

    async def _state(self) -> ClientState:
        await asyncio.sleep(0)
        if self._all.epoch != self._epoch:
            raise ClientFencedError(FENCED)
        return self._all
