"""Compares our auditor with Java's on the same znodes, in turn: ``python -m bench.audit``.

Sizes are measured in ascending order, because ledgers are only added. Every record is written at
once. Parts that are not selected (``--sizes``, ``--contenders``, ``--only``) keep their earlier
results.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from bench.audit.field import Field, open_field
from bench.audit.plot import plot
from bench.audit.records import Idle, Loss, Record, Weight
from bench.audit.report import MEASURED_SIZE, report
from bench.audit.turns import BY_NAME, JAVA, lose_repeatedly, stay_idle
from bench.audit.weight import weigh_ledger_map
from bench.contenders import Contender
from bench.repair import RESULTS, chosen, results_folder
from bench.runs import RunFile
from ledgers.errors import BookmenderError

SIZES = (10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 10_000)
SLOW_REPEATS = 1
TURNS = 2
PARTS = {part: part for part in ("weight", "losses", "idle")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The losses of one contender during one run of its daemon. ``repeats`` count from 1 over all
    turns."""

    contender: Contender
    repeats: tuple[int, ...]


@click.command()
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True)
@click.option("--contenders", default=",".join(BY_NAME), show_default=True)
@click.option("--repeat", default=6, show_default=True, help="Losses at each size.")
@click.option("--only", default=",".join(PARTS), show_default=True)
@click.option("--idle-s", default=60.0, show_default=True, help="How long idle nodes are watched.")
@click.option("--quick", is_flag=True, help="Small numbers, twice; leaves no record.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="The folder for audit.md, audit.svg and audit.jsonl.",
)
def main(
    sizes: str,
    contenders: str,
    repeat: int,
    only: str,
    idle_s: float,
    quick: bool,
    results: Path,
) -> None:
    """Measure how soon a lost bookie's ledgers are marked, by ours and by Java's auditor."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    taking_part, parts = chosen(BY_NAME, contenders), chosen(PARTS, only)
    ordered = sorted(QUICK_SIZES if quick else map(int, sizes.split(",")))
    if quick:
        repeat, idle_s = 2, 5.0
    with results_folder(None if quick else results) as folder:
        records: RunFile[Record] = RunFile(folder / "audit.jsonl", Record)
        bench = Bench(
            contenders=taking_part, parts=parts, repeat=repeat, idle_s=idle_s, records=records
        )
        try:
            asyncio.run(bench.run(ordered))
        except BookmenderError as error:
            raise click.ClickException(str(error)) from error
        finally:
            text = report(list(records), failures=bench.failures)
            (folder / "audit.md").write_text(text)
            (folder / "audit.svg").write_text(plot(list(records)))
        click.echo(text)


def plan(contenders: Sequence[Contender], *, size: int, repeat: int) -> Iterator[Turn]:
    """Yield the contenders in turn; in the second round in reverse order."""
    for number in range(TURNS):
        for contender in reversed(contenders) if number % 2 else contenders:
            count = SLOW_REPEATS if _is_slow(contender, size) else repeat
            first, stop = (1 + each * count // TURNS for each in (number, number + 1))
            if first < stop:
                yield Turn(contender=contender, repeats=tuple(range(first, stop)))


def _is_slow(contender: Contender, size: int) -> bool:
    """Return True for Java at a million ledgers, where each loss takes it minutes."""
    return contender is JAVA and size >= SIZES[-1]


@dataclass(slots=True, kw_only=True)
class Bench:
    """Runs the turns. A turn that fails is noted, and the others continue."""

    contenders: Sequence[Contender]
    parts: Sequence[str]
    repeat: int
    idle_s: float
    records: RunFile[Record]
    failures: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    async def run(self, sizes: Sequence[int]) -> None:
        self._say("starting ZooKeeper")
        async with open_field() as ground:
            for size in sizes:
                await self._run_size(ground, size)

    async def _run_size(self, ground: Field, size: int) -> None:
        if "weight" in self.parts and size >= MEASURED_SIZE:  # else chance decides
            self._say(f"{size:,} ledgers: weighing the ledger map")
            self._add(weigh_ledger_map(size))
        self._say(f"{size:,} ledgers: making those that are not there yet")
        victim = await ground.grow(size)
        if "losses" in self.parts:
            for turn in plan(self.contenders, size=size, repeat=self.repeat):
                losing = lose_repeatedly(ground, victim, turn.contender, turn.repeats, self._add)
                await self._try(f"{size:,} ledgers, {turn.contender.title}", losing)
        if "idle" in self.parts and size == MEASURED_SIZE:
            for contender in self.contenders:
                idling = stay_idle(ground, contender, self.idle_s, self._add)
                await self._try(f"{size:,} ledgers, {contender.title}, idle", idling)

    async def _try(self, title: str, turn: Coroutine[None, None, None]) -> None:
        self._say(f"{title}: starting")
        try:
            await turn
        except (BookmenderError, OSError) as error:
            self.failures.append(f"{title}: {error}")
            self._say(self.failures[-1])

    def _add(self, record: Record) -> None:
        self.records.forget([record.key])
        self.records.add(record)
        self._say(_line(record))

    def _say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._began_s:6.0f} s] {text}", err=True)


def _line(record: Record) -> str:
    start = f"{record.size:,} ledgers"
    match record:
        case Loss():
            first, last = _time(record.first_mark_s), _time(record.all_marked_s)
            who = f"{record.contender}, {record.repeat}"
            return f"{start}, {who}: first mark after {first}, all after {last}"
        case Idle():
            weight_mb, share = record.rss_bytes / 1e6, record.core_share
            return f"{start}, {record.contender}, idle: {weight_mb:.0f} MB, {share:.2%} of a core"
        case Weight():
            return f"{start}: {record.ledger_map_bytes / record.size:.0f} bytes each"


def _time(time_s: float | None) -> str:
    return "too long" if time_s is None else f"{time_s:.3f} s"


if __name__ == "__main__":
    main()
