"""A whole run on Spark, on this machine: listed, looked at, and its results written; its own start not counted."""

import os
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from auditor.fsck.levels import FsckOptions
from auditor.fsck.results.summary import Counts
from auditor.fsck.running import FsckJob
from auditor.fsck.spark.job import run_fsck
from auditor.fsck.spark.session import open_spark
from bench.usage import Cpu, cpu_of
from ledgers.errors import UnavailableError

CORES = (1, 2)
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    counts: Counts
    elapsed_s: float
    cpu_s: float
    """Of Spark's JVM and all Python, this process's as well."""


def contender(core_count: int) -> str:
    return f"ours on Spark, local[{core_count}]"


def run_on_spark(
    options: FsckOptions, core_count: int, *, ledger_count: int, servers: Collection[int | None]
) -> Spent:
    """``servers``: processes that are ours, too, but count by themselves. Raises UnavailableError when not as many
    ledgers were looked at, or one is not whole."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with TemporaryDirectory(prefix="bench-fsck-run-") as output:
        spark = open_spark(f"local[{core_count}]", SETTINGS)
        try:
            spark.range(1).count()
            job = FsckJob(run="20260101T000000Z", output=Path(output))
            began_cpu, began_s = _family(servers), time.monotonic()
            summary = run_fsck(spark, options, job, lambda progress: None)
            elapsed_s, spent = time.monotonic() - began_s, _family(servers) - began_cpu
        finally:
            spark.stop()
    if summary.counts.verdicts.get("whole") != ledger_count:
        raise UnavailableError(f"of {ledger_count} ledgers: {summary.counts}")
    return Spent(counts=summary.counts, elapsed_s=elapsed_s, cpu_s=spent.total_s)


def _family(servers: Collection[int | None]) -> Cpu:
    """Of this process and all that descend from it, but for the servers."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        found.append(pid)
        left += [child for child in children[pid] if child not in servers]
    return cpu_of(found)
