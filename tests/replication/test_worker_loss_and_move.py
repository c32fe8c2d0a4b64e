"""A ledger that lost copies and must be moved as well: after the repair it is marked only for the
move.

Otherwise its mark would report a loss for as long as the draining bookie has no target.
"""

import pytest

from ledgers.model import BookieId, LedgerState
from replication import znodes
from replication.reasons import Reason
from replication.znodes import Mark
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import drain

PRIVATE = PATHS.private


async def lost_and_draining(*, last: int = 9) -> Cluster:
    """Return a ledger on B1, B2 and B3: B2 is lost, B3 drains, and only B4 is registered
    besides."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), last=last)
    await cluster.kill(B2)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)
    return cluster


async def mark_as_our_own(cluster: Cluster, bookie: BookieId) -> None:
    """Mark the ledger in our own queue, as the leader does for a draining bookie."""
    data = znodes.mark_to_bytes(Mark(replicas=(bookie,), ctime_ms=1))
    await cluster.store.create(PRIVATE.mark(LEDGER), data, with_parents=True)


async def waits_for_a_target(cluster: Cluster, node: Node) -> None:
    await waits(cluster, node, Reason.NO_TARGET)


async def waits(cluster: Cluster, node: Node, reason: Reason) -> None:
    async def is_put_aside() -> bool:
        notes = await node.notes.read_all([LEDGER])
        is_noted = [note.reason for note in notes] == [reason]
        return is_noted and not await cluster.locked()

    await until(cluster, is_put_aside)


@pytest.mark.parametrize("last", [9, 4_999], ids=["small", "the ledger is inspected again"])
async def test_the_loss_is_repaired_and_only_the_move_stays_marked(last: int) -> None:
    cluster = await lost_and_draining(last=last)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B4, B3)]
    await cluster.assert_whole()
    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_a_bookie_back_with_all_copies_is_no_loss_either() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)
    await cluster.revive(B2)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_of_a_ledger_being_written_only_the_drain_stays_marked() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)

    async with cluster.node() as node, working(node):
        await waits(cluster, node, Reason.OPEN_FRAGMENT)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_a_bookie_both_marked_and_draining_keeps_the_mark() -> None:
    cluster = await lost_and_draining()
    await cluster.mark(B2, B3)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([LEDGER], [LEDGER])


async def test_an_unrepaired_loss_stays_marked() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([LEDGER], [LEDGER])


async def test_a_further_loss_marked_meanwhile_keeps_the_mark() -> None:
    cluster = await lost_and_draining()
    async with cluster.node() as node:
        lease = await node.queue.lease((await node.queue.read([LEDGER]))[0])
        assert lease is not None
        await cluster.mark(B1)

        assert not await node.queue.unmark_loss(lease, [])

    assert await cluster.marked() == [LEDGER]
