"""What every ``MetadataStore`` does: the one in memory, and ZooKeeper."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from ledgers.errors import (
    BookmenderError,
    ConflictError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RejectedError,
    SessionLostError,
    UnknownOutcomeError,
)
from ledgers.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    Event,
    EventKind,
    MetadataStore,
    MultiFailed,
    Operation,
    SessionState,
    SetData,
    Stat,
)
from tests.contract.metadata_stores import World, on_loop

# --- Single znodes -------------------------------------------------------------------------------


@on_loop
async def test_a_new_znode_is_persistent_at_version_0(world: World) -> None:
    store = await world.open()
    path = f"{world.root}/new"

    made = await store.create(path, b"data")

    data, stat = await store.get(path)
    assert (made, data) == (path, b"data")
    assert (stat.version, stat.ephemeral_owner, stat.child_count) == (0, 0, 0)
    assert stat.czxid == stat.mzxid > 0
    assert stat.ctime_ms == stat.mtime_ms > 0


@on_loop
async def test_a_znode_may_be_empty(world: World) -> None:
    store = await world.open()

    await store.create(f"{world.root}/empty")

    assert (await store.get(f"{world.root}/empty"))[0] == b""


@on_loop
async def test_exists_tells_what_get_tells(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"data")

    assert await store.exists(f"{world.root}/a") == (await store.get(f"{world.root}/a"))[1]
    assert await store.exists(f"{world.root}/b") is None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda store, path: store.get(path), id="get"),
        pytest.param(lambda store, path: store.children(path), id="children"),
        pytest.param(lambda store, path: store.set(path, b"", version=0), id="set"),
        pytest.param(lambda store, path: store.delete(path), id="delete"),
        pytest.param(lambda store, path: store.create(f"{path}/child"), id="create below it"),
    ],
)
@on_loop
async def test_an_absent_znode_is_named_in_the_error(
    world: World, call: Callable[[MetadataStore, str], Coroutine[Any, Any, object]]
) -> None:
    store = await world.open()

    with pytest.raises(NoNodeError, match=f"{world.root}/absent"):
        await call(store, f"{world.root}/absent")


@on_loop
async def test_a_znode_is_created_once(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"first")

    with pytest.raises(NodeExistsError):
        await store.create(f"{world.root}/a", b"second")

    assert (await store.get(f"{world.root}/a"))[0] == b"first"


@on_loop
async def test_missing_parents_are_made_persistent_and_empty(world: World) -> None:
    store = await world.open()

    await store.create(f"{world.root}/a/b/c", b"data", is_ephemeral=True, with_parents=True)

    assert (await store.get(f"{world.root}/a/b/c"))[0] == b"data"
    for parent in (f"{world.root}/a", f"{world.root}/a/b"):
        data, stat = await store.get(parent)
        assert (data, stat.ephemeral_owner) == (b"", 0)


@on_loop
async def test_parents_that_are_there_stay_as_they_are(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"mine")

    await store.create(f"{world.root}/a/b/c", with_parents=True)
    with pytest.raises(NodeExistsError):
        await store.create(f"{world.root}/a/b/c", with_parents=True)

    assert (await store.get(f"{world.root}/a"))[0] == b"mine"


@on_loop
async def test_each_change_of_data_adds_one_to_the_version(world: World) -> None:
    store = await world.open()
    path = f"{world.root}/a"
    await store.create(path)

    first = await store.set(path, b"one", version=0)
    second = await store.set(path, b"two", version=1)
    third = await store.set(path, b"three", version=ANY_VERSION)

    assert [first.version, second.version, third.version] == [1, 2, 3]
    assert first.czxid < first.mzxid < second.mzxid < third.mzxid
    assert await store.get(path) == (b"three", third)


@on_loop
async def test_a_change_of_another_version_is_refused(world: World) -> None:
    store = await world.open()
    path = f"{world.root}/a"
    await store.create(path, b"data")

    for stale in (1, 7):
        with pytest.raises(ConflictError):
            await store.set(path, b"other", version=stale)
        with pytest.raises(ConflictError):
            await store.delete(path, version=stale)

    assert (await store.get(path))[0] == b"data"


@on_loop
async def test_a_deleted_znode_begins_anew(world: World) -> None:
    store = await world.open()
    path = f"{world.root}/a"
    await store.create(path)
    before = await store.set(path, b"data", version=0)

    await store.delete(path, version=1)
    await store.create(path)

    _, after = await store.get(path)
    assert after.version == 0
    assert after.czxid > before.mzxid


@on_loop
async def test_a_znode_with_children_is_not_deleted(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a/b", with_parents=True)

    with pytest.raises(NotEmptyError):
        await store.delete(f"{world.root}/a")

    assert await store.children(f"{world.root}/a") == ["b"]


@on_loop
async def test_sequential_names_count_all_children_ever_made(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/plain")
    await store.delete(f"{world.root}/plain")

    names = [await store.create(f"{world.root}/n-", is_sequential=True) for _ in range(2)]
    await store.delete(names[1])
    names.append(await store.create(f"{world.root}/m-", is_sequential=True))

    assert names == [
        f"{world.root}/n-0000000001",
        f"{world.root}/n-0000000002",
        f"{world.root}/m-0000000003",
    ]


@on_loop
async def test_a_listing_is_complete_however_long(world: World) -> None:
    store = await world.open()
    names = {f"{number:0120d}" for number in range(10_000)}  # a reply of more than a megabyte
    creates = [Create(path=f"{world.root}/{name}") for name in sorted(names)]

    await asyncio.gather(
        *(store.multi(creates[start : start + 1000]) for start in range(0, len(creates), 1000))
    )

    assert set(await store.children(world.root)) == names
    stat = await store.exists(world.root)
    assert stat is not None
    assert stat.child_count == len(names)


@on_loop
async def test_thousands_of_reads_at_once_are_each_answered(world: World) -> None:
    store = await world.open()
    await store.multi(
        [Create(path=f"{world.root}/{number}", data=b"%d" % number) for number in range(100)]
    )
    before = store.request_count

    found = await asyncio.gather(
        *(store.get(f"{world.root}/{number % 100}") for number in range(5_000))
    )

    assert [int(data) for data, _ in found] == [number % 100 for number in range(5_000)]
    assert 0 < store.request_count - before <= 5_000


@on_loop
async def test_requests_are_carried_out_in_the_order_of_their_calls(world: World) -> None:
    store = await world.open()
    path = f"{world.root}/a"

    _, (empty, _), stat, (full, _) = await asyncio.gather(
        store.create(path), store.get(path), store.set(path, b"data", version=0), store.get(path)
    )

    assert (empty, stat.version, full) == (b"", 1, b"data")


@on_loop
async def test_what_no_server_takes_is_refused_and_the_session_goes_on(world: World) -> None:
    store = await world.open()
    megabyte = bytes(2**20)

    with pytest.raises(RejectedError, match="no request of more than"):
        await store.create(f"{world.root}/a", megabyte)
    with pytest.raises(RejectedError, match="no request of more than"):
        await store.multi(
            [Create(path=f"{world.root}/{name}", data=megabyte[: 2**18]) for name in "abcd"]
        )

    assert await store.children(world.root) == []


@on_loop
async def test_after_a_sync_another_session_sees_what_was_written(world: World) -> None:
    writer, reader = await world.open(), await world.open()
    await writer.create(f"{world.root}/a", b"data")

    await reader.sync(f"{world.root}/a")

    assert (await reader.get(f"{world.root}/a"))[0] == b"data"


# --- Transactions --------------------------------------------------------------------------------


@on_loop
async def test_a_transaction_gives_a_result_for_each_operation(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/old", b"data")
    before = store.request_count

    results = await store.multi(
        [
            Check(path=f"{world.root}/old", version=0),
            SetData(path=f"{world.root}/old", data=b"new", version=0),
            Create(path=f"{world.root}/s-", is_sequential=True),
            Create(path=f"{world.root}/gone"),
            Delete(path=f"{world.root}/gone"),
        ]
    )

    _, old = await store.get(f"{world.root}/old")
    assert results == [None, old, f"{world.root}/s-0000000001", f"{world.root}/gone", None]
    assert store.request_count == before + 2
    assert set(await store.children(world.root)) == {"old", "s-0000000001"}


@on_loop
async def test_what_is_created_and_set_in_one_transaction_stands_at_version_1(
    world: World,
) -> None:
    """Rule S3: so our locks tell themselves from Java's, which stand at 0."""
    store = await world.open()
    lock = f"{world.root}/lock"

    _, stat = await store.multi(
        [Create(path=lock, is_ephemeral=True), SetData(path=lock, data=b"ours", version=0)]
    )

    assert isinstance(stat, Stat)
    assert (stat.version, stat.ephemeral_owner) == (1, store.session_id)
    assert await store.get(lock) == (b"ours", stat)


