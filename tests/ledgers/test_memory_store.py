"""The store in memory beyond the contract: faults and time on demand."""

import asyncio
from collections.abc import Sequence

import pytest

from ledgers.errors import SessionLostError, UnavailableError, UnknownOutcomeError
from ledgers.store import Create, Operation, SessionState, SetData
from tests.memory.store import Fault, MemoryStore, MemoryTree
from tests.virtual_time import LoopClock, run


async def new_store() -> tuple[MemoryTree, MemoryStore]:
    tree = MemoryTree(clock=LoopClock())
    store = MemoryStore(tree)
    await store.create("/a", b"before")
    return tree, store


@pytest.mark.parametrize(
    ("fault", "is_applied"), [(Fault.LOST_REQUEST, False), (Fault.LOST_REPLY, True)]
)
def test_a_lost_write_is_unknown_only_to_its_writer(fault: Fault, is_applied: bool) -> None:
    async def scenario() -> None:
        tree, store = await new_store()
        tree.faults = lambda _, operations: fault if operations else None

        with pytest.raises(UnknownOutcomeError):
            await store.set("/a", b"after", version=0)

        assert tree.snapshot()["/a"] == (b"after" if is_applied else b"before")

    run(scenario())


def test_the_faults_hook_sees_each_write_and_each_read_once() -> None:
    async def scenario() -> None:
        tree, store = await new_store()
        seen: list[Sequence[Operation]] = []
        tree.faults = lambda _, operations: seen.append(operations)

        await store.get("/a")
        await store.set("/a", b"x", version=0)
        await store.multi([Create(path="/b"), Create(path="/c")])

        assert seen == [
            (),
            [SetData(path="/a", data=b"x", version=0)],
            [Create(path="/b"), Create(path="/c")],
        ]

    run(scenario())


def test_a_read_that_is_lost_repeatedly_fails() -> None:
    async def scenario() -> None:
        tree, store = await new_store()
        tree.faults = lambda *_: Fault.LOST_REPLY

        with pytest.raises(UnavailableError, match="again and again"):
            await store.get("/a")

    run(scenario())


def test_a_session_may_expire_between_a_write_and_its_reply() -> None:
    async def scenario() -> None:
        tree, store = await new_store()

        async def expire_on_the_way_back() -> None:
            await asyncio.sleep(1)
            if tree.snapshot()["/a"] == b"after":
                tree.expire(store)

        tree.latency = expire_on_the_way_back
        with pytest.raises(SessionLostError):
            await store.set("/a", b"after", version=0)

        assert tree.snapshot()["/a"] == b"after"

    run(scenario())


def test_a_hook_may_suspend_the_session_and_lose_the_request() -> None:
    async def scenario() -> None:
        tree, store = await new_store()

        def suspend(_: MemoryStore, operations: Sequence[Operation]) -> None:
            tree.faults = None
            tree.suspend(store)

        tree.faults = suspend
        with pytest.raises(UnknownOutcomeError):
            await store.set("/a", b"after", version=0)

        assert store.state is SessionState.SUSPENDED
        assert tree.snapshot()["/a"] == b"before"

    run(scenario())


def test_the_server_may_end_a_session_before_its_owner_knows() -> None:
    """Rule S3 is about this: the lock is deleted while its owner still relies on it."""

    async def scenario() -> None:
        tree, store = await new_store()
        await store.create("/lock", is_ephemeral=True)
        tree.suspend(store)

        tree.expire(store)

        assert "/lock" not in tree.snapshot()
        assert store.state is SessionState.SUSPENDED
        tree.resume(store)
        with pytest.raises(SessionLostError):
            await store.wait_connected()

    run(scenario())


def test_requests_take_the_latency_twice_and_run_in_parallel() -> None:
    async def scenario() -> None:
        tree, store = await new_store()
        clock, before_s = LoopClock(), LoopClock().now_s()
        tree.latency = lambda: clock.sleep(0.5)

        await asyncio.gather(*(store.get("/a") for _ in range(100)))

        assert clock.now_s() - before_s == 1.0

    run(scenario())


def test_times_are_those_of_the_clock() -> None:
    async def scenario() -> None:
        _, store = await new_store()
        await asyncio.sleep(2)

        stat = await store.set("/a", b"", version=0)

        assert stat.mtime_ms - stat.ctime_ms == 2_000

    run(scenario())


@pytest.mark.parametrize("catches_up_by", ["sync", "write"])
def test_a_lagging_server_shows_the_past_until_a_sync(catches_up_by: str) -> None:
    """Rule S8: only after a sync a reader believes that a znode exists or not."""

    async def scenario() -> None:
        tree, store = await new_store()
        other = MemoryStore(tree)
        await store.create("/gone", b"")
        tree.lag(store)
        await other.delete("/gone")
        await other.set("/a", b"after", version=0)
        await other.create("/new")

        assert (await store.get("/a"))[0] == b"before"
        assert await store.children("/") == ["a", "gone"]
        assert await store.exists("/new") is None
        await (store.sync("/") if catches_up_by == "sync" else store.create("/mine"))

        assert (await store.get("/a"))[0] == b"after"
        assert "gone" not in await store.children("/")
        assert await store.exists("/new") is not None

    run(scenario())
