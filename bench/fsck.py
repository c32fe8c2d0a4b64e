"""Measures how fast fsck inspects ledgers at each level, compared with Java's check of all ledgers:
``python -m bench.fsck``.

Ours inspects with the engine alone in one process, and in whole runs on Spark: listing, inspecting,
and writing the results. The start of Spark is not counted. Java's auditor checks every entry of
every copy of all ledgers, repeatedly in one run of its daemon. Its check reads entries and verifies
no digest. Its log says how long a check took. Its CPU is that of its daemon between the ends of two
checks, with nothing subtracted, because the daemon is otherwise idle.

Every record is written at once. Parts that are not selected (``--only``) keep their results.
"""

import asyncio
import multiprocessing
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
from pyspark import SparkContext

from auditor.fsck.executor import inspect
from auditor.fsck.options import FsckJob, FsckOptions, Level
from auditor.fsck.results.summary import Counts
from auditor.fsck.run import run_fsck
from auditor.fsck.spark import Dispatch, open_spark, stop_spark
from auditor.fsck.verdicts import Grade, LedgerVerdict
from bench.arena import Arena, open_arena
from bench.contenders import JAVA
from bench.loads import BenchLedger, alike
from bench.records import Record, Records
from bench.report import CORES, Figure, failures_section, named, rate, table
from bench.session import Session, bench_session, chosen, quick_option, results_option
from bench.spark_processes import on_cores, spark_cpu
from bench.usage import cpu_of
from bench.waiting import wait_until
from bench.znodes import Field, open_field
from daemon.local.processes import Child
from ledgers.errors import UnavailableError

