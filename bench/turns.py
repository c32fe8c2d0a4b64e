"""One contender's turn in the arena: starts its daemon, repairs a small loss to warm up, then load
after load."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from bench.arena import Arena
from bench.contenders import OURS_OPEN, PLAIN, Contender
from bench.loads import BOOKIES_WARM_UP, WARM_UP, Load
from bench.loss import Loss, Measure, idle_packets_per_s
from bench.runs import Key, Run
from bench.writer import Disturbance, PacedWriter
from daemon.local.processes import Child
from ledgers.errors import NoNodeError, UnavailableError

ELECTION_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
LOSSES_BEFORE = 4
SETTLE_S, QUIET_S = 1.0, 5.0
"""A writer is watched for this time before and after a loss, once the effects of earlier work have
ended."""


async def take_turn(
    arena: Arena,
    contender: Contender,
    runs: Sequence[tuple[Key, Load]],
    *,
    writer: PacedWriter | None,
    on_run: Callable[[Run], None],
) -> None:
    """Measure these loads in order. ``writer``: writes during the measurements.

    Raises UnavailableError if a repair does not end or leaves copies missing. Such a run does not
    count, and the arena cannot be used further.
    """
    async with warm_daemon(arena, contender) as child:
        idle = await idle_packets_per_s(arena)
        for key, load in runs:
            ledgers = await arena.write(load)
            loss = Loss(arena, child, ledgers, is_beside_writer=writer is not None)
            if writer is None:
                measure, disturbance = await loss.measure(idle_packets_per_s=idle), None
            else:
                measure, disturbance = await _beside(writer, loss, idle)
            judged = await arena.judge_and_restore(ledgers)
            on_run(
                Run(
                    of_pass=key.of_pass,
                    load=key.load,
                    contender=key.contender,
                    repeat=key.repeat,
                    judged_copies=judged,
                    measure=measure,
                    writer=disturbance,
                )
            )


async def _beside(
    writer: PacedWriter, loss: Loss, idle_packets_per_s: float
) -> tuple[Measure, Disturbance]:
    await asyncio.sleep(SETTLE_S + QUIET_S)
    quiet_s = time.monotonic()
    measure = await loss.measure(idle_packets_per_s=idle_packets_per_s)
    await asyncio.sleep(QUIET_S)
    after_s = time.monotonic()
    whole_at_s = measure.gone_at_s + measure.whole_s
    return measure, Disturbance(
        before=await asyncio.to_thread(writer.latency, quiet_s - QUIET_S, quiet_s),
        during=await asyncio.to_thread(writer.latency, measure.gone_at_s, whole_at_s),
        after=await asyncio.to_thread(writer.latency, after_s - QUIET_S, after_s),
    )


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
            ledgers = await arena.write(BOOKIES_WARM_UP)
            await Loss(arena, child, ledgers).measure(idle_packets_per_s=0)
            await arena.restore(ledgers)


@asynccontextmanager
async def warm_daemon(
    arena: Arena, contender: Contender, *, before: Sequence[str] = PLAIN
) -> AsyncIterator[Child]:
    """Yield a daemon that is elected and has repaired a small loss. At the end, wait until its vote
    is deleted."""
    child = contender.start(arena.cluster, before=before)
    try:
        await _wait_for_votes(arena, True, child)
        ledgers = await arena.write(WARM_UP)
        await Loss(arena, child, ledgers).measure(idle_packets_per_s=0)
        await arena.restore(ledgers)
        yield child
    finally:
        child.terminate()
        if not child.wait(timeout_s=STOP_TIMEOUT_S):
            child.kill()
    await _wait_for_votes(arena, False)


async def _wait_for_votes(arena: Arena, wanted: bool, child: Child | None = None) -> None:
    deadline_s = time.monotonic() + ELECTION_TIMEOUT_S
    while await _has_votes(arena) is not wanted:
        if time.monotonic() > deadline_s or (child is not None and not child.is_running):
            raise UnavailableError("the election does not end")
        await asyncio.sleep(POLL_S)


async def _has_votes(arena: Arena) -> bool:
    try:
        return bool(await arena.seen.store.children(arena.seen.paths.election))
    except NoNodeError:
        return False
