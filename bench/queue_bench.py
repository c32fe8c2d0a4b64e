"""Measures the queue's cost for ZooKeeper by the number of nodes that share it: ``python -m
bench.queue_bench``.

All nodes wait at the disable switch, with the queue full. Then the switch is opened and all nodes
begin at once, which is the worst case. Packets are those that the server counted for reads, locks,
unmarks and pings; only the bench's own are subtracted.

The nodes are workers without bookies: real sessions, queue and worker, but repairs that only wait.
Several of them share a process, because a hundred processes would measure the machine rather than
the queue.
"""

import asyncio
import logging
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import click
import structlog

from auditor.marker import Marker
from auditor.underreplication import UnderreplicatedLedger
from bench.report import table
from bench.waiting import wait_until
from daemon.local.servers import zookeeper_monitor
from ledgers.clock import SystemClock
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.zookeeper.store import ZooKeeperStore
from replication.backoff import WaitingList
from replication.cluster import ViewSource
from replication.nodes import Membership, NodeInfo, Role
from replication.repair import DONE, MARKED_AGAIN, Outcome, Repairer
from replication.settings import ReplicationSettings
from replication.transactions import Batcher
from replication.work_queue import LedgerLease, Queue
from replication.worker import LEASES, ReplicationWorker
from tests.znode_cluster import LAYOUT, PATHS, ROOT, ZnodeCluster
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

PROCESSES_MAX = 4
SETTLE_S = 3.0
"""Time before the switch is opened. By then every node has looked and found it closed."""
TIMEOUT_S = 300.0
SESSION_TIMEOUT_S = 60.0
"""A long timeout: many sessions in one process send their pings late."""
LOST = BookieId("bookie-that-left:3181")
HEAD = ("nodes", "packets/ledger", "lost races/ledger", "s", "ledgers/s", "ledgers of a node")


@click.command()
@click.option("--nodes", default="1,10,100", show_default=True, help="Runs, by number of nodes.")
@click.option("--ledgers", default=20_000, show_default=True)
@click.option("--repair-ms", default=20.0, show_default=True, help="What a repair takes.")
def main(nodes: str, ledgers: int, repair_ms: float) -> None:
    """Packets, lost races and time a ledger, by the number of nodes."""
    rows = [_measure(int(count), ledgers, repair_ms / 1000) for count in nodes.split(",")]
    click.echo(table(HEAD, rows))


def _measure(node_count: int, ledger_count: int, repair_s: float) -> list[str]:
    """Return the row of one run, from the opening of the switch to the empty queue."""
    with tempfile.TemporaryDirectory() as folder, running_zookeeper(Path(folder)) as server:
        asyncio.run(fill(server.address, ledger_count))
        with _nodes(server, node_count, repair_s) as parents:
            time.sleep(SETTLE_S)
            duration_s, packets = asyncio.run(_drain(server))
            for parent in parents:
                parent.send("stop")
            results = [cast(tuple[int, list[int]], _receive(parent)) for parent in parents]
    lost_races = sum(lost for lost, _ in results)
    repaired = [count for _, counts in results for count in counts]
    return [
        str(node_count),
        f"{packets / ledger_count:.2f}",
        f"{lost_races / ledger_count:.3f}",
        f"{duration_s:.1f}",
        f"{ledger_count / duration_s:,.0f}",
        f"{min(repaired)} to {max(repaired)}",
    ]


async def fill(hosts: str, ledger_count: int) -> None:
    """Create this number of marks, and the disable switch."""
    store = await ZooKeeperStore.open(hosts)
    try:
        await ZnodeCluster(store).format()
        await store.create(f"{ROOT}/available/bookie:3181")
        await store.create(PATHS.disable)
        batcher = Batcher(store, ())
        sender = asyncio.create_task(batcher.run())
        underreplicated = [
            UnderreplicatedLedger(ledger_id=i, lost=(LOST,), copies_left=2, length=0)
            for i in range(ledger_count)
        ]
        await Marker(store, batcher, PATHS, SystemClock()).mark_all(underreplicated)
        sender.cancel()
    finally:
        await store.close()


