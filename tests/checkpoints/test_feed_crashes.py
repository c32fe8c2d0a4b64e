"""The leader ends, or freezes past its session, at every step of its work. Nothing is missed."""

import asyncio
import os
from collections.abc import Sequence

import pytest

from checkpoints.leader_state import FeedSettings
from ledgers.store import Operation
from tests.checkpoints.feed_cluster import FeedCluster, Leader
from tests.memory.store import Fault, MemoryStore
from tests.virtual_time import run

STEPS_MAX = 400
STRIDE = int(os.environ.get("BOOKMENDER_TEST_FEED_STRIDE", "9"))
"""Steps are tried at this distance. 1 tries all of them."""
SETTINGS = FeedSettings(roll_bytes=300, base_bytes_min=200, base_factor=0.0)
"""So that a leader rolls its ledger and writes a base after a few changes."""


class Breaker:
    """Ends or freezes a leader at its n-th step. Steps are its writes to ZooKeeper, and requests to
    bookies and their replies."""

    def __init__(self, cluster: FeedCluster, leader: Leader, *, at: int, freezes: bool) -> None:
        self._cluster, self._leader = cluster, leader
        self._at, self._freezes = at, freezes
        self._count = 0
        self.has_struck = asyncio.Event()
        self.thawed = asyncio.Event()
        cluster.tree.faults = self._before_write
        leader.bookies.step = self._at_bookies

    def _before_write(self, store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        is_leaders = store is self._leader.store and self._leader.publisher is not None
        if not is_leaders or not operations or self.has_struck.is_set():
            return None
        for fault in (Fault.LOST_REQUEST, Fault.LOST_REPLY):
            if self._is_due():
                self._strike()
                return fault
        return None

    async def _at_bookies(self, what: str) -> None:
        if self._is_due():
            self._strike()
        if self.has_struck.is_set():
            await self.thawed.wait()

    def _is_due(self) -> bool:
        self._count += 1
        return self._count == self._at

    def _strike(self) -> None:
        self.has_struck.set()
        task = self._leader.task
        assert task is not None
        if self._freezes:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._cluster.tree.suspend, self._leader.store)
            loop.call_soon(self._cluster.tree.expire, self._leader.store)
        else:
            task.cancel()

    async def thaw(self) -> None:
        self.thawed.set()
        await asyncio.sleep(1)
        self._cluster.tree.resume(self._leader.store)
        await asyncio.sleep(1)


async def change_all(cluster: FeedCluster, ids: list[int]) -> None:
    await cluster.change(ids[0])
    await cluster.delete(ids.pop())
    ids.append(await cluster.create())
    await cluster.create(ids[1] - 500)
    await cluster.delete(ids[1] - 500)


async def scenario(*, at: int, freezes: bool, tells_zxids: bool) -> bool:
    """Return False if the leader ended before this step."""
    cluster = await FeedCluster.start(seed=at, settings=SETTINGS)
    cluster.tree.tells_zxids = tells_zxids
    ids = [await cluster.create() for _ in range(6)]
    async with cluster.follower() as follower:
        async with cluster.leader():
            await cluster.enable(retention_s=1)
            await cluster.wait_published(follower)
        await change_all(cluster, ids)

        leader = cluster.start_leader()
        breaker = Breaker(cluster, leader, at=at, freezes=freezes)
        for _ in range(25):
            if breaker.has_struck.is_set():
                break
            await change_all(cluster, ids)
            await asyncio.sleep(0.7)
        cluster.tree.faults = None
        await change_all(cluster, ids)
        if not freezes:
            await cluster.stop_leader(leader)
        async with cluster.leader():
            await change_all(cluster, ids)
            if not freezes:
                await cluster.wait_published(follower)
            elif not breaker.has_struck.is_set():
                cluster.tree.expire(leader.store)
            else:
                await cluster.wait_published(follower)
                await breaker.thaw()
                await change_all(cluster, ids)
                await cluster.wait_published(follower)
            if freezes:
                breaker.thawed.set()
                await cluster.stop_leader(leader)
            await asyncio.sleep(30)
            await cluster.wait_published(follower)
        logged = await cluster.assert_log_is_right_or_retained()
        ids_logged = {checkpoint.id for checkpoint in logged}
        oldest = logged[0].id
        assert {c.id for c in follower.received if c.id >= oldest} == ids_logged
    chain = await cluster.chain()
    assert chain.generation == 1, "no ledger was taken for lost"
    feed = {segment.ledger_id for segment in chain.segments} | set(chain.unfinished)
    stray = {i for i in cluster.ledgers() if i < 400} - feed - set(chain.deleting)
    assert stray <= {max(stray, default=0)}, stray
    return breaker.has_struck.is_set()


@pytest.mark.timeout(5_400 // STRIDE)
@pytest.mark.parametrize("tells_zxids", [True, False], ids=["zxids told", "zxids untold"])
@pytest.mark.parametrize("freezes", [False, True], ids=["killed", "frozen"])
def test_nothing_is_missed_if_the_leader_ends_at_any_step(freezes: bool, tells_zxids: bool) -> None:
    for at in range(1 + freezes + 2 * tells_zxids, STEPS_MAX, STRIDE):
        print(f"step {at}")
        if not run(scenario(at=at, freezes=freezes, tells_zxids=tells_zxids)):
            break
    assert at > 50
