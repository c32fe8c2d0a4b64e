"""DbLedgerStorage drops copies that it gets right after it collected the same ledger.

The storage deletes a ledger's index at the next checkpoint, together with entries that were added
and acknowledged in between. Reading the copy again after the flush interval shows that.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.spec import Storage
from tests.cluster.steps import WORKER_ONLY, bench, events, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="repair"), pytest.mark.timeout(480)]

FLUSH_S = 20
REREAD_S = 25


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    settings = {
        "gcWaitTime": "500",
        "gcOverreplicatedLedgerWaitTime": "500",
        "flushInterval": str(FLUSH_S * 1000),
    }
    return {
        "bookies": 4,
        "bookie_settings": settings,
        "storage": Storage.DB,
        "session_timeout_s": 4.0,
    }


async def test_a_copy_dropped_after_its_acknowledgement_is_repeated(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(shape(0, quorums=(3, 3, 3)))
        first, _, collecting = (await on.metadata(ledger)).last_segment.ensemble
        settings = WORKER_ONLY | {"REPLICATION_COPIES_REREAD_AFTER_S": str(REREAD_S)}
        node = start("node", settings=settings)

        # 1. The ledger moves from one bookie to the fourth, while the bookie is down.
        await asyncio.to_thread(module_cluster.terminate, collecting)
        await wait_for(lambda: collecting not in module_cluster.writable(), "absence of the bookie")
        await on.lose([ledger], index=2)
        await on.wait_idle()

        # 2. Another bookie stops. The first one returns, collects its old copy, and is the
        #    only possible target.
        await asyncio.to_thread(module_cluster.terminate, first)
        await wait_for(lambda: first not in module_cluster.writable(), "absence of the bookie")
        await asyncio.to_thread(module_cluster.start_bookie, collecting)
        log = module_cluster.logs / f"bookie-{collecting.rpartition(':')[2]}.log"
        collected = "Removed over-replicated ledgers"
        await wait_for(lambda: collected in log.read_text(errors="replace"), collected)

        # 3. The copy is made before the checkpoint that deletes its index.
        await on.lose([ledger], index=0)
        await on.wait_idle()
        assert collecting in (await on.metadata(ledger)).bookies

        await wait_for(lambda: events(node, "check.found"), "report", within_s=2 * REREAD_S)
        await on.wait_idle()

        await on.assert_whole([ledger])
