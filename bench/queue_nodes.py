"""Workers without bookies: real sessions, queue and worker, but repairs that only wait.

Several workers share a process, because a hundred processes would measure the machine rather than
the queue.
"""

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import structlog

from ledgers.clock import SystemClock
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
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
from replication.znodes import ClusterPaths

SESSION_TIMEOUT_S = 60.0
"""A long timeout: many sessions in one process send their pings late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesTask:
    """The parameters of one process."""

    hosts: str
    root: str
    paths: ClusterPaths
    first: int
    count: int
    repair_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesResult:
    """The result of one process. ``per_node``: the number of ledgers that each node leased."""

    lost_races: int
    per_node: tuple[int, ...]


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


def run_nodes(task: NodesTask, parent: Connection) -> None:
    """Run the nodes in a process: send ``ready``, work until told to stop, then send a
    ``NodesResult``."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_run_nodes(task, parent))


async def _run_nodes(task: NodesTask, parent: Connection) -> None:
    async with AsyncExitStack() as stack:
        repairs: list[_Timed] = []
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running: list[asyncio.Task[None]] = []
        for number in range(task.first, task.first + task.count):
            store = await ZooKeeperStore.open(task.hosts, session_timeout_s=SESSION_TIMEOUT_S)
            stack.push_async_callback(store.close)
            batcher, worker, repair = await _node(task, store, number)
            running += [tasks.create_task(batcher.run()), tasks.create_task(worker.run())]
            repairs.append(repair)
        parent.send("ready")
        await asyncio.to_thread(parent.recv)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        parent.send(
            NodesResult(
                lost_races=int(LEASES.labels(outcome="lost")._value.get()),
                per_node=tuple(repair.count for repair in repairs),
            )
        )


async def _node(
    task: NodesTask, store: ZooKeeperStore, number: int
) -> tuple[Batcher, ReplicationWorker, _Timed]:
    clock, rng = SystemClock(), random.Random(number)
    views = ViewSource(Registration(store, task.root), clock)
    await views.refresh()
    name = f"node-{number}"
    info = NodeInfo(role=Role.WORKER, host=name, pid=number, bookie_id=None, started_ms=0)
    membership = await Membership.join(store, task.paths, info)
    batcher = Batcher(store, [membership.guard])
    queue = Queue(store, batcher, task.paths, holder=name, clock=clock)
    repair = _Timed(queue, task.repair_s)
    manager = LedgerManager(store, task.root, Layout.HIERARCHICAL)
    waiting = WaitingList(
        queue=queue,
        views=views,
        manager=manager,
        settings=ReplicationSettings(),
        node=name,
        clock=clock,
        rng=rng,
    )
    worker = ReplicationWorker(waiting=waiting, repairer=cast(Repairer, repair))
    return batcher, worker, repair
