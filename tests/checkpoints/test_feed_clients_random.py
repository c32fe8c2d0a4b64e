"""Random changes, leaders and faults, and a client that is killed again and again. In the end its
catalogue equals ZooKeeper.

``BOOKMENDER_TEST_FEED_SEEDS=1000`` tries as many seeds. ``BOOKMENDER_TEST_FEED_FIRST`` is the first
seed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from checkpoints import codec
from checkpoints.log import CheckpointLog
from checkpoints.model import CommittedVersion, ledger_id_of
from checkpoints.recovery import RecoveryService, RecoverySettings
from ledgers.errors import (
    BookmenderError,
    ClientFencedError,
    CorruptionError,
    SessionLostError,
    UnavailableError,
)
from ledgers.store import Delete, Operation, SetData
from ledgers.tasks import task_scope
from tests.checkpoints.clients import ledger_of
from tests.checkpoints.faulty_store import FaultyStore, StoreFault
from tests.checkpoints.feed_cluster import PATHS, Catalogue, FeedCluster, Follower
from tests.checkpoints.test_feed_random import FIRST, SEEDS, Simulation
from tests.memory.feed import MemoryReceipts
from tests.memory.store import MemoryStore
from tests.virtual_time import run

EVENTS = 60
NAME = "catalogue"


class CatalogueClient:
    """A client, whose processes follow each other. The catalogue outlives them, like a database."""

    def __init__(self, simulation: ClientSimulation) -> None:
        self._simulation, self._cluster = simulation, simulation.cluster
        self._random = simulation.random
        self._receipts = MemoryReceipts()
        self._stores: list[FaultyStore] = []
        self._task: asyncio.Task[None] | None = None
        self.catalogue: Catalogue = {}
        self.counts: dict[str, int] = {}
        self.has_faults = True
        self._changes: asyncio.Queue[CommittedVersion] = asyncio.Queue()

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._live())

    async def kill(self) -> None:
        """Kill the process. Calls of its store that were not answered may be applied later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def stop(self) -> None:
        await self.kill()
        for store in self._stores:
            await store.settle_late()

    def raise_if_ended(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    async def _live(self) -> None:
        while True:
            try:
                await self._follow()
            except (UnavailableError, SessionLostError, ClientFencedError, CorruptionError) as e:
                self._count(type(e).__name__)
            await asyncio.sleep(1)

    async def _follow(self) -> None:
        cluster, session = self._cluster, MemoryStore(self._cluster.tree)
        log = CheckpointLog(
            store=session,
            paths=PATHS,
            manager=cluster.new_manager(session),
            bookies=cluster.bookies,
            clock=cluster.clock,
        )
        store = FaultyStore(await self._receipts.open(NAME), clock=cluster.clock, fault=self._fault)
        self._stores.append(store)
        self._changes = asyncio.Queue()
        settings = RecoverySettings(
            compaction_interval_s=self._random.choice([5, 60]),
            recover_back_s=self._random.choice([20.0, 1e9, 1e9, 1e9]),
        )
        try:
            async with (
                task_scope() as scope,
                RecoveryService.open(log, store, settings=settings, clock=cluster.clock) as service,
            ):
                scope.start(log.run())
                missed = await service.subscribe(self)
                if missed.is_new or missed.lifted:
                    self._count("lifted" if missed.lifted else "new")
                    await self._work()
                    self.catalogue = cluster.ledgers()
                for committed in missed:
                    await self._handle(service, committed)
                await service.retry_failures()
                while True:
                    await self._handle(service, await self._changes.get())
        finally:
            await session.close()

    async def receive(self, committed: CommittedVersion) -> None:
        if self._random.random() < 0.1:
            await self._work()  # the source waits
        self._changes.put_nowait(committed)

    async def _handle(self, service: RecoveryService, committed: CommittedVersion) -> None:
        await self._work()
        ledger_id = ledger_of(committed)
        if self.has_faults and self._random.random() < 0.05:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._random.choice([0.01, 60])):
                    await service.submit_failure(committed.key, committed.version, "odd")
            self._count("failed")
            await self._work()
            await service.retry_failures()
            self._changes.put_nowait(committed)  # in case it was not stored
            return
        now = self._cluster.ledgers().get(ledger_id)
        if now is None:
            self.catalogue.pop(ledger_id, None)
        else:
            self.catalogue[ledger_id] = now
        await self._work()
        receipt = service.submit_receipt(committed.key, committed.version)
        self._count("handled")
        if self._random.random() < 0.05:
            with suppress(TimeoutError):
                async with asyncio.timeout(3):
                    await receipt

    async def _work(self) -> None:
        await asyncio.sleep(self._random.choice([0, 0, 0, 0.01, 0.3]))

    def _fault(self) -> StoreFault | None:
        if not self.has_faults or self._random.random() > 0.1:
            return None
        return self._random.choice(list(StoreFault))

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class ClientSimulation(Simulation):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.client = CatalogueClient(self)

    async def change_many(self) -> None:
        """Change several ledgers in one transaction: their versions are equal."""
        cluster: FeedCluster = self.cluster
        ids = sorted(i for i in cluster.ledgers() if i > 1_000)
        operations: list[Operation] = []
        for ledger_id in self.random.sample(ids, min(len(ids), self.random.randrange(9))):
            found = await cluster.manager.find(ledger_id)
            if found is not None:
                path = cluster.manager.path(ledger_id)
                if self.random.random() < 0.3:
                    operations.append(Delete(path=path, version=found.version))
                else:
                    operations.append(
                        SetData(path=path, data=found.data + b" ", version=found.version)
                    )
        with suppress(BookmenderError):
            await cluster.store.multi(operations)

    async def run(self) -> None:
        await self.start()
        events = [
            *([self.change] * 6 + [self.change_many] * 3 + [self.wait] * 6 + [self.elect] * 3),
            *(self.kill, self.freeze, self.thaw, self.bookie_fails),
            *([self.break_connection] * 2 + [self.client.start] * 4 + [self.client.kill] * 2),
        ]
        await self.elect()
        await self.cluster.enable(retention_s=self.random.choice([1, 10, 1_000_000]))
        async with self.cluster.follower() as follower:
            for _ in range(EVENTS):
                await self.random.choice(events)()
            self.fault_share = 0.0
            self.client.has_faults = False
            await self.thaw()
            await self.elect()
            await self.client.start()
            await self._wait_equal(follower)
            await self.client.kill()
            await self.change()
            await self.client.start()
            await self._wait_equal(follower)
        await self.client.stop()
        while self.leaders:
            await self.kill()

    async def _wait_equal(self, follower: Follower) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(600):
                while self._differing(follower):
                    await self.cluster.clock.sleep(0.1)
        self.client.raise_if_ended()
        assert not self._differing(follower)

    def _differing(self, follower: Follower) -> list[tuple[int, int]]:
        """Return where the catalogue differs from ZooKeeper.

        A ledger that is created and deleted while no node leads is never told. The client may
        have seen it by chance. So what was never told may be in the catalogue.
        """
        told = {
            (ledger_id_of(span.key), span.fingerprint)
            for checkpoint in follower.received
            for span in checkpoint.spans
        }
        ledgers, catalogue = self.cluster.ledgers(), self.client.catalogue
        return sorted(
            each
            for each in catalogue.items() ^ ledgers.items()
            if each in told or each[0] in ledgers
        )


@pytest.mark.timeout(SEEDS * 10 + 60)
def test_whatever_happens_the_catalogue_equals_zookeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    for seed in range(FIRST, FIRST + SEEDS):
        print(f"seed {seed}")
        monkeypatch.setattr(codec, "SPANS_MAX", 3 if seed % 2 else 8_000)
        simulation = ClientSimulation(seed)
        with capture_logs() as logs:
            run(simulation.run())
        assert not [each for each in logs if each["event"] == "feed.crashed"]
        for name, count in simulation.client.counts.items():
            counts[name] = counts.get(name, 0) + count
    print(counts)
