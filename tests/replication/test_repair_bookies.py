"""Repairs during which bookies refuse, appear or disappear."""

from dataclasses import replace

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import (
    FencedError,
    LocalLimitError,
    LockLostError,
    NoAnswerError,
    ReadOnlyError,
    UnavailableError,
)
from ledgers.health import WAIT_MIN_S
from ledgers.model import BookieId
from ledgers.store import SetData
from replication.reasons import Exclusion, Reason
from replication.repair import ROUNDS_MAX, OutcomeKind
from replication.work_queue import LedgerLease
from tests.memory.bookies import Fault, Op
from tests.memory.store import Fault as StoreFault
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import (
    blocked_by,
    lost_b2,
    make_whole,
    once_copied,
    once_while_copying,
    repair,
    repair_with,
    touch,
)
from tests.replication.watched import settle

scene = lost_b2

# --- Targets --------------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
)
@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
async def test_rule_s11_another_target_is_chosen_when_one_refuses(
    cluster: Cluster, error: type[UnavailableError]
) -> None:
    for refusing in (B4, B5, B6):
        cluster.bookies.fail(refusing, Op.ADD, Fault(error=error))

    await make_whole(cluster, local=B4)

    assert await cluster.ensembles() == [(B1, B7, B3)]
    assert len(cluster.bookies.targets) == len(set(cluster.bookies.targets))


async def test_rule_s11_a_bookie_that_deleted_the_ledger_is_no_target(cluster: Cluster) -> None:
    """It refuses adds to a ledger that it deleted as garbage."""
    cluster.put(LEDGER, 0, B4)
    cluster.bookie(B4).collect(LEDGER)

    await make_whole(cluster, local=B4)

    assert B4 not in (await cluster.metadata()).bookies


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
        lease, outcome = await node.first_try()
        assert outcome.reason is Reason.NO_TARGET

        cluster.bookies.stop_failing(B4, Op.ADD)
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


async def test_a_target_is_not_called_failed_while_this_process_lacks_a_file() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=LocalLimitError))

    async with cluster.node() as node:
        lease, waits = await node.first_try()
        cluster.bookies.stop_failing(B4, Op.ADD)
        outcome = await node.repairer.repair(lease)

    assert (waits.reason, len(blocked_by(waits).facts.errors)) == (Reason.NO_ANSWER, 1)
    assert outcome.kind is OutcomeKind.DONE
    assert B4 in (await cluster.metadata()).bookies


async def test_a_failing_target_does_not_waste_the_others_copies() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5, B6)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    await cluster.kill(B2, B3)
    await cluster.mark(B2, B3)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=ReadOnlyError))

    await make_whole(cluster, local=B4)

    assert (await cluster.metadata()).bookies == {B1, B5, B6}
    assert cluster.bookies.copied_count == 20


async def test_rule_s1_a_target_that_disappears_is_not_named(cluster: Cluster) -> None:
    gone: list[BookieId] = []

    async def go(transfer: Transfer) -> None:
        assert transfer.target is not None
        gone.append(transfer.target)
        await cluster.kill(transfer.target)

    once_copied(cluster, go)
    await make_whole(cluster)

    assert not (await cluster.metadata()).bookies & set(gone)


async def test_rule_s1_a_target_registered_again_is_not_named(cluster: Cluster) -> None:
    """It may have another identity."""

    async def come_back_empty(transfer: Transfer) -> None:
        assert transfer.target is not None
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, come_back_empty)
    await make_whole(cluster)


# --- Members --------------------------------------------------------------------------------------


async def test_rule_s6_a_member_lost_after_its_verdict_is_replaced(cluster: Cluster) -> None:
    """This happens before the mark is deleted."""
    await cluster.mark(B2, B3)  # so that its loss would make no other mark

    async def go(transfer: Transfer) -> None:
        await cluster.kill(B3)

    once_copied(cluster, go)
    await make_whole(cluster)

    assert not (await cluster.metadata()).bookies & {B2, B3}


async def test_rule_s6_a_ledger_that_was_found_whole_is_judged_again() -> None:
    cluster = await Cluster.start()
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
    await make_whole(cluster)


async def test_a_lost_bookie_back_during_the_copy_is_not_needed(cluster: Cluster) -> None:
    async def come_back(transfer: Transfer) -> None:
        await cluster.revive(B2)

    once_while_copying(cluster, come_back)
    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 7)
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


# --- Repairs beside an unresponsive bookie --------------------------------------------------------

SILENCE_S = 5.0
OPS = (Op.READ, Op.ADD)


