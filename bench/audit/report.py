"""The results as Markdown: the goals and whether they are met, then every figure at every size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.audit.records import (
    Loss,
    Record,
    idle_of,
    ledger_map_bytes_per_ledger,
    losses_of,
    median_all_s,
    median_first_s,
    rss_per_ledger,
    sizes_of,
)
from bench.audit.turns import BY_NAME, CONTENDERS, JAVA, OURS
from bench.report import CORES, table

PREAMBLE = """\
# Marking the ledgers of a lost bookie, against Java's auditor

A real ZooKeeper; bookies and ledgers are only znodes. One of about 50 bookies is lost, which {lost}
ledgers name, with a recovery delay of 0. Times count from the deletion of its znode, by
ZooKeeper's clock, in milliseconds. Median of up to {repeats} losses, on {cores} cores that
ZooKeeper, auditor and bench share. See `bench/README.md`.
"""
MEASURED_SIZE = 100_000
"""The figures that the goals are about."""

Value = Callable[[Sequence[Record]], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal. ``value``: returns None if it was not measured."""

    title: str
    value: Value
    limit: float
    at_least: bool = False
    unit: str = ""

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def times_sooner(pick: Callable[[Sequence[Loss]], float | None]) -> Value:
    def value(records: Sequence[Record]) -> float | None:
        ours = pick(losses_of(records, MEASURED_SIZE, OURS.name))
        java = pick(losses_of(records, MEASURED_SIZE, JAVA.name))
        return java / max(ours, 0.001) if ours is not None and java is not None else None

    return value


def own_first_ms(records: Sequence[Record]) -> float | None:
    """Return the slowest time of all sizes."""
    times_s = [median_first_s(losses_of(records, size, OURS.name)) for size in sizes_of(records)]
    known = [each for each in times_s if each is not None]
    return max(known) * 1000 if known else None


def ledger_map_bytes(size: int) -> Value:
    return lambda records: ledger_map_bytes_per_ledger(records, size)


def idle_mb(records: Sequence[Record]) -> float | None:
    idle = idle_of(records, MEASURED_SIZE, OURS.name)
    return None if idle is None else idle.rss_bytes / 1e6


def idle_share(records: Sequence[Record]) -> float | None:
    idle = idle_of(records, MEASURED_SIZE, OURS.name)
    return None if idle is None else idle.core_share * 100


GOALS = (
    Goal(
        title="first mark, times sooner",
        value=times_sooner(median_first_s),
        limit=50,
        at_least=True,
    ),
    Goal(title="all marks, times sooner", value=times_sooner(median_all_s), limit=5, at_least=True),
    Goal(title="first mark, at every size", value=own_first_ms, limit=100, unit=" ms"),
    Goal(title="ledger map, a ledger", value=ledger_map_bytes(MEASURED_SIZE), limit=150, unit=" B"),
    Goal(
        title="ledger map, a ledger of a million",
        value=ledger_map_bytes(1_000_000),
        limit=150,
        unit=" B",
    ),
    Goal(title="idle node, RSS", value=idle_mb, limit=100, unit=" MB"),
    Goal(title="idle node, of a core", value=idle_share, limit=0.5, unit=" %"),
)


def report(records: Sequence[Record], *, failures: Sequence[str] = ()) -> str:
    """Return the report. ``failures``: turns that failed, and why."""
    losses = [each for each in records if isinstance(each, Loss)]
    sections = [
        PREAMBLE.format(
            lost=f"{max((each.ledger_count for each in losses), default=0):,}",
            repeats=max((each.repeat for each in losses), default=0),
            cores=CORES,
        ),
        *(["## Turns that came to nothing\n\n" + _list(failures)] if failures else []),
        f"## Goals\n\nAt {MEASURED_SIZE:,} ledgers, unless it says otherwise.\n\n"
        + table(["goal", "measured", "wanted", ""], list(_goal_rows(records))),
        *(_section(records, size) for size in sizes_of(records)),
        *_idle(records),
    ]
    return "\n".join(sections)


