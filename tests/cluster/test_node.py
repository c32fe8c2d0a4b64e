"""A daemon's life: started, cut off from ZooKeeper, shown what is corrupt or read-only.

Each test leaves the cluster whole and the queue empty.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.demo.workload import Ending
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.settings import NodeSettings
from ledgers.model import BookieId, LedgerState
from ledgers.store import ANY_VERSION
from replication.ledger_record import WaitingNotes
from replication.nodes import live_nodes
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import (
    READ_ONLY_SURVIVES_RESTART,
    SESSION_TIMEOUT_S,
    expire,
    kill_and_expire,
    make_read_only,
    make_writable,
    register_anew,
    unregistered,
)
from tests.cluster.steps import GONE, Bench, bench, errors, events, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

STOP_MAX_S = 5.0
ON_THREE = (3, 3, 2)


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    return {
        "session_timeout_s": SESSION_TIMEOUT_S,
        "bookie_settings": READ_ONLY_SURVIVES_RESTART,
    }


# --- Started ---------------------------------------------------------------------------------------


def nice_values(node: Child) -> set[int]:
    """Of all its threads."""
    threads = Path(f"/proc/{node.pid}/task").iterdir()
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads}


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateFragmentsToTargetBookie",
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorker",
    "BookieAutoRecoveryTest.testClosedLedgers",
    verdict="better",
)
@pytest.mark.compat(
    "AutoRecoveryMainTest.testStartup",
    "BookieRecoveryTest.testAsyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testSyncBookieRecoveryToRandomBookies",
    "BookieRecoveryTest.testBookieRecoveryOnClosedLedgers",
    verdict="same",
)
@pytest.mark.compat(
    "TestAutoRecoveryAlongWithBookieServers.testAutoRecoveryAlongWithBookieServers",
    verdict="other",
    why="bookmender is a separate process, so neither it nor the bookie stops the other",
)
def test_two_daemons_that_know_nothing_but_the_address_share_the_work(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "BOOKMENDER_METADATA_SERVICE_URI": uri,
    }

    async def run() -> None:
        async with bench(uri) as on:
            written = await on.write(*(shape(number) for number in range(40)))
            at_risk = sorted(await on.names(written, victim))
            two = [
                Child(
                    name,
                    [sys.executable, "-m", "daemon", "daemon"],
                    log=tmp_path / f"{name}.log",
                    environment=environment,
                )
                for name in ("one", "other")
            ]
            try:
                await wait_for(lambda: both_halves_of(on, two), "session of both halves of both")
                assert nice_values(two[0]) == {NodeSettings().nice}
                kill_and_expire(module_cluster, victim)
                await on.wait_repaired(written, victim)
                repaired = [ledger_id for node in two for ledger_id in repaired_by(node, tmp_path)]
                assert sorted(repaired) == at_risk

                while not all(repaired_by(node, tmp_path) for node in two):
                    await on.lose(written)  # once more: the quicker one may have taken all
                    await on.wait_idle()
            finally:
                await asyncio.to_thread(stop_all, two, timeout_s=STOP_MAX_S)
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            await on.assert_whole(written)

    asyncio.run(run())


async def both_halves_of(on: Bench, daemons: list[Child]) -> bool:
    live = await live_nodes(on.seen.store, on.seen.paths)
    return sorted(node.info.pid for node in live) == sorted(2 * [node.pid for node in daemons])


def repaired_by(node: Child, home: Path) -> list[int]:
    """By its journal of metadata writes."""
    (journal,) = home.glob(f".local/state/bookmender/journal/metadata-*-{node.pid}.jsonl")
    return [json.loads(line)["ledger_id"] for line in journal.read_text().splitlines()]


# --- Cut off ---------------------------------------------------------------------------------------


@pytest.mark.compat("TestReplicationWorker.testRWZKConnectionLost", verdict="same")
@pytest.mark.compat(
    "TestReplicationWorker.testRWZKConnectionLostOnNonRecoverableZkError",
    verdict="better",
)
@pytest.mark.compat(
    "AutoRecoveryMainTest.testAutoRecoverySessionLoss",
    verdict="better",
    why="each role continues with a new session, in the same process",
)
@pytest.mark.parametrize(
    ("session_timeout_s", "is_long"),
    [
        pytest.param("10", False, id="shorter than their sessions"),
        pytest.param("1", True, id="longer than their sessions"),
    ],
)
def test_daemons_outlive_an_outage_of_zookeeper_and_repair_what_was_lost_meanwhile(
    module_cluster: LocalCluster, uri: str, tmp_path: Path, session_timeout_s: str, is_long: bool
) -> None:
    victim = module_cluster.bookies[1]
    settings = {"ZOOKEEPER_SESSION_TIMEOUT_S": session_timeout_s}

    async def run() -> None:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            written = await on.write(*(shape(number) for number in range(20)))
            two = [start(name, settings=settings) for name in ("one", "other")]
            await wait_for(lambda: both_halves_of(on, two), "session of both halves of both")

            module_cluster.kill_zookeeper()
            module_cluster.kill(victim)
            if is_long:
                await wait_for(lambda: all(map(has_lost_its_sessions, two)), "end of sessions")
            await asyncio.to_thread(module_cluster.restart_zookeeper)
            expire(module_cluster, victim)

            try:
                await on.wait_repaired(written, victim)
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            await on.assert_whole(written)
            for node in two:
                assert node.is_running
                assert has_lost_its_sessions(node) is is_long
                assert not errors(node)

    asyncio.run(run())


def has_lost_its_sessions(node: Child) -> bool:
    """Both halves'."""
    return {event["role"] for event in events(node, "role.restarted")} == {
        "auditor",
        "replication-worker",
    }