def stop_answering(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.fail(bookie, op, Fault(delay_s=SILENCE_S, error=NoAnswerError))


def answer_again(cluster: Cluster, bookie: BookieId) -> None:
    for op in OPS:
        cluster.bookies.stop_failing(bookie, op)


async def lost(cluster: Cluster, *ledger_ids: int) -> None:
    """Mark ledgers on B1, B2 and B3, of which B2 is lost."""
    for ledger_id in ledger_ids:
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id, last=0, write_quorum=3)
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)


async def learn(node: Node, ledger_id: int) -> LedgerLease:
    """Run a first repair, which finds out that the bookie is unresponsive."""
    lease = await node.lease(ledger_id)
    assert (await node.repairer.repair(lease)).kind is OutcomeKind.WAITING
    return lease


async def test_the_next_ledger_does_not_wait_for_unresponsive_ones() -> None:
    """It did not answer for the first ledger."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B1)
    async with cluster.node() as node:
        await learn(node, 1)
        before_s = cluster.clock.now_s()

        outcome = await node.repairer.repair(await node.lease(2))

        assert cluster.clock.now_s() - before_s < 1
        assert outcome.reason is Reason.NO_ANSWER
        until_ms = blocked_by(outcome).until_ms
        assert until_ms is not None, "it is tried when the bookie may be asked again"
        assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S
        assert await cluster.ensembles(2) == [(B1, B4, B3)], "what is unknown is not replaced"


async def test_an_unresponsive_target_is_not_chosen_next() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B4)
    async with cluster.node(local=B4) as node:  # among equals the local one comes first
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))
            assert outcome.kind is OutcomeKind.DONE

    assert [t.ledger_id for t, _ in cluster.bookies.transfers if t.target == B4] == [1]
    await cluster.assert_whole(1, 2)


async def test_the_ledger_waits_if_quarantine_leaves_no_target() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    stop_answering(cluster, B4)
    async with cluster.node() as node:
        for ledger_id in (1, 2):
            outcome = await node.repairer.repair(await node.lease(ledger_id))

            assert outcome.reason is Reason.NO_TARGET
            assert (Exclusion.QUARANTINED, 1) in (blocked_by(outcome).facts.excluded or ())
            until_ms = blocked_by(outcome).until_ms
            assert until_ms is not None
            assert 0 < until_ms - cluster.clock.wall_ms() <= 1000 * WAIT_MIN_S


async def test_a_bookie_that_registers_again_is_asked_at_once() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1)
    stop_answering(cluster, B4)
    async with cluster.node() as node:
        lease = await learn(node, 1)

        answer_again(cluster, B4)
        await cluster.register_again(B4)
        await settle()
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole(1)


@pytest.mark.parametrize("unresponsive", [B1, B4], ids=["a member", "the only target"])
async def test_a_hanging_bookie_is_probed_and_all_is_repaired_later(unresponsive: BookieId) -> None:
    """One probe per wait."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    ledgers = range(1, 21)
    await lost(cluster, *ledgers)
    stop_answering(cluster, unresponsive)
    async with cluster.node() as node, working(node):
        await cluster.clock.sleep(SILENCE_S + 1)
        cluster.bookies.transfers.clear()
        await cluster.clock.sleep(100)

        asked = [
            t
            for t, _ in cluster.bookies.transfers
            if unresponsive in {*t.reads, *t.checks, t.target}
        ]
        assert 1 <= len(asked) <= 3, "the waits double"

        answer_again(cluster, unresponsive)
        await cluster.clock.sleep(200)

    await cluster.assert_whole(*ledgers)
    await cluster.assert_queue_empty()


async def test_the_reason_of_a_refusal_is_noted_with_the_ledger() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await lost(cluster, 1, 2)
    for bookie in (B1, B4):
        stop_answering(cluster, bookie)
    demand = "the bookie requires authentication (SASL), which bookmender does not support"
    async with cluster.node() as node:
        for bookie in (B1, B4):
            node.quarantine.note_silence(bookie, demand)

        outcome = await node.repairer.repair(await node.lease(1))

    assert outcome.kind is OutcomeKind.WAITING
    blocked = blocked_by(outcome)
    assert all(demand in each.facts.errors for each in (blocked, *blocked.besides))


# --- Other writers of the metadata ----------------------------------------------------------------


@pytest.mark.compat("MetadataUpdateLoopTest.testConflictOnWrite", verdict="same")
async def test_rule_s3_after_a_conflict_nothing_is_copied_twice(cluster: Cluster) -> None:
    async def conflict(transfer: Transfer) -> None:
        await touch(cluster)

    once_copied(cluster, conflict)
    await make_whole(cluster)

    assert cluster.bookies.copied_count == 7
    assert (await cluster.metadata()).bookies == {B1, B3, *cluster.bookies.targets}


