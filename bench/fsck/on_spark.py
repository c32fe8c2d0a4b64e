"""Whole runs on Spark, on this machine: listing, inspecting, and writing the results. The start of
Spark is not counted."""

import multiprocessing
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark import SparkContext

from auditor.fsck.options import FsckJob, FsckOptions
from auditor.fsck.results.summary import Counts
from auditor.fsck.run import run_fsck
from auditor.fsck.spark import Dispatch, open_spark, stop_spark
from bench.fsck.processes import SparkCpu, on_cores
from bench.usage import cpu_of
from ledgers.errors import UnavailableError

SLOTS = (1, 2)
"""Tasks that run at once. Spark's JVM, the driver and the servers always have all cores of the
machine."""
ON_ONE_CORE = "ours on Spark, local[1], all on one core"
"""Except for this contender, with which two cores are compared."""
FIRST, LATER = "", ", in a session that has run before"
"""Suffixes of a contender's name: for the first run of a session, and for later ones."""
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
    servers_cpu_s: float


def contender(slot_count: int) -> str:
    return f"ours on Spark, local[{slot_count}]"


def run_on_spark(
    options: FsckOptions,
    slot_count: int,
    *,
    ledger_count: int,
    servers: Collection[int] = (),
    is_on_one_core: bool = False,
    run_count: int = 1,
) -> Sequence[Spent]:
    """Run in a separate process with a new JVM, as the command does.

    Later runs use the same session and its Python workers, as in a session that runs fsck
    repeatedly. ``servers``: their CPU is counted, and they share the core if there is only one.
    Raises UnavailableError if a run inspected too few ledgers, or found one that is not whole.
    """
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as process:
        runs = process.submit(
            _run_in_session, options, slot_count, servers, is_on_one_core, run_count
        ).result()
    for spent in runs:
        if spent.counts.verdicts.get("whole") != ledger_count:
            raise UnavailableError(f"of {ledger_count} ledgers: {spent.counts}")
    return runs


def _run_in_session(
    options: FsckOptions,
    slot_count: int,
    servers: Collection[int],
    is_on_one_core: bool,
    run_count: int,
) -> Sequence[Spent]:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with ExitStack() as stack:
        if is_on_one_core:
            stack.enter_context(on_cores(1, servers))
        context = open_spark(f"local[{slot_count}]", SETTINGS)
        stack.callback(stop_spark, context)
        context.parallelize([0], 1)._jrdd.count()  # Spark's first job is slow, and not counted
        return [_run(context, options, servers) for _ in range(run_count)]


def _run(context: SparkContext, options: FsckOptions, servers: Collection[int]) -> Spent:
    """Run in an empty folder, so that no ledger is known and none is skipped."""
    with TemporaryDirectory(prefix="bench-fsck-run-") as output:
        job = FsckJob(run="20260101T000000Z", output=Path(output))
        began_servers, began_cpu, began_s = cpu_of(servers), SparkCpu.now(), time.monotonic()
        summary = run_fsck(
            Dispatch(context, f"fsck {job.run}"), options, job, lambda progress: None
        )
        elapsed_s, spent = time.monotonic() - began_s, SparkCpu.now() - began_cpu
        servers_spent = cpu_of(servers) - began_servers
    return Spent(
        counts=summary.counts,
        elapsed_s=elapsed_s,
        cpu=spent,
        servers_cpu_s=servers_spent.total_s,
    )
