"""Recoveries that were begun and never ended, where nothing is missing: ended before the mark
goes."""

from ledgers.model import LedgerState
from replication.orders import HoldOrder, hold_znode
from replication.outcome import OutcomeKind
from replication.reasons import Reason
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import THREE, drain, open_ledger, repair, watch_fencing
from tests.replication.watched import settle


async def begun() -> Cluster:
    """Ten entries on three bookies, all of them there."""
    return await open_ledger(state=LedgerState.IN_RECOVERY)


@in_virtual_time
async def test_a_recovery_that_never_ended_is_ended_before_its_mark_goes_though_nothing_is_missing() -> (
    None
):
    """Its writer is locked out: who else would close it?"""
    cluster = await begun()

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_one_that_was_begun_in_vain_is_ended_once_its_bookies_are_back() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)
    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        failed = await node.repairer.repair(lease, first.sighting)
        assert failed.reason is Reason.NO_COVERAGE
        for bookie in (B2, B3):
            await cluster.revive(bookie)
        await settle()

        assert (await node.repairer.repair(lease)).kind is OutcomeKind.DONE

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    await cluster.assert_whole()


@in_virtual_time
async def test_closed_fragments_of_a_recovery_that_never_ended_do_not_take_the_mark_with_them() -> (
    None
):
    cluster = await open_ledger((B1, B2, B4), THREE, starts=(0, 5), state=LedgerState.IN_RECOVERY)
    await cluster.kill(B4)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    metadata = await cluster.metadata()
    assert metadata.is_closed
    assert B4 not in metadata.bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_without_a_missing_copy_one_that_was_begun_is_not_ended_while_a_hold_stands() -> None:
    cluster = await begun()
    fenced = watch_fencing(cluster)
    hold = HoldOrder(since_ms=cluster.clock.wall_ms(), reason="3 of 7 went")
    await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)

    assert (await repair(cluster)).reason is Reason.HOLD

    assert fenced == []


@in_virtual_time
async def test_rule_s16_nor_where_a_bookie_drains_that_is_not_to_be_fenced_for_it() -> None:
    """Even without an entry, of which it could be said that it is there."""
    cluster = await open_ledger(state=LedgerState.IN_RECOVERY, last=-1)
    fenced = watch_fencing(cluster)
    await drain(cluster, B2)

    await repair(cluster)

    assert fenced == []


@in_virtual_time
async def test_one_whose_end_cannot_be_proven_any_more_is_left_to_an_operator_as_ever() -> None:
    cluster = await begun()
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
        for entry_id in range(10):
            cluster.put(LEDGER, entry_id, bookie)
    fenced = watch_fencing(cluster)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
