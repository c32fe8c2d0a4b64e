"""The leader's writes of safety holds: with a lagging view, a faster operator, and a deleted
vote."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor.safety_hold import SafetyHolds
from auditor.settings import HoldSettings
from ledgers.errors import LeadershipLostError, UnavailableError
from ledgers.model import BookieId
from ledgers.store import Operation
from replication.orders import HoldOrder, Orders, OrderStore, hold_znode
from replication.records import Stored
from tests.auditor.auditing import Leader, leading
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

FAILED = (B1, B2, B3)
HOLD_ZNODE = hold_znode(PATHS)


@asynccontextmanager
async def updating(cluster: Cluster) -> AsyncIterator[tuple[Leader, SafetyHolds]]:
    async with leading(cluster) as leader:
        holds = SafetyHolds(
            store=leader.store,
            batcher=leader.batcher,
            paths=PATHS,
            settings=HoldSettings(),
            clock=cluster.clock,
        )
        yield leader, holds


async def update(
    leader: Leader, holds: SafetyHolds, *absent: BookieId, seen: HoldOrder | None = None
) -> bool:
    """Update the hold as if the view showed ``seen`` and these bookies had just disappeared."""
    now_s = asyncio.get_running_loop().time()
    view = leader.views.current
    registered = {b: r for b, r in view.bookies.writable.items() if b not in absent}
    view = replace(
        view, bookies=replace(view.bookies, writable=registered), orders=Orders(hold=seen)
    )
    return await holds.update(view, dict.fromkeys(absent, now_s), lost_since_s={}) is not None


async def current_hold(cluster: Cluster) -> Stored[HoldOrder] | None:
    return await OrderStore(cluster.store, PATHS).stored(HOLD_ZNODE)


async def test_a_hold_that_the_view_does_not_show_is_not_written_twice(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        assert await update(leader, holds, *FAILED)
        assert await update(leader, holds, *FAILED)

        found = await current_hold(cluster)
        assert found is not None
        assert found.version == 0


async def test_a_release_that_the_view_does_not_show_is_obeyed(cluster: Cluster) -> None:
    held = HoldOrder(since_ms=cluster.clock.wall_ms(), bookies=FAILED)
    released = replace(held, is_released=True)
    await OrderStore(cluster.store, PATHS).give(HOLD_ZNODE, released, over=None)

    async with updating(cluster) as (leader, holds):
        assert not await update(leader, holds, *FAILED, seen=held)

    found = await current_hold(cluster)
    assert found is not None
    assert found.value == released


async def test_an_operators_earlier_order_wins(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    by_operator = HoldOrder(since_ms=1, reason="new switch", is_by_operator=True)
    async with updating(cluster) as (leader, holds):
        commit = leader.batcher.commit

        async def late(operations: Sequence[Operation]) -> object:
            if await current_hold(cluster) is None:
                await order_store.give(HOLD_ZNODE, by_operator, over=None)
            return await commit(operations)

        leader.batcher.commit = late  # type: ignore[assignment,method-assign]

        assert await update(leader, holds, *FAILED)

    found = await current_hold(cluster)
    assert found is not None
    assert found.value == by_operator


async def test_an_unreadable_order_counts_as_a_hold_and_stays(cluster: Cluster) -> None:
    await cluster.store.create(HOLD_ZNODE.path, b'{"version": 2}')
    async with updating(cluster) as (leader, holds):
        seen = (await OrderStore(leader.store, PATHS).read()).hold
        assert await update(leader, holds, B1, seen=seen)
        assert await update(leader, holds, *FAILED, seen=seen)

    assert (await cluster.store.get(HOLD_ZNODE.path))[0] == b'{"version": 2}'


async def test_nothing_is_decided_while_zookeeper_does_not_answer(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):

        def unresponsive(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
            return Fault.LOST_REQUEST if store is leader.store else None

        cluster.tree.faults = unresponsive
        with pytest.raises(UnavailableError):
            await update(leader, holds, *FAILED)
        cluster.tree.faults = None

        assert await update(leader, holds, *FAILED), "the next try does it"


async def test_a_hold_is_written_although_the_directory_was_deleted(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        await cluster.store.delete(PATHS.orders)

        assert await update(leader, holds, *FAILED)

    assert await current_hold(cluster) is not None


async def test_rule_s9_a_former_leader_orders_no_hold(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        await cluster.store.delete(leader.leadership.vote_path)

        with pytest.raises(LeadershipLostError):
            await update(leader, holds, *FAILED)

    assert await current_hold(cluster) is None


async def test_settings_that_are_applied_decide_from_then_on(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        holds.apply(HoldSettings(bookies_min=100))
        assert not await update(leader, holds, *FAILED[:2])

        holds.apply(HoldSettings(bookies_min=1, share=0))
        assert await update(leader, holds, *FAILED[:2])
