"""The versions of ledgers, from the change feed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from checkpoints.log import CheckpointLog
from checkpoints.model import NO_CHECKPOINT, Checkpoint, ledger_id_of
from notifications.protocol import LEDGER, Change, ledger
from notifications.sources import Batch
from notifications.versions import VersionTable

POLL_S: Final = 0.025
"""How often the end of the feed's log is read. All clients of a server share these reads."""
BUFFERED_MAX: Final = 10_000
"""Checkpoints that wait while the table is loaded."""


class FeedSource:
    """A ``Source``. ``log``: is running, for one generation of the feed, with ``POLL_S``."""

    kind = LEDGER

    def __init__(self, log: CheckpointLog) -> None:
        self._log = log
        self._received: asyncio.Queue[tuple[Checkpoint, bool]] = asyncio.Queue(BUFFERED_MAX)
        log.register_checkpoint_listener(self)

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._received.put((checkpoint, self._log.is_at_end))

    async def load(self) -> VersionTable:
        """Return the versions of all ledgers, from the base of the feed and its log. Waits for the
        first checkpoint.

        Raises UnavailableError, and CorruptionError if the feed has lost a ledger."""
        published = await self._log.published_versions()
        if published.last_id == NO_CHECKPOINT:
            await self._received.get()  # the second read has it
            published = await self._log.published_versions()
        # No checkpoint has the ledgers that were deleted before the feed was enabled.
        horizon = published.horizon or published.last_id
        ids, versions = published.base
        table = VersionTable(LEDGER, horizon=horizon, ids=ids, versions=versions)
        changes = (Change(ledger(i), version, gone) for i, version, gone in published.changes())
        table.apply(changes, position=published.last_id)
        return table

    async def changes(self) -> AsyncGenerator[Batch, None]:
        """Yield each checkpoint. The leader writes one at least every 5 s while a server exists."""
        while True:
            checkpoint, is_at_end = await self._received.get()
            yield Batch(
                [
                    Change(ledger(ledger_id), span.end, span.is_deleted)
                    for span in checkpoint.spans
                    if (ledger_id := ledger_id_of(span.key)) is not None
                ],
                position=checkpoint.id,
                is_current=is_at_end,
            )
