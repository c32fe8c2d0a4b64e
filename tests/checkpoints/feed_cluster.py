"""A cluster in memory with leaders that write the feed, and followers that read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from auditor.election import Election
from auditor.ledger_map_updater import LedgerMapUpdater
from checkpoints.chain import FeedChain, order_change, read_chain
from checkpoints.collector import fingerprint_of
from checkpoints.leader_state import FeedSettings
from checkpoints.log import CheckpointLog
from checkpoints.model import Checkpoint, ledger_id_of
from checkpoints.publisher import FeedPublisher
from checkpoints.restores import KnownChain, RestoreWatch
from ledgers.appending import BookiePool
from ledgers.codec.layout import Layout
from ledgers.errors import NoNodeError, SessionLostError, UnavailableError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement import Candidate, RandomPlacement
from ledgers.recovery import recover_ledger
from ledgers.store import MetadataStore, SessionState
from replication.nodes import Membership, NodeInfo, Role
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, ensure_znode
from tests.ledgers.hooked_bookies import HookedBookies
from tests.memory.store import MemoryStore, MemoryTree, Nodes
from tests.virtual_time import LoopClock

ROOT = "/ledgers"
PATHS = ClusterPaths.below(ROOT)
BOOKIES = tuple(BookieId(f"{name}:3181") for name in "abcde")
Catalogue = dict[int, int]
"""The fingerprint of each ledger's metadata."""


async def no_step(what: str) -> None:
    pass


Step = Callable[[str], Awaitable[None]]
"""Called before and after each request to a bookie."""


class NodeBookies:
    """The bookies as one node sees them."""

    def __init__(self, bookies: HookedBookies) -> None:
        self._bookies = bookies
        self.step: Step = no_step

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._bookies, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self.step(name)
            result = await request(*args, **kwargs)
            await self.step(f"{name} replied")
            return result

        return call


@dataclass
class Leader:
    """A node that leads, or waits until it does."""

    bookies: NodeBookies
    store: Any = field(init=False)
    """A ``MemoryStore``, or one on a server."""
    updater: LedgerMapUpdater = field(init=False)
    publisher: FeedPublisher | None = None
    task: asyncio.Task[None] | None = None
    thaw: Callable[[], None] = lambda: None

    @property
    def is_leading(self) -> bool:
        return self.publisher is not None and self.task is not None and not self.task.done()


