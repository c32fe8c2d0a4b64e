"""Repairs under an operator's orders: draining bookies, and bookies in maintenance."""

import asyncio

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from replication.reasons import Exclusion, Facts, Reason
from replication.repair import DONE, OutcomeKind
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, lease_attempts, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, working
from tests.replication.repairs import (
    assert_still_marked,
    blocked_by,
    drain,
    make_whole,
    once_copied,
    order_maintenance,
    repair,
    watch_fencing,
)
from tests.replication.watched import settle

# --- Draining -------------------------------------------------------------------------------------


async def test_rule_s16_a_working_draining_member_is_replaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 7)
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_rule_s16_several_draining_members_move_in_one_round(cluster: Cluster) -> None:
    """And in one compare-and-set."""
    before = await cluster.write_ledger((B1, B2, B3), (B4, B2, B1), starts=(0, 10), last=19)
    await drain(cluster, B1, B2, B4)

    await make_whole(cluster)

    metadata = await cluster.metadata()
    assert metadata.bookies <= {B3, B5, B6, B7}
    assert (await cluster.manager.read(LEDGER)).version == before.version + 1


async def test_rule_s16_a_draining_bookie_is_a_source(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    for entry_id in range(10):
        cluster.bookie(B1).lose(LEDGER, entry_id)
    await drain(cluster, B2)

    await make_whole(cluster)

    assert B2 not in (await cluster.metadata()).bookies


async def test_rule_s16_a_draining_bookie_gets_no_copies_in_place() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lose(LEDGER, 0)
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_TARGET)
    excluded = blocked_by(outcome).facts.excluded
    assert excluded == ((Exclusion.MEMBER, 2), (Exclusion.DRAINING, 1))
    assert cluster.bookies.copied_count == 0
    await assert_still_marked(cluster)


async def test_rule_s11_draining_bookies_are_no_targets(cluster: Cluster) -> None:
    """Bookies in maintenance are no targets either."""
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await drain(cluster, B4, B5)
    await order_maintenance(cluster, B6)

    outcome = await repair(cluster, local=B4)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]


async def test_a_drain_that_excludes_the_only_target_is_named() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await drain(cluster, B3, B4)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_TARGET
    assert blocked_by(outcome).facts.draining == (B4,)


async def test_rule_s16_an_open_fragment_of_a_drain_is_not_fenced(cluster: Cluster) -> None:
    await cluster.write_ledger(
        (B1, B2, B3), (B2, B4, B5), starts=(0, 5), write_quorum=3, state=LedgerState.OPEN
    )
    fenced = watch_fencing(cluster)
    await drain(cluster, B2)

    outcome = await repair(cluster)

    first, last = await cluster.ensembles()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_FRAGMENT)
    assert blocked_by(outcome).facts == Facts(draining=(B2,))
    assert fenced == []
    assert B2 not in first, "the closed fragment has moved"
    assert last == (B2, B4, B5)
    await assert_still_marked(cluster)


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_rule_s16_with_the_order_it_is_fenced_after_the_grace(
    cluster: Cluster, state: LedgerState
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=state)
    await cluster.mark()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)

    async with cluster.node() as node:
        lease, first = await node.first_try()

        assert (first.kind, first.reason) == (OutcomeKind.WAITING, Reason.OPEN_LEDGER_GRACE)
        assert blocked_by(first).facts.draining == (B2,)
        assert fenced == []

        cluster.put(LEDGER, 10, B1, B2, B3)  # its writer continues: the grace gave it time
        outcome = await node.repairer.repair(lease, first.sighting)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert fenced
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 10)
    assert B2 not in metadata.bookies
    await cluster.assert_whole()


async def test_rule_s16_without_it_no_abandoned_recovery_is_continued(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.IN_RECOVERY)
    fenced = watch_fencing(cluster)
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.RECOVERY_UNENDED
    assert blocked_by(outcome).facts == Facts(draining=(B2,))
    assert fenced == []


async def test_rule_s6_a_drain_ordered_during_a_repair_is_seen(cluster: Cluster) -> None:
    """Before the mark is deleted."""
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2)

    async def order(transfer: Transfer) -> None:
        await drain(cluster, B3)

    once_copied(cluster, order)
    await make_whole(cluster)

    assert not (await cluster.metadata()).bookies & {B2, B3}


# --- Maintenance ----------------------------------------------------------------------------------


async def test_a_bookie_in_maintenance_is_waited_for(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2, B3))
    until_ms = await order_maintenance(cluster, B2)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
    assert blocked_by(outcome).until_ms == until_ms
    assert blocked_by(outcome).facts.in_maintenance == (B2,)
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


async def test_the_rest_is_repaired_while_a_bookie_is_in_maintenance(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3, B4))
    await order_maintenance(cluster, B2)
    await cluster.kill(B2, B4)

    outcome = await repair(cluster)

    [(b1, b2, b3, other)] = await cluster.ensembles()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
    assert (b1, b2, b3) == (B1, B2, B3)
    assert other in {B5, B6, B7}
    assert not cluster.violations


