"""Keeps the feed small and complete, as leader.

It deletes ledgers that are not needed, writes bases, and notices lost ledgers of the feed.
``FeedHousekeeper`` runs beside the publisher. Failures are tried again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from auditor.ledger_map import LedgerMap
from checkpoints.chain import ChainWriter, Kind, Segment
from checkpoints.codec import PAGE_LEDGERS_MAX, encode_page
from checkpoints.collector import ChangeCollector
from checkpoints.errors import FeedChangedError
from checkpoints.feed_ledgers import (
    FeedLedgers,
    FeedLostError,
    LossGate,
    deleted_error,
    losses_of,
)
from checkpoints.leader_state import (
    BYTES,
    FAILURES,
    PENDING,
    RETRY_MIN_S,
    FeedSettings,
    LeaderState,
)
from checkpoints.new_ledgers import NewLedgers
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LeadershipLostError,
    RejectedError,
    SessionLostError,
    UnavailableError,
)
from ledgers.manager import LedgerManager

log = structlog.get_logger()

HOUSEKEEPING_S = 10.0
BASE_RETRY_S = 60.0
BYTES_PER_LEDGER = 16
"""Size of a ledger in a base before compression."""
WRITTEN_AT_ONCE = 4_096
"""Ledgers of a base that are read from the ledger map in one step."""


@dataclass(slots=True, kw_only=True)
class FeedHousekeeper:
    """Deletes, checks and writes bases while this node leads."""

    state: LeaderState
    ledger_map: LedgerMap
    chain_writer: ChainWriter
    manager: LedgerManager
    ledgers: FeedLedgers
    new: NewLedgers
    clock: Clock
    settings: FeedSettings
    losses: LossGate
    """For the base and the older log ledgers."""
    _undeletable: set[int] = field(default_factory=set)
    """Ledgers that could not be deleted, which was logged."""
    _checked_count: int = 0
    """Counts the checks of older log ledgers."""

    async def run(self) -> None:
        """Delete ledgers that are not needed, and write bases. Failures are tried again later."""
        while True:
            try:
                await self._delete_unneeded()
                await self._check_ledgers()
                await self._write_base_if_due()
                pause_s = HOUSEKEEPING_S
            except (SessionLostError, LeadershipLostError):
                raise
            except FeedChangedError:
                pause_s = RETRY_MIN_S
            except Exception as error:  # the feed must not end the leadership
                FAILURES.inc()
                log.warning("feed.housekeeping_failed", error=str(error), retry_s=BASE_RETRY_S)
                pause_s = BASE_RETRY_S
            PENDING.set(self.state.pending_count)
            await self.clock.sleep(pause_s)

    async def _delete_unneeded(self) -> None:
        """Delete the ledgers that the chain names for it, if they are the feed's own.

        A ledger that is being written waits: it may not exist yet. If its id were forgotten here,
        and the ledger created afterwards, it would stay for ever.
        """
        deleting = [i for i in self.state.chain.deleting if not self.new.is_in_use(i)]
        if not deleting:
            return
        deleted = frozenset([i for i in deleting if await self._delete_own(i)])
        if deleted:
            await self.chain_writer.forget_deleted(deleted)
            log.info("feed.ledgers_deleted", count=len(deleted))

    async def _delete_own(self, ledger_id: int) -> bool:
        """Delete a ledger if it is the feed's own. Returns False if it cannot be deleted now: it
        stays in the chain, and does not stop the rest of the housekeeping."""
        try:
            found = await self.manager.find(ledger_id)
            if found is not None and found.metadata.is_of_feed:
                await self.manager.delete(ledger_id, version=found.version)
        except (CorruptionError, RejectedError) as error:
            if ledger_id not in self._undeletable:
                log.warning("feed.ledger_not_deleted", ledger_id=ledger_id, error=str(error))
            self._undeletable.add(ledger_id)
            return False
        return True

    async def _check_ledgers(self) -> None:
        """Find out whether the newest ledgers of the feed are lost. The leader only writes, so it
        would not notice, and clients would wait for ever."""
        collector, generation = self.state.collector, self.state.generation
        if collector is None or not self.state.is_wanted(generation):
            return
        base = self.state.chain.base
        if base is not None and (loss := await self._find_lasting_loss(base)) is not None:
            log.warning("feed.base_lost", ledger_id=base.ledger_id, error=str(loss))
            await self._write_base(collector, generation)
        *older, last = self.state.chain.logs or (None,)
        if last is not None and last.is_created:
            self.state.loss = await self._find_loss(last)
            if self.state.loss is not None:
                self.state.wake.set()
            else:
                await self._leave_if_drained(last)
        if older:
            await self._check_older(older, collector, generation)

    async def _leave_if_drained(self, last: Segment) -> None:
        """Let the log go on in a new ledger if one of this one's bookies takes no new ledgers:
        a drain of the bookie waits for its open ledgers."""
        found = await self.manager.find(last.ledger_id)
        if found is None or found.metadata.is_closed:
            return
        if not await self.new.would_choose(found.metadata.last_segment.ensemble):
            self.state.leaving = last.ledger_id
            self.state.wake.set()

    async def _check_older(
        self, logs: Sequence[Segment], collector: ChangeCollector, generation: int
    ) -> None:
        """Check one of these log ledgers. If it is lost, drop it and the earlier ones. Clients that
        need them are told, as if retention had deleted them."""
        self._checked_count += 1
        suspects = (each for each in logs if each.ledger_id in self.losses.since_s)
        segment = next(suspects, logs[self._checked_count % len(logs)])
        loss = await self._find_lasting_loss(segment)
        if loss is None:
            return
        await self._write_base(collector, generation)
        await self.chain_writer.change(
            lambda chain: chain.without_lost(segment.ledger_id), generation=generation
        )
        log.error(
            "feed.log_lost",
            error=str(loss),
            ledger_id=segment.ledger_id,
            next_step="programs that follow the feed and are behind must compare their state with "
            "all ledgers; find out what deleted the ledger or the data of its bookies",
        )

    async def _find_lasting_loss(self, segment: Segment) -> FeedLostError | None:
        """Return the loss of a ledger if it is certain, or was reported for long enough."""
        loss = await self._find_loss(segment)
        counts = self.losses.counts(segment.ledger_id, loss, now_s=self.clock.now_s())
        return loss if counts else None

    async def _find_loss(self, segment: Segment) -> FeedLostError | None:
        """Return what happened to a ledger of the feed: it was deleted, or no bookie has the first
        entry of one of its ensembles, because their disks were replaced."""
        try:
            if (
                await self.manager.find(segment.ledger_id) is None
                and segment in (await self.chain_writer.read()).segments
            ):
                return deleted_error(segment)
            opened = await self.ledgers.open(segment.ledger_id)
            if opened is None or opened.lac < 0:
                return None
            with losses_of(segment):
                for each in opened.metadata.segments:
                    if (first := each.first_entry_id) > opened.lac:
                        break
                    async with aclosing(self.ledgers.payloads(opened, first, first)) as entries:
                        async for _ in entries:
                            pass
        except FeedLostError as error:
            return error
        except (UnavailableError, CorruptionError, RejectedError) as error:
            # Unreadable metadata proves nothing, and stops neither other checks nor bases.
            log.debug("feed.check_failed", ledger_id=segment.ledger_id, error=str(error))
        return None

    async def _write_base_if_due(self) -> None:
        collector, generation = self.state.collector, self.state.generation
        if collector is None or not self.state.is_wanted(generation):
            return
        settings = self.settings
        base_bytes = BYTES_PER_LEDGER * len(self.ledger_map)
        age_s = self.clock.now_s() - self.state.base_begun_s
        is_large = self.state.log_bytes >= max(
            settings.base_bytes_min, settings.base_factor * base_bytes
        )
        is_old = self.state.log_bytes and age_s >= settings.base_age_s
        # Only log ledgers that a base contains can be dropped from a full chain.
        chain, bytes_max = self.state.chain, self.chain_writer.bytes_max
        is_full = len(chain.logs) > 1 and len(chain.within(bytes_max).to_json()) > bytes_max
        if is_large or is_old or is_full:
            await self._write_base(collector, generation)

    async def _write_base(self, collector: ChangeCollector, generation: int) -> None:
        """Write a base and add it to the chain.

        The base is written in slices while changes go on. It holds for each ledger a version that
        was published when its slice was written, so the log after ``previous_id`` brings all of
        them to the same state.
        """
        async with self.new.reserved() as ledger_id:
            begun_ms, self.state.base_begun_s = self.clock.wall_ms(), self.clock.now_s()
            await self.chain_writer.change(
                lambda chain: chain.with_unfinished(ledger_id), generation=generation
            )
            log_bytes, previous_id = self.state.log_bytes, collector.last_id
            size_bytes = 0
            async with self.new.create(Kind.BASE, ledger_id) as writer:
                try:
                    async with aclosing(self._base_pages(collector)) as pages:
                        async for page in pages:
                            await writer.add(page)
                            size_bytes += len(page)
                finally:
                    collector.end_base()
                await writer.close()
            if self.state.collector is not collector or collector.is_overfull:
                raise ConflictError("the pending changes were forgotten while a base was written")
            base = Segment(
                ledger_id=ledger_id,
                kind=Kind.BASE,
                previous_id=previous_id,
                begun_ms=begun_ms,
                size_bytes=size_bytes,
            )
            now_ms = self.clock.wall_ms()
            await self.chain_writer.change(
                lambda chain: chain.with_segment(base).retained(now_ms), generation=generation
            )
        self.state.log_bytes -= log_bytes
        BYTES.inc(size_bytes)
        log.info("feed.base_written", ledger_id=ledger_id, byte_count=size_bytes)

    async def _base_pages(self, collector: ChangeCollector) -> AsyncGenerator[bytes, None]:
        collector.begin_base()
        first: int | None = 0
        while first is not None and not collector.is_overfull:
            mapped, stop = self.ledger_map.versions(first, count_max=WRITTEN_AT_ONCE)
            versions = collector.published_between(mapped, first, stop)
            ids = list(versions)
            for start in range(0, len(ids), PAGE_LEDGERS_MAX):
                part = ids[start : start + PAGE_LEDGERS_MAX]
                yield encode_page(part, [versions[i] for i in part])
            first = stop
            await asyncio.sleep(0)
