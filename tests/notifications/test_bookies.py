"""The bookies as a source of changes."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from auditor.mark_reasons import LossKind, LossRecord, LossRecords
from ledgers.errors import SessionLostError, UnavailableError
from ledgers.model import BookieId
from ledgers.store import ANY_VERSION, Create, Delete, Operation, SetData
from notifications.bookies import BookieSource
from notifications.protocol import Change, bookie
from notifications.sources import FRESH_EVERY_S
from replication.znodes import ClusterPaths, ensure_znode
from tests.memory.store import MemoryStore, MemoryTree, Nodes
from tests.notifications.judging import Judge, States, Truth, disturb
from tests.replication.cluster import shut_out
from tests.virtual_time import LoopClock

ROOT = "/ledgers"
LOSSES = ClusterPaths.below(ROOT).losses
AVAILABLE, READ_ONLY, COOKIES = (
    f"{ROOT}/{name}" for name in ("available", "available/readonly", "cookies")
)
NAMES = [BookieId(f"b{number}:3181") for number in range(4)]
SEEDS = 60


def states(nodes: Nodes) -> States:
    lost = nodes.find(LOSSES)
    losses = LossRecords.parse(lost.data).bookies if lost is not None else {}
    found: dict[str, tuple[bool, object]] = {}
    for name in NAMES:
        znodes = [nodes.find(f"{path}/{name}") for path in (AVAILABLE, READ_ONLY, COOKIES)]
        czxids = [0 if node is None else node.czxid for node in znodes]
        is_registered = bool(czxids[0] or czxids[1])
        is_lost = name in losses and losses[name].ended_ms is None
        found[bookie(name)] = (is_registered, (czxids, is_lost and not is_registered))
    return found


class Cluster:
    """A cluster in memory whose bookies register and disappear by hand."""

    def __init__(self, *, chance: random.Random | None = None) -> None:
        async def travel() -> None:
            await asyncio.sleep(0 if chance is None else chance.random() * 0.02)

        self.tree = MemoryTree(latency=travel)
        self.store, self.of_source = MemoryStore(self.tree), MemoryStore(self.tree)
        self.source = BookieSource(self.of_source, ROOT, LoopClock())

    async def start(self, *writable: str) -> Cluster:
        for path in (READ_ONLY, COOKIES, LOSSES.rpartition("/")[0]):
            await ensure_znode(self.store, path)
        await self.store.create(LOSSES, LossRecords().to_json())
        self.truth = Truth(self.tree, states)
        self.judge = Judge(self.source, self.truth)
        await self.apply(*(Create(path=f"{AVAILABLE}/{name}") for name in writable))
        return self

    async def apply(self, *operations: Operation) -> None:
        """Apply each operation in a transaction of its own."""
        for operation in operations:
            await self.store.multi([operation])

    async def lose(self, *names: BookieId) -> None:
        record = LossRecord(kind=LossKind.LOST, since_ms=1)
        data = LossRecords(bookies=dict.fromkeys(names, record)).to_json()
        await self.apply(SetData(path=LOSSES, data=data, version=ANY_VERSION))

    async def told_after(self, *operations: Operation) -> list[Change]:
        """Return what the source yields for operations that it sees at once."""
        before = self.source._parts
        await self.apply(*operations)
        assert self.source._parts is before
        batch = await self.source._read_batch()
        return batch.changes

    def version(self, name: str) -> int:
        change = self.truth.last(bookie(name))
        assert change is not None
        assert change.version is not None
        return change.version


A, B, C = NAMES[:3]


async def test_a_new_bookie_is_told_with_its_zxid() -> None:
    cluster = await Cluster().start(A)
    await cluster.source.load()

    changes = await cluster.told_after(Create(path=f"{AVAILABLE}/{B}"))

    assert changes == [Change(bookie(B), cluster.version(B))]


async def test_a_bookie_that_disappears_is_deleted() -> None:
    cluster = await Cluster().start(A, B)
    await cluster.source.load()

    changes = await cluster.told_after(Delete(path=f"{AVAILABLE}/{B}"))

    assert changes == [Change(bookie(B), cluster.version(B), True)]


async def test_of_two_that_disappear_only_the_last_zxid_is_known() -> None:
    """Which of the two is the last is not known either."""
    cluster = await Cluster().start(A, B, C)
    await cluster.source.load()

    changes = await cluster.told_after(
        Delete(path=f"{AVAILABLE}/{B}"), Delete(path=f"{AVAILABLE}/{C}")
    )

    assert changes == [Change(bookie(B), None, True), Change(bookie(C), None, True)]


async def test_a_bookie_that_becomes_read_only_changes() -> None:
    cluster = await Cluster().start(A)
    await cluster.source.load()

    changes = await cluster.told_after(
        Create(path=f"{READ_ONLY}/{A}"), Delete(path=f"{AVAILABLE}/{A}")
    )

    assert [(change.key, change.is_deleted) for change in changes] == [(bookie(A), False)]


async def test_a_bookie_that_registers_again_at_once_changes() -> None:
    cluster = await Cluster().start(A)
    await cluster.source.load()

    changes = await cluster.told_after(
        Delete(path=f"{AVAILABLE}/{A}"), Create(path=f"{AVAILABLE}/{A}")
    )

    assert changes == [Change(bookie(A), cluster.version(A))]


async def test_a_new_cookie_is_a_change() -> None:
    cluster = await Cluster().start(A)
    await cluster.apply(Create(path=f"{COOKIES}/{A}"))
    await cluster.source.load()

    changes = await cluster.told_after(Delete(path=f"{COOKIES}/{A}"), Create(path=f"{COOKIES}/{A}"))

    assert changes == [Change(bookie(A), cluster.version(A))]


async def test_a_bookie_that_is_counted_as_lost_changes() -> None:
    cluster = await Cluster().start(A)
    await cluster.source.load()
    data = LossRecords(bookies={B: LossRecord(kind=LossKind.LOST, since_ms=1)}).to_json()

    changes = await cluster.told_after(SetData(path=LOSSES, data=data, version=ANY_VERSION))

    assert changes == [Change(bookie(B), cluster.version(B), True)]


async def test_a_transition_back_to_a_kept_registration_is_not_lost() -> None:
    """A bookie failed to delete its read-only registration when it became writable, and becomes
    read-only again: only a deletion says so, and a server that begins then sees no trace of it."""
    cluster = await Cluster().start()
    await cluster.apply(Create(path=f"{READ_ONLY}/{A}"), Create(path=f"{AVAILABLE}/{A}"))
    known = cluster.version(A)
    await cluster.apply(Delete(path=f"{AVAILABLE}/{A}"))

    table = await cluster.source.load()

    assert table.answer(bookie(A), known) == Change(bookie(A), None)


async def test_a_missing_list_is_no_mass_loss() -> None:
    cluster = Cluster()

    with pytest.raises(UnavailableError, match="the list of bookies is missing"):
        await cluster.source.load()


async def test_a_hidden_bookie_is_a_bookie() -> None:
    cluster = await Cluster().start(A)
    shut_out(cluster.of_source, f"{AVAILABLE}/{A}")

    table = await cluster.source.load()

    assert table.answer(bookie(A), 0) == Change(bookie(A), None)


async def test_no_change_costs_five_requests() -> None:
    cluster = await Cluster().start(*NAMES)
    await cluster.source.load()
    before = cluster.of_source.request_count

    batch = await cluster.source._read_batch()

    assert batch.changes == []
    assert cluster.of_source.request_count - before == 5


async def test_the_source_is_fresh_while_zookeeper_answers() -> None:
    cluster = await Cluster().start(A)
    task = asyncio.ensure_future(cluster.judge.run())

    await asyncio.sleep(100)
    task.cancel()

    times_s = cluster.judge.times_s
    pauses_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert max(pauses_s) <= FRESH_EVERY_S
    assert times_s[-1] > 100 - FRESH_EVERY_S


async def test_the_source_is_silent_while_zookeeper_does_not_answer() -> None:
    cluster = await Cluster().start(A)
    task = asyncio.ensure_future(cluster.judge.run())
    await asyncio.sleep(10)

    cluster.tree.suspend(cluster.of_source)
    count = len(cluster.judge.batches)
    await asyncio.sleep(100)
    task.cancel()

    assert len(cluster.judge.batches) == count


async def test_a_lost_session_ends_the_source_at_once() -> None:
    cluster = await Cluster().start(A)
    task = asyncio.ensure_future(cluster.judge.run())
    await asyncio.sleep(10.1)
    before_s = asyncio.get_running_loop().time()

    cluster.tree.expire(cluster.of_source)

    with pytest.raises(SessionLostError):
        await task
    assert asyncio.get_running_loop().time() == before_s


async def act(cluster: Cluster, chance: random.Random) -> None:
    """Let something happen to a bookie, if it can."""
    name = chance.choice(NAMES)
    if chance.random() < 0.1:
        await cluster.lose(*chance.sample(NAMES, 2))
        return
    path = f"{chance.choice((AVAILABLE, READ_ONLY, COOKIES))}/{name}"
    if await cluster.store.exists(path) is None:
        await cluster.apply(Create(path=path))
    else:
        await cluster.apply(Delete(path=path))


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_histories_are_told(seed: int) -> None:
    chance = random.Random(seed)
    cluster = await Cluster(chance=chance).start(A, B)
    for _ in range(chance.randrange(10)):
        await act(cluster, chance)
    judging = asyncio.ensure_future(cluster.judge.run())
    disturbing = asyncio.ensure_future(disturb(cluster.tree, [cluster.of_source], chance))

    for _ in range(100):
        await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1, 1)))
        await act(cluster, chance)
    disturbing.cancel()
    await asyncio.sleep(60)

    assert not judging.done() or judging.result() is None
    assert cluster.judge.knows_all()
    judging.cancel()
