"""Random lives of a client as docs/feed.md shows it, while ledgers of the feed are lost as well.

In the end its catalogue equals ZooKeeper. BOOKMENDER_TEST_FEED_SEEDS and
BOOKMENDER_TEST_FEED_FIRST apply as in ``test_feed_random``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from checkpoints.client import ClusterConnection, FeedClient, open_client_in
from checkpoints.collector import fingerprint_of
from checkpoints.errors import FeedChangedError
from checkpoints.model import CommittedVersion
from ledgers.errors import (
    BookmenderError,
    ClientFencedError,
    CorruptionError,
    SessionLostError,
    UnavailableError,
)
from tests.checkpoints.feed_cluster import BOOKIES, ROOT, Catalogue, FeedCluster
from tests.checkpoints.test_feed_random import FIRST, SEEDS, Simulation
from tests.memory.store import MemoryStore
from tests.virtual_time import run

EVENTS = 60


class Client:
    """One process of the client. ``table``: what it stores, which outlives the process."""

    def __init__(self, cluster: FeedCluster, table: Catalogue) -> None:
        self._cluster, self._table = cluster, table
        self._changes = asyncio.Queue[CommittedVersion]()
        self.told: list[str] = []

    async def receive(self, committed: CommittedVersion) -> None:
        self._changes.put_nowait(committed)

    async def run(self) -> None:
        while True:
            store = MemoryStore(self._cluster.tree)
            try:
                await self._follow(store)
            except ClientFencedError:
                return
            except (SessionLostError, FeedChangedError, UnavailableError, CorruptionError) as error:
                self.told.append(str(error))
                await asyncio.sleep(5)
            finally:
                await store.close()

    async def _follow(self, store: MemoryStore) -> None:
        connection = ClusterConnection(
            store=store, manager=self._cluster.new_manager(store), root=ROOT
        )
        self._changes = asyncio.Queue()
        async with open_client_in(
            connection, name="catalogue", clock=self._cluster.clock, bookies=self._cluster.bookies
        ) as client:
            missed = await client.service.subscribe(self)
            if missed.is_new or missed.lifted:
                await self._compare_with_all(client)
            for committed in missed:
                await self._handle(client, committed)
            while True:
                await self._handle(client, await self._changes.get())

    async def _handle(self, client: FeedClient, committed: CommittedVersion) -> None:
        assert committed.ledger_id is not None
        if committed.is_deleted:
            self._table.pop(committed.ledger_id, None)
        else:
            await self._update(client, committed.ledger_id, committed.version)
        client.service.submit_receipt(committed.key, committed.version)

    async def _update(self, client: FeedClient, ledger_id: int, version: int = 0) -> None:
        found = await client.metadata(ledger_id, version=version)
        if found is None:
            self._table.pop(ledger_id, None)
        else:
            self._table[ledger_id] = fingerprint_of(found.data)

    async def _compare_with_all(self, client: FeedClient) -> None:
        told = {ledger_id async for ledger_id in client.ledger_ids()}
        for ledger_id in set(self._table) - told:
            del self._table[ledger_id]
        for ledger_id in sorted(told):
            await self._update(client, ledger_id)


class LossySimulation(Simulation):
    """A life in which ledgers of the feed are deleted, or lose their entries."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cluster.settings = replace(self.cluster.settings, lost_after_s=5.0)
        self.table: Catalogue = {}
        self.client: asyncio.Task[None] | None = None

    async def restart_client(self) -> None:
        if self.client is not None:
            self.client.cancel()
            await asyncio.gather(self.client, return_exceptions=True)
        self.client = asyncio.create_task(Client(self.cluster, self.table).run())

    async def lose(self) -> None:
        segments = (await self.cluster.chain()).segments
        if not segments:
            return
        segment = self.random.choice(segments)
        with suppress(BookmenderError):
            found = await self.cluster.manager.read(segment.ledger_id)
            if self.random.random() < 0.5:
                await self.cluster.delete(segment.ledger_id)
                return
            # Of an open ledger, recovery believes bookies that say "no entry" and keep their
            # cookies. They never lose entries without losing the cookie.
            if not found.metadata.is_closed:
                return
            for bookie in map(self.cluster.bookies.bookie, BOOKIES):
                for entry_id in bookie.entry_ids(segment.ledger_id):
                    bookie.lose(segment.ledger_id, entry_id)

    async def run(self) -> None:
        await self.start()
        events = [
            *([self.change] * 8 + [self.wait] * 6 + [self.elect] * 3),
            *(self.kill, self.freeze, self.thaw, self.lose, self.restart_client),
            *([self.break_connection] * 2 + [self.bookie_fails]),
        ]
        await self.elect()
        await self.cluster.enable()
        await self.restart_client()
        for _ in range(EVENTS):
            await self.random.choice(events)()
        self.fault_share = 0.0
        await self.thaw()
        await self.elect()
        await self.wait_equal()
        await self.change()
        await self.wait_equal()
        assert self.client is not None
        assert not self.client.done(), self.client
        self.client.cancel()
        await asyncio.gather(self.client, return_exceptions=True)
        while self.leaders:
            await self.kill()

    async def wait_equal(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(600):
                while self.table != self.cluster.ledgers():  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        assert self.table == self.cluster.ledgers(), sorted(
            self.table.items() ^ self.cluster.ledgers().items()
        )


@pytest.mark.timeout(SEEDS * 20 + 60)
def test_whatever_is_lost_the_catalogue_equals_zookeeper() -> None:
    for seed in range(FIRST, FIRST + SEEDS):
        print(f"seed {seed}")
        with capture_logs() as logs:
            run(LossySimulation(seed).run())
        assert not [each for each in logs if each["event"] == "feed.crashed"]
