"""The results as Markdown: the goals and whether they are met, then every figure of every
contender."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.contenders import CONTENDERS, OPEN_LEDGER_GRACE_S
from bench.figures import TABLE, Figure, Figures, Summary
from bench.goals import GOALS, Goal
from bench.loads import LOADS
from bench.loss import Measure
from bench.runs import Pass, Run
from bench.writer import Disturbance

PREAMBLE = """\
# Repair of a lost bookie, against Java's AutoRecovery

One of five bookies is killed. Times count from the deletion of its znode until the queue is empty
and no metadata names the bookie. Best and median of {repeats} runs ("best / median"), on {cores}
cores that bookies, ZooKeeper and repairer share. After each run BookKeeper's own client read every
copy: {copies:,} in all, none missing. Open ledgers are left to their writers for {grace} s on both
sides. All other processes, including the bench, used {others:.0%} of the cores. See
`bench/README.md`.
"""
CORES = os.cpu_count() or 1


def report(runs: Iterable[Run], *, failures: Sequence[str] = ()) -> str:
    """Return the report. ``failures``: runs that do not count, and why."""
    runs = list(runs)
    figures = Figures(runs)
    sections = [
        PREAMBLE.format(
            repeats=max((run.repeat for run in runs), default=0),
            cores=CORES,
            copies=sum(run.judged_copies for run in runs),
            grace=OPEN_LEDGER_GRACE_S,
            others=_others_share([run.measure for run in runs]),
        ),
        *(["## Runs that do not count\n\n" + _list(failures)] if failures else []),
        "## Goals\n\n" + goals_table(figures),
        *_loads(figures),
        *_writers(figures),
    ]
    return "\n".join(sections)


def _others_share(measures: Sequence[Measure]) -> float:
    """Return the share of all cores' time that other processes used. A large share means that the
    machine was not ours alone."""
    others_s = sum(measure.others_cpu_s for measure in measures)
    return others_s / sum((CORES * measure.whole_s for measure in measures), start=1e-9)


def goals_table(figures: Figures) -> str:
    """Return a table that compares the goals with the medians. Goals without measurements are left
    out."""
    return table(
        ["goal", "load", "best / median", "must", "aim", "must", "aim"],
        [row for goal in GOALS for row in _goal_rows(goal, figures)],
    )


def _goal_rows(goal: Goal, figures: Figures) -> Iterator[list[str]]:
    sign = "≥" if goal.at_least else "≤"
    for load in goal.loads:
        if (summary := goal.value(figures, load)) is None:
            continue
        aim = goal.must if goal.aim is None else goal.aim
        yield [
            goal.title,
            load,
            _pair(summary, goal.digits),
            f"{sign} {goal.must:g}",
            f"{sign} {aim:g}",
            *(
                "met" if goal.is_met(summary.median, each) else "MISSED"
                for each in (goal.must, aim)
            ),
        ]


def _loads(figures: Figures) -> Iterator[str]:
    for load in LOADS.values():
        by_contender = _in_order(figures.contenders(Pass.ALONE, load.name))
        if by_contender:
            lost = next(iter(by_contender.values()))[0].measure
            yield (
                f"## {load.name}: {load.title}\n\nLost: {lost.lost_ledgers:,} ledgers, "
                f"{lost.lost_entries:,} entries, {lost.lost_bytes / 1e6:,.1f} MB.\n\n"
                + _figures_table(by_contender)
            )


def _figures_table(by_contender: Mapping[str, Sequence[Run]]) -> str:
    return table(
        ["", *by_contender],
        [
            [figure.title, *(_figure(figure, runs) for runs in by_contender.values())]
            for figure in TABLE
        ],
    )


def _writers(figures: Figures) -> Iterator[str]:
    rows = [
        [load, title, _figure(TABLE[0], runs), *_disturbance(runs)]
        for load in LOADS
        for title, runs in _in_order(figures.contenders(Pass.BESIDE_WRITER, load)).items()
    ]
    if rows:
        yield (
            "## Beside a writer\n\nA Java client adds 500 entries of 1 KB a second, on a fixed "
            "schedule; each is measured from when it was due.\n\n"
            + table(
                ["load", "", "whole after, s", "before", "during", "after", "adds"],
                rows,
            )
            + "\nLatencies are p50 / p99 in ms.\n"
        )


def _disturbance(runs: Sequence[Run]) -> list[str]:
    """Return the writer's figures of the run with the median p99."""
    all_of_them = [run.writer for run in runs if run.writer is not None]
    ordered = sorted(all_of_them, key=lambda each: each.during.p99_ms)
    chosen: Disturbance = ordered[len(ordered) // 2]
    spans = (chosen.before, chosen.during, chosen.after)
    return [
        *(f"{span.p50_ms:.1f} / {span.p99_ms:.1f}" for span in spans),
        f"{chosen.during.adds:,}",
    ]


def _in_order(by_name: Mapping[str, list[Run]]) -> dict[str, list[Run]]:
    """Return the runs by title, in the order of the contenders."""
    return {each.title: by_name[each.name] for each in CONTENDERS if each.name in by_name}


def _figure(figure: Figure, runs: Sequence[Run]) -> str:
    return _pair(figure.summary(runs), figure.digits)


def _pair(summary: Summary, digits: int) -> str:
    if math.isnan(summary.median):
        return ""
    return f"{summary.best:,.{digits}f} / {summary.median:,.{digits}f}"


def _list(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
