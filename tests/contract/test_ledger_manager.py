"""Ledgers' metadata as ``LedgerManager`` keeps it, in memory and in ZooKeeper."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ledgers.codec.layout import Layout, MetadataUri, serialize_layout
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoSuchLedgerError,
    SettingsError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.manager import LedgerManager
from ledgers.model import LedgerState
from ledgers.store import Check
from tests.contract.managers import CLOSED, LAYOUTS, LONG_LAYOUTS, OPEN, all_ids, new_manager, uri
from tests.contract.metadata_stores import World, on_loop

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
async def test_where_there_is_no_cluster_nobody_can_tell_and_both_causes_are_named(
    world: World,
) -> None:
    """An emptied ZooKeeper, which whoever watches must not take for a typing error."""
    store = await world.open()

    with pytest.raises(UnavailableError, match=f"no BookKeeper cluster at {world.root}") as caught:
        await LedgerManager.open(store, uri(world))

    assert "is the path of the metadata service URI the ledgers root" in str(caught.value)
    assert "was ZooKeeper emptied" in str(caught.value)


@on_loop
async def test_a_cluster_at_the_root_of_pulsars_driver_is_not_confused_with_one_above(
    world: World,
) -> None:
    store = await world.open()
    both = MetadataUri(hosts="h", root=world.root, pulsar_root=f"{world.root}/ledgers")
    for root in (both.root, both.pulsar_root):
        await store.create(f"{root}/LAYOUT", serialize_layout(Layout.FLAT), with_parents=True)

    with pytest.raises(SettingsError, match=f"write zk://h{world.root}/ledgers for that cluster"):
        await LedgerManager.open(store, both)


@on_loop
async def test_the_root_in_the_uri_is_used_where_pulsars_driver_keeps_no_cluster(
    world: World,
) -> None:
    store = await world.open()
    await store.create(f"{world.root}/LAYOUT", serialize_layout(Layout.FLAT))
    either = MetadataUri(hosts="h", root=world.root, pulsar_root=f"{world.root}/ledgers")

    assert (await LedgerManager.open(store, either)).root == world.root


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
async def test_an_id_that_the_layout_cannot_hold_is_of_no_ledger(world: World) -> None:
    manager = await new_manager(world, await world.open(), Layout.LEGACY_HIERARCHICAL)

    with pytest.raises(NoSuchLedgerError):
        await manager.read(2**40)
    assert await manager.find(2**40) is None


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

    async def journal(*entry: Any) -> None:
        entries.append(entry)

    manager = await new_manager(world, await world.open(), journal=journal)
    created = await manager.create(1, OPEN)

    await manager.write(1, CLOSED, read_as=created)

    assert entries == [(1, serialize_metadata(OPEN), serialize_metadata(CLOSED))]


@on_loop
async def test_what_the_journal_cannot_take_is_not_written(world: World) -> None:
    async def full(*_: object) -> None:
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
