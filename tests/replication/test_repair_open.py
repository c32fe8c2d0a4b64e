"""Repairs of ledgers that are not closed: the grace, and what follows it."""

import asyncio

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState, Segment
from replication.open_ledgers import GRACES_MAX
from replication.orders import HoldOrder, OrderStore, hold_znode
from replication.reasons import Reason
from replication.repair import Outcome, OutcomeKind
from replication.settings import ReplicationSettings
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import (
    THREE,
    blocked_by,
    drain,
    lost_b2,
    make_whole,
    once_while_copying,
    open_ledger,
    repair,
    repair_with,
    watch_fencing,
)
from tests.replication.watched import settle

scene = open_ledger


async def repair_through_graces(node: Node, *, grace_count: int = 1) -> Outcome:
    """Repair as the worker does, without the waiting."""
    lease, outcome = await node.first_try()
    for _ in range(grace_count):
        outcome = await node.repairer.repair(lease, outcome.sighting)
    return outcome


def last_entry(cluster: Cluster, entry_id: int) -> None:
    """Add an entry as a writer that continues unaware."""
    cluster.put(LEDGER, entry_id, *THREE)


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_an_open_ledger_is_left_to_its_writer_at_first(state: LedgerState) -> None:
    """It lacks a bookie, and its grace begins."""
    cluster = await open_ledger(state=state)
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.OPEN_LEDGER_GRACE)
    assert outcome.sighting is not None
    assert fenced == []
    assert (await cluster.manager.read(LEDGER)).version == 0
    assert await cluster.marked() == [LEDGER]


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsUR",
    verdict="better",
    why="no other ledger waits for the grace",
)
@pytest.mark.compat(
    "TestReplicationWorker.testReplicateEmptyOpenStateLedger",
    "BookieAutoRecoveryTest.testOpenLedgers",
    verdict="same",
)
@pytest.mark.parametrize("last", [-1, 0, 9], ids=["empty", "one entry", "ten entries"])
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_after_the_grace_it_is_recovered_closed_and_repaired(
    state: LedgerState, last: int
) -> None:
    cluster = await open_ledger(state=state, last=last)
    await cluster.kill(B2)

    async with cluster.node() as node:
        outcome = await repair_through_graces(node)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, last)
    assert metadata.length == 10 * (last + 1)
    assert B2 not in metadata.bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@pytest.mark.compat(
    "G36", verdict="other", why="nothing is fenced, so a running writer can still close the ledger"
)
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_without_an_ack_quorum_an_open_ledger_is_never_closed(state: LedgerState) -> None:
    """As in Java, but without fencing it. Its earlier fragment is repaired."""
    cluster = await open_ledger(
        (B1, B2, B3), (B1, B2, B4), starts=(0, 5), state=state, ack_quorum=0
    )
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        outcome = await repair_through_graces(node)

    metadata = await cluster.metadata()
    assert outcome.reason is Reason.END_UNPROVEN
    assert (metadata.state, metadata.ack_quorum) == (state, 0)
    assert B2 not in metadata.segments[0].ensemble
    assert metadata.last_segment.ensemble == (B1, B2, B4)
    assert fenced == []
    assert not cluster.violations

    await cluster.revive(B2)
    async with cluster.node() as node:
        assert (await repair_with(node)).kind is OutcomeKind.DONE


async def test_a_writer_that_replaced_the_bookie_is_not_fenced(cluster: Cluster) -> None:
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        versioned = await cluster.manager.read(LEDGER)
        changed = versioned.metadata.with_segment(Segment(first_entry_id=10, ensemble=(B1, B4, B3)))
        await cluster.manager.write(LEDGER, changed, read_as=versioned)
        outcome = await node.repairer.repair(lease, first.sighting)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert fenced == []
    assert metadata.state is LedgerState.OPEN
    assert metadata.last_segment == changed.last_segment
    assert B2 not in metadata.bookies
    assert all(cluster.good_copies(LEDGER, metadata, entry_id) == 3 for entry_id in range(10))
    assert not cluster.violations


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsNotUR",
    "TestLedgerFragmentReplication.testReplicateLFFailsOnlyOnLastUnClosedFragments",
    verdict="same",
)
async def test_rule_s12_closed_fragments_are_repaired_without_fencing() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B4, B5), starts=(0, 10), last=14)
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    outcome = await repair(cluster, local=B4)

    first, last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert fenced == []
    assert last == (B1, B4, B5)
    assert first[1] in {B6, B7}
    assert cluster.bookies.targets == [first[1]]
    await cluster.assert_queue_empty()


