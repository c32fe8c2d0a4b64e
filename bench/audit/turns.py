"""One contender's turn: its daemon alone, from its election until its vote is deleted."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from bench.audit.field import Field, Victim
from bench.audit.loss import measure_loss
from bench.audit.records import Idle, Record
from bench.contenders import JAVA as JAVA_DEFAULT
from bench.contenders import OURS as OURS_DEFAULT
from bench.contenders import Contender
from bench.usage import cpu_of, rss_bytes
from daemon.local.processes import Child
from ledgers.errors import UnavailableError
from tests.znode_cluster import PATHS

JAVA = JAVA_DEFAULT
OURS = replace(OURS_DEFAULT, settings={"log.format": "json"})
CONTENDERS = (JAVA, OURS)
BY_NAME = {contender.name: contender for contender in CONTENDERS}

START_TIMEOUT_S = 300.0
"""Timeout for the election and for the first reads."""
LOSS_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
VOTES_TIMEOUT_S = 30.0
POLL_S = 0.1
QUIET_S, QUIET_PACKETS = 3.0, 20
"""A daemon has settled when it sends ZooKeeper at most this many packets during this time."""


async def lose_repeatedly(
    field: Field,
    victim: Victim,
    contender: Contender,
    repeats: Sequence[int],
    on_record: Callable[[Record], None],
) -> None:
    """Lose the same bookie repeatedly. Stops after a loss that ended in a timeout."""
    try:
        async with settled_daemon(field, contender) as child:
            for repeat in repeats:
                loss = await measure_loss(
                    field,
                    victim,
                    child,
                    contender=contender.name,
                    repeat=repeat,
                    ledgers_per_s=_ledgers_per_s(child),
                    timeout_s=LOSS_TIMEOUT_S,
                )
                on_record(loss)
                if loss.all_marked_s is None:
                    return
                await field.restore(victim)
                await _settle(field, child)
    finally:
        await field.restore(victim)  # again: a slow daemon marks on until it is stopped


async def stay_idle(
    field: Field, contender: Contender, duration_s: float, on_record: Callable[[Record], None]
) -> None:
    async with settled_daemon(field, contender) as child:
        packets, cpu, began_s = field.packets(), cpu_of([child.pid]), time.monotonic()
        await asyncio.sleep(duration_s)
        idle = Idle(
            size=field.size,
            contender=contender.name,
            duration_s=time.monotonic() - began_s,
            cpu_s=(cpu_of([child.pid]) - cpu).total_s,
            rss_bytes=rss_bytes(child.pid),
            packets=field.packets() - packets,
        )
    on_record(idle)


@asynccontextmanager
async def settled_daemon(field: Field, contender: Contender) -> AsyncIterator[Child]:
    """Yield a daemon that is elected and has finished its first work. At the end, wait until its
    vote is deleted.

    Raises UnavailableError.
    """
    child = contender.start(field)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        await _wait_votes(field, True, deadline_s, child)
        if contender.is_ours:
            while not _events(child, "ledger_map.built"):
                await _pause(child, deadline_s, "its first scan does not end")
        await _settle(field, child, deadline_s)
        yield child
    finally:
        child.terminate()
        if not child.wait(timeout_s=STOP_TIMEOUT_S):
            child.kill()
        child.log.unlink()
    await _wait_votes(field, False, time.monotonic() + VOTES_TIMEOUT_S)


async def _settle(field: Field, child: Child, deadline_s: float | None = None) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S if deadline_s is None else deadline_s
    while True:
        packets = field.packets()
        await asyncio.sleep(QUIET_S)
        if field.packets() - packets <= QUIET_PACKETS:
            return
        await _pause(child, deadline_s, "it does not settle")


async def _wait_votes(
    field: Field, wanted: bool, deadline_s: float, child: Child | None = None
) -> None:
    election = PATHS.election
    while bool(await field.store.children(election)) is not wanted:
        await _pause(child, deadline_s, "the election does not end")


async def _pause(child: Child | None, deadline_s: float, complaint: str) -> None:
    """Wait for one poll interval. Raises UnavailableError after the deadline, or if the daemon has
    ended."""
    if child is not None and not child.is_running:
        raise UnavailableError(f"{child.name} ended:\n{child.log_tail()}")
    if time.monotonic() > deadline_s:
        raise UnavailableError(complaint)
    await asyncio.sleep(POLL_S)


def _ledgers_per_s(child: Child) -> float | None:
    built = _events(child, "ledger_map.built")
    return built[0]["ledgers_per_s"] if built else None


def _events(child: Child, name: str) -> list[dict[str, float]]:
    """Return the events that our daemon logged; none for Java's."""
    lines = child.log.read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in logged if event.get("event") == name]
