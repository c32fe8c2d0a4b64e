"""Compares our daemon with Java's AutoRecovery on the same bookies, in turn: ``python -m
bench.repair``.

All contenders share one cluster, in a different order each time. Every run is recorded when it
ends, and ``--resume`` continues an interrupted bench. Loads and contenders that are not selected
(``--only``, ``--contenders``) keep their earlier results.
"""

import asyncio
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import click

from bench.arena import open_arena
from bench.contenders import BY_NAME, JAVA, OURS, Contender
from bench.loads import LOADS, Load
from bench.pace import measure_pace, write_pace
from bench.plot import plot
from bench.progress import Progress
from bench.report import report
from bench.runs import Key, Pass, Run, RunFile
from bench.turns import take_turn, warm_bookies
from bench.writer import PacedWriter
from ledgers.errors import BookmenderError
from tests.java.tool import JavaTool

T = TypeVar("T")
RESULTS = Path(__file__).with_name("results")
BESIDE_WRITER = (JAVA, OURS)
QUICK = (JAVA, OURS)
PACE = "pace"
"""The name of the plot of the pace beside the loads."""
PARTS: Mapping[str, Load | None] = {**LOADS, PACE: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The runs of one contender, load after load, on the cluster of this pass."""

    of_pass: Pass
    repeat: int
    contender: Contender
    keys: tuple[Key, ...]


@click.command()
@click.option(
    "--only", default=",".join(PARTS), show_default=True, help="Loads, and the plot of the pace."
)
@click.option("--contenders", default=",".join(BY_NAME), show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Best and median of so many runs.")
@click.option(
    "--writer-repeat",
    default=3,
    show_default=True,
    help="How often each contender runs beside a writer.",
)
@click.option("--quick", is_flag=True, help="A tenth of each load, once; leaves no record.")
@click.option("--resume", is_flag=True, help="Keep the runs that are recorded already.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="The folder for repair.md, repair.svg, repair.jsonl, pace.svg and pace.json.",
)
def main(
    only: str,
    contenders: str,
    repeat: int,
    writer_repeat: int,
    quick: bool,
    resume: bool,
    results: Path,
) -> None:
    """Measure repairs of ours and of Java's on a local cluster."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    parts = chosen({**LOADS, PACE: None}, only)
    loads = [load for load in parts if load is not None]
    taking_part = chosen(BY_NAME, contenders)
    if quick:
        loads = [load.quick() for load in loads]
        taking_part = [each for each in taking_part if each in QUICK]
        repeat, writer_repeat = 1, 0
    turns = plan(taking_part, loads, repeat=repeat, writer_repeat=writer_repeat)
    with results_folder(None if quick else results) as folder:
        runs: RunFile[Run] = RunFile(folder / "repair.jsonl", Run)
        if not resume:
            runs.forget({key for turn in turns for key in turn.keys})
        bench = Bench(loads={load.name: load for load in loads}, runs=runs)
        try:
            bench.run(turns)
            if PACE in only.split(",") and not quick:
                bench.plot_pace(folder)
        except BookmenderError as error:
            raise click.ClickException(str(error)) from error
        finally:
            text = report(runs, failures=bench.failures)
            (folder / "repair.md").write_text(text)
            (folder / "repair.svg").write_text(plot(runs))
        click.echo(text)


def plan(
    contenders: Sequence[Contender], loads: Sequence[Load], *, repeat: int, writer_repeat: int
) -> list[Turn]:
    """Return the turns in order. Every other repeat is in reverse order, so that no contender
    always meets the fresher bookies."""
    turns: list[Turn] = []
    for of_pass, count in ((Pass.ALONE, repeat), (Pass.BESIDE_WRITER, writer_repeat)):
        for number in range(1, count + 1):
            for contender in contenders if number % 2 else reversed(contenders):
                if of_pass is Pass.ALONE or contender in BESIDE_WRITER:
                    keys = tuple(Key(of_pass, load.name, contender.name, number) for load in loads)
                    turns.append(
                        Turn(of_pass=of_pass, repeat=number, contender=contender, keys=keys)
                    )
    return turns


@dataclass(slots=True)
class Bench:
    """Runs the turns. A turn that fails is noted, and the others continue on a new cluster."""

    loads: Mapping[str, Load]
    runs: RunFile[Run]
    failures: list[str] = field(default_factory=list)
    _progress: Progress = field(default_factory=Progress)

    def run(self, turns: Sequence[Turn]) -> None:
        """Run the turns, except those that are already recorded."""
        left = [rest for turn in turns if (rest := self._rest(turn)).keys]
        self._progress.expect(key for turn in left for key in turn.keys)
        with JavaTool() as java:
            for _, together in groupby(left, key=lambda turn: turn.of_pass):
                waiting = list(together)
                while waiting:
                    asyncio.run(self._on_one_cluster(java, waiting))

    def plot_pace(self, folder: Path) -> None:
        """Measure the pace and write its plot. Raises UnavailableError."""
        self._progress.say("the pace as a writer starts and stops")
        with JavaTool() as java:
            write_pace(asyncio.run(measure_pace(java)), folder)

    def _rest(self, turn: Turn) -> Turn:
        return replace(turn, keys=tuple(key for key in turn.keys if key not in self.runs))

    async def _on_one_cluster(self, java: JavaTool, waiting: list[Turn]) -> None:
        """Run turns from ``waiting`` until none is left or one fails."""
        self._progress.say("starting ZooKeeper and the bookies")
        async with open_arena(java) as arena:
            with ExitStack() as stack:
                writer = None
                if waiting[0].of_pass is Pass.BESIDE_WRITER:
                    uri = arena.cluster.metadata_service_uri
                    writer = stack.enter_context(PacedWriter(uri, avoid=arena.victim))
                await warm_bookies(arena)  # with the kind of work that follows
                if writer is not None:
                    # Bookies serve small requests with different code.
                    await warm_bookies(arena, OURS, losses=1)
                while waiting:
                    turn = waiting.pop(0)
                    self._progress.say(f"{turn.contender.title}: starting, and warming up")
                    wanted = [(key, self.loads[key.load]) for key in turn.keys]
                    try:
                        await take_turn(
                            arena, turn.contender, wanted, writer=writer, on_run=self._add
                        )
                    except (BookmenderError, OSError) as error:
                        self._fail(turn, error)
                        return

    def _add(self, run: Run) -> None:
        self.runs.add(run)
        measure = run.measure
        self._progress.done(
            run.key, f"{measure.lost_ledgers:,} ledgers whole after {measure.whole_s:.2f} s"
        )

    def _fail(self, turn: Turn, error: Exception) -> None:
        missing = [key for key in turn.keys if key not in self.runs]
        loads = ", ".join(key.load for key in missing)
        self.failures.append(
            f"{turn.contender.title}, {turn.of_pass.value}, repeat {turn.repeat},"
            f" loads {loads}: {error}"
        )
        self._progress.drop(missing, self.failures[-1])


@contextmanager
def results_folder(results: Path | None) -> Iterator[Path]:
    """Yield the folder of the results; a temporary one if None."""
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        yield results
        return
    with tempfile.TemporaryDirectory(prefix="bench-results-") as folder:
        yield Path(folder)


def chosen(options: Mapping[str, T], names: str) -> list[T]:
    """Return the options named in a comma-separated list. Raises click.BadParameter for an unknown
    name."""
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in options]:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(options)}")
    return [option for name, option in options.items() if name in wanted]


if __name__ == "__main__":
    main()
