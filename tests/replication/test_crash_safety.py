"""Rule S3 for a node that is suspended past its session, or silently gets a new session."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from daemon.threads import leaves
from ledgers.bookies import Transfer
from ledgers.errors import SessionLostError
from ledgers.model import LedgerState
from ledgers.store import Create, Operation, SetData
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Reason
from replication.settings import ReplicationSettings
from replication.work_queue import LedgerLease
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, queue_empty, until, with_lost_b2
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.watched import settle
from tests.replication.workers import noted

THREE = (B1, B2, B3)
LOCK = PATHS.lock(LEDGER)
NOTE = WaitingNote(
    ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_COPY), node="node-1", since_ms=0
)


def writes_of(cluster: Cluster, store: MemoryStore) -> list[Sequence[Operation]]:
    """Return a list that grows by each write of the session."""
    sent: list[Sequence[Operation]] = []

    def note(asking: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if asking is store and operations:
            sent.append(operations)
        return None

    cluster.tree.faults = note
    return sent


class Freezer:
    """Suspends the first node that copies in the middle of its copy. Other nodes continue."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.is_frozen = asyncio.Event()
        self.thawed = asyncio.Event()
        cluster.bookies.before_transfer = self._before

    async def _before(self, transfer: Transfer) -> None:
        if transfer.target is not None and not self.is_frozen.is_set():
            self.is_frozen.set()
            await self.thawed.wait()

    def freeze(self, node: Node) -> None:
        """Suspend the node: it receives and sends nothing, and in time its session expires."""
        self._cluster.tree.suspend(node.store)
        self._cluster.tree.expire(node.store)

    async def thaw(self, node: Node) -> None:
        self.thawed.set()
        await settle()
        self._cluster.tree.resume(node.store)
        await settle()


@pytest.mark.parametrize("state", [LedgerState.CLOSED, LedgerState.OPEN])
async def test_rule_s3_a_node_suspended_past_its_session_is_harmless(
    cluster: Cluster, state: LedgerState
) -> None:
    """It writes nothing when it continues."""
    await cluster.write_ledger(THREE, write_quorum=3, ack_quorum=2, state=state)
    await cluster.mark(B2)
    await cluster.kill(B2)
    settings = ReplicationSettings(open_ledger_grace_s=1)

    freezer = Freezer(cluster)
    async with cluster.node("frozen", settings=settings) as frozen:
        worker = asyncio.create_task(frozen.worker.run())
        await freezer.is_frozen.wait()
        freezer.freeze(frozen)
        async with cluster.node("other", settings=settings) as other, working(other):
            await until(cluster, lambda: queue_empty(cluster))
        whole = cluster.tree.snapshot()

        await freezer.thaw(frozen)
        await asyncio.wait([worker], timeout=10)

        error = worker.exception()
        assert error is not None
        assert {type(leaf) for leaf in leaves(error)} == {SessionLostError}
    assert cluster.tree.snapshot() == whole
    await cluster.assert_whole()


# --- A new session behind our back ----------------------------------------------------------------


def note_of(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.write_note(lease, NOTE)


def unlock_with_note(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.unlock_with_note(lease, NOTE)


def forget_note(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.delete_note(LEDGER, version=0)


def finish(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.complete(lease)


def finish_with_metadata(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.complete(lease, [SetData(path="/extra", data=b"x", version=0)])


def write(node: Node, lease: LedgerLease) -> Awaitable[object]:
    return node.queue.write(lease, [SetData(path="/extra", data=b"x", version=0)])


@pytest.mark.parametrize(
    "act", [note_of, unlock_with_note, forget_note, finish, finish_with_metadata, write]
)
async def test_rule_s3_nothing_is_written_under_a_replaced_session(
    cluster: Cluster, act: Callable[[Node, LedgerLease], Awaitable[object]]
) -> None:
    await cluster.store.create("/extra")
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        # What is left of the old session in the new one: nothing, though requests go through.
        await cluster.store.delete(node.membership.path)
        await cluster.store.delete(LOCK)
        await cluster.store.create(LOCK, b'bookieId: "node-2"\n', is_ephemeral=True)
        await cluster.store.set(LOCK, b'bookieId: "node-2"\n', version=0)
        before = cluster.tree.snapshot()

        with pytest.raises(SessionLostError):
            await act(node, lease)
        await node.queue.release(lease)

        assert cluster.tree.snapshot() == before


async def test_rule_s3_every_write_of_a_worker_proves_its_session() -> None:
    """Only empty directories are deleted without the proof."""
    cluster = await with_lost_b2(5)
    await cluster.write_ledger(THREE, ledger_id=7, write_quorum=3, state=LedgerState.OPEN)
    await cluster.mark(B2, ledger_id=7)
    await cluster.write_ledger((B1, B2), ledger_id=8, write_quorum=2)
    await cluster.mark(B2, ledger_id=8)
    cluster.bookie(B1).lose(8, 3)  # no copy left: a note will be written

    async with cluster.node(settings=ReplicationSettings(open_ledger_grace_s=1)) as node:
        await settle()
        sent = writes_of(cluster, node.store)
        async with working(node):
            await asyncio.sleep(30)

        proof = node.membership.guard.check
        unproven = [operations for operations in sent if proof not in operations]
    assert any(isinstance(each, Create) and each.is_ephemeral for ops in sent for each in ops)
    assert unproven == []


async def test_rule_s14_a_ledger_marked_again_before_its_lock_waits(cluster: Cluster) -> None:
    """The lock would belong to a mark that the worker has not read."""
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        commit = asyncio.create_task(node.queue.lease(queued))
        await cluster.mark(B1, B2)

        lease = await commit
        stands = await cluster.locked()
        assert (lease is None) == (stands == [])
        if lease is not None:  # it was quicker: then the old mark is what it may delete, no other
            assert not await node.queue.complete(lease)
            assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_lost_reply_to_a_note_costs_only_that_attempt(fault: Fault) -> None:
    cluster = await Cluster.start(*THREE)
    await cluster.write_ledger(THREE)
    await cluster.mark(B2)
    await cluster.kill(B2)
    faults = [fault]

    def on_note(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        is_note = any("/waiting/" in each.path for each in operations)
        return faults.pop() if is_note and faults else None

    cluster.tree.faults = on_note
    async with cluster.node() as node, working(node):
        await asyncio.sleep(40)
        note = await noted(node)

    assert not faults
    assert note.reason is Reason.NO_TARGET
    assert await cluster.locked() == []
