"""Measures the figures of the change feed, and compares them with their goals: ``python -m
bench.feed_table``.

Each part runs in a process of its own, so that its memory and its caches are its own. Every record
is written at once. Parts that are not selected (``--only``) keep their earlier results.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import click

from bench.etcd import find_etcd
from bench.feed import (
    FirstMarkFigures,
    LogFigures,
    measure_first_mark,
    measure_log,
    open_feed_ground,
)
from bench.feed_catch_up import measure_catch_up
from bench.feed_goals import Measured, report
from bench.feed_receipts import SECONDS, YEAR_S, measure_behind, measure_stored
from bench.feed_takeover import measure_takeover
from bench.fsck_changed import measure as measure_fsck_changed
from bench.repair import RESULTS, chosen, results_folder
from bench.report import CORES
from bench.runs import RunFile
from bench.usage import cpu_of_machine
from ledgers.errors import BookmenderError, UnavailableError

LOG_RATES = (1_000, 5_000, 10_000, 0)
"""Changes a second; 0: as many as possible."""
LOG_DURATION_S = 10.0
BESIDE_PER_S, LOSSES = 5_000, 10
STOP_TIMEOUT_S = 30.0
WATCHED_S = 2.0
"""The machine is watched for this time before and after each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``is_quick``: small numbers. ``etcd``: the server's program; None: on the PATH."""

    is_quick: bool
    seconds: int
    etcd: Path | None


Figures = tuple[Mapping[str, float], str]
"""The figures of a part, by name, and a text for people."""
Part = Callable[[Options], Figures]


def measure_log_part(options: Options) -> Figures:
    figures = asyncio.run(_measure_log(2.0 if options.is_quick else LOG_DURATION_S))
    slow, *_ = figures
    values = {
        "changes_per_s": max(map(sustained_per_s, figures)),
        "median_ms": slow.median_ms,
        "p99_ms": slow.p99_ms,
    }
    return values, "\n".join(each.text() for each in figures)


async def _measure_log(duration_s: float) -> list[LogFigures]:
    """Measure the log at each rate, the one of the latencies first."""
    async with open_feed_ground() as ground:
        return [
            await measure_log(ground, per_s=per_s, duration_s=duration_s) for per_s in LOG_RATES
        ]


def sustained_per_s(figures: LogFigures) -> float:
    """Return the rate of changes until the last of them was in the log."""
    written_s = figures.change_count / figures.written_per_s
    return figures.change_count / (written_s + figures.lag_s)


async def _measure_first_mark(losses: int) -> FirstMarkFigures:
    async with open_feed_ground() as ground:
        return await measure_first_mark(ground, per_s=BESIDE_PER_S, losses=losses)


def measure_first_mark_part(options: Options) -> Figures:
    figures = asyncio.run(_measure_first_mark(2 if options.is_quick else LOSSES))
    return {"first_mark_ms": median(figures.on_ms)}, figures.text()


def measure_fsck_part(options: Options) -> Figures:
    figures = measure_fsck_changed(*((5_000, 100) if options.is_quick else (1_000_000, 1_000)))
    return {"times_sooner": figures.speedup}, str(figures)


def measure_takeover_part(options: Options) -> Figures:
    sizes = (20_000, 1_000) if options.is_quick else ()
    figures = asyncio.run(measure_takeover(*sizes, say=_say))
    return {"takeover_s": figures.slower_s}, figures.text()


def measure_behind_part(options: Options) -> Figures:
    sizes = (20_000,) if options.is_quick else ()
    figures = asyncio.run(measure_behind(*sizes))
    return {"known_s": figures.known_s, "memory_mb": figures.memory_mb}, figures.text()


def measure_receipts_part(options: Options) -> Figures:
    figures = asyncio.run(measure_stored(50_000 if options.is_quick else options.seconds))
    return {"stored_kb": figures.file_bytes / 1000}, figures.text()


def measure_catch_up_part(options: Options) -> Figures:
    sizes = (5_000,) if options.is_quick else ()
    etcd = find_etcd(options.etcd)
    repeats = 1 if options.is_quick else 3
    figures = asyncio.run(measure_catch_up(etcd, *sizes, repeats=repeats, say=_say))
    return {"times_the_watch": figures.times_the_watch}, figures.text()


PARTS: Mapping[str, Part] = {
    "log": measure_log_part,
    "first-mark": measure_first_mark_part,
    "take-over": measure_takeover_part,
    "behind": measure_behind_part,
    "receipts": measure_receipts_part,
    "catch-up": measure_catch_up_part,
    "fsck": measure_fsck_part,
}


@click.command()
@click.option("--only", default=",".join(PARTS), show_default=True)
@click.option(
    "--seconds",
    default=SECONDS,
    show_default=True,
    help=f"Checkpoints whose receipts are stored. A year has {YEAR_S}, some minutes.",
)
@click.option(
    "--etcd",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The program of etcd's server. Default: on the PATH.",
)
@click.option("--quick", is_flag=True, help="Small numbers; leaves no record.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="The folder for feed.md and feed.jsonl.",
)
def main(only: str, seconds: int, etcd: Path | None, quick: bool, results: Path) -> None:
    """Measure the change feed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    options = Options(is_quick=quick, seconds=seconds, etcd=etcd)
    parts = chosen({name: (name, part) for name, part in PARTS.items()}, only)
    with results_folder(None if quick else results) as folder:
        bench = Bench(records=RunFile(folder / "feed.jsonl", Measured))
        try:
            for name, part in parts:
                bench.run(name, partial(part, options))
        finally:
            text = report(list(bench.records), failures=bench.failures)
            (folder / "feed.md").write_text(text)
        click.echo(text)


@dataclass(slots=True, kw_only=True)
class Bench:
    """Runs the parts. A part that fails is noted, and the others continue."""

    records: RunFile[Measured]
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, part: Callable[[], Figures]) -> None:
        _say(f"{name}: starting")
        before = others_share()
        try:
            values, text = in_own_process(part)
        except (BookmenderError, OSError) as error:
            self.failures[name] = str(error)
            _say(f"{name}: {error}")
            return
        record = Measured(
            part=name, values=values, text=text, others_share=max(before, others_share())
        )
        self.records.forget([record.key])
        self.records.add(record)
        _say(f"{name}: {text}")


def in_own_process(part: Callable[[], Figures]) -> Figures:
    """Call the function in a process of its own, and return what it returns. Raises its
    BookmenderError or OSError, and UnavailableError if the process ends otherwise."""
    # "spawn": a process that is forked from this one would inherit its memory.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_figures, args=(part, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
        process.join(STOP_TIMEOUT_S)
    except EOFError:
        raise UnavailableError("its process ended early, see above") from None
    finally:  # also after Ctrl-C
        process.terminate()
        process.join(STOP_TIMEOUT_S)
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    figures: Figures = answer
    return figures


def _send_figures(part: Callable[[], Figures], connection: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its own children end with it
    try:
        connection.send(part())
    except (BookmenderError, OSError) as error:
        connection.send(error)


def others_share() -> float:
    """Watch the machine while this bench does nothing, and return the share of its cores in use."""
    before, began_s = cpu_of_machine(), time.monotonic()
    time.sleep(WATCHED_S)
    used_s = (cpu_of_machine() - before).total_s
    return used_s / (CORES * (time.monotonic() - began_s))


def _say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


if __name__ == "__main__":
    main()
