"""Inspects ledgers on bookies: with the engine alone in one process, and with runs on Spark."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from auditor.fsck.executor import inspect
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.results.summary import Counts
from auditor.fsck.verdicts import Grade, LedgerVerdict
from bench.fsck.loads import SAMPLE_SHARE
from bench.fsck.on_spark import contender, run_on_spark
from bench.fsck.processes import SparkCpu
from bench.fsck.records import Pass
from bench.inspect_bench import DIGEST, Load, cpu_s, create_ledgers
from bench.loading import store_entries
from bench.usage import Cpu, cpu_of
from daemon.local.cluster import LocalCluster
from ledgers.errors import UnavailableError

OURS = "ours"
BOOKIES = 3


@asynccontextmanager
async def ground(loads: Iterable[Load]) -> AsyncIterator[LocalCluster]:
    """Yield a cluster with these ledgers only. Blocks the loop while the cluster starts."""
    with (
        TemporaryDirectory(prefix="bench-fsck-") as folder,
        LocalCluster.start(Path(folder), bookies=BOOKIES) as cluster,
    ):
        for load in loads:
            for bookie in cluster.bookies:
                store_entries(bookie, load.entries(), master_key=DIGEST.master_key)
            await create_ledgers(cluster, load)
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersCpu:
    """The CPU that the cluster's processes have used so far."""

    bookies: Cpu
    zookeeper: Cpu

    @classmethod
    def now(cls, cluster: LocalCluster) -> "ServersCpu":
        return cls(
            bookies=cpu_of(map(cluster.pid, cluster.bookies)),
            zookeeper=cpu_of([cluster.zookeeper_pid]),
        )


async def inspect_ledger(cluster: LocalCluster, load: Load, level: Level, *, repeat: int) -> Pass:
    """Inspect the load once, including the opening of the session. Raises UnavailableError if a
    ledger is not whole."""
    options = FsckOptions(
        metadata_service_uri=cluster.metadata_service_uri, level=level, sample_share=SAMPLE_SHARE
    )
    copies = copy_bytes = ledger_count = 0
    servers, began_cpu_s, began_s = ServersCpu.now(cluster), cpu_s(), time.monotonic()

    async def add(verdict: LedgerVerdict) -> None:
        nonlocal copies, copy_bytes, ledger_count
        if verdict.grade is not Grade.WHOLE:
            raise UnavailableError(f"ledger {verdict.ledger_id} is not whole: {verdict}")
        ledger_count += 1
        copies += verdict.entries_read
        copy_bytes += verdict.bytes_read

    await inspect(options, load.ledger_ids, add)
    elapsed_s, spent_s = time.monotonic() - began_s, cpu_s() - began_cpu_s
    if ledger_count != load.ledger_count:
        raise UnavailableError(f"{ledger_count} of {load.ledger_count} ledgers were inspected")
    return _pass(
        cluster,
        load.name,
        OURS,
        level,
        repeat,
        counts=Counts(ledgers=ledger_count, entries_read=copies, bytes_read=copy_bytes),
        elapsed_s=elapsed_s,
        spent_s=spent_s,
        servers=servers,
    )


def inspect_all_on_spark(
    cluster: LocalCluster, loads: Sequence[Load], slot_count: int, *, repeat: int
) -> Pass:
    """Inspect all ledgers of the cluster at level full."""
    options = FsckOptions(metadata_service_uri=cluster.metadata_service_uri, level=Level.FULL)
    servers = ServersCpu.now(cluster)
    (spent,) = run_on_spark(
        options,
        slot_count,
        ledger_count=sum(load.ledger_count for load in loads),
    )
    return _pass(
        cluster,
        "all of these",
        contender(slot_count),
        Level.FULL,
        repeat,
        counts=spent.counts,
        elapsed_s=spent.elapsed_s,
        spent_s=spent.cpu.total_s,
        servers=servers,
        spark_cpu=spent.cpu,
    )


def _pass(
    cluster: LocalCluster,
    load: str,
    by: str,
    level: Level,
    repeat: int,
    *,
    counts: Counts,
    elapsed_s: float,
    spent_s: float,
    servers: ServersCpu,
    spark_cpu: SparkCpu | None = None,
) -> Pass:
    """Return the pass. ``servers``: the CPU of the servers before it."""
    now = ServersCpu.now(cluster)
    return Pass(
        load=load,
        contender=by,
        level=level.value,
        repeat=repeat,
        ledger_count=counts.ledgers,
        copies=counts.entries_read,
        copy_bytes=counts.bytes_read,
        elapsed_s=elapsed_s,
        cpu_s=spent_s,
        bookies_cpu_s=(now.bookies - servers.bookies).total_s,
        zookeeper_cpu_s=(now.zookeeper - servers.zookeeper).total_s,
        spark_cpu=spark_cpu,
    )
