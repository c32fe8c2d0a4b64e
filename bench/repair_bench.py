"""Our daemon and Java's AutoRecovery on the same bookies, one after the other: ``python -m bench``.

Each contender runs alone on the cluster, mends a small loss to get warm, then many small ledgers, then
few large ones. Between two losses the bookie comes back and the ledgers are deleted. After every
repair all copies of all entries are read and their digests verified.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from bench.contenders import JAVA, Contender, java, ours
from bench.loads import Load, open_ledgers
from bench.losing import Loss, Measure
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from daemon.settings import Settings
from daemon.visit import Visit, visit
from ledgers.bookie.budget import READS_IN_FLIGHT_CEILING, READS_IN_FLIGHT_DEFAULT
from ledgers.errors import BookmenderError, NoNodeError, UnavailableError
from replication.payloads import election_path

BOOKIE_COUNT = 5
BOOKIE_SESSION_TIMEOUT_S = 2.0
ELECTION_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
WARM_UP = Load(name="warm-up", ledger_count=500, entry_count=10)

RATIOS = {
    "small": ("ledgers_per_s", "cpu_ms_per_ledger", "packets_per_ledger", "rss_mb_max"),
    "large": ("entries_per_s", "cpu_us_per_entry", "packets_per_ledger", "rss_mb_max"),
}
"""By load, what is compared. Rates: ours by Java's; costs: Java's by ours. More is better."""
RATES = frozenset({"ledgers_per_s", "entries_per_s"})

Figures = Mapping[str, float]


@dataclass(slots=True)
class Results:
    """All measures by load and contender, in the order in which they were made."""

    measures: dict[tuple[str, str], list[Measure]] = field(default_factory=dict)

    def add(self, load: Load, contender: Contender, measure: Measure) -> None:
        self.measures.setdefault((load.name, contender.name), []).append(measure)

    def medians(self) -> dict[tuple[str, str], Figures]:
        return {key: _median_figures(measures) for key, measures in self.measures.items()}

    def ratios(self) -> dict[tuple[str, str], Figures]:
        """By load and contender of ours; none without Java."""
        medians = self.medians()
        return {
            (load, contender): {
                name: _ratio(name, figures, medians[load, JAVA]) for name in RATIOS[load]
            }
            for (load, contender), figures in medians.items()
            if contender != JAVA and (load, JAVA) in medians
        }


def _median_figures(measures: Sequence[Measure]) -> Figures:
    names = measures[0].figures
    return {name: median(measure.figures[name] for measure in measures) for name in names}


def _ratio(name: str, ours_figures: Figures, java_figures: Figures) -> float:
    mine, theirs = ours_figures[name], java_figures[name]
    better, worse = (mine, theirs) if name in RATES else (theirs, mine)
    return better / worse if worse > 0 else float("nan")


@click.command()
@click.option("--ledgers", default=600, show_default=True, help="Small: 10 entries of 1 KB.")
@click.option("--large", default=2, show_default=True, help="Large: 20,000 entries of 1 KB.")
@click.option("--repeat", default=1, show_default=True, help="Medians of so many runs.")
@click.option(
    "--reads-in-flight",
    multiple=True,
    type=click.IntRange(1, READS_IN_FLIGHT_CEILING),
    default=(READS_IN_FLIGHT_DEFAULT, READS_IN_FLIGHT_CEILING),
    show_default=True,
    help="Ours, per bookie; may be given several times.",
)
@click.option("--only", type=click.Choice(["ours", "java"]), help="Leave the other out.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def main(
    ledgers: int,
    large: int,
    repeat: int,
    reads_in_flight: tuple[int, ...],
    only: str | None,
    output: str,
) -> None:
    """Measure repairs of ours and Java's on a local cluster: ratios first, then the figures."""
    contenders = [] if only == "ours" else [java()]
    contenders += [] if only == "java" else [ours(cap) for cap in reads_in_flight]
    loads = [
        Load(name="small", ledger_count=ledgers, entry_count=10),
        Load(name="large", ledger_count=large, entry_count=20_000),
    ]
    loads = [load for load in loads if load.ledger_count]
    results, say = Results(), _Progress()
    try:
        for number in range(repeat):
            # The other way round each time, so that nobody always meets the fresher bookies.
            order = contenders if number % 2 == 0 else contenders[::-1]
            asyncio.run(_run(order, loads, results, say))
    except BookmenderError as error:
        raise click.ClickException(str(error)) from error
    _print_json(results) if output == "json" else _print_tables(results)


