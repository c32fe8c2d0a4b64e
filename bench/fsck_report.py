"""The results of the fsck bench as Markdown."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from statistics import median

from bench.contenders import JAVA
from bench.records import Record, Records
from bench.report import CORES, Figure, failures_section, named, rate, table

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
                *(f.summary(same).text(f.digits, has_best=False) for f in figures),
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