SIZES, QUICK_SIZES = (100_000, 1_000_000), (2_000, 20_000)
LONG_FROM = 500_000
"""From this number of ledgers on, a pass takes minutes, and the start of a session hardly matters.
"""
RUNS_IN_SESSION = 4
SLOTS = (1, 2)
"""Tasks that run at once. Spark's JVM, the driver and the servers always have all cores of the
machine."""
SAMPLE_SHARE = 0.1
COPIES = 3
"""Every ledger is closed, with all its entries on each of three bookies."""
LARGE, SMALL = (
    {
        name: alike(name, name, ledgers, entries, payload_bytes=size)
        for name, ledgers, entries, size in shapes
    }
    for shapes in (
        (("100 B", 10, 10_000, 100), ("1 KB", 10, 10_000, 1_024), ("64 KB", 5, 400, 65_536)),
        (
            ("100 B, ledgers of 10", 3_000, 10, 100),
            ("1 KB, ledgers of 10", 3_000, 10, 1_024),
            ("64 KB, ledgers of 10", 150, 10, 65_536),
        ),
    )
)
LOADS = {**LARGE, **SMALL}
JAVAS = ("1 KB", "1 KB, ledgers of 10")
"""The loads that Java's auditor checks as well, and those of a quick run. They are alone on the
bookies, because it always checks all ledgers."""
JAVA_SETTINGS = {
    "auditorPeriodicCheckInterval": "1",
    "auditorLedgerVerificationPercentage": "100",
    "auditorPeriodicBookieCheckInterval": "0",
    "inFlightReadEntryNumInLedgerChecker": "1000",
}
"""All entries; the next check starts when the last one is over."""
CHECK_TIMEOUT_S, POLL_S = 120.0, 0.02
_DONE = re.compile(r"Completed checkAllLedgers \{durationMs=(\d+)\}")
SPARK_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@click.command()
@click.option("--only", default="reading,java,metadata", show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Passes of each kind.")
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Of metadata.")
@quick_option
@results_option
def main(only: str, repeat: int, sizes: str, quick: bool, results: Path | None) -> None:
    """Measure how fast fsck inspects ledgers at each level, compared with Java's check."""
    with bench_session("fsck", report, results=results, is_kept=not quick) as session:
        bench = Bench(
            session=session,
            repeats=range(1, 2 if quick else repeat + 1),
            sizes=QUICK_SIZES if quick else sorted(map(int, sizes.split(","))),
            is_quick=quick,
        )
        parts = {"reading": bench.reading, "java": bench.java, "metadata": bench.metadata}
        for part in chosen(parts, only):
            with session.attempt(part.__name__):
                asyncio.run(part())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The parts of the bench. Every part has a cluster of its own."""

    session: Session
    repeats: range
    sizes: Sequence[int]
    is_quick: bool

    async def reading(self) -> None:
        """Inspect each load at every level, and repeat the whole round.

        The first inspection does not count, as with Java's first check: bookies still compile their
        code then. The ends of large ledgers take too little time to measure.
        """
        wanted = [LOADS[name] for name in (JAVAS if self.is_quick else LOADS)]
        async with open_arena(bookies=COPIES) as arena:
            stored = {load.name: await arena.write(load) for load in wanted}
            uri, servers = arena.cluster.metadata_service_uri, _servers(arena)
            for ledgers in stored.values():
                await _inspect(uri, [each.ledger_id for each in ledgers], Level.FULL, servers)
            for repeat in self.repeats:
                for load, ledgers in stored.items():
                    ids = [each.ledger_id for each in ledgers]
                    is_large = load in LARGE
                    for level in Level:
                        if level is Level.FULL or (level is Level.SAMPLE) is is_large:
                            values = await _inspect(uri, ids, level, servers)
                            self._add(load, OURS, level, repeat, values)
                for slot_count in SLOTS:
                    options = FsckOptions(metadata_service_uri=uri, level=Level.FULL)
                    count = sum(map(len, stored.values()))
                    (values,) = await asyncio.to_thread(
                        run_on_spark, options, slot_count, servers, ledger_count=count
                    )
                    self._add("all of these", on_spark(slot_count), Level.FULL, repeat, values)

    async def java(self) -> None:
        """Let Java's auditor check the ledgers. The first check does not count, because its code is
        still being compiled."""
        for name in JAVAS[:1] if self.is_quick else JAVAS:
            async with open_arena(bookies=COPIES) as arena:
                ledgers = await arena.write(LOADS[name])
                child = arena.cluster.start_autorecovery(JAVA.name, settings=JAVA_SETTINGS)
                servers = _servers(arena) | {"cpu_s": [child.pid]}
                try:
                    before: Mapping[str, float] = {}
                    for repeat in (0, *self.repeats):
                        elapsed_s = await _checked_s(child, repeat)
                        now = _cpu(servers)
                        if repeat:
                            values = _grown(before, now) | _copies(ledgers)
                            values["elapsed_s"] = elapsed_s
                            self._add(name, JAVA.title, Level.FULL, repeat, values)
                        before = now
                finally:
                    child.kill()

    async def metadata(self) -> None:
        """Inspect very many ledgers that are only znodes. One core, which Spark and the servers
        share, is compared with two."""
        async with open_field() as field:
            for size in self.sizes:
                self.session.say(f"{size:,} ledgers: making those that are not there yet")
                await field.grow(size)
                is_short = size < LONG_FROM
                for repeat in self.repeats:
                    if is_short or repeat == 1:
                        servers = {"zookeeper_cpu_s": [field.zookeeper_pid]}
                        uri = field.metadata_service_uri
                        values = await _inspect(uri, range(size), Level.METADATA, servers)
                        self._add(f"{size:,} znodes", OURS, Level.METADATA, repeat, values)
                    for slot_count, is_on_one_core in ((1, True), *((n, False) for n in SLOTS)):
                        await self._metadata_on_spark(
                            field, slot_count, repeat, is_on_one_core=is_on_one_core
                        )

    async def _metadata_on_spark(
        self, field: Field, slot_count: int, session: int, *, is_on_one_core: bool
    ) -> None:
        """Inspect all ledgers several times in one session. ``session``: its number."""
        run_count = RUNS_IN_SESSION if field.size < LONG_FROM else 1
        runs = await asyncio.to_thread(
            run_on_spark,
            FsckOptions(metadata_service_uri=field.metadata_service_uri, level=Level.METADATA),
            slot_count,
            {"zookeeper_cpu_s": [field.zookeeper_pid]},
            ledger_count=field.size,
            is_on_one_core=is_on_one_core,
            run_count=run_count,
        )
        by = ON_ONE_CORE if is_on_one_core else on_spark(slot_count)
        for number, values in enumerate(runs):
            repeat = (session - 1) * (run_count - 1) + number if number else session
            name = by + (LATER if number else "")
            self._add(f"{field.size:,} znodes", name, Level.METADATA, repeat, values)

    def _add(
        self, load: str, by: str, level: Level, repeat: int, values: Mapping[str, float]
    ) -> None:
        """Record one pass, in which all ledgers of a load were inspected once. A copy is an entry
        that was read from one bookie."""
        labels: dict[str, str | int] = {"load": load, "contender": by}
        labels |= {"level": level.value, "repeat": repeat}
        self.session.add(Record(name=PASS, labels=labels, values=values))


async def _checked_s(child: Child, number: int) -> float:
    """Wait for the given check of Java's auditor, and return how long it took."""

    def done() -> list[str]:
        return _DONE.findall(child.log.read_text())

    await wait_until(
        lambda: len(done()) > number,
        "the end of Java's check",
        timeout_s=CHECK_TIMEOUT_S,
        child=child,
        poll_s=POLL_S,
    )
    return int(done()[number]) / 1_000


Processes = Mapping[str, Collection[int | None]]
"""Process ids, by the name of the value that has their CPU."""


def _servers(arena: Arena) -> dict[str, Collection[int | None]]:
    cluster = arena.cluster
    return {
        "bookies_cpu_s": [cluster.pid(bookie) for bookie in cluster.bookies],
        "zookeeper_cpu_s": [cluster.zookeeper_pid],
    }


def _cpu(processes: Processes) -> dict[str, float]:
    return {name: cpu_of(pids) for name, pids in processes.items()}


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in now.items()}


