"""Ledgers' metadata as ``LedgerManager`` keeps it, in memory and in ZooKeeper."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    SettingsError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.formats.layout import Layout, MetadataUri, serialize_layout
from ledgers.formats.metadata_codec import serialize_metadata
from ledgers.manager import Journal, LedgerManager
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.store import Check, Create, MetadataStore
from tests.contract.metadata_stores import World, on_loop

LAYOUTS = pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name.lower())
LONG_LAYOUTS = pytest.mark.parametrize(
    "layout",
    [Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL],
    ids=lambda layout: layout.name.lower(),
)
BOOKIES = tuple(BookieId(f"bookie-{number}:3181") for number in (1, 2, 3))
OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    password=b"secret",
    c_token=42,
    segments=(Segment(first_entry_id=0, ensemble=BOOKIES),),
)
CLOSED = OPEN.closed(last_entry_id=9, length=1_000)


def uri(world: World, layout: Layout | None = None) -> MetadataUri:
    return MetadataUri(hosts="127.0.0.1:2181", root=world.root, layout=layout)


async def new_manager(
    world: World,
    store: MetadataStore,
    layout: Layout = Layout.HIERARCHICAL,
    *,
    journal: Journal | None = None,
) -> LedgerManager:
    """For a cluster that was just formatted."""
    await store.create(f"{world.root}/LAYOUT", serialize_layout(layout))
    await store.create(f"{world.root}/available/readonly", with_parents=True)
    return await LedgerManager.open(store, uri(world), journal=journal)


async def all_ids(manager: LedgerManager) -> list[Sequence[int]]:
    return [ledger_ids async for ledger_ids in manager.ledger_ids()]


# --- The cluster ---------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_the_layout_is_what_the_cluster_says(world: World, layout: Layout) -> None:
    store = await world.open()
    await store.create(f"{world.root}/LAYOUT", serialize_layout(layout))

    assert (await LedgerManager.open(store, uri(world))).layout is layout
    assert (await LedgerManager.open(store, uri(world, layout))).layout is layout


@on_loop
async def test_another_layout_in_the_uri_is_an_error_that_names_both(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/LAYOUT", serialize_layout(Layout.LONG_HIERARCHICAL))

    with pytest.raises(SettingsError, match=r"says flat, .* is long_hierarchical"):
        await LedgerManager.open(store, uri(world, Layout.FLAT))


@on_loop
async def test_where_there_is_no_cluster_the_error_says_so(world: World) -> None:
    store = await world.open()

    with pytest.raises(SettingsError, match=f"no BookKeeper cluster at {world.root}"):
        await LedgerManager.open(store, uri(world))


# --- One ledger ----------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_what_is_created_is_read_back(world: World, layout: Layout) -> None:
    store = await world.open()
    manager = await new_manager(world, store, layout)

    created = await manager.create(123_456_789, OPEN)
    found = await manager.read(123_456_789)

    assert found.metadata == created.metadata == OPEN
    assert found.version == created.version == 0
    assert found.data == created.data == serialize_metadata(OPEN)
    assert await store.get(layout.path(world.root, 123_456_789)) == (found.data, found.stat)


@on_loop
async def test_an_id_is_given_to_one_ledger_only(world: World) -> None:
    manager = await new_manager(world, await world.open())
    await manager.create(1, OPEN)

    with pytest.raises(NodeExistsError):
        await manager.create(1, CLOSED)

    assert (await manager.read(1)).metadata == OPEN


@on_loop
async def test_an_absent_ledger_is_named(world: World) -> None:
    manager = await new_manager(world, await world.open())

    with pytest.raises(NoSuchLedgerError, match="ledger_id=7"):
        await manager.read(7)


@on_loop
async def test_metadata_that_cannot_be_read_is_named(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
    await store.create(manager.path(7), b"scribble", with_parents=True)

    with pytest.raises(CorruptionError, match="ledger_id=7"):
        await manager.read(7)


@pytest.mark.compat("MetadataUpdateLoopTest.testBasicUpdate", verdict="same")
@on_loop
async def test_a_write_stands_on_the_version_that_was_read(world: World) -> None:
    manager = await new_manager(world, await world.open())
    await manager.create(1, OPEN)
    read = await manager.read(1)

    written = await manager.write(1, CLOSED, read_as=read)

    assert await manager.read(1) == written
    assert (written.version, written.metadata) == (1, CLOSED)
    with pytest.raises(ConflictError):
        await manager.write(1, OPEN, read_as=read)
    assert await manager.read(1) == written


@on_loop
async def test_a_write_may_follow_a_write_without_a_read(world: World) -> None:
    manager = await new_manager(world, await world.open())
    created = await manager.create(1, OPEN)

    marked = await manager.write(1, OPEN.with_state(LedgerState.IN_RECOVERY), read_as=created)
    closed = await manager.write(1, CLOSED, read_as=marked)

    assert (await manager.read(1)).metadata == closed.metadata == CLOSED


@on_loop
async def test_a_deleted_ledger_is_not_written(world: World) -> None:
    manager = await new_manager(world, await world.open())
    created = await manager.create(1, OPEN)
    await manager.delete(1, version=0)

    with pytest.raises(NoSuchLedgerError):
        await manager.write(1, CLOSED, read_as=created)


@on_loop
async def test_a_write_holds_only_while_its_guards_do(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
    created = await manager.create(1, OPEN)
    await store.create(f"{world.root}/lock")
    guards = [Check(path=f"{world.root}/lock", version=0)]

    written = await manager.write(1, CLOSED, read_as=created, guards=guards)
    await store.set(f"{world.root}/lock", b"another's", version=0)
    with pytest.raises(LockLostError, match="ledger_id=1"):
        await manager.write(1, OPEN, read_as=written, guards=guards)

    assert await manager.read(1) == written


@on_loop
async def test_a_write_whose_reply_is_lost_is_read_again(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
    created = await manager.create(1, OPEN)

    with pytest.raises(UnknownOutcomeError):
        await world.lose_reply(store, manager.write(1, CLOSED, read_as=created))

    assert (await manager.read(1)).metadata == CLOSED


@on_loop
async def test_the_journal_has_the_bytes_before_and_after_ahead_of_the_write(world: World) -> None:
    entries: list[tuple[int, bytes, bytes]] = []
    manager = await new_manager(
        world, await world.open(), journal=lambda *entry: entries.append(entry)
    )
    created = await manager.create(1, OPEN)

    await manager.write(1, CLOSED, read_as=created)

    assert entries == [(1, serialize_metadata(OPEN), serialize_metadata(CLOSED))]


@on_loop
async def test_what_the_journal_cannot_take_is_not_written(world: World) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    manager = await new_manager(world, await world.open(), journal=full)
    created = await manager.create(1, OPEN)

    with pytest.raises(OSError, match="no space"):
        await manager.write(1, CLOSED, read_as=created)

    assert (await manager.read(1)).metadata == OPEN


@on_loop
async def test_unknown_fields_survive_a_write(world: World) -> None:
    manager = await new_manager(world, await world.open())
    strange = replace(OPEN, unknown_fields=b"\xf8\x3f\x01")  # field 1023, a varint
    await manager.create(1, strange)
    read = await manager.read(1)

    await manager.write(1, read.metadata.with_state(LedgerState.IN_RECOVERY), read_as=read)

    assert (await manager.read(1)).metadata.unknown_fields == b"\xf8\x3f\x01"


# --- Deleting ------------------------------------------------------------------------------------


@LONG_LAYOUTS
@on_loop
async def test_a_deletion_takes_the_parents_that_it_leaves_empty(
    world: World, layout: Layout
) -> None:
    store = await world.open()
    manager = await new_manager(world, store, layout)
    before = set(await store.children(world.root))
    await manager.create(5, OPEN)
    await manager.create(6, OPEN)

    await manager.delete(5, version=0)
    assert await all_ids(manager) == [[6]]
    await manager.delete(6, version=0)

    assert set(await store.children(world.root)) == before


@on_loop
async def test_parents_stay_in_the_legacy_layout(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store, Layout.LEGACY_HIERARCHICAL)
    await manager.create(5, OPEN)

    await manager.delete(5, version=0)

    assert await store.children(f"{world.root}/00/0000") == []


@on_loop
async def test_a_changed_ledger_is_not_deleted(world: World) -> None:
    manager = await new_manager(world, await world.open())
    created = await manager.create(1, OPEN)
    await manager.write(1, CLOSED, read_as=created)

    with pytest.raises(ConflictError):
        await manager.delete(1, version=0)

    assert (await manager.read(1)).metadata == CLOSED


@on_loop
async def test_deleting_a_ledger_that_is_gone_is_success(world: World) -> None:
    manager = await new_manager(world, await world.open())

    await manager.delete(1, version=0)


@on_loop
async def test_ledgers_come_and_go_in_one_directory_without_losing_each_other(
    world: World,
) -> None:
    first, second = await world.open(), await world.open()
    creator = await new_manager(world, first)
    deleter = await LedgerManager.open(second, uri(world))
    for ledger_id in range(0, 40, 2):
        await creator.create(ledger_id, OPEN)

    async def create() -> None:
        for ledger_id in range(1, 40, 2):
            await creator.create(ledger_id, OPEN)

    async def delete() -> None:
        for ledger_id in range(0, 40, 2):
            await deleter.delete(ledger_id, version=0)

    await asyncio.gather(create(), delete())

    assert await all_ids(creator) == [list(range(1, 40, 2))]


# --- Listing -------------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_every_ledger_is_listed_once_directory_by_directory(
    world: World, layout: Layout
) -> None:
    store = await world.open()
    manager = await new_manager(world, store, layout)
    short = [0, 1, 9_999, 10_000, 123_456_789, 2**31 - 2]
    long = [2**31 - 1, 2**40, 2**63 - 1] if layout.ledger_id_stop > 2**31 else []
    for ledger_id in short + long:
        await manager.create(ledger_id, OPEN)
    await store.create(f"{world.root}/underreplication/ledgers", with_parents=True)
    await store.create(f"{world.root}/cookies/{BOOKIES[0]}", with_parents=True)

    batches = await all_ids(manager)

    assert sorted(i for batch in batches for i in batch) == short + long
    assert all(list(batch) == sorted(batch) for batch in batches)
    if layout is not Layout.FLAT:
        assert [0, 1, 9_999] in [list(batch) for batch in batches]


@on_loop
async def test_the_longest_directory_is_listed_whole(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
    paths = [manager.path(ledger_id) for ledger_id in range(10_000)]
    await manager.create(0, OPEN)
    for start in range(1, len(paths), 2_000):
        await store.multi([Create(path=path) for path in paths[start : start + 2_000]])

    assert await all_ids(manager) == [list(range(10_000))]


@on_loop
async def test_an_empty_cluster_has_no_ledgers(world: World) -> None:
    manager = await new_manager(world, await world.open())

    assert await all_ids(manager) == []


@on_loop
async def test_a_directory_that_vanishes_during_the_walk_has_become_empty(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
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
async def test_a_walk_without_a_root_fails(world: World) -> None:
    store = await world.open()
    manager = LedgerManager(store, f"{world.root}/gone", Layout.HIERARCHICAL)

    with pytest.raises(UnavailableError, match="root is gone"):
        await all_ids(manager)


@on_loop
async def test_a_walk_that_is_cut_short_fails(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)
    for ledger_id in (1, 2**40):
        await manager.create(ledger_id, OPEN)

    walk = aiter(manager.ledger_ids())
    await anext(walk)
    await world.expire(store)
    await store.wait_lost()

    with pytest.raises(UnavailableError):
        await anext(walk)


# --- New ids -------------------------------------------------------------------------------------


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
async def test_new_ids_count_on(world: World, layout: Layout, first_id: int) -> None:
    store = await world.open()
    manager = await new_manager(world, store, layout)

    ledger_ids = [await manager.new_ledger_id() for _ in range(3)]

    assert ledger_ids == [first_id, first_id + 1, first_id + 2]


@on_loop
async def test_ids_asked_for_at_once_are_all_different(world: World) -> None:
    first = await new_manager(world, await world.open())
    second = await LedgerManager.open(await world.open(), uri(world))

    ledger_ids = await asyncio.gather(
        *(manager.new_ledger_id() for manager in (first, second) * 20)
    )

    assert len(set(ledger_ids)) == 40


@LONG_LAYOUTS
@on_loop
async def test_where_long_ids_have_begun_they_go_on(world: World, layout: Layout) -> None:
    store = await world.open()
    manager = await new_manager(world, store, layout)
    await store.create(f"{world.root}/idgen-long")

    assert [await manager.new_ledger_id() for _ in range(2)] == [2**32, 2**32 + 1]

    await store.create(f"{world.root}/idgen-long/HOB-0000000007")
    assert [await manager.new_ledger_id() for _ in range(2)] == [7 * 2**32, 7 * 2**32 + 1]


@on_loop
async def test_drawing_ids_leaves_nothing_behind(world: World) -> None:
    store = await world.open()
    manager = await new_manager(world, store)

    await manager.new_ledger_id()

    assert await store.children(f"{world.root}/idgen") == []
    with pytest.raises(NoNodeError):
        await store.children(f"{world.root}/idgen-long")