# --- Corrupt ---------------------------------------------------------------------------------------


def test_what_is_corrupt_is_reported_and_the_rest_is_mended(uri: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            store, paths = on.seen.store, on.seen.paths
            written = await on.write(*(shape(number) for number in range(6)))
            await on.lose(written)
            corrupt = written[0].ledger_id
            ledger_path = on.seen.manager.path(corrupt)
            intact, _ = await store.get(ledger_path)
            await store.set(ledger_path, b"BookieMetadataFormatVersion\t9\n", version=ANY_VERSION)
            mark_path = paths.mark(written[1].ledger_id)
            await store.set(mark_path, b"replica: \xff", version=ANY_VERSION)

            node = start("node", settings={"REPLICATION_RETRY_MIN_S": "0.5"})
            await wait_for(lambda: on.has_marked([corrupt]), "queue with one ledger")
            note = await wait_for(lambda: WaitingNotes(store, paths).read(corrupt), "note")
            await on.assert_whole(written[1:])
            assert note.reason is Reason.CORRUPT_METADATA
            assert "version" in note.detail
            assert {e["event"] for e in errors(node)} <= {"ledger_map.unreadable_ledgers"}
            assert all(e["ledger_ids"] == [corrupt] for e in errors(node))

            await store.set(ledger_path, intact, version=ANY_VERSION)
            await on.wait_idle()
            await on.assert_whole(written)

    asyncio.run(run())


# --- Read-only, and there without a znode ----------------------------------------------------------


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testLedgerMetadataContainsIpAddressAsBookieID",
    verdict="same",
)
def test_a_read_only_bookie_is_no_target_and_its_copies_count(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    bookie = module_cluster.bookies[2]

    async def run() -> None:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            written = await on.write(*(shape(number) for number in range(30)))
            await asyncio.to_thread(make_read_only, module_cluster, bookie)
            try:
                before = [await on.metadata(ledger) for ledger in written]
                await on.lose(written)
                node = start("node")
                await wait_for(lambda: events(node, "audit.finished"), "audit")
                await on.wait_idle()

                await on.assert_whole(written)
                for ledger, old in zip(written, before, strict=True):
                    ensemble = (await on.metadata(ledger)).last_segment.ensemble
                    assert ensemble[1:] == old.last_segment.ensemble[1:]
                    assert ensemble[0] not in (bookie, GONE)
                assert not events(node, "copy.refused"), "it was asked to take copies"
                assert not errors(node)
            finally:
                await asyncio.to_thread(make_writable, module_cluster, bookie)

    asyncio.run(run())


def test_an_open_ledger_is_not_fenced_while_its_writer_reaches_a_bookie_that_has_no_znode(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """Rule S13: after an outage of ZooKeeper bookies may be there without being registered."""
    touched: list[BookieId] = []

    async def run() -> None:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            (ledger,) = await on.write(shape(0, quorums=ON_THREE, ending=Ending.LIVE))
            bookie = (await on.metadata(ledger)).last_segment.ensemble[0]
            touched.append(bookie)
            node = start("node", settings={"REPLICATION_OPEN_LEDGER_GRACE_S": "1"})
            await wait_for(lambda: events(node, "election.won"), "vote")

            async with unregistered(on, bookie):
                await wait_for(lambda: len(extra_graces(node)) >= 2, "writer that earns graces")
                before = ledger.acknowledged
                await wait_for(lambda: ledger.acknowledged > before, "entry acknowledged")
                metadata = await on.metadata(ledger)
                assert metadata.state is LedgerState.OPEN
                assert metadata.last_segment.ensemble[0] == bookie
            await on.wait_idle()

            assert ledger.ended_by is None
            (proof,) = await on.prove([ledger])
            assert proof.metadata.state is LedgerState.OPEN
            assert (proof.lost, proof.wrong) == ([], [])
            assert not errors(node)

    try:
        asyncio.run(run())
    finally:
        for bookie in touched:
            register_anew(module_cluster, bookie)


def extra_graces(node: Child) -> list[dict[str, Any]]:
    """Those that a ledger got because its writer was seen to go on."""
    defer = events(node, "ledger.put_aside")
    return [event for event in defer if event["reason"] == Reason.WRITER_ALIVE.value]
