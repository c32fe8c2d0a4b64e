"""Repairs beside an unresponsive bookie: it costs one timeout, not one for each ledger."""

import pytest

from ledgers.errors import NoAnswerError
from ledgers.health import WAIT_MIN_S
from ledgers.model import BookieId
from replication.reasons import Exclusion, Reason
from replication.repair import OutcomeKind
from replication.work_queue import LedgerLease
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import Node, working
from tests.replication.repairs import blocked_by
from tests.replication.watched import settle

SILENCE_S = 5.0
OPS = (Op.READ, Op.ADD)


def stop_answering(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.fail(bookie, op, Fault(delay_s=SILENCE_S, error=NoAnswerError))


def answer_again(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.stop_failing(bookie, op)


async def lost(cluster: Cluster, *ledger_ids: int) -> None:
    """Mark ledgers on B1, B2 and B3, of which B2 is lost."""
    for ledger_id in ledger_ids:
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id, last=0, write_quorum=3)
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)


async def learn(node: Node, ledger_id: int) -> LedgerLease:
    """Run a first repair, which finds out that the bookie is unresponsive."""
    lease = await node.lease(ledger_id)
    assert (await node.repairer.repair(lease)).kind is OutcomeKind.WAITING
    return lease


async def test_the_next_ledger_does_not_wait_for_unresponsive_ones() -> None:
    """It did not answer for the first ledger."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B1)
    async with cluster.node() as node:
        await learn(node, 1)
        before_s = cluster.clock.now_s()

        outcome = await node.repairer.repair(await node.lease(2))

        assert cluster.clock.now_s() - before_s < 1
        assert outcome.reason is Reason.NO_ANSWER
        until_ms = blocked_by(outcome).until_ms
        assert until_ms is not None, "it is tried when the bookie may be asked again"
        assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S
        assert await cluster.ensembles(2) == [(B1, B4, B3)], "what is unknown is not replaced"


async def test_an_unresponsive_target_is_not_chosen_next() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B4)
    async with cluster.node(local=B4) as node:  # among equals the local one comes first
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))
            assert outcome.kind is OutcomeKind.DONE

    assert [t.ledger_id for t, _ in cluster.bookies.transfers if t.target == B4] == [1]
    await cluster.assert_whole(1, 2)


async def test_the_ledger_waits_if_quarantine_leaves_no_target() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B4)
    async with cluster.node() as node:
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))

            assert outcome.reason is Reason.NO_TARGET
            assert (Exclusion.QUARANTINED, 1) in (blocked_by(outcome).facts.excluded or ())
            until_ms = blocked_by(outcome).until_ms
            assert until_ms is not None
            assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S


async def test_a_bookie_that_registers_again_is_asked_at_once() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1)
    stop_answering(cluster, B4)
    async with cluster.node() as node:
        lease = await learn(node, 1)

        answer_again(cluster, B4)
        await cluster.unregister(B4)
        await cluster.register(B4)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole(1)


@pytest.mark.parametrize("unresponsive", [B1, B4], ids=["a member", "the only target"])
async def test_a_hanging_bookie_is_probed_and_all_is_repaired_later(
    unresponsive: BookieId,
) -> None:
    """One probe per wait."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    ledgers = range(1, 21)
    await lost(cluster, *ledgers)
    stop_answering(cluster, unresponsive)
    async with cluster.node() as node, working(node):
        await cluster.clock.sleep(SILENCE_S + 1)
        cluster.bookies.transfers.clear()
        await cluster.clock.sleep(100)

        asked = [
            t
            for t, _ in cluster.bookies.transfers
            if unresponsive in {*t.reads, *t.checks, t.target}
        ]
        assert 1 <= len(asked) <= 3, "the waits double"

        answer_again(cluster, unresponsive)
        await cluster.clock.sleep(200)

    await cluster.assert_whole(*ledgers)
    await cluster.assert_queue_empty()


async def test_the_reason_of_a_refusal_is_noted_with_the_ledger() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    for bookie in (B1, B4):
        stop_answering(cluster, bookie)
    demand = "the bookie requires authentication (SASL), which bookmender does not support"
    async with cluster.node() as node:
        for bookie in (B1, B4):
            node.quarantine.note_silence(bookie, demand)

        outcome = await node.repairer.repair(await node.lease(1))

    assert outcome.kind is OutcomeKind.WAITING
    blocked = blocked_by(outcome)
    assert all(demand in each.facts.errors for each in (blocked, *blocked.besides))