@dataclass
class Follower:
    """Applies what it receives to a catalogue, and checks the promises of the feed."""

    log: CheckpointLog
    received: list[Checkpoint] = field(default_factory=list)
    catalogue: Catalogue = field(default_factory=dict)
    _versions: dict[bytes, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Start again from nothing."""
        self.received, self.catalogue, self._versions = [], {}, {}

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self.received:
            assert checkpoint.previous_id == self.received[-1].id
        self.received.append(checkpoint)
        apply(checkpoint, self.catalogue, self._versions)


def apply(checkpoint: Checkpoint, catalogue: Catalogue, versions: dict[bytes, int]) -> None:
    """Apply a checkpoint, and check that versions ascend."""
    assert checkpoint.previous_id < checkpoint.id
    assert len({span.key for span in checkpoint.spans}) == len(checkpoint.spans)
    for span in checkpoint.spans:
        assert checkpoint.previous_id < span.end <= checkpoint.id, (span, checkpoint.id)
        assert span.begin < span.end, span
        assert span.begin in (0, versions.get(span.key, 0)), (span, versions.get(span.key))
        assert versions.get(span.key, 0) < span.end
        versions[span.key] = span.end
        ledger_id = ledger_id_of(span.key)
        assert ledger_id is not None
        if span.fingerprint is None:
            catalogue.pop(ledger_id, None)
        else:
            catalogue[ledger_id] = span.fingerprint


class MemoryDisk:
    """The disk of a node, which survives its processes."""

    def __init__(self) -> None:
        self.known: KnownChain | None = None

    async def read(self) -> KnownChain | None:
        return self.known

    async def write(self, known: KnownChain) -> None:
        self.known = known


class FeedCluster:
    """Made within a running loop."""

    def __init__(self, *, seed: int = 0, settings: FeedSettings | None = None) -> None:
        self.clock = LoopClock()
        self.random = Random(seed)
        self.tree = MemoryTree(clock=self.clock)
        self.store = MemoryStore(self.tree)
        self.manager = self.new_manager(self.store)
        self.bookies = HookedBookies(BOOKIES, clock=self.clock)
        self.pool = BookiePool(writable=self._writable, placement=RandomPlacement(self.random))
        self.settings = settings or FeedSettings()
        self.unwritable: set[BookieId] = set()
        self._next_id = 1_000

    @classmethod
    async def start(cls, *, seed: int = 0, settings: FeedSettings | None = None) -> FeedCluster:
        cluster = cls(seed=seed, settings=settings)
        await cluster.prepare()
        return cluster

    async def prepare(self) -> None:
        for path in (f"{ROOT}/LAYOUT", f"{ROOT}/idgen", PATHS.election, PATHS.nodes):
            await ensure_znode(self.store, path)

    async def open_store(self) -> MetadataStore:
        return MemoryStore(self.tree)

    def new_manager(self, store: MetadataStore) -> LedgerManager:
        return LedgerManager(store, ROOT, Layout.HIERARCHICAL)

    async def enable(self, retention_s: int = 7 * 86_400) -> FeedChain:
        now_ms = self.clock.wall_ms()
        return await order_change(
            self.store,
            PATHS,
            lambda chain: chain.enabled(now_ms=now_ms, by="test", retention_s=retention_s),
        )

    async def disable(self) -> FeedChain:
        now_ms = self.clock.wall_ms()
        return await order_change(
            self.store, PATHS, lambda chain: chain.disabled(now_ms=now_ms, by="test")
        )

    async def chain(self) -> FeedChain:
        stored = await read_chain(self.store, PATHS)
        assert stored.value is not None
        return stored.value

    # --- Backups ------------------------------------------------------------------------------

    def back_up(self) -> tuple[Nodes, int]:
        """Return a backup of ZooKeeper."""
        return self.tree.nodes.copy(), self.tree._zxid

    def restore(
        self,
        backup: tuple[Nodes, int],
        *,
        epochs: int,
        collects: bool = True,
        sessions_survive: bool = False,
    ) -> None:
        """Replace ZooKeeper's data by the backup.

        ``epochs``: as many elections follow; 0: zxids go back, as in a standalone server.
        ``collects``: bookies delete the ledgers that ZooKeeper does not have, as after some time.
        """
        nodes, zxid = backup
        self.tree.nodes, self.tree._zxid = nodes.copy(), zxid + (epochs << 32)
        for session in list(self.tree._sessions.values()):
            session.suspend()
            session.resume() if sessions_survive else session.lose()
        if not sessions_survive:
            self.tree._sessions.clear()
            for path, node in list(self.tree.nodes._by_path.items()):
                if node.ephemeral_owner:
                    self.tree.nodes.remove(path)
            self.store = MemoryStore(self.tree)
            self.manager = self.new_manager(self.store)
        if collects:
            for bookie in map(self.bookies.bookie, BOOKIES):
                for ledger_id in bookie._ledgers.keys() - self.ledgers().keys():
                    del bookie._ledgers[ledger_id]

    # --- Nodes --------------------------------------------------------------------------------

    @asynccontextmanager
    async def leader(self, disk: MemoryDisk | None = None) -> AsyncIterator[Leader]:
        leader = self.start_leader(disk)
        try:
            yield leader
        finally:
            await self.stop_leader(leader)

    def start_leader(self, disk: MemoryDisk | None = None) -> Leader:
        """``disk``: of the node; None: it keeps nothing, like a new node."""
        leader = Leader(bookies=NodeBookies(self.bookies))
        self._connect(leader)
        leader.task = asyncio.create_task(self._lead_in_session(leader, disk or MemoryDisk()))
        return leader

    def _connect(self, leader: Leader) -> None:
        leader.store, leader.publisher = MemoryStore(self.tree), None
        leader.updater = LedgerMapUpdater(
            store=leader.store, manager=self.new_manager(leader.store), clock=self.clock
        )

    async def _lead_in_session(self, leader: Leader, disk: MemoryDisk) -> None:
        try:
            while True:
                try:
                    await self._lead(leader, disk)
                except BaseExceptionGroup as error:
                    is_restored = (
                        only(error, SessionLostError)
                        and leader.store.state is SessionState.CONNECTED
                    )
                    if not is_restored:
                        raise
                # Like a daemon, it opens another session.
                await leader.store.close()
                self._connect(leader)
        finally:
            await leader.store.close()

    async def stop_leader(self, leader: Leader) -> None:
        """Stop it as a crash does: its session is gone, and its ledger stays open."""
        assert leader.task is not None
        leader.task.cancel()
        results = await asyncio.gather(leader.task, return_exceptions=True)
        await leader.store.close()
        for error in results:
            if isinstance(error, Exception) and not only(error, SessionLostError):
                raise error

    async def _lead(self, leader: Leader, disk: MemoryDisk) -> None:
        store, manager = leader.store, self.new_manager(leader.store)
        info = NodeInfo(role=Role.AUDITOR, host="h", pid=1, bookie_id=None, started_ms=0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leader.updater.run())
            tasks.create_task(RestoreWatch(store, PATHS, disk, clock=self.clock).run())
            membership = await Membership.join(store, PATHS, info)
            election = Election(store, PATHS, membership, candidate="h", clock=self.clock)
            leadership = await election.win()
            batcher = Batcher(store, leadership.guards)
            leader.publisher = FeedPublisher(
                store=store,
                batcher=batcher,
                paths=PATHS,
                updater=leader.updater,
                manager=manager,
                bookies=leader.bookies,
                pool=self.pool,
                recover=lambda found: self._recover(found, manager, leader.bookies),
                clock=self.clock,
                random=self.random,
                settings=self.settings,
            )
            await leader.publisher.run()

    async def _recover(
        self, found: VersionedMetadata, manager: LedgerManager, bookies: NodeBookies
    ) -> VersionedMetadata:
        return await recover_ledger(
            found, manager=manager, bookies=bookies, pool=self.pool, clock=self.clock
        )

    @classmethod
    @asynccontextmanager
    async def followed(
        cls, *, settings: FeedSettings | None = None
    ) -> AsyncIterator[tuple[FeedCluster, Follower]]:
        """Yield a cluster with a leader, a follower, and an enabled feed."""
        cluster = await cls.start(settings=settings)
        async with cluster.leader(), cluster.follower() as follower:
            await cluster.enable()
            yield cluster, follower

    @asynccontextmanager
    async def follower(self) -> AsyncIterator[Follower]:
        store = MemoryStore(self.tree)
        follower = Follower(
            log=CheckpointLog(
                store=store,
                paths=PATHS,
                manager=self.new_manager(store),
                bookies=self.bookies,
                clock=self.clock,
            )
        )
        follower.log.register_checkpoint_listener(follower)
        task = asyncio.create_task(follower.log.run())
        try:
            yield follower
        finally:
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            await store.close()
            for error in results:
                if isinstance(error, Exception) and not only(error, SessionLostError):
                    raise error

    # --- Ledgers of others --------------------------------------------------------------------

    async def create(self, ledger_id: int | None = None) -> int:
        if ledger_id is None:
            self._next_id += 1
            ledger_id = self._next_id
        await self.manager.create(ledger_id, self.metadata())
        return ledger_id

    async def change(self, ledger_id: int) -> None:
        found = await self.manager.read(ledger_id)
        await self.manager.write(ledger_id, self.metadata(), read_as=found)

    async def delete(self, ledger_id: int) -> None:
        await self.manager.delete(ledger_id, version=-1)

    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(
            ensemble_size=3,
            write_quorum=3,
            ack_quorum=2,
            state=LedgerState.CLOSED,
            last_entry_id=self.random.randrange(1_000_000),
            length=10,
            segments=(Segment(first_entry_id=0, ensemble=tuple(self.random.sample(BOOKIES, 3))),),
        )

    # --- Oracle -------------------------------------------------------------------------------

    def ledgers(self) -> Catalogue:
        """Return the fingerprints of all metadata in ZooKeeper."""
        found = {}
        for path, data in self.tree.snapshot().items():
            ledger_id = Layout.HIERARCHICAL.ledger_id(ROOT, path)
            if ledger_id is not None and data:
                found[ledger_id] = fingerprint_of(data)
        return found

    async def logged(self) -> list[Checkpoint]:
        """Return all checkpoints in the log, oldest first, read by a new reader."""
        async with (
            self.follower() as follower,
            aclosing(follower.log.request_checkpoints(0)) as found,
        ):
            checkpoints = [checkpoint async for checkpoint in found]
        return checkpoints[::-1]

    async def wait_published(self, follower: Follower, *, timeout_s: float = 600.0) -> None:
        """Wait until the follower's catalogue equals ZooKeeper."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while follower.catalogue != self.ledgers():
                    await self.clock.sleep(0.05)
        differing = follower.catalogue.items() ^ self.ledgers().items()
        assert not differing, (sorted(differing), follower.log.last_id)

    async def assert_log_is_right(self) -> list[Checkpoint]:
        """Assert that the log, applied to nothing, gives what is in ZooKeeper, as far as it is
        published."""
        checkpoints = await self.logged()
        catalogue: Catalogue = {}
        versions: dict[bytes, int] = {}
        previous_id = (await self.chain()).logs[0].previous_id
        for checkpoint in checkpoints:
            assert checkpoint.previous_id == previous_id
            previous_id = checkpoint.id
            apply(checkpoint, catalogue, versions)
        assert catalogue == self.ledgers()
        return checkpoints

    async def assert_log_is_right_or_retained(self) -> list[Checkpoint]:
        """Assert that the log has no gap. It need not begin with the first checkpoint."""
        checkpoints = await self.logged()
        previous_id = (await self.chain()).logs[0].previous_id
        for checkpoint in checkpoints:
            assert checkpoint.previous_id == previous_id
            previous_id = checkpoint.id
        return checkpoints

    async def _writable(self) -> list[Candidate]:
        return [Candidate(bookie=bookie) for bookie in BOOKIES if bookie not in self.unwritable]


def only(error: BaseException, kind: type[Exception]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(only(each, kind) for each in error.exceptions)
    return isinstance(error, kind | NoNodeError | UnavailableError)
