"""The metadata of ledgers in ``LedgerManager``, in memory and in ZooKeeper."""

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
from tests.contract.metadata_stores import Backend, on_loop

# --- The cluster ----------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_the_layout_is_that_of_the_cluster(backend: Backend, layout: Layout) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/LAYOUT", serialize_layout(layout))

    assert (await LedgerManager.open(store, uri(backend))).layout is layout
    assert (await LedgerManager.open(store, uri(backend, layout))).layout is layout


@on_loop
async def test_another_layout_in_the_uri_is_an_error_that_names_both(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/LAYOUT", serialize_layout(Layout.LONG_HIERARCHICAL))

    with pytest.raises(SettingsError, match=r"says flat, .* is long_hierarchical"):
        await LedgerManager.open(store, uri(backend, Layout.FLAT))


@on_loop
async def test_without_a_cluster_both_possible_causes_are_named(
    backend: Backend,
) -> None:
    """An emptied ZooKeeper, which a watching caller must not mistake for a wrong URI."""
    store = await backend.open()

    with pytest.raises(
        UnavailableError, match=f"no BookKeeper cluster at {backend.root}"
    ) as caught:
        await LedgerManager.open(store, uri(backend))

    assert "the path of the metadata service URI is the ledgers root" in str(caught.value)
    assert "ZooKeeper was not emptied" in str(caught.value)


@pytest.mark.parametrize("layout", [None, Layout.LONG_HIERARCHICAL], ids=["default", "of the URI"])
@on_loop
async def test_without_a_layout_three_other_znodes_prove_a_cluster(
    backend: Backend, layout: Layout | None
) -> None:
    """Pulsar's metadata driver writes no LAYOUT."""
    store = await backend.open()
    for name in ("INSTANCEID", "available", "cookies"):
        await store.create(f"{backend.root}/{name}")

    manager = await LedgerManager.open(store, uri(backend, layout))

    assert manager.layout is (layout or Layout.HIERARCHICAL)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.LONG_HIERARCHICAL])
@on_loop
async def test_rule_s8_a_lost_layout_is_not_guessed_if_ledgers_contradict_it(
    backend: Backend, layout: Layout
) -> None:
    store = await backend.open()
    for name in ("INSTANCEID", "available", "cookies"):
        await store.create(f"{backend.root}/{name}")
    await store.create(layout.path(backend.root, 5), with_parents=True)

    with pytest.raises(UnavailableError, match=f"{layout.name.lower()}, but no LAYOUT"):
        await LedgerManager.open(store, uri(backend))

    assert (await LedgerManager.open(store, uri(backend, layout))).layout is layout


@pytest.mark.parametrize("missing", ["INSTANCEID", "available", "cookies"])
@on_loop
async def test_rule_s8_a_part_of_a_cluster_without_a_layout_is_an_error_that_names_the_rest(
    backend: Backend, missing: str
) -> None:
    store = await backend.open()
    for name in {"INSTANCEID", "available", "cookies"} - {missing}:
        await store.create(f"{backend.root}/{name}")

    with pytest.raises(UnavailableError, match=f"lacks LAYOUT, {missing}. If it is new, start"):
        await LedgerManager.open(store, uri(backend))


@on_loop
async def test_the_root_that_pulsars_driver_means_counts_if_only_it_has_a_cluster(
    backend: Backend,
) -> None:
    store = await backend.open()
    either = MetadataUri(hosts="h", root=backend.root, pulsar_root=f"{backend.root}/ledgers")
    for name in ("INSTANCEID", "available", "cookies"):
        await store.create(f"{either.pulsar_root}/{name}", with_parents=True)

    assert (await LedgerManager.open(store, either)).root == either.pulsar_root


@on_loop
async def test_pulsars_cluster_is_not_confused_with_one_above(
    backend: Backend,
) -> None:
    """It has its own root below the other one."""
    store = await backend.open()
    both = MetadataUri(hosts="h", root=backend.root, pulsar_root=f"{backend.root}/ledgers")
    for root in (both.root, both.pulsar_root):
        await store.create(f"{root}/LAYOUT", serialize_layout(Layout.FLAT), with_parents=True)

    with pytest.raises(SettingsError, match=f"Write zk://h{backend.root} or zk://h.*/ledgers$"):
        await LedgerManager.open(store, both)


@on_loop
async def test_the_root_of_the_uri_counts_without_a_cluster_of_pulsars(
    backend: Backend,
) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/LAYOUT", serialize_layout(Layout.FLAT))
    either = MetadataUri(hosts="h", root=backend.root, pulsar_root=f"{backend.root}/ledgers")

    assert (await LedgerManager.open(store, either)).root == backend.root


# --- One ledger -----------------------------------------------------------------------------------


@LAYOUTS
@on_loop
async def test_a_created_ledger_can_be_read(backend: Backend, layout: Layout) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, layout)

    created = await manager.create(123_456_789, OPEN)
    found = await manager.read(123_456_789)

    assert found.metadata == created.metadata == OPEN
    assert found.version == created.version == 0
    assert found.data == created.data == serialize_metadata(OPEN)
    assert await store.get(layout.path(backend.root, 123_456_789)) == (found.data, found.stat)


