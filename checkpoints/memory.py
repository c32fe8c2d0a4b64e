"""A source of checkpoints in memory, for tests and simulations."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable

from checkpoints.model import NO_CHECKPOINT, Checkpoint, CheckpointId, LogId
from checkpoints.source import CheckpointListener


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
