"""Repairs that leave a ledger open: it cannot be recovered now, or it lacks no bookie."""

import asyncio

import pytest

from ledgers.errors import LockLostError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId, LedgerState
from replication.open_ledgers import GRACES_MAX
from replication.reasons import Facts, Reason
from replication.repair import OutcomeKind
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import DIGEST, Cluster, entry_bytes
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import (
    THREE,
    blocked_by,
    make_whole,
    open_ledger,
    repair,
    watch_fencing,
)
from tests.replication.watched import settle

scene = open_ledger

# --- Recovery -------------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieRecoveryTest.testBookieRecoveryOnInRecoveryLedger",
    "LedgerRecoveryTest.testLedgerRecoveryWithNotEnoughBookies",
    verdict="same",
)
async def test_a_ledger_with_too_few_bookies_for_a_recovery_waits(cluster: Cluster) -> None:
    await cluster.kill(B2, B3)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        failed = await node.repairer.repair(lease, first.sighting)

        assert (failed.kind, failed.reason) == (OutcomeKind.WAITING, Reason.NO_COVERAGE)
        assert blocked_by(failed).facts.absent == (B2, B3)
        assert not blocked_by(failed).facts.reformatted
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

        await cluster.revive(B3)
        await settle()
        again = await node.repairer.repair(lease)
        outcome = await node.repairer.repair(lease, again.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 9
    await cluster.assert_whole()


async def test_registered_bookies_that_do_not_answer_may_do_so_soon(cluster: Cluster) -> None:
    await cluster.kill(B2)
    cluster.bookie(B3).is_down = True

    async with cluster.node() as node:
        lease, first = await node.first_try()
        failed = await node.repairer.repair(lease, first.sighting)

    assert failed.reason is Reason.RECOVERY_FAILED


async def test_rule_s5_a_reformatted_bookies_no_is_never_believed(cluster: Cluster) -> None:
    """The recovery may be tried any number of times."""
    cluster.put(LEDGER, 10, B1, B2)  # acknowledged by two of three
    await cluster.reformat(B2)
    await cluster.kill(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        for _ in range(3):
            first = await node.repairer.repair(lease)
            failed = await node.repairer.repair(lease, first.sighting)
            assert failed.reason is Reason.END_UNPROVEN
            assert blocked_by(failed).facts.reformatted == (B2,)

        await cluster.revive(B1)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 10
    await cluster.assert_whole()


async def test_the_no_of_a_bookie_with_a_finding_is_not_believed(cluster: Cluster) -> None:
    """B2 lost its index and kept its identity."""
    cluster.put(LEDGER, 10, B1, B2)
    for entry_id in range(11):
        cluster.bookie(B2).lose(LEDGER, entry_id)
    await cluster.store.create(
        PATHS.finding(LEDGER), b'{"bookies": ["%s"]}' % B2.encode(), with_parents=True
    )
    await cluster.kill(B1)
    await cluster.mark(B1, B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        failed = await node.repairer.repair(lease, first.sighting)

    assert failed.reason is Reason.END_UNPROVEN
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY


async def test_rule_s3_a_ledger_is_not_closed_without_its_lock(cluster: Cluster) -> None:
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        await cluster.store.delete(PATHS.lock(LEDGER))

        with pytest.raises(LockLostError):
            await node.repairer.repair(lease, first.sighting)

    assert (await cluster.metadata()).state is LedgerState.OPEN


# --- All bookies are registered, but copies are missing -------------------------------------------


async def test_rule_s6_a_reformatted_member_keeps_the_mark(cluster: Cluster) -> None:
    """The open fragment is not fenced."""
    fenced = watch_fencing(cluster)
    await cluster.reformat(B2)

    async with cluster.node() as node:
        lease, outcome = await node.first_try()

        assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
        assert fenced == []
        assert cluster.bookies.copied_count == 0

        versioned = await cluster.manager.read(LEDGER)
        closed = versioned.metadata.closed(last_entry_id=9, length=100)
        await cluster.manager.write(LEDGER, closed, read_as=versioned)
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


@pytest.mark.compat(
    "LedgerCloseTest.testLedgerCheckerShouldnotSelectInvalidLastFragments", verdict="same"
)
async def test_an_open_ledger_that_lacks_nothing_is_unmarked_and_open(cluster: Cluster) -> None:
    fenced = watch_fencing(cluster)

    outcome = await repair(cluster)

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
async def test_an_open_ledger_without_a_known_end_waits(
    cluster: Cluster, error: type[UnavailableError], reason: Reason
) -> None:
    for bookie in THREE:
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=error))

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, reason)
    assert await cluster.marked() == [LEDGER]


async def test_rule_s12_open_members_get_no_copies_in_place() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=14)
    cluster.bookie(B3).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 9)

    outcome = await repair(cluster)

    (b1, b2, other), last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert (b1, b2) == (B1, B2)
    assert other not in {B1, B2, B3, B4}
    assert last == (B1, B4, B3)
    assert 0 not in cluster.bookie(B3).entry_ids(LEDGER)
    assert 9 in cluster.bookie(B2).entry_ids(LEDGER)
    assert not cluster.violations
    assert (await cluster.metadata()).state is LedgerState.OPEN


