"""The goals of repairs and every figure of every contender, as Markdown.

All goals compare our defaults with Java's on the same bookies in the same bench. One part runs
alone, the other beside a writer, which must not suffer more from us than from Java.
"""

from collections.abc import Callable, Iterator, Sequence

from bench.contenders import JAVA, JAVA_TUNED, OPEN_LEDGER_GRACE_S, OTHER, OURS, TITLES, Contender
from bench.loads import LOADS
from bench.pace import pace_section
from bench.records import Record, Records
from bench.report import (
    CORES,
    NAN,
    Figure,
    Goal,
    Summary,
    failures_section,
    figures_table,
    goals_section,
    named,
    rate,
    table,
)

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
            + figures_table(TABLE, columns, has_best=True)
        )


def _by_title(records: Records, name: str, load: str) -> dict[str, list[Record]]:
    """Return the runs of each contender by its title, in the order of the contenders."""
    found = {title: runs_of(records, name, load, each) for each, title in TITLES.items()}
    return {title: runs for title, runs in found.items() if runs}


def _against_other_tree(records: Records) -> Iterator[str]:
    rows = [
        [load, name, *(figure.ratio(ours, others).text(2) for figure in (WHOLE_S, CPU_S))]
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
        [load, title, WHOLE_S.summary(runs).text(2), *_disturbance(runs)]
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
