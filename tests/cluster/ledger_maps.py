"""Helpers for tests of the ledger map on a real ZooKeeper."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from auditor.ledger_map import LedgerMap
from auditor.ledger_map_updater import LedgerMapUpdater
from ledgers.clock import SystemClock
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore

TIMEOUT_S = 60.0


@asynccontextmanager
async def running_updater(store: MetadataStore, root: str) -> AsyncIterator[LedgerMapUpdater]:
    """Run an updater that does not rescan by itself during a test."""
    updater = LedgerMapUpdater(
        store=store,
        manager=LedgerManager(store, root, Layout.HIERARCHICAL),
        clock=SystemClock(),
    )
    task = asyncio.create_task(updater.run())
    try:
        yield updater
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_complete(updater: LedgerMapUpdater, count: int) -> None:
    """Wait until the map is complete and was completed this often."""
    while updater.completed_count < count or not updater.is_complete:
        await updater.wait_change(updater.change_count)


async def wait_until(updater: LedgerMapUpdater, condition: Callable[[LedgerMap], bool]) -> None:
    """Wait until the condition is true of a complete map."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (updater.is_complete and condition(updater.ledger_map)):
            await updater.wait_change(updater.change_count)
