"""Abandoned recoveries of ledgers that lack nothing: they are completed before the mark is
deleted."""

from ledgers.model import LedgerState
from replication.orders import HoldOrder, hold_znode
from replication.reasons import Reason
from replication.repair import OutcomeKind
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import THREE, drain, open_ledger, repair, watch_fencing
from tests.replication.watched import settle


async def begun() -> Cluster:
    """Return a ledger in recovery with ten entries on three registered bookies."""
    return await open_ledger(state=LedgerState.IN_RECOVERY)


async def test_an_abandoned_recovery_is_completed_before_the_unmark() -> None:
    """Nothing is missing, but its fenced writer can never close the ledger."""
    cluster = await begun()

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_a_failed_recovery_is_completed_by_its_bookies_return() -> None:
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


async def test_closed_fragments_of_an_abandoned_recovery_keep_the_mark() -> None:
    cluster = await open_ledger((B1, B2, B4), THREE, starts=(0, 5), state=LedgerState.IN_RECOVERY)
    await cluster.kill(B4)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    metadata = await cluster.metadata()
    assert metadata.is_closed
    assert B4 not in metadata.bookies
    await cluster.assert_whole()


async def test_during_a_hold_a_whole_ledger_stays_in_recovery() -> None:
    cluster = await begun()
    fenced = watch_fencing(cluster)
    hold = HoldOrder(since_ms=cluster.clock.wall_ms(), reason="3 of 7 went")
    await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)

    assert (await repair(cluster)).reason is Reason.HOLD

    assert fenced == []


async def test_rule_s16_a_drain_without_fence_order_leaves_it_too() -> None:
    """Not even of an empty ledger."""
    cluster = await open_ledger(state=LedgerState.IN_RECOVERY, last=-1)
    fenced = watch_fencing(cluster)
    await drain(cluster, B2)

    await repair(cluster)

    assert fenced == []


async def test_a_recovery_with_an_unprovable_end_needs_an_operator() -> None:
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


async def test_a_ledger_in_recovery_that_misses_a_bookie_is_not_said_to_be_left_to_its_writer() -> (
    None
):
    cluster = await open_ledger(state=LedgerState.IN_RECOVERY)
    await cluster.kill(B2)
    await cluster.mark(B2)

    async with cluster.node() as node:
        blocked = (await node.repairer.repair(await node.lease())).blocked

    assert blocked is not None
    assert (blocked.reason, blocked.facts.is_in_recovery) == (Reason.OPEN_LEDGER_GRACE, True)