@on_loop
async def test_an_id_is_given_to_one_ledger_only(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    await manager.create(1, OPEN)

    with pytest.raises(NodeExistsError):
        await manager.create(1, CLOSED)

    assert (await manager.read(1)).metadata == OPEN


@on_loop
async def test_an_absent_ledger_is_named(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())

    with pytest.raises(NoSuchLedgerError, match="ledger_id=7"):
        await manager.read(7)


@on_loop
async def test_an_id_that_the_layout_cannot_have_is_of_no_ledger(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open(), Layout.LEGACY_HIERARCHICAL)

    with pytest.raises(NoSuchLedgerError):
        await manager.read(2**40)
    assert await manager.find(2**40) is None


@on_loop
async def test_unreadable_metadata_is_named(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    await store.create(manager.path(7), b"scribble", with_parents=True)

    with pytest.raises(CorruptionError, match="ledger_id=7"):
        await manager.read(7)


@pytest.mark.compat("MetadataUpdateLoopTest.testBasicUpdate", verdict="same")
@on_loop
async def test_a_write_depends_on_the_version_that_was_read(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    await manager.create(1, OPEN)
    read = await manager.read(1)

    written = await manager.write(1, CLOSED, read_as=read)

    assert await manager.read(1) == written
    assert (written.version, written.metadata) == (1, CLOSED)
    with pytest.raises(ConflictError):
        await manager.write(1, OPEN, read_as=read)
    assert await manager.read(1) == written


@on_loop
async def test_a_write_may_follow_a_write_without_a_read(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    created = await manager.create(1, OPEN)

    marked = await manager.write(1, OPEN.with_state(LedgerState.IN_RECOVERY), read_as=created)
    closed = await manager.write(1, CLOSED, read_as=marked)

    assert (await manager.read(1)).metadata == closed.metadata == CLOSED


@on_loop
async def test_a_deleted_ledger_is_not_written(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    created = await manager.create(1, OPEN)
    await manager.delete(1, version=0)

    with pytest.raises(NoSuchLedgerError):
        await manager.write(1, CLOSED, read_as=created)


@on_loop
async def test_a_write_succeeds_only_if_its_guards_hold(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    created = await manager.create(1, OPEN)
    await store.create(f"{backend.root}/lock")
    guards = [Check(path=f"{backend.root}/lock", version=0)]

    written = await manager.write(1, CLOSED, read_as=created, guards=guards)
    await store.set(f"{backend.root}/lock", b"another's", version=0)
    with pytest.raises(LockLostError, match="ledger_id=1"):
        await manager.write(1, OPEN, read_as=written, guards=guards)

    assert await manager.read(1) == written


@on_loop
async def test_a_write_whose_reply_is_lost_is_read_again(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store)
    created = await manager.create(1, OPEN)

    with pytest.raises(UnknownOutcomeError):
        await backend.lose_reply(store, manager.write(1, CLOSED, read_as=created))

    assert (await manager.read(1)).metadata == CLOSED


@on_loop
async def test_the_journal_has_both_versions_before_the_write(backend: Backend) -> None:
    entries: list[tuple[int, bytes, bytes]] = []

    async def journal(*entry: Any) -> None:
        entries.append(entry)

    manager = await new_manager(backend, await backend.open(), journal=journal)
    created = await manager.create(1, OPEN)

    await manager.write(1, CLOSED, read_as=created)

    assert entries == [(1, serialize_metadata(OPEN), serialize_metadata(CLOSED))]


@on_loop
async def test_without_a_journal_record_nothing_is_written(backend: Backend) -> None:
    async def full(*_: object) -> None:
        raise OSError("no space left on device")

    manager = await new_manager(backend, await backend.open(), journal=full)
    created = await manager.create(1, OPEN)

    with pytest.raises(OSError, match="no space"):
        await manager.write(1, CLOSED, read_as=created)

    assert (await manager.read(1)).metadata == OPEN


@on_loop
async def test_unknown_fields_survive_a_write(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    strange = replace(OPEN, unknown_fields=b"\xf8\x3f\x01")  # field 1023, a varint
    await manager.create(1, strange)
    read = await manager.read(1)

    await manager.write(1, read.metadata.with_state(LedgerState.IN_RECOVERY), read_as=read)

    assert (await manager.read(1)).metadata.unknown_fields == b"\xf8\x3f\x01"


# --- Deleting -------------------------------------------------------------------------------------


@LONG_LAYOUTS
@on_loop
async def test_a_deletion_removes_the_parents_that_it_leaves_empty(
    backend: Backend, layout: Layout
) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, layout)
    before = set(await store.children(backend.root))
    await manager.create(5, OPEN)
    await manager.create(6, OPEN)

    await manager.delete(5, version=0)
    assert await all_ids(manager) == [[6]]
    await manager.delete(6, version=0)

    assert set(await store.children(backend.root)) == before


@on_loop
async def test_parents_stay_in_the_legacy_layout(backend: Backend) -> None:
    store = await backend.open()
    manager = await new_manager(backend, store, Layout.LEGACY_HIERARCHICAL)
    await manager.create(5, OPEN)

    await manager.delete(5, version=0)

    assert await store.children(f"{backend.root}/00/0000") == []


@on_loop
async def test_a_changed_ledger_is_not_deleted(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())
    created = await manager.create(1, OPEN)
    await manager.write(1, CLOSED, read_as=created)

    with pytest.raises(ConflictError):
        await manager.delete(1, version=0)

    assert (await manager.read(1)).metadata == CLOSED


@on_loop
async def test_deleting_a_deleted_ledger_is_a_success(backend: Backend) -> None:
    manager = await new_manager(backend, await backend.open())

    await manager.delete(1, version=0)


@on_loop
async def test_concurrent_changes_in_one_directory_lose_no_ledger(
    backend: Backend,
) -> None:
    """Ledgers are created and deleted."""
    first, second = await backend.open(), await backend.open()
    creator = await new_manager(backend, first)
    deleter = await LedgerManager.open(second, uri(backend))
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
