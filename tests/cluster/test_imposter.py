"""A bookie with another id at the address of a bookie that is lost for good (rule S5)."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.digest import EntryDigest, EntryHeader
from tests.cluster.steps import bench, events, nodes, shape, wait_for
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="repair"), pytest.mark.timeout(400)]
CLUSTER = {"bookies": 4}

SETTINGS = {"REPLICATION_OPEN_LEDGER_GRACE_S": "3", "HOLD_ENABLED": "false"}


async def test_an_entry_survives_a_new_bookie_at_an_old_address(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The new bookie answers that it has no such entry."""
    cluster = module_cluster
    uri = cluster.metadata_service_uri

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(
            shape(0, entry_count=10, quorums=(3, 3, 2), ending=Ending.ABANDONED)
        )
        await on.workload.abandon()
        metadata = await on.metadata(ledger)
        gone, slow, _ = metadata.last_segment.ensemble
        assert metadata.digest_type is not None
        assert metadata.password is not None
        digest = EntryDigest(metadata.digest_type, metadata.password)

        # 1. Entry 10 is acknowledged by two bookies; the third copy was lost on its way.
        last = EntryHeader.of(await on.workload.bookies.read(slow, ledger.ledger_id, 9))
        entry = digest.pack(
            ledger_id=ledger.ledger_id,
            entry_id=10,
            lac=9,
            length=last.length + 5,
            payload=b"acked",
        )
        for bookie in (gone, slow):
            await on.workload.bookies.add(bookie, entry, master_key=digest.master_key)

        # 2. One of the two dies with its disk, and a new bookie gets its address.
        await asyncio.to_thread(cluster.terminate, gone)
        shutil.rmtree(cluster._servers.bookie_folder(gone))
        settings = {**cluster.spec.bookie_settings, "bookieId": "new-bookie"}
        spec = replace(cluster.spec, bookie_settings=settings)
        cluster._bookies[gone] = cluster._servers.bookie(spec, gone)
        await wait_for(lambda: "new-bookie" in cluster.writable(), "new bookie")

        # 3. The other one hangs for a moment, just when the ledger is recovered.
        node = start("node", settings=SETTINGS)
        await wait_for(
            lambda: any("grace" in e["reason"] for e in events(node, "ledger.deferred")),
            "grace",
        )
        cluster.pause(slow)
        try:
            await wait_for(
                lambda: any("grace" not in e["reason"] for e in events(node, "ledger.deferred")),
                "failed recovery",
            )
            assert not (await on.metadata(ledger)).is_closed
        finally:
            cluster.resume(slow)

        async def is_closed() -> bool:
            return (await on.metadata(ledger)).is_closed

        await wait_for(is_closed, "closed ledger")
        assert (await on.metadata(ledger)).last_entry_id == 10