async def test_rule_s4_closed_fragments_do_not_wait_for_the_grace() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B2, B4), starts=(0, 10), last=14)
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, outcome = await node.first_try()
        first, last = await cluster.ensembles()

        assert outcome.reason is Reason.OPEN_LEDGER_GRACE
        assert outcome.entry_count == 10
        assert B2 not in first
        assert first[1] not in last, "not its LAC is to be what a reader sees (rule S12)"
        assert last == (B1, B2, B4)
        assert fenced == []
        assert (await cluster.metadata()).state is LedgerState.OPEN
        assert await cluster.marked() == [LEDGER]
        assert node.written == [await cluster.manager.read(LEDGER)]

        outcome = await node.repairer.repair(lease, outcome.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.ensembles())[0] == first
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_rule_s2_a_writers_change_during_a_copy_is_not_undone() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B2, B4), starts=(0, 10), last=14)
    await cluster.kill(B2)

    async def replace_it(transfer: Transfer) -> None:
        versioned = await cluster.manager.read(LEDGER)
        changed = versioned.metadata.with_segment(Segment(first_entry_id=15, ensemble=(B1, B5, B4)))
        await cluster.manager.write(LEDGER, changed, read_as=versioned)

    once_while_copying(cluster, replace_it)
    outcome = await repair(cluster)

    first, second, last = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert last == (B1, B5, B4)
    assert B2 not in {*first, *second}
    assert not cluster.violations


async def test_closed_fragments_without_target_do_not_stop_the_grace() -> None:
    cluster = await open_ledger((B1, B2, B3), (B1, B2, B3), starts=(0, 10), last=14)
    await cluster.kill(B2, B4, B5, B6, B7)
    cluster.bookies.fail(B3, Op.READ_LAC, Fault(error=UnavailableError))
    before = await cluster.metadata()

    outcome = await repair(cluster)

    assert outcome.reason is Reason.OPEN_LEDGER_GRACE
    assert await cluster.metadata() == before