async def _drain(server: ZooKeeperServer) -> tuple[float, int]:
    """Open the switch and wait until nothing is marked. Return the seconds, and the packets of the
    nodes."""
    directory = PATHS.mark(0).rsplit("/", 2)[0]
    store = await ZooKeeperStore.open(server.address)

    def packets() -> int:
        received = int(zookeeper_monitor(server.port)["zk_packets_received"])
        return received - store.request_count

    async def is_empty() -> bool:
        stat = await store.exists(directory)
        return stat is None or not stat.child_count

    try:
        before, began_s = packets(), time.monotonic()
        await store.delete(PATHS.disable)
        await wait_until(is_empty, "an empty queue", timeout_s=TIMEOUT_S)
        return time.monotonic() - began_s, packets() - before
    finally:
        await store.close()


# --- The nodes ------------------------------------------------------------------------------------


@contextmanager
def _nodes(server: ZooKeeperServer, node_count: int, repair_s: float) -> Iterator[list[Connection]]:
    """Run processes that share the given number of nodes, and yield when all nodes are ready. Kills
    them at the end."""
    context = multiprocessing.get_context("spawn")
    process_count = min(PROCESSES_MAX, node_count)
    processes, parents = [], []
    try:
        for number in range(process_count):
            first, stop = (each * node_count // process_count for each in (number, number + 1))
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_nodes,
                args=(server.address, range(first, stop), repair_s, theirs),
                daemon=True,
            )
            process.start()
            processes.append(process)
            parents.append(ours)
        for parent in parents:
            _receive(parent)
        yield parents
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(connection: Connection) -> object:
    if not connection.poll(TIMEOUT_S):
        raise click.ClickException("the nodes do not answer")
    return connection.recv()


class _Timed:
    """A replacement for ``Repairer``: each ledger counts as repaired after a fixed time."""

    def __init__(self, queue: Queue, repair_s: float) -> None:
        self._queue = queue
        self._repair_s = repair_s
        self.count = 0

    async def repair(
        self, lease: LedgerLease, sighting: object = None, *, slots: object
    ) -> Outcome:
        self.count += 1
        await asyncio.sleep(self._repair_s)
        return DONE if await self._queue.complete(lease) else MARKED_AGAIN


def run_nodes(hosts: str, numbers: range, repair_s: float, parent: Connection) -> None:
    """Run nodes in a process: send ``ready``, work until told to stop, then send the number of lost
    races, and how many ledgers each node repaired."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_run_nodes(hosts, numbers, repair_s, parent))


async def _run_nodes(hosts: str, numbers: range, repair_s: float, parent: Connection) -> None:
    async with AsyncExitStack() as stack:
        repairs: list[_Timed] = []
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running: list[asyncio.Task[None]] = []
        for number in numbers:
            store = await ZooKeeperStore.open(hosts, session_timeout_s=SESSION_TIMEOUT_S)
            stack.push_async_callback(store.close)
            batcher, worker, repair = await _node(store, number, repair_s)
            running += [tasks.create_task(batcher.run()), tasks.create_task(worker.run())]
            repairs.append(repair)
        parent.send("ready")
        await asyncio.to_thread(parent.recv)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        lost_races = int(LEASES.labels(outcome="lost")._value.get())
        parent.send((lost_races, [repair.count for repair in repairs]))


async def _node(
    store: ZooKeeperStore, number: int, repair_s: float
) -> tuple[Batcher, ReplicationWorker, _Timed]:
    clock, name = SystemClock(), f"node-{number}"
    views = ViewSource(Registration(store, ROOT), clock)
    await views.refresh()
    info = NodeInfo(role=Role.WORKER, host=name, pid=number, bookie_id=None, started_ms=0)
    membership = await Membership.join(store, PATHS, info)
    batcher = Batcher(store, [membership.guard])
    queue = Queue(store, batcher, PATHS, holder=name, clock=clock)
    repair = _Timed(queue, repair_s)
    waiting = WaitingList(
        queue=queue,
        views=views,
        manager=LedgerManager(store, ROOT, LAYOUT),
        settings=ReplicationSettings(),
        node=name,
        clock=clock,
        rng=random.Random(number),
    )
    worker = ReplicationWorker(waiting=waiting, repairer=cast(Repairer, repair))
    return batcher, worker, repair


if __name__ == "__main__":
    main()