def _copies(ledgers: Sequence[BenchLedger]) -> dict[str, float]:
    counts = [COPIES * each.part.entry_count for each in ledgers]
    copy_bytes = sum(
        count * each.part.entry_bytes for count, each in zip(counts, ledgers, strict=True)
    )
    return {"ledger_count": len(ledgers), "copies": sum(counts), "copy_bytes": copy_bytes}


async def _inspect(
    uri: str, ledger_ids: Sequence[int], level: Level, servers: Processes
) -> dict[str, float]:
    """Inspect the ledgers once with the engine alone, without listing them, and including the
    opening of the session. Raises UnavailableError if a ledger is not whole."""
    options = FsckOptions(metadata_service_uri=uri, level=level, sample_share=SAMPLE_SHARE)
    counts = dict.fromkeys(("ledger_count", "copies", "copy_bytes"), 0.0)
    before, own_before_s, began_s = _cpu(servers), time.process_time(), time.monotonic()

    async def add(verdict: LedgerVerdict) -> None:
        if verdict.grade is not Grade.WHOLE:
            raise UnavailableError(f"ledger {verdict.ledger_id} is not whole: {verdict}")
        counts["ledger_count"] += 1
        counts["copies"] += verdict.entries_read
        counts["copy_bytes"] += verdict.bytes_read

    await inspect(options, ledger_ids, add)
    if counts["ledger_count"] != len(ledger_ids):
        raise UnavailableError(f"of {len(ledger_ids)} ledgers: {counts}")
    return {
        **counts,
        **_grown(before, _cpu(servers)),
        "cpu_s": time.process_time() - own_before_s,
        "elapsed_s": time.monotonic() - began_s,
    }


# --- Runs on Spark --------------------------------------------------------------------------------


def run_on_spark(
    options: FsckOptions,
    slot_count: int,
    servers: Processes,
    *,
    ledger_count: int,
    is_on_one_core: bool = False,
    run_count: int = 1,
) -> list[dict[str, float]]:
    """Run in a separate process with a new JVM, as the command does, and return the values of each
    run.

    Later runs use the same session and its Python workers, as in a session that runs fsck
    repeatedly. ``servers``: they share the core if there is only one. Raises UnavailableError if a
    run inspected too few ledgers, or found one that is not whole.
    """
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as process:
        arguments = (options, slot_count, servers, is_on_one_core, run_count)
        runs = process.submit(_run_in_session, *arguments).result()
    for counts, _ in runs:
        if counts.verdicts.get("whole") != ledger_count:
            raise UnavailableError(f"of {ledger_count} ledgers: {counts}")
    return [values for _, values in runs]


