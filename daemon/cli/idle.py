"""``bookmender ledger idle`` and ``bookmender ledger close``.

Open ledgers that nobody writes any more, as the last periodic check saw them.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from auditor.checks.idle import Sighting, read_sightings
from auditor.checks.records import IDLE_OPEN, read_check
from daemon.admin_session import AdminSession, admin_session, log_errors_only, run_in_session
from daemon.cli.close_ledger import CloseResult, close_by_hand, look_before_closing
from daemon.cli.main import (
    EXIT_FAILED,
    EXIT_UNKNOWN,
    LedgerId,
    config_option,
    json_option,
    output_option,
)
from daemon.cli.option_types import Duration
from daemon.cli.progress import counted, duration_text
from daemon.settings import Settings, load_settings
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId, LedgerState
from ledgers.tasks import gather_in_parts

READS_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedger:
    """``idle_s``: at least so long. ``last_entry_id``: -1: it has none. ``bookies``: of its last
    segment."""

    ledger_id: int
    state: LedgerState
    idle_s: float
    last_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedgers:
    """The longest idle first. ``checked_ms``: when the check that tells of them was last over;
    None: never."""

    ledgers: tuple[IdleLedger, ...]
    checked_ms: int | None


async def find_idle(cluster: AdminSession, *, after_s: float, clock: Clock) -> IdleLedgers:
    """Those that have got no entry for so long, and whose metadata still is as it was."""
    now_ms = clock.wall_ms()
    sightings = await read_sightings(cluster.store, cluster.ur)
    idle = [(i, each) for i, each in sightings.items() if each.idle_s(now_ms) >= after_s]
    look = partial(_still_idle, cluster, now_ms=now_ms)
    looked = await gather_in_parts(look, idle, at_once=READS_AT_ONCE)
    record = await read_check(cluster.store, cluster.ur, IDLE_OPEN.name)
    return IdleLedgers(
        ledgers=tuple(each for each in looked if each is not None),
        checked_ms=None if record.last is None else record.last.finished_ms,
    )


async def _still_idle(
    cluster: AdminSession, sighted: tuple[int, Sighting], *, now_ms: int
) -> IdleLedger | None:
    """None where it was closed, written or deleted since it was seen, or cannot be read."""
    ledger_id, sighting = sighted
    try:
        found = await cluster.manager.read(ledger_id)
    except (NoSuchLedgerError, CorruptionError, UnauthorizedError):
        return None
    if found.metadata.is_closed or found.stat.mtime_ms > sighting.since_ms:
        return None
    return IdleLedger(
        ledger_id=ledger_id,
        state=found.metadata.state,
        idle_s=sighting.idle_s(now_ms),
        last_entry_id=sighting.last_entry_id,
        bookies=found.metadata.last_segment.ensemble,
    )


NEVER_CHECKED = "no check has looked for them yet: bookmender check run idle-open asks for it"


@click.command()
@click.option(
    "--for",
    "idle_s",
    type=Duration(),
    help="At least so long, as in 12h or 7d; else checks.idle_open_after_s.",
)
@config_option
@output_option
@json_option
def idle(idle_s: int | None, config: Path | None, output: str) -> None:
    """Open ledgers that nobody seems to write any more, the longest idle first.

    As the leader's periodic check idle-open last saw them: their bookies' last entry has not
    changed since, nor was their metadata written. Nothing closes them but bookmender ledger close,
    or a client.

    Exits 0 when there are none, 1 when there are some, 3 when it could not tell: also before that
    check has run (as JSON checked_ms is null then).
    """

    async def look(cluster: AdminSession) -> IdleLedgers:
        after_s = cluster.settings.checks.counts_as_idle_after_s if idle_s is None else idle_s
        return await find_idle(cluster, after_s=after_s, clock=SystemClock())

    found = run_in_session(config, look)
    click.echo(json.dumps(_record(found), indent=2) if output == "json" else _text(found))
    sys.exit(exit_code(found))


def exit_code(found: IdleLedgers) -> int:
    if found.ledgers:
        return EXIT_FAILED
    return EXIT_UNKNOWN if found.checked_ms is None else 0


def _record(found: IdleLedgers) -> dict[str, Any]:
    return {
        "checked_ms": found.checked_ms,
        "ledgers": [
            {
                "ledger_id": each.ledger_id,
                "state": each.state.name,
                "idle_s": round(each.idle_s),
                "last_entry_id": each.last_entry_id,
                "bookies": list(each.bookies),
            }
            for each in found.ledgers
        ],
    }


def _text(found: IdleLedgers) -> str:
    if found.checked_ms is None and not found.ledgers:
        return NEVER_CHECKED
    return "\n".join([*map(_line, found.ledgers), counted(len(found.ledgers), "idle open ledger")])


def _line(ledger: IdleLedger) -> str:
    return (
        f"ledger {ledger.ledger_id}: {ledger.state.name}, {_reach(ledger.last_entry_id)}, "
        f"idle for {duration_text(ledger.idle_s)} at least, on {', '.join(ledger.bookies)}"
    )


def _reach(last_entry_id: int | None) -> str:
    if last_entry_id is None:
        return "its end is not known"
    return "no entry" if last_entry_id < 0 else f"last entry {last_entry_id}"


@click.command()
@click.argument("ledger_id", type=LedgerId())
@click.option("--yes", is_flag=True, help="Do it. Without this it is only shown.")
@click.option("--force", is_flag=True, help="Though somebody may still write it.")
@click.option("--accept-loss", is_flag=True, help="Give up what only wiped or damaged copies had.")
@config_option
@output_option
def close(
    ledger_id: int, yes: bool, force: bool, accept_loss: bool, config: Path | None, output: str
) -> None:
    """Find the end of an open ledger whose writer is gone, and close it there.

    \b
      bookmender ledger close 17          what is known of it, and what speaks against it
      bookmender ledger close 17 --yes    close it

    Its bookies are fenced: a writer that is alive is locked out for good, and his next write fails.
    So it is refused, unless forced, where the ledger got an entry lately or nobody knows (see
    bookmender ledger idle); and, forced or not, while a hold stands (see bookmender hold). Nothing
    that was acknowledged is lost.

    Where so many of its bookies are silent that nobody can know where it ends, or that nobody takes
    its last entries, nothing closes it: that is refused before anything is fenced, and it is said
    which have to be started first. Where too many of them were wiped, its end cannot be proven. If
    they will never have more to say, --accept-loss closes it after the last entry that is there:
    what only they had is lost in any case. It also gives up its last entries from the first one on
    of which only damaged copies are left; which these are is shown before, and kept for ledger
    show.

    The ledger's lock is taken for it, and the writes are recorded on this host: run it as the
    daemon's user, with its settings. A node that has the ledger is waited for: some seconds, and
    until the open-ledger grace is over for which it leaves it to its writer, if that is within a
    minute.

    Exits 0 when it is done, or the ledger is closed already; 1 when it is refused, or there is no
    such ledger, or its metadata cannot be read; 3 when bookies failed in the midst of it, or
    somebody else works on it: then it can be tried again. Where it is only shown: 0 when --yes
    would close it, 1 when that would be refused.
    """
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    done = asyncio.run(
        _close(settings, ledger_id, force, accept_loss) if yes else _look(settings, ledger_id)
    )
    click.echo(
        json.dumps(_closing_record(done), indent=2)
        if output == "json"
        else closing_text(done, is_forced=force)
    )
    if done.refusal(is_forced=force):
        sys.exit(EXIT_FAILED)


async def _look(settings: Settings, ledger_id: int) -> CloseResult:
    async with admin_session(settings) as cluster:
        return await look_before_closing(cluster, ledger_id)


async def _close(
    settings: Settings, ledger_id: int, is_forced: bool, accepts_loss: bool
) -> CloseResult:
    return await close_by_hand(settings, ledger_id, is_forced=is_forced, accepts_loss=accepts_loss)


def _closing_record(done: CloseResult) -> dict[str, Any]:
    left = done.found if done.closed is None else done.closed
    metadata = left.metadata
    return {
        "ledger_id": left.ledger_id,
        "state_before": done.found.metadata.state.name,
        "state": metadata.state.name,
        "last_entry_id": metadata.last_entry_id if metadata.is_closed else done.last_entry_id,
        "length": metadata.length if metadata.is_closed else None,
        "doubts": list(done.doubts),
        "held_back": done.held_back,
        "cannot_close": done.cannot_close,
        "end_doubt": done.end_doubt or None,
        "would_give_up": done.damage or None,
        "has_changed": done.closed is not None,
    }


def closing_text(done: CloseResult, *, is_forced: bool) -> str:
    """For people. ``is_forced``: as it was asked for."""
    ledger = f"ledger {done.found.ledger_id}"
    if done.closed is not None:
        metadata = done.closed.metadata
        end = f"{_reach(metadata.last_entry_id)}, {metadata.length:,} bytes"
        return (
            f"{ledger}: closed, {end}; whoever wrote it is locked out. It is marked in bookmender's queue, "
            "so that nodes check its copies now"
        )
    metadata = done.found.metadata
    if metadata.is_closed:
        return f"{ledger}: closed already, {_reach(metadata.last_entry_id)}"
    lines: Sequence[str] = [
        f"{ledger}: {metadata.state.name}, {_reach(done.last_entry_id)} by what its bookies say",
        f"  on {', '.join(metadata.last_segment.ensemble)}",
        *(f"  doubt: {doubt}" for doubt in done.doubts),
        *([f"  its end may not be provable: {doubt}"] if (doubt := _end_doubt(done)) else []),
        *([f"  --accept-loss would give up {done.damage}"] if done.damage else []),
        f"nothing was changed: {_next_step(done, is_forced=is_forced)}",
    ]
    return "\n".join(lines)


def _end_doubt(done: CloseResult) -> str:
    """Not beside what rules out that it is tried at all."""
    return "" if done.cannot_close else done.end_doubt


def _next_step(done: CloseResult, *, is_forced: bool) -> str:
    if in_the_way := done.refusal(is_forced=True):
        return in_the_way
    proviso = ", if its end can be proven" if done.end_doubt else ""
    if not done.doubts:
        return f"--yes closes it{proviso}"
    if is_forced:
        return f"with --yes beside --force it is closed all the same{proviso}"
    return f"--force and --yes together close it all the same{proviso}"
