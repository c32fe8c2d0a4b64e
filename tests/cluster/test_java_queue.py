"""Our marks, locks and votes as Java's classes and Java's AutoRecovery daemon see them.

Each test leaves the queue empty and no auditor elected.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest

from auditor.election import Election
from auditor.marker import Marker
from daemon.local.cluster import LocalCluster
from ledgers.model import BookieId
from replication.marks import prepare_tree
from replication.nodes import Membership, NodeInfo, Role
from replication.transactions import Batcher
from replication.work_queue import LedgerLease, Queue
from replication.znodes import ClusterPaths
from tests.cluster.bookies_in_trouble import terminate
from tests.cluster.our_client import OurClient, our_client
from tests.java.messages import Shape, Verdict
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = pytest.mark.cluster

US = "bookmender-1:3181"
LOST = BookieId("bookie-that-left:3181")
TIMEOUT_S = 60.0
POLL_S = 0.2
ON_FOUR = Shape(ensemble_size=4, write_quorum=4, ack_quorum=4, count=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class OurNode:
    """The parts of our node that touch shared znodes, bound to one session."""

    client: OurClient
    paths: ClusterPaths
    membership: Membership
    marker: Marker
    queue: Queue

    async def win_election(self) -> None:
        await Election(
            self.client.store, self.paths, self.membership, candidate=US, clock=self.client.clock
        ).win()

    async def lease(self, ledger_id: int) -> LedgerLease:
        """Lock a marked ledger that is not locked."""
        (queued,) = await self.queue.read([ledger_id])
        lease = await self.queue.lease(queued)
        assert lease is not None
        return lease


@asynccontextmanager
async def our_node(uri: str) -> AsyncIterator[OurNode]:
    async with our_client(uri) as client:
        paths = ClusterPaths.below(client.uri.root)
        await prepare_tree(client.store, paths)
        info = NodeInfo(role=Role.WORKER, host="host", pid=1, bookie_id=US, started_ms=0)
        membership = await Membership.join(client.store, paths, info)
        batcher = Batcher(client.store, [membership.guard])
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(batcher.run())
            yield OurNode(
                client=client,
                paths=paths,
                membership=membership,
                marker=Marker(client.store, batcher, paths, client.clock),
                queue=Queue(client.store, batcher, paths, holder=US, clock=client.clock),
            )
            sender.cancel()


@contextmanager
def autorecovery(cluster: LocalCluster) -> Iterator[None]:
    """Run Java's daemon: its auditor is a candidate, and its worker leases marked ledgers."""
    settings = {"rwRereplicateBackoffMs": "100", "openLedgerRereplicationGracePeriod": "1000"}
    daemon = cluster.start_autorecovery(settings=settings)
    try:
        yield
    finally:
        daemon.terminate()
        assert daemon.wait(timeout_s=TIMEOUT_S)


async def until(is_so: Callable[[], bool]) -> None:
    """Ask repeatedly, outside the loop's thread, until the answer is yes."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(POLL_S)


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testGetReplicationWorkerIdRereplicatingLedger",
    verdict="same",
)
async def test_java_sees_our_marks_and_the_owner_of_a_lock(java: JavaTool, uri: str) -> None:
    (written,) = java.write(uri, Shape())

    async with our_node(uri) as us:
        await us.marker.mark(written.ledger, [LOST])
        seen = [java.under_replicated(uri)]
        lease = await us.lease(written.ledger)
        seen.append(java.under_replicated(uri))
        await us.queue.complete(lease)
        seen.append(java.under_replicated(uri))
        marked, taken, finished = seen

    assert [(mark.ledger, mark.replicas, mark.locked_by) for mark in marked] == [
        (written.ledger, (LOST,), None)
    ]
    assert [(mark.ledger, mark.locked_by) for mark in taken] == [(written.ledger, US)]
    assert finished == []


@pytest.mark.compat("TestLedgerUnderreplicationManager.testRelease", verdict="same")
def test_a_java_worker_repairs_our_marks_except_locked_ledgers(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    victim = module_cluster.bookies[0]
    locked, free, *_ = [
        ledger
        for ledger in java.write(uri, ON_FOUR)
        if victim in java.metadata(uri, ledger.ledger).ensembles[0]
    ]
    terminate(module_cluster, victim)

    def verdict(ledger_id: int) -> Verdict:
        return java.judge(uri, [ledger_id]).verdict

    async def mark_both_and_lock_one(daemon: ExitStack) -> None:
        async with our_node(uri) as us:
            await us.win_election()  # otherwise Java's auditor would mark the others too
            await us.marker.mark(locked.ledger, [victim])
            lease = await us.lease(locked.ledger)
            await us.marker.mark(free.ledger, [victim])
            daemon.enter_context(autorecovery(module_cluster))
            await until(lambda: verdict(free.ledger) is Verdict.WHOLE)
            assert java.auditor(uri) == US
            assert verdict(locked.ledger) is Verdict.MISSING

            await us.queue.release(lease)
            await until(lambda: verdict(locked.ledger) is Verdict.WHOLE)
            await until(lambda: java.under_replicated(uri) == [])

    # Ends after our node no longer leads, because its candidate waits for that.
    with ExitStack() as daemon:
        asyncio.run(mark_both_and_lock_one(daemon))
    module_cluster.start_bookie(victim)
    report = java.judge(uri, [locked.ledger, free.ledger], expected=[locked, free])

    assert report.verdict is Verdict.WHOLE
