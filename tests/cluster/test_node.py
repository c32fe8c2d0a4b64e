"""A daemon that is cut off from ZooKeeper, or meets corrupt data and read-only bookies.

Each test leaves the cluster whole and the queue empty.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.demo import prove
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.settings import NodeSettings
from ledgers.model import BookieId, LedgerState
from ledgers.store import ANY_VERSION
from replication.ledger_record import WaitingNotes
from replication.nodes import live_nodes
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import (
    expire,
    kill_and_expire,
    make_read_only,
    make_writable,
    register_again,
    unregistered,
)
from tests.cluster.commands import bookmender, has_condition
from tests.cluster.steps import NONEXISTENT, Bench, bench, errors, events, nodes, shape, wait_for
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

STOP_MAX_S = 5.0
ON_THREE = (3, 3, 2)


# --- Start ----------------------------------------------------------------------------------------


def nice_values(node: Child) -> set[int]:
    """Return the nice values of all threads of the node."""
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
async def test_two_daemons_with_only_the_uri_share_the_work(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "BOOKMENDER_METADATA_SERVICE_URI": uri,
    }

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
            await wait_for(lambda: both_services_of(on, two), "sessions of both services of both")
            assert nice_values(two[0]) == {NodeSettings().nice}
            kill_and_expire(module_cluster, victim)
            await on.wait_repaired(written, victim)
            repaired = [ledger_id for node in two for ledger_id in repaired_by(node, tmp_path)]
            assert sorted(repaired) == at_risk

            while not all(repaired_by(node, tmp_path) for node in two):
                await on.lose(written)  # again, because the quicker one may have repaired all
                await on.wait_idle()
        finally:
            await asyncio.to_thread(stop_all, two, timeout_s=STOP_MAX_S)
            await asyncio.to_thread(module_cluster.start_bookie, victim)
        await on.assert_whole(written)


async def both_services_of(on: Bench, daemons: list[Child]) -> bool:
    live = await live_nodes(on.seen.store, on.seen.paths)
    return sorted(node.info.pid for node in live) == sorted(2 * [node.pid for node in daemons])


def repaired_by(node: Child, home: Path) -> list[int]:
    """Return the ledgers in the node's journal of metadata writes."""
    (journal,) = home.glob(f".local/state/bookmender/journal/metadata-*-{node.pid}.jsonl")
    return [json.loads(line)["ledger_id"] for line in journal.read_text().splitlines()]


# --- Outages of ZooKeeper -------------------------------------------------------------------------


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
        pytest.param(
            "10",
            False,
            marks=pytest.mark.long(group="repair"),
            id="shorter than their sessions",
        ),
        pytest.param("1", True, id="longer than their sessions"),
    ],
)
async def test_daemons_repair_losses_after_an_outage_of_zookeeper(
    module_cluster: LocalCluster, uri: str, tmp_path: Path, session_timeout_s: str, is_long: bool
) -> None:
    victim = module_cluster.bookies[1]
    settings = {"ZOOKEEPER_SESSION_TIMEOUT_S": session_timeout_s}

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(20)))
        two = [start(name, settings=settings) for name in ("one", "other")]
        await wait_for(lambda: both_services_of(on, two), "sessions of both services of both")

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


def has_lost_its_sessions(node: Child) -> bool:
    """Return True if both services of the node have lost their sessions."""
    return {event["role"] for event in events(node, "role.restarted")} == {
        "auditor",
        "replication-worker",
    }


# --- Corrupt data ---------------------------------------------------------------------------------


async def test_corrupt_ledgers_are_reported_and_others_repaired(uri: str, tmp_path: Path) -> None:
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
        assert "version" in note.blocked.facts.errors[0]
        shown = await bookmender(uri, "ledger", "show", str(corrupt))
        assert shown.exit_code == 1
        assert "its metadata cannot be read" in shown.complaint

        async def is_told() -> bool:
            status = (await bookmender(uri, "status", "-o", "json")).record
            return has_condition(status, "REPAIRS_BLOCKED", "ERROR")

        await wait_for(is_told, "condition in the status")
        assert {e["event"] for e in errors(node)} <= {"ledger_map.unreadable_ledgers"}
        assert all(e["ledger_ids"] == [corrupt] for e in errors(node))

        await store.set(ledger_path, intact, version=ANY_VERSION)
        await on.wait_idle()
        await on.assert_whole(written)


# --- Read-only and unregistered bookies -----------------------------------------------------------


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testLedgerMetadataContainsIpAddressAsBookieID",
    verdict="same",
)
async def test_a_read_only_bookie_is_no_target_but_its_copies_count(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    bookie = module_cluster.bookies[2]

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
                assert ensemble[0] not in (bookie, NONEXISTENT)
            assert not events(node, "copy.refused"), "the read-only bookie got copies"
            assert not errors(node)
        finally:
            await asyncio.to_thread(make_writable, module_cluster, bookie)


async def test_rule_s13_a_writer_with_an_unregistered_bookie_continues(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """After an outage of ZooKeeper, bookies may run without being registered."""
    touched: list[BookieId] = []

    try:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            (ledger,) = await on.write(shape(0, quorums=ON_THREE, ending=Ending.LIVE))
            bookie = (await on.metadata(ledger)).last_segment.ensemble[0]
            touched.append(bookie)
            node = start(
                "node", settings={"REPLICATION_OPEN_LEDGER_GRACE_S": "3"}
            )  # a busy writer may pause
            await wait_for(lambda: events(node, "election.won"), "vote")

            async with unregistered(on, bookie):
                await wait_for(lambda: len(extra_graces(node)) >= 2, "writer that gets graces")
                before = ledger.acknowledged
                await wait_for(lambda: ledger.acknowledged > before, "entry acknowledged")
                metadata = await on.metadata(ledger)
                assert metadata.state is LedgerState.OPEN
                assert metadata.last_segment.ensemble[0] == bookie
            await on.wait_idle()

            assert on.workload.errors == []
            (proof,) = await prove([ledger], on.workload)
            assert proof.metadata.state is LedgerState.OPEN
            assert (proof.lost, proof.wrong) == ([], [])
            assert not errors(node)
    finally:
        for bookie in touched:
            register_again(module_cluster, bookie)


def extra_graces(node: Child) -> list[dict[str, Any]]:
    """Return the graces that the ledger got because its writer was seen writing."""
    defer = events(node, "ledger.deferred")
    return [event for event in defer if event["reason"] == Reason.WRITER_ALIVE.value]
