"""A session that only reads."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from ledgers.store import Check, Create, EventKind, MetadataStore
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import LoopClock


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda store: store.create("/b"), id="create"),
        pytest.param(lambda store: store.create("/b", is_ephemeral=True), id="an ephemeral znode"),
        pytest.param(lambda store: store.set("/a", b"2", version=0), id="set"),
        pytest.param(lambda store: store.delete("/a"), id="delete"),
        pytest.param(lambda store: store.multi([Create(path="/b")]), id="multi"),
        pytest.param(lambda store: store.multi([Check(path="/a")]), id="a multi that only checks"),
    ],
)
@in_virtual_time
async def test_every_write_is_a_mistake_of_ours_and_is_not_sent(
    write: Callable[[MetadataStore], Awaitable[object]],
) -> None:
    tree = MemoryTree(clock=LoopClock())
    await MemoryStore(tree).create("/a", b"1")
    inner = MemoryStore(tree)
    before, sent = tree.snapshot(), inner.request_count

    with pytest.raises(AssertionError, match="must not write"):
        await write(inner.as_read_only())

    assert (tree.snapshot(), inner.request_count) == (before, sent)


@in_virtual_time
async def test_reads_return_what_the_inner_store_returns() -> None:
    tree = MemoryTree(clock=LoopClock())
    other = MemoryStore(tree)
    await other.create("/a", b"1")
    store = MemoryStore(tree).as_read_only()

    async with aclosing(store.watch("/a")) as events:
        assert (await anext(events)).kind is EventKind.RESET
        await other.set("/a", b"2", version=0)
        assert (await anext(events)).kind is EventKind.CHANGED
    await store.sync("/a")
    data, stat = await store.get("/a")

    assert (data, stat.version) == (b"2", 1)
    assert await store.children("/") == ["a"]
    assert await store.exists("/b") is None
    await store.close()
    await store.wait_lost()
