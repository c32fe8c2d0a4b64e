"""A run's budget, shared by executors that start, end, die and lose ZooKeeper."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

import pytest

from auditor.fsck.budget import (
    LIST_INTERVAL_S,
    SHRINK_WAIT_S,
    Apply,
    LeasedPace,
    ReadShare,
    SharedPace,
    others_must_shrink,
    share_of,
)
from auditor.fsck.options import FsckOptions
from ledgers.errors import SessionLostError
from replication.nodes import Membership, Role
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time
from tests.replication.nodes import PATHS, node_info
from tests.replication.overload import overload
from tests.virtual_time import LoopClock

URI = "zk+hierarchical://zk:2181/ledgers"
OPTIONS = FsckOptions(metadata_service_uri=URI, reads_per_s=1_000, bytes_per_s=999)
SETTLED_S = SHRINK_WAIT_S + 3 * LIST_INTERVAL_S


@dataclass(slots=True)
class Executor:
    """An executor that reads as much as it may. ``share``: None while it must not read."""

    store: MemoryStore
    share: ReadShare | None = None
    told: list[ReadShare | None] = field(default_factory=list)

    def apply(self, share: ReadShare | None) -> None:
        self.share = share
        self.told.append(share)

    @property
    def reads_per_s(self) -> int:
        return self.share.reads_per_s if self.share else 0


def pace_of(
    store: MemoryStore, apply: Apply, run: str = "run-1", options: FsckOptions = OPTIONS
) -> LeasedPace:
    return LeasedPace(options, store, PATHS, apply, f"{run}.{uuid4()}", LoopClock())


@asynccontextmanager
async def executing(
    tree: MemoryTree, run: str = "run-1", options: FsckOptions = OPTIONS
) -> AsyncIterator[Executor]:
    executor = Executor(MemoryStore(tree))
    task = asyncio.create_task(pace_of(executor.store, executor.apply, run, options).lease())
    try:
        yield executor
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, SessionLostError):
            await task
        await executor.store.close()


async def leases(tree: MemoryTree) -> list[str]:
    return await MemoryStore(tree).children(PATHS.fsck_executors)


# --- Shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 999, 1_000])
def test_the_shares_of_a_run_add_up_to_its_budget(count: int) -> None:
    names = [f"run-1.{number:04}" for number in range(count)]

    shares = [share_of(OPTIONS, name=name, executors=names, node_reader_count=1) for name in names]

    told = [share for share in shares if share is not None]
    assert sum(share.reads_per_s for share in told) == (1_000 if count < 1_000 else 999)
    assert sum(share.bytes_per_s for share in told) == 999
    assert all(share.reads_per_s and share.bytes_per_s for share in told), "0 would be no limit"


def test_with_fewer_reads_than_executors_some_wait() -> None:
    names = ["run-1.a", "run-1.b", "run-1.c"]
    options = FsckOptions(metadata_service_uri=URI, reads_per_s=2)

    shares = [share_of(options, name=name, executors=names, node_reader_count=1) for name in names]

    assert [share.reads_per_s if share else None for share in shares] == [1, 1, None]


def test_without_a_limit_each_share_has_no_limit() -> None:
    options = FsckOptions(metadata_service_uri=URI)

    share = share_of(options, name="r.a", executors=["r.a", "r.b"], node_reader_count=1)

    assert share == ReadShare(reads_per_s=0, bytes_per_s=0, reads_in_flight_per_bookie=64)


@pytest.mark.parametrize(
    ("setting", "executor_count", "node_readers", "in_flight"),
    [
        pytest.param(64, 1, 1, 64, id="the setting"),
        pytest.param(500, 1, 3, 500, id="the maximum"),
        pytest.param(500, 10, 10, 100, id="the nodes' readers and the executors together"),
        pytest.param(64, 4_000, 1, 1, id="at least one"),
    ],
)
def test_reads_in_flight_at_a_bookie_stay_below_its_cap(
    setting: int, executor_count: int, node_readers: int, in_flight: int
) -> None:
    options = FsckOptions(metadata_service_uri=URI, reads_in_flight_per_bookie=setting)
    # Executors of other runs count too: the limit is for all reads at a bookie.
    names = ["mine.0", *(f"other.{number}" for number in range(1, executor_count))]

    share = share_of(options, name="mine.0", executors=names, node_reader_count=node_readers)

    assert share is not None
    assert share.reads_in_flight_per_bookie == in_flight


@pytest.mark.parametrize(
    ("limits", "reader_count", "is_waited_for"),
    [
        pytest.param({}, 31, False, id="31 readers can have 64 in flight"),
        pytest.param({}, 32, True, id="32 readers cannot"),
        pytest.param(
            {"reads_in_flight_per_bookie": 500}, 4, False, id="4 readers can have 500 in flight"
        ),
        pytest.param({"reads_in_flight_per_bookie": 500}, 5, True, id="5 readers cannot"),
        pytest.param({"reads_per_s": 10}, 2, True, id="reads are shared"),
        pytest.param({"bytes_per_s": 10}, 2, True, id="bytes are shared"),
    ],
)
def test_others_must_shrink_if_the_budget_is_too_small_for_all(
    limits: dict[str, int], reader_count: int, is_waited_for: bool
) -> None:
    options = FsckOptions(metadata_service_uri=URI, **limits)  # type: ignore[arg-type]

    assert others_must_shrink(options, reader_count=reader_count) is is_waited_for


def test_the_pace_of_a_run_can_be_sent_to_executors() -> None:
    pace = SharedPace(run="20261121T193500Z")

    assert pickle.loads(pickle.dumps(pace)) == pace


# --- Leases ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_single_executor_gets_the_whole_budget_at_once() -> None:
    async with executing(MemoryTree(clock=LoopClock())) as executor:
        await asyncio.sleep(LIST_INTERVAL_S / 2)

        assert executor.reads_per_s == 1_000


@in_virtual_time
async def test_a_new_executor_reads_nothing_until_the_others_shrink() -> None:
    tree = MemoryTree(clock=LoopClock())
    executors: list[Executor] = []
    async with AsyncExitStack() as stack:
        for _ in range(4):
            executors.append(await stack.enter_async_context(executing(tree)))
            # Some learn of earlier ones while later ones join.
            await asyncio.sleep(LIST_INTERVAL_S / 4)
        most = 0
        for _ in range(200):
            await asyncio.sleep(SETTLED_S / 100)
            most = max(most, sum(each.reads_per_s for each in executors))

        assert [each.reads_per_s for each in executors] == [250] * 4
        assert most == 1_000


@in_virtual_time
async def test_a_new_executor_begins_at_once_if_there_is_enough() -> None:
    tree = MemoryTree(clock=LoopClock())
    unlimited = FsckOptions(metadata_service_uri=URI)
    async with executing(tree, options=unlimited):
        await asyncio.sleep(SETTLED_S)
        async with executing(tree, options=unlimited) as second:
            await asyncio.sleep(LIST_INTERVAL_S / 2)

            assert second.share == ReadShare()


@in_virtual_time
async def test_the_share_of_an_executor_that_leaves_is_used_soon() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first:
        async with executing(tree):
            await asyncio.sleep(SETTLED_S)
            assert first.reads_per_s == 500

        await asyncio.sleep(2 * LIST_INTERVAL_S)
        assert first.reads_per_s == 1_000
    assert await leases(tree) == []


@in_virtual_time
async def test_the_share_of_a_dead_executor_returns_with_its_session() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first, executing(tree) as second:
        await asyncio.sleep(SETTLED_S)

        tree.expire(second.store)
        await asyncio.sleep(2 * LIST_INTERVAL_S)

        assert first.reads_per_s == 1_000


@in_virtual_time
async def test_an_executor_without_zookeeper_reads_nothing() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as first:
        await asyncio.sleep(SETTLED_S)

        tree.suspend(first.store)
        await asyncio.sleep(LIST_INTERVAL_S)
        assert first.share is None
        async with executing(tree):
            await asyncio.sleep(SETTLED_S)
            assert first.share is None

            tree.resume(first.store)
            await asyncio.sleep(2 * LIST_INTERVAL_S)
            assert first.reads_per_s == 500
        assert 1_000 not in [each.reads_per_s for each in first.told[2:] if each], (
            "the list from before the outage was never applied"
        )


@pytest.mark.parametrize("step", range(30))
@in_virtual_time
async def test_a_list_from_before_an_outage_is_never_applied(step: int) -> None:
    """ZooKeeper is cut off at any moment while a second joins; a third joins meanwhile."""

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
                listed_count = len(first.told)
                tree.resume(first.store)
                await asyncio.sleep(SETTLED_S)

                assert first.reads_per_s in (333, 334)
                assert {each.reads_per_s for each in first.told[listed_count:] if each} <= {
                    333,
                    334,
                }


@in_virtual_time
async def test_concurrent_runs_have_own_budgets_but_share_bookies() -> None:
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
        await asyncio.sleep(2 * LIST_INTERVAL_S)
        assert ours.share is not None
        assert ours.share.reads_in_flight_per_bookie == 500, "nodes that end are noticed, too"


@in_virtual_time
async def test_an_executor_that_cannot_list_the_others_pauses() -> None:
    tree = MemoryTree(clock=LoopClock())
    async with executing(tree) as ours:
        await asyncio.sleep(SETTLED_S)
        assert ours.reads_per_s == 1_000
        throttled = overload(ours.store, PATHS.fsck_executors)
        async with executing(tree) as theirs:
            await asyncio.sleep(60)
            assert (ours.share, theirs.reads_per_s) == (None, 500), (
                "the other executor has only its own part"
            )

            throttled.clear()
            await asyncio.sleep(15)
            assert (ours.reads_per_s, theirs.reads_per_s) == (500, 500)


@in_virtual_time
async def test_a_lost_session_ends_the_pace() -> None:
    tree = MemoryTree(clock=LoopClock())
    store = MemoryStore(tree)
    running = asyncio.create_task(pace_of(store, lambda _: None).lease())
    await asyncio.sleep(SETTLED_S)

    tree.expire(store)

    with pytest.raises(SessionLostError):
        await running
    assert await leases(tree) == []


@in_virtual_time
async def test_a_deleted_lease_is_created_again() -> None:
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
