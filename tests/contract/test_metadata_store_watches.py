"""What the watches of every ``MetadataStore`` tell."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from ledgers.errors import SessionLostError
from ledgers.store import UNTOLD, Check, Create, Event, EventKind, MultiFailed, SetData, Stat
from tests.contract.metadata_stores import World, on_loop


def event(kind: EventKind, path: str) -> Event:
    return Event(kind=kind, path=path)


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    """Whatever writes they tell of."""
    return [replace(await anext(events), zxid=UNTOLD) for _ in range(count)]


@on_loop
async def test_a_watch_begins_with_a_reset_once_it_stands(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root)) as events:
        first = await anext(events)
        await other.create(f"{world.root}/a")
        (second,) = await take(events, 1)

    assert first == event(EventKind.RESET, world.root)
    assert second == event(EventKind.CHILDREN, world.root)


@on_loop
async def test_an_event_tells_which_write_it_is_of(world: World) -> None:
    store, other = await world.open(), await world.open()
    path = f"{world.root}/a"

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
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
    why="no listings are cached; one persistent watch covers the tree, and data is read when needed",
)
@pytest.mark.compat(
    "SubTreeCacheTest.testNoNode",
    verdict="other",
    why="a watch may be set before its tree exists, and an empty queue is no error",
)
@on_loop
async def test_a_watch_tells_of_its_znode_and_its_children_and_of_nothing_else(
    world: World,
) -> None:
    store, other = await world.open(), await world.open()
    path = f"{world.root}/a"

    async with aclosing(store.watch(path)) as events:
        await anext(events)
        await other.create(path)  # a watch may stand before its znode does
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
async def test_a_recursive_watch_tells_of_every_znode_below(world: World) -> None:
    store, other = await world.open(), await world.open()
    path = f"{world.root}/a"
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
async def test_a_transaction_is_told_operation_by_operation(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        await store.multi([Create(path=f"{world.root}/{name}") for name in "abc"])
        told = await take(events, 3)

    assert told == [event(EventKind.CREATED, f"{world.root}/{name}") for name in "abc"]


@on_loop
async def test_a_transaction_that_fails_is_not_told(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        with pytest.raises(MultiFailed):
            await store.multi([Create(path=f"{world.root}/a"), Check(path=f"{world.root}/x")])
        await store.create(f"{world.root}/b")

        assert await take(events, 1) == [event(EventKind.CREATED, f"{world.root}/b")]


@on_loop
async def test_the_end_of_an_ephemeral_znode_is_told(world: World) -> None:
    store, other = await world.open(), await world.open()
    await other.create(f"{world.root}/a", is_ephemeral=True)

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        await world.expire(other)

        assert await take(events, 1) == [event(EventKind.DELETED, f"{world.root}/a")]


@pytest.mark.compat(
    "SubTreeCacheTest.testCancelation",
    "SubTreeCacheTest.testGuardCancelation",
    "SubTreeCacheTest.testGuardCancelationExceptional",
    verdict="same",
)
@on_loop
async def test_two_watches_of_one_path_end_apart(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root)) as stays:
        async with aclosing(store.watch(world.root)) as goes:
            await anext(goes)
            await anext(stays)
        await store.create(f"{world.root}/a")

        assert await take(stays, 1) == [event(EventKind.CHILDREN, world.root)]


@pytest.mark.compat("SubTreeCacheTest.doubleWatch", verdict="same")
@on_loop
async def test_a_watch_inside_another_costs_the_other_nothing(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a")

    async with aclosing(store.watch(world.root, is_recursive=True)) as outer:
        await anext(outer)
        async with aclosing(store.watch(f"{world.root}/a")) as inner:
            await anext(inner)
            await store.set(f"{world.root}/a", b"1", version=0)
            assert await take(inner, 1) == [event(EventKind.CHANGED, f"{world.root}/a")]
        await store.set(f"{world.root}/a", b"2", version=1)

        assert await take(outer, 2) == [event(EventKind.CHANGED, f"{world.root}/a")] * 2


@pytest.mark.compat(
    "SubTreeCacheTest.testDuplicateWatch",
    "SubTreeCacheTest.sequentialWatch",
    verdict="same",
)
@on_loop
async def test_a_closed_watch_may_be_opened_again(world: World) -> None:
    store = await world.open()

    for number in range(3):
        async with aclosing(store.watch(world.root)) as events:
            assert await take(events, 1) == [event(EventKind.RESET, world.root)]
            await store.create(f"{world.root}/{number}")
            assert await take(events, 1) == [event(EventKind.CHILDREN, world.root)]


@on_loop
async def test_a_reset_follows_a_reconnection_and_then_events_go_on(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        await world.suspend(store)
        await other.create(f"{world.root}/missed")
        await world.resume(store)
        assert await take(events, 1) == [event(EventKind.RESET, world.root)]
        await other.create(f"{world.root}/seen")

        assert await take(events, 1) == [event(EventKind.CREATED, f"{world.root}/seen")]


@on_loop
async def test_events_that_nobody_reads_collapse_into_a_reset(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a")

    async with aclosing(store.watch(f"{world.root}/a", events_max=5)) as events:
        await anext(events)
        for version in range(6):
            await store.set(f"{world.root}/a", b"", version=version)

        assert await take(events, 1) == [event(EventKind.RESET, f"{world.root}/a")]
        await store.set(f"{world.root}/a", b"", version=6)
        assert await take(events, 1) == [event(EventKind.CHANGED, f"{world.root}/a")]


@on_loop
async def test_a_watch_ends_with_the_session(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root)) as events:
        await anext(events)
        await world.expire(store)

        with pytest.raises(SessionLostError):
            await anext(events)
