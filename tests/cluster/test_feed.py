"""The change feed on real bookies: a follower's catalogue equals ZooKeeper, whoever leads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from auditor.election import current_leader
from checkpoints.chain import RETENTION_DEFAULT_S
from checkpoints.collector import fingerprint_of
from checkpoints.log import CheckpointLog
from daemon.local.cluster import LocalCluster
from daemon.operations.feed import disable_feed, enable_feed, read_feed
from ledgers.clock import SystemClock
from ledgers.model import LedgerState
from replication.nodes import live_nodes
from tests.checkpoints.feed_cluster import Catalogue, Follower
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, errors, nodes, shape, wait_for
from tests.java.messages import Shape
from tests.java.tool import JavaTool, JavaWriter
from tests.workload import Ending

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CLOCK = SystemClock()


@asynccontextmanager
async def following(on: Bench) -> AsyncIterator[Follower]:
    log = CheckpointLog(
        store=on.seen.store,
        paths=on.seen.paths,
        manager=on.seen.manager,
        bookies=on.workload.bookies,
        clock=CLOCK,
    )
    follower = Follower(log=log)
    log.register_checkpoint_listener(follower)
    task = asyncio.create_task(log.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_zookeeper(on: Bench) -> Catalogue:
    found: Catalogue = {}
    async for ledger_ids in on.seen.manager.ledger_ids():
        for ledger_id in ledger_ids:
            versioned = await on.seen.manager.find(ledger_id)
            if versioned is not None:
                found[ledger_id] = fingerprint_of(versioned.data)
    return found


async def wait_equal(on: Bench, follower: Follower) -> None:
    async def is_equal() -> bool:
        return follower.catalogue == await in_zookeeper(on)

    await wait_for(is_equal, "a catalogue that equals ZooKeeper")


async def change(on: Bench, number: int) -> None:
    """Create, close and delete ledgers."""
    written = await on.write(
        shape(number), shape(number + 1, ending=Ending.CLOSED), shape(number + 2, entry_count=1)
    )
    await on.seen.manager.delete(written[-1].ledger_id, version=-1)


async def test_a_follower_knows_all_ledgers_though_the_leader_is_killed(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri = module_cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        await on.write(shape(0), shape(1))
        first = start("first", settings=AUDITOR_ONLY)

        async def leads() -> bool:
            return await current_leader(on.seen.store, on.seen.paths) is not None

        await wait_for(leads, "a leader")
        second = start("second", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
        await wait_equal(on, follower)

        await change(on, 10)
        await wait_equal(on, follower)
        await asyncio.to_thread(first.kill)
        await change(on, 20)
        await wait_equal(on, follower)

        state = await read_feed(on.seen)
        assert state.last_checkpoint_id == follower.received[-1].id
        async with aclosing(follower.log.request_checkpoints(0)) as found:
            logged = [checkpoint.id async for checkpoint in found]
        assert logged == [checkpoint.id for checkpoint in follower.received][::-1]
        assert not errors(second)

        segments = {*state.log_ledgers, state.base_ledger}
        await disable_feed(on.seen, clock=CLOCK)

        async def are_deleted() -> bool:
            return not segments & (await in_zookeeper(on)).keys()

        await wait_for(are_deleted, "deletion of the feed's ledgers")
        assert await live_nodes(on.seen.store, on.seen.paths)


@pytest.mark.long(group="feed")
async def test_a_follower_sees_each_change_by_javas_client(
    module_cluster: LocalCluster, tmp_path: Path, java: JavaTool
) -> None:
    uri = module_cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        node = start("node", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)

        with JavaWriter(uri, Shape()) as writer:
            ledger_id = writer.ledger_id
            await wait_for(lambda: ledger_id in follower.catalogue, "created ledger")
            await wait_equal(on, follower)
            assert (await on.seen.manager.read(ledger_id)).metadata.state is LedgerState.OPEN
            created = follower.catalogue[ledger_id]
            await asyncio.to_thread(writer.stop)
        await wait_for(lambda: follower.catalogue[ledger_id] != created, "closed ledger")
        await wait_equal(on, follower)
        await asyncio.to_thread(java.delete, uri, [ledger_id])
        await wait_for(lambda: ledger_id not in follower.catalogue, "deleted ledger")
        await wait_equal(on, follower)

        assert follower.catalogue.keys() == java.ledger_ids(uri)
        assert not errors(node)
        await disable_feed(on.seen, clock=CLOCK)
