"""A daemon's copies follow racks, and avoid bookies that are short of space.

On the shared cluster.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import stop_all
from ledgers.model import BookieId
from ledgers.placement.pulsar import CONFIG_KEY
from replication.ledger_record import WaitingNotes
from replication.reasons import Exclusion, Reason
from tests.cluster.steps import (
    STOP_TIMEOUT_S,
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    nodes,
    shape,
    wait_for,
)
from tests.contract.bookie_cases import client
from tests.workload import Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

RACKS_PATH = "/racks-of-a-test"
ISOLATED = "org.apache.pulsar.bookie.rackawareness.IsolatedBookieEnsemblePlacementPolicy"
ON_TWO = (2, 2, 2)
LEDGER_COUNT = 20
"""With random placement, all of these go to the right racks once in a million runs."""


@asynccontextmanager
async def pulsar_racks(on: Bench, racks: Mapping[BookieId, str]) -> AsyncIterator[None]:
    """Write a rack table as Pulsar does, but to another znode: other tests share the cluster."""
    table = {"default": {bookie: {"rack": rack} for bookie, rack in racks.items()}}
    await on.seen.store.create(RACKS_PATH, json.dumps(table).encode())
    try:
        yield
    finally:
        await on.seen.store.delete(RACKS_PATH)


@pytest.mark.long(group="repair")
async def test_copies_of_isolated_pulsar_ledgers_stay_in_their_groups(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    settings = WORKER_ONLY | {"PLACEMENT_RACKS_ZNODE": RACKS_PATH}

    uri = cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(n, quorums=ON_TWO) for n in range(LEDGER_COUNT)))
        groups = {}
        for ledger in written:
            bookies = (await on.metadata(ledger)).bookies
            spare = min(set(cluster.bookies) - bookies)
            groups[f"g{ledger.ledger_id}"] = bookies | {spare}
            await isolate(on, ledger, f"g{ledger.ledger_id}")
        table = {name: {b: {"rack": "/r"} for b in group} for name, group in groups.items()}
        await on.seen.store.create(RACKS_PATH, json.dumps(table).encode())
        try:
            await on.lose(written)
            node = start("node", settings=settings)

            await on.wait_idle()

            for ledger in written:
                assert (await on.metadata(ledger)).bookies <= groups[f"g{ledger.ledger_id}"]
            await on.assert_whole(written)
            assert not errors(node)
        finally:
            await on.seen.store.delete(RACKS_PATH)


async def isolate(on: Bench, ledger: Written, group: str) -> None:
    """Write the metadata of an isolated ledger, as Pulsar does for a namespace."""
    config = {"policyClass": ISOLATED, "properties": {"isolationBookieGroups": group}}
    versioned = await on.seen.manager.read(ledger.ledger_id)
    metadata = replace(versioned.metadata, custom=((CONFIG_KEY, json.dumps(config).encode()),))
    await on.seen.manager.write(ledger.ledger_id, metadata, read_as=versioned)


async def test_copies_follow_the_racks_of_pulsars_znode(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    racks = {b: "/a" if i % 2 else "/b" for i, b in enumerate(sorted(cluster.bookies))}
    settings = WORKER_ONLY | {
        "PLACEMENT_RACKS_ZNODE": RACKS_PATH,
        "PLACEMENT_ENFORCE_MIN_RACKS": "true",
    }

    uri = cluster.metadata_service_uri
    async with bench(uri) as on, pulsar_racks(on, racks), nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(n, quorums=ON_TWO) for n in range(LEDGER_COUNT)))
        await on.lose(written)
        node = start("node", settings=settings)
        await on.wait_idle()

        for ledger in written:
            (segment,) = (await on.metadata(ledger)).segments
            assert {racks[bookie] for bookie in segment.ensemble} == {"/a", "/b"}
        await on.assert_whole(written)
        assert errors(node) == []


@pytest.mark.long(group="repair")
def test_no_copy_goes_to_a_bookie_short_of_space(cluster: LocalCluster, tmp_path: Path) -> None:
    free_share = asyncio.run(greatest_free_share(cluster))
    if free_share > 0.85:
        pytest.skip("the disk of this machine is emptier than any floor that may be set")
    above, below = free_share + 0.04, free_share / 2

    async def run() -> None:
        uri = cluster.metadata_service_uri
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            (ledger,) = await on.write(shape(1, quorums=ON_TWO))
            await on.lose([ledger])
            short = start("short", settings=with_floor(above))
            notes = WaitingNotes(on.seen.store, on.seen.paths)
            note = await wait_for(lambda: notes.read(ledger.ledger_id), "waiting note")
            assert note.reason is Reason.NO_TARGET
            assert Exclusion.SHORT_OF_SPACE in dict(note.blocked.facts.excluded or ())

            await asyncio.to_thread(stop_all, [short], timeout_s=STOP_TIMEOUT_S)
            start("roomy", settings=with_floor(below))
            await on.wait_idle()
            await on.assert_whole([ledger])

    asyncio.run(run())


def with_floor(share: float) -> dict[str, str]:
    return WORKER_ONLY | {
        "REPLICATION_FREE_DISK_SHARE_MIN": f"{share:.3f}",
        "REPLICATION_RETRY_MIN_S": "0.3",
        "REPLICATION_RETRY_MAX_S": "0.6",
    }


async def greatest_free_share(cluster: LocalCluster) -> float:
    bookies = client()
    try:
        disk_spaces = [await bookies.room(bookie) for bookie in cluster.bookies]
    finally:
        await bookies.close()
    return max(room.free_bytes / room.total_bytes for room in disk_spaces)
