"""Measures the cost of reading recent copies again: ``python -m bench.recheck``.

One loss of many small ledgers is repaired, and then its copies are read again. The CPU of the time
in between counts as that of the idle cluster and is subtracted.
"""

import asyncio
import signal
import time
from dataclasses import dataclass, replace

import click

from bench.arena import Arena, open_arena
from bench.contenders import OURS_OPEN, Contender
from bench.loads import LOADS, Load
from bench.loss import Loss
from bench.report import table
from bench.turns import warm_daemon
from bench.usage import Cpu, cpu_of
from daemon.local.processes import Child
from ledgers.errors import UnavailableError
from tests.java.tool import JavaTool

AFTER_S = 30
IDLE_S = 5.0
POLL_S = 0.2
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds of the daemon, the bookies and ZooKeeper; ``took_s``: from the first read to the
    last."""

    ledgers: int
    records: int
    repairer: float
    recheck: float
    bookies: float
    zookeeper: float
    took_s: float


@click.command()
@click.option("--ledgers", default=5_000, show_default=True, help="Small ledgers that are lost.")
def main(ledgers: int) -> None:
    """Measure the CPU of reading the copies of repaired ledgers again."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    (part,) = LOADS["a"].parts
    # The bookie that is killed is in three of five ensembles.
    load = replace(LOADS["a"], parts=(replace(part, ledger_count=ledgers * 5 // 3),))
    settings = {**OURS_OPEN.settings, "replication.copies_reread_after_s": str(AFTER_S)}
    with JavaTool() as java:
        cost = asyncio.run(measure(java, replace(OURS_OPEN, settings=settings), load))
    click.echo(_summary(cost))


async def measure(java: JavaTool, contender: Contender, load: Load) -> Cost:
    """Repair ``load``, wait until all its copies were read again, and count what that cost."""
    async with open_arena(java) as arena, warm_daemon(arena, contender) as child:
        await _until_no_record(arena)
        lost = await arena.write(load)
        repaired = await Loss(arena, child, lost).measure(idle_packets_per_s=0)
        records = await _record_count(arena)
        idle_from = _used(arena, child)
        await asyncio.sleep(IDLE_S)
        before, began_s = _used(arena, child), time.monotonic()
        await _until_no_record(arena)
        after, passed_s = _used(arena, child), time.monotonic() - began_s
        recheck, bookies, zookeeper = (
            (later - earlier).total_s - (earlier - idle).total_s * passed_s / IDLE_S
            for idle, earlier, later in zip(idle_from, before, after, strict=True)
        )
        return Cost(
            ledgers=repaired.lost_ledgers,
            records=records,
            repairer=repaired.repairer_cpu_s,
            recheck=recheck,
            bookies=bookies,
            zookeeper=zookeeper,
            took_s=passed_s - (AFTER_S - IDLE_S),
        )


def _used(arena: Arena, child: Child) -> tuple[Cpu, Cpu, Cpu]:
    cluster = arena.cluster
    bookies = [cluster.pid(bookie) for bookie in arena.survivors]
    return cpu_of([child.pid]), cpu_of(bookies), cpu_of([cluster.zookeeper_pid])


async def _record_count(arena: Arena) -> int:
    stat = await arena.seen.store.exists(arena.seen.paths.recent_copies)
    return 0 if stat is None else stat.child_count


async def _until_no_record(arena: Arena) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while await _record_count(arena):
        if time.monotonic() > deadline_s:
            raise UnavailableError("the copies are not read again")
        await asyncio.sleep(POLL_S)


def _summary(cost: Cost) -> str:
    def each(cpu_s: float) -> list[str]:
        per_ledger_s = cpu_s / cost.ledgers
        return [f"{per_ledger_s * 1e3:.3f}", f"{per_ledger_s * 1e5:.0f}"]

    rows = [
        ["the daemon's repair", *each(cost.repairer)],
        ["the daemon's second reading", *each(cost.recheck)],
        ["bookies, second reading", *each(cost.bookies)],
        ["ZooKeeper, second reading", *each(cost.zookeeper)],
    ]
    head = (
        f"{cost.ledgers:,} ledgers, {cost.records:,} records, read again in {cost.took_s:.0f} s\n\n"
    )
    return head + table(["CPU", "ms a ledger", "s for 100,000"], rows)


if __name__ == "__main__":
    main()
