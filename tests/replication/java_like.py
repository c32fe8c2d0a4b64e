"""The part of Java's ReplicationWorker that decides about a mark: what it reads, and that it
unmarks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.model import Fragment, known_fragments
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

LOOK_S = 0.1


@asynccontextmanager
async def javas_worker(cluster: Cluster) -> AsyncIterator[None]:
    """Run a worker that leases everything in the shared queue at once, and nothing else."""
    task = asyncio.create_task(_run(cluster))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(cluster: Cluster) -> None:
    while True:
        for ledger_id in await cluster.marked():
            if await cluster.store.exists(PATHS.lock(ledger_id)) is None:
                await _replicate(cluster, ledger_id)
        await asyncio.sleep(LOOK_S)


async def _replicate(cluster: Cluster, ledger_id: int) -> None:
    """Do what LedgerChecker does: read the ends of each fragment without digests; copy a whole
    fragment that misses one."""
    metadata = await cluster.metadata(ledger_id)
    for fragment in known_fragments(ledger_id, metadata, lac=-1):
        for index in range(fragment.ensemble_size):
            _copy_unless_whole(cluster, fragment, index)
    await cluster.store.delete(PATHS.mark(ledger_id))


def _copy_unless_whole(cluster: Cluster, fragment: Fragment, index: int) -> None:
    bookie, entries = fragment.ensemble[index], fragment.entries_of(index)
    stored = cluster.bookie(bookie).entry_ids(fragment.ledger_id)
    if not entries or (entries[0] in stored and entries[-1] in stored):
        return
    for entry_id in entries:
        cluster.put(fragment.ledger_id, entry_id, bookie)
