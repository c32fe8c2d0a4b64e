"""Repairs that leave a ledger open: it cannot be recovered now, or nobody is missing."""

import pytest

from ledgers.errors import LockLostError, UnauthorizedError, UnavailableError
from ledgers.memory.bookies import Fault, Op
from ledgers.metadata import LedgerState
from replication.outcome import OutcomeKind
from replication.queue import payloads
from replication.reasons import Reason
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, UR
from tests.replication.repairs import THREE, open_ledger, watch_fencing
from tests.replication.watched import settle

# --- Recovery -------------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieRecoveryTest.testBookieRecoveryOnInRecoveryLedger",
    "LedgerRecoveryTest.testLedgerRecoveryWithNotEnoughBookies",
    verdict="same",
)
@in_virtual_time
async def test_too_few_bookies_for_a_recovery_leave_the_ledger_waiting() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)

    async with cluster.node() as node:
        take = await node.take()
        first = await node.repairer.repair(take)
        failed = await node.repairer.repair(take, first.sighting)

        assert (failed.kind, failed.reason) == (OutcomeKind.WAITING, Reason.RECOVERY_FAILED)
        assert "is not believed" not in failed.detail
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

        await cluster.revive(B3)
        await settle()
        again = await node.repairer.repair(take)
        outcome = await node.repairer.repair(take, again.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 9
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s5_a_wiped_bookies_no_is_never_believed_however_often_recovery_is_tried() -> (
    None
):
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)  # acknowledged by two of three
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    await cluster.kill(B1)

    async with cluster.node() as node:
        take = await node.take()
        for _ in range(3):
            first = await node.repairer.repair(take)
            failed = await node.repairer.repair(take, first.sighting)
            assert failed.reason is Reason.RECOVERY_FAILED
            assert (
                f"set up after the ledger was made, so its 'no' is not believed: {B2}"
                in failed.detail
            )

        await cluster.revive(B1)
        await settle()
        outcome = await node.repairer.repair(take)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 10
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s3_a_ledger_is_not_closed_once_its_lock_is_lost() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)

    async with cluster.node() as node:
        take = await node.take()
        first = await node.repairer.repair(take)
        await cluster.store.delete(payloads.lock_path(UR, LEDGER))

        with pytest.raises(LockLostError):
            await node.repairer.repair(take, first.sighting)

    assert (await cluster.metadata()).state is LedgerState.OPEN


# --- Nobody is missing, yet it is not whole -------------------------------------------------------


@in_virtual_time
async def test_rule_s6_a_wiped_member_of_the_open_fragment_keeps_the_mark_and_is_not_fenced() -> (
    None
):
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)

    async with cluster.node() as node:
        take = await node.take()
        outcome = await node.repairer.repair(take)

        assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
        assert fenced == []
        assert cluster.bookies.copied_count == 0

        versioned = await cluster.manager.read(LEDGER)
        closed = versioned.metadata.closed(last_entry_id=9, length=100)
        await cluster.manager.write(LEDGER, closed, read_as=versioned)
        outcome = await node.repairer.repair(take)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


@pytest.mark.compat(
    "LedgerCloseTest.testLedgerCheckerShouldnotSelectInvalidLastFragments",
    verdict="same",
)
@in_virtual_time
async def test_an_open_ledger_that_misses_nothing_is_unmarked_and_left_open() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.take())

    assert outcome.kind is OutcomeKind.DONE
    assert fenced == []
    assert (await cluster.manager.read(LEDGER)).version == 0
    await cluster.assert_queue_empty()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(UnavailableError, Reason.NO_ANSWER, id="they do not answer"),
        pytest.param(UnauthorizedError, Reason.DIGEST_SUSPECT, id="our key is not theirs"),
    ],
)
@in_virtual_time
async def test_without_a_known_end_an_open_ledger_waits(
    error: type[UnavailableError], reason: Reason
) -> None:
    cluster = await open_ledger()
    for bookie in THREE:
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=error))

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.take())

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, reason)
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_rule_s12_a_member_of_the_last_ensemble_is_not_refilled_while_it_is_open() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=14)
    cluster.bookie(B3).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 9)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.take())

    (b1, b2, other), last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert (b1, b2) == (B1, B2)
    assert other not in {B1, B2, B3, B4}
    assert last == (B1, B4, B3)
    assert 0 not in cluster.bookie(B3).entry_ids(LEDGER)
    assert 9 in cluster.bookie(B2).entry_ids(LEDGER)
    assert not cluster.violations
    assert (await cluster.metadata()).state is LedgerState.OPEN
