"""Reformatted and new bookies: which ledgers are marked once, and which are not."""

import asyncio
from collections.abc import Sequence
from typing import Any

from auditor.auditor import RETRY_S, STANDSTILL_MAX_S
from auditor.records import read_identities
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import Operation
from replication.orders import HoldOrder, hold_znode
from tests.auditor.auditing import auditing, leading
from tests.auditor.ledger_map_scenes import rescan
from tests.auditor.scenes import (
    SOON_S,
    delayed,
    marked_soon,
    replicas,
    with_ledgers,
)
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT


async def test_the_ledgers_of_a_reformatted_bookie_are_marked_once() -> None:
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


async def test_a_handled_reformat_is_recorded_after_a_failed_try() -> None:
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


async def test_a_ledger_written_after_the_reformat_is_marked_too() -> None:
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


async def reformat(cluster: Cluster, bookie: BookieId) -> None:
    """Reformat the bookie and wait until the auditor has handled it."""
    await cluster.kill(bookie)
    await cluster.wipe(bookie)
    await cluster.revive(bookie)
    assert await marked_soon(cluster) == []


async def move(cluster: Cluster, ledger_id: int, to: BookieId) -> None:
    """Name the bookie instead of the first one, as a worker does that has copied the entries."""
    versioned = await cluster.manager.read(ledger_id)
    (segment,) = versioned.metadata.segments
    moved = versioned.metadata.with_segment(segment.with_bookies({0: to}))
    await cluster.manager.write(ledger_id, moved, read_as=versioned)


async def test_a_ledger_moved_to_a_newly_reformatted_bookie_is_marked() -> None:
    """A worker that was suspended may name the bookie for copies from before."""
    cluster = await with_ledgers((B1, B2), (B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)

        await move(cluster, 0, B3)
        assert await marked_soon(cluster) == [0]
        assert await replicas(cluster, 0) == (B3,)

        await asyncio.sleep(STANDSTILL_MAX_S)
        await move(cluster, 1, B3)
        assert await marked_soon(cluster) == [0]


async def test_such_a_ledger_is_marked_also_during_a_rescan() -> None:
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
        rescan(leader.updater)
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()

        assert await cluster.marked() == [0]


async def test_during_a_hold_such_a_ledger_is_not_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)
        hold = HoldOrder(since_ms=1, until_ms=None, is_by_operator=True)
        await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)
        await asyncio.sleep(SOON_S)

        await move(cluster, 0, B3)
        assert await marked_soon(cluster) == []

        await asyncio.sleep(STANDSTILL_MAX_S)
        await cluster.store.delete(hold_znode(PATHS).path)
        assert await marked_soon(cluster) == [0], "when it is over"


async def test_while_disabled_the_reformatted_bookie_waits() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(SOON_S)

        await move(cluster, 0, B3)
        await asyncio.sleep(STANDSTILL_MAX_S)
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


async def test_a_bookie_added_and_reformatted_while_disabled_is_marked() -> None:
    """A later write of metadata, such as the close, does not hide that its entries are lost."""
    cluster = await Cluster.start(B1, B2)
    await cluster.store.create(PATHS.disable, with_parents=True)
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(f"{ROOT}/cookies/{B3}")
        await cluster.register(B3)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=0)
        await reformat(cluster, B3)
        await asyncio.sleep(SOON_S)
        versioned = await cluster.manager.read(0)
        await cluster.manager.write(0, versioned.metadata, read_as=versioned)
        assert await marked_soon(cluster) == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


async def test_the_next_leader_marks_such_a_ledger() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)

    await move(cluster, 0, B3)
    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == [0]


async def test_such_a_ledger_is_marked_although_the_first_try_fails() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)
        mark, tries = leader.marker.mark, 0

        async def failing(*args: Any, **options: Any) -> bool:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise UnavailableError("no answer")
            return await mark(*args, **options)

        leader.marker.mark = failing  # type: ignore[method-assign]
        await move(cluster, 0, B3)
        await asyncio.sleep(SOON_S + RETRY_S)

        assert await cluster.marked() == [0]


async def test_a_mark_that_names_a_reformatted_bookie_is_renewed() -> None:
    """A suspended worker that found the bookie whole would delete the old one (rule S6)."""
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


async def test_identities_of_decommissioned_bookies_are_deleted() -> None:
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


async def test_a_bookie_that_joins_the_cluster_marks_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(BookieId("new:3181"))
        await cluster.store.create(f"{ROOT}/cookies/new:3181")

        assert await marked_soon(cluster) == []