def _run_in_session(
    options: FsckOptions,
    slot_count: int,
    servers: Processes,
    is_on_one_core: bool,
    run_count: int,
) -> list[tuple[Counts, dict[str, float]]]:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with ExitStack() as stack:
        if is_on_one_core:
            pids = [pid for each in servers.values() for pid in each if pid is not None]
            stack.enter_context(on_cores(1, pids))
        context = open_spark(f"local[{slot_count}]", SPARK_SETTINGS)
        stack.callback(stop_spark, context)
        context.parallelize([0], 1)._jrdd.count()  # Spark's first job is slow, and not counted
        return [_run(context, options, servers) for _ in range(run_count)]


def _run(
    context: SparkContext, options: FsckOptions, servers: Processes
) -> tuple[Counts, dict[str, float]]:
    """Run in an empty folder, so that no ledger is known and none is skipped."""
    with TemporaryDirectory(prefix="bench-fsck-run-") as output:
        job = FsckJob(run="20260101T000000Z", output=Path(output))
        before, spark_before, began_s = _cpu(servers), spark_cpu(), time.monotonic()
        dispatch = Dispatch(context, f"fsck {job.run}")
        counts = run_fsck(dispatch, options, job, lambda progress: None).counts
        elapsed_s, spent = time.monotonic() - began_s, _grown(spark_before, spark_cpu())
        values = {
            **_grown(before, _cpu(servers)),
            **{f"spark_{part}": cpu_s for part, cpu_s in spent.items()},
            "ledger_count": counts.ledgers,
            "copies": counts.entries_read,
            "copy_bytes": counts.bytes_read,
            "cpu_s": sum(spent.values()),
            "elapsed_s": elapsed_s,
        }
    return counts, values


# --- The report -----------------------------------------------------------------------------------

PASS = "pass"
"""The name of the records: all ledgers of a load, inspected once.

CPU in seconds: ``cpu_s`` of all processes that inspect, and for a run on Spark also its parts,
``spark_…``. ``scaling_of_cores``: what a second core was worth during the run; only in the
recorded results."""
OURS = "ours"
ON_ONE_CORE = "ours on Spark, local[1], all on one core"
"""Also the JVM, the driver and the servers. Two cores are compared with this contender."""
LATER = ", in a session that has run before"
"""Added to a contender's name for the later runs of a session."""
METADATA_LEVEL = "metadata"
SCALING_GOAL = 1.8
"""The goal for level metadata: at other levels bookies share the cores."""
COPIES_GOAL = 100_000
PREAMBLE = """\
# How fast fsck inspects ledgers

One process of ours with our defaults (64 reads in flight per bookie), and three bookies of
BookKeeper 4.18.0 on the same {cores} cores. Every digest is verified; at level full all copies are
compared. Java: its auditor's check of all ledgers at 100 %, 1,000 reads in flight, which verifies
no digest. Median of up to {repeats} passes. See `bench/README.md`.
"""


def us(name: str, title: str, of: str = "ledger", digits: int = 0) -> Figure:
    over = {"ledger": "ledger_count", "copy": "copies"}[of]
    return rate(name, over, f"{title}, us/{of}", scale=1e6, digits=digits)


PER_CORE = "per core of the checker's"
READING = (
    rate("ledger_count", "elapsed_s", "ledgers/s"),
    rate("copies", "elapsed_s", "copies/s"),
    rate("copy_bytes", "elapsed_s", "MB/s", scale=1e-6),
    rate("copies", "cpu_s", f"copies/s {PER_CORE}"),
    rate("copy_bytes", "cpu_s", f"MB/s {PER_CORE}", scale=1e-6),
    us("cpu_s", "checker", "copy", 2),
    us("bookies_cpu_s", "bookies", "copy", 2),
)
METADATA = (
    named("elapsed_s", "whole pass, s", digits=1),
    READING[0],
    us("cpu_s", "checker"),
    us("zookeeper_cpu_s", "ZooKeeper"),
)
CORES_BUSY = Figure(
    title="cores busy",
    value=lambda p: (
        sum(p.values.get(f"{each}cpu_s", 0.0) for each in ("", "bookies_", "zookeeper_"))
        / p.values["elapsed_s"]
    ),
    digits=2,
)
"""All processes of the run together."""
PARTIES = (
    us("spark_workers_s", "workers"),
    us("spark_jvm_s", "JVM"),
    us("spark_driver_s", "driver"),
    us("zookeeper_cpu_s", "ZooKeeper"),
    CORES_BUSY,
)
Groups = dict[tuple[str, str, str], list[Record]]
"""Passes by load, level and contender."""


