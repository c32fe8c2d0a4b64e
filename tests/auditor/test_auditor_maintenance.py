"""Bookies in maintenance are not lost before their window is over."""

import asyncio

import pytest

from auditor.absence import COUNTS_WRITE_S, WRITE_S
from auditor.backlog import UnavailableLedgers
from auditor.records import read_absences
from ledgers.model import BookieId
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, marked_soon, set_delay, with_ledgers
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS


async def maintain(cluster: Cluster, bookie: BookieId, *, for_s: float) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    now_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + int(for_s * 1000))
    await order_store.give(znode, window, over=await order_store.stored(znode))


async def end_maintenance(cluster: Cluster, bookie: BookieId) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    stored = await order_store.stored(znode)
    assert stored is not None
    await order_store.withdraw(znode, over=stored)


async def test_a_bookie_back_within_its_window_marks_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)
        await asyncio.sleep(90)
        assert await cluster.marked() == []
        await cluster.revive(B1)
        await asyncio.sleep(100)

        assert await cluster.marked() == []


@pytest.mark.parametrize("delay_s", [0, 60], ids=["without a delay", "with a delay"])
async def test_a_bookie_is_lost_after_its_window_and_the_delay(
    delay_s: int,
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(delay_s)):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)

        await asyncio.sleep(99 + delay_s)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]


async def test_a_window_that_is_ended_or_shortened_no_longer_counts() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster):
        for bookie in (B1, B2):
            await maintain(cluster, bookie, for_s=1_000)
            await cluster.kill(bookie)
        assert await marked_soon(cluster) == []

        await end_maintenance(cluster, B1)
        assert await marked_soon(cluster) == [0]
        await maintain(cluster, B2, for_s=1)
        await asyncio.sleep(2)
        assert await cluster.marked() == [0, 1]


async def test_other_lost_bookies_are_marked_as_usual() -> None:
    """Their audit does not mark the bookie in maintenance."""
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1, B2)

        assert await marked_soon(cluster) == [1]


async def test_an_audit_on_request_does_not_end_a_window() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1)
        await asyncio.sleep(1)

        await set_delay(cluster, 60)

        assert await marked_soon(cluster) == []


async def test_a_window_survives_a_change_of_leader() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)
        await asyncio.sleep(10)

    async with auditing(cluster, "node-2"):
        await asyncio.sleep(80)
        assert await cluster.marked() == []
        await asyncio.sleep(11)
        assert await cluster.marked() == [0]


async def test_a_window_for_a_lost_bookie_deletes_no_mark() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await maintain(cluster, B1, for_s=100)

        assert await marked_soon(cluster) == [0]


async def test_ledgers_of_bookies_in_maintenance_are_counted() -> None:
    """The record does not name these bookies as absent."""
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster):
        for bookie in (B1, B4):
            await maintain(cluster, bookie, for_s=3600)
            await cluster.kill(bookie)
        await asyncio.sleep(COUNTS_WRITE_S + SOON_S)
        first = await read_absences(cluster.store, PATHS)
        await asyncio.sleep(WRITE_S)
        second = await read_absences(cluster.store, PATHS)

    assert (first.ledger_counts, first.are_counts_complete) == ({B1: 2, B4: 0}, True)
    assert first.since_ms == {}
    assert second.seen_ms > first.seen_ms, "so that readers know that it is not an earlier leader's"


async def test_the_record_names_unavailable_ledgers_soon() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B2), (B2, B3), (B3, B4))
    noted: list[UnavailableLedgers | None] = []
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie in (B1, B2, B3):
            await maintain(cluster, bookie, for_s=3600)
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)
            noted.append((await read_absences(cluster.store, PATHS)).unavailable)
        await cluster.revive(B2)
        await asyncio.sleep(SOON_S)
        noted.append((await read_absences(cluster.store, PATHS)).unavailable)

    assert noted == [
        UnavailableLedgers(count=0),
        UnavailableLedgers(count=2, first=(0, 1), restored_by={B1: 2, B2: 2}),
        UnavailableLedgers(count=3, first=(0, 1, 2), restored_by={B1: 2, B2: 3, B3: 1}),
        UnavailableLedgers(count=0),
    ]


async def test_a_new_leader_counts_when_its_ledger_map_is_complete() -> None:
    """Its first record is of a ledger map that is still empty."""
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)

        stored = await read_absences(cluster.store, PATHS)

    assert (stored.ledger_counts, stored.are_counts_complete) == ({B1: 1}, True)


async def test_counts_of_an_empty_ledger_map_are_marked_as_incomplete() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    for bookie in (B1, B2):
        await maintain(cluster, bookie, for_s=3600)
        await cluster.kill(bookie)
    noted: set[int | None] = set()
    async with auditing(cluster):
        for _ in range(100):
            await asyncio.sleep(0.1)
            stored = await read_absences(cluster.store, PATHS)
            if stored.are_counts_complete:
                noted.add(None if stored.unavailable is None else stored.unavailable.count)

    assert noted - {None} == {1}
    assert stored.unavailable == UnavailableLedgers(count=1, first=(0,), restored_by={B1: 1, B2: 1})
