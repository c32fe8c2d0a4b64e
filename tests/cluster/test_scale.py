"""The auditor with 1,000 bookies and 200,000 ledgers, all of them znodes."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from ledgers.model import BookieId
from ledgers.zookeeper.store import ZooKeeperStore
from replication.orders import OrderStore
from tests.cluster.steps import AUDITOR_ONLY, errors, events, nodes, wait_for
from tests.znode_cluster import LAYOUT, PATHS, ROOT, ZnodeCluster, bookie, closed
from tests.zookeeper_server import running_zookeeper

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="audit"), pytest.mark.timeout(1200)]

BOOKIES, LEDGERS = 1_000, 200_000
LOST = BOOKIES // 25
"""Far too few for a safety hold."""
WAVE = BOOKIES // 2
"""Far more than a safety hold needs."""
SETTINGS = AUDITOR_ONLY | {"ZOOKEEPER_SESSION_TIMEOUT_S": "20"}
SEED = 7


def test_only_ledgers_of_lost_bookies_are_marked(
    tmp_path: Path,
) -> None:
    """A mass failure begins a safety hold instead of more marks."""
    bookies = [bookie(number) for number in range(BOOKIES)]
    lost, wave = bookies[:LOST], bookies[LOST : LOST + WAVE]

    async def run(address: str) -> None:
        store = await ZooKeeperStore.open(address, session_timeout_s=60)
        cluster = ZnodeCluster(store)
        await _fill(cluster, bookies)
        async with nodes(f"zk+{LAYOUT.name.lower()}://{address}{ROOT}", tmp_path) as start:
            node = start("node", settings=SETTINGS)
            await wait_for(lambda: events(node, "ledger_map.built"), "ledger map", within_s=120)

            expected = await cluster.lacking(lost)
            assert expected
            began_s = time.monotonic()
            await cluster.send(map(cluster.deregistration, lost))
            await _wait_marks(cluster, expected)
            print(f"{len(expected)} marks within {time.monotonic() - began_s:.1f} s")

            await cluster.send(map(cluster.deregistration, wave))
            await wait_for(lambda: events(node, "hold.began"), "hold")
            assert (await OrderStore(store, PATHS).read()).is_held
            assert await cluster.marks() == expected
            assert [each["event"] for each in errors(node)] == ["hold.began"]
        await store.close()

    with running_zookeeper(tmp_path, heap_mib=1_024) as server:
        asyncio.run(run(server.address))


async def _fill(cluster: ZnodeCluster, bookies: list[BookieId]) -> None:
    rng = random.Random(SEED)
    await cluster.format()
    await cluster.add_bookies(bookies)
    await cluster.create_ledgers(
        (ledger_id, closed(*rng.sample(bookies, 3))) for ledger_id in range(LEDGERS)
    )


async def _wait_marks(cluster: ZnodeCluster, expected: dict[int, frozenset[BookieId]]) -> None:
    async def are_right() -> bool:
        return await cluster.marks() == expected

    await wait_for(are_right, "marks of exactly the ledgers that miss copies", within_s=120)
