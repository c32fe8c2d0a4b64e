"""Compares our daemon with Java's AutoRecovery on the same bookies, in turn: ``python -m
bench.repair``.

All contenders share one cluster, in a different order each time. Every run is recorded when it
ends, and ``--resume`` continues an interrupted bench. Loads and contenders that are not selected
(``--only``, ``--contenders``) keep their earlier results.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import click

from bench.arena import repair_arena
from bench.contenders import CONTENDERS, JAVA, OTHER, OURS, Contender, other_tree
from bench.loads import LOADS, Load
from bench.pace import PACE, measure_pace
from bench.records import Record
from bench.repair_report import ALONE, BESIDE_WRITER, RUN, report
from bench.session import (
    Session,
    bench_session,
    chosen,
    in_turn,
    other_tree_option,
    quick_option,
    results_option,
)
from bench.turns import take_turn, warm_bookies
from bench.writer import PacedWriter
from tests.java.tool import JavaTool

WRITERS = (JAVA.name, OURS.name, OTHER)
"""The contenders that also run beside a writer."""
PARTS: Mapping[str, Load | None] = {**LOADS, PACE: None}
Turn = tuple[Contender, list[Record]]
"""The runs of one contender, load after load; the records have no values yet."""


@click.command()
@click.option("--only", default=",".join(PARTS), show_default=True, help="Loads, and the pace.")
@click.option("--contenders", help="Default: all; ours and the other tree if there is one.")
@click.option("--repeat", default=3, show_default=True, help="Best and median of so many runs.")
@click.option("--writer-repeat", default=3, show_default=True, help="Runs beside a writer.")
@click.option("--resume", is_flag=True, help="Keep the runs that are recorded already.")
@other_tree_option
@quick_option
@results_option
def main(
    only: str,
    contenders: str | None,
    repeat: int,
    writer_repeat: int,
    resume: bool,
    other_tree: Path | None,
    quick: bool,
    results: Path | None,
) -> None:
    """Measure repairs of ours and of Java's on a local cluster."""
    taking_part = contenders_for(CONTENDERS, contenders, other_tree, is_quick=quick)
    loads = {load.name: load for load in chosen(PARTS, only) if load is not None}
    if quick:
        loads = {name: load.quick() for name, load in loads.items()}
        repeat, writer_repeat = 1, 0
    turns = plan(taking_part, list(loads), repeat=repeat, writer_repeat=writer_repeat)
    is_kept = not quick and other_tree is None
    with bench_session("repair", report, results=results, is_kept=is_kept) as session:
        planned = {record.key for _, records in turns for record in records}
        if not resume:
            session.records.forget(lambda record: record.key in planned)
        left = [
            (contender, rest)
            for contender, records in turns
            if (rest := [record for record in records if record not in session.records])
        ]
        with JavaTool() as java:
            for _, together in groupby(left, key=_pass):
                waiting = list(together)
                while waiting:
                    asyncio.run(_on_one_cluster(session, java, loads, waiting))
            if PACE in only.split(",") and not quick:
                with session.attempt(PACE):
                    found = asyncio.run(measure_pace(java))
                    session.records.forget(lambda record: record.name == PACE)
                    for record in found:
                        session.add(record)


def contenders_for(
    known: Sequence[Contender], names: str | None, tree: Path | None, *, is_quick: bool
) -> list[Contender]:
    """Return the contenders that the options select. The default is all of them; with another tree
    only ours and that one, and only Java and ours for a quick run."""
    options = {each.name: each for each in known}
    default = ",".join([JAVA.name, OURS.name] if is_quick else options)
    if tree is not None:
        options[OTHER] = other_tree(tree)
        default = f"{OURS.name},{OTHER}"
    return chosen(options, names or default)


def plan(
    contenders: Sequence[Contender], loads: Sequence[str], *, repeat: int, writer_repeat: int
) -> list[Turn]:
    """Return the turns in order: all that run alone, then those beside a writer."""
    beside = [each for each in contenders if each.name in WRITERS]
    return [
        (
            contender,
            [
                Record(
                    name=RUN,
                    labels={
                        "pass": name,
                        "load": load,
                        "contender": contender.name,
                        "repeat": number,
                    },
                )
                for load in loads
            ],
        )
        for name, taking_part, count in (
            (ALONE, contenders, repeat),
            (BESIDE_WRITER, beside, writer_repeat),
        )
        for number, contender in in_turn(taking_part, count)
    ]


def _pass(turn: Turn) -> str | int:
    return turn[1][0].labels["pass"]


async def _on_one_cluster(
    session: Session, java: JavaTool, loads: Mapping[str, Load], waiting: list[Turn]
) -> None:
    """Run turns from ``waiting`` until none is left or one fails. After a failure the others
    continue on a new cluster."""
    session.say("starting ZooKeeper and the bookies")
    async with repair_arena(java) as arena:
        with ExitStack() as stack:
            writer = None
            if _pass(waiting[0]) == BESIDE_WRITER:
                uri = arena.cluster.metadata_service_uri
                writer = stack.enter_context(PacedWriter(uri, avoid=arena.victim))
            await warm_bookies(arena)  # with the kind of work that follows
            if writer is not None:
                # Bookies serve small requests with different code.
                await warm_bookies(arena, OURS, losses=1)
            while waiting:
                contender, records = waiting.pop(0)
                labels = records[0].labels
                title = f"{contender.title}, {labels['pass']}, repeat {labels['repeat']}"
                wanted = [(record, loads[str(record.labels["load"])]) for record in records]
                with session.attempt(title):
                    await take_turn(arena, contender, wanted, writer=writer, on_run=session.add)
                if title in session.failed:
                    return


if __name__ == "__main__":
    main()
