"""Random changes, leaders, faults and followers. The log, applied to nothing, equals ZooKeeper.

``BOOKMENDER_TEST_FEED_SEEDS=1000`` tries as many seeds. ``BOOKMENDER_TEST_FEED_FIRST`` is the first
seed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing, suppress
from random import Random

import pytest
from structlog.testing import capture_logs

from checkpoints.leader_state import FeedSettings
from checkpoints.model import Checkpoint
from ledgers.errors import BookmenderError, NoAnswerError
from ledgers.store import Operation
from tests.checkpoints.feed_cluster import BOOKIES, PATHS, Catalogue, FeedCluster, Leader, apply
from tests.memory.bookies import Fault as BookieFault
from tests.memory.bookies import Op
from tests.memory.store import Fault, MemoryStore
from tests.virtual_time import run

SEEDS = int(os.environ.get("BOOKMENDER_TEST_FEED_SEEDS", "5"))
FIRST = int(os.environ.get("BOOKMENDER_TEST_FEED_FIRST", "0"))
EVENTS = 60


class Simulation:
    """One run, as a seed draws it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        settings = FeedSettings(
            interval_s=self.random.choice([0.0, 0.05, 1.0]),
            roll_bytes=self.random.choice([1_000, 3_000, 100_000]),
            roll_age_s=self.random.choice([20.0, 1_000.0]),
            base_bytes_min=self.random.choice([1_000, 100_000]),
            base_factor=0.0,
            pending_max=self.random.choice([3, 10, 100_000]),
        )
        self.cluster = FeedCluster(seed=seed, settings=settings)
        self.fault_share = self.random.choice([0.0, 0.0, 0.02])
        self.leaders: list[Leader] = []
        self.frozen: list[Leader] = []
        self.late: list[LateFollower] = []
        self.down: list[tuple[str, Op]] = []

    async def start(self) -> None:
        await self.cluster.prepare()
        if self.random.random() < 0.5:  # then empty checkpoints follow as well
            await self.cluster.store.create(f"{PATHS.feed_watchers}/one", with_parents=True)
        self.cluster.tree.tells_zxids = self.random.random() < 0.5
        self.cluster.tree.latency = self._latency
        self.cluster.tree.faults = self._fault
        for _ in range(self.random.randrange(20)):
            await self.cluster.create()

    async def _latency(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0, 0, 0.001, 0.01]))

    def _fault(self, store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        is_leaders = any(leader.store is store and leader.is_leading for leader in self.leaders)
        if is_leaders and operations and self.random.random() < self.fault_share:
            return self.random.choice(list(Fault))
        return None

    # --- Events -------------------------------------------------------------------------------

    async def change(self) -> None:
        cluster, random = self.cluster, self.random
        ids = sorted(i for i in cluster.ledgers() if i > 1_000)
        for _ in range(random.randrange(8)):
            chosen = random.choice(ids) if ids else 999_999
            with suppress(BookmenderError):
                match random.randrange(5):
                    case 0:
                        await cluster.create()
                    case 1:
                        await cluster.change(chosen)
                    case 2:
                        await cluster.delete(chosen)
                    case 3:
                        await cluster.delete(chosen)
                        await cluster.create(chosen)
                    case 4:
                        await cluster.create(1_000_000_000 * random.randrange(1, 30))

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0.01, 0.1, 1, 5]))

    async def elect(self) -> None:
        for leader in [each for each in self.leaders if each.task and each.task.done()]:
            self.leaders.remove(leader)
            await self.cluster.stop_leader(leader)
        if len(self.leaders) < 3:
            self.leaders.append(self.cluster.start_leader())

    async def kill(self) -> None:
        if self.leaders:
            number = self.random.randrange(len(self.leaders))
            await self.cluster.stop_leader(self.leaders.pop(number))

    async def freeze(self) -> None:
        """Suspend a node past its session."""
        if self.leaders:
            leader = self.leaders.pop(0)
            thawed = asyncio.Event()

            async def step(what: str) -> None:
                await thawed.wait()

            leader.bookies.step = step
            self.cluster.tree.suspend(leader.store)
            self.cluster.tree.expire(leader.store)
            leader.thaw = thawed.set
            self.frozen.append(leader)

    async def thaw(self) -> None:
        for leader in self.frozen:
            leader.thaw()
            self.cluster.tree.resume(leader.store)
        await self.wait()
        while self.frozen:
            await self.cluster.stop_leader(self.frozen.pop())

    async def break_connection(self) -> None:
        if self.leaders:
            leader = self.random.choice(self.leaders)
            self.cluster.tree.suspend(leader.store)
            await self.change()
            await self.wait()
            self.cluster.tree.resume(leader.store)

    async def bookie_fails(self) -> None:
        bookie, op = self.random.choice(BOOKIES), self.random.choice([Op.ADD, Op.READ])
        self.cluster.bookies.fail(bookie, op, BookieFault(error=NoAnswerError))
        await self.change()
        await self.wait()
        self.cluster.bookies.stop_failing(bookie, op)

    async def follow_late(self) -> None:
        if len(self.late) < 3:
            self.late.append(await LateFollower.start(self.cluster))

    async def run(self) -> None:
        await self.start()
        events = [
            *([self.change] * 8 + [self.wait] * 5 + [self.elect] * 3),
            *(self.kill, self.freeze, self.thaw),
            *([self.break_connection] * 2 + [self.bookie_fails, self.follow_late]),
        ]
        async with self.cluster.follower() as follower:
            await self.elect()
            await self.cluster.enable()
            for _ in range(EVENTS):
                await self.random.choice(events)()
            self.fault_share = 0.0
            await self.thaw()
            await self.elect()
            await self.cluster.wait_published(follower)
            try:
                for late in self.late:
                    await late.wait_equal()
            finally:
                for late in self.late:
                    await late.stop()  # raises what ended its log
            while self.leaders:
                await self.kill()
            assert (await self.cluster.chain()).generation == 1, "no ledger was taken for lost"
            logged = await self.cluster.assert_log_is_right()
            seen = {checkpoint.id for checkpoint in follower.received}
            assert seen <= {checkpoint.id for checkpoint in logged}
            for late in self.late:
                assert late.seen <= {checkpoint.id for checkpoint in logged}


