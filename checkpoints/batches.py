"""Reading the feed in batches, without a client's tasks: from one checkpoint id to another.

A batch covers the checkpoints after ``begin`` up to ``end``. It has each ledger once, at its latest
version within the batch. Reading a batch again gives the same changes. ``BatchReader.read`` proves
that no checkpoint is left out: each one names the id before it, and the first one names ``begin``.

An ``Offset`` is a place in the feed that outlives processes, such as Spark's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

from checkpoints.chain import FeedChain, Segment, read_chain
from checkpoints.errors import PositionUnknownError
from checkpoints.feed_ledgers import FeedLedgers, logs_after
from checkpoints.model import NO_CHECKPOINT, Checkpoint, CheckpointId, LogId, Version
from checkpoints.model import ledger_id_of as ledger_id_of_key
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, CorruptionError, SettingsError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore
from replication.znodes import ClusterPaths

LAGGING_TRIES: Final = 20
LAGGING_WAIT_S: Final = 0.25
"""A reader may ask bookies that do not know the end of the log yet. It asks again this often."""
CHANGES_AT_ONCE: Final = 8_000


class ChangesLostError(BookmenderError):
    """The feed does not have these changes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A place in the feed: everything up to this checkpoint was given. ``generation``: of the
    feed; ids of different generations have nothing in common. ``log``: the ledger of the log that
    has the checkpoint; None if it is not known, as in offsets of earlier releases."""

    generation: int
    checkpoint: CheckpointId
    log: LogId | None = None

    @classmethod
    def parse(cls, stored: Mapping[str, object]) -> Self:
        """Raises SettingsError if it is not an offset of the feed."""
        generation, checkpoint = stored.get("generation"), stored.get("checkpoint")
        if not isinstance(generation, int) or not isinstance(checkpoint, int):
            raise SettingsError(f"not an offset of the change feed: {dict(stored)}")
        log = stored.get("log")
        log_id = LogId(*log) if isinstance(log, list | tuple) and len(log) == 3 else None
        return cls(generation=generation, checkpoint=checkpoint, log=log_id)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The changes after ``begin`` up to ``end``, ids of checkpoints of one feed."""

    generation: int
    begin: CheckpointId
    end: CheckpointId

    @property
    def is_empty(self) -> bool:
        return self.begin >= self.end


def latest_offset(start: Offset, end: Offset, *, chain: FeedChain) -> Offset:
    """Return where the next batch ends. ``end``: of the log, as far as it is known: a new reader
    may know less than the one before it."""
    is_same = start.generation == end.generation and chain.knows(start.log)
    return start if is_same and start.checkpoint > end.checkpoint else end


def batch_between(start: Offset, end: Offset, *, may_lose: bool, chain: FeedChain) -> Batch:
    """Return the batch between two offsets. ``chain``: the present one.

    ``may_lose``: go on with a new feed if the one of ``start`` was disabled, or with all that the
    log has if ZooKeeper was restored from a backup. Raises ChangesLostError, because what changed
    between the two is unknown.
    """
    is_same = start.generation == end.generation == chain.generation
    if is_same and not (chain.knows(start.log) and chain.knows(end.log)):
        if not may_lose:
            raise _restored(start.checkpoint)
        # A batch that was planned before the restore is empty. The next one begins at its end.
        begin = NO_CHECKPOINT if chain.knows(end.log) else end.checkpoint
        return Batch(generation=end.generation, begin=begin, end=end.checkpoint)
    if start.generation != end.generation:
        if not may_lose:
            raise ChangesLostError(
                "the change feed was disabled and enabled again, and what changed between is not "
                "known",
                before=start.generation,
                after=end.generation,
            )
        return Batch(generation=end.generation, begin=NO_CHECKPOINT, end=end.checkpoint)
    return Batch(generation=end.generation, begin=start.checkpoint, end=end.checkpoint)


def segments_of(chain: FeedChain, batch: Batch) -> list[Segment]:
    """Return the log ledgers that may have checkpoints of the batch, oldest first."""
    return [each for each in logs_after(chain, batch.begin) if each.previous_id < batch.end]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """The latest version of a ledger within a batch. ``fingerprint``: None if it is deleted."""

    ledger_id: int
    version: Version
    time_ms: int
    fingerprint: int | None

    @property
    def is_deleted(self) -> bool:
        return self.fingerprint is None