async def test_rule_s13_adds_on_the_absent_bookie_show_a_writer(cluster: Cluster) -> None:
    fenced = watch_fencing(cluster)
    await cluster.unregister(B2)  # ZooKeeper lost sight of it, the writer did not

    async with cluster.node() as node:
        lease, outcome = await node.first_try()
        for entry_id in range(10, 9 + GRACES_MAX):
            last_entry(cluster, entry_id)
            outcome = await node.repairer.repair(lease, outcome.sighting)
            assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.WRITER_ALIVE)
        assert fenced == []

        last_entry(cluster, 9 + GRACES_MAX)
        outcome = await node.repairer.repair(lease, outcome.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert fenced
    assert (await cluster.metadata()).last_entry_id == 9 + GRACES_MAX
    await cluster.assert_whole()


async def test_rule_s13_an_absent_bookie_without_adds_delays_nothing(cluster: Cluster) -> None:
    await cluster.unregister(B2)

    async with cluster.node() as node:
        outcome = await repair_through_graces(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


async def test_a_ledger_closed_by_its_writer_is_only_repaired(cluster: Cluster) -> None:
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        versioned = await cluster.manager.read(LEDGER)
        closed = versioned.metadata.closed(last_entry_id=9, length=100)
        await cluster.manager.write(LEDGER, closed, read_as=versioned)
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert fenced == []
    await cluster.assert_whole()


async def test_a_ledger_deleted_during_the_grace_is_unmarked(cluster: Cluster) -> None:
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        await cluster.manager.delete(LEDGER, version=0)

        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()


async def test_rule_s5_a_bookie_reformatted_meanwhile_proves_no_end(cluster: Cluster) -> None:
    """It returned empty while the end was determined."""
    cluster.put(LEDGER, 10, B1, B2)  # acknowledged by two of three
    await cluster.kill(B1, B2)
    returning: list[asyncio.Task[None]] = []

    async def come_back_empty() -> None:
        await cluster.wipe(B2)
        await cluster.revive(B2)

    def meanwhile(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        if op is Op.READ_FENCING and bookie == B2 and not returning:
            returning.append(asyncio.create_task(come_back_empty()))
            return Fault(delay_s=0.1)
        return NO_FAULT

    async with cluster.node() as node:
        lease, first = await node.first_try()
        cluster.bookies.faults = meanwhile
        await node.repairer.repair(lease, first.sighting)
        assert returning
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

        await cluster.revive(B1)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).last_entry_id == 10
    await cluster.assert_whole()


async def test_rule_s6_reformatted_bookies_alone_prove_nothing(cluster: Cluster) -> None:
    """Two of three deny any entry; the third, unresponsive, has all of them."""
    await cluster.kill(B1, B2)
    for bookie in (B1, B2):
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
    for op in (Op.READ, Op.READ_LAC):
        cluster.bookies.fail(B3, op, Fault(error=UnavailableError))

    async with cluster.node() as node:
        lease, outcome = await node.first_try()
        assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_ANSWER)
        assert blocked_by(outcome).facts.unresponsive == (B3,)

        for op in (Op.READ, Op.READ_LAC):
            cluster.bookies.stop_failing(B3, op)
        outcome = await node.repairer.repair(lease)
        assert outcome.reason is Reason.OPEN_LEDGER_GRACE


async def test_a_ledger_its_writer_repaired_meanwhile_is_not_fenced(cluster: Cluster) -> None:
    """The lost bookie was asked at that time."""
    await cluster.kill(B2)
    async with cluster.node() as node:
        lease, first = await node.first_try()
        fenced = watch_fencing(cluster)
        inner = cluster.bookies.read

        async def replace_first(bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
            if bookie == B2 and not (await cluster.metadata()).segments[1:]:
                found = await cluster.manager.read(LEDGER)
                changed = Segment(first_entry_id=10, ensemble=(B1, B4, B3))
                await cluster.manager.write(
                    LEDGER, found.metadata.with_segment(changed), read_as=found
                )
            return await inner(bookie, ledger_id, entry_id)

        cluster.bookies.read = replace_first  # type: ignore[method-assign]

        await node.repairer.repair(lease, first.sighting)

    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert fenced == []


# --- During a safety hold nothing is fenced, and everything that needs no fence continues ---------


async def hold(cluster: Cluster, *, for_s: float | None = None, reason: str = "") -> int | None:
    """Order a hold and return its end in wall-clock milliseconds."""
    now_ms = cluster.clock.wall_ms()
    until_ms = None if for_s is None else now_ms + int(for_s * 1000)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    order = HoldOrder(since_ms=now_ms, until_ms=until_ms, reason=reason)
    await order_store.give(znode, order, over=await order_store.stored(znode))
    return until_ms


async def end_hold(cluster: Cluster) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    source_health = await order_store.stored(znode)
    assert source_health is not None
    await order_store.withdraw(znode, over=source_health)


@pytest.mark.parametrize("for_s", [60.0, None], ids=["with an end", "until an operator ends it"])
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
async def test_an_open_ledger_waits_for_the_end_of_the_hold(
    state: LedgerState, for_s: float | None
) -> None:
    cluster = await open_ledger(state=state)
    fenced = watch_fencing(cluster)
    until_ms = await hold(cluster, for_s=for_s, reason="3 of 5 went")
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.HOLD)
    assert blocked_by(outcome).until_ms == until_ms
    assert outcome.sighting is None, "no grace is begun"
    assert blocked_by(outcome).facts.comment == "3 of 5 went"
    assert fenced == []


async def test_a_hold_that_begins_during_the_grace_prevents_fencing(cluster: Cluster) -> None:
    fenced = watch_fencing(cluster)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, first = await node.first_try()
        assert first.reason is Reason.OPEN_LEDGER_GRACE
        await hold(cluster)
        await asyncio.sleep(1)
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.reason is Reason.HOLD
    assert fenced == []


async def test_an_abandoned_recovery_is_not_continued_during_a_hold() -> None:
    cluster = await open_ledger(state=LedgerState.IN_RECOVERY)
    for entry_id in range(10):
        cluster.bookie(B2).lose(LEDGER, entry_id)
    fenced = watch_fencing(cluster)
    await hold(cluster)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.HOLD
    assert fenced == []


async def test_closed_ledgers_and_fragments_are_repaired_as_usual() -> None:
    closed = await lost_b2()
    await hold(closed)

    assert (await repair(closed)).kind is OutcomeKind.DONE
    await closed.assert_whole()

    partly_closed = await open_ledger((B1, B2, B4), THREE, starts=(0, 5))
    await hold(partly_closed)
    await partly_closed.kill(B2)

    assert (await repair(partly_closed)).reason is Reason.HOLD
    first, last = await partly_closed.ensembles()
    assert B2 not in first
    assert last == THREE


@pytest.mark.parametrize("is_ended_by_hand", [True, False])
async def test_open_ledgers_are_inspected_again_when_the_hold_ends(is_ended_by_hand: bool) -> None:
    cluster = await open_ledger()
    await hold(cluster, for_s=600)
    await cluster.kill(B2)
    patient = ReplicationSettings(retry_min_s=500, retry_max_s=5_000, open_ledger_grace_s=1)

    async with cluster.node(settings=patient) as node, working(node):
        await asyncio.sleep(300 if is_ended_by_hand else 599)
        assert (await cluster.metadata()).state is LedgerState.OPEN
        if is_ended_by_hand:
            await end_hold(cluster)
        await asyncio.sleep(20)

    assert (await cluster.metadata()).is_closed
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


# --- Abandoned recoveries of ledgers that lack nothing --------------------------------------------


async def begun() -> Cluster:
    """Return a ledger in recovery with ten entries on three registered bookies."""
    return await open_ledger(state=LedgerState.IN_RECOVERY)


async def test_an_abandoned_recovery_is_completed_before_the_unmark() -> None:
    """Nothing is missing, but its fenced writer can never close the ledger."""
    cluster = await begun()

    await make_whole(cluster)

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    await cluster.assert_queue_empty()


async def test_a_failed_recovery_is_completed_by_its_bookies_return(cluster: Cluster) -> None:
    await cluster.kill(B2, B3)
    async with cluster.node() as node:
        lease, first = await node.first_try()
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

    await make_whole(cluster)

    metadata = await cluster.metadata()
    assert metadata.is_closed
    assert B4 not in metadata.bookies


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
        await cluster.reformat(bookie)
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
