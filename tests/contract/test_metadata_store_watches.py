"""The contract of ``MetadataStore`` for watches."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from ledgers.errors import SessionLostError
from ledgers.store import UNTOLD, Check, Create, Event, EventKind, MultiFailed, SetData, Stat
from tests.contract.metadata_stores import Backend, on_loop


def event(kind: EventKind, path: str) -> Event:
    return Event(kind=kind, path=path)


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    """Return the next events, of any writes."""
    return [replace(await anext(events), zxid=UNTOLD) for _ in range(count)]


@on_loop
async def test_a_watch_begins_with_a_reset_once_it_is_set(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    async with aclosing(store.watch(backend.root)) as events:
        first = await anext(events)
        await other.create(f"{backend.root}/a")
        (second,) = await take(events, 1)

    assert first == event(EventKind.RESET, backend.root)
    assert second == event(EventKind.CHILDREN, backend.root)


@on_loop
async def test_an_event_names_the_transaction_of_its_write(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    path = f"{backend.root}/a"

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        await anext(events)
        await other.create(path)
        created = await anext(events)
        _, first = await store.get(path)
        setting = SetData(path=path, data=b"x", version=0)
        second, _ = await other.multi([setting, Create(path=f"{path}/b")])
        changed = [await anext(events), await anext(events)]
        await other.delete(f"{path}/b")
        deleted = await anext(events)

    assert isinstance(second, Stat)
    assert created.zxid == first.mzxid
    assert [each.zxid for each in changed] == [second.mzxid, second.mzxid]
    assert deleted.zxid > second.mzxid


@pytest.mark.compat(
    "SubTreeCacheTest.testNoUpdate",
    verdict="other",
    why="no listings are cached; one persistent watch covers the tree, and data is read when "
    "needed",
)
@pytest.mark.compat(
    "SubTreeCacheTest.testNoNode",
    verdict="other",
    why="a watch may be set before its tree exists, and an empty queue is no error",
)
@on_loop
async def test_a_watch_reports_only_its_znode_and_its_children(
    backend: Backend,
) -> None:
    store, other = await backend.open(), await backend.open()
    path = f"{backend.root}/a"

    async with aclosing(store.watch(path)) as events:
        await anext(events)
        await other.create(path)  # a watch may exist before its znode
        await other.set(path, b"data", version=0)
        await other.create(f"{path}/child")
        await other.set(f"{path}/child", b"data", version=0)  # not told
        await other.create(f"{path}/child/grandchild")  # not told
        await other.delete(f"{path}/child/grandchild")  # not told
        await other.create(f"{path}b")  # not told
        await other.delete(f"{path}/child")
        await other.delete(path)
        await other.create(path)
        told = await take(events, 6)

    assert told == [
        event(EventKind.CREATED, path),
        event(EventKind.CHANGED, path),
        event(EventKind.CHILDREN, path),
        event(EventKind.CHILDREN, path),
        event(EventKind.DELETED, path),
        event(EventKind.CREATED, path),
    ]


@pytest.mark.compat(
    "SubTreeCacheTest.testSingleCreate",
    "SubTreeCacheTest.testSingleRemoval",
    "SubTreeCacheTest.testRemoveEmptyNode",
    verdict="better",
    why="the event names the znode, and the watch stays",
)
@on_loop
async def test_a_recursive_watch_reports_every_znode_below(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    path = f"{backend.root}/a"
    await other.create(path)

    async with aclosing(store.watch(path, is_recursive=True)) as events:
        await anext(events)
        await other.create(f"{path}/b")
        await other.create(f"{path}/b/c")
        await other.create(f"{path}bc")  # not told: only its name begins alike
        await other.set(f"{path}/b/c", b"data", version=0)
        await other.delete(f"{path}/b/c")
        await other.set(path, b"data", version=0)
        told = await take(events, 5)

    assert told == [
        event(EventKind.CREATED, f"{path}/b"),
        event(EventKind.CREATED, f"{path}/b/c"),
        event(EventKind.CHANGED, f"{path}/b/c"),
        event(EventKind.DELETED, f"{path}/b/c"),
        event(EventKind.CHANGED, path),
    ]


@on_loop
async def test_a_transaction_is_reported_operation_by_operation(backend: Backend) -> None:
    store = await backend.open()

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        await anext(events)
        await store.multi([Create(path=f"{backend.root}/{name}") for name in "abc"])
        told = await take(events, 3)

    assert told == [event(EventKind.CREATED, f"{backend.root}/{name}") for name in "abc"]


@on_loop
async def test_a_failed_transaction_is_not_reported(backend: Backend) -> None:
    store = await backend.open()

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        await anext(events)
        with pytest.raises(MultiFailed):
            await store.multi([Create(path=f"{backend.root}/a"), Check(path=f"{backend.root}/x")])
        await store.create(f"{backend.root}/b")

        assert await take(events, 1) == [event(EventKind.CREATED, f"{backend.root}/b")]


@on_loop
async def test_the_end_of_an_ephemeral_znode_is_reported(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    await other.create(f"{backend.root}/a", is_ephemeral=True)

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        await anext(events)
        await backend.expire(other)

        assert await take(events, 1) == [event(EventKind.DELETED, f"{backend.root}/a")]


@pytest.mark.compat(
    "SubTreeCacheTest.testCancelation",
    "SubTreeCacheTest.testGuardCancelation",
    "SubTreeCacheTest.testGuardCancelationExceptional",
    verdict="same",
)
@on_loop
async def test_two_watches_of_one_path_end_independently(backend: Backend) -> None:
    store = await backend.open()

    async with aclosing(store.watch(backend.root)) as stays:
        async with aclosing(store.watch(backend.root)) as goes:
            await anext(goes)
            await anext(stays)
        await store.create(f"{backend.root}/a")

        assert await take(stays, 1) == [event(EventKind.CHILDREN, backend.root)]


@pytest.mark.compat("SubTreeCacheTest.doubleWatch", verdict="same")
@on_loop
async def test_a_watch_inside_another_does_not_change_the_other(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a")

    async with aclosing(store.watch(backend.root, is_recursive=True)) as outer:
        await anext(outer)
        async with aclosing(store.watch(f"{backend.root}/a")) as inner:
            await anext(inner)
            await store.set(f"{backend.root}/a", b"1", version=0)
            assert await take(inner, 1) == [event(EventKind.CHANGED, f"{backend.root}/a")]
        await store.set(f"{backend.root}/a", b"2", version=1)

        assert await take(outer, 2) == [event(EventKind.CHANGED, f"{backend.root}/a")] * 2


@pytest.mark.compat(
    "SubTreeCacheTest.testDuplicateWatch",
    "SubTreeCacheTest.sequentialWatch",
    verdict="same",
)
@on_loop
async def test_a_closed_watch_may_be_opened_again(backend: Backend) -> None:
    store = await backend.open()

    for number in range(3):
        async with aclosing(store.watch(backend.root)) as events:
            assert await take(events, 1) == [event(EventKind.RESET, backend.root)]
            await store.create(f"{backend.root}/{number}")
            assert await take(events, 1) == [event(EventKind.CHILDREN, backend.root)]


@on_loop
async def test_a_reset_follows_a_reconnection_and_events_continue(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        await anext(events)
        await backend.suspend(store)
        await other.create(f"{backend.root}/missed")
        await backend.resume(store)
        assert await take(events, 1) == [event(EventKind.RESET, backend.root)]
        await other.create(f"{backend.root}/seen")

        assert await take(events, 1) == [event(EventKind.CREATED, f"{backend.root}/seen")]


@on_loop
async def test_unread_events_collapse_into_a_reset(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a")

    async with aclosing(store.watch(f"{backend.root}/a", events_max=5)) as events:
        await anext(events)
        for version in range(6):
            await store.set(f"{backend.root}/a", b"", version=version)

        assert await take(events, 1) == [event(EventKind.RESET, f"{backend.root}/a")]
        await store.set(f"{backend.root}/a", b"", version=6)
        assert await take(events, 1) == [event(EventKind.CHANGED, f"{backend.root}/a")]


@on_loop
async def test_a_watch_ends_with_the_session(backend: Backend) -> None:
    store = await backend.open()

    async with aclosing(store.watch(backend.root)) as events:
        await anext(events)
        await backend.expire(store)

        with pytest.raises(SessionLostError):
            await anext(events)
