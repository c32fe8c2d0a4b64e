"""Compares our daemon with Java's AutoRecovery on the same bookies, in turn: ``python -m
bench.repair``.

All contenders share one cluster, in a different order each time. Every run is recorded when it
ends, and ``--resume`` continues an interrupted bench. Loads and contenders that are not selected
(``--only``, ``--contenders``) keep their earlier results.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import click

from bench.arena import repair_arena
from bench.contenders import (
    CONTENDERS,
    JAVA,
    JAVA_TUNED,
    OPEN_LEDGER_GRACE_S,
    OTHER,
    OURS,
    TITLES,
    Contender,
    other_tree,
)
from bench.loads import LOADS, Load
from bench.pace import PACE, measure_pace, pace_section
from bench.records import Record, Records
from bench.report import (
    CORES,
    NAN,
    Figure,
    Goal,
    Summary,
    failures_section,
    figure_row,
    goals_section,
    named,
    rate,
    table,
)
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


# --- The report -----------------------------------------------------------------------------------

RUN = "run"
"""The name of a record of one loss and its repair, with the values of ``Loss.measure``.
``judged_copies``: the copies that BookKeeper's own client read afterwards, all of them good."""
ALONE, BESIDE_WRITER = "alone", "beside-writer"
"""The two passes: rates are measured alone. Beside a writer, the bench measures how much the writer
suffers and how fast the repair is then."""
ALL = tuple(LOADS)
PREAMBLE = """\
# Repair of a lost bookie, against Java's AutoRecovery

One of five bookies is killed. Times count from the deletion of its znode until the queue is empty
and no metadata names the bookie. Best and median of {repeats} runs ("best / median"), on {cores}
cores that bookies, ZooKeeper and repairer share. After each run BookKeeper's own client read every
copy: {copies:,.0f} in all, none missing. Open ledgers are left to their writers for {grace} s on
both sides. All other processes, including the bench, used {others:.0%} of the cores. See
`bench/README.md`.
"""


def per_s(name: str, title: str, *, scale: float = 1.0, digits: int = 0) -> Figure:
    """Return a rate over the whole repair; NaN if nothing of this kind was lost."""
    return Figure(
        title=title,
        value=lambda run: (run.values[name] or NAN) / run.values["whole_s"] * scale,
        more_is_better=True,
        digits=digits,
    )


WHOLE_S = named("whole_s", "whole after, s", digits=2)
MB_PER_S = per_s("lost_bytes", "MB/s", scale=1e-6, digits=1)
COPIED = rate("copied_bytes", "lost_bytes", "bytes copied over lost", digits=3)
CPU, A_LEDGER, AN_ENTRY = (
    "repairer_cpu_s",
    "repairer's CPU a ledger, ms",
    "repairer's CPU an entry, us",
)
CPU_S = named(CPU, "repairer's CPU, s", digits=2)
CPU_MS = rate(CPU, "lost_ledgers", A_LEDGER, scale=1e3, digits=2)
CPU_US = rate(CPU, "lost_entries", AN_ENTRY, scale=1e6, digits=1)
PACKETS = rate("packets", "lost_ledgers", "ZooKeeper packets a ledger", digits=2)
RSS_MB = named("rss_bytes_max", "repairer's RSS, MB", scale=1e-6)
WRITERS_P99_MS = named("writer_during_p99_ms", "writer's p99, ms", digits=1)
TABLE = (
    WHOLE_S,
    named("closed_whole_s", "closed ones whole after, s", digits=2),
    named("first_mark_s", "first mark after, s", digits=3),
    per_s("lost_ledgers", "ledgers/s"),
    per_s("lost_entries", "entries/s"),
    MB_PER_S,
    COPIED,
    CPU_S,
    CPU_MS,
    CPU_US,
    named("bookies_cpu_s", "bookies' CPU, s", digits=2),
    named("zookeeper_cpu_s", "ZooKeeper's CPU, s", digits=2),
    PACKETS,
    RSS_MB,
)
"""All figures, in the order of the report."""

Value = Callable[[Records], Summary]


def runs_of(records: Records, name: str, load: str, contender: str) -> list[Record]:
    return records.find(RUN, **{"pass": name}, load=load, contender=contender)


def own(figure: Figure) -> Callable[[str], Value]:
    return lambda load: lambda records: figure.summary(runs_of(records, ALONE, load, OURS.name))


def times_sooner(reference: Contender, name: str = ALONE) -> Callable[[str], Value]:
    """Return how many times sooner ours repairs a load than ``reference``."""
    return lambda load: (
        lambda records: WHOLE_S.ratio(
            runs_of(records, name, load, reference.name), runs_of(records, name, load, OURS.name)
        )
    )


def writers_p99(load: str) -> Value:
    """Return the writer's p99 during our repair, divided by its p99 during Java's."""
    return lambda records: WRITERS_P99_MS.ratio(
        runs_of(records, BESIDE_WRITER, load, OURS.name),
        runs_of(records, BESIDE_WRITER, load, JAVA.name),
    )


