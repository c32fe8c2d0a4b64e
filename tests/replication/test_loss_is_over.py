"""A ledger that lost copies and is to be moved as well: once the copies are made, it is marked for
the move alone.

Else its mark would tell of a loss as long as the bookie that drains finds no taker.
"""

import pytest

from ledgers.model import BookieId, LedgerState
from replication import znodes
from replication.reasons import Reason
from replication.znodes import Mark
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import drain

OWN = PATHS.private


async def lost_and_draining(*, last: int = 9) -> Cluster:
    """A ledger on B1, B2 and B3: B2 is lost, B3 drains, and B4 alone is there besides."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), last=last)
    await cluster.kill(B2)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)
    return cluster


async def mark_as_our_own(cluster: Cluster, bookie: BookieId) -> None:
    """As the leader does for one that drains."""
    data = znodes.mark_to_bytes(Mark(replicas=(bookie,), ctime_ms=1))
    await cluster.store.create(OWN.mark(LEDGER), data, with_parents=True)


async def waits_for_a_target(cluster: Cluster, node: Node) -> None:
    await waits(cluster, node, Reason.NO_TARGET)


async def waits(cluster: Cluster, node: Node, reason: Reason) -> None:
    async def is_put_aside() -> bool:
        notes = await node.notes.read_all([LEDGER])
        is_noted = [note.reason for note in notes] == [reason]
        return is_noted and not await cluster.locked()

    await until(cluster, is_put_aside)


@pytest.mark.parametrize("last", [9, 4_999], ids=["small", "looked at again"])
@in_virtual_time
async def test_what_was_lost_is_copied_and_the_move_alone_stays_marked(last: int) -> None:
    cluster = await lost_and_draining(last=last)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B4, B3)]
    await cluster.assert_whole()
    assert (await cluster.marked(), await cluster.marked(OWN)) == ([], [LEDGER])


@in_virtual_time
async def test_a_bookie_that_is_back_with_all_its_copies_is_no_loss_either() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)
    await cluster.revive(B2)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert (await cluster.marked(), await cluster.marked(OWN)) == ([], [LEDGER])


@in_virtual_time
async def test_of_a_ledger_that_is_written_to_its_drain_alone_stays_marked() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)

    async with cluster.node() as node, working(node):
        await waits(cluster, node, Reason.OPEN_FRAGMENT)

    assert (await cluster.marked(), await cluster.marked(OWN)) == ([], [LEDGER])


@in_virtual_time
async def test_a_bookie_that_the_mark_names_and_that_drains_keeps_it_marked() -> None:
    cluster = await lost_and_draining()
    await cluster.mark(B2, B3)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(OWN)) == ([LEDGER], [LEDGER])


@in_virtual_time
async def test_a_loss_that_was_not_made_good_stays_marked() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(OWN)) == ([LEDGER], [LEDGER])


@in_virtual_time
async def test_another_loss_that_is_marked_meanwhile_is_not_taken_for_the_one_that_is_over() -> (
    None
):
    cluster = await lost_and_draining()
    async with cluster.node() as node:
        lease = await node.queue.lease((await node.queue.read([LEDGER]))[0])
        assert lease is not None
        await cluster.mark(B1)

        assert not await node.queue.unmark_loss(lease, [])

    assert await cluster.marked() == [LEDGER]