@on_loop
async def test_the_znodes_of_a_transaction_share_its_id(world: World) -> None:
    store = await world.open()
    paths = [f"{world.root}/{name}" for name in "abc"]

    await store.multi([Create(path=path) for path in paths])

    stats = [(await store.get(path))[1] for path in paths]
    assert len({stat.czxid for stat in stats}) == 1


@pytest.mark.parametrize(
    ("culprit", "error"),
    [
        pytest.param(Create(path="/a"), NodeExistsError, id="create what is there"),
        pytest.param(Create(path="/x/y"), NoNodeError, id="create without a parent"),
        pytest.param(SetData(path="/a", data=b"", version=3), ConflictError, id="set old version"),
        pytest.param(SetData(path="/x", data=b"", version=-1), NoNodeError, id="set the absent"),
        pytest.param(Delete(path="/a", version=3), ConflictError, id="delete old version"),
        pytest.param(Delete(path="/x"), NoNodeError, id="delete the absent"),
        pytest.param(Delete(path="/full"), NotEmptyError, id="delete the full"),
        pytest.param(Check(path="/a", version=3), ConflictError, id="check old version"),
        pytest.param(Check(path="/x"), NoNodeError, id="check the absent"),
        pytest.param(Create(path="/e/child"), RejectedError, id="create below the ephemeral"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2], ids=["first", "between", "last"])
@on_loop
async def test_a_transaction_that_fails_names_the_culprit_and_changes_nothing(
    world: World, culprit: Operation, error: type[BookmenderError], position: int
) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"data")
    await store.create(f"{world.root}/e", is_ephemeral=True)
    await store.create(f"{world.root}/full/child", with_parents=True)
    operations: list[Operation] = [
        Create(path=f"{world.root}/new"),
        SetData(path=f"{world.root}/a", data=b"changed", version=0),
    ]
    operations.insert(position, _below(world.root, culprit))

    with pytest.raises(MultiFailed) as failure:
        await store.multi(operations)

    assert failure.value.index == position
    assert type(failure.value.cause) is error
    assert culprit.path in str(failure.value.cause)
    assert await store.exists(f"{world.root}/new") is None
    data, stat = await store.get(f"{world.root}/a")
    assert (data, stat.version) == (b"data", 0)
    assert (await store.create(f"{world.root}/n-", is_sequential=True)).endswith("-0000000003")


