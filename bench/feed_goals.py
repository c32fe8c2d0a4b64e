"""The figures of the change feed: what must be reached, what is aimed at, and what was measured.

``Measured`` is a record of one run. ``report`` compares the records with the goals. A figure that
was not measured keeps its row, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from bench.report import table

PREAMBLE = """\
# The change feed

Everything runs on one machine with {cores} cores: ZooKeeper, bookies, a node, the load and the
clients. Ratios compare with a peer in the same run. "Others" is the share of all cores that other
programs used just before or after the measurement, and so distorts it. `bench/README.md` says what
each figure means.
"""
QUIET_SHARE_MAX = 0.1
"""More than this, and the report says that the machine was busy."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that one part of the bench measured together.

    ``values``: by the name of the figure. ``text``: everything else that was measured, for people.
    ``others_share``: of all cores, used by other programs.
    """

    part: str
    values: Mapping[str, float]
    text: str
    others_share: float

    @property
    def key(self) -> Hashable:
        return self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure. ``part``: the part of the bench that measures it. ``digits``: after the decimal
    point."""

    title: str
    part: str
    value: str
    must: float
    aim: float
    unit: str = ""
    at_least: bool = False
    digits: int = 0

    def is_met(self, value: float, limit: float) -> bool:
        """Compare with the precision of the report."""
        shown = round(value, self.digits)
        return shown >= limit if self.at_least else shown <= limit

    def text(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}"

    def limit(self, value: float) -> str:
        return f"{'≥' if self.at_least else '≤'} {value:,g}{self.unit}"


GOALS = (
    Goal(
        title="changes a second into the log, as many as possible",
        part="log",
        value="changes_per_s",
        must=10_000,
        aim=30_000,
        at_least=True,
    ),
    Goal(
        title="change to follower at 1,000 changes/s, median",
        part="log",
        value="median_ms",
        must=150,
        aim=60,
        unit=" ms",
    ),
    Goal(
        title="change to follower at 1,000 changes/s, p99",
        part="log",
        value="p99_ms",
        must=500,
        aim=200,
        unit=" ms",
    ),
    Goal(
        title="first mark after a loss, beside 5,000 changes/s",
        part="first-mark",
        value="first_mark_ms",
        must=100,
        aim=30,
        unit=" ms",
    ),
    Goal(
        title="take-over at 1,000,000 ledgers, 10,000 changes, beyond the scan",
        part="take-over",
        value="takeover_s",
        must=10,
        aim=3,
        unit=" s",
        digits=1,
    ),
    Goal(
        title="client 1,000,000 changes behind knows all of them",
        part="behind",
        value="known_s",
        must=30,
        aim=10,
        unit=" s",
        digits=1,
    ),
    Goal(
        title="its memory meanwhile",
        part="behind",
        value="memory_mb",
        must=250,
        aim=100,
        unit=" MB",
    ),
    Goal(
        title="stored receipts of one-second checkpoints, completed in random order",
        part="receipts",
        value="stored_kb",
        must=1_000,
        aim=10,
        unit=" KB",
        digits=1,
    ),
    Goal(
        title="catch-up of 100,000 changes, times the rate of etcd's watch",
        part="catch-up",
        value="times_the_watch",
        must=0.5,
        aim=1,
        at_least=True,
        digits=1,
    ),
    Goal(
        title="fsck --changed, 1,000 of 1,000,000 ledgers, times sooner than all",
        part="fsck",
        value="times_sooner",
        must=10,
        aim=50,
        at_least=True,
    ),
)


def report(records: Iterable[Measured], *, failures: Mapping[str, str] | None = None) -> str:
    """Return the report. ``failures``: by part, why it was not measured."""
    by_part = {record.part: record for record in records}
    failures = failures or {}
    sections = [
        PREAMBLE.format(cores=os.cpu_count() or 1),
        "## Goals\n\n"
        + table(
            ["figure", "measured", "must", "aim", "must", "aim", "others"],
            [_row(goal, by_part.get(goal.part)) for goal in GOALS],
        ),
        *_details(by_part),
        *(["## Not measured in the last run\n\n" + _list(failures)] if failures else []),
    ]
    return "\n".join(sections)


def _row(goal: Goal, record: Measured | None) -> list[str]:
    limits = [goal.limit(goal.must), goal.limit(goal.aim)]
    if record is None or (value := record.values.get(goal.value)) is None:
        return [goal.title, "not measured", *limits, "", "", ""]
    verdicts = ["met" if goal.is_met(value, each) else "MISSED" for each in (goal.must, goal.aim)]
    return [goal.title, goal.text(value), *limits, *verdicts, f"{record.others_share:.0%}"]


def _details(by_part: Mapping[str, Measured]) -> Iterator[str]:
    parts = [part for part in dict.fromkeys(goal.part for goal in GOALS) if part in by_part]
    if not parts:
        return
    yield "## Details\n"
    for part in parts:
        record = by_part[part]
        busy = (
            ""
            if record.others_share <= QUIET_SHARE_MAX
            else f"\n\nThe machine was busy: others used {record.others_share:.0%} of the cores."
        )
        yield f"### {part}\n\n{record.text}{busy}\n"


def _list(failures: Mapping[str, str]) -> str:
    return "".join(f"- {part}: {why}\n" for part, why in failures.items())