def _goal_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    for goal in GOALS:
        if (value := goal.value(records)) is not None:
            sign = "≥" if goal.at_least else "≤"
            yield [
                goal.title,
                f"{value:,.3g}{goal.unit}" if value < 100 else f"{value:,.0f}{goal.unit}",
                f"{sign} {goal.limit:g}{goal.unit}",
                "met" if goal.is_met(value) else "MISSED",
            ]


def _section(records: Sequence[Record], size: int) -> str:
    by_name = {each.name: losses_of(records, size, each.name) for each in CONTENDERS}
    shown = {name: losses for name, losses in by_name.items() if losses}
    rows = [
        ["first mark after, s", *(_time(median_first_s(each)) for each in shown.values())],
        ["all marked after, s", *(_time(median_all_s(each)) for each in shown.values())],
        ["losses", *(str(len(each)) for each in shown.values())],
        ["ZooKeeper packets", *_medians(shown, lambda loss: loss.packets, 0)],
        ["auditor's CPU, s", *_medians(shown, lambda loss: loss.cpu_s, 2)],
        ["ZooKeeper's CPU, s", *_medians(shown, lambda loss: loss.zookeeper_cpu_s, 2)],
        ["ledgers read a second", *(_read_rate(each) for each in shown.values())],
        ["RSS, MB", *_medians(shown, lambda loss: loss.rss_bytes / 1e6, 0)],
        ["highest RSS, MB", *_medians(shown, lambda loss: loss.rss_bytes_max / 1e6, 0)],
        ["RSS a ledger beyond the fewest, B", *(_rss(records, size, name) for name in shown)],
        ["ledger map alone, a ledger, B", *(_ledger_map(records, size, name) for name in shown)],
    ]
    return f"## {size:,} ledgers\n\n" + table(["", *(BY_NAME[name].title for name in shown)], rows)


def _medians(
    shown: dict[str, list[Loss]], value: Callable[[Loss], float], digits: int
) -> Iterator[str]:
    for losses in shown.values():
        yield f"{median(map(value, losses)):,.{digits}f}"


def _read_rate(losses: Sequence[Loss]) -> str:
    """Return the read rate. An auditor without a ledger map reads all ledgers before the first
    mark."""
    rates = [each.ledgers_per_s for each in losses if each.ledgers_per_s is not None]
    first_s = median_first_s(losses)
    if rates:
        return f"{median(rates):,.0f}, once"
    return "" if first_s is None else f"{losses[0].size / first_s:,.0f}, at each loss"


def _rss(records: Sequence[Record], size: int, name: str) -> str:
    """Return the memory; nothing for Java, because a JVM's heap size says little about it."""
    return _bytes(rss_per_ledger(records, size, name) if BY_NAME[name].is_ours else None)


def _ledger_map(records: Sequence[Record], size: int, name: str) -> str:
    return _bytes(ledger_map_bytes_per_ledger(records, size) if BY_NAME[name].is_ours else None)


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _idle(records: Sequence[Record]) -> Iterator[str]:
    rows = [
        [
            each.title,
            f"{idle.rss_bytes / 1e6:.0f}",
            f"{idle.core_share:.2%}",
            f"{idle.packets / idle.duration_s:.1f}",
            f"{idle.duration_s:.0f}",
        ]
        for each in CONTENDERS
        if (idle := idle_of(records, MEASURED_SIZE, each.name)) is not None
    ]
    if rows:
        head = ["", "RSS, MB", "of a core", "packets/s", "watched, s"]
        title = f"## A node that leads, while nothing happens, at {MEASURED_SIZE:,} ledgers"
        yield f"{title}\n\n{table(head, rows)}"


def _time(time_s: float | None) -> str:
    return "not in time" if time_s is None else f"{time_s:,.3f}"


def _list(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
