"""Repairs during which bookies refuse, appear or disappear."""

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import FencedError, LocalLimitError, ReadOnlyError, UnavailableError
from ledgers.model import BookieId
from replication.reasons import Exclusion, Reason
from replication.repair import OutcomeKind
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER
from tests.replication.repairs import (
    blocked_by,
    lost_b2,
    once_copied,
    once_while_copying,
    repair_with,
)
from tests.replication.watched import settle

# --- Targets --------------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
)
@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
async def test_rule_s11_another_target_is_chosen_when_one_refuses(
    error: type[UnavailableError],
) -> None:
    cluster = await lost_b2()
    for refusing in (B4, B5, B6):
        cluster.bookies.fail(refusing, Op.ADD, Fault(error=error))

    async with cluster.node(local=B4) as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]
    assert len(cluster.bookies.targets) == len(set(cluster.bookies.targets))
    await cluster.assert_whole()


async def test_rule_s11_a_bookie_that_deleted_the_ledger_is_no_target() -> None:
    """It refuses adds to a ledger that it deleted as garbage."""
    cluster = await lost_b2()
    cluster.put(LEDGER, 0, B4)
    cluster.bookie(B4).collect(LEDGER)

    async with cluster.node(local=B4) as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B4 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
)
async def test_rule_s11_a_refusal_lasts_until_the_bookie_restarts() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    cluster.put(LEDGER, 0, B4)
    cluster.bookie(B4).collect(LEDGER)
    offers: list[BookieId] = []

    async def note(transfer: Transfer) -> None:
        if transfer.target is not None:
            offers.append(transfer.target)

    cluster.bookies.before_transfer = note
    async with cluster.node() as node:
        lease = await node.lease()
        for _ in range(3):
            outcome = await node.repairer.repair(lease)
            assert outcome.reason is Reason.NO_TARGET
            assert (Exclusion.REFUSED, 1) in (blocked_by(outcome).facts.excluded or ())
        assert offers == [B4]

        await cluster.kill(B4)
        cluster.bookie(B4).crash()
        await cluster.revive(B4)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


async def test_rule_s11_an_unresponsive_bookie_may_be_the_next_target() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=UnavailableError))

    async with cluster.node() as node:
        lease = await node.lease()
        outcome = await node.repairer.repair(lease)
        assert outcome.reason is Reason.NO_TARGET

        cluster.bookies.stop_failing(B4, Op.ADD)
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


async def test_a_target_is_not_called_failed_while_this_process_lacks_a_file() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=LocalLimitError))

    async with cluster.node() as node:
        lease = await node.lease()
        waits = await node.repairer.repair(lease)
        cluster.bookies.stop_failing(B4, Op.ADD)
        outcome = await node.repairer.repair(lease)

    assert (waits.reason, len(blocked_by(waits).facts.errors)) == (Reason.NO_ANSWER, 1)
    assert outcome.kind is OutcomeKind.DONE
    assert B4 in (await cluster.metadata()).bookies


async def test_if_all_bookies_refuse_the_ledger_waits_for_a_target() -> None:
    cluster = await lost_b2(B1, B2, B3, B4, B5)
    for refusing in (B4, B5):
        cluster.bookies.fail(refusing, Op.ADD, Fault(error=ReadOnlyError))

    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_TARGET)
    assert (Exclusion.REFUSED, 2) in (blocked_by(outcome).facts.excluded or ())
    assert await cluster.ensembles() == [(B1, B2, B3)]


async def test_a_failing_target_does_not_waste_the_others_copies() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5, B6)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    await cluster.kill(B2, B3)
    await cluster.mark(B2, B3)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=ReadOnlyError))

    async with cluster.node(local=B4) as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).bookies == {B1, B5, B6}
    assert cluster.bookies.copied_count == 20
    await cluster.assert_whole()


async def test_rule_s1_a_target_that_disappears_is_not_named() -> None:
    cluster = await lost_b2()
    gone: list[BookieId] = []

    async def go(transfer: Transfer) -> None:
        assert transfer.target is not None
        gone.append(transfer.target)
        await cluster.kill(transfer.target)

    once_copied(cluster, go)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & set(gone)
    await cluster.assert_whole()


async def test_rule_s1_a_target_registered_again_is_not_named() -> None:
    """It may have another identity."""
    cluster = await lost_b2()

    async def come_back_empty(transfer: Transfer) -> None:
        assert transfer.target is not None
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, come_back_empty)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


# --- Members --------------------------------------------------------------------------------------


async def test_rule_s6_a_member_lost_after_its_verdict_is_replaced() -> None:
    """This happens before the mark is deleted."""
    cluster = await lost_b2()
    await cluster.mark(B2, B3)  # so that its loss would make no other mark

    async def go(transfer: Transfer) -> None:
        await cluster.kill(B3)

    once_copied(cluster, go)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & {B2, B3}
    await cluster.assert_whole()


async def test_rule_s6_a_ledger_that_was_found_whole_is_judged_again(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B3)

    async with cluster.node() as node:
        lease = await node.lease()

        async def go(transfer: Transfer) -> None:
            if B3 in transfer.reads:  # it said that it has everything
                cluster.bookies.after_transfer = None
                await cluster.kill(B3)

        cluster.bookies.after_transfer = go
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert B3 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


async def test_rule_s6_after_a_long_copy_all_members_are_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.repair.SECOND_CHECK_ENTRIES", 6)
    cluster = await lost_b2()

    async def lose_silently(transfer: Transfer) -> None:
        cluster.bookie(B3).lose(LEDGER, 1)

    once_copied(cluster, lose_silently)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


async def test_a_lost_bookie_back_during_the_copy_is_not_needed() -> None:
    cluster = await lost_b2()

    async def come_back(transfer: Transfer) -> None:
        await cluster.revive(B2)

    once_while_copying(cluster, come_back)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 7)
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()