async def test_an_unresponsive_bookie_in_maintenance_counts_as_absent(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    until_ms = await order_maintenance(cluster, B2)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.reason, blocked_by(outcome).until_ms) == (Reason.MAINTENANCE, until_ms)


async def test_a_bookie_back_within_its_window_is_read_like_any_other(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await order_maintenance(cluster, B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 in (await cluster.metadata()).bookies


async def test_entries_missing_in_maintenance_go_to_another_bookie(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await order_maintenance(cluster, B2)
    cluster.bookie(B2).lose(LEDGER, 0)

    await make_whole(cluster)

    assert B2 not in (await cluster.metadata()).bookies


async def test_an_open_ledger_is_not_fenced_before_its_window_ends(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.mark()
    fenced = watch_fencing(cluster)
    until_ms = await order_maintenance(cluster, B2, for_s=60)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, absent = await node.first_try()

        assert (absent.kind, absent.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
        assert blocked_by(absent).until_ms == until_ms
        assert fenced == []

        await cluster.clock.sleep(61)
        await settle()
        first = await node.repairer.repair(lease)
        assert first.reason is Reason.OPEN_LEDGER_GRACE
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert fenced
    await cluster.assert_whole()


async def test_an_unknown_end_waits_for_the_end_of_the_window(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.OPEN)
    until_ms = await order_maintenance(cluster, B2)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.reason, blocked_by(outcome).until_ms) == (Reason.MAINTENANCE, until_ms)
    assert blocked_by(outcome).facts.in_maintenance == (B2,)


async def test_a_ledger_with_further_obstacles_has_no_known_time() -> None:
    """It waits for more than the end of the window."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3, B4))
    await order_maintenance(cluster, B2)
    await cluster.kill(B2, B4)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_TARGET
    assert Reason.MAINTENANCE in blocked_by(outcome).all_reasons
    assert blocked_by(outcome).until_ms is None


# --- Ledgers that are marked for their placement --------------------------------------------------

RACKS = {B1: "/a", B2: "/a", B3: "/a", B4: "/b", B5: "/c"}
HOUR_S = 3_600.0


async def misplaced(*bookies: BookieId) -> Cluster:
    """Return a whole ledger on B1 and B2 in one rack, marked for that."""
    cluster = await Cluster.start(*bookies)
    await cluster.write_ledger((B1, B2))
    await cluster.mark()
    return cluster


@pytest.mark.compat(
    "TestReplicationWorker.testRepairedNotAdheringPlacementPolicyLedgerFragmentsOnRack",
    verdict="same",
)
async def test_a_ledger_marked_for_its_placement_moves_to_another_rack() -> None:
    cluster = await misplaced(B1, B2, B3, B4)

    outcome = await repair(cluster, racks=RACKS, moves_misplaced=True)

    [ensemble] = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert B4 in ensemble
    assert all(cluster.has_good_copy(B4, LEDGER, entry_id) for entry_id in range(10))
    assert outcome.entry_count == 10
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_the_ledger_is_only_unmarked_if_moves_are_not_wanted() -> None:
    cluster = await misplaced()

    assert await repair(cluster, racks=RACKS) == DONE

    assert await cluster.ensembles() == [(B1, B2)]
    await cluster.assert_queue_empty()


async def test_a_ledger_marked_for_a_returned_bookie_is_only_unmarked(cluster: Cluster) -> None:
    """Its mark asks for that bookie's copies, not for a better placement."""
    await cluster.write_ledger((B1, B2))
    await cluster.mark(B2)

    outcome = await repair(cluster, racks=RACKS, moves_misplaced=True)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 0)
    assert await cluster.ensembles() == [(B1, B2)]
    await cluster.assert_queue_empty()


@pytest.mark.compat(
    "G18",
    verdict="better",
    why="the ledger waits, without a lock, for a better bookie; it is inspected at most once an "
    "hour",
)
async def test_without_a_better_placement_the_ledger_waits() -> None:
    """It is moved when a bookie appears."""
    cluster = await misplaced(B1, B2, B3)
    taken_s = lease_attempts(cluster)
    async with cluster.node(racks=RACKS, moves_misplaced=True) as node, working(node):
        await asyncio.sleep(6 * HOUR_S)

        [note] = await node.notes.read_all([LEDGER])
        assert note.reason is Reason.MISPLACED
        assert "at least 2 racks" in note.blocked.facts.errors[0]
        assert await cluster.locked() == []
        assert len([at_s for at_s in taken_s if at_s > taken_s[0] + 3 * HOUR_S]) <= 4
        assert await cluster.ensembles() == [(B1, B2)]

        await cluster.register(B4)
        assert await until(cluster, lambda: queue_empty(cluster)) < 30

    assert B4 in (await cluster.ensembles())[0]
    await cluster.assert_whole()
