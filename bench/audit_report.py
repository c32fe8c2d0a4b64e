"""The goals of auditors, and every figure at every size, as Markdown."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.contenders import JAVA, OURS, TITLES
from bench.records import Record, Records
from bench.report import (
    CORES,
    NAN,
    Figure,
    Goal,
    Summary,
    failures_section,
    goals_section,
    named,
    rate,
    share,
    table,
)

LOSS, IDLE, WEIGHT = "loss", "idle", "weight"
"""Names of records: the loss of a bookie, without times after a timeout; a node that leads while
nothing happens; and the memory of our ledger map alone."""
MEASURED_SIZE = 100_000
"""The figures that the goals are about."""
PREAMBLE = """\
# Marking the ledgers of a lost bookie, against Java's auditor

A real ZooKeeper; bookies and ledgers are only znodes. One of about 50 bookies is lost, which {lost}
ledgers name, with a recovery delay of 0. Times count from the deletion of its znode, by
ZooKeeper's clock, in milliseconds. Median of up to {repeats} losses, on {cores} cores that
ZooKeeper, auditor and bench share. See `bench/README.md`.
"""
FIRST_S = named("first_mark_s", "first mark after, s", digits=3)
ALL_S = named("all_marked_s", "all marked after, s", digits=3)
RSS = named("rss_bytes", "RSS, MB", scale=1e-6)
FIGURES = (
    named("packets", "ZooKeeper packets"),
    named("cpu_s", "auditor's CPU, s", digits=2),
    named("zookeeper_cpu_s", "ZooKeeper's CPU, s", digits=2),
    RSS,
    named("rss_bytes_max", "highest RSS, MB", scale=1e-6),
)
CORE_SHARE = rate("cpu_s", "duration_s", "of a core, %", scale=100, digits=2)


def losses_of(records: Records, size: int, contender: str) -> list[Record]:
    return records.find(LOSS, size=size, contender=contender)


def sizes_of(records: Records) -> list[int]:
    """Return the sizes of the losses, ascending."""
    return sorted(map(int, records.labels(LOSS, "size")))


def times_sooner(figure: Figure) -> Callable[[Records], Summary]:
    return lambda records: figure.ratio(
        losses_of(records, MEASURED_SIZE, JAVA.name), losses_of(records, MEASURED_SIZE, OURS.name)
    )


def slowest_first_ms(records: Records) -> Summary:
    """Return the slowest of all sizes."""
    found = [FIRST_S.summary(losses_of(records, s, OURS.name)).median for s in sizes_of(records)]
    slowest_ms = 1000 * max((each for each in found if not math.isnan(each)), default=NAN)
    return Summary(best=slowest_ms, median=slowest_ms)


def ledger_map_bytes(size: int) -> Callable[[Records], Summary]:
    return lambda records: named("ledger_map_bytes", "", scale=1 / size).summary(
        records.find(WEIGHT, size=size)
    )


def idle(figure: Figure) -> Callable[[Records], Summary]:
    return lambda records: figure.summary(
        records.find(IDLE, size=MEASURED_SIZE, contender=OURS.name)
    )


GOALS = (
    Goal("first mark, times sooner", times_sooner(FIRST_S), 50, 50, at_least=True),
    Goal("all marks, times sooner", times_sooner(ALL_S), 5, 5, at_least=True, digits=1),
    Goal("first mark, at every size", slowest_first_ms, 100, 100, unit=" ms", digits=1),
    *(
        Goal(title, ledger_map_bytes(size), 150, 150, unit=" B", digits=1)
        for title, size in (
            ("ledger map, a ledger", MEASURED_SIZE),
            ("ledger map, a ledger of a million", 1_000_000),
        )
    ),
    Goal("idle node, RSS", idle(RSS), 100, 100, unit=" MB", digits=1),
    Goal("idle node, of a core", idle(CORE_SHARE), 0.5, 0.5, unit=" %", digits=2),
)


def report(records: Records) -> str:
    losses = records.find(LOSS)
    return "\n".join(
        [
            PREAMBLE.format(
                lost=f"{max((each.values['ledger_count'] for each in losses), default=0):,.0f}",
                repeats=max((each.labels["repeat"] for each in losses), default=0),
                cores=CORES,
            ),
            *failures_section(records),
            goals_section(
                GOALS,
                records,
                intro=f"At {MEASURED_SIZE:,} ledgers, unless it says otherwise.\n\n",
            ),
            *(_section(records, size) for size in sizes_of(records)),
            *_idle(records),
        ]
    )


def _section(records: Records, size: int) -> str:
    shown = {name: found for name in TITLES if (found := losses_of(records, size, name))}
    ledger_map = ledger_map_bytes(size)(records).text(0, has_best=False)
    rows = [
        *(_row(figure, shown, missing="not in time") for figure in (FIRST_S, ALL_S)),
        ["losses", *(str(len(each)) for each in shown.values())],
        *(_row(figure, shown) for figure in FIGURES),
        ["ledgers read a second", *(_read_rate(each, size) for each in shown.values())],
        ["RSS a ledger beyond the fewest, B", *(_rss(records, size, name) for name in shown)],
        ["ledger map alone, a ledger, B", *(ledger_map * (name == OURS.name) for name in shown)],
    ]
    return f"## {size:,} ledgers\n\n" + table(["", *(TITLES[name] for name in shown)], rows)


def _row(figure: Figure, shown: Mapping[str, Sequence[Record]], missing: str = "") -> list[str]:
    found = [
        figure.summary(each).text(figure.digits, has_best=False) or missing
        for each in shown.values()
    ]
    return [figure.title, *found]


def _read_rate(losses: Sequence[Record], size: int) -> str:
    """Return the read rate. An auditor without a ledger map reads all ledgers before the first
    mark."""
    once = named("ledgers_per_s", "").summary(losses).text(0, has_best=False)
    first_s = FIRST_S.summary(losses).median
    at_each = "" if math.isnan(first_s) else f"{share(size, first_s):,.0f}, at each loss"
    return f"{once}, once" if once else at_each


def _rss(records: Records, size: int, name: str) -> str:
    """Return the memory growth of the daemon per ledger since the smallest size; nothing for Java,
    because a JVM's heap size says little about it."""
    smallest = sizes_of(records)[0]
    if size == smallest or name == JAVA.name:
        return ""
    many, few = (
        named("rss_bytes", "").summary(losses_of(records, each, name)).median
        for each in (size, smallest)
    )
    grown = (many - few) / (size - smallest)
    return Summary(best=grown, median=grown).text(0, has_best=False)


def _idle(records: Records) -> Iterator[str]:
    columns = {
        title: found
        for name, title in TITLES.items()
        if (found := records.find(IDLE, size=MEASURED_SIZE, contender=name))
    }
    figures = (
        RSS,
        CORE_SHARE,
        rate("packets", "duration_s", "packets/s", digits=1),
        named("duration_s", "watched, s"),
    )
    if columns:
        title = f"## A node that leads, while nothing happens, at {MEASURED_SIZE:,} ledgers"
        rows = [_row(figure, columns) for figure in figures]
        yield f"{title}\n\n{table(['', *columns], rows)}"
