"""Repairs beside a bookie that is registered and does not answer: it costs one time-out, not one a
ledger."""

import pytest

from ledgers.errors import NoAnswerError
from ledgers.health import WAIT_MIN_S
from ledgers.memory.bookies import Fault, Op
from ledgers.model import BookieId
from replication.locks import LedgerLease
from replication.outcome import OutcomeKind
from replication.reasons import Exclusion, Reason
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import Node, working
from tests.replication.repairs import blocked_by
from tests.replication.watched import settle

SILENCE_S = 5.0
OPS = (Op.READ, Op.ADD)


def silence(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.fail(bookie, op, Fault(delay_s=SILENCE_S, error=NoAnswerError))


def mend(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.stop_failing(bookie, op)


async def lost(cluster: Cluster, *ledger_ids: int) -> None:
    """Marked ledgers on B1, B2 and B3, of which B2 is lost."""
    for ledger_id in ledger_ids:
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id, last=0, write_quorum=3)
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)


async def learn(node: Node, ledger_id: int) -> LedgerLease:
    """A first repair finds out."""
    lease = await node.lease(ledger_id)
    assert (await node.repairer.repair(lease)).kind is OutcomeKind.WAITING
    return lease


@in_virtual_time
async def test_the_second_ledger_does_not_wait_for_a_member_that_was_silent_at_the_first() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    silence(cluster, B1)
    async with cluster.node() as node:
        await learn(node, 1)
        before_s = cluster.clock.now_s()

        outcome = await node.repairer.repair(await node.lease(2))

        assert cluster.clock.now_s() - before_s < 1
        assert outcome.reason is Reason.NO_ANSWER
        until_ms = blocked_by(outcome).until_ms
        assert until_ms is not None, "it comes back when the bookie may be asked again"
        assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S
        assert await cluster.ensembles(2) == [(B1, B4, B3)], "what is unknown is not replaced"


@in_virtual_time
async def test_a_target_that_was_silent_is_not_chosen_for_the_next_ledger() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5)
    await lost(cluster, 1, 2)
    silence(cluster, B4)
    async with cluster.node(local=B4) as node:  # among equals the local one comes first
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))
            assert outcome.kind is OutcomeKind.DONE

    assert [t.ledger_id for t, _ in cluster.bookies.transfers if t.target == B4] == [1]
    await cluster.assert_whole(1, 2)


@in_virtual_time
async def test_when_only_quarantine_leaves_no_target_the_ledger_waits_for_its_end() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    silence(cluster, B4)
    async with cluster.node() as node:
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))

            assert outcome.reason is Reason.NO_TARGET
            assert (Exclusion.QUARANTINED, 1) in (blocked_by(outcome).facts.excluded or ())
            until_ms = blocked_by(outcome).until_ms
            assert until_ms is not None
            assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S


@in_virtual_time
async def test_a_bookie_that_registers_anew_is_asked_at_once() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1)
    silence(cluster, B4)
    async with cluster.node() as node:
        lease = await learn(node, 1)

        mend(cluster, B4)
        await cluster.unregister(B4)
        await cluster.register(B4)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole(1)


@pytest.mark.parametrize("silent", [B1, B4], ids=["a member", "the only target"])
@in_virtual_time
async def test_a_bookie_that_hangs_is_asked_once_a_wait_and_all_is_repaired_when_it_answers(
    silent: BookieId,
) -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    ledgers = range(1, 21)
    await lost(cluster, *ledgers)
    silence(cluster, silent)
    async with cluster.node() as node, working(node):
        await cluster.clock.sleep(SILENCE_S + 1)
        cluster.bookies.transfers.clear()
        await cluster.clock.sleep(100)

        asked = [
            t for t, _ in cluster.bookies.transfers if silent in {*t.reads, *t.checks, t.target}
        ]
        assert 1 <= len(asked) <= 3, "the waits double"

        mend(cluster, silent)
        await cluster.clock.sleep(200)

    await cluster.assert_whole(*ledgers)
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_what_a_silent_bookie_demands_is_told_with_the_ledger() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    for bookie in (B1, B4):
        silence(cluster, bookie)
    demand = "the bookie requires authentication (SASL), which bookmender does not support"
    async with cluster.node() as node:
        for bookie in (B1, B4):
            node.quarantine.note_silence(bookie, demand)

        outcome = await node.repairer.repair(await node.lease(1))

    assert outcome.kind is OutcomeKind.WAITING
    blocked = blocked_by(outcome)
    assert all(demand in each.facts.errors for each in (blocked, *blocked.besides))
