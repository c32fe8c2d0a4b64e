"""The command ``python -m bench.fsck``, which measures the levels of fsck. Every record is written
at once."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from bench.audit.field import open_field
from bench.fsck import loads, znodes
from bench.fsck.java import check_all_ledgers
from bench.fsck.on_spark import SLOTS
from bench.fsck.reading import ground, inspect_all_on_spark, inspect_ledger
from bench.fsck.records import Pass
from bench.fsck.report import report
from bench.repair import RESULTS, chosen, results_folder
from bench.runs import RunFile
from ledgers.errors import BookmenderError

SIZES, QUICK_SIZES = (100_000, 1_000_000), (2_000, 20_000)
LONG_FROM = 500_000
"""From this number of ledgers on, a pass takes minutes, and the start of a session hardly matters.
"""
RUNS_IN_SESSION = 4


@click.command()
@click.option("--only", default="reading,java,metadata", show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Passes of each kind.")
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Of metadata.")
@click.option("--quick", is_flag=True, help="Few and small loads, once; leaves no record.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="The folder for fsck.md and fsck.jsonl.",
)
def main(only: str, repeat: int, sizes: str, quick: bool, results: Path) -> None:
    """Measure how fast fsck inspects ledgers at each level, compared with Java's check."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    with results_folder(None if quick else results) as folder:
        bench = Bench(
            repeat=1 if quick else repeat,
            sizes=QUICK_SIZES if quick else sorted(map(int, sizes.split(","))),
            is_quick=quick,
            passes=RunFile(folder / "fsck.jsonl", Pass),
        )
        parts = {"reading": bench.reading, "java": bench.java, "metadata": bench.metadata}
        try:
            for part in chosen(parts, only):
                asyncio.run(bench.run(part))
        finally:
            text = report(list(bench.passes), failures=bench.failures)
            (folder / "fsck.md").write_text(text)
        click.echo(text)


@dataclass(slots=True, kw_only=True)
class Bench:
    """Runs the parts. A part that fails is noted, and the others continue."""

    repeat: int
    sizes: Sequence[int]
    is_quick: bool
    passes: RunFile[Pass]
    failures: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    async def run(self, part: Callable[[], AsyncIterator[Pass]]) -> None:
        try:
            async for each in part():
                self.passes.forget([each.key])
                self.passes.add(each)
                self._say(_line(each))
        except (BookmenderError, OSError) as error:
            self.failures.append(str(error))
            self._say(str(error))

    async def reading(self) -> AsyncIterator[Pass]:
        """Inspect each load at every level, and repeat the whole round.

        The first inspection does not count, as with Java's first check: bookies still compile their
        code then.
        """
        wanted = loads.QUICK if self.is_quick else loads.LOADS
        self._say("starting bookies, storing ledgers")
        async with ground(wanted) as cluster:
            for load in wanted:
                await inspect_ledger(cluster, load, loads.FULL, repeat=0)
            for repeat in self._repeats:
                for load in wanted:
                    for level in loads.LEVELS[load]:
                        yield await inspect_ledger(cluster, load, level, repeat=repeat)
                for slot_count in SLOTS:
                    yield await asyncio.to_thread(
                        inspect_all_on_spark, cluster, wanted, slot_count, repeat=repeat
                    )

    async def java(self) -> AsyncIterator[Pass]:
        for load in loads.JAVAS[:1] if self.is_quick else loads.JAVAS:
            self._say(f"starting bookies for Java, storing ledgers: {load.name}")
            async with ground([load]) as cluster:
                for each in check_all_ledgers(cluster, load, repeats=self.repeat):
                    yield each

    async def metadata(self) -> AsyncIterator[Pass]:
        async with open_field() as field:
            for size in self.sizes:
                self._say(f"{size:,} ledgers: making those that are not there yet")
                await field.grow(size)
                is_short = size < LONG_FROM
                for repeat in self._repeats:
                    if is_short or repeat == 1:
                        yield await znodes.inspect_all(field, repeat=repeat)
                    for slot_count, is_on_one_core in ((1, True), *((n, False) for n in SLOTS)):
                        runs = await asyncio.to_thread(
                            znodes.inspect_all_on_spark,
                            field,
                            slot_count,
                            repeat=repeat,
                            run_count=RUNS_IN_SESSION if is_short else 1,
                            is_on_one_core=is_on_one_core,
                        )
                        for each in runs:
                            yield each

    @property
    def _repeats(self) -> range:
        return range(1, self.repeat + 1)

    def _say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._began_s:6.0f} s] {text}", err=True)


def _line(each: Pass) -> str:
    ledgers_per_s, copies_per_s = (n / each.elapsed_s for n in (each.ledger_count, each.copies))
    return (
        f"{each.load}, {each.level}, {each.contender}, {each.repeat}: {each.elapsed_s:.2f} s,"
        f" {ledgers_per_s:,.0f} ledgers/s, {copies_per_s:,.0f} copies/s"
    )


if __name__ == "__main__":
    main()
