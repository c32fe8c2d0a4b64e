"""The store in memory beyond the contract: faults and time on demand."""

import pytest

from ledgers.errors import SessionLostError, UnknownOutcomeError
from ledgers.store import SessionState
from tests.memory.store import Fault, MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import LoopClock


async def new_store() -> tuple[MemoryTree, MemoryStore]:
    tree = MemoryTree(clock=LoopClock())
    store = MemoryStore(tree)
    await store.create("/a", b"before")
    return tree, store


@pytest.mark.parametrize(
    ("fault", "is_applied"), [(Fault.LOST_REQUEST, False), (Fault.LOST_REPLY, True)]
)
@in_virtual_time
async def test_a_lost_write_is_unknown_only_to_its_writer(fault: Fault, is_applied: bool) -> None:
    tree, store = await new_store()
    tree.faults = lambda _, operations: fault if operations else None

    with pytest.raises(UnknownOutcomeError):
        await store.set("/a", b"after", version=0)

    assert tree.snapshot()["/a"] == (b"after" if is_applied else b"before")


@in_virtual_time
async def test_the_server_may_end_a_session_before_its_owner_knows() -> None:
    """Rule S3 is about this: the lock is deleted while its owner still relies on it."""
    tree, store = await new_store()
    await store.create("/lock", is_ephemeral=True)
    tree.suspend(store)

    tree.expire(store)

    assert "/lock" not in tree.snapshot()
    assert store.state is SessionState.SUSPENDED
    tree.resume(store)
    with pytest.raises(SessionLostError):
        await store.wait_connected()


@pytest.mark.parametrize("catches_up_by", ["sync", "write"])
@in_virtual_time
async def test_a_lagging_server_shows_the_past_until_a_sync(catches_up_by: str) -> None:
    """Rule S8: only after a sync a reader believes that a znode exists or not."""
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
