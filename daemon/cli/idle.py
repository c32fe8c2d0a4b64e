"""``bookmender ledger idle`` and ``bookmender ledger close``.

``idle`` lists open ledgers without new entries, as the last periodic check saw them. ``close``
shows or closes one ledger; ``close_ledger`` decides and does it.
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

from auditor.checks.idle import LastChange, read_last_changes
from auditor.checks.records import IDLE_OPEN, read_stored_check
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
from daemon.cli.output import echo_list, list_output_option
from daemon.settings import Settings, load_settings
from daemon.words import counted, duration_text
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId, LedgerState
from ledgers.tasks import gather_in_parts
from replication.records import REWRITE_HINT

READS_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedger:
    """An open ledger without new entries.

    ``idle_s``: it had no new entry for at least this long. ``last_entry_id``: -1 if it has no
    entries. ``bookies``: the ensemble of its last segment.
    """

    ledger_id: int
    state: LedgerState
    idle_s: float
    last_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedgers:
    """The idle ledgers, longest idle first.

    ``checked_ms``: when the last check for idle ledgers finished; None if none has.
    """

    ledgers: tuple[IdleLedger, ...]
    checked_ms: int | None
    unreadable: tuple[str, ...] = ()
    """Znodes of the check that cannot be read. So ledgers may be missing here."""


async def find_idle(cluster: AdminSession, *, after_s: float, clock: Clock) -> IdleLedgers:
    """Return the ledgers without a new entry for ``after_s`` whose metadata is unchanged since
    then."""
    now_ms = clock.wall_ms()
    stored = await read_last_changes(cluster.store, cluster.paths)
    changes = stored.value.by_ledger() if stored.value else {}
    idle = [(i, each) for i, each in changes.items() if each.idle_s(now_ms) >= after_s]
    look = partial(_still_idle, cluster, now_ms=now_ms)
    looked = await gather_in_parts(look, idle, at_once=READS_AT_ONCE)
    check = await read_stored_check(cluster.store, cluster.paths, IDLE_OPEN.name)
    last = check.value.last if check.value else None
    are_unreadable = {
        cluster.paths.idle: stored.is_unreadable,
        cluster.paths.check(IDLE_OPEN.name): check.is_unreadable,
    }
    return IdleLedgers(
        ledgers=tuple(each for each in looked if each is not None),
        checked_ms=None if last is None else last.finished_ms,
        unreadable=tuple(path for path, is_so in are_unreadable.items() if is_so),
    )


async def _still_idle(
    cluster: AdminSession, change: tuple[int, LastChange], *, now_ms: int
) -> IdleLedger | None:
    """Return the ledger if it is still idle.

    Returns None if it was closed, written or deleted since the check saw it, or cannot be read.
    """
    ledger_id, sighting = change
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


COLUMNS = ("ledger_id", "state", "idle_s", "last_entry_id", "bookies")
NEVER_CHECKED = "unknown: the check has never run. Start it: bookmender check run idle-open"


@click.command()
@click.option(
    "--for",
    "idle_s",
    type=Duration(),
    help="Minimum idle time: 12h, 7d.",
)
@config_option
@list_output_option
@json_option
def idle(idle_s: int | None, config: Path | None, output: str) -> None:
    """List open ledgers that get no more entries, longest idle first.

    The data comes from the periodic check idle-open. A ledger is idle if its last entry and its
    metadata have not changed for checks.idle_open_after_s. bookmender never closes idle ledgers by
    itself: use bookmender ledger close.

    Exit codes: 0 none. 1 some. 3 unknown: the check has never run, or its record cannot be read.
    """

    async def look(cluster: AdminSession) -> IdleLedgers:
        after_s = cluster.settings.checks.counts_as_idle_after_s if idle_s is None else idle_s
        return await find_idle(cluster, after_s=after_s, clock=SystemClock())

    found = run_in_session(config, look)
    echo_list(output, _record(found), rows="ledgers", columns=COLUMNS, text=lambda: _text(found))
    sys.exit(exit_code(found))


def exit_code(found: IdleLedgers) -> int:
    if found.ledgers:
        return EXIT_FAILED
    return EXIT_UNKNOWN if found.checked_ms is None or found.unreadable else 0


def _record(found: IdleLedgers) -> dict[str, Any]:
    return {
        "checked_ms": found.checked_ms,
        "unreadable_records": list(found.unreadable),
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
    if found.checked_ms is None and not found.ledgers and not found.unreadable:
        return NEVER_CHECKED
    unreadable = [f"the record {path} cannot be read: {REWRITE_HINT}" for path in found.unreadable]
    count = counted(len(found.ledgers), "idle open ledger")
    return "\n".join([*unreadable, *map(_line, found.ledgers), count])


def _line(ledger: IdleLedger) -> str:
    return (
        f"ledger {ledger.ledger_id}: {ledger.state.name}, {_reach(ledger.last_entry_id)}, idle for "
        f"at least {duration_text(ledger.idle_s)}, on {', '.join(ledger.bookies)}"
    )


def _reach(last_entry_id: int | None) -> str:
    if last_entry_id is None:
        return "last entry unknown"
    return "no entries" if last_entry_id < 0 else f"last entry {last_entry_id}"


@click.command()
@click.argument("ledger_id", type=LedgerId())
@click.option("--yes/--dry-run", help="Close it, or change nothing (default).")
@click.option("--force", is_flag=True, help="Close it even if its writer may be running.")
@click.option("--accept-loss", is_flag=True, help="Give up entries without a good copy.")
@config_option
@output_option
def close(
    ledger_id: int, yes: bool, force: bool, accept_loss: bool, config: Path | None, output: str
) -> None:
    """Recover and close an open ledger whose writer has stopped.

    \b
      bookmender ledger close 17          show the state, and any reason not to close it
      bookmender ledger close 17 --yes    close it

    Closing fences the bookies, so a running writer can never write to the ledger again.
    Acknowledged entries are kept. The command refuses if the writer may be running (unless
    --force), during a safety hold, or if too few bookies answer to find the end. Run it as the
    daemon's user with its settings, because metadata writes are recorded in the local journal.

    Exit codes: 0 closed, already closed, or --yes would close it. 1 refused, or no such ledger.
    3 bookies failed or another node holds the lock: try again.
    """
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    done = asyncio.run(
        _close(settings, ledger_id, force, accept_loss) if yes else _look(settings, ledger_id)
    )
    click.echo(
        json.dumps(_closing_record(done), indent=2) if output == "json" else closing_text(done)
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


def closing_text(done: CloseResult) -> str:
    """Return the outcome of ``ledger close`` as text."""
    ledger = f"ledger {done.found.ledger_id}"
    if done.closed is not None:
        metadata = done.closed.metadata
        end = f"{_reach(metadata.last_entry_id)}, {metadata.length:,} bytes"
        return (
            f"{ledger}: closed, {end}. Its writer is fenced. The ledger is marked in bookmender's "
            "private queue, so nodes check its copies"
        )
    metadata = done.found.metadata
    if metadata.is_closed:
        return f"{ledger}: already closed, {_reach(metadata.last_entry_id)}"
    lines: Sequence[str] = [
        f"{ledger}: {metadata.state.name}, {_reach(done.last_entry_id)} as its bookies report",
        f"  on {', '.join(metadata.last_segment.ensemble)}",
        *(f"  its writer may be running: {doubt}" for doubt in done.doubts),
        *([f"  {doubt}"] if (doubt := _end_doubt(done)) else []),
        *([f"  --accept-loss would give up {done.damage}"] if done.damage else []),
        f"nothing was changed. {_next_step(done)}",
    ]
    return "\n".join(lines)


def _end_doubt(done: CloseResult) -> str:
    """Return the doubt about the end, unless the ledger cannot be closed at all."""
    return "" if done.cannot_close else done.end_doubt


def _next_step(done: CloseResult) -> str:
    if refusal := done.refusal(is_forced=True):
        return f"Refused: {refusal}"
    proviso = ", if its end can be proven" if done.end_doubt else ""
    if not done.doubts:
        return f"--yes closes it{proviso}"
    return f"--force --yes closes it although its writer may be running{proviso}"
