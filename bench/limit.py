"""Measures what a repair spends its time on, and how far it is from the limit of the machine:
``python -m bench.limit``.

Each load is lost twice. The first, undisturbed loss gives the times and the CPU of all processes.
In the second our daemon runs under cProfile, which gives the shares of its CPU by function. Calls
of small functions look more expensive than they are, because the profiler itself costs time. The
limit is the time in which all cores would have done only the bookies' part. Only fewer requests to
the bookies can lower it.
"""

import asyncio
import pstats
from collections.abc import Sequence
from pathlib import Path

import click

from bench.arena import repair_arena
from bench.contenders import OURS, OURS_OPEN, PLAIN, Contender
from bench.loads import LOADS, Load
from bench.records import Record, Records
from bench.repair import others_cpu_s
from bench.report import CORES, failures_section, table
from bench.session import Session, bench_session, chosen, quick_option, results_option
from bench.turns import take_turn, warm_bookies
from tests.java.tool import JavaTool

PLAIN_RUN, PROFILE = "limit", "profile"
"""Names of records: an undisturbed loss, and shares by function of all loads together."""
FUNCTIONS_SHOWN = 25
LEFT_OUT = ("select.epoll", "time.sleep", "marshal.loads", "builtins.compile", "builtins.exec")
PREAMBLE = """\
# Where the time of a repair goes

By {title}, on {cores} cores. CPU seconds from the deletion of the bookie's znode until all
ledgers are whole; the shares are of everything that the cores could have done in that time. Limit:
the time in which they would have done only the bookies' part.
"""


@click.command()
@click.option("--only", default="a,b,c,d,e", show_default=True, help="Loads.")
@click.option("--contender", type=click.Choice([OURS.name, OURS_OPEN.name]), default=OURS_OPEN.name)
@quick_option
@results_option
def main(only: str, contender: str, quick: bool, results: Path | None) -> None:
    """Say what a repair spends its time on, and how far the machine's limit is."""
    loads = [load.quick() if quick else load for load in chosen(LOADS, only)]
    by = OURS if contender == OURS.name else OURS_OPEN
    with (
        bench_session("limit", report, results=results, is_kept=not quick) as session,
        JavaTool() as java,
    ):
        session.records.forget(lambda record: True)
        asyncio.run(_measure(session, java, by, loads))


async def _measure(
    session: Session, java: JavaTool, contender: Contender, loads: Sequence[Load]
) -> None:
    runs = [
        (Record(name=PLAIN_RUN, labels={"load": each.name, "contender": contender.title}), each)
        for each in loads
    ]
    async with repair_arena(java) as arena:
        session.say("warming up the bookies")
        await warm_bookies(arena)
        await take_turn(arena, contender, runs, on_run=session.add)
        session.say("under cProfile")
        output = arena.cluster.data / "profile"
        before = ("-m", "cProfile", "-o", str(output), *PLAIN)
        await take_turn(arena, contender, runs, before=before)
        session.add(Record(name=PROFILE, values=own_shares(output)))


def own_shares(profile: Path) -> dict[str, float]:
    """Return the most expensive functions with their own shares of the time, without waiting and
    without the imports at the start."""
    found: dict[str, float] = {}
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (path, _, function), (_, _, own_s, *_) in stats.items():
        if "importlib" not in path and not any(each in function for each in LEFT_OUT):
            name = f"{'/'.join(Path(path).parts[-3:])}:{function}" if path != "~" else function
            found[name] = found.get(name, 0.0) + own_s
    ordered = sorted(found.items(), key=lambda each: -each[1])[:FUNCTIONS_SHOWN]
    return {name: own_s / sum(found.values()) for name, own_s in ordered}


def report(records: Records) -> str:
    runs = records.find(PLAIN_RUN)
    title = runs[0].labels["contender"] if runs else ""
    return "\n".join(
        [
            PREAMBLE.format(title=title, cores=CORES),
            *failures_section(records),
            *map(_section, runs),
            *map(_functions, records.find(PROFILE)),
        ]
    )


def _section(run: Record) -> str:
    used, load = run.values, LOADS[str(run.labels["load"])]
    capacity_s, limit_s = CORES * used["whole_s"], used["bookies_cpu_s"] / CORES
    rows = [
        ("repairer, all", used["repairer_cpu_s"]),
        ("bookies", used["bookies_cpu_s"]),
        ("ZooKeeper", used["zookeeper_cpu_s"]),
        ("the bench, and everything else", others_cpu_s(run)),
        ("idle", max(0.0, capacity_s - used["machine_cpu_s"])),
    ]
    sooner = f"{used['whole_s'] / limit_s:.1f} times sooner" if limit_s else "no bookie was asked"
    return (
        f"## {load.name}: {load.title}\n\n"
        f"Whole after {used['whole_s']:.2f} s; cores busy "
        f"{used['machine_cpu_s'] / capacity_s:.0%}; "
        f"limit {limit_s:.2f} s, {sooner}.\n\n"
        + table(
            ["", "CPU, s", "share"],
            [[name, f"{cpu_s:.2f}", f"{cpu_s / capacity_s:.1%}"] for name, cpu_s in rows],
        )
    )


def _functions(profile: Record) -> str:
    rows = [[f"`{name}`", f"{share:.1%}"] for name, share in profile.values.items()]
    return "## The repairer's functions, all loads together, under cProfile\n\n" + table(
        ["function", "share"], rows
    )


if __name__ == "__main__":
    main()
