"""The contract of ``MetadataStore``, in memory and with ZooKeeper: znodes and transactions."""

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
from tests.contract.metadata_stores import Backend, on_loop

# --- Single znodes --------------------------------------------------------------------------------


@on_loop
async def test_a_new_znode_is_persistent_at_version_0(backend: Backend) -> None:
    store = await backend.open()
    path = f"{backend.root}/new"

    made = await store.create(path, b"data")

    data, stat = await store.get(path)
    assert (made, data) == (path, b"data")
    assert (stat.version, stat.ephemeral_owner, stat.child_count) == (0, 0, 0)
    assert stat.czxid == stat.mzxid > 0
    assert stat.ctime_ms == stat.mtime_ms > 0


@on_loop
async def test_a_znode_may_be_empty(backend: Backend) -> None:
    store = await backend.open()

    await store.create(f"{backend.root}/empty")

    assert (await store.get(f"{backend.root}/empty"))[0] == b""


@on_loop
async def test_many_znodes_are_read_together(backend: Backend) -> None:
    store = await backend.open()
    paths = [f"{backend.root}/{number}" for number in range(120)]
    for path in paths[::2]:
        await store.create(path, path.encode())

    found = await store.get_each(paths)

    assert found[::2] == [await store.get(path) for path in paths[::2]]
    assert all(isinstance(error, NoNodeError) for error in found[1::2])
    assert await store.get_each([]) == []


@on_loop
async def test_exists_returns_the_stat_that_get_returns(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a", b"data")

    assert await store.exists(f"{backend.root}/a") == (await store.get(f"{backend.root}/a"))[1]
    assert await store.exists(f"{backend.root}/b") is None


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
    backend: Backend, call: Callable[[MetadataStore, str], Coroutine[Any, Any, object]]
) -> None:
    store = await backend.open()

    with pytest.raises(NoNodeError, match=f"{backend.root}/absent"):
        await call(store, f"{backend.root}/absent")


