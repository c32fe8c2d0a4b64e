"""The figures of one run, the best and median of several runs, and the ratios between
contenders."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from bench.runs import Pass, Run

NO_ENTRIES = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a run. ``value``: NaN if it does not apply to this load. ``digits``: after the
    decimal point."""

    title: str
    value: Callable[[Run], float]
    more_is_better: bool = False
    digits: int = 0

    def summary(self, runs: Iterable[Run]) -> "Summary":
        values = [self.value(run) for run in runs]
        assert values, self.title
        best = max(values) if self.more_is_better else min(values)
        return Summary(best=best, median=median(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    best: float
    median: float


def _share(part: float, whole: float) -> float:
    return part / whole if whole else NO_ENTRIES


WHOLE_S = Figure(title="whole after, s", value=lambda run: run.measure.whole_s, digits=2)
LEDGERS_PER_S = Figure(
    title="ledgers/s",
    value=lambda run: run.measure.lost_ledgers / run.measure.whole_s,
    more_is_better=True,
)
ENTRIES_PER_S = Figure(
    title="entries/s",
    value=lambda run: (run.measure.lost_entries or NO_ENTRIES) / run.measure.whole_s,
    more_is_better=True,
)
MB_PER_S = Figure(
    title="MB/s",
    value=lambda run: (run.measure.lost_bytes or NO_ENTRIES) / run.measure.whole_s / 1e6,
    more_is_better=True,
    digits=1,
)
COPIED_OVER_LOST = Figure(
    title="bytes copied over lost",
    value=lambda run: _share(run.measure.copied_bytes, run.measure.lost_bytes),
    digits=3,
)
CPU_MS_PER_LEDGER = Figure(
    title="repairer's CPU a ledger, ms",
    value=lambda run: run.measure.repairer_cpu_s / run.measure.lost_ledgers * 1e3,
    digits=2,
)
CPU_US_PER_ENTRY = Figure(
    title="repairer's CPU an entry, us",
    value=lambda run: _share(run.measure.repairer_cpu_s, run.measure.lost_entries) * 1e6,
    digits=1,
)
PACKETS_PER_LEDGER = Figure(
    title="ZooKeeper packets a ledger",
    value=lambda run: run.measure.packets / run.measure.lost_ledgers,
    digits=2,
)
RSS_MB = Figure(title="repairer's RSS, MB", value=lambda run: run.measure.rss_bytes_max / 1e6)
WRITERS_P99_MS = Figure(
    title="writer's p99, ms",
    value=lambda run: run.writer.during.p99_ms if run.writer else float("nan"),
    digits=1,
)

TABLE = (
    WHOLE_S,
    Figure(
        title="closed ones whole after, s", value=lambda run: run.measure.closed_whole_s, digits=2
    ),
    Figure(title="first mark after, s", value=lambda run: run.measure.first_mark_s, digits=3),
    LEDGERS_PER_S,
    ENTRIES_PER_S,
    MB_PER_S,
    COPIED_OVER_LOST,
    Figure(title="repairer's CPU, s", value=lambda run: run.measure.repairer_cpu_s, digits=2),
    CPU_MS_PER_LEDGER,
    CPU_US_PER_ENTRY,
    Figure(title="bookies' CPU, s", value=lambda run: run.measure.bookies_cpu_s, digits=2),
    Figure(title="ZooKeeper's CPU, s", value=lambda run: run.measure.zookeeper_cpu_s, digits=2),
    PACKETS_PER_LEDGER,
    RSS_MB,
)
"""All figures, in the order of the report."""


class Figures:
    """All runs, by pass, load and contender."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: dict[tuple[Pass, str, str], list[Run]] = {}
        for run in runs:
            self._runs.setdefault((run.of_pass, run.load, run.contender), []).append(run)

    def of(self, of_pass: Pass, load: str, contender: str) -> list[Run]:
        """Return the runs; empty if nothing was measured."""
        return self._runs.get((of_pass, load, contender), [])

    def contenders(self, of_pass: Pass, load: str) -> Mapping[str, list[Run]]:
        return {
            contender: runs
            for (in_pass, of_load, contender), runs in self._runs.items()
            if (in_pass, of_load) == (of_pass, load)
        }
