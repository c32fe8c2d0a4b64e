"""Repairs that leave a ledger open: it cannot be recovered now, or nobody is missing."""

import asyncio

import pytest

from ledgers.errors import LockLostError, UnauthorizedError, UnavailableError
from ledgers.memory.bookies import Fault, Op
from ledgers.model import BookieId, LedgerState
from replication.open_ledgers import GRACES_MAX
from replication.outcome import OutcomeKind
from replication.reasons import Reason
from tests.replication.cluster import DIGEST, Cluster, entry_bytes, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import THREE, open_ledger, repair, watch_fencing
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
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        failed = await node.repairer.repair(lease, first.sighting)

        assert (failed.kind, failed.reason) == (OutcomeKind.WAITING, Reason.NO_COVERAGE)
        assert failed.detail.endswith(f"; away, and wanted back: {B2}, {B3}")
        assert "is not believed" not in failed.detail
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

        await cluster.revive(B3)
        await settle()
        again = await node.repairer.repair(lease)
        outcome = await node.repairer.repair(lease, again.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 9
    await cluster.assert_whole()


@in_virtual_time
async def test_bookies_that_are_registered_and_do_not_answer_just_now_may_do_so_soon() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    cluster.bookie(B3).is_down = True

    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        failed = await node.repairer.repair(lease, first.sighting)

    assert failed.reason is Reason.RECOVERY_FAILED


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
        lease = await node.lease()
        for _ in range(3):
            first = await node.repairer.repair(lease)
            failed = await node.repairer.repair(lease, first.sighting)
            assert failed.reason is Reason.END_UNPROVEN
            assert (
                f"set up after the ledger was made, so its 'no' is not believed: {B2}"
                in failed.detail
            )

        await cluster.revive(B1)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 10
    await cluster.assert_whole()


@in_virtual_time
async def test_nor_is_that_of_one_whose_copies_a_check_found_missing() -> None:
    """B2 lost its index and kept its identity."""
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    for entry_id in range(11):
        cluster.bookie(B2).lose(LEDGER, entry_id)
    await cluster.store.create(
        PATHS.finding(LEDGER), b'{"bookies": ["%s"]}' % B2.encode(), with_parents=True
    )
    await cluster.kill(B1)
    await cluster.mark(B1, B2)

    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        failed = await node.repairer.repair(lease, first.sighting)

    assert failed.reason is Reason.END_UNPROVEN
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY


@in_virtual_time
async def test_rule_s3_a_ledger_is_not_closed_once_its_lock_is_lost() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        await cluster.store.delete(PATHS.lock(LEDGER))

        with pytest.raises(LockLostError):
            await node.repairer.repair(lease, first.sighting)

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
        lease = await node.lease()
        outcome = await node.repairer.repair(lease)

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
    "LedgerCloseTest.testLedgerCheckerShouldnotSelectInvalidLastFragments",
    verdict="same",
)
@in_virtual_time
async def test_an_open_ledger_that_misses_nothing_is_unmarked_and_left_open() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.lease())

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
        outcome = await node.repairer.repair(await node.lease())

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, reason)
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_rule_s12_a_member_of_the_last_ensemble_is_not_refilled_while_it_is_open() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=14)
    cluster.bookie(B3).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 9)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.lease())

    (b1, b2, other), last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert (b1, b2) == (B1, B2)
    assert other not in {B1, B2, B3, B4}
    assert last == (B1, B4, B3)
    assert 0 not in cluster.bookie(B3).entry_ids(LEDGER)
    assert 9 in cluster.bookie(B2).entry_ids(LEDGER)
    assert not cluster.violations
    assert (await cluster.metadata()).state is LedgerState.OPEN


# --- Entries after the last one that is known to be acknowledged ------------------------------------


async def lose_tail(cluster: Cluster, *bookies: BookieId) -> None:
    """Wipe them, in a moment in which nobody marks what they had."""
    for bookie in bookies:
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)


