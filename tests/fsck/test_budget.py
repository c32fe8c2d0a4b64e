"""A run's budget, shared by executors that come, go, die and lose sight of ZooKeeper."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from auditor.fsck.budget import (
    LULL_S,
    ROOM_S,
    LeasedPace,
    ReadShare,
    SharedPace,
    share_of,
    takes_from_others,
)
from auditor.fsck.levels import FsckOptions
from ledgers.errors import SessionLostError
from ledgers.memory.store import MemoryStore, MemoryTree
from replication.nodes import Membership, Role
from tests.replication.cluster import in_virtual_time
from tests.replication.nodes import PATHS, node_info
from tests.replication.overload import overload
from tests.virtual_time import LoopClock

URI = "zk+hierarchical://zk:2181/ledgers"
OPTIONS = FsckOptions(metadata_service_uri=URI, reads_per_s=1_000, bytes_per_s=999)
SETTLED_S = ROOM_S + 3 * LULL_S


@dataclass(slots=True)
class Executor:
    """One that reads as much as it is told to. ``share``: None while it must not."""

    store: MemoryStore
    share: ReadShare | None = None
    told: list[ReadShare | None] = field(default_factory=list)

    def apply(self, share: ReadShare | None) -> None:
        self.share = share
        self.told.append(share)

    @property
    def reads_per_s(self) -> int:
        return self.share.reads_per_s if self.share else 0


@asynccontextmanager
async def executing(
    tree: MemoryTree, run: str = "run-1", options: FsckOptions = OPTIONS
) -> AsyncIterator[Executor]:
    executor = Executor(MemoryStore(tree))
    pace = LeasedPace(options, executor.store, PATHS, run=run, clock=LoopClock())
    task = asyncio.create_task(pace.run(executor.apply))
    try:
        yield executor
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, SessionLostError):
            await task
        await executor.store.close()


async def leases(tree: MemoryTree) -> list[str]:
    return await MemoryStore(tree).children(PATHS.fsck_executors)


# --- The parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 999, 1_000])
def test_the_parts_of_a_run_make_up_its_budget_to_the_last_read(count: int) -> None:
    names = [f"run-1.{number:04}" for number in range(count)]

    shares = [share_of(OPTIONS, name=name, executors=names, node_reader_count=1) for name in names]

    told = [share for share in shares if share is not None]
    assert sum(share.reads_per_s for share in told) == (1_000 if count < 1_000 else 999)
    assert sum(share.bytes_per_s for share in told) == 999
    assert all(share.reads_per_s and share.bytes_per_s for share in told), "0 would be no limit"


def test_where_there_is_less_to_read_than_executors_some_wait() -> None:
    names = ["run-1.a", "run-1.b", "run-1.c"]
    options = FsckOptions(metadata_service_uri=URI, reads_per_s=2)

    shares = [share_of(options, name=name, executors=names, node_reader_count=1) for name in names]

    assert [share.reads_per_s if share else None for share in shares] == [1, 1, None]


def test_no_limit_stays_none_however_many_share_it() -> None:
    options = FsckOptions(metadata_service_uri=URI)

    share = share_of(options, name="r.a", executors=["r.a", "r.b"], node_reader_count=1)

    assert share == ReadShare(reads_per_s=0, bytes_per_s=0, reads_in_flight_per_bookie=64)


@pytest.mark.parametrize(
    ("setting", "executor_count", "node_readers", "in_flight"),
    [
        pytest.param(64, 1, 1, 64, id="the setting"),
        pytest.param(500, 1, 3, 500, id="as much as one may at most"),
        pytest.param(500, 10, 10, 100, id="the nodes' readers and the executors together"),
        pytest.param(64, 4_000, 1, 1, id="never none at all"),
    ],
)
def test_a_bookie_is_never_asked_for_more_than_its_cap(
    setting: int, executor_count: int, node_readers: int, in_flight: int
) -> None:
    options = FsckOptions(metadata_service_uri=URI, reads_in_flight_per_bookie=setting)
    # Of other runs, too: a bookie does not care whose reads they are.
    names = ["mine.0", *(f"other.{number}" for number in range(1, executor_count))]

    share = share_of(options, name="mine.0", executors=names, node_reader_count=node_readers)

    assert share is not None
    assert share.reads_in_flight_per_bookie == in_flight


@pytest.mark.parametrize(
    ("limits", "reader_count", "is_waited_for"),
    [
        pytest.param({}, 31, False, id="64 reads in flight each are there for 31"),
        pytest.param({}, 32, True, id="and no more"),
        pytest.param({"reads_in_flight_per_bookie": 500}, 4, False, id="500 are for 4"),
        pytest.param({"reads_in_flight_per_bookie": 500}, 5, True, id="and no more either"),
        pytest.param({"reads_per_s": 10}, 2, True, id="the reads are shared out"),
        pytest.param({"bytes_per_s": 10}, 2, True, id="the bytes are"),
    ],
)
def test_others_have_to_make_room_where_there_is_not_enough_for_all(
    limits: dict[str, int], reader_count: int, is_waited_for: bool
) -> None:
    options = FsckOptions(metadata_service_uri=URI, **limits)  # type: ignore[arg-type]

    assert takes_from_others(options, reader_count=reader_count) is is_waited_for


def test_the_pace_of_a_run_can_be_sent_to_executors() -> None:
    pace = SharedPace(run="20261121T193500Z")

    assert pickle.loads(pickle.dumps(pace)) == pace


# --- Leases ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_who_is_alone_begins_at_once_with_all_of_it() -> None:
    async with executing(MemoryTree(clock=LoopClock())) as executor:
        await asyncio.sleep(LULL_S / 2)

        assert executor.reads_per_s == 1_000


@in_virtual_time
async def test_who_joins_reads_nothing_until_the_others_have_made_room() -> None:
    tree = MemoryTree(clock=LoopClock())
    executors: list[Executor] = []
    async with AsyncExitStack() as stack:
        for _ in range(4):
            executors.append(await stack.enter_async_context(executing(tree)))
            await asyncio.sleep(LULL_S / 4)  # some are told of those before while these join
        most = 0
        for _ in range(200):
            await asyncio.sleep(SETTLED_S / 100)
            most = max(most, sum(each.reads_per_s for each in executors))

        assert [each.reads_per_s for each in executors] == [250] * 4
        assert most == 1_000


@in_virtual_time
async def test_where_there_is_enough_for_all_who_joins_begins_at_once() -> None:
    tree = MemoryTree(clock=LoopClock())
    unlimited = FsckOptions(metadata_service_uri=URI)
    async with executing(tree, options=unlimited):
        await asyncio.sleep(SETTLED_S)
        async with executing(tree, options=unlimited) as second:
            await asyncio.sleep(LULL_S / 2)

            assert second.share == ReadShare()


@in_virtual_time
async def test_what_one_gives_back_the_others_have_soon() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first:
        async with executing(tree):
            await asyncio.sleep(SETTLED_S)
            assert first.reads_per_s == 500

        await asyncio.sleep(2 * LULL_S)
        assert first.reads_per_s == 1_000
    assert await leases(tree) == []


@in_virtual_time
async def test_what_a_dead_one_had_comes_back_with_its_session() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first, executing(tree) as second:
        await asyncio.sleep(SETTLED_S)

        tree.expire(second.store)
        await asyncio.sleep(2 * LULL_S)

        assert first.reads_per_s == 1_000


@in_virtual_time
async def test_who_cannot_see_the_others_reads_nothing_until_it_can() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first:
        await asyncio.sleep(SETTLED_S)

        tree.suspend(first.store)
        await asyncio.sleep(LULL_S)
        assert first.share is None
        async with executing(tree):
            await asyncio.sleep(SETTLED_S)
            assert first.share is None

            tree.resume(first.store)
            await asyncio.sleep(2 * LULL_S)
            assert first.reads_per_s == 500
        assert 1_000 not in [each.reads_per_s for each in first.told[2:] if each], (
            "what it knew from before was never applied again"
        )


@pytest.mark.parametrize("step", range(30))
def test_what_was_read_before_zookeeper_went_away_is_never_applied_after(step: int) -> None:
    """At whatever moment it goes, while the first takes note of the second: a third has come when
    it is back."""

    @in_virtual_time
    async def lose_sight() -> None:
        async def latency() -> None:
            await asyncio.sleep(0.05)

        tree = MemoryTree(clock=LoopClock(), latency=latency)
        async with executing(tree) as first:
            await asyncio.sleep(SETTLED_S)
            async with executing(tree):
                await asyncio.sleep(step * 0.02)
                tree.suspend(first.store)
                async with executing(tree):
                    await asyncio.sleep(SETTLED_S)
                    told_count = len(first.told)
                    tree.resume(first.store)
                    await asyncio.sleep(SETTLED_S)

                    assert first.reads_per_s in (333, 334)
                    assert {each.reads_per_s for each in first.told[told_count:] if each} <= {
                        333,
                        334,
                    }

    lose_sight()


@in_virtual_time
async def test_runs_at_the_same_time_have_a_budget_each_but_share_the_bookies() -> None:
    tree = MemoryTree(clock=LoopClock())
    options = FsckOptions(metadata_service_uri=URI, reads_per_s=10, reads_in_flight_per_bookie=500)
    nodes = MemoryStore(tree)
    for number in range(7):
        await Membership.join(nodes, PATHS, node_info(f"worker-{number}"))
    await Membership.join(nodes, PATHS, node_info("auditor", Role.AUDITOR))
    async with executing(tree, "run-1", options) as ours, executing(tree, "run-2", options):
        await asyncio.sleep(SETTLED_S)

        assert ours.share == ReadShare(reads_per_s=10, reads_in_flight_per_bookie=200), (
            "two executors, seven workers, and the leader's checks"
        )

        await nodes.close()
        await asyncio.sleep(2 * LULL_S)
        assert ours.share is not None
        assert ours.share.reads_in_flight_per_bookie == 500, "nodes that go are noticed as well"


@in_virtual_time
async def test_who_cannot_read_the_list_reads_nothing_and_goes_on_once_it_can() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as ours:
        await asyncio.sleep(SETTLED_S)
        assert ours.reads_per_s == 1_000
        throttled = overload(ours.store, PATHS.fsck_executors)
        async with executing(tree) as theirs:
            await asyncio.sleep(60)
            assert (ours.share, theirs.reads_per_s) == (None, 500), "the others' part is theirs"

            throttled.clear()
            await asyncio.sleep(15)
            assert (ours.reads_per_s, theirs.reads_per_s) == (500, 500)


@in_virtual_time
async def test_who_joins_and_cannot_read_the_list_waits() -> None:
    tree = MemoryTree(clock=LoopClock())
    store = MemoryStore(tree)
    throttled = overload(store, PATHS.fsck_executors)
    executor = Executor(store)
    pace = LeasedPace(OPTIONS, store, PATHS, run="run-1", clock=LoopClock())
    running = asyncio.create_task(pace.run(executor.apply))
    await asyncio.sleep(60)
    assert executor.share is None
    assert not running.done()

    throttled.clear()
    await asyncio.sleep(15)
    assert executor.reads_per_s == 1_000
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@in_virtual_time
async def test_a_lost_session_ends_the_pace() -> None:
    tree = MemoryTree(clock=LoopClock())
    store = MemoryStore(tree)
    pace = LeasedPace(OPTIONS, store, PATHS, run="run-1", clock=LoopClock())
    running = asyncio.create_task(pace.run(lambda _: None))
    await asyncio.sleep(SETTLED_S)

    tree.expire(store)

    with pytest.raises(SessionLostError):
        await running
    assert await leases(tree) == []


@in_virtual_time
async def test_a_lease_that_somebody_deletes_is_taken_again() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as one, executing(tree) as other:
        await asyncio.sleep(SETTLED_S)
        own = one.store.session_id
        for path in [f"{PATHS.fsck_executors}/{name}" for name in await leases(tree)]:
            await MemoryStore(tree).delete(path)

        await asyncio.sleep(2 * SETTLED_S)

        assert len(await leases(tree)) == 2
        assert one.store.session_id == own
        assert one.reads_per_s + other.reads_per_s == 1_000
