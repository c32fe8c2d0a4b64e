"""Marks that are gone though their ledgers miss copies still are noticed, and made again."""

import asyncio

import pytest
from structlog.testing import capture_logs

from auditor.marker import RELIST_S, LossMarks
from ledgers.errors import UnavailableError
from tests.auditor.auditing import auditing
from tests.auditor.scenes import marked_soon, with_ledgers
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS


async def unmark(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        path = PATHS.mark(ledger_id)
        await cluster.store.delete(path)
        await cluster.store.delete(path.rpartition("/")[0])


@in_virtual_time
async def test_a_mark_that_goes_while_the_bookie_is_away_is_made_again_but_only_once() -> None:
    """As a worker takes it away that saw the bookie back, which went again before the leader
    looked."""
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]
        await unmark(cluster, 1)
        with capture_logs() as logs:
            await asyncio.sleep(2 * RELIST_S)
            assert await cluster.marked() == [0, 1]

            await unmark(cluster, 1)  # Java's workers may see it otherwise every time
            await asyncio.sleep(5 * RELIST_S)
            assert await cluster.marked() == [0]
    assert [each["first"] for each in logs if each["event"] == "marks.gone"] == [[1]]


@in_virtual_time
async def test_what_was_repaired_is_not_marked_again() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await asyncio.sleep(RELIST_S - 2)
        await unmark(cluster, 0)
        await asyncio.sleep(
            3
        )  # between these two a look falls that finds no mark, and the old metadata
        versioned = await cluster.manager.read(0)
        (segment,) = versioned.metadata.segments
        moved = versioned.metadata.with_segment(segment.with_bookies({0: B3}))
        await cluster.manager.write(0, moved, read_as=versioned)
        await asyncio.sleep(3 * RELIST_S)

        assert await cluster.marked() == []


@in_virtual_time
async def test_a_listing_that_fails_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        assert await marked_soon(cluster) == [0]
        await unmark(cluster, 0)
        shut = shut_out(leader.store, PATHS.marks)
        await asyncio.sleep(3 * RELIST_S)
        assert await cluster.marked() == []

        shut.clear()
        await asyncio.sleep(2 * RELIST_S)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_while_nobody_is_lost_nothing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))

    def fail(self: LossMarks, listed: object) -> frozenset[int]:
        raise UnavailableError("listed all the same")

    monkeypatch.setattr(LossMarks, "lacking_among", fail)
    with capture_logs() as logs:
        async with auditing(cluster):
            await asyncio.sleep(3 * RELIST_S)

    assert [each for each in logs if each["event"] == "marks.unlisted"] == []


@in_virtual_time
async def test_where_nobody_tells_what_changed_a_repaired_ledger_may_lack_its_mark() -> None:
    """ZooKeeper before 3.6: the index may be an hour old."""
    cluster = await with_ledgers((B1, B2))
    cluster.tree.has_recursive_watches = False
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await unmark(cluster, 0)
        await asyncio.sleep(5 * RELIST_S)

        assert await cluster.marked() == []
