"""Our daemons beside Java's AutoRecovery: one election, one queue, one set of locks.

Each test leaves the cluster whole, the queue empty and no auditor elected. At the end Java's client
reads every copy and compares the contents.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.election import current_leader, in_order
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.store import ANY_VERSION
from replication.marks import locked_ledger_ids
from tests.cluster.beside_java import assert_whole, javas
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.steps import (
    NONEXISTENT,
    POLL_S,
    Bench,
    bench,
    errors,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.java.tool import JavaTool
from tests.workload import Written

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

US = socket.gethostname()
"""Our votes have this name if several bookies, or none, run on the host."""
CALM_S = 1.5
"""Several rounds of our daemon and of Java's. A daemon that ignores the switch would be seen."""
ONE_BY_ONE = {"REPLICATION_LEDGERS_AT_ONCE": "1"}


@pytest.fixture(
    scope="module",
    params=["4.18.0", pytest.param("4.16.6", marks=pytest.mark.long(group="matrix"))],
)
def cluster_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    version = request.param
    if not jars.jars_folder(version).exists():
        pytest.skip(f"not fetched: bookmender local up --bookkeeper {version} does that")
    return {} if version == jars.BOOKKEEPER_DEFAULT else {"bookkeeper": version}


# --- Helpers --------------------------------------------------------------------------------------


async def leader(on: Bench) -> str | None:
    found = await current_leader(on.seen.store, on.seen.paths)
    return found.candidate if found else None


async def wait_leader(on: Bench, *, is_java: bool) -> None:
    async def is_in_office() -> bool:
        return (candidate := await leader(on)) is not None and (candidate != US) is is_java

    await wait_for(is_in_office, f"leader, {'Java' if is_java else 'ours'}")


async def wait_candidates(on: Bench, count: int) -> None:
    election = on.seen.paths.election

    async def are_there() -> bool:
        is_office = await on.seen.store.exists(election)
        return len(in_order(await on.seen.store.children(election) if is_office else [])) == count

    await wait_for(are_there, f"{count} votes")


async def ask_for_audit(on: Bench) -> None:
    """Trigger an audit by writing the recovery delay again, as Java's tools do."""
    path = on.seen.paths.recovery_delay
    data, _ = await on.seen.store.get(path)
    await on.seen.store.set(path, data, version=ANY_VERSION)


async def versions(on: Bench, written: Sequence[Written]) -> dict[int, int]:
    read = [await on.seen.manager.read(ledger.ledger_id) for ledger in written]
    return {versioned.ledger_id: versioned.version for versioned in read}


def copies_of(node: Child) -> list[dict[str, Any]]:
    """Return the repairs for which our daemon copied entries."""
    return [event for event in events(node, "ledger.repaired") if event["entry_count"]]


@pytest.mark.compat(
    "TestReplicationWorker.test2RWsShouldCompeteForReplicationOf2FragmentsAndCompleteReplication",
    verdict="same",
)
async def test_java_and_bookmender_lead_by_turns_and_share_a_queue(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Each continues after the other was killed."""

    async with (
        bench(uri) as on,
        nodes(uri, tmp_path) as start,
        javas(module_cluster) as start_javas,
    ):
        written = on.workload.written
        await wait_candidates(on, 0)
        ours = start("ours", settings=ONE_BY_ONE)
        await wait_leader(on, is_java=False)
        javas_daemon = start_javas()
        await wait_candidates(on, 2)
        await both_honour_the_switch(on, java)
        await both_take_their_share(on, ours)
        assert javas_daemon.is_running
        await leader_and_bookie_are_killed(on, module_cluster, ours, is_java_left=True)
        assert not errors(ours)

        ours = start("ours-again", settings=ONE_BY_ONE)
        await wait_candidates(on, 2)
        await both_honour_the_switch(on, java)
        await both_take_their_share(on, ours)
        assert javas_daemon.is_running
        await leader_and_bookie_are_killed(on, module_cluster, javas_daemon, is_java_left=False)
        assert not errors(ours)

    assert_whole(java, uri, written)


async def both_honour_the_switch(on: Bench, java: JavaTool) -> None:
    """Assert that neither marks nor repairs while replication is disabled."""
    switch = on.seen.paths.disable
    await on.seen.store.create(switch)
    uri = on.seen.settings.metadata_service_uri
    assert not await asyncio.to_thread(java.is_replication_enabled, uri)
    marked = await on.write(*(shape(number) for number in range(5)))
    unmarked = await on.write(*(shape(number) for number in range(5)))
    ledger_ids = sorted(ledger.ledger_id for ledger in marked)

    await on.lose(marked)
    await on.forget(unmarked)
    await ask_for_audit(on)
    until_s = time.monotonic() + CALM_S
    while time.monotonic() < until_s:
        assert await on.has_marked(ledger_ids)
        assert not await locked_ledger_ids(on.seen.store, on.seen.paths)
        await asyncio.sleep(POLL_S)

    await on.seen.store.delete(switch)
    await on.wait_repaired([*marked, *unmarked], NONEXISTENT)


async def both_take_their_share(on: Bench, ours: Child) -> None:
    """Assert that both repair at the same time, and that no ledger is repaired twice."""
    written = await on.write(*(shape(number) for number in range(40)))
    share = 0
    while not 0 < share < len(written):  # the quicker one may repair all
        before = len(copies_of(ours))
        switch = on.seen.paths.disable
        # Otherwise our leader would mark each ledger as soon as it changes.
        await on.seen.store.create(switch)
        await on.forget(written)
        read_as = await versions(on, written)

        await on.seen.store.delete(switch)
        await ask_for_audit(on)
        await on.wait_repaired(written, NONEXISTENT)

        assert await versions(on, written) == {i: version + 1 for i, version in read_as.items()}
        share = len(copies_of(ours)) - before


async def leader_and_bookie_are_killed(
    on: Bench, cluster: LocalCluster, leading: Child, *, is_java_left: bool
) -> None:
    """Kill the leader, and assert that the other one leads and handles a later loss."""
    written = await on.write(*(shape(number) for number in range(20)))
    victim = cluster.bookies[0]
    leading.kill()
    await wait_leader(on, is_java=is_java_left)

    kill_and_expire(cluster, victim)
    try:
        await on.wait_repaired(written, victim)
    finally:
        await asyncio.to_thread(cluster.start_bookie, victim)
