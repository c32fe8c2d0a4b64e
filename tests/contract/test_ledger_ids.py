"""Listing ledgers and drawing new ids, in memory and in ZooKeeper."""

import asyncio

import pytest

from ledgers.codec.layout import Layout
from ledgers.errors import NoNodeError, SessionLostError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.store import Create
from tests.contract.managers import BOOKIES, LAYOUTS, LONG_LAYOUTS, OPEN, all_ids, new_manager, uri
from tests.contract.metadata_stores import Backend, on_loop

# --- Listing --------------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_every_ledger_is_listed_once_directory_by_directory(
    backend: Backend, layout: Layout
) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, layout)
    short = [0, 1, 9_999, 10_000, 123_456_789, 2**31 - 2]
    long = [2**31 - 1, 2**40, 2**63 - 1] if layout.ledger_id_stop > 2**31 else []
    for ledger_id in short + long:
        await manager.create(ledger_id, OPEN)
    await store.create(f"{backend.root}/underreplication/ledgers", with_parents=True)
    await store.create(f"{backend.root}/cookies/{BOOKIES[0]}", with_parents=True)

    batches = await all_ids(manager)

    assert sorted(i for batch in batches for i in batch) == short + long
    assert all(list(batch) == sorted(batch) for batch in batches)
    if layout is not Layout.FLAT:
        assert [0, 1, 9_999] in [list(batch) for batch in batches]


@on_loop
async def test_the_longest_directory_is_listed_completely(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    paths = [manager.path(ledger_id) for ledger_id in range(10_000)]
    await manager.create(0, OPEN)
    for start in range(1, len(paths), 2_000):
        await store.multi([Create(path=path) for path in paths[start : start + 2_000]])

    assert await all_ids(manager) == [list(range(10_000))]


@on_loop
async def test_an_empty_cluster_has_no_ledgers(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())

    assert await all_ids(manager) == []


@on_loop
async def test_a_directory_deleted_during_the_walk_counts_as_empty(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    kept, deleted = 10_000, [10_000 * number for number in range(2, 200)]
    for ledger_id in (kept, *deleted):
        await manager.create(ledger_id, OPEN)

    found: list[int] = []
    async for ledger_ids in manager.ledger_ids():
        found += ledger_ids
        if deleted:
            await asyncio.gather(*(manager.delete(each, version=0) for each in deleted))
            deleted.clear()

    assert kept in found
    assert len(found) < 199


@on_loop
async def test_a_walk_without_a_root_fails(backend: Backend) -> None:
    store = await backend.open()
    manager = LedgerManager(store, f"{backend.root}/gone", Layout.HIERARCHICAL)

    with pytest.raises(UnavailableError, match="root does not exist"):
        await all_ids(manager)


@on_loop
async def test_an_interrupted_walk_fails(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    for ledger_id in (1, 2**40):
        await manager.create(ledger_id, OPEN)

    walk = aiter(manager.ledger_ids())
    await anext(walk)
    await backend.expire(store)
    await store.wait_lost()

    with pytest.raises(SessionLostError):
        await anext(walk)


# --- New ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "first_id"),
    [
        pytest.param(Layout.FLAT, 2, id="flat: as many as the root ever had children"),
        pytest.param(Layout.LEGACY_HIERARCHICAL, 0, id="legacy"),
        pytest.param(Layout.HIERARCHICAL, 0, id="hierarchical"),
        pytest.param(Layout.LONG_HIERARCHICAL, 0, id="long: short ids while they last"),
    ],
)
@on_loop
async def test_new_ids_are_consecutive(backend: Backend, layout: Layout, first_id: int) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, layout)

    ledger_ids = [await manager.new_ledger_id() for _ in range(3)]

    assert ledger_ids == [first_id, first_id + 1, first_id + 2]


@on_loop
async def test_concurrently_requested_ids_are_all_different(backend: Backend) -> None:
    first = await new_manager(backend, await backend.open())
    second = await LedgerManager.open(await backend.open(), uri(backend))

    ledger_ids = await asyncio.gather(
        *(manager.new_ledger_id() for manager in (first, second) * 20)
    )

    assert len(set(ledger_ids)) == 40


@LONG_LAYOUTS
@on_loop
async def test_long_ids_continue_where_they_have_begun(backend: Backend, layout: Layout) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, layout)
    await store.create(f"{backend.root}/idgen-long")

    assert [await manager.new_ledger_id() for _ in range(2)] == [2**32, 2**32 + 1]

    await store.create(f"{backend.root}/idgen-long/HOB-0000000007")
    assert [await manager.new_ledger_id() for _ in range(2)] == [7 * 2**32, 7 * 2**32 + 1]


@on_loop
async def test_new_ids_leave_no_znodes_behind(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)

    await manager.new_ledger_id()

    assert await store.children(f"{backend.root}/idgen") == []
    with pytest.raises(NoNodeError):
        await store.children(f"{backend.root}/idgen-long")