class LateFollower:
    """A client that begins late: it listens, reads the log, and puts both together."""

    def __init__(self, cluster: FeedCluster) -> None:
        self._cluster = cluster
        self._checkpoints: dict[int, Checkpoint] = {}
        self._context = cluster.follower()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, cluster: FeedCluster) -> LateFollower:
        late = cls(cluster)
        follower = await late._context.__aenter__()
        follower.log.remove_checkpoint_listener(follower)
        follower.log.register_checkpoint_listener(late)

        async def read() -> None:
            while True:
                with suppress(BookmenderError):
                    async with aclosing(follower.log.request_checkpoints(0)) as found:
                        async for checkpoint in found:
                            late._checkpoints[checkpoint.id] = checkpoint
                    return
                await asyncio.sleep(1)

        late._task = asyncio.create_task(read())
        return late

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._checkpoints[checkpoint.id] = checkpoint

    @property
    def seen(self) -> set[int]:
        return set(self._checkpoints)

    async def wait_equal(self) -> None:
        assert self._task is not None
        await self._task
        with suppress(TimeoutError):
            async with asyncio.timeout(600):
                while self._catalogue() != self._cluster.ledgers():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        catalogue, ledgers = self._catalogue(), self._cluster.ledgers()
        assert catalogue == ledgers, sorted(catalogue.items() ^ ledgers.items())

    def _catalogue(self) -> Catalogue:
        catalogue: Catalogue = {}
        versions: dict[bytes, int] = {}
        for _, checkpoint in sorted(self._checkpoints.items()):
            apply(checkpoint, catalogue, versions)
        return catalogue

    async def stop(self) -> None:
        await self._context.__aexit__(None, None, None)


@pytest.mark.timeout(SEEDS * 10 + 60)
def test_whatever_happens_the_log_equals_zookeeper() -> None:
    for seed in range(FIRST, FIRST + SEEDS):
        print(f"seed {seed}")
        with capture_logs() as logs:
            run(Simulation(seed).run())
        assert not [each for each in logs if each["event"] == "feed.crashed"]
