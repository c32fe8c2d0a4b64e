"""Bookies that are away on purpose: not lost before their maintenance window is over."""

import asyncio

import pytest

from auditor.absence import UnavailableLedgers
from auditor.absence_tracker import COUNTS_WRITE_S, WRITE_S
from auditor.records import read_absences
from ledgers.model import BookieId
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, marked_soon, set_delay, with_ledgers
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS


async def maintain(cluster: Cluster, bookie: BookieId, *, for_s: float) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    now_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + int(for_s * 1000))
    await order_store.give(znode, window, over=await order_store.stored(znode))


async def end_maintenance(cluster: Cluster, bookie: BookieId) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    standing = await order_store.stored(znode)
    assert standing is not None
    await order_store.withdraw(znode, over=standing)


@in_virtual_time
async def test_a_bookie_that_is_back_before_its_window_ends_marks_nothing() -> None:
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
@in_virtual_time
async def test_a_bookie_that_stays_away_is_lost_after_its_window_and_the_delay(
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


@in_virtual_time
async def test_a_window_that_is_ended_by_hand_or_shortened_counts_no_longer() -> None:
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


@in_virtual_time
async def test_the_others_are_lost_as_ever_and_their_audit_does_not_touch_the_bookie() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1, B2)

        assert await marked_soon(cluster) == [1]


@in_virtual_time
async def test_asking_for_an_audit_does_not_end_a_window() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1)
        await asyncio.sleep(1)

        await set_delay(cluster, 60)

        assert await marked_soon(cluster) == []


@in_virtual_time
async def test_a_window_outlives_its_leader() -> None:
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


@in_virtual_time
async def test_a_window_for_a_bookie_that_is_lost_already_takes_no_mark_back() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await maintain(cluster, B1, for_s=100)

        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_how_many_ledgers_name_who_is_away_on_purpose_is_noted_but_no_absence() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster):
        for bookie in (B1, B4):
            await maintain(cluster, bookie, for_s=3600)
            await cluster.kill(bookie)
        await asyncio.sleep(COUNTS_WRITE_S + SOON_S)
        first = await read_absences(cluster.store, PATHS)
        await asyncio.sleep(WRITE_S)
        second = await read_absences(cluster.store, PATHS)

    assert (first.naming, first.are_all_named) == ({B1: 2, B4: 0}, True)
    assert first.since_ms == {}
    assert second.seen_ms > first.seen_ms, "so that readers know that it is not an earlier leader's"


@in_virtual_time
async def test_how_many_ledgers_have_all_copies_on_who_is_away_is_noted_soon() -> None:
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
        UnavailableLedgers(count=2, first=(0, 1), enough_for={B1: 2, B2: 2}),
        UnavailableLedgers(count=3, first=(0, 1, 2), enough_for={B1: 2, B2: 3, B3: 1}),
        UnavailableLedgers(count=0),
    ]


@in_virtual_time
async def test_a_new_leader_notes_at_once_what_names_who_is_away_when_its_index_is_complete() -> (
    None
):
    """Its first note is of an index that is still empty."""
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)

        stored = await read_absences(cluster.store, PATHS)

    assert (stored.naming, stored.are_all_named) == ({B1: 1}, True)


@in_virtual_time
async def test_a_new_leader_notes_no_count_of_an_index_that_was_empty_as_one_of_all_ledgers() -> (
    None
):
    cluster = await with_ledgers((B1, B2), (B2, B3))
    for bookie in (B1, B2):
        await maintain(cluster, bookie, for_s=3600)
        await cluster.kill(bookie)
    noted: set[int | None] = set()
    async with auditing(cluster):
        for _ in range(100):
            await asyncio.sleep(0.1)
            stored = await read_absences(cluster.store, PATHS)
            if stored.are_all_named:
                noted.add(None if stored.unavailable is None else stored.unavailable.count)

    assert noted - {None} == {1}
    assert stored.unavailable == UnavailableLedgers(count=1, first=(0,), enough_for={B1: 1, B2: 1})
