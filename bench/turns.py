"""One contender's turn in the arena: starts its daemon, repairs a small loss to warm up, then load
after load."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from bench.arena import Arena
from bench.contenders import OURS_OPEN, PLAIN, Contender, elected
from bench.loads import BOOKIES_WARM_UP, WARM_UP, Load
from bench.loss import Loss, Measure, idle_packets_per_s
from bench.records import Record
from bench.writer import PacedWriter
from daemon.local.processes import Child

LOSSES_BEFORE = 4
SETTLE_S, QUIET_S = 1.0, 5.0
"""A writer is watched for this time before and after a loss, once the effects of earlier work have
ended."""


async def take_turn(
    arena: Arena,
    contender: Contender,
    runs: Sequence[tuple[Record, Load]],
    *,
    writer: PacedWriter | None = None,
    on_run: Callable[[Record], None] = lambda record: None,
    before: Sequence[str] = PLAIN,
) -> None:
    """Measure these loads in order. ``runs``: each load with the record that lacks its values.
    ``writer``: writes during the measurements. ``before``: see ``Contender.start``.

    Raises UnavailableError if a repair does not end or leaves copies missing. Such a run does not
    count, and the arena cannot be used further.
    """
    async with warm_daemon(arena, contender, before=before) as child:
        idle = await idle_packets_per_s(arena)
        for record, load in runs:
            ledgers = await arena.write(load)
            loss = Loss(arena, child, ledgers, is_beside_writer=writer is not None)
            values = await (
                loss.measure(idle_packets_per_s=idle)
                if writer is None
                else _beside(writer, loss, idle)
            )
            values["judged_copies"] = await arena.judge_and_restore(ledgers)
            on_run(replace(record, values=values))


async def _beside(writer: PacedWriter, loss: Loss, idle_packets_per_s: float) -> Measure:
    """Measure the loss, and the latencies of the writer before, during and after it."""
    await asyncio.sleep(SETTLE_S + QUIET_S)
    quiet_s = time.monotonic()
    values = await loss.measure(idle_packets_per_s=idle_packets_per_s)
    await asyncio.sleep(QUIET_S)
    after_s, gone_s = time.monotonic(), values["gone_at_s"]
    for name, begin_s, end_s in (
        ("before", quiet_s - QUIET_S, quiet_s),
        ("during", gone_s, gone_s + values["whole_s"]),
        ("after", after_s - QUIET_S, after_s),
    ):
        latency = await asyncio.to_thread(writer.latency, begin_s, end_s)
        values |= {f"writer_{name}_{figure}": value for figure, value in latency.items()}
    return values


async def warm_bookies(
    arena: Arena, contender: Contender = OURS_OPEN, *, losses: int = LOSSES_BEFORE
) -> None:
    """Repair a few losses, so that bookies behave as if they had been up for a while.

    A bookie that still compiles its code would distort the results. Its CPU for each small ledger
    falls to a third over the first few losses. If these are repaired slowly, the p99 of a writer
    falls as well.
    """
    async with warm_daemon(arena, contender) as child:
        for _ in range(losses):
            await _repair_once(arena, child, BOOKIES_WARM_UP)


@asynccontextmanager
async def warm_daemon(
    arena: Arena, contender: Contender, *, before: Sequence[str] = PLAIN
) -> AsyncIterator[Child]:
    """Yield a daemon that is elected and has repaired a small loss."""
    seen = arena.seen
    async with elected(contender, arena.cluster, seen.store, seen.paths, before=before) as child:
        await _repair_once(arena, child, WARM_UP)
        yield child


async def _repair_once(arena: Arena, child: Child, load: Load) -> None:
    ledgers = await arena.write(load)
    await Loss(arena, child, ledgers).measure()
    await arena.judge_and_restore(ledgers, is_judged=False)
