"""Bookies that come back empty, or are new: whose ledgers are marked, once, and whose are not."""

import asyncio
from collections.abc import Sequence
from typing import Any

from auditor.auditor import RETRY_S, STANDSTILL_MAX_S
from auditor.records import read_identities
from ledgers.errors import UnavailableError
from ledgers.memory.store import Fault, MemoryStore
from ledgers.model import BookieId
from ledgers.store import Operation
from replication.orders import HoldOrder, hold_znode
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import (
    SOON_S,
    delayed,
    marked_soon,
    replicas,
    with_ledgers,
)
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT


@in_virtual_time
async def test_the_ledgers_of_a_bookie_that_was_set_up_anew_are_marked_once() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(3600)):
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)
        await cluster.wipe(B1)
        await cluster.revive(B1)
        assert await marked_soon(cluster) == [0]
        assert await replicas(cluster, 0) == (B1,)
        await cluster.store.delete(PATHS.mark(0))  # as the worker that read it all
        await asyncio.sleep(STANDSTILL_MAX_S)
        assert await cluster.marked() == []

    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == []


@in_virtual_time
async def test_that_a_bookie_was_dealt_with_is_noted_though_the_first_try_fails() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    losses = 1

    def lose_note(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        nonlocal losses
        if losses and any(each.path.endswith("/identities") for each in operations):
            losses -= 1
            return Fault.LOST_REQUEST
        return None

    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.wipe(B1)
        cluster.tree.faults = lose_note
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S + STANDSTILL_MAX_S + RETRY_S)

    assert losses == 0
    _, cookie = await cluster.store.get(f"{ROOT}/cookies/{B1}")
    assert (await read_identities(cluster.store, PATHS))[B1] == cookie.czxid


@in_virtual_time
async def test_a_ledger_that_was_written_since_the_bookie_came_back_empty_is_marked_too() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await cluster.kill(B1)
        await cluster.wipe(B1)
        await cluster.revive(B1)
        for ledger_id in (0, 1):  # a writer changes an ensemble, a worker repairs another fragment
            versioned = await cluster.manager.read(ledger_id)
            await cluster.manager.write(ledger_id, versioned.metadata, read_as=versioned)
        await cluster.store.delete(PATHS.disable)

        assert await marked_soon(cluster) == [0]


async def set_up_anew(cluster: Cluster, bookie: BookieId) -> None:
    """And see it dealt with."""
    await cluster.kill(bookie)
    await cluster.wipe(bookie)
    await cluster.revive(bookie)
    assert await marked_soon(cluster) == []


async def move(cluster: Cluster, ledger_id: int, to: BookieId) -> None:
    """As a worker does that has copied what its first bookie had."""
    versioned = await cluster.manager.read(ledger_id)
    (segment,) = versioned.metadata.segments
    moved = versioned.metadata.with_segment(segment.with_bookies({0: to}))
    await cluster.manager.write(ledger_id, moved, read_as=versioned)


@in_virtual_time
async def test_what_comes_to_name_a_bookie_soon_after_it_was_set_up_anew_is_marked() -> None:
    """A worker that stood still, within its session, names it for copies that it had before."""
    cluster = await with_ledgers((B1, B2), (B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await set_up_anew(cluster, B3)

        await move(cluster, 0, B3)
        assert await marked_soon(cluster) == [0]
        assert await replicas(cluster, 0) == (B3,)

        await asyncio.sleep(STANDSTILL_MAX_S)
        await move(cluster, 1, B3)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_it_is_marked_also_where_all_ledgers_are_to_be_looked_at_just_then() -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()
        await cluster.kill(B3)
        await cluster.wipe(B3)
        await cluster.revive(B3)
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()

        await move(cluster, 0, B3)
        leader.updater.rescan()
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()

        assert await cluster.marked() == [0]


@in_virtual_time
async def test_under_a_hold_nothing_that_comes_to_name_a_bookie_set_up_anew_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await set_up_anew(cluster, B3)
        hold = HoldOrder(since_ms=1, until_ms=None, is_by_operator=True)
        await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)
        await asyncio.sleep(SOON_S)

        await move(cluster, 0, B3)
        assert await marked_soon(cluster) == []

        await asyncio.sleep(STANDSTILL_MAX_S)
        await cluster.store.delete(hold_znode(PATHS).path)
        assert await marked_soon(cluster) == [0], "when it is over"


@in_virtual_time
async def test_while_auto_recovery_is_disabled_it_waits_for_that() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await set_up_anew(cluster, B3)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(SOON_S)

        await move(cluster, 0, B3)
        await asyncio.sleep(STANDSTILL_MAX_S)
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_one_that_came_and_was_wiped_while_nobody_was_to_mark_is_seen_through() -> None:
    """A later write of the metadata, as of the close, does not hide that its entries are gone."""
    cluster = await Cluster.start(B1, B2)
    await cluster.store.create(PATHS.disable, with_parents=True)
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(f"{ROOT}/cookies/{B3}")
        await cluster.register(B3)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=0)
        await set_up_anew(cluster, B3)
        await asyncio.sleep(SOON_S)
        versioned = await cluster.manager.read(0)
        await cluster.manager.write(0, versioned.metadata, read_as=versioned)
        assert await marked_soon(cluster) == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_the_next_leader_marks_it() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await set_up_anew(cluster, B3)

    await move(cluster, 0, B3)
    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_it_is_marked_though_the_first_try_fails() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        await set_up_anew(cluster, B3)
        mark, tries = leader.marker.mark, 0

        async def failing(*args: Any, **options: Any) -> bool:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise UnavailableError("nobody answers")
            return await mark(*args, **options)

        leader.marker.mark = failing  # type: ignore[method-assign]
        await move(cluster, 0, B3)
        await asyncio.sleep(SOON_S + RETRY_S)

        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_mark_that_names_a_bookie_set_up_anew_already_is_renewed() -> None:
    """A check made it, for single entries; a worker that found the bookie whole, and stood still
    since, would take it away (rule S6)."""
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.mark(B2, ledger_id=0)
        await cluster.kill(B2)
        await cluster.wipe(B2)
        await cluster.revive(B2)
        await asyncio.sleep(SOON_S)

        stat = await cluster.store.exists(PATHS.mark(0))
    assert stat is not None
    assert stat.version == 1


@in_virtual_time
async def test_of_bookies_that_are_gone_for_good_nothing_is_kept() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie in (B1, B3):  # of the first a ledger tells still
            await cluster.kill(bookie)
            await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.create(f"{ROOT}/cookies/new:3181")
        await cluster.register(BookieId("new:3181"))
        await asyncio.sleep(SOON_S)

    known = (await read_identities(cluster.store, PATHS)).keys()
    assert {B1, B2, BookieId("new:3181")} <= known
    assert B3 not in known


@in_virtual_time
async def test_a_bookie_that_joins_the_cluster_marks_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(BookieId("new:3181"))
        await cluster.store.create(f"{ROOT}/cookies/new:3181")

        assert await marked_soon(cluster) == []
