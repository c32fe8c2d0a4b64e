"""Daemons of ours beside Java's AutoRecovery: one election, one queue, one set of locks.

Each test leaves the cluster whole, the queue empty and nobody in office. Java's client has the last
word: it reads every copy, and compares the contents.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.election import current_leader, in_order
from daemon.demo.workload import Written
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.store import ANY_VERSION
from replication.marks import locked_ledger_ids
from tests.cluster.beside_java import assert_whole, javas
from tests.cluster.bookies_in_trouble import SESSION_TIMEOUT_S, kill_and_expire
from tests.cluster.steps import (
    AUDITOR_ONLY,
    GONE,
    POLL_S,
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

US = socket.gethostname()
"""What our votes say where several bookies, or none, share the host."""
CALM_S = 1.5
"""Several rounds of ours and of Java's: long enough for whoever disregards the switch to be
seen."""
ONE_BY_ONE = {"REPLICATION_LEDGERS_AT_ONCE": "1"}
SLOW_COPY = {"replicationRateByBytes": "4000"}


@pytest.fixture(scope="module", params=["4.18.0", "4.16.6"])
def cluster_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    version = request.param
    if not jars.jars_folder(version).exists():
        pytest.skip(f"not fetched: bookmender local up --bookkeeper {version} does that")
    return {"session_timeout_s": SESSION_TIMEOUT_S, "bookkeeper": version}


# --- What is seen ----------------------------------------------------------------------------------


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
    """As Java's tools do: write the recovery delay once more."""
    path = on.seen.paths.recovery_delay
    data, _ = await on.seen.store.get(path)
    await on.seen.store.set(path, data, version=ANY_VERSION)


async def versions(on: Bench, written: Sequence[Written]) -> dict[int, int]:
    read = [await on.seen.manager.read(ledger.ledger_id) for ledger in written]
    return {versioned.ledger_id: versioned.version for versioned in read}


def copies_of(node: Child) -> list[dict[str, Any]]:
    """The repairs that our daemon copied entries for."""
    return [event for event in events(node, "ledger.repaired") if event["entry_count"]]


# --- One marks, the other repairs ------------------------------------------------------------------


def test_our_worker_works_off_what_javas_auditor_marked(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async def run() -> list[Written]:
        async with (
            bench(uri) as on,
            nodes(uri, tmp_path) as start,
            javas(module_cluster) as start_javas,
        ):
            await wait_candidates(on, 0)
            start_javas(**SLOW_COPY)  # its worker cannot be left out; so it leaves some to ours
            await wait_leader(on, is_java=True)
            node = start("worker", settings=WORKER_ONLY)
            await wait_for(lambda: events(node, "node.started"), "worker")
            written = await on.write(*(shape(number) for number in range(20)))

            await on.forget(written)
            await ask_for_audit(on)

            await on.wait_repaired(written, GONE)
            assert await leader(on) != US
            assert copies_of(node)
            assert not errors(node)
            return written

    assert_whole(java, uri, asyncio.run(run()))


def test_javas_worker_works_off_what_our_auditor_marked(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async def run() -> list[Written]:
        async with (
            bench(uri) as on,
            nodes(uri, tmp_path) as start,
            javas(module_cluster) as start_javas,
        ):
            await wait_candidates(on, 0)
            node = start("auditor", settings=AUDITOR_ONLY)
            await wait_leader(on, is_java=False)
            written = await on.write(*(shape(number) for number in range(10)))
            ledger_ids = sorted(ledger.ledger_id for ledger in written)

            await on.forget(written)
            await ask_for_audit(on)

            await wait_for(lambda: on.has_marked(ledger_ids), "marks of ours")
            seen = await asyncio.to_thread(java.under_replicated, uri)
            assert {mark.ledger: mark.replicas for mark in seen} == dict.fromkeys(
                ledger_ids, (GONE,)
            )
            assert await asyncio.to_thread(java.auditor, uri) == US

            start_javas()
            await on.wait_repaired(written, GONE)
            await wait_candidates(on, 2)
            assert await leader(on) == US
            assert not errors(node)
            return written

    assert_whole(java, uri, asyncio.run(run()))


# --- Both do everything ----------------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.test2RWsShouldCompeteForReplicationOf2FragmentsAndCompleteReplication",
    verdict="same",
)
def test_in_office_by_turns_both_work_off_one_queue_and_outlive_each_other(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async def run() -> list[Written]:
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
            return written

    assert_whole(java, uri, asyncio.run(run()))


async def both_honour_the_switch(on: Bench, java: JavaTool) -> None:
    """Neither marks nor repairs while replication is disabled; then all that was left is done."""
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
    await on.wait_repaired([*marked, *unmarked], GONE)


async def both_take_their_share(on: Bench, ours: Child) -> None:
    """Both repair at the same time, and no ledger is repaired twice."""
    written = await on.write(*(shape(number) for number in range(40)))
    share = 0
    while not 0 < share < len(written):  # the quicker one may take all
        before = len(copies_of(ours))
        switch = on.seen.paths.disable
        await on.seen.store.create(switch)  # or our leader would mark each as soon as it changes
        await on.forget(written)
        read_as = await versions(on, written)

        await on.seen.store.delete(switch)
        await ask_for_audit(on)
        await on.wait_repaired(written, GONE)

        assert await versions(on, written) == {i: version + 1 for i, version in read_as.items()}
        share = len(copies_of(ours)) - before


async def leader_and_bookie_are_killed(
    on: Bench, cluster: LocalCluster, leading: Child, *, is_java_left: bool
) -> None:
    """The other takes over the office, and handles a bookie that is lost afterwards."""
    written = await on.write(*(shape(number) for number in range(20)))
    victim = cluster.bookies[0]
    leading.kill()
    await wait_leader(on, is_java=is_java_left)

    kill_and_expire(cluster, victim)
    try:
        await on.wait_repaired(written, victim)
    finally:
        await asyncio.to_thread(cluster.start_bookie, victim)
