"""Repair by hand on real bookies without a daemon, judged by Java."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.store import ANY_VERSION
from replication.marks import locked_ledger_ids, marked_ledger_ids
from replication.nodes import live_nodes
from tests.cluster.beside_java import assert_whole
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.our_client import abandoned
from tests.cluster.steps import bench, shape, wait_for
from tests.java.tool import JavaTool
from tests.workload import Ending

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]
CLUSTER = {"bookies": 3}

ON_TWO, ON_ALL = (2, 2, 2), (3, 3, 2)


@pytest.mark.compat(
    "BookieRecoveryTest.testAsyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testSyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testBookieRecoveryOnClosedLedgers",
    verdict="same",
)
@pytest.mark.compat("G16", verdict="better")
async def test_ledgers_are_repaired_by_hand_without_a_daemon(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """A ledger that cannot be repaired is reported with the reason."""
    victim = module_cluster.bookies[0]

    async with bench(uri) as on:
        own = on.seen.paths.private
        written = await on.write(*(shape(number, quorums=ON_TWO) for number in range(8)))
        (everywhere,) = await on.write(shape(8, quorums=ON_ALL))
        others = await on.names(written, victim)
        kill_and_expire(module_cluster, victim)
        try:
            one = await bookmender(uri, "repair", str(others[0]), state=tmp_path)
            assert (one.exit_code, one.out) == (
                0,
                "1 ledger checked and whole\n",
            ), one
            assert await on.names(written, victim) == others[1:]

            rest = await bookmender(uri, "repair", "--bookie", victim, "-o", "json", state=tmp_path)
            assert rest.exit_code == 1, rest
            (waiting,) = json.loads(rest.out)["waiting"]
            assert waiting["ledger_id"] == everywhere.ledger_id
            assert waiting["reason"] == "no-target"
            assert await on.names(written, victim) == []
            assert await marked_ledger_ids(on.seen.store, own) == [everywhere.ledger_id], (
                "ledgers that could not be repaired are left to the nodes"
            )
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, victim)
        again = await bookmender(uri, "repair", str(everywhere.ledger_id), state=tmp_path)
        assert again.exit_code == 0, again
        assert await marked_ledger_ids(on.seen.store, own) == []
        assert await on.is_idle()
        assert await locked_ledger_ids(on.seen.store, on.seen.paths) == set()
        assert await live_nodes(on.seen.store, on.seen.paths) == []
        written = [*written, everywhere]

    assert_whole(java, uri, written)


async def test_an_open_ledger_without_coverage_ends_the_repair(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """After one bookie returns, the same command repairs the ledger."""
    settings = tmp_path / "bookmender.toml"
    settings.write_text("[replication]\nopen_ledger_grace_s = 1\n")

    async with bench(uri) as on:
        writer = await abandoned(uri, [b"entry"] * 30)
        ledger_id, (one, other) = writer.ledger_id, module_cluster.bookies[:2]
        repair = ("repair", str(ledger_id), "--config", str(settings))
        for bookie in (one, other):
            await asyncio.to_thread(kill_and_expire, module_cluster, bookie)
        try:
            refused = await bookmender(uri, *repair, state=tmp_path)
            assert refused.exit_code == 1, refused
            assert f"ledger {ledger_id} is blocked: no-coverage: " in refused.out
            assert f"Start enough of: {', '.join(sorted((one, other)))}" in refused.out
            assert not (await on.seen.manager.read(ledger_id)).metadata.is_closed
            status = await bookmender(uri, "status", "-o", "json")
            assert status.record["waiting"]["ledgers"][0]["reason"] == "no-coverage"
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, one)
        try:
            closed = await bookmender(uri, *repair, "-o", "json", state=tmp_path)
            (waiting,) = json.loads(closed.out)["waiting"]
            assert waiting["reason"] == "no-target", "two bookies are too few for three copies"
            metadata = (await on.seen.manager.read(ledger_id)).metadata
            assert (metadata.is_closed, metadata.last_entry_id) == (True, 29)
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, other)
        whole = await bookmender(uri, *repair, state=tmp_path)
        assert whole.exit_code == 0, whole


@pytest.mark.long(group="commands")
async def test_mark_only_leaves_the_repair_to_the_nodes(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on:
        own = on.seen.paths.private
        (written,) = await on.write(shape(1))
        ledger_id = str(written.ledger_id)
        marked = await bookmender(uri, "repair", ledger_id, "--mark-only", state=tmp_path)
        assert (marked.exit_code, marked.out) == (0, "1 ledger marked\n"), marked
        assert await marked_ledger_ids(on.seen.store, own) == [written.ledger_id]
        assert await on.is_idle(), "Java sees nothing of it"

        done = await bookmender(uri, "repair", ledger_id, state=tmp_path)
        assert done.exit_code == 0, done
        missing = await bookmender(uri, "repair", "987654321", state=tmp_path)
        assert missing.exit_code == 1
        assert "no such ledger" in missing.out


async def test_ctrl_c_leaves_the_marks_and_releases_every_lock(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on:
        store, paths = on.seen.store, on.seen.paths
        (written,) = await on.write(shape(1, ending=Ending.ABANDONED, quorums=ON_TWO))
        ledger_id = written.ledger_id
        await on.forget([written])  # its open end misses a bookie, so a grace begins
        environment = {
            **os.environ,
            "BOOKMENDER_METADATA_SERVICE_URI": uri,
            "BOOKMENDER_NODE_STATE_DIR": str(tmp_path),
        }
        repair = Child(
            "repair",
            [sys.executable, "-m", "daemon", "repair", str(ledger_id)],
            log=tmp_path / "repair.log",
            environment=environment,
        )

        async def is_locked() -> bool:
            return ledger_id in await locked_ledger_ids(store, paths)

        try:
            await wait_for(is_locked, "lock of the ledger")
            os.kill(repair.pid, signal.SIGINT)
            assert await asyncio.to_thread(repair.wait, timeout_s=10)
        finally:
            repair.kill()
        assert repair.exit_code == 130
        assert await marked_ledger_ids(store, paths.private) == [ledger_id]
        assert not await is_locked()
        assert await live_nodes(store, paths) == []

        await on.seen.manager.delete(ledger_id, version=ANY_VERSION)
        gone = await bookmender(uri, "repair", str(ledger_id), state=tmp_path)
        assert gone.exit_code == 1, gone