def report(records: Records) -> str:
    passes = records.find(PASS)
    reading = _grouped(each for each in passes if each.values["copies"])
    metadata = _grouped(each for each in passes if not each.values["copies"])
    on_spark = {key: each for key, each in metadata.items() if "spark_jvm_s" in each[0].values}
    repeats = max((each.labels["repeat"] for each in passes), default=0)
    parts = [PREAMBLE.format(cores=CORES, repeats=repeats), *failures_section(records)]
    if reading:
        parts += ["## Reading copies\n", _table(reading, READING)]
        parts += [*_fastest(reading), *_scaling(reading)]
    if metadata:
        parts += ["## Metadata alone\n", _table(metadata, METADATA)]
        if on_spark:
            parts += ["Whole runs on Spark, and who used the CPU:\n", _table(on_spark, PARTIES)]
        parts += _scaling(metadata)
    return "\n".join(parts)


def on_spark(slot_count: int) -> str:
    """Return the name of the contender with so many tasks at once."""
    return f"ours on Spark, local[{slot_count}]"


def _grouped(passes: Iterable[Record]) -> Groups:
    groups: Groups = {}
    for each in passes:
        load, level, by = (str(each.labels[label]) for label in ("load", "level", "contender"))
        groups.setdefault((load, level, by), []).append(each)
    return groups


def _table(groups: Groups, figures: Sequence[Figure]) -> str:
    return table(
        ["load", "level", "by", "passes", *(figure.title for figure in figures)],
        [
            [
                *key,
                str(len(same)),
                *(f.summary(same).text(f.digits) for f in figures),
            ]
            for key, same in groups.items()
        ],
    )


def _fastest(groups: Groups) -> Iterator[str]:
    """Yield lines that compare our rate with Java's on the same ledgers."""
    for (load, level, by), javas in groups.items():
        ours = groups.get((load, level, OURS))
        if by != JAVA.title or ours is None:
            continue
        our_rate, java_rate = (READING[1].summary(each).median for each in (ours, javas))
        verdict = "met" if our_rate >= COPIES_GOAL else "not met"
        yield (
            f"{load}: ours {our_rate:,.0f} copies/s with digests verified, "
            f"Java {java_rate:,.0f} without: {our_rate / java_rate:.1f} times."
            f" At least {COPIES_GOAL:,}: {verdict}.\n"
        )


def _scaling(groups: Groups) -> Iterator[str]:
    """Yield lines that compare two cores, or two tasks at once, with one."""
    for in_session, (load, level, by) in product(("", LATER), groups):
        if by != on_spark(2) + in_session:
            continue
        two = groups[load, level, by]
        of_these = f"{load}, level {level}{in_session}"
        is_goal = level == METADATA_LEVEL
        if one_core := groups.get((load, level, ON_ONE_CORE + in_session)):
            times = _times(two, one_core, is_goal=is_goal)
            yield f"{of_these}: two cores are {times} one that all share{_worth(two)}.\n"
        if one_slot := groups.get((load, level, on_spark(1) + in_session)):
            times = _times(two, one_slot, is_goal=is_goal)
            busy = CORES_BUSY.summary(one_slot).median
            yield (
                f"{of_these}: local[2] is {times} local[1], with which {busy:.2f} cores were busy"
                f" already: with all {CORES} it cannot be more than {CORES / busy:.2f} times,"
                " at as much CPU.\n"
            )


def _times(two: Sequence[Record], one: Sequence[Record], *, is_goal: bool) -> str:
    times = METADATA[0].ratio(one, two)
    verdict = "met" if times.median >= SCALING_GOAL else "not met"
    goal = f"; {SCALING_GOAL}: {verdict}" if is_goal else ""
    return f"{times.median:.2f} times as fast (the best against the best {times.best:.2f}{goal}) as"


def _worth(two: Sequence[Record]) -> str:
    """Return the gain from the second core itself. It is less than two if others use the machine as
    well."""
    told = [p.values["scaling_of_cores"] for p in two if "scaling_of_cores" in p.values]
    if not told:
        return ""
    return (
        f"; of a loop that shares nothing {median(told):.2f} times as much was done"
        f" ({min(told):.2f} to {max(told):.2f}) on two in the same minutes"
    )


if __name__ == "__main__":
    main()
