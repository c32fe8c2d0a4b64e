"""A bookie that goes, or is wiped, again: marks of before prove nothing, as workers may have taken
them away since."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, marked_soon, with_ledgers
from tests.auditor.test_auditor_index import marking_slowly, with_many_ledgers
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS


async def go(cluster: Cluster) -> None:
    await cluster.kill(B1)


async def be_set_up_anew(cluster: Cluster) -> None:
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)


async def go_and_come_back(cluster: Cluster) -> None:
    await cluster.kill(B1)
    await asyncio.sleep(5)
    await cluster.revive(B1)
    await asyncio.sleep(0.2)


async def unmark_all(cluster: Cluster) -> None:
    """As workers do, who found them whole, or made them so."""
    for ledger_id in await cluster.marked():
        await cluster.store.delete(PATHS.mark(ledger_id))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(be_set_up_anew, go, id="set up anew, then away"),
        pytest.param(be_set_up_anew, be_set_up_anew, id="set up anew twice"),
        pytest.param(go_and_come_back, go, id="away twice"),
    ],
)
def test_while_its_ledgers_are_being_marked(
    before: Callable[[Cluster], Awaitable[None]],
    after: Callable[[Cluster], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@in_virtual_time
async def test_while_the_leader_was_cut_off() -> None:
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


@in_virtual_time
async def test_a_mark_that_somebody_else_made_is_renewed_for_the_first_loss() -> None:
    """Its worker found the bookie there, and is about to take it away."""
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
