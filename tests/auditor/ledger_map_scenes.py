"""A ledger map that follows ledgers in a metadata store in memory."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater, RecentWrites
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT
from tests.virtual_time import LoopClock

SOON_S = 0.5
"""Within so long the ledger map follows what happens."""


def closed(*bookies: BookieId, length: int = 10) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=len(bookies),
        write_quorum=2,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        last_entry_id=0,
        length=length,
        segments=(Segment(first_entry_id=0, ensemble=bookies),),
    )


class Ledgers:
    """The znodes of a cluster's ledgers, changed as writers change them. Made within a running
    loop."""

    def __init__(
        self, layout: Layout = Layout.HIERARCHICAL, tree: MemoryTree | None = None
    ) -> None:
        self.clock = LoopClock()
        self.tree = tree or MemoryTree(clock=self.clock)
        self.store = MemoryStore(self.tree)
        self.manager = LedgerManager(self.store, ROOT, layout)

    async def start(self) -> None:
        await self.store.create(f"{PATHS.directory}/locks", with_parents=True)
        await self.store.create(f"{ROOT}/LAYOUT")

    async def write(self, ledger_id: int, *bookies: BookieId) -> VersionedMetadata:
        """Create the ledger, or move it to these bookies."""
        metadata = closed(*(bookies or (B1, B2, B3)))
        if await self.store.exists(self.manager.path(ledger_id)) is None:
            return await self.manager.create(ledger_id, metadata)
        read_as = await self.manager.read(ledger_id)
        return await self.manager.write(ledger_id, metadata, read_as=read_as)

    async def append_segment(self, ledger_id: int, *bookies: BookieId) -> None:
        """Append a segment, as a writer does when a bookie fails."""
        found = await self.manager.read(ledger_id)
        segment = Segment(first_entry_id=1, ensemble=bookies)
        await self.manager.write(ledger_id, found.metadata.with_segment(segment), read_as=found)

    async def delete(self, ledger_id: int) -> None:
        await self.manager.delete(ledger_id, version=-1)

    async def damage(self, ledger_id: int, data: bytes = b"rubbish") -> None:
        await self.store.set(self.manager.path(ledger_id), data, version=-1)


async def with_ledgers(count: int, layout: Layout = Layout.HIERARCHICAL) -> Ledgers:
    """Return ledgers 0, 1, … on the first three bookies."""
    ledgers = Ledgers(layout)
    await ledgers.start()
    for ledger_id in range(count):
        await ledgers.write(ledger_id)
    return ledgers


@asynccontextmanager
async def keeping(
    ledgers: Ledgers, *, is_built: bool = True, recent_writes: RecentWrites | None = None
) -> AsyncIterator[LedgerMapUpdater]:
    """Yield an updater with its own session. Its map is complete unless ``is_built`` is False."""
    store = MemoryStore(ledgers.tree)
    updater = LedgerMapUpdater(
        store=store,
        manager=LedgerManager(store, ROOT, ledgers.manager.layout),
        clock=ledgers.clock,
        recent_writes=recent_writes,
    )
    task = asyncio.create_task(updater.run())
    try:
        while is_built and not updater.is_complete:
            await updater.wait_change(updater.change_count)
        yield updater
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


def rescan(updater: LedgerMapUpdater) -> None:
    """Read all metadata again, as after a reconnection."""
    for tree in updater._trees:
        updater._scan_soon(tree)


def store_of(updater: LedgerMapUpdater) -> MemoryStore:
    assert isinstance(updater.store, MemoryStore)
    return updater.store


async def read_all(manager: LedgerManager) -> dict[int, MappedLedger]:
    """Return the metadata of every readable ledger, read again."""
    found = {}
    async for ledger_ids in manager.ledger_ids():
        for read in await asyncio.gather(*map(manager.read, ledger_ids)):
            found[read.ledger_id] = MappedLedger.of(read.ledger_id, read.metadata, read.stat)
    return found


def contents(updater: LedgerMapUpdater) -> dict[int, MappedLedger | None]:
    """Return everything that the ledger map knows; None for an unreadable ledger."""
    return {i: updater.ledger_map.get(i) for i in updater.ledger_map.ledger_ids(count_max=10**6)}


async def soon(updater: LedgerMapUpdater) -> Sequence[int]:
    """Return the known ledgers after all reported changes have been read."""
    await asyncio.sleep(SOON_S)
    return updater.ledger_map.ledger_ids(count_max=10**6)