def _below(root: str, operation: Operation) -> Operation:
    return dataclasses.replace(operation, path=f"{root}{operation.path}")


@on_loop
async def test_a_check_of_any_version_holds_while_the_znode_is_there(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a")
    await store.set(f"{world.root}/a", b"", version=0)

    assert await store.multi([Check(path=f"{world.root}/a")]) == [None]
    assert await store.multi([Check(path=f"{world.root}/a", version=1)]) == [None]


@on_loop
async def test_an_empty_transaction_asks_nobody(world: World) -> None:
    store = await world.open()
    before = store.request_count

    assert await store.multi([]) == []
    assert store.request_count == before


# --- Sessions ------------------------------------------------------------------------------------


@on_loop
async def test_sessions_have_ids_of_their_own(world: World) -> None:
    first, second = await world.open(), await world.open()

    assert first.state is second.state is SessionState.CONNECTED
    assert 0 != first.session_id != second.session_id != 0


@on_loop
async def test_ephemeral_znodes_go_with_the_session_that_is_closed(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    await store.create(f"{world.root}/persistent")
    stat = await other.exists(f"{world.root}/ephemeral")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id

    await store.close()

    assert await other.children(world.root) == ["persistent"]


@pytest.mark.compat("BookKeeperCloseTest.testBookKeeperAdmin", verdict="same")
@on_loop
async def test_a_closed_store_refuses_every_call_and_may_be_closed_again(world: World) -> None:
    store = await world.open()

    await store.close()
    await store.close()

    assert store.state is SessionState.LOST
    await store.wait_lost()
    await _assert_over(store, world.root)


async def _assert_over(store: MetadataStore, path: str) -> None:
    """Every call raises SessionLostError."""
    for call in (
        store.get(path),
        store.exists(path),
        store.children(path),
        store.sync(path),
        store.create(f"{path}/over"),
        store.set(path, b"", version=ANY_VERSION),
        store.delete(path),
        store.multi([Check(path=path)]),
        store.wait_connected(),
        anext(store.watch(path)),
    ):
        with pytest.raises(SessionLostError):
            await call


@on_loop
async def test_calls_wait_while_suspended_and_go_on_when_connected_again(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    session_id = store.session_id

    await world.suspend(store)
    await store.wait_disconnected()
    assert store.state is SessionState.SUSPENDED
    async with asyncio.TaskGroup() as tasks:
        read = tasks.create_task(store.get(world.root))
        write = tasks.create_task(store.create(f"{world.root}/a"))
        connected = tasks.create_task(store.wait_connected())
        await asyncio.sleep(0)
        assert not any(call.done() for call in (read, write, connected))
        await world.resume(store)

    assert store.session_id == session_id
    assert set(await store.children(world.root)) == {"ephemeral", "a"}


@on_loop
async def test_a_write_whose_reply_is_lost_has_an_unknown_outcome(world: World) -> None:
    store, other = await world.open(), await world.open()

    with pytest.raises(UnknownOutcomeError):
        await world.lose_reply(store, store.create(f"{world.root}/a", b"data"))

    assert (await other.get(f"{world.root}/a"))[0] == b"data"
    await store.wait_connected()
    assert (await store.get(f"{world.root}/a"))[0] == b"data"


@on_loop
async def test_a_transaction_whose_reply_is_lost_has_an_unknown_outcome(world: World) -> None:
    store = await world.open()

    with pytest.raises(UnknownOutcomeError):
        await world.lose_reply(store, store.multi([Create(path=f"{world.root}/a")]))

    assert await store.children(world.root) == ["a"]


@on_loop
async def test_a_read_whose_reply_is_lost_is_asked_again(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"data")

    data, _ = await world.lose_reply(store, store.get(f"{world.root}/a"))

    assert data == b"data"


@on_loop
async def test_an_expired_session_is_lost_with_all_that_it_held(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)

    await world.expire(store)

    await store.wait_lost()
    assert store.state is SessionState.LOST
    await _assert_over(store, world.root)
    assert await other.children(world.root) == []


@on_loop
async def test_calls_that_wait_while_suspended_end_with_the_session(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    await world.suspend(store)
    calls = [
        store.get(world.root),
        store.create(f"{world.root}/a"),
        store.wait_connected(),
        store.wait_lost(),
    ]
    waiting = asyncio.gather(*calls, return_exceptions=True)

    await world.expire(store)
    await world.resume(store)

    *errors, lost = await waiting
    assert [type(error) for error in errors] == [SessionLostError] * 3
    assert lost is None
    assert await other.children(world.root) == []


# --- Watches -------------------------------------------------------------------------------------


def event(kind: EventKind, path: str) -> Event:
    return Event(kind=kind, path=path)


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await anext(events) for _ in range(count)]


@on_loop
async def test_a_watch_begins_with_a_reset_once_it_stands(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root)) as events:
        first = await anext(events)
        await other.create(f"{world.root}/a")
        second = await anext(events)

    assert first == event(EventKind.RESET, world.root)
    assert second == event(EventKind.CHILDREN, world.root)


@pytest.mark.compat(
    "SubTreeCacheTest.testNoUpdate",
    verdict="other",
    why="no listings are kept: the tree has one lasting watch, and what is looked at is read",
)
@pytest.mark.compat(
    "SubTreeCacheTest.testNoNode",
    verdict="other",
    why="a watch may stand before its tree does, and an empty queue is no error",
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
    why="the event says which znode, and the watch goes on",
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

        assert await anext(events) == event(EventKind.CREATED, f"{world.root}/b")


@on_loop
async def test_the_end_of_an_ephemeral_znode_is_told(world: World) -> None:
    store, other = await world.open(), await world.open()
    await other.create(f"{world.root}/a", is_ephemeral=True)

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        await world.expire(other)

        assert await anext(events) == event(EventKind.DELETED, f"{world.root}/a")


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

        assert await anext(stays) == event(EventKind.CHILDREN, world.root)


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
            assert await anext(inner) == event(EventKind.CHANGED, f"{world.root}/a")
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
            assert await anext(events) == event(EventKind.RESET, world.root)
            await store.create(f"{world.root}/{number}")
            assert await anext(events) == event(EventKind.CHILDREN, world.root)


@on_loop
async def test_a_reset_follows_a_reconnection_and_then_events_go_on(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        await anext(events)
        await world.suspend(store)
        await other.create(f"{world.root}/missed")
        await world.resume(store)
        assert await anext(events) == event(EventKind.RESET, world.root)
        await other.create(f"{world.root}/seen")

        assert await anext(events) == event(EventKind.CREATED, f"{world.root}/seen")


@on_loop
async def test_events_that_nobody_reads_collapse_into_a_reset(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a")

    async with aclosing(store.watch(f"{world.root}/a", events_max=5)) as events:
        await anext(events)
        for version in range(6):
            await store.set(f"{world.root}/a", b"", version=version)

        assert await anext(events) == event(EventKind.RESET, f"{world.root}/a")
        await store.set(f"{world.root}/a", b"", version=6)
        assert await anext(events) == event(EventKind.CHANGED, f"{world.root}/a")


@on_loop
async def test_a_watch_ends_with_the_session(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root)) as events:
        await anext(events)
        await world.expire(store)

        with pytest.raises(SessionLostError):
            await anext(events)
