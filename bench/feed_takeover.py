"""How long a new leader needs to take the change feed over, beyond its scan of all ledgers:
``python -m bench.feed_takeover``.

ZooKeeper has the metadata of a million ledgers, and three bookies store the log. Leaders follow
each other in this process, so that the scan is needed only once: a leader is a ``FeedPublisher``,
which ends as in a crash, with its ledger open. Before the next leader begins, ledgers are created,
changed and deleted. The time counts from the last of these changes until all of them are in the
log. So it includes reading them, closing the log, reading it, and comparing it with the ledger map.

The log is read from its beginning, which is the most that a leader reads before the first base, and
then from a base.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from prometheus_client import REGISTRY

from auditor.election import Election
from auditor.ledger_map_updater import LedgerMapUpdater
from checkpoints.chain import order_change, read_chain
from checkpoints.leader_state import FeedSettings
from checkpoints.log import CheckpointLog
from checkpoints.model import Checkpoint, CheckpointId, ledger_id_of
from checkpoints.publisher import FeedPublisher
from daemon.local.cluster import LocalCluster
from daemon.roles import FEED_READS_IN_FLIGHT_MAX
from ledgers.appending import BookiePool
from ledgers.bookies import Bookies
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import LedgerMetadata
from ledgers.placement import Candidate, RandomPlacement
from ledgers.recovery import recover_ledger
from ledgers.store import ANY_VERSION
from ledgers.zookeeper.store import ZooKeeperStore
from replication.nodes import Membership, NodeInfo, Role
from replication.transactions import Batcher
from tests.znode_cluster import PATHS, ZnodeCluster, bookie, closed

LEDGERS, CHANGES = 1_000_000, 10_000
FIRST_ID = 10_000_000
"""The feed's own ledgers have the low ids."""
JVM_FLAGS = ("-XX:TieredStopAtLevel=4", "-XX:ReservedCodeCacheSize=240m")
"""The compiler that an operator would give."""
ZOOKEEPER_JVM_FLAGS = (*JVM_FLAGS, "-Xmx3g")
BOOKIE_JVM_FLAGS = (*JVM_FLAGS, "-Xmx256m", "-XX:MaxDirectMemorySize=256m")
SESSION_TIMEOUT_S = 60.0
WRITES_AT_ONCE = 200
TIMEOUT_S = 600.0
POLL_S = 0.01
BASE_AT_ONCE = FeedSettings(base_bytes_min=1, base_factor=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverFigures:
    """Times in seconds. ``first_s``: from enabling the feed until it has all ledgers.
    ``from_log_s``: of a take-over that reads the whole log. ``from_base_s``: of one that reads a
    base and the log after it."""

    ledger_count: int
    change_count: int
    scan_s: float
    first_s: float
    from_log_s: float
    from_base_s: float

    @property
    def slower_s(self) -> float:
        return max(self.from_log_s, self.from_base_s)

    def text(self) -> str:
        return (
            f"{self.ledger_count:,} ledgers: scan {self.scan_s:.1f} s; all of them in the log "
            f"{self.first_s:.1f} s after the feed was enabled; take-over with "
            f"{self.change_count:,} changes: {self.from_log_s:.2f} s from the log, "
            f"{self.from_base_s:.2f} s from a base"
        )


async def measure_takeover(
    ledger_count: int = LEDGERS,
    change_count: int = CHANGES,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> TakeoverFigures:
    """Measure both take-overs. Raises UnavailableError if one does not end in time, AssertionError
    if the log lacks a change."""
    say("starting ZooKeeper and the bookies, creating the ledgers")
    async with open_ground(ledger_count) as ground:
        say("scanning")
        scan_s = await ground.scan()
        say("publishing all ledgers")
        began_s = time.monotonic()
        await ground.enable()
        async with ground.leading() as leader:
            await leader.wait_published(ledger_count)
        first_s = time.monotonic() - began_s
        say("take-over from the log")
        from_log_s = await ground.take_over(change_count)
        say("writing a base")
        async with ground.leading(BASE_AT_ONCE):
            await ground.wait_base()
        say("take-over from the base")
        from_base_s = await ground.take_over(change_count)
    return TakeoverFigures(
        ledger_count=ledger_count,
        change_count=change_count,
        scan_s=scan_s,
        first_s=first_s,
        from_log_s=from_log_s,
        from_base_s=from_base_s,
    )


@dataclass(slots=True)
class Leader:
    """A running publisher. ``published_before``: changes of the leaders before it."""

    publisher: FeedPublisher
    task: asyncio.Task[None]
    published_before: float

    async def wait_published(self, count: int) -> None:
        """Wait until it has published so many changes, and no other is pending."""

        def is_done() -> bool:
            if self.task.done():
                self.task.result()
            published = published_count() - self.published_before
            return published >= count and not self.publisher.pending_count

        await wait(is_done, f"{count} published changes")


@dataclass(slots=True)
class Ground:
    """The cluster, the session of the leaders, and a session that changes ledgers."""

    ledger_ids: list[int]
    cluster: LocalCluster
    store: ZooKeeperStore
    writer: ZooKeeperStore
    bookies: Bookies
    batcher: Batcher
    updater: LedgerMapUpdater
    clock: SystemClock
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def manager(self) -> LedgerManager:
        return ZnodeCluster(self.store).manager

    async def scan(self) -> float:
        """Wait until the ledger map is complete, and return how long it took."""
        began_s = time.monotonic()
        await wait(lambda: self.updater.is_gapless, "a complete ledger map")
        return time.monotonic() - began_s

    async def enable(self) -> None:
        now_ms = self.clock.wall_ms()
        await order_change(
            self.writer,
            PATHS,
            lambda chain: chain.enabled(now_ms=now_ms, by="bench", retention_s=3_600),
        )

    @asynccontextmanager
    async def leading(self, settings: FeedSettings | None = None) -> AsyncIterator[Leader]:
        """Run a publisher, and end it without closing its ledger."""
        publisher = FeedPublisher(
            store=self.store,
            batcher=self.batcher,
            paths=PATHS,
            updater=self.updater,
            manager=self.manager,
            bookies=self.bookies,
            pool=self._pool,
            recover=self._recover,
            clock=self.clock,
            random=self._rng,
            settings=settings,
        )
        before = published_count()
        task = asyncio.create_task(publisher.run())
        try:
            yield Leader(publisher, task, before)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def take_over(self, change_count: int) -> float:
        """Change ledgers, lead, and return the time until all changes are in the log."""
        last_id = await self.last_id()
        changed = await self._change(change_count)
        began_s = time.monotonic()
        async with self.leading() as leader:
            await leader.wait_published(change_count)
            took_s = time.monotonic() - began_s
            logged: dict[int, bool] = {}
            for checkpoint in await self.checkpoints_after(last_id):
                for span in checkpoint.spans:
                    ledger_id = ledger_id_of(span.key)
                    if ledger_id is not None and ledger_id >= FIRST_ID:  # not the feed's own
                        logged.setdefault(ledger_id, not span.is_deleted)
            assert logged == changed, "the log lacks changes"
        return took_s

    async def wait_base(self) -> None:
        async def has_base() -> bool:
            stored = await read_chain(self.store, PATHS)
            return stored.value is not None and stored.value.base is not None

        async with asyncio.timeout(TIMEOUT_S):
            while not await has_base():  # noqa: ASYNC110
                await asyncio.sleep(0.5)

    async def _change(self, count: int) -> dict[int, bool]:
        """Change ledgers; create and delete one in ten each. Return which of them exist."""
        changed: dict[int, bool] = {}
        manager, part = ZnodeCluster(self.writer).manager, count // 10
        picked = self._rng.sample(self.ledger_ids, count - part)
        deleted, kept = picked[:part], picked[part:]
        following = self.ledger_ids[-1] + 1
        created = range(following, following + part)
        self.ledger_ids = [*sorted(set(self.ledger_ids) - set(deleted)), *created]

        async def create(ledger_id: int) -> None:
            await manager.create(ledger_id, drawn_metadata(self._rng))

        async def delete(ledger_id: int) -> None:
            await manager.delete(ledger_id, version=ANY_VERSION)

        async def write(ledger_id: int) -> None:
            data = serialize_metadata(drawn_metadata(self._rng))
            await self.writer.set(manager.path(ledger_id), data, version=ANY_VERSION)

        for ids, do, exists in (
            (created, create, True),
            (deleted, delete, False),
            (kept, write, True),
        ):
            for start in range(0, len(ids), WRITES_AT_ONCE):
                await asyncio.gather(*map(do, ids[start : start + WRITES_AT_ONCE]))
            changed.update(dict.fromkeys(ids, exists))
        return changed

    async def last_id(self) -> CheckpointId:
        """Return the id of the last checkpoint in the log."""
        async with self._following() as log:
            return await log.wait_started()

    async def checkpoints_after(self, last_id: CheckpointId) -> list[Checkpoint]:
        """Return the checkpoints in the log after this one, latest first."""
        found = []
        async with (
            self._following() as log,
            aclosing(log.request_checkpoints(0)) as checkpoints,
        ):
            async for checkpoint in checkpoints:
                if checkpoint.id <= last_id:
                    break
                found.append(checkpoint)
        return found

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[CheckpointLog]:
        log = CheckpointLog(
            store=self.writer,
            paths=PATHS,
            manager=ZnodeCluster(self.writer).manager,
            bookies=self.bookies,
            clock=self.clock,
        )
        following = asyncio.create_task(log.run())
        try:
            yield log
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    @property
    def _pool(self) -> BookiePool:
        async def writable() -> list[Candidate]:
            return [Candidate(bookie=each) for each in self.cluster.bookies]

        return BookiePool(writable=writable, placement=RandomPlacement(self._rng))

    async def _recover(self, found: VersionedMetadata) -> VersionedMetadata:
        return await recover_ledger(
            found, manager=self.manager, bookies=self.bookies, pool=self._pool, clock=self.clock
        )


@asynccontextmanager
async def open_ground(ledger_count: int) -> AsyncIterator[Ground]:
    """Start a cluster with so many ledgers, which exist only as metadata, and win the election."""
    clock, rng = SystemClock(), random.Random(2)
    with (
        tempfile.TemporaryDirectory(prefix="bench-takeover-") as folder,
        LocalCluster.start(
            Path(folder),
            bookies=3,
            bookie_jvm_flags=BOOKIE_JVM_FLAGS,
            zookeeper_jvm_flags=ZOOKEEPER_JVM_FLAGS,
        ) as cluster,
    ):
        store, writer = [
            await ZooKeeperStore.open(
                cluster.zookeeper_address, session_timeout_s=SESSION_TIMEOUT_S
            )
            for _ in range(2)
        ]
        ledger_ids = list(range(FIRST_ID, FIRST_ID + ledger_count))
        try:
            await ZnodeCluster(writer).create_ledgers((i, drawn_metadata(rng)) for i in ledger_ids)
            updater = LedgerMapUpdater(
                store=store,
                manager=ZnodeCluster(store).manager,
                clock=clock,
            )
            info = NodeInfo(role=Role.AUDITOR, host="bench", pid=1, bookie_id=None, started_ms=0)
            membership = await Membership.join(store, PATHS, info)
            election = Election(store, PATHS, membership, candidate="bench", clock=clock)
            leadership = await election.win()
            updating = asyncio.create_task(updater.run())
            async with open_bookies(reads_in_flight_max=FEED_READS_IN_FLIGHT_MAX) as bookies:
                yield Ground(
                    ledger_ids=ledger_ids,
                    cluster=cluster,
                    store=store,
                    writer=writer,
                    bookies=bookies,
                    batcher=Batcher(store, leadership.guards),
                    updater=updater,
                    clock=clock,
                )
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)
        finally:
            for each in (store, writer):
                await each.close()


def drawn_metadata(rng: random.Random) -> LedgerMetadata:
    """Return the metadata of a closed ledger on three of fifty bookies."""
    return closed(*map(bookie, rng.sample(range(50), 3)), length=rng.randrange(2**31))


def published_count() -> float:
    """Return the changes that all leaders of this process have published."""
    return REGISTRY.get_sample_value("bookmender_feed_changes_total") or 0.0


async def wait(is_done: Callable[[], bool], what: str) -> None:
    """Raises UnavailableError after ``TIMEOUT_S``."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"not in time: {what}")
        await asyncio.sleep(POLL_S)


@click.command()
@click.option("--ledgers", default=LEDGERS, show_default=True)
@click.option("--changes", default=CHANGES, show_default=True, help="Changes between two leaders.")
def main(ledgers: int, changes: int) -> None:
    """Measure how long a new leader needs to take the change feed over."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began_s:6.1f} s] {text}", err=True)

    click.echo(asyncio.run(measure_takeover(ledgers, changes, say=say)).text())


if __name__ == "__main__":
    main()
