"""A whole run on Spark, on this machine: listed, looked at, and its results written; its own start not counted."""

import multiprocessing
import os
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from auditor.fsck.levels import FsckOptions
from auditor.fsck.results.summary import Counts
from auditor.fsck.running import FsckJob
from auditor.fsck.spark.job import run_fsck
from auditor.fsck.spark.session import open_spark
from bench.fsck.processes import SparkCpu, on_cores
from ledgers.errors import UnavailableError

SLOTS = (1, 2)
"""Tasks that run at once. Spark's JVM, the driver and the servers have all cores of the machine in any case."""
ON_ONE_CORE = "ours on Spark, local[1], all on one core"
"""But here: what two cores are to be compared with."""
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    counts: Counts
    elapsed_s: float
    cpu: SparkCpu


def contender(slot_count: int) -> str:
    return f"ours on Spark, local[{slot_count}]"


def run_on_spark(
    options: FsckOptions,
    slot_count: int,
    *,
    ledger_count: int,
    sharing: Collection[int] = (),
) -> Spent:
    """In a process of its own, with a JVM that has compiled nothing yet, as whoever calls the command has it.

    ``sharing``: servers that are to share one core with all of it. Raises UnavailableError when not as many
    ledgers were looked at, or one is not whole.
    """
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as process:
        spent = process.submit(_run, options, slot_count, sharing).result()
    if spent.counts.verdicts.get("whole") != ledger_count:
        raise UnavailableError(f"of {ledger_count} ledgers: {spent.counts}")
    return spent


def _run(options: FsckOptions, slot_count: int, sharing: Collection[int]) -> Spent:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with ExitStack() as stack:
        output = stack.enter_context(TemporaryDirectory(prefix="bench-fsck-run-"))
        if sharing:
            stack.enter_context(on_cores(1, sharing))
        spark = open_spark(f"local[{slot_count}]", SETTINGS)
        stack.callback(spark.stop)
        spark.range(1).count()
        job = FsckJob(run="20260101T000000Z", output=Path(output))
        began_cpu, began_s = SparkCpu.now(), time.monotonic()
        summary = run_fsck(spark, options, job, lambda progress: None)
        elapsed_s, spent = time.monotonic() - began_s, SparkCpu.now() - began_cpu
    return Spent(counts=summary.counts, elapsed_s=elapsed_s, cpu=spent)