class _Progress:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", err=True)


async def _run(
    contenders: Sequence[Contender], loads: Sequence[Load], results: Results, say: _Progress
) -> None:
    """All contenders on one fresh cluster."""
    say(f"starting ZooKeeper and {BOOKIE_COUNT} bookies")
    with (
        tempfile.TemporaryDirectory(prefix="repair-bench-") as folder,
        LocalCluster.start(
            Path(folder), bookies=BOOKIE_COUNT, session_timeout_s=BOOKIE_SESSION_TIMEOUT_S
        ) as cluster,
    ):
        async with visit(Settings(metadata_service_uri=cluster.metadata_service_uri)) as seen:
            for contender in contenders:
                say(f"{contender.name}: starting")
                child = contender.start(cluster)
                try:
                    await _wait_for_votes(seen, True, child)
                    await _lose(cluster, seen, child, WARM_UP)
                    for load in loads:
                        measure = await _lose(cluster, seen, child, load)
                        results.add(load, contender, measure)
                        say(f"{contender.name}, {load.name}: {_line(measure)}")
                finally:
                    child.terminate()
                    if not child.wait(timeout_s=STOP_TIMEOUT_S):
                        child.kill()
                await _wait_for_votes(seen, False)


async def _lose(cluster: LocalCluster, seen: Visit, child: Child, load: Load) -> Measure:
    """Write, kill, measure, prove; leaves the cluster as it was before."""
    async with open_ledgers(seen.manager) as ledgers:
        written = await ledgers.write(load, cluster.bookies)
        loss = Loss(cluster, seen, child, written)
        measure = await loss.measure(load)
        await ledgers.assert_whole(written, loss.victim)
        await ledgers.delete(written)
    await asyncio.to_thread(cluster.start_bookie, loss.victim)
    return measure


async def _wait_for_votes(seen: Visit, wanted: bool, child: Child | None = None) -> None:
    """Until somebody stands for election, or nobody does any more."""
    deadline_s = time.monotonic() + ELECTION_TIMEOUT_S
    while await _has_votes(seen) is not wanted:
        if time.monotonic() > deadline_s or (child is not None and not child.is_running):
            raise UnavailableError("the election does not end")
        await asyncio.sleep(POLL_S)


async def _has_votes(seen: Visit) -> bool:
    try:
        return bool(await seen.store.children(election_path(seen.ur)))
    except NoNodeError:
        return False


def _line(measure: Measure) -> str:
    return (
        f"{measure.lost_ledgers} ledgers, {measure.lost_entries} entries "
        f"whole after {measure.whole_s:.2f} s"
    )


def _print_tables(results: Results) -> None:
    console = Console()
    for title, figures in (
        ("Times better than Java", results.ratios()),
        ("Figures", results.medians()),
    ):
        for load in dict.fromkeys(load for load, _ in figures):
            columns = {who: values for (of, who), values in figures.items() if of == load}
            console.print(_table(f"{title}: {load} ledgers", columns))


def _table(title: str, columns: Mapping[str, Figures]) -> Table:
    table = Table("", *columns, title=title, title_justify="left", min_width=len(title))
    for name in next(iter(columns.values())):
        table.add_row(
            name.replace("_", " "), *(_number(figures[name]) for figures in columns.values())
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _print_json(results: Results) -> None:
    def nested(figures: Mapping[tuple[str, str], Figures]) -> dict[str, dict[str, Figures]]:
        tree: dict[str, dict[str, Figures]] = {}
        for (load, who), row in figures.items():
            tree.setdefault(load, {})[who] = {name: round(row[name], 4) for name in row}
        return tree

    report = {
        "ratios": nested(results.ratios()),
        "figures": nested(results.medians()),
        "runs": max(map(len, results.measures.values()), default=0),
    }
    click.echo(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
