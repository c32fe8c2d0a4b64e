"""Repair by hand on real bookies, with no daemon running, and Java's last word."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from daemon.demo.workload import Written
from daemon.local.cluster import LocalCluster
from replication.listing import locked_ledger_ids, marked_ledger_ids
from replication.membership import live_nodes
from replication.own_state import own_path
from tests.cluster.bookies_in_trouble import SESSION_TIMEOUT_S, kill_and_expire
from tests.cluster.steps import bench, shape
from tests.cluster.test_commands import bookmender
from tests.cluster.test_orders_decommission import assert_whole
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ON_TWO, ON_ALL = (2, 2, 2), (3, 3, 2)


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    return {"session_timeout_s": SESSION_TIMEOUT_S, "bookies": 3}


@pytest.fixture
def uri(module_cluster: LocalCluster) -> str:
    return module_cluster.metadata_service_uri


@pytest.mark.compat(
    "BookieRecoveryTest.testAsyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testSyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testBookieRecoveryOnClosedLedgers",
    verdict="same",
)
@pytest.mark.compat("G16", verdict="better")
def test_ledgers_are_repaired_by_hand_without_a_daemon_and_what_cannot_be_says_why(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async def run() -> list[Written]:
        async with bench(uri) as on:
            own = own_path(on.seen.ur)
            written = await on.write(*(shape(number, quorums=ON_TWO) for number in range(8)))
            (everywhere,) = await on.write(shape(8, quorums=ON_ALL))
            others = await on.names(written, victim)
            kill_and_expire(module_cluster, victim)
            try:
                one = await bookmender(uri, "repair", str(others[0]), state=tmp_path)
                assert (one.exit_code, one.out) == (0, "1 ledgers whole\n"), one
                assert await on.names(written, victim) == others[1:]

                rest = await bookmender(
                    uri, "repair", "--bookie", victim, "-o", "json", state=tmp_path
                )
                assert rest.exit_code == 1, rest
                (waiting,) = json.loads(rest.out)["waiting"]
                assert waiting["ledger_id"] == everywhere.ledger_id
                assert waiting["reason"] == "no-target"
                assert await on.names(written, victim) == []
                assert await marked_ledger_ids(on.seen.store, own) == [everywhere.ledger_id], (
                    "what could not be done is left to the nodes"
                )
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            again = await bookmender(uri, "repair", str(everywhere.ledger_id), state=tmp_path)
            assert again.exit_code == 0, again
            assert await marked_ledger_ids(on.seen.store, own) == []
            assert await on.is_idle()
            assert await locked_ledger_ids(on.seen.store, on.seen.ur) == set()
            assert await live_nodes(on.seen.store, on.seen.ur) == []
            return [*written, everywhere]

    assert_whole(java, uri, asyncio.run(run()))


def test_repair_leaves_to_the_nodes_what_it_is_told_to_only_mark(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with bench(uri) as on:
            own = own_path(on.seen.ur)
            (written,) = await on.write(shape(1))
            ledger_id = str(written.ledger_id)
            marked = await bookmender(uri, "repair", ledger_id, "--mark-only", state=tmp_path)
            assert (marked.exit_code, marked.out) == (0, "1 ledgers marked\n"), marked
            assert await marked_ledger_ids(on.seen.store, own) == [written.ledger_id]
            assert await on.is_idle(), "Java sees nothing of it"

            done = await bookmender(uri, "repair", ledger_id, state=tmp_path)
            assert done.exit_code == 0, done
            missing = await bookmender(uri, "repair", "987654321", state=tmp_path)
            assert missing.exit_code == 1
            assert "no such ledger" in missing.complaint

    asyncio.run(run())
