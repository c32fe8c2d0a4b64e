"""Compares ``fsck run --changed`` with a run over all ledgers: ``python -m bench.fsck_changed``.

ZooKeeper and three bookies run on this machine. The ledgers are only znodes, and level metadata
asks no bookie about them. A node publishes the change feed. Each time is that of a whole command,
from its start to its end, on Spark where the command itself chooses Spark.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from checkpoints.chain import RETENTION_DEFAULT_S, order_change
from checkpoints.log import CheckpointLog
from checkpoints.model import Checkpoint, ledger_id_of
from daemon.local.cluster import LocalCluster
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import NodeExistsError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.store import ANY_VERSION, SetData
from ledgers.tasks import task_scope
from ledgers.zookeeper.store import ZooKeeperStore
from replication import znodes
from replication.znodes import Audit, ClusterPaths
from tests.cluster.steps import AUDITOR_ONLY, start_node
from tests.znode_cluster import ZnodeCluster, closed

FIRST_ID: Final = 10_000_000
"""Ids below are left to the ledgers of the feed."""
SESSION_TIMEOUT_S: Final = 60.0
PUBLISHED_WITHIN_S: Final = 600.0
REPEATS: Final = 3
ZOOKEEPER_HEAP: Final = ("-Xmx3072m", "-XX:TieredStopAtLevel=4")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckChanged:
    """``whole_s``: a run over all ledgers. ``changed_s``: runs over ``changed_count`` ledgers."""

    ledger_count: int
    changed_count: int
    whole_s: float
    changed_s: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """How many times sooner the run over the changed ledgers ends; the median of the runs."""
        return self.whole_s / statistics.median(self.changed_s)

    def __str__(self) -> str:
        times = ", ".join(f"{each:.2f}" for each in self.changed_s)
        return (
            f"fsck --changed, level metadata, {self.changed_count:,} of {self.ledger_count:,} "
            f"ledgers changed: {times} s; all ledgers: {self.whole_s:.1f} s; "
            f"{self.speedup:.0f} x sooner"
        )


def measure(
    ledger_count: int = 100_000, changed_count: int = 1_000, *, repeats: int = REPEATS
) -> FsckChanged:
    """Start a cluster, run fsck over all ledgers once, and then over changed ones.

    A million ledgers take about five minutes on two cores, and 5 GB of memory.
    """
    with tempfile.TemporaryDirectory(prefix="bench-fsck-changed-") as folder:
        cluster = LocalCluster.start(
            Path(folder) / "cluster",
            bookies=3,
            session_timeout_s=SESSION_TIMEOUT_S,
            zookeeper_jvm_flags=ZOOKEEPER_HEAP,
        )
        with cluster:
            return asyncio.run(
                _measure(cluster, Path(folder), ledger_count, changed_count, repeats)
            )


async def _measure(
    cluster: LocalCluster, folder: Path, ledger_count: int, changed_count: int, repeats: int
) -> FsckChanged:
    uri, clock = cluster.metadata_service_uri, SystemClock()
    parsed = MetadataUri.parse(uri)
    paths = ClusterPaths.below(parsed.root)
    async with AsyncExitStack() as stack:
        store = await ZooKeeperStore.open(parsed.hosts, session_timeout_s=SESSION_TIMEOUT_S)
        stack.push_async_callback(store.close)
        ledgers = ZnodeCluster(store)
        ids = range(FIRST_ID, FIRST_ID + ledger_count)
        metadata = closed(*cluster.bookies)
        await ledgers.create_ledgers((ledger_id, metadata) for ledger_id in ids)
        now = znodes.audit_time_to_bytes(clock.wall_ms())
        for audit in Audit:  # else the node would look for entries, which do not exist
            with suppress(NodeExistsError):
                await store.create(paths.audit_time(audit), now, with_parents=True)
        node = start_node(
            "node",
            uri,
            folder,
            settings={**AUDITOR_ONLY, "ZOOKEEPER_SESSION_TIMEOUT_S": "30", "LOG_LEVEL": "info"},
        )
        stack.callback(node.kill)
        await order_change(
            store,
            paths,
            lambda chain: chain.enabled(
                now_ms=clock.wall_ms(), by="bench", retention_s=RETENTION_DEFAULT_S
            ),
        )
        bookies = await stack.enter_async_context(open_bookies(reads_in_flight_max=64))
        log = CheckpointLog(
            store=store,
            paths=paths,
            manager=await LedgerManager.open(store, parsed),
            bookies=bookies,
            clock=clock,
        )
        published = _Published()
        log.register_checkpoint_listener(published)
        scope = await stack.enter_async_context(task_scope())
        scope.start(log.run())
        await published.wait(ledger_count)

        output = folder / "results"
        whole_s, record = await _fsck(uri, output)
        if not record["changes"]["is_whole"] or record["ledgers"] < ledger_count:
            raise UnavailableError(f"not all ledgers were checked: {record}")
        changed_s = []
        rng = random.Random(2)
        for _ in range(repeats):
            chosen = rng.sample(ids, changed_count)
            published.ledger_ids.clear()
            data, _ = await store.get(ledgers.manager.path(chosen[0]))
            await ledgers.send(
                SetData(path=ledgers.manager.path(i), data=data, version=ANY_VERSION)
                for i in chosen
            )
            await published.wait(changed_count)
            elapsed_s, record = await _fsck(uri, output)
            if record["changes"]["changed"] < changed_count:
                raise UnavailableError(f"not all changes were checked: {record}")
            changed_s.append(elapsed_s)
        return FsckChanged(
            ledger_count=ledger_count,
            changed_count=changed_count,
            whole_s=whole_s,
            changed_s=tuple(changed_s),
        )


class _Published:
    """Collects which of the bench's ledgers the feed has told."""

    def __init__(self) -> None:
        self.ledger_ids: set[int] = set()

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        for span in checkpoint.spans:
            ledger_id = ledger_id_of(span.key)
            if ledger_id is not None and ledger_id >= FIRST_ID:
                self.ledger_ids.add(ledger_id)

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(PUBLISHED_WITHIN_S):
            while len(self.ledger_ids) < count:  # noqa: ASYNC110  # the listener is not awaited
                await asyncio.sleep(0.05)


async def _fsck(uri: str, output: Path) -> tuple[float, dict[str, Any]]:
    """Run the command, and return its time and what it printed."""
    command = [sys.executable, "-m", "daemon", "fsck", "run", "--changed", "--level", "metadata"]
    command += ["--output", str(output), "--metadata-service-uri", uri, "-o", "json"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    began_s = time.monotonic()
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=environment, check=False
    )
    elapsed_s = time.monotonic() - began_s
    if done.returncode:
        raise UnavailableError(f"fsck ended with {done.returncode}: {done.stderr}")
    return elapsed_s, json.loads(done.stdout)


@click.command()
@click.option("--ledgers", default=100_000, show_default=True)
@click.option("--changed", default=1_000, show_default=True)
@click.option("--repeats", default=REPEATS, show_default=True)
def main(ledgers: int, changed: int, repeats: int) -> None:
    """Print how much sooner a run over the changed ledgers ends."""
    click.echo(str(measure(ledgers, changed, repeats=repeats)))


if __name__ == "__main__":
    main()
