"""Writes the feed, as leader: makes checkpoints of the changes and appends them to the log.

``FeedPublisher`` runs beside the leader's other tasks. It never delays them and never ends the
leadership, whatever happens to the feed's ledgers: it waits and tries again. Bases and deletions
are the work of ``housekeeping``, in a task of its own.

How a leader takes the feed over:

1. Read the chain. Recover its last log ledger, which fences the former leader. If this ledger does
   not exist, create it and close it empty. Otherwise a paused former leader could create it later,
   and readers of the old chain would read what it writes.
2. The last checkpoint in the log is where this leader goes on. The first time, it also reads what
   was published (``PublishedVersions``), and compares it with the complete ledger map. The
   differences, deletions included, are pending changes like all others.
3. Reserve a ledger id, write it to the chain, and create the ledger with exactly this id. The write
   of the chain proves the leadership (rule S9). Its zxid must be later than the last checkpoint,
   and no bookie may have entries of the ledger id; otherwise ZooKeeper was restored from a backup.

The same steps follow after each failure of a writer: the recovery says which checkpoints are in the
log. ``collector`` says why no change is missed between them.

While the feed cannot be written, changes are pending in memory. If there are too many, they are
forgotten, and the comparison of step 2 is repeated later.

If a ledger of the feed is lost that a take-over needs (it was deleted, or no bookie has its
entries), the leader cannot know what clients were told. It begins the feed again, as if an operator
had disabled and enabled it: the next generation contains all ledgers, and clients are told. It does
the same after a restore of ZooKeeper (``restores``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

import structlog
from prometheus_client import Counter, Gauge

from auditor.ledger_map_updater import CHANGES_PAUSE_S, LedgerMapUpdater
from checkpoints.chain import NO_FEED, ChainWriter, FeedChain, Kind, Segment, read_chain
from checkpoints.codec import cut_checkpoints, encode_checkpoint
from checkpoints.collector import ChangeCollector
from checkpoints.errors import FeedChangedError, RestoredError
from checkpoints.feed_ledgers import (
    FeedLedgers,
    FeedLostError,
    LossGate,
    PublishedVersions,
    deleted_error,
    losses_of,
)
from checkpoints.housekeeping import FeedHousekeeper
from checkpoints.leader_state import (
    BYTES,
    FAILURES,
    PENDING,
    RETRY_MIN_S,
    FeedSettings,
    LeaderState,
)
from checkpoints.model import NO_CHECKPOINT, Checkpoint, CheckpointId, ledger_id_of
from checkpoints.new_ledgers import NewLedgers
from checkpoints.restores import NEXT_STEP
from checkpoints.stalls import FeedReporter, FeedStateRecord
from ledgers.appending import BookiePool
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    LeadershipLostError,
    NodeExistsError,
    SessionLostError,
    UnauthorizedError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.store import EventKind, MetadataStore, children_if_any
from ledgers.tasks import gather_in_parts, task_scope, until_answered, wait_woken, wake_on
from ledgers.writing import LedgerWriter
from replication.transactions import Batcher
from replication.znodes import ClusterPaths

log = structlog.get_logger()
ENABLED = Gauge("bookmender_feed_enabled", "1 while this node leads and writes the change feed.")
LAST_CHECKPOINT = Gauge(
    "bookmender_feed_last_checkpoint_timestamp_seconds",
    "Time of the last checkpoint that this leader published.",
)
CHECKPOINTS = Counter("bookmender_feed_checkpoints_total", "Checkpoints that were published.")
CHANGES = Counter("bookmender_feed_changes_total", "Changes that were published in checkpoints.")

READ_PAUSE_S = 0.01
"""Pause before changed ledgers are read, while the feed is on."""
COMPARED_AT_ONCE = 4_096
PARENTS_AT_ONCE = 100
RETRY_MAX_S = 60.0
HEARTBEAT_S = 5.0
"""Interval of empty checkpoints: without changes, and while ``feed_watchers`` has a child."""

Recover = Callable[[VersionedMetadata], Awaitable[VersionedMetadata]]
"""Fences a ledger, finds its end and closes it. Raises UnavailableError if the ledger cannot be
closed now, FeedLostError if its end is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of the log. ``empty``: closed log ledgers at the end of the chain that have no
    checkpoint."""

    last_id: CheckpointId = NO_CHECKPOINT
    time_ms: int = 0
    empty: frozenset[int] = frozenset()


class FeedPublisher:
    """Owns the feed while this node leads."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        updater: LedgerMapUpdater,
        manager: LedgerManager,
        bookies: Bookies,
        pool: BookiePool,
        recover: Recover,
        clock: Clock,
        random: Random,
        settings: FeedSettings | None = None,
        on_writing: Callable[[bool], None] | None = None,
    ) -> None:
        """``batcher``: proves the leadership. ``on_writing``: called with True when this node
        begins to write the feed, and with False when it ends."""
        self._store, self._paths = store, paths
        self._chain_writer = ChainWriter(store, batcher, paths)
        self._updater, self._manager, self._recover = updater, manager, recover
        self._clock, self._settings = clock, settings or FeedSettings()
        self._ledgers = FeedLedgers(manager, bookies, clock)
        self._new = NewLedgers(
            manager=manager, bookies=bookies, pool=pool, clock=clock, random=random
        )
        self._state = LeaderState()
        self._is_writing, self._on_writing = False, on_writing or (lambda _: None)
        self._time_ms = 0
        """The time of the last checkpoint, wall clock."""
        self._reporter = FeedReporter(
            self._state, updater, store=store, batcher=batcher, paths=paths, clock=clock
        )
        self._losses = LossGate(self._settings.lost_after_s)
        """For the ledgers that the take-over needs."""

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            async with task_scope() as scope:
                scope.start(self._follow_chain())
                scope.start(wake_on(self._updater.changes(), self._state.wake))
                scope.start(self._reporter.run())
                housekeeper = FeedHousekeeper(
                    state=self._state,
                    ledger_map=self._updater.ledger_map,
                    chain_writer=self._chain_writer,
                    manager=self._manager,
                    ledgers=self._ledgers,
                    new=self._new,
                    clock=self._clock,
                    settings=self._settings,
                    losses=LossGate(self._settings.lost_after_s),
                )
                scope.start(housekeeper.run())
                await self._publish_while_enabled()
        finally:
            self._detach()
            self._set_writing(False)
            PENDING.set(0)

    @property
    def pending_count(self) -> int:
        return self._state.pending_count

    def stall_state(self) -> FeedStateRecord:
        """Return whether the feed is stalled now, and why."""
        return self._reporter.stall_state()

    def _set_writing(self, is_writing: bool) -> None:
        ENABLED.set(is_writing)
        if is_writing is not self._is_writing:
            self._is_writing = is_writing
            self._on_writing(is_writing)

    # --- Whether the feed is on ---------------------------------------------------------------

    async def _follow_chain(self) -> None:
        async with aclosing(self._store.watch(self._paths.feed)) as events:
            async for event in events:
                if event.kind is EventKind.CHILDREN:
                    continue
                stored = await until_answered(
                    lambda: read_chain(self._store, self._paths),
                    event="feed.read_failed",
                    clock=self._clock,
                )
                if stored.error is None:  # an unreadable chain was logged; the last one applies
                    self._state.chain = stored.value or NO_FEED
                self._state.wake.set()

    async def _publish_while_enabled(self) -> None:
        retry_s = RETRY_MIN_S
        while True:
            self._state.wake.clear()
            if not self._state.chain.is_enabled:
                self._detach()
                self._set_writing(False)
                self._reporter.idles()
                await self._state.wake.wait()
                continue
            self._reporter.waits()
            try:
                await self._publish(self._state.chain.generation)
                retry_s = RETRY_MIN_S
            except (SessionLostError, LeadershipLostError):
                raise
            except FeedChangedError:  # the watch tells
                await self._clock.sleep(RETRY_MIN_S)
            except Exception as error:  # the feed must not end the leadership
                FAILURES.inc()
                is_first, self._reporter.error = self._reporter.error is None, error
                is_lost = isinstance(error, FeedLostError | RestoredError)
                if is_lost and await self._begin_again(error):
                    retry_s = RETRY_MIN_S
                    continue
                if is_first:  # since something was published
                    retry_s = RETRY_MIN_S
                    if isinstance(error, BookmenderError):
                        log.warning("feed.write_failed", error=str(error), retry_s=retry_s)
                    else:
                        log.error("feed.crashed", exc_info=error, retry_s=retry_s)
                until_s = self._clock.now_s() + retry_s
                while (left_s := until_s - self._clock.now_s()) > 0:
                    await self._clock.sleep(min(left_s, RETRY_MIN_S))
                    self._detach_if_overfull()
                retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def _begin_again(self, error: Exception) -> bool:
        """Begin another generation after a restore, or after a loss that is certain or reported for
        long enough."""
        lost = error if isinstance(error, FeedLostError) else None
        if lost and not self._losses.counts(lost.ledger_id, lost, now_s=self._clock.now_s()):
            return False
        lost_ledger_id = None if lost is None else lost.ledger_id

        def renewed(chain: FeedChain) -> FeedChain:
            if lost and lost_ledger_id not in [each.ledger_id for each in chain.segments]:
                raise ConflictError("another base or the retention made this ledger unneeded")
            return chain.renewed(now_ms=self._clock.wall_ms(), lost_ledger_id=lost_ledger_id)

        try:
            chain, _ = await self._chain_writer.change(renewed, generation=self._state.generation)
        except (SessionLostError, LeadershipLostError):
            raise
        except BookmenderError:  # the take-over is tried again, and this with it
            return False
        self._state.chain = chain
        self._losses.since_s.clear()
        if lost is None:
            log.error(
                "feed.zookeeper_restored",
                evidence=str(error),
                generation=chain.generation,
                next_step=NEXT_STEP,
            )
        else:
            log.error(
                "feed.begun_again",
                error=str(error),
                ledger_id=lost_ledger_id,
                generation=chain.generation,
                next_step="programs that follow the feed must compare their state with all "
                "ledgers; find out what deleted the ledger or the data of its bookies",
            )
        return True

    def _detach_if_overfull(self) -> None:
        if self._state.collector is not None and self._state.collector.is_overfull:
            log.warning("feed.pending_forgotten", pending_max=self._settings.pending_max)
            self._detach()

    def _detach(self) -> None:
        """Forget all pending changes. They are found again by comparison."""
        self._updater.observe(None)
        self._updater.changes_pause_s = CHANGES_PAUSE_S
        self._state.collector = None

    # --- Taking over --------------------------------------------------------------------------

    async def _publish(self, generation: int) -> None:
        """Write the feed until it is disabled, or enabled again."""
        self._set_writing(True)
        if self._state.generation != generation:
            self._detach()
            self._reporter.forget()
            self._state.generation = generation
        chain = await self._chain_writer.read()
        if not chain.is_enabled or chain.generation != generation:
            return  # the watch will tell
        self._detach_if_overfull()
        tail = await self._recover_tail(chain)
        self._time_ms = max(self._time_ms, tail.time_ms)
        if tail.last_id:
            self._reporter.remember(tail.last_id, tail.time_ms)
        if self._state.collector is None:
            await self._compare(chain, tail)
        else:
            self._state.collector.acknowledge(tail.last_id)
        self._losses.since_s.clear()
        collector = self._state.collector
        assert collector is not None
        empty = tail.empty
        while self._state.is_wanted(generation) and not collector.is_overfull:
            await self._write_log(collector, generation, empty=empty)
            empty = frozenset()

    async def _recover_tail(self, chain: FeedChain) -> Tail:
        """Close the last log ledgers, and return the end of the log."""
        logs = chain.logs
        empty: set[int] = set()
        for segment in reversed(logs):
            closed = await self._close(segment)
            with losses_of(segment):
                found = await self._ledgers.last_checkpoint(await self._ledgers.open_as(closed))
            if found is not None:
                _, last = found
                return Tail(last_id=last.id, time_ms=last.time_ms, empty=frozenset(empty))
            empty.add(segment.ledger_id)
        last_id = logs[0].previous_id if logs else NO_CHECKPOINT
        return Tail(last_id=last_id, empty=frozenset(empty))

    async def _close(self, segment: Segment) -> VersionedMetadata:
        """Return the closed ledger. A ledger that was never created is created and closed empty."""
        found = await self._manager.find(segment.ledger_id)
        if found is None:
            if segment.is_created:
                raise deleted_error(segment)
            try:
                async with self._new.create(Kind.LOG, segment.ledger_id) as writer:
                    return await writer.close()
            except NodeExistsError:  # the former leader was faster
                found = await self._manager.read(segment.ledger_id)
        return found if found.metadata.is_closed else await self._recover(found)

    async def _compare(self, chain: FeedChain, tail: Tail) -> None:
        """Begin to collect changes, the first of them being what differs from the log."""
        published = await PublishedVersions.read(chain, self._ledgers)
        self._state.log_bytes = published.log_bytes
        self._state.base_begun_s = self._clock.now_s()
        updater = self._updater
        # The map of a standby may lag behind what the former leader published. After the sync, this
        # session has seen the events of everything that is in the log.
        await self._store.sync(self._paths.feed)
        await updater.wait_known()
        if updater.hidden:
            await self._read_unlisted(published)
        collector = ChangeCollector(tail.last_id, open_max=self._settings.pending_max)
        try:
            updater.observe(collector)
            updater.changes_pause_s = READ_PAUSE_S
            first: int | None = 0
            while first is not None:
                mapped, stop = updater.ledger_map.versions(first, count_max=COMPARED_AT_ONCE)
                logged = published.between(first, stop)
                updater.read_again(collector.compare(logged, mapped, first=first, stop=stop))
                first = stop
                await asyncio.sleep(0)
            collector.end_comparison()
        except BaseException:
            self._detach()
            raise
        self._state.collector = collector

    async def _read_unlisted(self, published: PublishedVersions) -> None:
        """Read the published ledgers that the map lacks. They may be in directories that ACLs hide,
        where only ledgers whose ids are known can be found. The others are deleted."""
        first: int | None = 0
        while first is not None:
            mapped, stop = self._updater.ledger_map.versions(first, count_max=COMPARED_AT_ONCE)
            await self._updater.read_now(published.between(first, stop).keys() - mapped.keys())
            first = stop

    # --- Writing the log ----------------------------------------------------------------------

    async def _write_log(
        self, collector: ChangeCollector, generation: int, *, empty: frozenset[int]
    ) -> None:
        """Write one ledger of the log, until it is full or old, or the feed is not wanted.

        ``empty``: log ledgers without checkpoint, which the chain forgets.
        """
        # The ids that a restore gives twice are many. The first one suffices as evidence.
        skips_used = self._state.chain.is_after_restore
        async with self._new.reserved(skips_used=skips_used) as ledger_id:
            now_ms = self._clock.wall_ms()
            segment = Segment(
                ledger_id=ledger_id,
                kind=Kind.LOG,
                previous_id=collector.last_id,
                begun_ms=now_ms,
            )
            _, zxid = await self._chain_writer.change(
                lambda chain: chain.without(empty).with_segment(segment).retained(now_ms),
                generation=generation,
            )
            if zxid <= collector.last_id:
                raise RestoredError(
                    "ZooKeeper's transactions are older than the feed's last checkpoint",
                    zxid=f"{zxid:#x}",
                    last_checkpoint=f"{collector.last_id:#x}",
                )
            async with self._new.create(Kind.LOG, ledger_id) as writer:
                await self._chain_writer.change(
                    lambda chain: chain.with_created(ledger_id), generation=generation
                )
                log.info("feed.ledger_begun", ledger_id=ledger_id, previous_id=collector.last_id)
                await self._append(collector, writer, generation, zxid=zxid)
                await writer.close()

    async def _append(
        self, collector: ChangeCollector, writer: LedgerWriter, generation: int, *, zxid: int
    ) -> None:
        """``zxid``: any zxid that this session has seen, after the last checkpoint."""
        next_s = self._clock.now_s()
        roll_s = next_s + self._settings.roll_age_s
        written_bytes = 0
        is_confirmed = True
        while self._state.is_wanted(generation):
            now_s = self._clock.now_s()
            if written_bytes >= self._settings.roll_bytes:
                break
            if written_bytes and now_s >= roll_s:
                break
            if written_bytes and self._state.leaving == writer.ledger_id:
                break
            if collector.is_overfull and not collector.is_closing:
                break
            if (loss := self._state.loss) is not None and loss.ledger_id == writer.ledger_id:
                self._detach()  # the comparison reads the whole log
                raise loss
            self._state.wake.clear()
            await self._date(collector)
            if not (collector.is_closing or collector.has_open):
                if not is_confirmed:
                    await writer.add(b"")
                    is_confirmed = True
                    continue
                left_s = roll_s - now_s if written_bytes else math.inf
                self._reporter.idles()
                is_woken = await wait_woken(self._state.wake, timeout_s=min(left_s, HEARTBEAT_S))
                if not is_woken and await children_if_any(self._store, self._paths.feed_watchers):
                    written_bytes += await self._append_empty(collector, writer, generation)
                    is_confirmed = False
                self._reporter.waits()
                continue
            if next_s > now_s:
                if not is_confirmed:
                    await writer.add(b"")
                    is_confirmed = True
                await self._clock.sleep(max(0.0, next_s - self._clock.now_s()))
            next_s = self._clock.now_s() + self._settings.interval_s
            if not collector.is_closing:
                if collector.is_late and zxid <= collector.last_id:
                    _, zxid = await self._chain_writer.change(lambda c: c, generation=generation)
                if not collector.has_open:  # forgotten meanwhile
                    continue
                collector.cut(target_least=zxid if collector.is_late else 0)
            await self._updater.wait_known()
            await self._date(collector)
            written_bytes += await self._append_closing(collector, writer)
            is_confirmed = False

    async def _append_closing(self, collector: ChangeCollector, writer: LedgerWriter) -> int:
        """Publish what is being closed. Return the bytes that were written."""
        self._time_ms = max(self._time_ms, self._clock.wall_ms())
        written_bytes = 0
        collector.seal()
        runs = []
        for run in collector.sealed_runs():
            runs.append(run)
            await asyncio.sleep(0)
        checkpoints = cut_checkpoints(
            collector.spans(runs),
            previous_id=collector.last_id,
            last_id=collector.target,
            time_ms=self._time_ms,
        )
        for checkpoint in checkpoints:
            entries = encode_checkpoint(checkpoint)
            added = [await writer.send(entry) for entry in entries]
            for acknowledged in added:
                await acknowledged
            ledger_ids = [ledger_id_of(span.key) for span in checkpoint.spans]
            collector.acknowledge(checkpoint.id, [i for i in ledger_ids if i is not None])
            self._reporter.published(checkpoint.id, checkpoint.time_ms)
            written_bytes += sum(map(len, entries))
            CHECKPOINTS.inc()
            CHANGES.inc(len(checkpoint.spans))
            PENDING.set(len(collector))
        BYTES.inc(written_bytes)
        LAST_CHECKPOINT.set(self._time_ms / 1000)
        self._state.log_bytes += written_bytes
        return written_bytes

    async def _append_empty(
        self, collector: ChangeCollector, writer: LedgerWriter, generation: int
    ) -> int:
        """Publish that nothing has changed, unless something has. Return the bytes that were
        written."""
        _, zxid = await self._chain_writer.change(lambda chain: chain, generation=generation)
        await self._updater.wait_known()
        await self._date(collector)
        if collector.has_open or collector.is_closing or zxid <= collector.last_id:
            return 0
        self._time_ms = max(self._time_ms, self._clock.wall_ms())
        (entry,) = encode_checkpoint(Checkpoint(zxid, collector.last_id, self._time_ms))
        await writer.add(entry)
        collector.acknowledge(zxid, ())
        self._reporter.published(zxid, self._time_ms)
        LAST_CHECKPOINT.set(self._time_ms / 1000)
        return len(entry)

    async def _date(self, collector: ChangeCollector) -> None:
        """Give versions to deletions whose zxid is unknown: the pzxid of the nearest parent that
        exists."""
        undated = collector.undated()
        if not undated:
            return
        parents = {i: self._manager.path(i).rpartition("/")[0] for i in undated}
        wanted = sorted(set(parents.values()))
        pzxids = await gather_in_parts(self._pzxid, wanted, at_once=PARENTS_AT_ONCE)
        by_parent = dict(zip(wanted, pzxids, strict=True))
        for ledger_id in undated:
            collector.date(ledger_id, by_parent[parents[ledger_id]])

    async def _pzxid(self, path: str) -> int:
        """Return the pzxid of the znode, or of its nearest parent that exists and is readable."""
        while True:
            try:
                stat = await self._store.exists(path)
            except UnauthorizedError:
                stat = None
            if stat is not None or path in ("", "/"):
                return 0 if stat is None else stat.pzxid
            path = path.rpartition("/")[0] or "/"
