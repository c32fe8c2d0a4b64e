"""Published objects, and the source of their changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

import notifications.objects
from ledgers.errors import (
    RejectedError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)
from ledgers.store import ANY_VERSION, Operation, SetData
from notifications.objects import ObjectPublisher, ObjectSource, object_path
from notifications.protocol import Change, Version, published
from notifications.sources import FRESH_EVERY_S
from replication.znodes import ClusterPaths
from tests.memory.store import Fault, MemoryStore, MemoryTree, Nodes
from tests.notifications.judging import Judge, States, Truth, disturb
from tests.virtual_time import LoopClock

PATHS = ClusterPaths.below("/ledgers")
NAMES = [f"table-{number}" for number in range(6)]
SEEDS = 60


def states(nodes: Nodes) -> States:
    znodes = {name: nodes.find(object_path(PATHS, name)) for name in NAMES}
    return {published(n): (True, node.mzxid) for n, node in znodes.items() if node is not None}


class Cluster:
    """A tree with some publishers and one source, each with a session of its own."""

    def __init__(self, publisher_count: int = 1, chance: random.Random | None = None) -> None:
        async def travel() -> None:
            await asyncio.sleep(0 if chance is None else chance.random() * 0.01)

        self.tree, clock = MemoryTree(latency=travel), LoopClock()
        self.stores = [MemoryStore(self.tree) for _ in range(publisher_count)]
        self.publishers = [ObjectPublisher(store, PATHS, clock) for store in self.stores]
        self.of_source = MemoryStore(self.tree)
        self.source = ObjectSource(self.of_source, PATHS, clock)
        self.truth = Truth(self.tree, states)
        self.judge = Judge(self.source, self.truth)

    @property
    def publisher(self) -> ObjectPublisher:
        return self.publishers[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        tasks = [asyncio.ensure_future(publisher.run()) for publisher in self.publishers]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def batch_names(self) -> list[str]:
        return sorted(await self.of_source.children(PATHS.object_batches))


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.objects, "BATCHES_KEPT", 4)
    monkeypatch.setattr(notifications.objects, "BATCHES_OVER", 2)
    monkeypatch.setattr(notifications.objects, "OBJECTS_A_BATCH", 3)


# --- Publishing -----------------------------------------------------------------------------------


async def test_publications_have_the_zxid_of_their_transaction() -> None:
    async with Cluster().running() as cluster:
        first = await cluster.publisher.publish("table-0")
        second = await cluster.publisher.publish("table-0")

    changes = [Change("Otable-0", first), Change("Otable-0", second)]
    assert cluster.truth.changes["Otable-0"] == changes


async def test_publications_at_once_share_a_transaction() -> None:
    async with Cluster().running() as cluster:
        versions = await asyncio.gather(*map(cluster.publisher.publish, NAMES))

        assert len(set(versions)) == 1
        assert len(await cluster.batch_names()) == 1


async def test_a_deletion_has_a_version() -> None:
    async with Cluster().running() as cluster:
        await cluster.publisher.publish("table-0")
        version = await cluster.publisher.delete("table-0")

    assert cluster.truth.last("Otable-0") == Change("Otable-0", version, True)


async def test_a_deletion_of_nothing_is_told() -> None:
    async with Cluster().running() as cluster:
        await cluster.publisher.publish("table-1")
        await cluster.source.load()

        version = await cluster.publisher.delete("table-0")

        batch = await cluster.source._read_batch()
    assert batch.changes == [Change("Otable-0", version, True)]


async def test_a_publication_whose_reply_is_lost_is_published_again() -> None:
    async with Cluster().running() as cluster:
        await cluster.publisher.publish("table-0")

        def lose_once(_: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
            if not operations:
                return None
            cluster.tree.faults = None
            return Fault.LOST_REPLY

        cluster.tree.faults = lose_once
        version = await cluster.publisher.publish("table-0")

    last = cluster.truth.changes["Otable-0"]
    assert [change.version for change in last[-2:]] == [version - 1, version]


async def test_two_publishers_of_the_same_new_objects_both_succeed() -> None:
    async with Cluster(publisher_count=2).running() as cluster:
        versions = await asyncio.gather(
            *(publisher.publish(name) for publisher in cluster.publishers for name in NAMES)
        )

    assert all(cluster.truth.last(published(name)) is not None for name in NAMES)
    assert len(set(versions)) == 2


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "..", "x" * 201, "a\U0001f600", "\ufffd"])
async def test_a_name_that_no_znode_can_have_is_refused(name: str) -> None:
    with pytest.raises(SettingsError):
        await Cluster().publisher.publish(name)


async def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.objects, "OBJECTS_MAX", 2)
    async with Cluster().running() as cluster:
        publisher = cluster.publisher
        found = await asyncio.gather(*map(publisher.publish, NAMES[:3]), return_exceptions=True)
        await publisher.publish(NAMES[0])
        with pytest.raises(RejectedError, match="there are 2 published objects"):
            await publisher.publish(NAMES[3])
        await publisher.delete(NAMES[0])
        await publisher.publish(NAMES[3])

    assert [type(each) for each in found] == [int, int, RejectedError]


async def test_too_many_waiting_publications_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.objects, "WAITING_MAX", 1)
    cluster = Cluster()
    waiting = asyncio.ensure_future(cluster.publisher.publish(NAMES[0]))
    await asyncio.sleep(0)

    with pytest.raises(UnavailableError, match="too many publications wait"):
        await cluster.publisher.publish(NAMES[1])
    waiting.cancel()


async def test_whoever_waits_is_told_that_the_publisher_ended() -> None:
    async with Cluster().running() as cluster:
        waiting = asyncio.ensure_future(cluster.publisher.publish(NAMES[0]))
        await asyncio.sleep(0)
    with pytest.raises(SessionLostError):
        await waiting
    with pytest.raises(SessionLostError):
        await cluster.publisher.publish(NAMES[0])


async def test_a_lost_session_ends_the_publisher() -> None:
    cluster = Cluster()
    running = asyncio.ensure_future(cluster.publisher.run())
    cluster.tree.expire(cluster.stores[0])

    with pytest.raises(SessionLostError):
        await cluster.publisher.publish(NAMES[0])
    with pytest.raises(SessionLostError):
        await running


@pytest.mark.usefixtures("few_batches")
async def test_the_last_batches_are_kept() -> None:
    async with Cluster().running() as cluster:
        for _ in range(20):
            await cluster.publisher.publish(NAMES[0])
        await asyncio.sleep(1)

        names = await cluster.batch_names()
    assert 4 <= len(names) <= 6
    assert names[-1] == "b-0000000019"


@pytest.mark.usefixtures("few_batches")
async def test_the_numbers_of_batches_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications.objects, "NUMBERS_MAX", 10)
    async with Cluster().running() as cluster:
        for _ in range(10):
            await cluster.publisher.publish(NAMES[0])
        await cluster.publisher.publish(NAMES[0])

        assert await cluster.batch_names() == ["b-0000000000"]


# --- The source -----------------------------------------------------------------------------------


async def test_the_source_reads_only_new_batches() -> None:
    async with Cluster().running() as cluster:
        await asyncio.gather(*map(cluster.publisher.publish, NAMES))
        await cluster.source.load()
        version = await cluster.publisher.publish(NAMES[0])
        before = cluster.of_source.request_count

        batch = await cluster.source._read_batch()

    assert batch.changes == [Change(published(NAMES[0]), version)]
    assert cluster.of_source.request_count - before == 3


@pytest.mark.usefixtures("few_batches")
async def test_after_a_gap_the_difference_is_told() -> None:
    async with Cluster().running() as cluster:
        await asyncio.gather(*map(cluster.publisher.publish, NAMES[:3]))
        await cluster.source.load()
        await cluster.publisher.delete(NAMES[0])
        for _ in range(10):
            version = await cluster.publisher.publish(NAMES[1])

        batch = await cluster.source._read_batch()

    assert batch.changes == [
        Change(published(NAMES[1]), version),
        Change(published(NAMES[0]), None, True),
    ]
    assert batch.horizon == batch.position


async def test_an_unreadable_batch_is_a_gap() -> None:
    async with Cluster().running() as cluster:
        await cluster.source.load()
        version = await cluster.publisher.publish(NAMES[0])
        (name,) = await cluster.batch_names()
        rubbish = SetData(path=f"{PATHS.object_batches}/{name}", data=b"?", version=ANY_VERSION)
        await cluster.of_source.multi([rubbish])

        batch = await cluster.source._read_batch()

    assert batch.changes == [Change(published(NAMES[0]), version)]


async def test_the_source_is_fresh_while_zookeeper_answers() -> None:
    cluster = Cluster()  # no publisher ever wrote anything
    task = asyncio.ensure_future(cluster.judge.run())

    await asyncio.sleep(100)
    task.cancel()

    times_s = [0.0, *cluster.judge.times_s, 100.0]
    assert all(later - earlier <= FRESH_EVERY_S for earlier, later in pairwise(times_s))


async def test_the_source_is_silent_while_zookeeper_does_not_answer() -> None:
    async with Cluster().running() as cluster:
        task = asyncio.ensure_future(cluster.judge.run())
        await asyncio.sleep(10)
        cluster.tree.suspend(cluster.of_source)
        count = len(cluster.judge.batches)

        await cluster.publisher.publish(NAMES[0])
        await asyncio.sleep(100)
        assert len(cluster.judge.batches) == count
        cluster.tree.resume(cluster.of_source)
        await asyncio.sleep(1)

        assert cluster.judge.knows_all()
        task.cancel()


async def test_a_lost_session_ends_the_source_at_once() -> None:
    cluster = Cluster()
    task = asyncio.ensure_future(cluster.judge.run())
    await asyncio.sleep(10.1)
    before_s = asyncio.get_running_loop().time()

    cluster.tree.expire(cluster.of_source)

    with pytest.raises(SessionLostError):
        await task
    assert asyncio.get_running_loop().time() == before_s


async def use(cluster: Cluster, chance: random.Random) -> None:
    """Publish or delete an object, and check the version."""
    publisher, name = chance.choice(cluster.publishers), chance.choice(NAMES)
    call = publisher.delete if chance.random() < 0.3 else publisher.publish
    version: Version = 0
    with suppress(UnavailableError):
        version = await call(name)
    last = cluster.truth.last(published(name), version) if version else None
    assert last is None or last.version == version or last.is_deleted


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_histories_are_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(notifications.objects, "NUMBERS_MAX", chance.choice((15, 1000)))
    cluster = Cluster(publisher_count=2, chance=chance)
    async with cluster.running():
        for _ in range(chance.randrange(5)):
            await use(cluster, chance)
        disturbed = [cluster.of_source, *cluster.stores]
        async with asyncio.TaskGroup() as tasks:
            judging = tasks.create_task(cluster.judge.run())
            disturbing = tasks.create_task(disturb(cluster.tree, disturbed, chance))
            for _ in range(100):
                tasks.create_task(use(cluster, chance))
                await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1, 1)))
            disturbing.cancel()
            await asyncio.sleep(60)
            judging.cancel()

    assert cluster.judge.knows_all()
    there = {key for key in cluster.truth.changes if cluster.judge.table.version_of(key)}
    assert there == states(cluster.tree.nodes).keys()
