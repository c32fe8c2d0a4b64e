"""A repair that is interrupted at any of its requests, and a second node that completes it.

After any interruption no acknowledged entry is lost, and no mark or lock stays behind. Every copy
that metadata names exists, at the end and after every single write (rule S1).
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from ledgers.store import Operation
from replication.settings import ReplicationSettings
from tests.memory import bookies as memory_bookies
from tests.memory import store as memory_store
from tests.memory.bookies import NO_FAULT, Op
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, ROOT, Node
from tests.replication.repairs import drain
from tests.virtual_time import run

LAST = 7
SETTINGS = ReplicationSettings(open_ledger_grace_s=1, retry_min_s=1, retry_max_s=2, idle_wait_s=0.5)


class Interruption(enum.Enum):
    """A fault at a request."""

    LOST_REPLY = "it is executed, and the reply is lost"
    EXPIRED = "it is lost, as the session has expired; its node goes on until it notices"
    DIED = "it is carried out, and its node is dead before the reply comes"


class Interrupter:
    """Counts the first node's requests, to ZooKeeper and to bookies, and interrupts one of them."""

    def __init__(self, cluster: Cluster, at: int, how: Interruption) -> None:
        self.count = 0
        self._cluster, self._at, self._how = cluster, at, how
        self._node: Node | None = None
        self._worker: asyncio.Task[None] | None = None
        cluster.tree.faults = self._at_store
        cluster.bookies.faults = self._at_bookie

    def watch(self, node: Node, worker: "asyncio.Task[None]") -> None:
        self._node, self._worker = node, worker

    async def is_over(self) -> bool:
        """Return True if it has interrupted, or if there was nothing left to interrupt."""
        return self.count > self._at or await queue_empty(self._cluster)

    def _at_store(
        self, store: MemoryStore, operations: Sequence[Operation]
    ) -> memory_store.Fault | None:
        if self._node is None or store is not self._node.store or not self._is_now():
            return None
        return memory_store.Fault.LOST_REPLY if self._strike() else memory_store.Fault.LOST_REQUEST

    def _at_bookie(self, bookie: BookieId, op: Op, ledger_id: int) -> memory_bookies.Fault:
        if self._node is None or not self._is_now():
            return NO_FAULT
        return memory_bookies.Fault(error=UnavailableError, is_executed=self._strike())

    def _is_now(self) -> bool:
        """Count the request. After the interruption no request is counted."""
        if self.count > self._at:
            return False
        self.count += 1
        return self.count > self._at

    def _strike(self) -> bool:
        """Interrupt. Return True if the request is executed all the same."""
        assert self._node is not None
        if self._how is Interruption.EXPIRED:
            self._cluster.tree.expire(self._node.store)
        elif self._how is Interruption.DIED:
            # Two turns of the loop later: the request has arrived, its reply has not.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._die)
        return self._how is not Interruption.EXPIRED

    def _die(self) -> None:
        assert self._node is not None
        assert self._worker is not None
        self._worker.cancel()
        self._cluster.tree.expire(self._node.store)


async def closed_with_two_lost() -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B1, B2, B4), starts=(0, 4), last=LAST, write_quorum=3)
    await cluster.mark(B2, B3)
    await cluster.kill(B2, B3)
    return cluster


async def live_and_lacking() -> Cluster:
    """Return a ledger with a bookie that lost an end and a middle, and one with a damaged copy."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=LAST, write_quorum=3)
    await cluster.mark()
    cluster.bookie(B2).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 3)
    cluster.bookie(B3).corrupt(LEDGER, LAST)
    return cluster


async def reformatted() -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3, B5), last=LAST)
    await cluster.mark(B2)
    await cluster.reformat(B2)
    return cluster


async def open_without_its_writer() -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2, B3),
        (B1, B4, B3),
        starts=(0, 3),
        last=LAST - 1,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.OPEN,
    )
    cluster.put(LEDGER, LAST, B1, B3)
    await cluster.mark(B2, B4)
    await cluster.kill(B2, B4)
    return cluster


async def draining() -> Cluster:
    """Return a ledger with two draining bookies that serve; one segment is on both."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B3, B4, B1), starts=(0, 4), last=LAST, write_quorum=3)
    await drain(cluster, B2, B3)
    await cluster.mark()
    return cluster


async def out_of_reach() -> Cluster:
    """Return a ledger with an entry whose only copy is on a bookie that returns although it was
    decommissioned: the ledger is split first."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=LAST)
    cluster.bookie(B3).lose(LEDGER, 4)
    await cluster.mark(B2)
    await cluster.kill(B2)
    await cluster.store.delete(f"{ROOT}/cookies/{B2}")

    async def come_back() -> None:
        await until(cluster, is_split)
        await cluster.revive(B2)

    async def is_split() -> bool:
        return len(await cluster.ensembles()) == 3

    cluster.returning = asyncio.create_task(come_back())  # type: ignore[attr-defined]
    return cluster


async def interrupted(scene: Callable[[], Awaitable[Cluster]], at: int, how: Interruption) -> int:
    """Interrupt the first node, let a second one complete, and return the requests of the first."""
    cluster = await scene()
    cluster.seed = at  # other targets every time
    interrupter = Interrupter(cluster, at, how)
    async with AsyncExitStack() as stack:

        async def work(name: str) -> tuple[Node, "asyncio.Task[None]"]:
            node = await stack.enter_async_context(cluster.node(name, settings=SETTINGS))
            worker = asyncio.create_task(node.worker.run())
            stack.push_async_callback(end, worker)
            return node, worker

        interrupter.watch(*await work("node-1"))
        await until(cluster, interrupter.is_over)
        second, _ = await work("node-2")
        await until(cluster, lambda: queue_empty(cluster))

        metadata = await cluster.metadata()
        assert metadata.last_entry_id == LAST
        assert not any(cluster.bookie(b).is_down for b in metadata.bookies)
        await cluster.assert_whole()
        await asyncio.sleep(2 * SETTINGS.idle_wait_s)
        await cluster.assert_queue_empty()
        assert await second.notes.ledger_ids() == set()
    return interrupter.count


async def end(worker: "asyncio.Task[None]") -> None:
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


@pytest.mark.parametrize("how", Interruption)
@pytest.mark.parametrize(
    "scene",
    [
        closed_with_two_lost,
        live_and_lacking,
        reformatted,
        open_without_its_writer,
        draining,
        out_of_reach,
    ],
)
def test_rule_s1_a_repair_may_be_interrupted_anywhere(
    scene: Callable[[], Awaitable[Cluster]], how: Interruption
) -> None:
    at = 0
    while True:
        try:
            count = run(interrupted(scene, at, how))
        except Exception as error:
            error.add_note(f"interrupted at request {at}, which is the seed, too: {how.value}")
            raise
        if count <= at:  # it was done before
            break
        at += 1
    assert at > 30, "so few requests make no repair"
