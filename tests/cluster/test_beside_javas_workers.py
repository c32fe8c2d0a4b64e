"""Java's workers lease every mark, but damage that they cannot see is repaired too."""

import asyncio
from pathlib import Path

import pytest

from auditor.mark_reasons import read_findings
from daemon.local.cluster import LocalCluster
from daemon.operations.waiting import all_marked
from ledgers.bookies import Answer, Transfer
from ledgers.digest import EntryDigest
from ledgers.model import DigestType, LedgerMetadata, LedgerState, Segment
from tests.cluster.beside_java import javas
from tests.cluster.commands import bookmender, has_condition
from tests.cluster.our_client import our_client
from tests.cluster.steps import AUDITOR_ONLY, WORKER_ONLY, bench, nodes, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="java"), pytest.mark.timeout(240)]
CLUSTER = {"bookies": 3}

LAST, LOST = 29, 13
PASSWORD = b"secret"
DIGEST = EntryDigest(DigestType.CRC32C, PASSWORD)
PAYLOAD = bytes(100)
EVERY_ENTRY = AUDITOR_ONLY | {"CHECKS_ALL_LEDGERS_SHARE": "1", "CHECKS_READS_PER_S": "0"}
JAVA_HAD_TIME_S = 5.0


async def test_an_entry_lost_between_the_ends_is_copied_back(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, ensemble = module_cluster.metadata_service_uri, tuple(module_cluster.bookies)
    victim = ensemble[1]

    async with (
        our_client(uri) as client,
        bench(uri) as on,
        nodes(uri, tmp_path) as start,
        javas(module_cluster) as start_java,
    ):
        ledger_id = await client.manager.new_ledger_id()
        for entry_id in range(LAST + 1):
            entry = DIGEST.pack(
                ledger_id=ledger_id,
                entry_id=entry_id,
                lac=entry_id - 1,
                length=len(PAYLOAD) * (entry_id + 1),
                payload=PAYLOAD,
            )
            for bookie in ensemble:
                if (bookie, entry_id) != (victim, LOST):
                    key = DIGEST.master_key
                    await client.bookies.add(bookie, entry, master_key=key, is_recovery=True)
        metadata = LedgerMetadata(
            ensemble_size=3,
            write_quorum=3,
            ack_quorum=2,
            state=LedgerState.CLOSED,
            last_entry_id=LAST,
            length=len(PAYLOAD) * (LAST + 1),
            password=PASSWORD,
            segments=(Segment(first_entry_id=0, ensemble=ensemble),),
        )
        await client.manager.create(ledger_id, metadata)

        async def refused() -> dict[int, Answer]:
            reads = {victim: [0, LOST, LAST]}
            asked = Transfer(ledger_id=ledger_id, digest=DIGEST, reads=reads, entry_bytes_hint=200)
            return dict((await client.bookies.transfer(asked)).failures.get(victim, {}))

        async def is_repaired() -> bool:
            return not await refused() and not await all_marked(on.seen)

        assert await refused() == {LOST: Answer.ABSENT}
        start("auditor", settings=EVERY_ENTRY)
        await bookmender(uri, "check", "all-ledgers", "--wait")  # our auditor leads
        start_java()
        await asyncio.sleep(JAVA_HAD_TIME_S)
        found = await bookmender(uri, "check", "all-ledgers", "--wait", "-o", "json")
        await asyncio.sleep(JAVA_HAD_TIME_S)

        assert found.exit_code == 1, found
        assert await all_marked(on.seen) == {ledger_id}
        store, paths = on.seen.store, on.seen.paths
        assert (await read_findings(store, paths, [ledger_id]))[ledger_id].bookies == (victim,)
        status = (await bookmender(uri, "status", "-o", "json")).record
        assert has_condition(status, "NO_WORKERS", "ERROR")

        start("worker", settings=WORKER_ONLY)
        await wait_for(is_repaired, "entry on its bookie")
