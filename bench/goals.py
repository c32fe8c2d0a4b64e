"""What the measurements are held against: what must be reached, and what is aimed at.

Rates count against Java's on the same bookies in the same bench, with our budgets opened up; with
the default budgets a writer must not notice, and repair must still be several times sooner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.contenders import (
    JAVA,
    JAVA_BATCHES,
    JAVA_TUNED,
    LARGE_LOADS,
    OURS,
    OURS_OPEN,
    Contender,
)
from bench.figures import (
    COPIED_OVER_LOST,
    CPU_MS_PER_LEDGER,
    CPU_US_PER_ENTRY,
    MB_PER_S,
    PACKETS_PER_LEDGER,
    RSS_MB,
    WHOLE_S,
    Figure,
    Figures,
    Summary,
)
from bench.loads import LOADS
from bench.runs import Pass

ALL = tuple(LOADS)

Value = Callable[[Figures, str], Summary | None]
"""Of a load; None where too little was measured to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``aim`` is None where it is the same as ``must``."""

    title: str
    loads: Sequence[str]
    value: Value
    must: float
    aim: float | None = None
    at_least: bool
    digits: int = 2

    def is_met(self, value: float, limit: float) -> bool:
        """As exactly as it is shown."""
        shown = round(value, self.digits)
        return shown >= limit if self.at_least else shown <= limit


def own(figure: Figure, contender: Contender = OURS_OPEN) -> Value:
    def value(figures: Figures, load: str) -> Summary | None:
        runs = figures.of(Pass.ALONE, load, contender.name)
        return figure.summary(runs) if runs else None

    return value


def times_sooner(contender: Contender, reference: Contender, of_pass: Pass = Pass.ALONE) -> Value:
    """How many times sooner whole than ``reference``: best by best, median by median."""

    def value(figures: Figures, load: str) -> Summary | None:
        mine = figures.of(of_pass, load, contender.name)
        theirs = figures.of(of_pass, load, reference.name)
        if not mine or not theirs:
            return None
        ours, others = WHOLE_S.summary(mine), WHOLE_S.summary(theirs)
        return Summary(best=others.best / ours.best, median=others.median / ours.median)

    return value


def writers_p99(figures: Figures, load: str) -> Summary | None:
    """During repair by our defaults, over the worse of before and after."""
    runs = figures.of(Pass.BESIDE_WRITER, load, OURS.name)
    figure = Figure(
        title="", value=lambda run: run.writer.p99_times_quiet if run.writer else float("nan")
    )
    return figure.summary(runs) if runs else None


def _sooner(
    loads: Sequence[str],
    reference: Contender,
    *,
    must: float,
    aim: float | None = None,
    contender: Contender = OURS_OPEN,
    of_pass: Pass = Pass.ALONE,
    where: str = "",
) -> Goal:
    return Goal(
        title=f"{where}times sooner than {reference.title}",
        loads=loads,
        value=times_sooner(contender, reference, of_pass),
        must=must,
        aim=aim,
        at_least=True,
        digits=1,
    )


GOALS = (
    _sooner(["a"], JAVA, must=15, aim=30),
    _sooner(LARGE_LOADS, JAVA, must=10, aim=18),
    _sooner(LARGE_LOADS, JAVA_BATCHES, must=6, aim=12),
    _sooner(LARGE_LOADS, JAVA_TUNED, must=6, aim=12),
    Goal(
        title=MB_PER_S.title,
        loads=["d"],
        value=own(MB_PER_S),
        must=200,
        aim=300,
        at_least=True,
        digits=0,
    ),
    Goal(
        title=CPU_MS_PER_LEDGER.title,
        loads=["a"],
        value=own(CPU_MS_PER_LEDGER),
        must=0.5,
        aim=0.2,
        at_least=False,
    ),
    Goal(
        title=CPU_US_PER_ENTRY.title,
        loads=LARGE_LOADS,
        value=own(CPU_US_PER_ENTRY),
        must=5,
        aim=2.5,
        at_least=False,
        digits=1,
    ),
    Goal(
        title=PACKETS_PER_LEDGER.title,
        loads=["a", "e"],
        value=own(PACKETS_PER_LEDGER),
        must=4,
        aim=1,
        at_least=False,
    ),
    Goal(
        title=COPIED_OVER_LOST.title,
        loads=[load for load in ALL if load != "e"],
        value=own(COPIED_OVER_LOST),
        must=1.0,
        at_least=False,
    ),
    Goal(title=RSS_MB.title, loads=ALL, value=own(RSS_MB), must=120, aim=80, at_least=False),
    _sooner(
        ALL,
        JAVA,
        must=3,
        contender=OURS,
        of_pass=Pass.BESIDE_WRITER,
        where="default budgets, beside a writer: ",
    ),
    Goal(
        title="default budgets: writer's p99, times the quiet one",
        loads=ALL,
        value=writers_p99,
        must=1.25,
        at_least=False,
    ),
)
