"""Holds as the leader writes them: against a view that lags, an operator who is quicker, a vote
that is gone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor.safety_hold import Holds
from auditor.settings import HoldSettings
from ledgers.errors import LeadershipLostError, UnavailableError
from ledgers.memory.store import Fault, MemoryStore
from ledgers.model import BookieId
from ledgers.store import Operation
from replication.orders import HoldOrder, Orders, OrderStore, VersionedOrder, hold_znode
from tests.auditor.auditing import Leader, leading
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

WAVE = (B1, B2, B3)
PLACE = hold_znode(PATHS)


@asynccontextmanager
async def keeping(cluster: Cluster) -> AsyncIterator[tuple[Leader, Holds]]:
    async with leading(cluster) as leader:
        holds = Holds(
            store=leader.store,
            batcher=leader.batcher,
            paths=PATHS,
            settings=HoldSettings(),
            clock=cluster.clock,
        )
        yield leader, holds


async def keep(
    leader: Leader, holds: Holds, *away: BookieId, seen: HoldOrder | None = None
) -> bool:
    """As if the view showed ``seen``, and these bookies had just gone."""
    now_s = asyncio.get_running_loop().time()
    view = leader.views.current
    registered = {b: r for b, r in view.bookies.writable.items() if b not in away}
    view = replace(
        view, bookies=replace(view.bookies, writable=registered), orders=Orders(hold=seen)
    )
    return await holds.keep(view, dict.fromkeys(away, now_s), lost_since_s={}) is not None


async def standing(cluster: Cluster) -> VersionedOrder[HoldOrder] | None:
    return await OrderStore(cluster.store, PATHS).stored(PLACE)


@in_virtual_time
async def test_what_the_view_does_not_show_yet_is_not_written_twice() -> None:
    cluster = await Cluster.start()
    async with keeping(cluster) as (leader, holds):
        assert await keep(leader, holds, *WAVE)
        assert await keep(leader, holds, *WAVE)

        found = await standing(cluster)
        assert found is not None
        assert found.version == 0


@in_virtual_time
async def test_a_release_that_the_view_does_not_show_yet_is_kept_to() -> None:
    cluster = await Cluster.start()
    held = HoldOrder(since_ms=cluster.clock.wall_ms(), bookies=WAVE)
    released = replace(held, is_released=True)
    await OrderStore(cluster.store, PATHS).give(PLACE, released, over=None)

    async with keeping(cluster) as (leader, holds):
        assert not await keep(leader, holds, *WAVE, seen=held)

    found = await standing(cluster)
    assert found is not None
    assert found.order == released


@in_virtual_time
async def test_an_operator_who_is_quicker_is_heard() -> None:
    cluster = await Cluster.start()
    order_store = OrderStore(cluster.store, PATHS)
    by_operator = HoldOrder(since_ms=1, reason="new switch", is_by_operator=True)
    async with keeping(cluster) as (leader, holds):
        commit = leader.batcher.commit

        async def late(operations: Sequence[Operation]) -> object:
            if await standing(cluster) is None:
                await order_store.give(PLACE, by_operator, over=None)
            return await commit(operations)

        leader.batcher.commit = late  # type: ignore[assignment,method-assign]

        assert await keep(leader, holds, *WAVE)

    found = await standing(cluster)
    assert found is not None
    assert found.order == by_operator


@in_virtual_time
async def test_an_order_that_cannot_be_read_holds_and_is_left_as_it_is() -> None:
    cluster = await Cluster.start()
    await cluster.store.create(PLACE.path, b'{"version": 2}')
    async with keeping(cluster) as (leader, holds):
        seen = (await OrderStore(leader.store, PATHS).read()).hold
        assert await keep(leader, holds, B1, seen=seen)
        assert await keep(leader, holds, *WAVE, seen=seen)

    assert (await cluster.store.get(PLACE.path))[0] == b'{"version": 2}'


@in_virtual_time
async def test_while_zookeeper_does_not_answer_nobody_can_tell() -> None:
    cluster = await Cluster.start()
    async with keeping(cluster) as (leader, holds):

        def silent(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
            return Fault.LOST_REQUEST if store is leader.store else None

        cluster.tree.faults = silent
        with pytest.raises(UnavailableError):
            await keep(leader, holds, *WAVE)
        cluster.tree.faults = None

        assert await keep(leader, holds, *WAVE), "the next try does it"


@in_virtual_time
async def test_a_hold_is_ordered_though_somebody_deleted_the_directory_of_orders() -> None:
    cluster = await Cluster.start()
    async with keeping(cluster) as (leader, holds):
        await cluster.store.delete(PATHS.orders)

        assert await keep(leader, holds, *WAVE)

    assert await standing(cluster) is not None


@in_virtual_time
async def test_rule_s9_who_leads_no_more_orders_no_hold() -> None:
    cluster = await Cluster.start()
    async with keeping(cluster) as (leader, holds):
        await cluster.store.delete(leader.leadership.vote_path)

        with pytest.raises(LeadershipLostError):
            await keep(leader, holds, *WAVE)

    assert await standing(cluster) is None
