"""Bookies that come back empty, or are new: whose ledgers are marked, once, and whose are not."""

import asyncio
from collections.abc import Sequence

from auditor.auditor import RETRY_S
from auditor.records import read_identities
from ledgers.memory.store import Fault, MemoryStore
from ledgers.metadata import BookieId
from ledgers.store import Operation
from replication.queue import payloads
from tests.auditor.auditing import auditing
from tests.auditor.scenes import (
    SOON_S,
    delayed,
    marked_soon,
    replicas,
    with_ledgers,
)
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import ROOT, UR


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
        await cluster.store.delete(payloads.mark_path(UR, 0))  # as the worker that read it all

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
        await asyncio.sleep(SOON_S + RETRY_S)

    assert losses == 0
    _, cookie = await cluster.store.get(f"{ROOT}/cookies/{B1}")
    assert (await read_identities(cluster.store, UR))[B1] == cookie.czxid


@in_virtual_time
async def test_a_ledger_that_was_written_since_the_bookie_came_back_empty_is_marked_too() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(payloads.disable_path(UR))
        await cluster.kill(B1)
        await cluster.wipe(B1)
        await cluster.revive(B1)
        for ledger_id in (0, 1):  # a writer changes an ensemble, a worker repairs another fragment
            versioned = await cluster.manager.read(ledger_id)
            await cluster.manager.write(ledger_id, versioned.metadata, read_as=versioned)
        await cluster.store.delete(payloads.disable_path(UR))

        assert await marked_soon(cluster) == [0]


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

    known = (await read_identities(cluster.store, UR)).keys()
    assert {B1, B2, BookieId("new:3181")} <= known
    assert B3 not in known


@in_virtual_time
async def test_a_bookie_that_joins_the_cluster_marks_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(BookieId("new:3181"))
        await cluster.store.create(f"{ROOT}/cookies/new:3181")

        assert await marked_soon(cluster) == []
