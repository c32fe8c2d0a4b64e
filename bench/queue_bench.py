"""Measures the queue's cost for ZooKeeper by the number of nodes that share it: ``python -m
bench.queue_bench``.

All nodes wait at the disable switch, with the queue full. Then the switch is opened and all nodes
begin at once, which is the worst case. Packets are those that the server counted for reads, locks,
unmarks and pings; only the bench's own are subtracted.
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from auditor.marker import Marker
from auditor.underreplication import UnderreplicatedLedger
from bench.queue_nodes import NodesResult, NodesTask, run_nodes
from daemon.local.servers import zookeeper_monitor
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from ledgers.zookeeper.store import ZooKeeperStore
from replication.marks import prepare_tree
from replication.transactions import Batcher
from replication.znodes import ClusterPaths
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

ROOT = "/ledgers"
PATHS = ClusterPaths.below(ROOT)
PROCESSES_MAX = 4
POLL_S = 0.1
SETTLE_S = 3.0
"""Time before the switch is opened. By then every node has looked and found it closed."""
TIMEOUT_S = 300.0
LOST = BookieId("bookie-that-left:3181")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one run, from the opening of the switch to the empty queue."""

    node_count: int
    ledger_count: int
    duration_s: float
    packets: int
    lost_races: int
    least_taken: int
    most_taken: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            str(self.node_count),
            f"{self.packets / self.ledger_count:.2f}",
            f"{self.lost_races / self.ledger_count:.3f}",
            f"{self.duration_s:.1f}",
            f"{self.ledger_count / self.duration_s:,.0f}",
            f"{self.least_taken} to {self.most_taken}",
        )


@click.command()
@click.option("--nodes", default="1,10,100", show_default=True, help="Runs, by number of nodes.")
@click.option("--ledgers", default=20_000, show_default=True)
@click.option("--repair-ms", default=20.0, show_default=True, help="What a repair takes.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def main(nodes: str, ledgers: int, repair_ms: float, output: str) -> None:
    """Packets, lost races and time a ledger, by the number of nodes."""
    runs = [
        _measure(int(count), ledger_count=ledgers, repair_s=repair_ms / 1000)
        for count in nodes.split(",")
    ]
    if output == "json":
        click.echo(json.dumps([asdict(run) for run in runs], indent=2))
        return
    table = Table(
        "nodes", "packets/ledger", "lost races/ledger", "s", "ledgers/s", "ledgers of a node"
    )
    for run in runs:
        table.add_row(*run.cells)
    Console().print(table)


def _measure(node_count: int, *, ledger_count: int, repair_s: float) -> Measured:
    with (
        tempfile.TemporaryDirectory() as folder,
        _full_queue(Path(folder), ledger_count) as server,
        _nodes(server, node_count, repair_s) as parents,
    ):
        time.sleep(SETTLE_S)
        duration_s, packets = asyncio.run(_drain(server, ledger_count))
        results = [_result(parent) for parent in parents]
    taken = [count for result in results for count in result.per_node]
    return Measured(
        node_count=node_count,
        ledger_count=ledger_count,
        duration_s=duration_s,
        packets=packets,
        lost_races=sum(result.lost_races for result in results),
        least_taken=min(taken),
        most_taken=max(taken),
    )


@contextmanager
def _full_queue(folder: Path, ledger_count: int) -> Iterator[ZooKeeperServer]:
    """Run a server with this number of marks and with the disable switch on."""
    with running_zookeeper(folder) as server:
        asyncio.run(fill(server.address, ledger_count))
        yield server


async def fill(hosts: str, ledger_count: int) -> None:
    """Create this number of marks, and the disable switch."""
    store = await ZooKeeperStore.open(hosts)
    try:
        await store.create(f"{ROOT}/available/readonly", with_parents=True)
        await store.create(f"{ROOT}/available/bookie:3181")
        await store.create(f"{ROOT}/cookies")
        await prepare_tree(store, PATHS)
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


@contextmanager
def _nodes(server: ZooKeeperServer, node_count: int, repair_s: float) -> Iterator[list[Connection]]:
    """Run processes that share the given number of nodes, and yield when all nodes are ready. Kills
    them at the end."""
    context = multiprocessing.get_context("spawn")
    process_count = min(PROCESSES_MAX, node_count)
    processes, parents = [], []
    try:
        for number in range(process_count):
            first = number * node_count // process_count
            count = (number + 1) * node_count // process_count - first
            task = NodesTask(
                hosts=server.address,
                root=ROOT,
                paths=PATHS,
                first=first,
                count=count,
                repair_s=repair_s,
            )
            ours, theirs = context.Pipe()
            process = context.Process(target=run_nodes, args=(task, theirs), daemon=True)
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


def _result(parent: Connection) -> NodesResult:
    parent.send("stop")
    result = _receive(parent)
    assert isinstance(result, NodesResult), result
    return result


def _receive(connection: Connection) -> object:
    if not connection.poll(TIMEOUT_S):
        raise click.ClickException("the nodes do not answer")
    return connection.recv()


async def _drain(server: ZooKeeperServer, ledger_count: int) -> tuple[float, int]:
    """Open the switch and wait until nothing is marked. Return the seconds, and the packets of the
    nodes."""
    directory = PATHS.mark(0).rsplit("/", 2)[0]
    store = await ZooKeeperStore.open(server.address)
    try:
        before, own = _packets(server), store.request_count
        began_s = time.monotonic()
        await store.delete(PATHS.disable)
        while (stat := await store.exists(directory)) is not None and stat.child_count:
            if time.monotonic() - began_s > TIMEOUT_S:
                raise click.ClickException(f"{stat.child_count} of {ledger_count} are left")
            await asyncio.sleep(POLL_S)
        duration_s = time.monotonic() - began_s
        return duration_s, _packets(server) - before - (store.request_count - own)
    finally:
        await store.close()


def _packets(server: ZooKeeperServer) -> int:
    return int(zookeeper_monitor(server.port)["zk_packets_received"])


if __name__ == "__main__":
    main()
