"""The metadata level on very many ledgers, which are znodes alone: by one process of ours, and by runs on Spark."""

import os
import time
from collections import defaultdict
from contextlib import aclosing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from auditor.fsck.inspecting import inspect
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.running import FsckJob
from auditor.fsck.spark.job import run_fsck
from auditor.fsck.spark.session import open_spark
from bench.audit.field import Field
from bench.fsck.records import Pass
from bench.inspect_bench import cpu_s
from bench.usage import Cpu, cpu_of
from ledgers.errors import UnavailableError

SPARK_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def load_name(size: int) -> str:
    return f"{size:,} znodes"


async def look_at_all(field: Field, *, repeat: int) -> Pass:
    """By the engine alone: nothing is listed."""
    zookeeper, began_cpu_s, began_s = cpu_of([field.zookeeper_pid]), cpu_s(), time.monotonic()
    count = 0
    async with aclosing(inspect(_options(field), range(field.size))) as verdicts:
        async for _ in verdicts:
            count += 1
    elapsed_s, spent_s = time.monotonic() - began_s, cpu_s() - began_cpu_s
    if count != field.size:
        raise UnavailableError(f"{count} of {field.size} ledgers were looked at")
    return _pass(field, "ours", repeat, elapsed_s, spent_s, zookeeper)


def run_on_spark(field: Field, core_count: int, *, repeat: int) -> Pass:
    """A whole run: listed, looked at, and its results written; Spark itself has started before."""
    with TemporaryDirectory(prefix="bench-fsck-run-") as output:
        spark = open_spark(f"local[{core_count}]", SPARK_SETTINGS)
        try:
            spark.range(1).count()
            job = FsckJob(run="20260101T000000Z", output=Path(output))
            zookeeper, began_cpu, began_s = (
                cpu_of([field.zookeeper_pid]),
                _family(field),
                time.monotonic(),
            )
            summary = run_fsck(spark, _options(field), job, lambda progress: None)
            elapsed_s, spent = time.monotonic() - began_s, _family(field) - began_cpu
        finally:
            spark.stop()
    if summary.counts.ledgers != field.size:
        raise UnavailableError(f"{summary.counts.ledgers} of {field.size} ledgers were looked at")
    contender = f"ours on Spark, local[{core_count}]"
    return _pass(field, contender, repeat, elapsed_s, spent.total_s, zookeeper)


def _options(field: Field) -> FsckOptions:
    return FsckOptions(metadata_service_uri=field.metadata_service_uri, level=Level.METADATA)


def _pass(
    field: Field, contender: str, repeat: int, elapsed_s: float, spent_s: float, zookeeper: Cpu
) -> Pass:
    return Pass(
        load=load_name(field.size),
        contender=contender,
        level=Level.METADATA.value,
        repeat=repeat,
        ledger_count=field.size,
        copies=0,
        copy_bytes=0,
        elapsed_s=elapsed_s,
        cpu_s=spent_s,
        bookies_cpu_s=0.0,
        zookeeper_cpu_s=(cpu_of([field.zookeeper_pid]) - zookeeper).total_s,
    )


def _family(field: Field) -> Cpu:
    """Of this process and all that descend from it, but for ZooKeeper, which is counted by itself."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        found.append(pid)
        left += [child for child in children[pid] if child != field.zookeeper_pid]
    return cpu_of(found)
