"""The auditor on a real ZooKeeper: leaders cut off while they mark, and read-only bookies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from replication import znodes
from replication.marks import marked_ledger_ids
from replication.orders import LimitsOrder, OrderStore, limits_znode
from tests.cluster.bookies_in_trouble import (
    kill_and_expire,
    make_read_only,
    status_file,
)
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, errors, events, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}

GHOST = BookieId("127.0.0.1:9")
"""A bookie that the test registers and makes lost."""
LEDGERS = range(1_000_000, 1_001_000)
SLOWLY = LimitsOrder(requests_per_s=12)
"""Some 300 marks a second."""


@asynccontextmanager
async def ledgers_on_a_ghost(on: Bench) -> AsyncIterator[None]:
    """Create the metadata of ledgers on the ghost. At the end, delete it with the marks."""
    store, root = on.seen.store, on.seen.settings.uri.root
    await store.create(f"{root}/cookies/{GHOST}")
    await store.create(f"{root}/available/{GHOST}", is_ephemeral=True)
    members = sorted(await store.children(f"{root}/available"))
    others = [BookieId(name) for name in members if name not in ("readonly", GHOST)]
    metadata = LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        last_entry_id=-1,
        length=0,
        segments=(Segment(first_entry_id=0, ensemble=(GHOST, *others[:2])),),
    )
    await _each(lambda ledger_id: on.seen.manager.create(ledger_id, metadata))
    try:
        yield
    finally:
        await _each(lambda ledger_id: on.seen.manager.delete(ledger_id, version=0))
        for ledger_id in await marked_ledger_ids(store, on.seen.paths):
            await store.delete(on.seen.paths.mark(ledger_id))
            await store.delete(on.seen.paths.mark(ledger_id).rpartition("/")[0])
        await store.delete(f"{root}/cookies/{GHOST}")


async def _each(act: Any) -> None:
    for start in range(0, len(LEDGERS), 200):
        await asyncio.gather(*map(act, LEDGERS[start : start + 200]))


async def assert_each_is_marked(on: Bench) -> None:
    """Assert that each ledger is marked for the ghost, and its mark written twice at most.

    A leader that finds no record of the loss treats the loss as a new one (rule S6).
    """
    assert await marked_ledger_ids(on.seen.store, on.seen.paths) == list(LEDGERS)

    async def look(ledger_id: int) -> None:
        data, stat = await on.seen.store.get(on.seen.paths.mark(ledger_id))
        assert znodes.parse_mark(data).replicas == (GHOST,)
        assert stat.version <= 1, ledger_id

    await _each(look)


@asynccontextmanager
async def slowed_down(on: Bench) -> AsyncIterator[None]:
    """Order a low limit of ZooKeeper requests for all nodes."""
    order_store, znode = OrderStore(on.seen.store, on.seen.paths), limits_znode(on.seen.paths)
    await order_store.give(znode, SLOWLY, over=None)
    await asyncio.sleep(0.2)  # until the nodes know the order
    yield
    stored = await order_store.stored(znode)
    assert stored is not None
    await order_store.withdraw(znode, over=stored)


async def until_marking(on: Bench) -> None:
    """Wait until some ledgers are marked, and assert that most are not."""
    marked: Sequence[int] = ()

    async def are_some() -> bool:
        nonlocal marked
        marked = await marked_ledger_ids(on.seen.store, on.seen.paths)
        return bool(marked)

    await wait_for(are_some, "first marks")
    assert len(marked) < len(LEDGERS) / 2, "the leader was too quick for this test"


async def until_all_are_marked(on: Bench) -> None:
    async def are_all() -> bool:
        return len(await marked_ledger_ids(on.seen.store, on.seen.paths)) == len(LEDGERS)

    await wait_for(are_all, "marks of all")


@pytest.mark.parametrize(
    "is_killed",
    [
        pytest.param(True, id="killed"),
        pytest.param(False, marks=pytest.mark.long(group="audit"), id="frozen, and expired"),
    ],
)
async def test_a_leader_cut_off_while_marking_loses_no_mark(
    module_cluster: LocalCluster, uri: str, tmp_path: Path, is_killed: bool
) -> None:
    root = "/ledgers"

    async with bench(uri) as on, ledgers_on_a_ghost(on), nodes(uri, tmp_path) as start:
        first = start("first", settings=AUDITOR_ONLY)
        await wait_for(lambda: _has_audited(first), "first audit")
        second = start("second", settings=AUDITOR_ONLY)
        await wait_for(lambda: events(second, "election.entered"), "second vote")

        async with slowed_down(on):
            await on.seen.store.delete(f"{root}/available/{GHOST}")
            await until_marking(on)
            os.kill(first.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
        await wait_for(lambda: events(second, "election.won"), "second leader")
        await until_all_are_marked(on)
        if not is_killed:
            os.kill(first.pid, signal.SIGCONT)
            await wait_for(lambda: events(first, "role.restarted"), "end of its session")
            assert not errors(first)

        await assert_each_is_marked(on)


def _has_audited(node: Child) -> bool:
    """Return True if the node has audited all ledgers with a complete ledger map."""
    return any(audit["is_ledger_map_complete"] for audit in events(node, "audit.finished"))


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testReadOnlyBookieExclusionFromURLedgersCheck",
    "AuditorLedgerCheckerTest.testReadOnlyBookieShutdown",
    verdict="same",
)
async def test_a_read_only_bookie_is_lost_only_after_it_stops(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    bookie = module_cluster.bookies[1]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(6)))
        named = await on.names(written, bookie)
        assert named
        await asyncio.to_thread(make_read_only, module_cluster, bookie)
        node = start("node", settings=AUDITOR_ONLY)
        try:
            await wait_for(lambda: _has_audited(node), "first audit")
            assert await marked_ledger_ids(on.seen.store, on.seen.paths) == []
        finally:
            kill_and_expire(module_cluster, bookie)
        try:
            await wait_for(lambda: on.has_marked(named), "marks of its ledgers")
        finally:
            status_file(module_cluster, bookie).unlink()
            await asyncio.to_thread(module_cluster.start_bookie, bookie)
        start("worker")
        await on.wait_idle()
