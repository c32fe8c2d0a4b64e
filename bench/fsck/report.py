"""The results of the fsck bench as Markdown."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import median

from auditor.fsck.options import Level
from bench.fsck.java import JAVA
from bench.fsck.on_spark import FIRST, LATER, ON_ONE_CORE, contender
from bench.fsck.processes import SparkCpu
from bench.fsck.reading import OURS
from bench.fsck.records import Pass
from bench.report import CORES, table

PREAMBLE = """\
# How fast fsck inspects ledgers

One process of ours with our defaults (64 reads in flight per bookie), and three bookies of
BookKeeper 4.18.0 on the same {cores} cores. Every digest is verified; at level full all copies are
compared. Java: its auditor's check of all ledgers at 100 %, 1,000 reads in flight, which verifies
no digest. Median of up to {repeats} passes. See `bench/README.md`.
"""
CPU_OF_RUNS = "Whole runs on Spark, and who used the CPU:\n"
Value = Callable[[Pass], float]
READING: Sequence[tuple[str, Value, int]] = (
    ("ledgers/s", lambda p: p.ledger_count / p.elapsed_s, 0),
    ("copies/s", lambda p: p.copies / p.elapsed_s, 0),
    ("MB/s", lambda p: p.copy_bytes / p.elapsed_s / 1e6, 0),
    ("copies/s per core of the checker's", lambda p: p.copies / p.cpu_s, 0),
    ("MB/s per core of the checker's", lambda p: p.copy_bytes / p.cpu_s / 1e6, 0),
    ("checker, us/copy", lambda p: p.cpu_s / p.copies * 1e6, 2),
    ("bookies, us/copy", lambda p: p.bookies_cpu_s / p.copies * 1e6, 2),
)
METADATA: Sequence[tuple[str, Value, int]] = (
    ("whole pass, s", lambda p: p.elapsed_s, 1),
    ("ledgers/s", lambda p: p.ledger_count / p.elapsed_s, 0),
    ("checker, us/ledger", lambda p: p.cpu_s / p.ledger_count * 1e6, 0),
    ("ZooKeeper, us/ledger", lambda p: p.zookeeper_cpu_s / p.ledger_count * 1e6, 0),
)
PARTIES: Sequence[tuple[str, Value, int]] = (
    ("workers, us/ledger", lambda p: _spark(p).workers_s / p.ledger_count * 1e6, 0),
    ("JVM, us/ledger", lambda p: _spark(p).jvm_s / p.ledger_count * 1e6, 0),
    ("driver, us/ledger", lambda p: _spark(p).driver_s / p.ledger_count * 1e6, 0),
    ("ZooKeeper, us/ledger", lambda p: p.zookeeper_cpu_s / p.ledger_count * 1e6, 0),
    ("cores busy", lambda p: p.cores_busy, 2),
)
SCALING_GOAL = 1.8
"""The goal for level metadata: at other levels bookies share the cores."""
METADATA_LEVEL = Level.METADATA.value
COPIES_GOAL = 100_000


def report(passes: Sequence[Pass], failures: Iterable[str]) -> str:
    repeats = max((p.repeat for p in passes), default=0)
    reading = [p for p in passes if p.copies]
    metadata = [p for p in passes if not p.copies]
    parts = [PREAMBLE.format(cores=CORES, repeats=repeats)]
    if reading:
        parts += [
            "## Reading copies\n",
            _figures(reading, READING),
            *_fastest(reading),
            *_scaling(reading),
        ]
    if metadata:
        on_spark = [p for p in metadata if p.spark_cpu is not None]
        parts += [
            "## Metadata alone\n",
            _figures(metadata, METADATA),
            *([CPU_OF_RUNS, _figures(on_spark, PARTIES)] if on_spark else []),
            *_scaling(metadata),
        ]
    parts += [f"Failed: {failure}\n" for failure in failures]
    return "\n".join(parts)


def _figures(passes: Sequence[Pass], columns: Sequence[tuple[str, Value, int]]) -> str:
    head = ["load", "level", "by", "passes", *(title for title, _, _ in columns)]
    rows = []
    for (load, level, by), same in _grouped(passes).items():
        figures = [f"{median(map(value, same)):,.{digits}f}" for _, value, digits in columns]
        rows.append([load, level, by, str(len(same)), *figures])
    return table(head, rows)


def _fastest(passes: Sequence[Pass]) -> list[str]:
    """Return lines that compare our rate with Java's on the same ledgers."""
    lines = []
    groups = _grouped(passes)
    for (load, level, by), javas in groups.items():
        ours = groups.get((load, level, OURS))
        if by != JAVA or ours is None:
            continue
        our_rate, java_rate = (
            median(p.copies / p.elapsed_s for p in each) for each in (ours, javas)
        )
        verdict = "met" if our_rate >= COPIES_GOAL else "not met"
        lines.append(
            f"{load}: ours {our_rate:,.0f} copies/s with digests verified, "
            f"Java {java_rate:,.0f} without: {our_rate / java_rate:.1f} times."
            f" At least {COPIES_GOAL:,}: {verdict}.\n"
        )
    return lines


def _scaling(passes: Sequence[Pass]) -> list[str]:
    lines = []
    groups = _grouped(passes)
    for in_session, (load, level, by) in product((FIRST, LATER), groups):
        if by != contender(2) + in_session:
            continue
        two = groups[load, level, by]
        of_these = f"{load}, level {level}{in_session}"
        is_goal = level == METADATA_LEVEL
        if one_core := groups.get((load, level, ON_ONE_CORE + in_session)):
            times = _times(two, one_core, is_goal=is_goal)
            lines.append(f"{of_these}: two cores are {times} one that all share{_worth(two)}.\n")
        if one_slot := groups.get((load, level, contender(1) + in_session)):
            times = _times(two, one_slot, is_goal=is_goal)
            busy = median(p.cores_busy for p in one_slot)
            lines.append(
                f"{of_these}: local[2] is {times} local[1], with which {busy:.2f} cores were busy"
                f" already: with all {CORES} it cannot be more than {CORES / busy:.2f} times,"
                " at as much CPU.\n"
            )
    return lines


def _times(two: Sequence[Pass], one: Sequence[Pass], *, is_goal: bool) -> str:
    times = median(p.elapsed_s for p in one) / median(p.elapsed_s for p in two)
    best = min(p.elapsed_s for p in one) / min(p.elapsed_s for p in two)
    verdict = "met" if times >= SCALING_GOAL else "not met"
    goal = f"; {SCALING_GOAL}: {verdict}" if is_goal else ""
    return f"{times:.2f} times as fast (the best against the best {best:.2f}{goal}) as"


def _worth(two: Sequence[Pass]) -> str:
    """Return the gain from the second core itself. It is less than two if others use the machine as
    well."""
    told = [p.scaling_of_cores for p in two if p.scaling_of_cores is not None]
    if not told:
        return ""
    return (
        f"; of a loop that shares nothing {median(told):.2f} times as much was done"
        f" ({min(told):.2f} to {max(told):.2f}) on two in the same minutes"
    )


def _spark(each: Pass) -> SparkCpu:
    assert each.spark_cpu is not None, each
    return each.spark_cpu


def _grouped(passes: Sequence[Pass]) -> dict[tuple[str, str, str], list[Pass]]:
    groups: dict[tuple[str, str, str], list[Pass]] = {}
    for each in passes:
        groups.setdefault((each.load, each.level, each.contender), []).append(each)
    return groups
