"""Inspects very many ledgers at level metadata. The ledgers are only znodes. Uses the engine alone
in one process, and runs on Spark."""

import time
from collections.abc import Sequence

from auditor.fsck.executor import inspect
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import LedgerVerdict
from bench.audit.field import Field
from bench.fsck.on_spark import FIRST, LATER, ON_ONE_CORE, contender, run_on_spark
from bench.fsck.processes import SparkCpu, scaling_of_cores
from bench.fsck.reading import OURS
from bench.fsck.records import Pass
from bench.inspect_bench import cpu_s
from bench.usage import cpu_of
from ledgers.errors import UnavailableError


async def inspect_all(field: Field, *, repeat: int) -> Pass:
    """Inspect all ledgers with the engine alone, without listing them."""
    zookeeper, began_cpu_s, began_s = cpu_of([field.zookeeper_pid]), cpu_s(), time.monotonic()
    count = 0

    async def add(_: LedgerVerdict) -> None:
        nonlocal count
        count += 1

    await inspect(_options(field), range(field.size), add)
    elapsed_s, spent_s = time.monotonic() - began_s, cpu_s() - began_cpu_s
    if count != field.size:
        raise UnavailableError(f"{count} of {field.size} ledgers were inspected")
    zookeeper_cpu_s = (cpu_of([field.zookeeper_pid]) - zookeeper).total_s
    return _pass(field, OURS, repeat, elapsed_s, spent_s, zookeeper_cpu_s)


def inspect_all_on_spark(
    field: Field, slot_count: int, *, repeat: int, run_count: int, is_on_one_core: bool = False
) -> Sequence[Pass]:
    """Inspect all ledgers several times in one session. ``repeat``: the number of the session."""
    runs = run_on_spark(
        _options(field),
        slot_count,
        ledger_count=field.size,
        servers=[field.zookeeper_pid],
        is_on_one_core=is_on_one_core,
        run_count=run_count,
    )
    worth = None if is_on_one_core else scaling_of_cores()
    by = ON_ONE_CORE if is_on_one_core else contender(slot_count)
    later_before = (repeat - 1) * (run_count - 1)
    return [
        _pass(
            field,
            by + (LATER if number else FIRST),
            later_before + number if number else repeat,
            spent.elapsed_s,
            spent.cpu.total_s,
            spent.servers_cpu_s,
            spark_cpu=spent.cpu,
            scaling_of_cores=worth,
        )
        for number, spent in enumerate(runs)
    ]


def _options(field: Field) -> FsckOptions:
    return FsckOptions(metadata_service_uri=field.metadata_service_uri, level=Level.METADATA)


def _pass(
    field: Field,
    by: str,
    repeat: int,
    elapsed_s: float,
    spent_s: float,
    zookeeper_cpu_s: float,
    spark_cpu: SparkCpu | None = None,
    scaling_of_cores: float | None = None,
) -> Pass:
    return Pass(
        load=f"{field.size:,} znodes",
        contender=by,
        level=Level.METADATA.value,
        repeat=repeat,
        ledger_count=field.size,
        copies=0,
        copy_bytes=0,
        elapsed_s=elapsed_s,
        cpu_s=spent_s,
        bookies_cpu_s=0.0,
        zookeeper_cpu_s=zookeeper_cpu_s,
        spark_cpu=spark_cpu,
        scaling_of_cores=scaling_of_cores,
    )
