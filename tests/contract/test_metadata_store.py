"""What every ``MetadataStore`` does, the one in memory and ZooKeeper: znodes and transactions."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec import structs

from ledgers.errors import (
    BookmenderError,
    ConflictError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RejectedError,
)
from ledgers.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
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

    with pytest.raises(RejectedError, match="request_bytes_max"):
        await store.create(f"{world.root}/a", megabyte)
    with pytest.raises(RejectedError, match="request_bytes_max"):
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
    return structs.replace(operation, path=f"{root}{operation.path}")


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
