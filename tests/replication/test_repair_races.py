"""Repairs during which something else happens: other writers, lost replies, bookies that come and go."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import FencedError, LockLostError, ReadOnlyError, UnavailableError
from ledgers.memory_bookies import Fault, Op
from ledgers.memory_store import Fault as StoreFault
from ledgers.metadata import BookieId
from ledgers.store import SetData
from replication import payloads
from replication.outcome import DONE, Outcome, OutcomeKind
from replication.plan import Reason
from replication.queue import Take
from replication.repair import ROUNDS_MAX
from tests.replication.cluster import Cluster, fault_once, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, UR, Node


async def lost_b2(*bookies: BookieId) -> Cluster:
    """A marked ledger on B1, B2 and B3, of which B2 is lost."""
    cluster = await Cluster.start(*bookies)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


def once_while_copying(cluster: Cluster, action: Callable[[Transfer], Awaitable[None]]) -> None:
    """``action`` happens right before the first entries are copied."""

    async def act(transfer: Transfer) -> None:
        if transfer.target is not None:
            cluster.bookies.before_transfer = None
            await action(transfer)

    cluster.bookies.before_transfer = act


def once_copied(cluster: Cluster, action: Callable[[Transfer], Awaitable[None]]) -> None:
    """``action`` happens when the target has acknowledged its entries, before they are named."""

    async def act(transfer: Transfer) -> None:
        if transfer.target is not None:
            cluster.bookies.after_transfer = None
            await action(transfer)

    cluster.bookies.after_transfer = act


async def repair(node: Node) -> Outcome:
    return await node.repairer.repair(await node.take())


async def touch(cluster: Cluster) -> None:
    """Somebody else writes the metadata, and changes nothing that matters."""
    versioned = await cluster.manager.read(LEDGER)
    await cluster.manager.write(LEDGER, versioned.metadata, read_as=versioned)


# --- Other writers of the metadata ----------------------------------------------------------------


@in_virtual_time
async def test_rule_s3_after_a_conflict_nothing_is_copied_a_second_time() -> None:
    cluster = await lost_b2()

    async def conflict(transfer: Transfer) -> None:
        await touch(cluster)

    once_copied(cluster, conflict)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 7
    assert (await cluster.metadata()).bookies == {B1, B3, *cluster.bookies.targets}
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s3_a_target_that_lived_through_a_restart_is_sent_everything_again() -> None:
    cluster = await lost_b2()

    async def conflict_and_restart(transfer: Transfer) -> None:
        assert transfer.target is not None
        await touch(cluster)
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, conflict_and_restart)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 14
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s2_what_another_repair_did_meanwhile_is_not_undone() -> None:
    cluster = await lost_b2()

    async def replaced_by_java(transfer: Transfer) -> None:
        versioned = await cluster.manager.read(LEDGER)
        for entry_id in cluster.bookie(B2).entry_ids(LEDGER):
            cluster.put(LEDGER, entry_id, B7)
        [segment] = versioned.metadata.segments
        changed = replace(versioned.metadata, segments=(segment.with_bookies({1: B7}),))
        await cluster.manager.write(LEDGER, changed, read_as=versioned)

    once_while_copying(cluster, replaced_by_java)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]
    await cluster.assert_whole()


@in_virtual_time
async def test_metadata_that_never_rests_is_given_up_for_now() -> None:
    cluster = await lost_b2()

    async def keep_conflicting(transfer: Transfer) -> None:
        await touch(cluster)

    cluster.bookies.before_transfer = keep_conflicting
    async with cluster.node() as node:
        outcome = await repair(node)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.CONFLICTS)
    assert (await cluster.manager.read(LEDGER)).version <= 4 * ROUNDS_MAX
    assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize("other_blocked", [False, True], ids=["alone", "beside what cannot be"])
@in_virtual_time
async def test_a_ledger_that_is_deleted_while_it_is_copied_is_unmarked(
    other_blocked: bool,
) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B4, B5, B6), starts=(0, 10), last=19)
    await cluster.kill(B2)
    await cluster.mark(B2)
    if other_blocked:
        cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    async def delete(transfer: Transfer) -> None:
        await cluster.manager.delete(LEDGER, version=0)

    once_while_copying(cluster, delete)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()


# --- The queue ------------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s6_what_is_marked_again_meanwhile_is_repaired_and_stays_marked() -> None:
    cluster = await lost_b2()

    async def mark_again(transfer: Transfer) -> None:
        await cluster.mark(B2, B3)

    once_while_copying(cluster, mark_again)
    async with cluster.node() as node:
        outcome = await repair(node)

        assert outcome.kind is OutcomeKind.MARKED_AGAIN
        assert len(await cluster.locked()) == 1
    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()


@pytest.mark.parametrize("fault", StoreFault)
@in_virtual_time
async def test_a_repair_whose_last_reply_was_lost_is_done_once(fault: StoreFault) -> None:
    cluster = await lost_b2()

    async with cluster.node() as node:
        take = await node.take()
        fault_once(cluster, node.store, SetData, fault)
        outcome = await node.repairer.repair(take)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 7
    assert (await cluster.manager.read(LEDGER)).version == 1
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_rule_s3_a_lost_lock_ends_the_repair_and_nothing_is_written() -> None:
    cluster = await lost_b2()

    async def lose_lock(transfer: Transfer) -> None:
        await cluster.store.delete(payloads.lock_path(UR, LEDGER))

    once_while_copying(cluster, lose_lock)
    async with cluster.node() as node:
        with pytest.raises(LockLostError):
            await repair(node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_rule_s3_done_but_for_a_reply_and_marked_again_the_repair_lets_go() -> None:
    cluster = await lost_b2()

    async with cluster.node() as node:
        take = await node.take()
        fault_once(cluster, node.store, SetData, StoreFault.LOST_REPLY)
        is_finished = node.queue.is_finished

        async def marked_again_first(take: Take) -> bool:
            await cluster.mark(B3)
            return await is_finished(take)

        node.queue.is_finished = marked_again_first  # type: ignore[method-assign]
        with pytest.raises(LockLostError):
            await node.repairer.repair(take)

    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()


# --- Targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
@in_virtual_time
async def test_rule_s11_another_target_is_taken_when_one_refuses(
    error: type[UnavailableError],
) -> None:
    cluster = await lost_b2()
    for refusing in (B4, B5, B6):
        cluster.bookies.fail(refusing, Op.ADD, Fault(error=error))

    async with cluster.node(local=B4) as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]
    assert len(cluster.bookies.targets) == len(set(cluster.bookies.targets))
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s11_a_bookie_that_collected_the_ledger_as_garbage_is_no_target() -> None:
    cluster = await lost_b2()
    cluster.put(LEDGER, 0, B4)
    cluster.bookie(B4).collect(LEDGER)

    async with cluster.node(local=B4) as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B4 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_when_everybody_refuses_the_ledger_waits_for_a_target() -> None:
    cluster = await lost_b2(B1, B2, B3, B4, B5)
    for refusing in (B4, B5):
        cluster.bookies.fail(refusing, Op.ADD, Fault(error=ReadOnlyError))

    async with cluster.node() as node:
        outcome = await repair(node)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_TARGET)
    assert "2 refused" in outcome.detail
    assert await cluster.ensembles() == [(B1, B2, B3)]


@in_virtual_time
async def test_one_target_that_fails_does_not_waste_what_another_one_took() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4, B5, B6)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    await cluster.kill(B2, B3)
    await cluster.mark(B2, B3)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=ReadOnlyError))

    async with cluster.node(local=B4) as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).bookies == {B1, B5, B6}
    assert cluster.bookies.copied_count == 20
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s1_a_target_that_goes_before_it_is_named_is_not_named() -> None:
    cluster = await lost_b2()
    gone: list[BookieId] = []

    async def go(transfer: Transfer) -> None:
        assert transfer.target is not None
        gone.append(transfer.target)
        await cluster.kill(transfer.target)

    once_copied(cluster, go)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & set(gone)
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s1_a_target_that_came_back_as_another_is_not_named_for_what_it_had() -> None:
    cluster = await lost_b2()

    async def come_back_empty(transfer: Transfer) -> None:
        assert transfer.target is not None
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, come_back_empty)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


# --- Members --------------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s6_a_member_that_goes_after_it_was_judged_is_replaced_before_the_unmark() -> (
    None
):
    cluster = await lost_b2()
    await cluster.mark(B2, B3)  # so that its loss would make no other mark

    async def go(transfer: Transfer) -> None:
        await cluster.kill(B3)

    once_copied(cluster, go)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & {B2, B3}
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s6_of_a_ledger_that_was_found_whole_too() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B3)

    async with cluster.node() as node:
        take = await node.take()

        async def go(transfer: Transfer) -> None:
            if B3 in transfer.reads:  # it said that it has everything
                cluster.bookies.after_transfer = None
                await cluster.kill(B3)

        cluster.bookies.after_transfer = go
        outcome = await node.repairer.repair(take)

    assert outcome.kind is OutcomeKind.DONE
    assert B3 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s6_after_a_long_copy_the_survivors_are_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.repair.SECOND_CHECK_ENTRIES", 6)
    cluster = await lost_b2()

    async def lose_silently(transfer: Transfer) -> None:
        cluster.bookie(B3).lose(LEDGER, 1)

    once_copied(cluster, lose_silently)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


@in_virtual_time
async def test_a_lost_bookie_that_comes_back_during_the_copy_is_not_needed_any_more() -> None:
    cluster = await lost_b2()

    async def come_back(transfer: Transfer) -> None:
        await cluster.revive(B2)

    once_while_copying(cluster, come_back)
    async with cluster.node() as node:
        outcome = await repair(node)

    assert outcome == replace(DONE, entry_count=7, entry_bytes=outcome.entry_bytes)
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
    await cluster.assert_queue_empty()