# --- Entries after the last one that is known to be acknowledged ----------------------------------


async def lose_tail(cluster: Cluster, *bookies: BookieId) -> None:
    """Reformat these bookies at a time at which no auditor marks their ledgers."""
    for bookie in bookies:
        await cluster.reformat(bookie)


async def unconfirmed_ledger(
    state: LedgerState = LedgerState.OPEN, *, ack_quorum: int = 2
) -> Cluster:
    """Return a ledger of four acknowledged entries whose LAC is still -1."""
    cluster = await Cluster.start()
    await cluster.write_ledger(THREE, last=-1, write_quorum=3, ack_quorum=ack_quorum, state=state)
    await cluster.mark()
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, *THREE, lac=-1)
    return cluster


async def test_an_abandoned_recovery_is_completed_for_a_missing_copy() -> None:
    """The copy is missing after the LAC."""
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    await lose_tail(cluster, B2)

    await make_whole(cluster)

    assert (await cluster.metadata()).last_entry_id == 3


async def test_the_last_copies_are_saved_if_no_end_can_be_proven() -> None:
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    await lose_tail(cluster, B1, B2)

    async with cluster.node() as node:
        lease, failed = await node.first_try()
        assert failed.reason is Reason.END_UNPROVEN
        assert "0 to 3 remain" in blocked_by(failed).facts.errors[0]

        assert (await node.repairer.repair(lease)).kind is OutcomeKind.DONE

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert all(cluster.has_good_copy(bookie, LEDGER, i) for bookie in THREE for i in range(4))


async def test_a_reformatted_member_without_the_last_entries_keeps_it() -> None:
    """The open ledger keeps its mark: the entries are after the LAC."""
    cluster = await unconfirmed_ledger()
    fenced = watch_fencing(cluster)
    await lose_tail(cluster, B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
    assert blocked_by(outcome).facts == Facts(lacking=(B2,))
    assert fenced == []


async def test_entries_on_their_way_to_a_new_bookie_are_waited_for() -> None:
    cluster = await unconfirmed_ledger()
    await lose_tail(cluster, B2)
    for entry_id in range(3):
        cluster.put(LEDGER, entry_id, B2, lac=-1)

    async with cluster.node() as node:
        lease = await node.lease()
        repairing = asyncio.create_task(node.repairer.repair(lease))
        await cluster.clock.sleep(0.5)
        cluster.put(LEDGER, 3, B2, lac=-1)

        assert (await repairing).kind is OutcomeKind.DONE


async def test_an_entry_on_too_few_bookies_is_saved_after_the_grace() -> None:
    """On fewer than an ack quorum."""
    cluster = await unconfirmed_ledger()
    await lose_tail(cluster, B1, B2)

    async with cluster.node() as node:
        lease, waits = await node.first_try()
        assert waits.reason is Reason.OPEN_LEDGER_GRACE
        assert (blocked_by(waits).facts.entry_ids, blocked_by(waits).facts.lacking) == (
            (0,),
            (B1, B2),
        )

        cluster.put(LEDGER, 4, *THREE, lac=-1)
        alive = await node.repairer.repair(lease, waits.sighting)
        assert alive.reason is Reason.WRITER_ALIVE
        assert blocked_by(alive).facts.lacking == (B1, B2)
        assert blocked_by(alive).facts.grace_count == 2

        failed = await node.repairer.repair(lease, alive.sighting)
        assert failed.reason is Reason.END_UNPROVEN
        assert (await node.repairer.repair(lease)).kind is OutcomeKind.DONE

    assert all(cluster.has_good_copy(bookie, LEDGER, i) for bookie in THREE for i in range(5))


async def test_an_impossible_last_entry_is_not_believed() -> None:
    """Its id is beyond all bounds, and its digest is none."""
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    entry = entry_bytes(LEDGER, 1 << 40)
    cluster.bookie(B2).add(
        entry[:-1] + bytes([entry[-1] ^ 1]),
        master_key=DIGEST.master_key,
        is_recovery=False,
        is_high_priority=False,
    )

    assert (await repair(cluster)).kind is OutcomeKind.DONE


async def test_different_missing_entries_of_members_are_no_danger() -> None:
    """Each entry has copies enough on the other members."""
    cluster = await unconfirmed_ledger()
    fenced = watch_fencing(cluster)
    await lose_tail(cluster, B1, B2)
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, (B1, B2)[entry_id % 2], lac=-1)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
    assert fenced == []


async def test_a_writer_is_not_fenced_for_a_slow_new_bookie() -> None:
    """Every acknowledgement needs all three; B2 gets all entries minutes late."""
    cluster = await unconfirmed_ledger(ack_quorum=3)
    await lose_tail(cluster, B2)
    fenced = watch_fencing(cluster)

    async with cluster.node() as node:
        lease, sighting = await node.lease(), None
        for last in range(2 * GRACES_MAX):
            cluster.put(LEDGER, last, B2, lac=-1)
            cluster.put(LEDGER, last + 4, B1, B3, lac=-1)
            outcome = await node.repairer.repair(lease, sighting)
            assert outcome.reason is Reason.OPEN_LEDGER_GRACE
            sighting = outcome.sighting

    assert fenced == []
