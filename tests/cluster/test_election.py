"""Elections on a real ZooKeeper: leaders that stop, are killed, or lose their vote or session."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from auditor.election import current_leader, in_order
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from replication.marks import marked_ledger_ids
from replication.nodes import live_nodes
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, errors, events, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}

LONG_S = 30.0
"""A session timeout so long that the session of a killed process does not end during a test's
wait."""
SOON_S = 10.0


@dataclass(slots=True, kw_only=True)
class Electorate:
    """Daemons that are candidates."""

    on: Bench
    start_node: Any
    running: dict[str, Child] = field(default_factory=dict)

    async def start(self, name: str, **settings: str) -> Child:
        """Start a daemon, and wait for its vote."""
        node: Child = self.start_node(name, settings={**AUDITOR_ONLY, **settings})
        self.running[name] = node
        await wait_for(lambda: events(node, "election.entered"), f"vote of {name}")
        return node

    async def leader(self) -> str | None:
        """Return the name of the daemon that leads, or None."""
        store, paths = self.on.seen.store, self.on.seen.paths
        leader = await current_leader(store, paths)
        live = {node.session_id: node.info.pid for node in await live_nodes(store, paths)}
        pid = None if leader is None else live.get(leader.session_id)
        return next((name for name, node in self.running.items() if node.pid == pid), None)

    async def wait_leader(self, among: Collection[str], *, within_s: float = SOON_S) -> str:
        async def elected() -> str | None:
            leader = await self.leader()
            is_won = leader is not None and leader in among and self.has_won(leader)
            return leader if is_won else None

        return str(await wait_for(elected, f"leader among {sorted(among)}", within_s=within_s))

    def has_won(self, name: str) -> bool:
        return bool(events(self.running[name], "election.won"))

    def kill(self, name: str) -> None:
        os.kill(self.running.pop(name).pid, signal.SIGKILL)

    async def stop(self, name: str) -> None:
        await asyncio.to_thread(stop_all, [self.running.pop(name)], timeout_s=SOON_S)

    async def votes(self) -> list[str]:
        store, election = self.on.seen.store, self.on.seen.paths.election
        return [f"{election}/{vote}" for vote in in_order(await store.children(election))]


@asynccontextmanager
async def electorate(uri: str, folder: Path) -> AsyncIterator[Electorate]:
    async with bench(uri) as on, nodes(uri, folder) as start:
        yield Electorate(on=on, start_node=start)


@pytest.mark.long(group="audit")
@pytest.mark.compat("AuditorBookieTest.testShutdown", verdict="same")
async def test_a_standby_with_a_ledger_map_replaces_a_stopped_leader(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """The stopped leader's vote is deleted, so the standby leads at once."""

    async with electorate(uri, tmp_path) as nodes:
        await nodes.on.write(shape(1))
        patient = {"ZOOKEEPER_SESSION_TIMEOUT_S": str(LONG_S)}
        await nodes.start("one", **patient)
        await nodes.start("two", **patient, AUDITOR_STANDBYS_KEEP_LEDGER_MAP="true")
        (first, _) = await nodes.votes()
        standby = nodes.running["two"]
        await wait_for(lambda: events(standby, "ledger_map.built"), "ledger map of the standby")
        assert await nodes.wait_leader({"one"}) == "one"

        await nodes.stop("one")
        assert await nodes.wait_leader({"two"}) == "two"

        assert first not in await nodes.votes()
        assert len(events(standby, "ledger_map.built")) == 1, "it already had its ledger map"
        await wait_for(lambda: events(standby, "audit.finished"), "first audit")


@pytest.mark.compat(
    "AuditorBookieTest.testSuccessiveAuditorCrashes",
    "AuditorBookieTest.testRestartAuditorBookieAfterCrashing",
    "AuditorBookieTest.testEnsureOnlySingleAuditor",
    verdict="same",
)
async def test_each_killed_leader_has_one_successor(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """A killed leader that restarts does not take the lead back."""

    async with electorate(uri, tmp_path) as nodes:
        for name in ("one", "two", "three"):
            await nodes.start(name)
        for leader, rest in (("one", {"two", "three"}), ("two", {"three"})):
            assert await nodes.wait_leader({leader}) == leader
            nodes.kill(leader)
            await nodes.wait_leader(rest)

        await nodes.start("one again")
        await nodes.start("another")
        await nodes.stop("one again")
        assert await nodes.leader() == "three"
        assert [name for name in nodes.running if nodes.has_won(name)] == ["three"]


@pytest.mark.compat(
    "G1", verdict="better", why="the leader watches its vote, and each write checks it"
)
async def test_g1_a_leader_whose_vote_is_deleted_stops_leading(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """Another node leads, and the former leader votes again."""

    async with electorate(uri, tmp_path) as nodes:
        one = await nodes.start("one")
        await nodes.start("two")
        await nodes.wait_leader({"one"})

        await nodes.on.seen.store.delete((await nodes.votes())[0])

        await nodes.wait_leader({"two"})
        await wait_for(lambda: len(events(one, "election.entered")) == 2, "its next vote")
        assert len(await nodes.votes()) == 2
        assert not errors(one)


@pytest.mark.long(group="audit")
@pytest.mark.compat("AuditorBookieTest.testBookieClusterRestart", verdict="same")
@pytest.mark.compat("G2", verdict="better", why="the end of a session does not end the process")
async def test_after_a_restart_of_zookeeper_there_is_one_leader(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """One node keeps running; the other is killed and started again."""

    async with electorate(uri, tmp_path) as nodes:
        survivor = await nodes.start("one", ZOOKEEPER_SESSION_TIMEOUT_S="1")
        await nodes.start("two")
        await nodes.wait_leader({"one"})

        module_cluster.kill_zookeeper()
        nodes.kill("two")
        await wait_for(lambda: events(survivor, "role.restarted"), "end of its session")
        await asyncio.to_thread(module_cluster.restart_zookeeper)
        await nodes.start("two again")

        await nodes.wait_leader({"one", "two again"})
        await wait_for(lambda: _has_voted_twice(survivor), "the survivor's next vote")
        assert survivor.is_running


def _has_voted_twice(node: Child) -> bool:
    return len(events(node, "election.entered")) >= 2


@pytest.mark.long(group="audit")
@pytest.mark.compat("AuditorRollingRestartTest.testAuditingDuringRollingRestart", verdict="same")
async def test_a_new_leader_marks_nothing_while_recovery_is_disabled(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """A bookie and the old leader are killed together."""
    victim = module_cluster.bookies[0]

    async with electorate(uri, tmp_path) as nodes:
        store, paths = nodes.on.seen.store, nodes.on.seen.paths
        written = await nodes.on.write(*(shape(number) for number in range(3)))
        assert await nodes.on.names(written, victim)
        await nodes.start("one")
        two = await nodes.start("two")
        await nodes.wait_leader({"one"})
        await store.create(paths.disable)
        try:
            nodes.kill("one")
            kill_and_expire(module_cluster, victim)
            await nodes.wait_leader({"two"})
            await wait_for(lambda: events(two, "ledger_map.built"), "ledger map of the new leader")
            await asyncio.sleep(1)  # time for a mark that must not appear
            assert await marked_ledger_ids(store, paths) == []
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, victim)
            await store.delete(paths.disable)
