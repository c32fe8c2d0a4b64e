"""A repair reads targets, members and the metadata of a whole ledger again right before it
writes."""

import pytest

from ledgers.bookies import Transfer
from ledgers.model import BookieId
from replication.locks import QueuedLedger
from replication.marks import VersionedMark
from replication.outcome import DONE, OutcomeKind
from replication.znodes import Mark
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, Node
from tests.replication.repairs import lost_b2, once_copied, repair_with, touch


def is_blind(node: Node) -> None:
    """Let the node receive no events, like a process that continues after a suspension."""

    async def unread(read: object) -> bool:
        return True

    node.views._try = unread  # type: ignore[method-assign]


# --- Targets --------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_target_reformatted_during_our_suspension_is_not_named() -> None:
    cluster = await lost_b2()
    async with cluster.node() as node:

        async def reformat(transfer: Transfer) -> None:
            assert transfer.target is not None
            is_blind(node)
            await cluster.kill(transfer.target)
            await cluster.wipe(transfer.target)
            await cluster.revive(transfer.target)

        once_copied(cluster, reformat)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


# --- Members --------------------------------------------------------------------------------------


async def marked_for_b3_which_is_back() -> Cluster:
    """Return a whole ledger on B1, B2 and B3. Its mark names B3, which was absent for a moment."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B3)
    await cluster.mark(B3)
    await cluster.revive(B3)
    return cluster


@in_virtual_time
async def test_a_whole_ledger_stays_marked_if_its_bookie_is_lost_again() -> None:
    cluster = await marked_for_b3_which_is_back()
    async with cluster.node() as node:
        lease = await node.lease()
        finish, is_first = node.queue.complete, True

        async def go_first(*args: object, **options: object) -> bool:
            nonlocal is_first
            if is_first:
                is_first = False
                is_blind(node)
                await cluster.kill(B3)  # Java's auditor writes nothing: the mark names B3 already
            return await finish(*args, **options)  # type: ignore[arg-type]

        node.queue.complete = go_first  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.WAITING
    assert await cluster.marked() == [LEDGER]


@in_virtual_time
async def test_a_ledger_written_after_its_check_is_checked_again() -> None:
    cluster = await marked_for_b3_which_is_back()
    async with cluster.node() as node:
        lease = await node.lease()
        finish, calls = node.queue.complete, 0

        async def touch_first(*args: object, **options: object) -> bool:
            nonlocal calls
            calls += 1
            if calls == 1:
                await touch(cluster)
            return await finish(*args, **options)  # type: ignore[arg-type]

        node.queue.complete = touch_first  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease)

    assert outcome.kind is DONE.kind
    assert calls == 2
    await cluster.assert_queue_empty()


# --- Marks for registered bookies -----------------------------------------------------------------


def queued(*replicas: BookieId, mzxid: int, is_loss: bool = True) -> QueuedLedger:
    mark = VersionedMark(
        path="/mark", mark=Mark(replicas=replicas), version=0, czxid=1, mzxid=mzxid
    )
    return QueuedLedger(ledger_id=LEDGER, marks=(mark,), is_loss=is_loss)


@pytest.mark.parametrize(
    ("ledger", "registered", "missed"),
    [
        pytest.param(queued(B2, mzxid=50), {B2: 10}, {B2}, id="registered before the mark"),
        pytest.param(queued(B2, mzxid=50), {B2: 60}, set(), id="lost, and back since"),
        pytest.param(queued(B2, mzxid=50), {B2: 0}, {B2}, id="ACLs hide when it registered"),
        pytest.param(queued(mzxid=50), {B2: 10}, set(), id="the mark names no bookie"),
        pytest.param(
            queued(B2, mzxid=50, is_loss=False),
            {B2: 10},
            set(),
            id="marked in our private queue alone",
        ),
        pytest.param(queued(B2, B3, mzxid=50), {B2: 10, B3: 60}, {B2}, id="each by itself"),
    ],
)
def test_a_bookie_marked_while_registered_is_read_completely(
    ledger: QueuedLedger, registered: dict[BookieId, int], missed: set[BookieId]
) -> None:
    assert ledger.missed_while_registered(lambda b: registered.get(b, 99)) == missed


@in_virtual_time
async def test_a_gap_that_javas_auditor_missed_is_filled() -> None:
    """The entry is between the ends of the fragment."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=200, write_quorum=3)
    cluster.bookie(B2).lose(LEDGER, 100)
    await cluster.mark(B2)

    async with cluster.node() as node:
        await repair_with(node)

    assert await cluster.marked() == []
    await cluster.assert_whole()


@in_virtual_time
async def test_a_bookie_back_after_its_loss_is_asked_for_its_ends_only() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=200, write_quorum=3)
    await cluster.kill(B2)
    await cluster.mark(B2)
    await cluster.revive(B2)
    asked: list[int] = []

    async def note(transfer: Transfer) -> None:
        asked.append(len(transfer.reads[B2]))

    cluster.bookies.before_transfer = note

    async with cluster.node() as node:
        await repair_with(node)

    assert asked == [2]