@on_loop
async def test_a_znode_is_created_once(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a", b"first")

    with pytest.raises(NodeExistsError):
        await store.create(f"{backend.root}/a", b"second")

    assert (await store.get(f"{backend.root}/a"))[0] == b"first"


@on_loop
async def test_missing_parents_are_created_persistent_and_empty(backend: Backend) -> None:
    store = await backend.open()

    await store.create(f"{backend.root}/a/b/c", b"data", is_ephemeral=True, with_parents=True)

    assert (await store.get(f"{backend.root}/a/b/c"))[0] == b"data"
    for parent in (f"{backend.root}/a", f"{backend.root}/a/b"):
        data, stat = await store.get(parent)
        assert (data, stat.ephemeral_owner) == (b"", 0)


@on_loop
async def test_existing_parents_stay_as_they_are(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a", b"mine")

    await store.create(f"{backend.root}/a/b/c", with_parents=True)
    with pytest.raises(NodeExistsError):
        await store.create(f"{backend.root}/a/b/c", with_parents=True)

    assert (await store.get(f"{backend.root}/a"))[0] == b"mine"


@on_loop
async def test_each_change_of_data_adds_one_to_the_version(backend: Backend) -> None:
    store = await backend.open()
    path = f"{backend.root}/a"
    await store.create(path)

    first = await store.set(path, b"one", version=0)
    second = await store.set(path, b"two", version=1)
    third = await store.set(path, b"three", version=ANY_VERSION)

    assert [first.version, second.version, third.version] == [1, 2, 3]
    assert first.czxid < first.mzxid < second.mzxid < third.mzxid
    assert await store.get(path) == (b"three", third)


@on_loop
async def test_a_change_of_another_version_is_refused(backend: Backend) -> None:
    store = await backend.open()
    path = f"{backend.root}/a"
    await store.create(path, b"data")

    for stale in (1, 7):
        with pytest.raises(ConflictError):
            await store.set(path, b"other", version=stale)
        with pytest.raises(ConflictError):
            await store.delete(path, version=stale)

    assert (await store.get(path))[0] == b"data"


@on_loop
async def test_a_deleted_znode_starts_again_at_version_0(backend: Backend) -> None:
    store = await backend.open()
    path = f"{backend.root}/a"
    await store.create(path)
    before = await store.set(path, b"data", version=0)

    await store.delete(path, version=1)
    await store.create(path)

    _, after = await store.get(path)
    assert after.version == 0
    assert after.czxid > before.mzxid


@on_loop
async def test_a_znode_with_children_is_not_deleted(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a/b", with_parents=True)

    with pytest.raises(NotEmptyError):
        await store.delete(f"{backend.root}/a")

    assert await store.children(f"{backend.root}/a") == ["b"]


@on_loop
async def test_sequential_names_count_all_children_ever_made(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/plain")
    await store.delete(f"{backend.root}/plain")

    names = [await store.create(f"{backend.root}/n-", is_sequential=True) for _ in range(2)]
    await store.delete(names[1])
    names.append(await store.create(f"{backend.root}/m-", is_sequential=True))

    assert names == [
        f"{backend.root}/n-0000000001",
        f"{backend.root}/n-0000000002",
        f"{backend.root}/m-0000000003",
    ]


@on_loop
async def test_every_creation_and_deletion_of_a_child_is_counted(backend: Backend) -> None:
    store = await backend.open()
    directory = f"{backend.root}/directory"
    await store.create(directory)
    counts = []
    for _ in range(2):
        await store.create(f"{directory}/child", is_ephemeral=True)
        counts.append((await store.get(directory))[1].cversion)
        await store.delete(f"{directory}/child")
        counts.append((await store.get(directory))[1].cversion)

    assert counts == [1, 2, 3, 4]


@on_loop
async def test_a_listing_of_any_length_is_complete(backend: Backend) -> None:
    store = await backend.open()
    names = {f"{number:0120d}" for number in range(10_000)}  # a reply of more than a megabyte
    creates = [Create(path=f"{backend.root}/{name}") for name in sorted(names)]

    await asyncio.gather(
        *(store.multi(creates[start : start + 1000]) for start in range(0, len(creates), 1000))
    )

    assert set(await store.children(backend.root)) == names
    stat = await store.exists(backend.root)
    assert stat is not None
    assert stat.child_count == len(names)


@on_loop
async def test_thousands_of_concurrent_reads_are_all_answered(backend: Backend) -> None:
    store = await backend.open()
    await store.multi(
        [Create(path=f"{backend.root}/{number}", data=b"%d" % number) for number in range(100)]
    )
    before = store.request_count

    found = await asyncio.gather(
        *(store.get(f"{backend.root}/{number % 100}") for number in range(5_000))
    )

    assert [int(data) for data, _ in found] == [number % 100 for number in range(5_000)]
    assert 0 < store.request_count - before <= 5_000


@on_loop
async def test_requests_are_executed_in_the_order_of_their_calls(backend: Backend) -> None:
    store = await backend.open()
    path = f"{backend.root}/a"

    _, (empty, _), stat, (full, _) = await asyncio.gather(
        store.create(path), store.get(path), store.set(path, b"data", version=0), store.get(path)
    )

    assert (empty, stat.version, full) == (b"", 1, b"data")


@on_loop
async def test_a_too_large_request_is_refused(backend: Backend) -> None:
    """The session continues."""
    store = await backend.open()
    megabyte = bytes(2**20)

    with pytest.raises(RejectedError, match="request_bytes_max"):
        await store.create(f"{backend.root}/a", megabyte)
    with pytest.raises(RejectedError, match="request_bytes_max"):
        await store.multi(
            [Create(path=f"{backend.root}/{name}", data=megabyte[: 2**18]) for name in "abcd"]
        )

    assert await store.children(backend.root) == []


@on_loop
async def test_after_a_sync_another_session_sees_earlier_writes(backend: Backend) -> None:
    writer, reader = await backend.open(), await backend.open()
    await writer.create(f"{backend.root}/a", b"data")

    await reader.sync(f"{backend.root}/a")

    assert (await reader.get(f"{backend.root}/a"))[0] == b"data"


# --- Transactions ---------------------------------------------------------------------------------


@on_loop
async def test_a_transaction_returns_a_result_for_each_operation(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/old", b"data")
    before = store.request_count

    results = await store.multi(
        [
            Check(path=f"{backend.root}/old", version=0),
            SetData(path=f"{backend.root}/old", data=b"new", version=0),
            Create(path=f"{backend.root}/s-", is_sequential=True),
            Create(path=f"{backend.root}/gone"),
            Delete(path=f"{backend.root}/gone"),
        ]
    )

    _, old = await store.get(f"{backend.root}/old")
    assert results == [None, old, f"{backend.root}/s-0000000001", f"{backend.root}/gone", None]
    assert store.request_count == before + 2
    assert set(await store.children(backend.root)) == {"old", "s-0000000001"}


@on_loop
async def test_a_transaction_that_creates_and_sets_gives_version_1(
    backend: Backend,
) -> None:
    """Rule S3 uses this: our locks are at version 1, Java's at 0."""
    store = await backend.open()
    lock = f"{backend.root}/lock"

    _, stat = await store.multi(
        [Create(path=lock, is_ephemeral=True), SetData(path=lock, data=b"ours", version=0)]
    )

    assert isinstance(stat, Stat)
    assert (stat.version, stat.ephemeral_owner) == (1, store.session_id)
    assert await store.get(lock) == (b"ours", stat)


@on_loop
async def test_the_znodes_of_a_transaction_share_its_id(backend: Backend) -> None:
    store = await backend.open()
    paths = [f"{backend.root}/{name}" for name in "abc"]

    await store.multi([Create(path=path) for path in paths])

    stats = [(await store.get(path))[1] for path in paths]
    assert len({stat.czxid for stat in stats}) == 1


@pytest.mark.parametrize(
    ("culprit", "error"),
    [
        pytest.param(Create(path="/a"), NodeExistsError, id="create an existing znode"),
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
async def test_a_failed_transaction_names_its_cause(
    backend: Backend, culprit: Operation, error: type[BookmenderError], position: int
) -> None:
    """It changes nothing."""
    store = await backend.open()
    await store.create(f"{backend.root}/a", b"data")
    await store.create(f"{backend.root}/e", is_ephemeral=True)
    await store.create(f"{backend.root}/full/child", with_parents=True)
    operations: list[Operation] = [
        Create(path=f"{backend.root}/new"),
        SetData(path=f"{backend.root}/a", data=b"changed", version=0),
    ]
    operations.insert(position, _below(backend.root, culprit))

    with pytest.raises(MultiFailed) as failure:
        await store.multi(operations)

    assert failure.value.index == position
    assert type(failure.value.cause) is error
    assert culprit.path in str(failure.value.cause)
    assert await store.exists(f"{backend.root}/new") is None
    data, stat = await store.get(f"{backend.root}/a")
    assert (data, stat.version) == (b"data", 0)
    assert (await store.create(f"{backend.root}/n-", is_sequential=True)).endswith("-0000000003")


def _below(root: str, operation: Operation) -> Operation:
    return structs.replace(operation, path=f"{root}{operation.path}")


@on_loop
async def test_a_check_of_any_version_succeeds_if_the_znode_exists(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a")
    await store.set(f"{backend.root}/a", b"", version=0)

    assert await store.multi([Check(path=f"{backend.root}/a")]) == [None]
    assert await store.multi([Check(path=f"{backend.root}/a", version=1)]) == [None]


@on_loop
async def test_an_empty_transaction_sends_no_request(backend: Backend) -> None:
    store = await backend.open()
    before = store.request_count

    assert await store.multi([]) == []
    assert store.request_count == before
