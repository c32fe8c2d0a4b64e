"""The log as a source of checkpoints, for any process with a metadata store and bookies.

``CheckpointLog`` follows the chain by a watch, and polls the LAC of the open log ledger. The poll
interval is short after a checkpoint and grows while nothing happens. Nothing is fenced. What a
reader sees was acknowledged by an ack quorum of bookies, so no later recovery drops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import structlog

from checkpoints.chain import NO_FEED, FeedChain, Segment, read_chain
from checkpoints.codec import CheckpointDecoder
from checkpoints.errors import PositionUnknownError
from checkpoints.feed_ledgers import FeedLedgers, PublishedVersions
from checkpoints.model import NO_CHECKPOINT, Checkpoint, CheckpointId, CheckpointListener, LogId
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NoSuchEntryError,
    RejectedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.reading import OpenedLedger
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope, until_answered, wait_woken
from replication.znodes import ClusterPaths

log = structlog.get_logger()

POLL_MIN_S, POLL_MAX_S = 0.025, 1.0
POLL_GROWTH = 1.25
REFRESH_S = 1.0
"""Interval at which the metadata of the open ledger is read again while nothing new is found."""
RETRY_S = 1.0
READ_TRIES = 5
"""How often a whole log is read that changes meanwhile."""
READ_FAILED = (UnavailableError, RejectedError, CorruptionError)
"""Errors after which a reader tries again. None of them may end it: its metadata may be outdated,
and access may be granted later."""


class _ListenerRaised(Exception):
    """Carries an error of a listener past the code that handles failed reads."""

    def __init__(self, error: BookmenderError) -> None:
        super().__init__(str(error))
        self.error = error


class CheckpointLog:
    """A ``CheckpointSource``. ``run`` must be running: it finds new checkpoints."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        manager: LedgerManager,
        bookies: Bookies,
        clock: Clock,
        generation: int | None = None,
        poll_max_s: float = POLL_MAX_S,
    ) -> None:
        """``generation``: ``run`` ends when another feed takes the place of this one; None: it goes
        on with the new feed. ``poll_max_s``: the longest time between two looks at the end of the
        log, while nothing happens."""
        self._store, self._paths, self._clock = store, paths, clock
        self._ledgers = FeedLedgers(manager, bookies, clock)
        self._chain = NO_FEED
        self._only_generation = generation
        self._poll_max_s = poll_max_s
        self._generation = 0
        """The generation of the log that is being followed."""
        self._next_entry_id = 0
        """In the ledger that is being followed: the first entry whose checkpoint was not
        delivered."""
        self._chain_changed = asyncio.Event()
        self._listeners: list[CheckpointListener] = []
        self._started = asyncio.Event()
        """Set when the position is known from which on listeners receive checkpoints."""
        self.last_id: CheckpointId = NO_CHECKPOINT
        """The id of the last checkpoint that was found."""
        self.followed: LogId | None = None
        """The ledger of the log that has this checkpoint; None if it is not known."""
        self.is_at_end = False
        """True if this checkpoint was the last one when the end of the log was read."""

    @property
    def chain(self) -> FeedChain:
        """The chain as it was read last."""
        return self._chain

    async def wait_started(self) -> CheckpointId:
        """Wait until the end of the log is known, and return its last id."""
        await self._started.wait()
        return self.last_id

    # --- CheckpointSource ---------------------------------------------------------------------

    def register_checkpoint_listener(self, listener: CheckpointListener) -> None:
        self._listeners.append(listener)

    def remove_checkpoint_listener(self, listener: CheckpointListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        # Before the start it is unknown what listeners will receive, so there could be a gap.
        await self._started.wait()
        chain, is_first = await self._read_chain(), True
        known_id = self.last_id if chain.generation == self._generation else NO_CHECKPOINT
        for number, segment in enumerate(reversed(chain.logs)):
            opened = await self._ledgers.open(segment.ledger_id)
            if opened is None:
                if number == 0:
                    continue  # the leader is about to create it
                return  # retention has deleted it, and all earlier ones
            try:
                async with aclosing(self._ledgers.checkpoints_backwards(opened)) as checkpoints:
                    async for _, checkpoint in checkpoints:
                        if is_first and checkpoint.id < known_id:
                            raise _ends_earlier(checkpoint.id, known_id)
                        is_first = False
                        if checkpoint.time_ms < earliest_time_ms:
                            return
                        yield checkpoint
            except NoSuchEntryError as error:  # retention has just deleted it, or a new ensemble
                raise UnavailableError(
                    "the log changed while it was read", ledger_id=segment.ledger_id
                ) from error
        if is_first and chain.logs and chain.logs[-1].previous_id < known_id:
            raise _ends_earlier(chain.logs[-1].previous_id, known_id)

    async def oldest_previous_id(self) -> CheckpointId:
        logs = (await self._read_chain()).logs
        return logs[0].previous_id if logs else self.last_id

    def log_of(self, checkpoint_id: CheckpointId) -> LogId | None:
        self._require_followed()
        is_same = self._chain.generation == self._generation
        return self._chain.log_of(checkpoint_id) if is_same else None

    async def published_versions(self) -> PublishedVersions:
        """Return what the log tells of all ledgers, at least up to the last checkpoint that
        listeners received before this call.

        Raises UnavailableError, also if the log changes meanwhile. Raises CorruptionError if the
        base or a ledger of the log was deleted.
        """
        await self._started.wait()
        least = self.last_id
        for _ in range(READ_TRIES):
            chain = await self._read_chain()
            try:
                read = await self._chain_to_read(chain)
                versions = await PublishedVersions.read(read, self._ledgers)
            except (CorruptionError, NoSuchEntryError) as error:
                if await self._read_chain() == chain and isinstance(error, CorruptionError):
                    raise
                # Retention has just deleted what was read.
            else:
                # The LAC may be behind what was received, if a bookie has stopped since.
                if versions.last_id >= least:
                    return versions
            await self._clock.sleep(RETRY_S)
        raise UnavailableError("the log changed while it was read, or its end is not readable")

    async def _chain_to_read(self, chain: FeedChain) -> FeedChain:
        """Return the chain without a last log ledger that the leader is about to create."""
        logs = chain.logs
        if not logs or await self._ledgers.open(logs[-1].ledger_id) is not None:
            return chain
        return replace(chain, segments=tuple(s for s in chain.segments if s is not logs[-1]))

    # --- Following ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Send new checkpoints to the listeners until cancelled. Raises SessionLostError,
        FeedChangedError if the generation is not the wanted one, PositionUnknownError if ZooKeeper
        was restored from a backup, and any error of a listener."""
        try:
            async with task_scope() as scope:
                scope.start(self._follow_chain())
                await self._chain_changed.wait()
                await self._follow_log()
        except _ListenerRaised as raised:
            raise raised.error from raised.error.__cause__

    async def _read_chain(self) -> FeedChain:
        stored = await read_chain(self._store, self._paths)
        if stored.error is not None:
            raise UnavailableError(f"the chain of the feed is unreadable: {stored.error}")
        return stored.value or NO_FEED

    async def _follow_chain(self) -> None:
        async with aclosing(self._store.watch(self._paths.feed)) as events:
            async for _ in events:
                self._chain = await until_answered(
                    self._read_chain, event="feed.read_failed", clock=self._clock
                )
                self._chain_changed.set()

    async def _follow_log(self) -> None:
        """Deliver what follows the end of the log at the time of the call."""
        segment, self._next_entry_id = await until_answered(
            self._find_end, event="feed.read_failed", clock=self._clock, errors=READ_FAILED
        )
        self._require_generation()
        self._started.set()
        while True:
            if segment is not None:
                await self._follow_ledger(segment)
            segment, self._next_entry_id = await self._next_segment(segment), 0

    async def _find_end(self) -> tuple[Segment | None, int]:
        """Return the last log ledger, and the entry after its last complete checkpoint."""
        logs, self._generation = self._chain.logs, self._chain.generation
        if not self._is_wanted_generation:  # this log need not be readable
            return None, 0
        for segment in reversed(logs):
            opened = await self._ledgers.open(segment.ledger_id)
            found = None if opened is None else await self._ledgers.last_checkpoint(opened)
            if found is not None:
                entry_id, checkpoint = found
                self.last_id, self.followed = checkpoint.id, segment.log_id
                if segment is logs[-1]:
                    return segment, entry_id + 1
                break
        else:
            self.last_id = logs[0].previous_id if logs else NO_CHECKPOINT
        return (logs[-1], 0) if logs else (None, 0)

    async def _next_segment(self, segment: Segment | None) -> Segment:
        """Wait for the log ledger that follows."""
        while True:
            self._chain_changed.clear()
            if self._chain.generation != self._generation:
                # Checkpoints of another generation have nothing in common with earlier ones.
                if self._generation:
                    log.warning("feed.generation_changed", generation=self._chain.generation)
                self._generation = self._chain.generation
                self._require_generation()
                segment, self.last_id, self.followed = None, NO_CHECKPOINT, None
            self._require_followed()
            following = self._following(segment)
            if following is not None:
                return following
            await self._chain_changed.wait()

    @property
    def _is_wanted_generation(self) -> bool:
        return self._only_generation in (None, self._generation)

    def _require_generation(self) -> None:
        if not self._is_wanted_generation:
            raise self._chain.change_error()

    def _require_followed(self) -> None:
        if self._chain.generation == self._generation and not self._chain.knows(self.followed):
            raise PositionUnknownError(last_id=self.last_id)

    def _following(self, segment: Segment | None) -> Segment | None:
        """Return the log ledger after ``segment`` in the chain.

        The chain may have lost ``segment``: a leader drops ledgers without checkpoints, and
        retention deletes old ones. Then the first ledger that begins where we are follows.
        """
        logs = self._chain.logs
        ids = [each.ledger_id for each in logs]
        if segment is not None and segment.ledger_id in ids:
            rest = logs[ids.index(segment.ledger_id) + 1 :]
            return rest[0] if rest else None
        later = [each for each in logs if each.previous_id >= self.last_id]
        if not later and logs and segment is None:
            return logs[0]
        return later[0] if later else None

    async def _follow_ledger(self, segment: Segment) -> None:
        """Deliver the checkpoints of a ledger until it is closed and read, or until the chain has
        lost it and it is deleted."""
        decoder = CheckpointDecoder()
        opened: OpenedLedger | None = None
        opened_s = 0.0
        poll_s = POLL_MIN_S
        while True:
            self._chain_changed.clear()
            self._require_followed()
            try:
                is_old = self._clock.now_s() - opened_s >= REFRESH_S
                if opened is None or opened.metadata.is_closed or is_old:
                    opened = await self._ledgers.open(segment.ledger_id)
                    opened_s = self._clock.now_s()
                else:
                    opened = await self._ledgers.open_as(opened.versioned)
                if opened is not None and opened.lac >= self._next_entry_id:
                    await self._deliver(segment, opened, decoder)
                    poll_s, opened_s = POLL_MIN_S, self._clock.now_s()
                    continue
            except READ_FAILED as error:
                # A ledger that cannot be read now is not a deleted one: the position stays.
                is_expected = isinstance(error, UnavailableError | NoSuchEntryError)
                note = log.debug if is_expected else log.warning
                note("feed.read_failed", ledger_id=segment.ledger_id, error=str(error))
                opened = None
                if self._chain.generation != self._generation:
                    return
                await wait_woken(self._chain_changed, timeout_s=RETRY_S)
                continue
            if self._chain.generation != self._generation:
                return
            is_listed = segment.ledger_id in [each.ledger_id for each in self._chain.logs]
            if opened is not None and opened.metadata.is_closed and is_listed:
                if self._following(segment) is not None:
                    return
                poll_s = self._poll_max_s  # the next ledger comes with a change of the chain
            if not is_listed and (opened is None or opened.metadata.is_closed):
                return
            if await wait_woken(self._chain_changed, timeout_s=poll_s):
                opened = None  # a new ledger in the chain means that this one is closed
            poll_s = min(poll_s * POLL_GROWTH, self._poll_max_s)

    async def _deliver(
        self, segment: Segment, opened: OpenedLedger, decoder: CheckpointDecoder
    ) -> None:
        """Deliver the checkpoints up to the LAC. If a read fails in between, the next call goes on
        with the first checkpoint that was not delivered."""
        payloads = self._ledgers.payloads(opened, self._next_entry_id, opened.lac)
        async with aclosing(payloads) as entries:
            async for entry_id, payload in entries:
                checkpoint = decoder.decode(payload)
                self._next_entry_id = entry_id + 1
                if checkpoint is not None:
                    self.last_id, self.followed = checkpoint.id, segment.log_id
                    logs = self._chain.logs
                    is_last_ledger = bool(logs) and logs[-1].ledger_id == segment.ledger_id
                    self.is_at_end = is_last_ledger and entry_id == opened.lac
                    for listener in list(self._listeners):
                        try:
                            await listener.receive_checkpoint(checkpoint)
                        except READ_FAILED as error:
                            raise _ListenerRaised(error) from error


def _ends_earlier(last_id: CheckpointId, known_id: CheckpointId) -> UnavailableError:
    """The bookie that knew the end of the log does not answer any more. The others know that an
    entry was acknowledged only when the next one follows."""
    return UnavailableError(
        "the log ends earlier than what listeners were sent", last_id=last_id, known_id=known_id
    )
