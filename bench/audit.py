"""Compares our auditor with Java's on the same znodes, in turn: ``python -m bench.audit``.

One loss runs from the deletion of a bookie's znode until all its ledgers are marked. All times are
ZooKeeper's, which stamps the deletion and each mark. So the marks need no fast polling: one
``exists`` of each directory of marks at a time is enough.

Sizes are measured in ascending order, because ledgers are only added. Every record is written at
once. Parts that are not selected (``--sizes``, ``--contenders``, ``--only``) keep their earlier
results.
"""

import asyncio
import gc
import math
import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import click

from auditor.ledger_map import LedgerMap
from bench.contenders import JAVA, OURS, TITLES, Contender, elected, events, wait_ledger_map
from bench.records import Record, Records
from bench.repair import contenders_for
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
    share,
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
from bench.usage import cpu_of, rss_bytes, rss_bytes_max
from bench.waiting import wait_until
from bench.znodes import SEED, Field, Victim, drawn_ledgers, open_field
from daemon.local.processes import Child
from ledgers.errors import NoNodeError, UnavailableError
from ledgers.store import Stat
from tests.znode_cluster import PATHS, bookie

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (1_000, 10_000)
PARTS = {part: part for part in ("weight", "losses", "idle")}
TURNS = 2
"""Each contender is started so often, and every time loses half of its bookies."""
START_TIMEOUT_S = 300.0
"""Timeout for the first reads."""
LOSS_TIMEOUT_S = 300.0
MARK_POLL_S = 0.02
READS_AT_ONCE = 500
QUIET_S, QUIET_PACKETS = 3.0, 20
"""A daemon has settled when it sends ZooKeeper at most this many packets during this time."""
WARM_COUNT, WEIGHT_TIMEOUT_S = 5_000, 600.0


@click.command()
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True)
@click.option("--contenders", help="Default: all; ours and the other tree if there is one.")
@click.option("--repeat", default=6, show_default=True, help="Losses at each size.")
@click.option("--only", default=",".join(PARTS), show_default=True)
@click.option("--idle-s", default=60.0, show_default=True, help="How long idle nodes are watched.")
@other_tree_option
@quick_option
@results_option
def main(
    sizes: str,
    contenders: str | None,
    repeat: int,
    only: str,
    idle_s: float,
    other_tree: Path | None,
    quick: bool,
    results: Path | None,
) -> None:
    """Measure how soon a lost bookie's ledgers are marked, by ours and by Java's auditor."""
    taking_part = [
        replace(each, settings={"log.format": "json"}) if each.is_ours else each
        for each in contenders_for((JAVA, OURS), contenders, other_tree, is_quick=quick)
    ]
    parts = chosen(PARTS, only)
    if quick:
        repeat, idle_s = 2, 5.0
    is_kept = not quick and other_tree is None
    with bench_session("audit", report, results=results, is_kept=is_kept) as session:
        ordered = sorted(QUICK_SIZES if quick else map(int, sizes.split(",")))
        asyncio.run(_run(session, ordered, taking_part, parts, repeat, idle_s))


async def _run(
    session: Session,
    sizes: Iterable[int],
    contenders: Sequence[Contender],
    parts: Sequence[str],
    repeat: int,
    idle_s: float,
) -> None:
    session.say("starting ZooKeeper")
    async with open_field() as field:
        for size in sizes:
            at = f"{size:,} ledgers"
            if "weight" in parts and size >= MEASURED_SIZE:  # else chance decides
                with session.attempt(f"{at}, weight"):
                    session.add(weigh_ledger_map(size))
            session.say(f"{at}: making those that are not there yet")
            victim = await field.grow(size)
            if "losses" in parts:
                for turn, (contender, repeats) in enumerate(plan(contenders, size, repeat)):
                    with session.attempt(f"{at}, {contender.title}, turn {turn + 1}"):
                        await _lose_repeatedly(session, field, victim, contender, repeats)
            if "idle" in parts and size == MEASURED_SIZE:
                for contender in contenders:
                    with session.attempt(f"{at}, {contender.title}, idle"):
                        session.add(await _stay_idle(field, contender, idle_s))


