"""Maintenance and decommissions on real bookies, judged by Java."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.store import ANY_VERSION
from replication import znodes
from tests.cluster.beside_java import assert_whole
from tests.cluster.bookies_in_trouble import expire, kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.steps import Bench, bench, errors, events, nodes, shape, wait_for
from tests.java.tool import JavaTool
from tests.workload import Ending, Written

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

NO_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "0"}
SOON_S = 2.0
"""Enough time for an auditor without a recovery delay to mark a loss."""


async def set_delay(on: Bench, delay_s: int) -> None:
    data = znodes.recovery_delay_to_bytes(delay_s)
    await on.seen.store.set(on.seen.paths.recovery_delay, data, version=ANY_VERSION)


async def versions(on: Bench, written: Sequence[Written]) -> list[int]:
    return [(await on.seen.manager.read(ledger.ledger_id)).version for ledger in written]


@pytest.mark.long(group="commands")
async def test_a_restart_during_maintenance_marks_and_copies_nothing(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    away = module_cluster.bookies[0]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(8)))
        node = start("node")
        await wait_for(lambda: events(node, "audit.finished"), "audit")
        before = await versions(on, written)
        said = await bookmender(
            uri, "bookie", "maintenance", away, "--for", "1h", "--reason", "new disk"
        )
        assert said.exit_code == 0, said

        await asyncio.to_thread(module_cluster.terminate, away)
        expire(module_cluster, away)
        await asyncio.sleep(SOON_S)
        listed = await bookmender(uri, "bookie", "list", "-o", "json")
        assert {
            row["bookie_id"]: (row["state"], row["maintenance"]["reason"])
            for row in listed.record["bookies"]
            if row["maintenance"]
        } == {away: ("absent", "new disk")}
        assert await on.is_idle()
        await asyncio.to_thread(module_cluster.start_bookie, away)
        ended = await bookmender(uri, "bookie", "maintenance", away, "--end")
        assert ended.exit_code == 0, ended
        await asyncio.sleep(SOON_S)

        assert await on.is_idle()
        assert await versions(on, written) == before
        assert not events(node, "bookies.lost")
        assert not errors(node)
        await on.assert_whole(written)


@pytest.mark.compat("BookieDecommissionTest.testDecommissionBookie", verdict="better")
@pytest.mark.compat(
    "BookieDecommissionTest.testDecommissionForLedgersWithMultipleSegmentsAndNotWriteClosed",
    verdict="better",
)
@pytest.mark.compat("BookieDecommissionTest.testDecommissionForEmptyLedgers", verdict="better")
async def test_a_bookie_with_ledgers_of_all_states_is_decommissioned(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(
            *(shape(number) for number in range(8)),
            *(shape(number, entry_count=0) for number in range(8, 16)),
            *(shape(number, ending=Ending.ABANDONED) for number in range(16, 24)),
            *(shape(number, ending=Ending.ABANDONED, entry_count=0) for number in range(24, 32)),
        )
        assert await on.names(written, victim)
        node = start("node", settings=NO_GRACE)
        await wait_for(lambda: events(node, "audit.finished"), "audit")
        await set_delay(on, 3_600)

        refused = await bookmender(uri, "bookie", "decommission", victim)
        assert refused.exit_code == 1
        assert "Stop it for good" in refused.complaint

        kill_and_expire(module_cluster, victim)
        await asyncio.sleep(SOON_S)
        assert await on.is_idle(), "during the recovery delay it is not lost"
        said = await bookmender(uri, "bookie", "decommission", victim, "-o", "json")

        assert said.exit_code == 0, said
        assert json.loads(said.out)["cookie_deleted"] is True
        assert await on.names(written, victim) == []
        assert await on.is_idle()
        assert victim not in await on.seen.registration.cookies()
        again = await bookmender(uri, "bookie", "decommission", victim, "--ignore-unknown")
        assert again.exit_code == 0, again
    assert_whole(java, uri, written)
    assert not any(victim in mark.replicas for mark in java.under_replicated(uri))