async def unconfirmed_ledger(
    state: LedgerState = LedgerState.OPEN, *, ack_quorum: int = 2
) -> Cluster:
    """Four entries, acknowledged before the first of them told of any: the LAC is -1."""
    cluster = await Cluster.start()
    await cluster.write_ledger(THREE, last=-1, write_quorum=3, ack_quorum=ack_quorum, state=state)
    await cluster.mark()
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, *THREE, lac=-1)
    return cluster


@in_virtual_time
async def test_a_recovery_that_never_ended_is_ended_where_a_copy_after_the_lac_is_missing() -> None:
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    await lose_tail(cluster, B2)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert (await cluster.metadata()).last_entry_id == 3
    await cluster.assert_whole()


@in_virtual_time
async def test_the_last_copies_are_saved_where_no_end_can_be_proven() -> None:
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    await lose_tail(cluster, B1, B2)

    async with cluster.node() as node:
        lease = await node.lease()
        failed = await node.repairer.repair(lease)
        assert failed.reason is Reason.END_UNPROVEN
        assert "0 to 3 are left, and have their copies again" in failed.detail

        assert (await node.repairer.repair(lease)).kind is OutcomeKind.DONE

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert all(cluster.holds(bookie, LEDGER, i) for bookie in THREE for i in range(4))


@in_virtual_time
async def test_an_open_ledger_keeps_its_mark_while_a_wiped_member_lacks_entries_after_the_lac() -> (
    None
):
    cluster = await unconfirmed_ledger()
    fenced = watch_fencing(cluster)
    await lose_tail(cluster, B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
    assert outcome.detail.startswith(f"{B2} lacks entries of a fragment that is not closed yet; ")
    assert fenced == []


@in_virtual_time
async def test_copies_that_are_on_their_way_to_a_bookie_set_up_lately_are_waited_for() -> None:
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


@in_virtual_time
async def test_an_entry_left_on_fewer_than_an_ack_quorum_is_saved_after_the_writers_grace() -> None:
    cluster = await unconfirmed_ledger()
    await lose_tail(cluster, B1, B2)

    async with cluster.node() as node:
        lease = await node.lease()
        waits = await node.repairer.repair(lease)
        assert waits.reason is Reason.OPEN_LEDGER_GRACE
        assert f"lacks copies of entry 0 on {B1}, {B2}" in waits.detail

        cluster.put(LEDGER, 4, *THREE, lac=-1)
        alive = await node.repairer.repair(lease, waits.sighting)
        assert alive.reason is Reason.WRITER_ALIVE
        assert f"{B1}, {B2}, which lack entry 0" in alive.detail

        failed = await node.repairer.repair(lease, alive.sighting)
        assert failed.reason is Reason.END_UNPROVEN
        assert (await node.repairer.repair(lease)).kind is OutcomeKind.DONE

    assert all(cluster.holds(bookie, LEDGER, i) for bookie in THREE for i in range(5))


@in_virtual_time
async def test_a_bookie_that_lies_about_how_far_a_ledger_reaches_is_not_believed() -> None:
    """Its last entry has an id beyond all bounds, and a digest that is none."""
    cluster = await unconfirmed_ledger(LedgerState.IN_RECOVERY)
    entry = entry_bytes(LEDGER, 1 << 40)
    cluster.bookie(B2).add(
        entry[:-1] + bytes([entry[-1] ^ 1]),
        master_key=DIGEST.master_key,
        is_recovery=False,
        is_high_priority=False,
    )

    assert (await repair(cluster)).kind is OutcomeKind.DONE


@in_virtual_time
async def test_copies_that_different_members_lack_of_different_entries_endanger_none() -> None:
    cluster = await unconfirmed_ledger()
    fenced = watch_fencing(cluster)
    await lose_tail(cluster, B1, B2)
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, (B1, B2)[entry_id % 2], lac=-1)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
    assert fenced == []


@in_virtual_time
async def test_a_writer_is_not_fenced_for_what_takes_its_time_to_a_bookie_set_up_lately() -> None:
    """Every acknowledgement needs all three; B2 gets all that is sent to it, minutes late."""
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
