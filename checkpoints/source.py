"""The interface through which clients receive checkpoints.

The log (``log``) is the source in a cluster. Tests use a source in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from checkpoints.model import Checkpoint, CheckpointId, LogId


class CheckpointListener(Protocol):
    """Receives checkpoints in ascending order of their ids, each once."""

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle one checkpoint. The next one follows when this call returns."""
        ...


class CheckpointSource(Protocol):
    """Committed checkpoints. A checkpoint is committed when it can no longer be lost."""

    def register_checkpoint_listener(self, listener: CheckpointListener) -> None:
        """Send the listener all checkpoints that are committed from now on.

        The listener receives every checkpoint that a later ``request_checkpoints`` does not
        return: there is no gap between the two. It may receive some that were returned as well.
        """
        ...

    def remove_checkpoint_listener(self, listener: CheckpointListener) -> None:
        """Send the listener nothing more."""
        ...

    def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        """Yield the committed checkpoints back to this time, latest first.

        Use it within ``contextlib.aclosing``: a caller may stop early. Retention may have deleted
        some of them; see ``oldest_previous_id``. Raises UnavailableError.
        """
        ...

    async def oldest_previous_id(self) -> CheckpointId:
        """Return the ``previous_id`` of the oldest checkpoint that is still stored.

        A client whose watermark is lower cannot learn everything that it missed. Returns the id
        of the last checkpoint if none is stored. Raises UnavailableError.
        """
        ...

    def log_of(self, checkpoint_id: CheckpointId) -> LogId | None:
        """Return which ledger of the log has this checkpoint; None if this is not known. Raises
        PositionUnknownError if the log lacks what listeners were sent: another ledger that begins
        at the same place would pass for it."""
        ...
