"""A bookie that disappears or is reformatted again: earlier marks may have been deleted by
workers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, marked_soon, with_ledgers
from tests.auditor.test_auditor_ledger_map import marking_slowly, with_many_ledgers
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS


async def lose(cluster: Cluster) -> None:
    await cluster.kill(B1)


async def reformat(cluster: Cluster) -> None:
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)


async def lose_and_return(cluster: Cluster) -> None:
    await cluster.kill(B1)
    await asyncio.sleep(5)
    await cluster.revive(B1)
    await asyncio.sleep(0.2)


async def unmark_all(cluster: Cluster) -> None:
    """Delete all marks, as workers do that found the ledgers whole or repaired them."""
    for ledger_id in await cluster.marked():
        await cluster.store.delete(PATHS.mark(ledger_id))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(reformat, lose, id="reformatted, then absent"),
        pytest.param(reformat, reformat, id="reformatted twice"),
        pytest.param(lose_and_return, lose, id="absent twice"),
    ],
)
def test_marks_are_made_again_if_a_bookie_returns_during_marking(
    before: Callable[[Cluster], Awaitable[None]],
    after: Callable[[Cluster], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bookie returns for a moment; workers delete the marks; then it disappears again."""

    @in_virtual_time
    async def running() -> None:
        cluster = await with_many_ledgers(400)
        async with marking_slowly(cluster, monkeypatch):
            await before(cluster)
            await asyncio.sleep(3)
            slow, cluster.tree.latency = cluster.tree.latency, lambda: asyncio.sleep(0)
            assert len(await cluster.marked()) > 10
            await unmark_all(cluster)
            cluster.tree.latency = slow

            await after(cluster)
            await asyncio.sleep(60)

        assert await cluster.marked() == list(range(400))

    running()


async def test_marks_are_made_again_after_the_leaders_own_outage() -> None:
    """The bookie returned, and disappeared again, while the leader was suspended."""
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        cluster.tree.suspend(leader.store)
        await cluster.revive(B1)
        await unmark_all(cluster)
        await cluster.kill(B1)
        cluster.tree.resume(leader.store)

        assert await marked_soon(cluster) == [0]


async def test_another_auditors_mark_is_renewed_at_the_first_loss() -> None:
    """A worker that saw the bookie registered is about to delete that mark."""
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.mark(B1, ledger_id=0)
        path = PATHS.mark(0)
        before = await cluster.store.exists(path)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        after = await cluster.store.exists(path)

    assert before is not None
    assert after is not None
    assert after.version == before.version + 1