async def test_rule_s3_a_restarted_target_gets_everything_again(cluster: Cluster) -> None:
    async def conflict_and_restart(transfer: Transfer) -> None:
        assert transfer.target is not None
        await touch(cluster)
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, conflict_and_restart)
    await make_whole(cluster)

    assert cluster.bookies.copied_count == 14


@pytest.mark.compat(
    "BookieRecoveryTest.testMetadataConflictWithRecovery",
    "MetadataUpdateLoopTest.testConflictOnWriteBothWritingSame",
    verdict="same",
)
@pytest.mark.compat(
    "G17",
    verdict="better",
    why="by bookie index; after any conflict the metadata is read again and the repair is "
    "planned again",
)
async def test_rule_s2_another_repairs_changes_are_not_undone(cluster: Cluster) -> None:
    async def replaced_by_java(transfer: Transfer) -> None:
        versioned = await cluster.manager.read(LEDGER)
        for entry_id in cluster.bookie(B2).entry_ids(LEDGER):
            cluster.put(LEDGER, entry_id, B7)
        [segment] = versioned.metadata.segments
        changed = replace(versioned.metadata, segments=(segment.with_bookies({1: B7}),))
        await cluster.manager.write(LEDGER, changed, read_as=versioned)

    once_while_copying(cluster, replaced_by_java)
    await make_whole(cluster)

    assert await cluster.ensembles() == [(B1, B7, B3)]


async def test_metadata_that_never_stops_changing_defers_the_repair(cluster: Cluster) -> None:
    async def keep_conflicting(transfer: Transfer) -> None:
        await touch(cluster)

    cluster.bookies.before_transfer = keep_conflicting
    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.CONFLICTS)
    assert (await cluster.manager.read(LEDGER)).version <= 4 * ROUNDS_MAX
    assert await cluster.marked() == [LEDGER]


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldCleanTheLedgerFromUnderReplicationIfLedgerAlreadyDeleted",
    verdict="better",
)
@pytest.mark.parametrize(
    "other_blocked", [False, True], ids=["alone", "beside what cannot be repaired"]
)
async def test_a_ledger_deleted_during_the_copy_is_unmarked(other_blocked: bool) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B4, B5, B6), starts=(0, 10), last=19)
    await cluster.kill(B2)
    await cluster.mark(B2)
    if other_blocked:
        cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    async def delete(transfer: Transfer) -> None:
        await cluster.manager.delete(LEDGER, version=0)

    once_while_copying(cluster, delete)
    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()


# --- The queue ------------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testManyFailures", verdict="same")
async def test_rule_s6_a_ledger_marked_again_stays_marked(cluster: Cluster) -> None:
    """It is repaired."""

    async def mark_again(transfer: Transfer) -> None:
        await cluster.mark(B2, B3)

    once_while_copying(cluster, mark_again)
    async with cluster.node() as node:
        outcome = await repair_with(node)

        assert outcome.kind is OutcomeKind.MARKED_AGAIN
        assert len(await cluster.locked()) == 1
        assert node.written == [await cluster.manager.read(LEDGER)]
    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()


@pytest.mark.compat(
    "TestReplicationWorker.testRWShutDownInTheCaseOfZKOperationFailures",
    verdict="other",
    why="after a write with unknown outcome the state is read back, and a failed ledger is "
    "released; only the end of the session ends the worker's run",
)
@pytest.mark.parametrize("fault", StoreFault)
async def test_a_repair_whose_last_reply_was_lost_is_made_once(
    cluster: Cluster, fault: StoreFault
) -> None:
    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, SetData, fault)
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 7
    assert (await cluster.manager.read(LEDGER)).version == 1
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_rule_s3_a_lost_lock_ends_the_repair_without_a_write(cluster: Cluster) -> None:
    async def lose_lock(transfer: Transfer) -> None:
        await cluster.store.delete(PATHS.lock(LEDGER))

    once_while_copying(cluster, lose_lock)
    async with cluster.node() as node:
        with pytest.raises(LockLostError):
            await repair_with(node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert await cluster.marked() == [LEDGER]


async def test_rule_s3_after_a_lost_reply_and_a_new_mark_it_ends(cluster: Cluster) -> None:
    """The lost reply was to the completion; the repair no longer has the lock."""
    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, SetData, StoreFault.LOST_REPLY)
        is_completed = node.queue.is_completed

        async def marked_again_first(lease: LedgerLease) -> bool:
            await cluster.mark(B3)
            return await is_completed(lease)

        node.queue.is_completed = marked_again_first  # type: ignore[method-assign]
        with pytest.raises(LockLostError):
            await node.repairer.repair(lease)

    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()