class BatchReader:
    """Reads batches from the log."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        manager: LedgerManager,
        bookies: Bookies,
        clock: Clock,
    ) -> None:
        self._store, self._paths, self._clock = store, paths, clock
        self._ledgers = FeedLedgers(manager, bookies, clock)

    async def read(
        self, batch: Batch, *, may_lose: bool = False
    ) -> AsyncGenerator[list[LedgerChange], None]:
        """Yield the changes of a batch, latest first, each ledger once. Use it within ``aclosing``.

        ``may_lose``: give what the feed still has. Otherwise raises ChangesLostError if it lacks a
        part of the batch. Raises UnavailableError.
        """
        seen: set[bytes] = set()
        changes: list[LedgerChange] = []
        for part in (batch, replace(batch, begin=NO_CHECKPOINT)):
            try:
                async with aclosing(self._checkpoints(part, may_lose=may_lose)) as checkpoints:
                    async for checkpoint in checkpoints:
                        for span in checkpoint.spans:
                            if span.key in seen or span.end <= part.begin:
                                continue
                            seen.add(span.key)
                            if (ledger_id := ledger_id_of_key(span.key)) is not None:
                                change = LedgerChange(
                                    ledger_id=ledger_id,
                                    version=span.end,
                                    time_ms=checkpoint.time_ms,
                                    fingerprint=span.fingerprint,
                                )
                                changes.append(change)
                        if len(changes) >= CHANGES_AT_ONCE:
                            yield changes
                            changes = []
                            await asyncio.sleep(0)
                break
            except PositionUnknownError as error:
                if not may_lose:
                    raise _restored(batch.begin) from error
        if changes:
            yield changes

    async def _checkpoints(
        self, batch: Batch, *, may_lose: bool
    ) -> AsyncGenerator[Checkpoint, None]:
        """Yield all checkpoints of the batch, latest first. Raises PositionUnknownError if the
        batch begins within one."""
        if batch.is_empty:
            return
        expected = batch.end
        for _ in range(LAGGING_TRIES):
            chain = await self._read_chain()
            is_kept = chain.is_enabled and chain.generation == batch.generation
            logs = segments_of(chain, batch)
            async with aclosing(self._ledgers.log_backwards(logs)) as checkpoints:
                async for checkpoint in checkpoints:
                    if checkpoint.id > batch.end:
                        continue
                    if not is_kept or checkpoint.id < expected:
                        break
                    if checkpoint.id > expected:
                        raise CorruptionError(
                            "checkpoints overlap", checkpoint_id=checkpoint.id, expected=expected
                        )
                    yield checkpoint
                    expected = checkpoint.previous_id
                    if expected < batch.begin:
                        raise PositionUnknownError(begin=batch.begin, checkpoint=checkpoint.id)
                    if expected == batch.begin:
                        return
            if not is_kept or not chain.logs or expected <= chain.logs[0].previous_id:
                if may_lose:
                    return
                raise _lost(batch, expected)
            if expected < batch.end:
                raise UnavailableError("the log changed while it was read", checkpoint_id=expected)
            await self._clock.sleep(LAGGING_WAIT_S)  # the end of the batch is not visible yet
        raise UnavailableError("the log is not readable up to this checkpoint", id=batch.end)

    async def _read_chain(self) -> FeedChain:
        await self._store.sync(self._paths.feed)  # the server of this session may lag
        stored = await read_chain(self._store, self._paths)
        if stored.error is not None:
            raise UnavailableError(f"the chain of the feed is unreadable: {stored.error}")
        if stored.value is None:
            raise UnavailableError("the feed has no chain", path=self._paths.feed)
        return stored.value


def _restored(begin: CheckpointId) -> ChangesLostError:
    return ChangesLostError(
        "the change feed does not have the checkpoint that was read last, as after a restore of "
        "ZooKeeper from a backup",
        checkpoint=begin,
    )


def _lost(batch: Batch, to_id: CheckpointId) -> ChangesLostError:
    return ChangesLostError(
        "the change feed keeps only later changes. To keep more, enable it with a longer retention",
        from_id=batch.begin,
        to_id=to_id,
    )
