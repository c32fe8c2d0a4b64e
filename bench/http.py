"""Measures how fast a node's HTTP server answers while the queue is long: ``python -m bench.http``.

A process runs the server of a node on a local ZooKeeper with the given number of marks. With
``--repairing`` a worker runs beside it in the same process: real sessions, queue and locks, but
repairs that only wait. Requests are sent from this process on a fixed schedule, to one path after
the other. Each is measured from the time it was due, so a pause counts for all requests that were
due meanwhile.
"""

import asyncio
import gc
import json
import logging
import multiprocessing
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import click
import structlog
from rich.console import Console
from rich.table import Table

from bench.queue_bench import PATHS, ROOT, fill
from bench.queue_nodes import NodesTask, run_nodes
from daemon.http.server import http_thread
from daemon.live_settings import LiveSettings
from daemon.node import YOUNG_OBJECTS_MAX
from daemon.settings import HttpSettings, Settings
from ledgers.zookeeper.store import ZooKeeperStore
from tests.zookeeper_server import running_zookeeper

READS = ("status", "conditions", "blocked", "bookies", "queue", "checks", "hold", "history")
DEFAULT_PATHS = ("/metrics", "/healthz", "/readyz", "/", *(f"/api/v1/{name}" for name in READS))
LAYOUT = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
TIMEOUT_S = 120.0
REPAIR_S = 0.02
PAGES = 5
"""The page is asked for so many times before anything was read, each time at a new server."""


@dataclass(slots=True)
class Answers:
    """The answers of one path."""

    path: str
    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.seconds),
            "failed": self.failed,
            "p50_ms": round(self.quantile_ms(0.5), 1),
            "p99_ms": round(self.quantile_ms(0.99), 1),
            "max_ms": round(self.quantile_ms(1.0), 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """The parameters of the process with the server."""

    hosts: str
    is_repairing: bool


@click.command()
@click.option("--marks", default=100_000, show_default=True, help="Marked ledgers.")
@click.option("--rate", default=100.0, show_default=True, help="Requests per second, all together.")
@click.option("--seconds", default=30.0, show_default=True, help="How long requests are sent.")
@click.option("--repairing", is_flag=True, help="Run a worker in the same process.")
@click.option("--path", "paths", multiple=True, help="Only this path. May be repeated.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def main(
    marks: int, rate: float, seconds: float, repairing: bool, paths: Sequence[str], output: str
) -> None:
    """Latency of a node's HTTP server by path, and of the first page."""
    with tempfile.TemporaryDirectory() as folder, running_zookeeper(Path(folder)) as server:
        asyncio.run(fill(server.address, marks))
        asyncio.run(_prepare(server.address))
        task = ServerTask(hosts=server.address, is_repairing=repairing)
        first_ms = []
        for _ in range(PAGES):
            with _served(task) as port:
                first_ms.append(asyncio.run(_first_page_ms(port)))
        with _served(task) as port:
            answers = asyncio.run(_ask(port, paths or DEFAULT_PATHS, rate=rate, seconds=seconds))
    every = Answers("all", [s for each in answers for s in each.seconds])
    every.failed = sum(each.failed for each in answers)
    rows = {each.path: each.figures for each in (*answers, every)}
    if output == "json":
        click.echo(json.dumps({"marks": marks, "first_page_ms": first_ms, "paths": rows}, indent=2))
        return
    table = Table("path", "requests", "failed", "p50 ms", "p99 ms", "max ms")
    for path, figures in rows.items():
        table.add_row(path, *(f"{value:g}" for value in figures.values()))
    console = Console()
    console.print(table)
    shown = ", ".join(f"{ms:.0f}" for ms in first_ms)
    console.print(f"{marks:,} marks; first page of a new server: {shown} ms")


async def _prepare(hosts: str) -> None:
    """Enable auto-recovery, and make the cluster complete."""
    store = await ZooKeeperStore.open(hosts)
    try:
        await store.delete(PATHS.disable)
        await store.create(f"{ROOT}/LAYOUT", LAYOUT)
    finally:
        await store.close()


# --- The server -----------------------------------------------------------------------------------


@contextmanager
def _served(task: ServerTask) -> Iterator[int]:
    """Run a server in a process of its own, and yield its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(task, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise click.ClickException("the server did not start")
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(task: ServerTask, parent: Connection) -> None:
    """Serve, with the settings of a node, until the process is killed."""

    is_listening = threading.Event()

    def tell(_: object, __: str, event: structlog.typing.EventDict) -> str:
        if event["event"] == "http.listening":
            parent.send(event["port"])
            is_listening.set()
        return json.dumps(event, default=str)

    structlog.configure(
        processors=[tell],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)  # as a node does
    settings = Settings(
        metadata_service_uri=f"zk+hierarchical://{task.hosts}{ROOT}", http=HttpSettings(port=0)
    )
    http_thread(LiveSettings(settings), []).start()
    is_listening.wait()
    if task.is_repairing:  # which configures the log, too
        _, theirs = multiprocessing.Pipe()
        nodes = NodesTask(
            hosts=task.hosts, root=ROOT, paths=PATHS, first=0, count=1, repair_s=REPAIR_S
        )
        threading.Thread(target=run_nodes, args=(nodes, theirs), daemon=True).start()
    threading.Event().wait()


# --- The requests ---------------------------------------------------------------------------------


async def _first_page_ms(port: int) -> float:
    """Return how long a new server takes for the page, which nothing was read for yet."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        began_s = time.perf_counter()
        async with client.get("/") as answer:
            await answer.read()
        return 1000 * (time.perf_counter() - began_s)


async def _ask(port: int, paths: Sequence[str], *, rate: float, seconds: float) -> list[Answers]:
    """Send requests on a fixed schedule. It begins when the status was read for the first time."""
    answers = defaultdict[str, Answers](lambda: Answers(""))
    connector = aiohttp.TCPConnector(limit=100)
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await _until_read(client)
        began_s = time.perf_counter()
        for number in range(int(rate * seconds)):
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            path = paths[number % len(paths)]
            answers[path].path = path
            tasks.create_task(_ask_once(client, answers[path], due_s=due_s))
    return [answers[path] for path in paths]


async def _until_read(client: aiohttp.ClientSession) -> None:
    until_s = time.perf_counter() + TIMEOUT_S
    for name in READS:
        while True:
            async with client.get(f"/api/v1/{name}") as answer:
                if answer.status == 200:
                    break
                told = await answer.text()
            if time.perf_counter() > until_s:
                raise click.ClickException(f"{name} cannot be read: {told}")
            await asyncio.sleep(0.5)


async def _ask_once(client: aiohttp.ClientSession, answers: Answers, *, due_s: float) -> None:
    async with client.get(answers.path) as answer:
        await answer.read()
    answers.seconds.append(time.perf_counter() - due_s)
    answers.failed += answer.status != 200


if __name__ == "__main__":
    main()
