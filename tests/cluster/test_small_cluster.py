"""On four bookies, a closed fragment of an open ledger is repaired while its writer lives."""

import asyncio
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.model import LedgerState, Segment
from tests.cluster.bookies_in_trouble import terminate
from tests.cluster.steps import NONEXISTENT, WORKER_ONLY, bench, nodes, shape, wait_for
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}


async def test_a_closed_fragment_is_copied_to_a_bookie_of_the_open_one(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster = module_cluster
    uri = cluster.metadata_service_uri

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(
            shape(0, entry_count=10, quorums=(3, 3, 2), ending=Ending.ABANDONED)
        )
        # The writer's ensemble change: the fourth bookie replaced one that does not exist.
        found = await on.seen.manager.read(ledger.ledger_id)
        first = found.metadata.last_segment.ensemble
        (fourth,) = set(cluster.bookies) - set(first)
        changed = found.metadata.last_segment.with_bookies({1: NONEXISTENT})
        metadata = found.metadata.with_segment(changed).with_segment(
            Segment(first_entry_id=10, ensemble=(first[0], fourth, first[2]))
        )
        await on.seen.manager.write(ledger.ledger_id, metadata, read_as=found)
        await asyncio.to_thread(terminate, cluster, first[1])
        await wait_for(lambda: first[1] not in cluster.writable(), "absence of the bookie")

        start("node", settings=WORKER_ONLY)
        await on.mark([ledger.ledger_id])

        async def is_repaired() -> bool:
            return NONEXISTENT not in (await on.metadata(ledger)).bookies

        await wait_for(is_repaired, "repaired closed fragment")
        await on.wait_idle()
        after = await on.metadata(ledger)
        assert after.state is LedgerState.OPEN
        assert after.segments[0].ensemble == (first[0], fourth, first[2])
        for entry_id in range(10):
            await on.workload.bookies.read(fourth, ledger.ledger_id, entry_id)
