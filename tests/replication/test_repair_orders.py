"""Repairs under an operator's orders: bookies that drain, bookies that are away for maintenance."""

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import UnavailableError
from ledgers.memory.bookies import Fault, Op
from ledgers.model import LedgerState
from replication.outcome import OutcomeKind
from replication.reasons import Exclusion, Facts, Reason
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER
from tests.replication.repairs import (
    assert_still_marked,
    blocked_by,
    drain,
    keep_away,
    once_copied,
    repair,
    repair_with,
    watch_fencing,
)
from tests.replication.watched import settle

# --- Draining -------------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s16_a_draining_member_is_replaced_although_it_serves() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 7)
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_rule_s16_several_drained_at_once_move_in_one_round_and_one_compare_and_set() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3), (B4, B2, B1), starts=(0, 10), last=19)
    await drain(cluster, B1, B2, B4)

    outcome = await repair(cluster)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert metadata.bookies <= {B3, B5, B6, B7}
    assert (await cluster.manager.read(LEDGER)).version == before.version + 1
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s16_a_draining_bookie_gives_what_nobody_else_has() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    for entry_id in range(10):
        cluster.bookie(B1).lose(LEDGER, entry_id)
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s16_what_a_draining_bookie_lacks_is_never_written_back_to_it() -> None:
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


@in_virtual_time
async def test_rule_s11_draining_bookies_and_those_under_maintenance_are_no_targets() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await drain(cluster, B4, B5)
    await keep_away(cluster, B6)

    outcome = await repair(cluster, local=B4)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]


@in_virtual_time
async def test_who_is_only_drained_is_named_as_the_cure_of_a_loss_that_finds_no_target() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await drain(cluster, B3, B4)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_TARGET
    assert blocked_by(outcome).facts.draining == (B4,)


@in_virtual_time
async def test_rule_s16_an_open_fragment_of_a_draining_bookie_waits_and_is_not_fenced() -> None:
    cluster = await Cluster.start()
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
@in_virtual_time
async def test_rule_s16_with_the_order_to_fence_an_open_ledger_is_closed_after_the_grace(
    state: LedgerState,
) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=state)
    await cluster.mark()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)

    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)

        assert (first.kind, first.reason) == (OutcomeKind.WAITING, Reason.OPEN_LEDGER_GRACE)
        assert blocked_by(first).facts.draining == (B2,)
        assert fenced == []

        cluster.put(LEDGER, 10, B1, B2, B3)  # its writer goes on: he was given his time
        outcome = await node.repairer.repair(lease, first.sighting)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert fenced
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 10)
    assert B2 not in metadata.bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s16_without_that_order_not_even_an_abandoned_recovery_is_taken_up() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.IN_RECOVERY)
    fenced = watch_fencing(cluster)
    await drain(cluster, B2)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.RECOVERY_UNENDED
    assert blocked_by(outcome).facts == Facts(draining=(B2,))
    assert fenced == []


@in_virtual_time
async def test_rule_s6_a_drain_ordered_while_a_ledger_is_repaired_is_seen_before_the_unmark() -> (
    None
):
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2)

    async def order(transfer: Transfer) -> None:
        await drain(cluster, B3)

    once_copied(cluster, order)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & {B2, B3}
    await cluster.assert_whole()


# --- Maintenance ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_that_is_away_for_maintenance_is_waited_for() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3))
    until_ms = await keep_away(cluster, B2)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
    assert blocked_by(outcome).until_ms == until_ms
    assert blocked_by(outcome).facts.in_maintenance == (B2,)
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


@in_virtual_time
async def test_what_else_a_ledger_misses_is_repaired_while_a_bookie_is_away() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3, B4))
    await keep_away(cluster, B2)
    await cluster.kill(B2, B4)

    outcome = await repair(cluster)

    [(b1, b2, b3, other)] = await cluster.ensembles()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
    assert (b1, b2, b3) == (B1, B2, B3)
    assert other in {B5, B6, B7}
    assert not cluster.violations


@in_virtual_time
async def test_a_bookie_that_is_silent_within_its_window_is_away_too() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    until_ms = await keep_away(cluster, B2)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.reason, blocked_by(outcome).until_ms) == (Reason.MAINTENANCE, until_ms)


@in_virtual_time
async def test_a_bookie_that_is_back_within_its_window_is_read_like_any_other() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await keep_away(cluster, B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 in (await cluster.metadata()).bookies


@in_virtual_time
async def test_what_a_bookie_under_maintenance_lacks_goes_elsewhere() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await keep_away(cluster, B2)
    cluster.bookie(B2).lose(LEDGER, 0)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_an_open_ledger_is_not_fenced_before_the_window_of_its_bookie_is_over() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.mark()
    fenced = watch_fencing(cluster)
    until_ms = await keep_away(cluster, B2, for_s=60)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease = await node.lease()
        away = await node.repairer.repair(lease)

        assert (away.kind, away.reason) == (OutcomeKind.WAITING, Reason.MAINTENANCE)
        assert blocked_by(away).until_ms == until_ms
        assert fenced == []

        await cluster.clock.sleep(61)
        await settle()
        first = await node.repairer.repair(lease)
        assert first.reason is Reason.OPEN_LEDGER_GRACE
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert fenced
    await cluster.assert_whole()


@in_virtual_time
async def test_an_open_ledger_whose_end_nobody_tells_meanwhile_waits_for_the_window() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.OPEN)
    until_ms = await keep_away(cluster, B2)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.reason, blocked_by(outcome).until_ms) == (Reason.MAINTENANCE, until_ms)
    assert blocked_by(outcome).facts.in_maintenance == (B2,)


@in_virtual_time
async def test_time_alone_does_not_help_a_ledger_that_waits_for_more_than_a_window() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3, B4))
    await keep_away(cluster, B2)
    await cluster.kill(B2, B4)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_TARGET
    assert Reason.MAINTENANCE in blocked_by(outcome).all_reasons
    assert blocked_by(outcome).until_ms is None
