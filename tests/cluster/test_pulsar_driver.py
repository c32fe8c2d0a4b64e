"""Our nodes in a cluster of Pulsar's metadata driver: another root, no LAYOUT, another election."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.election import current_leader
from daemon.local.processes import Child
from ledgers.model import BookieId
from replication.nodes import live_nodes
from replication.znodes import parse_pulsar_leader
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, errors, events, nodes, wait_for
from tests.java.messages import Shape, Verdict
from tests.java.pulsar import PulsarCluster, running_pulsar
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.long(group="matrix"), pytest.mark.timeout(360)]

CALM_S = 3.0
"""Longer than a session timeout. An auditor that takes part in no election would be seen."""


@pytest.fixture(scope="module")
def pulsar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PulsarCluster]:
    with running_pulsar(tmp_path_factory.mktemp("pulsar"), bookies=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def java_client(java: JavaTool, pulsar: PulsarCluster) -> Iterator[JavaTool]:
    """Yield a client of the driver. ``java``: skips the tests without a JDK."""
    with pulsar.client() as client:
        yield client


@pytest.mark.compat("AuditorBookieTest.testEnsureOnlySingleAuditor", verdict="same")
async def test_there_is_one_auditor_whichever_starts_first(
    pulsar: PulsarCluster, java_client: JavaTool, tmp_path: Path
) -> None:
    """The other one waits, and takes over when the leader dies."""

    async with bench(pulsar.uri) as on, nodes(pulsar.uri, tmp_path) as start:
        ours = start("one", settings=AUDITOR_ONLY)
        await wait_for(lambda: events(ours, "election.won"), "our first leader")
        javas = [pulsar.start_autorecovery("first"), pulsar.start_autorecovery("second")]
        await wait_for(lambda: all(map(follows, javas)), "two candidates of Pulsar's driver")
        await asyncio.sleep(CALM_S)
        assert not any(map(leads, javas))
        assert await is_ours(on)
        auditor = await asyncio.to_thread(java_client.auditor, pulsar.uri)
        assert auditor is not None
        assert auditor.startswith("bookmender-")

        ours.kill()
        await wait_for(lambda: any(map(leads, javas)), "leader of Pulsar's driver")
        assert not await is_ours(on)

        ours = start("two", settings=AUDITOR_ONLY)
        await wait_for(lambda: events(ours, "election.held_by_pulsar"), "our candidacy")
        javas.sort(key=leads)
        javas.pop(0).kill()  # a candidate of theirs less: ours is next
        await asyncio.sleep(CALM_S)
        assert not events(ours, "election.won")

        javas[0].kill()
        await wait_for(lambda: events(ours, "election.won"), "our second leader")
        assert await is_ours(on)
        assert not errors(ours)


def test_ledgers_of_a_lost_bookie_are_repaired(
    pulsar: PulsarCluster, java_client: JavaTool, tmp_path: Path
) -> None:
    """Java's client of the driver wrote the ledgers, finds no mark, and reads every copy."""

    async def run(lost: BookieId) -> None:
        async with bench(pulsar.uri) as on, nodes(pulsar.uri, tmp_path) as start:
            assert on.seen.root == "/ledgers/ledgers"
            assert await on.seen.store.exists(f"{on.seen.root}/LAYOUT") is None
            ours = start("node")
            await wait_for(lambda: events(ours, "ledger_map.built"), "ledger map")

            pulsar.kill_bookie(lost)

            async def is_moved() -> bool:
                found = [await on.seen.manager.read(each.ledger) for each in written]
                return all(lost not in each.metadata.bookies for each in found)

            await wait_for(is_moved, f"ledgers that do not name {lost}")
            await on.wait_idle()
            assert not errors(ours)

    shape = Shape(ensemble_size=3, write_quorum=2, ack_quorum=2, entries=20, count=6)
    written = java_client.write(pulsar.uri, shape)

    asyncio.run(run(pulsar.bookies[0]))

    assert java_client.ledger_ids(pulsar.uri) == {each.ledger for each in written}
    assert java_client.under_replicated(pulsar.uri) == []
    report = java_client.judge(pulsar.uri, expected=written)
    assert report.verdict is Verdict.WHOLE, report


async def is_ours(on: Bench) -> bool:
    """Return True if a bookmender node leads. Asserts that it holds the znode of both elections."""
    store, paths = on.seen.store, on.seen.paths
    leader = await current_leader(store, paths)
    ours = {node.session_id for node in await live_nodes(store, paths)}
    assert leader is not None
    assert leader.candidate == parse_pulsar_leader((await store.get(paths.pulsar_leader))[0])
    return leader.session_id in ours


def follows(java: Child) -> bool:
    return "Auditor leader election state: Following" in java.log.read_text(errors="replace")


def leads(java: Child) -> bool:
    return "Acquired leadership on /ledgers/underreplication/leader" in java.log.read_text(
        errors="replace"
    )
