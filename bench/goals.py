"""The goals of the measurements: what must be reached, and what is aimed at.

All goals compare our defaults with Java's on the same bookies in the same bench. One part runs
alone, the other beside a writer, which must not suffer more from us than from Java.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.contenders import (
    JAVA,
    JAVA_TUNED,
    OURS,
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
    WRITERS_P99_MS,
    Figure,
    Figures,
    Summary,
)
from bench.loads import LOADS
from bench.runs import Pass

ALL = tuple(LOADS)

Value = Callable[[Figures, str], Summary | None]
"""The value for a load; None if too little was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal. ``aim``: None if it equals ``must``."""

    title: str
    loads: Sequence[str]
    value: Value
    must: float
    aim: float | None = None
    at_least: bool
    digits: int = 2

    def is_met(self, value: float, limit: float) -> bool:
        """Compare with the precision of the report."""
        shown = round(value, self.digits)
        return shown >= limit if self.at_least else shown <= limit


def own(figure: Figure, contender: Contender = OURS) -> Value:
    def value(figures: Figures, load: str) -> Summary | None:
        runs = figures.of(Pass.ALONE, load, contender.name)
        return figure.summary(runs) if runs else None

    return value


def times_sooner(contender: Contender, reference: Contender, of_pass: Pass = Pass.ALONE) -> Value:
    """Return how many times sooner the load is repaired than by ``reference``: best compared with
    best, median with median."""

    def value(figures: Figures, load: str) -> Summary | None:
        mine = figures.of(of_pass, load, contender.name)
        theirs = figures.of(of_pass, load, reference.name)
        if not mine or not theirs:
            return None
        ours, others = WHOLE_S.summary(mine), WHOLE_S.summary(theirs)
        return Summary(best=others.best / ours.best, median=others.median / ours.median)

    return value


def writers_p99(figures: Figures, load: str) -> Summary | None:
    """Return the writer's p99 during our repair, divided by its p99 during Java's."""
    ours = figures.of(Pass.BESIDE_WRITER, load, OURS.name)
    javas = figures.of(Pass.BESIDE_WRITER, load, JAVA.name)
    if not ours or not javas:
        return None
    mine, others = WRITERS_P99_MS.summary(ours), WRITERS_P99_MS.summary(javas)
    return Summary(best=mine.best / others.best, median=mine.median / others.median)


def _sooner(
    loads: Sequence[str],
    reference: Contender,
    *,
    must: float,
    aim: float | None = None,
    of_pass: Pass = Pass.ALONE,
    where: str = "",
) -> Goal:
    return Goal(
        title=f"{where}times sooner than {reference.title}",
        loads=loads,
        value=times_sooner(OURS, reference, of_pass),
        must=must,
        aim=aim,
        at_least=True,
        digits=1,
    )


GOALS = (
    _sooner(["a"], JAVA, must=12, aim=16),
    _sooner(["b"], JAVA, must=20, aim=33),
    _sooner(["b"], JAVA_TUNED, must=1.2, aim=1.6),
    _sooner(["c"], JAVA, must=25, aim=50),
    Goal(
        title=MB_PER_S.title,
        loads=["d"],
        value=own(MB_PER_S),
        must=300,
        aim=350,
        at_least=True,
        digits=0,
    ),
    _sooner(ALL, JAVA, must=3, aim=5, of_pass=Pass.BESIDE_WRITER, where="beside a writer: "),
    Goal(
        title="beside a writer: its p99, over what it is beside Java's",
        loads=ALL,
        value=writers_p99,
        must=1.0,
        aim=0.5,
        at_least=False,
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
        loads=["b", "c"],
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
)
