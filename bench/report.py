"""The results as Markdown: goals and whether they are met, and tables of figures."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median

from bench.records import FAILURE, Record, Records

CORES = os.cpu_count() or 1
NAN = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The best and the median of several measurements; NaN if a figure does not apply."""

    best: float
    median: float

    def text(self, digits: int, *, has_best: bool = False) -> str:
        if math.isnan(self.median):
            return ""
        shown = [self.best, self.median] if has_best else [self.median]
        return " / ".join(f"{value:,.{digits}f}" for value in shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a record. ``value``: NaN if it does not apply. ``digits``: after the decimal
    point."""

    title: str
    value: Callable[[Record], float]
    more_is_better: bool = False
    digits: int = 0

    def summary(self, records: Sequence[Record]) -> Summary:
        """Summarize the records: NaN if there is none, or if one of them has no value."""
        values = [self.value(record) for record in records] or [NAN]
        if any(map(math.isnan, values)):
            return Summary(best=NAN, median=NAN)
        best = max(values) if self.more_is_better else min(values)
        return Summary(best=best, median=median(values))

    def ratio(self, over: Sequence[Record], under: Sequence[Record]) -> Summary:
        """Compare best with best and median with median."""
        a, b = self.summary(over), self.summary(under)
        return Summary(best=share(a.best, b.best), median=share(a.median, b.median))


def named(name: str, title: str, *, digits: int = 0, scale: float = 1.0) -> Figure:
    """Return the figure that is a value of the record."""
    return Figure(
        title=title, value=lambda record: record.values.get(name, NAN) * scale, digits=digits
    )


def rate(
    name: str,
    over: str,
    title: str,
    *,
    scale: float = 1.0,
    digits: int = 0,
    more_is_better: bool = False,
) -> Figure:
    """Return the figure that is one value of the record over another; NaN without the other."""
    return Figure(
        title=title,
        value=lambda record: share(record.values.get(name, NAN) * scale, record.values[over]),
        digits=digits,
        more_is_better=more_is_better,
    )


def share(part: float, whole: float) -> float:
    return part / whole if whole else NAN


@dataclass(frozen=True, slots=True)
class Goal:
    """What must be reached, and what is aimed at."""

    title: str
    value: Callable[[Records], Summary]
    must: float
    aim: float
    _: KW_ONLY
    at_least: bool = False
    unit: str = ""
    digits: int = 0

    def row(self, records: Records, *, has_best: bool) -> list[str]:
        """Compare the median with the limits, with the precision of the report; empty if nothing
        was measured."""
        summary = self.value(records)
        if math.isnan(summary.median):
            return []
        shown = round(summary.median, self.digits)
        return [
            self.title,
            f"{summary.text(self.digits, has_best=has_best)}{self.unit}",
            *(
                f"{'≥' if self.at_least else '≤'} {limit:,g}{self.unit}"
                for limit in (self.must, self.aim)
            ),
            *(
                "met" if (shown >= limit if self.at_least else shown <= limit) else "MISSED"
                for limit in (self.must, self.aim)
            ),
        ]


def goals_section(
    goals: Iterable[Goal], records: Records, *, intro: str = "", has_best: bool = False
) -> str:
    """Return a table that compares the goals with the medians. ``has_best``: show the best, too."""
    head = ["goal", "best / median" if has_best else "measured", "must", "aim", "must", "aim"]
    rows = [row for goal in goals if (row := goal.row(records, has_best=has_best))]
    return f"## Goals\n\n{intro}{table(head, rows)}"


def failures_section(records: Records) -> list[str]:
    """Return the section about what failed; nothing if nothing did."""
    lines = [f"- {each.labels['title']}: {each.text}\n" for each in records.find(FAILURE)]
    return ["## What failed and does not count\n\n" + "".join(lines)] if lines else []


def figure_row(
    figure: Figure,
    columns: Mapping[str, Sequence[Record]],
    *,
    has_best: bool = False,
    missing: str = "",
) -> list[str]:
    """Return a row of a table with a column for each group of records."""
    summaries = map(figure.summary, columns.values())
    return [
        figure.title,
        *(each.text(figure.digits, has_best=has_best) or missing for each in summaries),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
