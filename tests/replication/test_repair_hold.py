"""During a safety hold nothing is fenced, and everything that needs no fence continues."""

import asyncio

import pytest

from ledgers.model import LedgerState
from replication.orders import HoldOrder, OrderStore, hold_znode
from replication.reasons import Reason
from replication.repair import OutcomeKind
from replication.settings import ReplicationSettings
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import THREE, blocked_by, lost_b2, open_ledger, repair, watch_fencing


async def hold(cluster: Cluster, *, for_s: float | None = None, reason: str = "") -> int | None:
    """Order a hold and return its end in wall-clock milliseconds."""
    now_ms = cluster.clock.wall_ms()
    until_ms = None if for_s is None else now_ms + int(for_s * 1000)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    order = HoldOrder(since_ms=now_ms, until_ms=until_ms, reason=reason)
    await order_store.give(znode, order, over=await order_store.stored(znode))
    return until_ms


async def end_hold(cluster: Cluster) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    source_health = await order_store.stored(znode)
    assert source_health is not None
    await order_store.withdraw(znode, over=source_health)


@pytest.mark.parametrize("for_s", [60.0, None], ids=["with an end", "until an operator ends it"])
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_an_open_ledger_waits_for_the_end_of_the_hold(
    state: LedgerState, for_s: float | None
) -> None:
    cluster = await open_ledger(state=state)
    fenced = watch_fencing(cluster)
    until_ms = await hold(cluster, for_s=for_s, reason="3 of 5 went")
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.HOLD)
    assert blocked_by(outcome).until_ms == until_ms
    assert outcome.sighting is None, "no grace is begun"
    assert blocked_by(outcome).facts.comment == "3 of 5 went"
    assert fenced == []


async def test_a_hold_that_begins_during_the_grace_prevents_fencing() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        assert first.reason is Reason.OPEN_LEDGER_GRACE
        await hold(cluster)
        await asyncio.sleep(1)
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.reason is Reason.HOLD
    assert fenced == []


async def test_an_abandoned_recovery_is_not_continued_during_a_hold() -> None:
    cluster = await open_ledger(state=LedgerState.IN_RECOVERY)
    for entry_id in range(10):
        cluster.bookie(B2).lose(LEDGER, entry_id)
    fenced = watch_fencing(cluster)
    await hold(cluster)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.HOLD
    assert fenced == []


async def test_closed_ledgers_and_fragments_are_repaired_as_usual() -> None:
    closed = await lost_b2()
    await hold(closed)

    assert (await repair(closed)).kind is OutcomeKind.DONE
    await closed.assert_whole()

    partly_closed = await open_ledger((B1, B2, B4), THREE, starts=(0, 5))
    await hold(partly_closed)
    await partly_closed.kill(B2)

    assert (await repair(partly_closed)).reason is Reason.HOLD
    first, last = await partly_closed.ensembles()
    assert B2 not in first
    assert last == THREE


@pytest.mark.parametrize("is_ended_by_hand", [True, False])
async def test_open_ledgers_are_inspected_again_when_the_hold_ends(
    is_ended_by_hand: bool,
) -> None:
    cluster = await open_ledger()
    await hold(cluster, for_s=600)
    await cluster.kill(B2)
    patient = ReplicationSettings(retry_min_s=500, retry_max_s=5_000, open_ledger_grace_s=1)

    async with cluster.node(settings=patient) as node, working(node):
        await asyncio.sleep(300 if is_ended_by_hand else 599)
        assert (await cluster.metadata()).state is LedgerState.OPEN
        if is_ended_by_hand:
            await end_hold(cluster)
        await asyncio.sleep(20)

    assert (await cluster.metadata()).is_closed
    await cluster.assert_whole()
    await cluster.assert_queue_empty()
