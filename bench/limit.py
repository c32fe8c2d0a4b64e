"""Measures what a repair spends its time on, and how far it is from the limit of the machine:
``python -m bench.limit``.

Each load is lost twice. The first, undisturbed loss gives the times and the CPU of all processes.
In the second a sampler runs in our daemon, which gives the shares of its CPU. The limit is the time
in which all cores would have done only the bookies' part. Only fewer requests to the bookies can
lower it.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.arena import Arena, open_arena
from bench.contenders import BY_NAME, OURS_OPEN, PLAIN, Contender
from bench.loads import LOADS, Load
from bench.loss import Loss, Measure
from bench.profile import by_function, by_group, load_samples
from bench.repair import RESULTS, chosen
from bench.report import CORES, table
from bench.turns import warm_bookies, warm_daemon
from ledgers.errors import BookmenderError
from tests.java.tool import JavaTool

FUNCTIONS_SHOWN = 12

PREAMBLE = """\
# Where the time of a repair goes

By {contender}, on {cores} cores. CPU seconds from the deletion of the bookie's znode until all
ledgers are whole; the shares are of everything that the cores could have done in that time. Limit:
the time in which they would have done only the bookies' part.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of one load. ``groups`` and ``functions``: the repairer's CPU, in seconds
    measured by the sampler."""

    load: Load
    plain: Measure
    groups: Mapping[str, float]
    functions: Mapping[str, float]


@click.command()
@click.option("--only", default="a,b,c,d,e", show_default=True, help="Loads.")
@click.option("--contender", type=click.Choice(["ours", "ours-open"]), default=OURS_OPEN.name)
@click.option("--quick", is_flag=True, help="A tenth of each load; leaves no record.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="The folder for limit.md.",
)
def main(only: str, contender: str, quick: bool, results: Path) -> None:
    """Say what a repair spends its time on, and how far the machine's limit is."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    loads = [load.quick() if quick else load for load in chosen(LOADS, only)]
    try:
        profiles = asyncio.run(_measure(BY_NAME[contender], loads))
    except BookmenderError as error:
        raise click.ClickException(str(error)) from error
    text = limit_report(BY_NAME[contender], profiles)
    if not quick:
        results.mkdir(parents=True, exist_ok=True)
        (results / "limit.md").write_text(text)
    click.echo(text)


async def _measure(contender: Contender, loads: Sequence[Load]) -> list[Profile]:
    with JavaTool() as java:
        async with open_arena(java) as arena:
            click.echo("warming up the bookies", err=True)
            await warm_bookies(arena)
            click.echo("undisturbed", err=True)
            plain = await _lose_each(arena, contender, loads, before=PLAIN)
            click.echo("with the sampler", err=True)
            output = arena.cluster.data / "samples.json"
            sampled = await _lose_each(
                arena, contender, loads, before=("-m", "bench.sampled", str(output))
            )
            return [
                _profile(output, load, undisturbed, watched)
                for load, undisturbed, watched in zip(loads, plain, sampled, strict=True)
            ]


async def _lose_each(
    arena: Arena, contender: Contender, loads: Sequence[Load], *, before: Sequence[str]
) -> list[Measure]:
    measures = []
    async with warm_daemon(arena, contender, before=before) as child:
        for load in loads:
            ledgers = await arena.write(load)
            measure = await Loss(arena, child, ledgers).measure(idle_packets_per_s=0)
            await arena.judge_and_restore(ledgers)
            click.echo(f"{load.name}: whole after {measure.whole_s:.2f} s", err=True)
            measures.append(measure)
    return measures


def _profile(output: Path, load: Load, plain: Measure, sampled: Measure) -> Profile:
    end_s = sampled.gone_at_s + sampled.whole_s
    samples = load_samples(output, begin_s=sampled.gone_at_s, end_s=end_s)
    return Profile(load=load, plain=plain, groups=by_group(samples), functions=by_function(samples))


def limit_report(contender: Contender, profiles: Sequence[Profile]) -> str:
    return "\n".join(
        [
            PREAMBLE.format(contender=contender.title, cores=CORES),
            *(_section(profile) for profile in profiles),
        ]
    )


def _section(profile: Profile) -> str:
    plain = profile.plain
    capacity_s, limit_s = CORES * plain.whole_s, plain.bookies_cpu_s / CORES
    parts = _parts(plain, capacity_s)
    split = [
        [f"repairer: {group}", *_row(seconds, capacity_s)]
        for group, seconds in _scaled(profile.groups, plain.repairer_cpu_s)
    ]
    functions = [
        [f"`{name}`", f"{seconds:.3f}"]
        for name, seconds in _scaled(profile.functions, plain.repairer_cpu_s)[:FUNCTIONS_SHOWN]
    ]
    rows = [[name, *_row(seconds, capacity_s)] for name, seconds in parts]
    return (
        f"## {profile.load.name}: {profile.load.title}\n\n"
        f"Whole after {plain.whole_s:.2f} s; cores busy {plain.machine_cpu_s / capacity_s:.0%}; "
        f"limit {limit_s:.2f} s, {_times(plain.whole_s, limit_s)}.\n\n"
        + table(["", "CPU, s", "share"], [*split, *rows])
        + "\n"
        + table(["repairer's functions", "CPU, s"], functions)
    )


def _parts(plain: Measure, capacity_s: float) -> list[tuple[str, float]]:
    return [
        ("repairer, all", plain.repairer_cpu_s),
        ("of it in the kernel", plain.repairer_system_cpu_s),
        ("bookies", plain.bookies_cpu_s),
        ("ZooKeeper", plain.zookeeper_cpu_s),
        ("the bench, and everything else", plain.others_cpu_s),
        ("idle", max(0.0, capacity_s - plain.machine_cpu_s)),
    ]


def _scaled(spent: Mapping[str, float], total_s: float) -> list[tuple[str, float]]:
    """Scale to the seconds of the undisturbed run, because the sampler itself uses CPU."""
    sampled_s = sum(spent.values())
    ordered = sorted(spent.items(), key=lambda each: -each[1])
    return [(name, seconds / sampled_s * total_s) for name, seconds in ordered]


def _row(seconds: float, capacity_s: float) -> list[str]:
    return [f"{seconds:.2f}", f"{seconds / capacity_s:.1%}"]


def _times(whole_s: float, limit_s: float) -> str:
    return f"{whole_s / limit_s:.1f} times sooner" if limit_s > 0 else "nothing asked of bookies"


if __name__ == "__main__":
    main()
