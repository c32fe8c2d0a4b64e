"""Deleted marks of ledgers that still lack copies are noticed and made again."""

import asyncio

import pytest
from structlog.testing import capture_logs

from auditor.marker import LIST_S, LossMarker
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from tests.auditor.auditing import auditing
from tests.auditor.scenes import marked_soon, with_ledgers
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS


async def unmark(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        path = PATHS.mark(ledger_id)
        await cluster.store.delete(path)
        await cluster.store.delete(path.rpartition("/")[0])


async def move_copy(cluster: Cluster) -> None:
    """Move the first copy of ledger 0 to B3."""
    versioned = await cluster.manager.read(0)
    (segment,) = versioned.metadata.segments
    moved = versioned.metadata.with_segment(segment.with_bookies({0: B3}))
    await cluster.manager.write(0, moved, read_as=versioned)


async def test_a_mark_deleted_while_its_bookie_is_lost_is_restored() -> None:
    """A worker that saw the bookie return deleted the mark; the bookie disappeared again."""
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]
        await unmark(cluster, 1)
        with capture_logs() as logs:
            await asyncio.sleep(2 * LIST_S)
            assert await cluster.marked() == [0, 1]

            await unmark(cluster, 1)  # Java's workers may see it otherwise every time
            await asyncio.sleep(5 * LIST_S)
            assert await cluster.marked() == [0]
    assert [each["first"] for each in logs if each["event"] == "marks.disappeared"] == [[1]]


async def test_a_repaired_ledger_is_not_marked_again() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await asyncio.sleep(LIST_S - 2)
        await unmark(cluster, 0)
        # During this sleep the leader looks, and finds no mark and the old metadata.
        await asyncio.sleep(3)
        await move_copy(cluster)
        await asyncio.sleep(3 * LIST_S)

        assert await cluster.marked() == []


async def test_a_repair_that_the_ledger_map_did_not_read_yet_is_no_missing_mark() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        assert await marked_soon(cluster) == [0]
        leader.updater.changes_pause_s = 10 * LIST_S
        await move_copy(cluster)
        await unmark(cluster, 0)
        await asyncio.sleep(5 * LIST_S)

        assert await cluster.marked() == []


@pytest.mark.parametrize("returned", [B1, B2])
async def test_a_mark_that_named_a_returned_bookie_too_is_restored_by_the_next_audit(
    returned: BookieId,
) -> None:
    """A worker that saw both bookies registered may have deleted it."""
    cluster = await with_ledgers((B1, B2), (B3, B4))
    await cluster.kill(B1)
    await cluster.kill(B2)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await cluster.revive(returned)
        await unmark(cluster, 0)
        assert await marked_soon(cluster) == []
        await cluster.kill(B3)

        assert await marked_soon(cluster) == [0, 1]


async def test_a_failed_listing_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        assert await marked_soon(cluster) == [0]
        await unmark(cluster, 0)
        shut = shut_out(leader.store, PATHS.marks)
        await asyncio.sleep(3 * LIST_S)
        assert await cluster.marked() == []

        shut.clear()
        await asyncio.sleep(2 * LIST_S)
        assert await cluster.marked() == [0]


async def test_nothing_is_listed_while_no_bookie_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))

    def fail(self: LossMarker) -> None:
        raise UnavailableError("listed all the same")

    monkeypatch.setattr(LossMarker, "_find_gone", fail)
    with capture_logs() as logs:
        async with auditing(cluster):
            await asyncio.sleep(3 * LIST_S)

    assert [each for each in logs if each["event"] == "marks.list_failed"] == []