SOONER, BESIDE = "times sooner than Java", "beside a writer: "
WITH_ENTRIES = [load for load in ALL if load != "e"]
GOALS = [
    Goal(f"{load}: {title}", value(load), must, aim, at_least=at_least, digits=digits)
    for title, loads, value, must, aim, at_least, digits in (
        (SOONER, "a", times_sooner(JAVA), 12, 16, True, 1),
        (SOONER, "b", times_sooner(JAVA), 20, 33, True, 1),
        (f"{SOONER} tuned", "b", times_sooner(JAVA_TUNED), 1.2, 1.6, True, 1),
        (SOONER, "c", times_sooner(JAVA), 25, 50, True, 1),
        (MB_PER_S.title, "d", own(MB_PER_S), 300, 350, True, 0),
        (BESIDE + SOONER, ALL, times_sooner(JAVA, BESIDE_WRITER), 3, 5, True, 1),
        (f"{BESIDE}its p99, over what it is beside Java's", ALL, writers_p99, 1.0, 0.5, False, 2),
        (CPU_MS.title, "a", own(CPU_MS), 0.5, 0.2, False, 2),
        (CPU_US.title, "bc", own(CPU_US), 5, 2.5, False, 1),
        (PACKETS.title, "ae", own(PACKETS), 4, 1, False, 2),
        (COPIED.title, WITH_ENTRIES, own(COPIED), 1.0, 1.0, False, 2),
        (RSS_MB.title, ALL, own(RSS_MB), 120, 80, False, 2),
    )
    for load in loads
]


def report(records: Records) -> str:
    runs = records.find(RUN)
    others_s = sum(others_cpu_s(run) for run in runs)
    available_s = sum(CORES * run.values["whole_s"] for run in runs)
    return "\n".join(
        [
            PREAMBLE.format(
                repeats=max((run.labels["repeat"] for run in runs), default=0),
                cores=CORES,
                copies=sum(run.values["judged_copies"] for run in runs),
                grace=OPEN_LEDGER_GRACE_S,
                others=others_s / available_s if runs else 0,
            ),
            *failures_section(records),
            goals_section(GOALS, records, has_best=True),
            *_against_other_tree(records),
            *(section for load in LOADS for section in _load(records, load)),
            *_writers(records),
            *pace_section(records),
        ]
    )


def others_cpu_s(run: Record) -> float:
    """Return the CPU of the bench itself and of all other processes on the machine."""
    used = run.values
    known_s = used["repairer_cpu_s"] + used["bookies_cpu_s"] + used["zookeeper_cpu_s"]
    return max(0.0, used["machine_cpu_s"] - known_s)


def _load(records: Records, load: str) -> Iterator[str]:
    if columns := _by_title(records, ALONE, load):
        lost = next(iter(columns.values()))[0].values
        yield (
            f"## {load}: {LOADS[load].title}\n\nLost: {lost['lost_ledgers']:,.0f} ledgers, "
            f"{lost['lost_entries']:,.0f} entries, {lost['lost_bytes'] / 1e6:,.1f} MB.\n\n"
            + table(["", *columns], [figure_row(each, columns, has_best=True) for each in TABLE])
        )


def _by_title(records: Records, name: str, load: str) -> dict[str, list[Record]]:
    """Return the runs of each contender by its title, in the order of the contenders."""
    found = {title: runs_of(records, name, load, each) for each, title in TITLES.items()}
    return {title: runs for title, runs in found.items() if runs}


def _against_other_tree(records: Records) -> Iterator[str]:
    rows = [
        [
            load,
            name,
            *(figure.ratio(ours, others).text(2, has_best=True) for figure in (WHOLE_S, CPU_S)),
        ]
        for load in LOADS
        for name in (ALONE, BESIDE_WRITER)
        if (ours := runs_of(records, name, load, OURS.name))
        and (others := runs_of(records, name, load, OTHER))
    ]
    if rows:
        head = ["load", "", "whole after", "repairer's CPU"]
        yield "## Ours over the other tree: below 1 is less\n\n" + table(head, rows)


def _writers(records: Records) -> Iterator[str]:
    rows = [
        [load, title, WHOLE_S.summary(runs).text(2, has_best=True), *_disturbance(runs)]
        for load in LOADS
        for title, runs in _by_title(records, BESIDE_WRITER, load).items()
    ]
    if rows:
        yield (
            "## Beside a writer\n\nA Java client adds 500 entries of 1 KB a second, on a fixed "
            "schedule; each is measured from when it was due.\n\n"
            + table(["load", "", "whole after, s", "before", "during", "after", "adds"], rows)
            + "\nLatencies are p50 / p99 in ms.\n"
        )


def _disturbance(runs: Sequence[Record]) -> list[str]:
    """Return the writer's figures of the run with the median p99."""
    ordered = sorted(runs, key=lambda run: run.values["writer_during_p99_ms"])
    chosen = ordered[len(ordered) // 2].values
    spans = [f"writer_{name}" for name in ("before", "during", "after")]
    return [
        *(f"{chosen[f'{span}_p50_ms']:.1f} / {chosen[f'{span}_p99_ms']:.1f}" for span in spans),
        f"{chosen['writer_during_adds']:,.0f}",
    ]


if __name__ == "__main__":
    main()