def plan(
    contenders: Sequence[Contender], size: int, repeat: int
) -> Iterator[tuple[Contender, range]]:
    """Yield the contenders in turn with the numbers of their losses, counted from 1 over all turns.
    A loss takes Java minutes at a million ledgers, so it has only one there."""
    for turn, contender in in_turn(contenders, TURNS):
        count = 1 if contender.name == JAVA.name and size >= SIZES[-1] else repeat
        first, stop = (1 + number * count // TURNS for number in (turn - 1, turn))
        if first < stop:
            yield contender, range(first, stop)


# --- The turn of a contender ----------------------------------------------------------------------


async def _lose_repeatedly(
    session: Session, field: Field, victim: Victim, contender: Contender, repeats: range
) -> None:
    """Lose the same bookie repeatedly. Stops after a loss that ended in a timeout."""
    try:
        async with _settled_daemon(field, contender) as child:
            for repeat in repeats:
                values = await _measure_loss(field, victim, child)
                built = events(child, "ledger_map.built")
                values |= {"ledgers_per_s": built[0]["ledgers_per_s"]} if built else {}
                labels: dict[str, str | int] = {"size": field.size}
                labels |= {"contender": contender.name, "repeat": repeat}
                session.add(Record(name=LOSS, labels=labels, values=values))
                if "all_marked_s" not in values:
                    return
                await field.restore(victim)
                await _settle(field, child)
    finally:
        await field.restore(victim)  # again: a slow daemon marks on until it is stopped


async def _stay_idle(field: Field, contender: Contender, duration_s: float) -> Record:
    """Measure the cost of a node that leads while nothing happens."""
    async with _settled_daemon(field, contender) as child:
        packets, cpu, began_s = field.packets(), cpu_of([child.pid]), time.monotonic()
        await asyncio.sleep(duration_s)
        return Record(
            name=IDLE,
            labels={"size": field.size, "contender": contender.name},
            values={
                "duration_s": time.monotonic() - began_s,
                "cpu_s": cpu_of([child.pid]) - cpu,
                "rss_bytes": rss_bytes(child.pid),
                "packets": field.packets() - packets,
            },
        )


@asynccontextmanager
async def _settled_daemon(field: Field, contender: Contender) -> AsyncIterator[Child]:
    """Yield a daemon that is elected and has finished its first work."""
    async with elected(contender, field, field.store, PATHS) as child:
        try:
            if contender.is_ours:
                await wait_ledger_map(child, timeout_s=START_TIMEOUT_S)
            await _settle(field, child)
            yield child
        finally:
            child.log.unlink()  # a later turn must not find the events of this one


async def _settle(field: Field, child: Child) -> None:
    async def is_quiet() -> bool:
        packets = field.packets()
        await asyncio.sleep(QUIET_S)
        return field.packets() - packets <= QUIET_PACKETS

    await wait_until(is_quiet, "a quiet daemon", timeout_s=START_TIMEOUT_S, child=child)


# --- One loss -------------------------------------------------------------------------------------


async def _measure_loss(field: Field, victim: Victim, child: Child) -> dict[str, float]:
    """Measure one loss. Raises UnavailableError if the daemon ends. After a timeout the times are
    missing; that is a result, not an error."""
    rss, packets = rss_bytes(child.pid), field.packets()
    cpu, zookeeper_cpu = cpu_of([child.pid]), cpu_of([field.zookeeper_pid])
    gone_ms = await field.lose(victim)
    directories = {PATHS.mark(ledger_id).rsplit("/", 2)[0] for ledger_id in victim.ledger_ids}

    async def is_marked() -> bool:
        stats = await asyncio.gather(*map(field.store.exists, directories))
        count = sum(stat.child_count for stat in stats if stat is not None)
        return count >= len(victim.ledger_ids)

    is_whole = True
    try:
        await wait_until(
            is_marked, "all marks", timeout_s=LOSS_TIMEOUT_S, child=child, poll_s=MARK_POLL_S
        )
    except UnavailableError:
        if not child.is_running:
            raise
        is_whole = False
    values = {
        "ledger_count": len(victim.ledger_ids),
        "packets": field.packets() - packets,
        "cpu_s": cpu_of([child.pid]) - cpu,
        "zookeeper_cpu_s": cpu_of([field.zookeeper_pid]) - zookeeper_cpu,
        "rss_bytes": rss,
        "rss_bytes_max": rss_bytes_max(child.pid),
    }
    marked_ms: list[int] = []
    for start in range(0, len(victim.ledger_ids), READS_AT_ONCE):
        part = victim.ledger_ids[start : start + READS_AT_ONCE]
        marked_ms += filter(None, await asyncio.gather(*(_made_ms(field, each) for each in part)))
    if marked_ms:
        values["first_mark_s"] = (min(marked_ms) - gone_ms) / 1000
    if is_whole:
        values["all_marked_s"] = (max(marked_ms) - gone_ms) / 1000
    return values


async def _made_ms(field: Field, ledger_id: int) -> int | None:
    """Return when the mark was created, by ZooKeeper's clock; None if there is no mark."""
    try:
        _, stat = await field.store.get(PATHS.mark(ledger_id))
    except NoNodeError:
        return None
    return stat.ctime_ms


# --- The ledger map alone -------------------------------------------------------------------------


def weigh_ledger_map(size: int) -> Record:
    """Measure the memory of a ledger map in a process of its own, with ledgers like those of the
    field. The memory of the daemon says less about it, because its read buffers have random sizes.

    Raises UnavailableError on a timeout.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fill_and_tell, args=(size, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(WEIGHT_TIMEOUT_S):
            raise UnavailableError("the ledger map is not filled in time")
        return Record(name=WEIGHT, labels={"size": size}, values={"ledger_map_bytes": ours.recv()})
    finally:
        process.kill()
        process.join()


def _fill_and_tell(size: int, connection: Connection) -> None:
    _filled(WARM_COUNT)
    gc.collect()
    before = rss_bytes(os.getpid())
    ledger_map = _filled(size)
    gc.collect()
    connection.send(rss_bytes(os.getpid()) - before)
    assert len(ledger_map) == size


def _filled(size: int) -> LedgerMap:
    ledger_map, none = LedgerMap(), Victim(bookie=bookie(0), ledger_ids=())
    stat = Stat(version=1, czxid=10**12, mzxid=10**12)
    for ledger_id, metadata in drawn_ledgers(random.Random(SEED), range(size), none):
        ledger_map.put(ledger_id, metadata, stat)
    return ledger_map


# --- The report -----------------------------------------------------------------------------------

LOSS, IDLE, WEIGHT = "loss", "idle", "weight"
"""Names of records: the loss of a bookie, without times after a timeout; a node that leads while
nothing happens; and the memory of our ledger map alone."""
MEASURED_SIZE = 100_000
"""The figures that the goals are about."""
PREAMBLE = """\
# Marking the ledgers of a lost bookie, against Java's auditor

A real ZooKeeper; bookies and ledgers are only znodes. One of about 50 bookies is lost, which {lost}
ledgers name, with a recovery delay of 0. Times count from the deletion of its znode, by
ZooKeeper's clock, in milliseconds. Median of up to {repeats} losses, on {cores} cores that
ZooKeeper, auditor and bench share. See `bench/README.md`.
"""
FIRST_S = named("first_mark_s", "first mark after, s", digits=3)
ALL_S = named("all_marked_s", "all marked after, s", digits=3)
RSS = named("rss_bytes", "RSS, MB", scale=1e-6)
FIGURES = (
    named("packets", "ZooKeeper packets"),
    named("cpu_s", "auditor's CPU, s", digits=2),
    named("zookeeper_cpu_s", "ZooKeeper's CPU, s", digits=2),
    RSS,
    named("rss_bytes_max", "highest RSS, MB", scale=1e-6),
)
CORE_SHARE = rate("cpu_s", "duration_s", "of a core, %", scale=100, digits=2)


def losses_of(records: Records, size: int, contender: str) -> list[Record]:
    return records.find(LOSS, size=size, contender=contender)


def sizes_of(records: Records) -> list[int]:
    """Return the sizes of the losses, ascending."""
    return sorted(map(int, records.labels(LOSS, "size")))


def times_sooner(figure: Figure) -> Callable[[Records], Summary]:
    return lambda records: figure.ratio(
        losses_of(records, MEASURED_SIZE, JAVA.name), losses_of(records, MEASURED_SIZE, OURS.name)
    )


def slowest_first_ms(records: Records) -> Summary:
    """Return the slowest of all sizes."""
    found = [FIRST_S.summary(losses_of(records, s, OURS.name)).median for s in sizes_of(records)]
    slowest_ms = 1000 * max((each for each in found if not math.isnan(each)), default=NAN)
    return Summary(best=slowest_ms, median=slowest_ms)


def ledger_map_bytes(size: int) -> Callable[[Records], Summary]:
    return lambda records: named("ledger_map_bytes", "", scale=1 / size).summary(
        records.find(WEIGHT, size=size)
    )


def idle(figure: Figure) -> Callable[[Records], Summary]:
    return lambda records: figure.summary(
        records.find(IDLE, size=MEASURED_SIZE, contender=OURS.name)
    )


GOALS = (
    Goal("first mark, times sooner", times_sooner(FIRST_S), 50, 50, at_least=True),
    Goal("all marks, times sooner", times_sooner(ALL_S), 5, 5, at_least=True, digits=1),
    Goal("first mark, at every size", slowest_first_ms, 100, 100, unit=" ms", digits=1),
    *(
        Goal(title, ledger_map_bytes(size), 150, 150, unit=" B", digits=1)
        for title, size in (
            ("ledger map, a ledger", MEASURED_SIZE),
            ("ledger map, a ledger of a million", 1_000_000),
        )
    ),
    Goal("idle node, RSS", idle(RSS), 100, 100, unit=" MB", digits=1),
    Goal("idle node, of a core", idle(CORE_SHARE), 0.5, 0.5, unit=" %", digits=2),
)


def report(records: Records) -> str:
    losses = records.find(LOSS)
    return "\n".join(
        [
            PREAMBLE.format(
                lost=f"{max((each.values['ledger_count'] for each in losses), default=0):,.0f}",
                repeats=max((each.labels["repeat"] for each in losses), default=0),
                cores=CORES,
            ),
            *failures_section(records),
            goals_section(
                GOALS,
                records,
                intro=f"At {MEASURED_SIZE:,} ledgers, unless it says otherwise.\n\n",
            ),
            *(_section(records, size) for size in sizes_of(records)),
            *_idle(records),
        ]
    )


def _section(records: Records, size: int) -> str:
    shown = {name: found for name in TITLES if (found := losses_of(records, size, name))}
    ledger_map = ledger_map_bytes(size)(records).text(0)
    rows = [
        *(figure_row(figure, shown, missing="not in time") for figure in (FIRST_S, ALL_S)),
        ["losses", *(str(len(each)) for each in shown.values())],
        *(figure_row(figure, shown) for figure in FIGURES),
        ["ledgers read a second", *(_read_rate(each, size) for each in shown.values())],
        ["RSS a ledger beyond the fewest, B", *(_rss(records, size, name) for name in shown)],
        ["ledger map alone, a ledger, B", *(ledger_map * (name == OURS.name) for name in shown)],
    ]
    return f"## {size:,} ledgers\n\n" + table(["", *(TITLES[name] for name in shown)], rows)


def _read_rate(losses: Sequence[Record], size: int) -> str:
    """Return the read rate. An auditor without a ledger map reads all ledgers before the first
    mark."""
    once = named("ledgers_per_s", "").summary(losses).text(0)
    first_s = FIRST_S.summary(losses).median
    at_each = "" if math.isnan(first_s) else f"{share(size, first_s):,.0f}, at each loss"
    return f"{once}, once" if once else at_each


def _rss(records: Records, size: int, name: str) -> str:
    """Return the memory growth of the daemon per ledger since the smallest size; nothing for Java,
    because a JVM's heap size says little about it."""
    smallest = sizes_of(records)[0]
    if size == smallest or name == JAVA.name:
        return ""
    many, few = (
        named("rss_bytes", "").summary(losses_of(records, each, name)).median
        for each in (size, smallest)
    )
    grown = (many - few) / (size - smallest)
    return Summary(best=grown, median=grown).text(0)


def _idle(records: Records) -> Iterator[str]:
    columns = {
        title: found
        for name, title in TITLES.items()
        if (found := records.find(IDLE, size=MEASURED_SIZE, contender=name))
    }
    figures = (
        RSS,
        CORE_SHARE,
        rate("packets", "duration_s", "packets/s", digits=1),
        named("duration_s", "watched, s"),
    )
    if columns:
        title = f"## A node that leads, while nothing happens, at {MEASURED_SIZE:,} ledgers"
        rows = [figure_row(figure, columns) for figure in figures]
        yield f"{title}\n\n{table(['', *columns], rows)}"


if __name__ == "__main__":
    main()
