"""``bookmender ledger``: shows single ledgers, closes them, and undoes writes of their metadata."""

import asyncio
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click

from daemon.admin_session import AdminSession
from daemon.cli.main import (
    EXIT_FAILED,
    EXIT_UNKNOWN,
    CommandGroup,
    LedgerId,
    cluster_options,
    json_option,
)
from daemon.cli.option_types import Duration
from daemon.cli.output import echo, echo_list, list_options
from daemon.cli.progress import echo_notes
from daemon.cli.session import log_errors_only, run_in_session, settings_for_command
from daemon.operations.close import LedgerClosing, close_ledger, look_before_closing
from daemon.operations.ledgers import (
    IdleLedger,
    IdleLedgers,
    ShownLedger,
    ShownSegment,
    find_idle,
    show_ledger,
)
from daemon.operations.restore import (
    RecordedWrites,
    Restored,
    look_before_restoring,
    recorded_write,
    recorded_writes,
    restore_ledger,
)
from daemon.words import counted, duration_text, printable
from ledgers.clock import SystemClock
from replication.records import REWRITE_HINT

NEVER_CHECKED = "unknown: the check has never run. Start it: bookmender check idle-open"


@click.group(cls=CommandGroup)
def ledger() -> None:
    """Show, close or restore single ledgers."""


# --- Showing --------------------------------------------------------------------------------------


@ledger.command()
@click.argument("ledger_id", type=LedgerId())
@cluster_options
def show(ledger_id: int, config: Path | None, output: str) -> None:
    """Show a ledger's metadata and its bookies.

    Custom metadata often tells to what the ledger belongs: Pulsar stores the topic there.

    For each segment it shows which bookies are absent, and which were reformatted after the ledger
    was created (a closed ledger: after its metadata was last written). It also shows why the end
    may not be provable, and which entries an operator gave up.

    Exit code 1: there is no such ledger, or its metadata is unreadable.
    """
    found = run_in_session(config, partial(show_ledger, ledger_id=ledger_id))
    echo(output, found, show_text(found))


def show_text(found: ShownLedger) -> str:
    end = "last entry unknown"
    if found.last_entry_id is not None:
        end = f"last entry {found.last_entry_id}, {found.length} bytes"
    lines = [
        f"ledger {found.ledger_id}: {found.state}, {end}",
        f"  E {found.ensemble_size}, W {found.write_quorum}, A {found.ack_quorum}, digest "
        f"{found.digest_type or 'not stored'}, metadata version {found.metadata_version}, znode "
        f"version {found.version}",
        *(f"  {printable(key)}: {printable(text)}" for key, text in sorted(found.custom.items())),
        *(_segment_text(segment) for segment in found.segments),
    ]
    if any(segment.reformatted for segment in found.segments):
        lines.append(
            "  Reformatted bookies may have lost their copies. To read all of these copies: "
            f"bookmender repair {found.ledger_id}"
        )
    if found.end_doubt:
        lines.append(f"  {printable(found.end_doubt)}")
    if entries := found.given_up:
        lines.append(
            f"  entries {entries.first_entry_id} to {entries.last_entry_id} were given up by "
            f"{printable(entries.by)} at {_time_text(entries.at_ms)}: {printable(entries.replies)}"
        )
    for path in found.unreadable_records:
        lines.append(f"  its record {path} cannot be read; {REWRITE_HINT}")
    return "\n".join(lines)


def _segment_text(segment: ShownSegment) -> str:
    members = []
    for bookie in segment.ensemble:
        states = {"absent": segment.absent, "reformatted": segment.reformatted}
        told = ", ".join(state for state, bookies in states.items() if bookie in bookies)
        members.append(f"{bookie} ({told})" if told else bookie)
    return f"  from entry {segment.first_entry_id}: {', '.join(members)}"


def _time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")


# --- Idle ledgers ---------------------------------------------------------------------------------


@ledger.command()
@click.option(
    "--for",
    "idle_s",
    type=Duration(),
    help="Minimum idle time: 12h, 7d.",
)
@list_options
@json_option
def idle(idle_s: int | None, config: Path | None, output: str) -> None:
    """List open ledgers that get no more entries.

    The longest idle comes first. The data comes from the periodic check idle-open. A ledger is idle
    if its last entry and its metadata have not changed for checks.idle_open_after_s. bookmender
    never closes idle ledgers by itself: use bookmender ledger close.

    Exit codes: 0 none. 1 some. 3 unknown: the check has never run, or its record cannot be read.
    """

    async def look(cluster: AdminSession) -> IdleLedgers:
        after_s = cluster.settings.checks.counts_as_idle_after_s if idle_s is None else idle_s
        return await find_idle(cluster, after_s=after_s, clock=SystemClock())

    found = run_in_session(config, look)
    echo_list(output, found, rows="ledgers", text=lambda: _idle_text(found))
    sys.exit(idle_exit_code(found))


def idle_exit_code(found: IdleLedgers) -> int:
    if found.ledgers:
        return EXIT_FAILED
    return EXIT_UNKNOWN if found.checked_ms is None or found.unreadable_records else 0


def _idle_text(found: IdleLedgers) -> str:
    unreadable = found.unreadable_records
    if found.checked_ms is None and not found.ledgers and not unreadable:
        return NEVER_CHECKED
    return "\n".join(
        [
            *(f"the record {path} cannot be read: {REWRITE_HINT}" for path in unreadable),
            *map(_idle_line, found.ledgers),
            counted(len(found.ledgers), "idle open ledger"),
        ]
    )


def _idle_line(found: IdleLedger) -> str:
    return (
        f"ledger {found.ledger_id}: {found.state}, {_end_text(found.last_entry_id)}, idle for at "
        f"least {duration_text(found.idle_s)}, on {', '.join(found.bookies)}"
    )


def _end_text(last_entry_id: int | None) -> str:
    if last_entry_id is None:
        return "last entry unknown"
    return "no entries" if last_entry_id < 0 else f"last entry {last_entry_id}"


# --- Closing --------------------------------------------------------------------------------------


@ledger.command()
@click.argument("ledger_id", type=LedgerId())
@click.option("--yes/--dry-run", help="Close it, or change nothing (default).")
@click.option("--force", is_flag=True, help="Close it even if its writer may be running.")
@click.option("--accept-loss", is_flag=True, help="Give up entries without a good copy.")
@cluster_options
def close(
    ledger_id: int, yes: bool, force: bool, accept_loss: bool, config: Path | None, output: str
) -> None:
    """Close an open ledger whose writer stopped.

    \b
      bookmender ledger close 17          show the state, and any reason not to close it
      bookmender ledger close 17 --yes    close it

    The ledger is recovered first. That fences the bookies, so a running writer can never write to
    the ledger again. Acknowledged entries are kept. The command refuses if the writer may be
    running (unless --force), during a safety hold, or if too few bookies answer to find the end.
    Run it as the daemon's user with its settings, because metadata writes are recorded in the local
    journal.

    Exit codes: 0 closed, already closed, or --yes would close it. 1 refused, or no such ledger.
    3 bookies failed or another node holds the lock: try again.
    """
    settings = settings_for_command(config)
    log_errors_only(settings)
    if yes:
        closing = close_ledger(
            settings, ledger_id, is_forced=force, accepts_loss=accept_loss, tell=_tell
        )
    else:
        closing = look_before_closing(settings, ledger_id, tell=_tell)
    done = asyncio.run(closing)
    echo(output, done, closing_text(done))
    if done.refusal(is_forced=force):
        sys.exit(EXIT_FAILED)


def _tell(text: str) -> None:
    echo_notes([printable(text)])


def closing_text(done: LedgerClosing) -> str:
    """Return the outcome of ``ledger close`` as text."""
    head = f"ledger {done.ledger_id}: "
    if done.has_changed:
        return (
            f"{head}closed, {_end_text(done.last_entry_id)}, {done.length:,} bytes. Its writer is "
            "fenced. The ledger is marked in bookmender's private queue, so nodes check its copies"
        )
    if done.is_closed:
        return f"{head}already closed, {_end_text(done.last_entry_id)}"
    proviso = ", if its end can be proven" if done.end_doubt else ""
    if refusal := done.refusal(is_forced=True):
        next_step = f"Refused: {refusal}"
    elif done.doubts:
        next_step = f"--force --yes closes it although its writer may be running{proviso}"
    else:
        next_step = f"--yes closes it{proviso}"
    return "\n".join(
        [
            f"{head}{done.state}, {_end_text(done.last_entry_id)} as its bookies report",
            *(f"  its writer may be running: {doubt}" for doubt in done.doubts),
            *([f"  {done.end_doubt}"] if done.end_doubt and not done.cannot_close else []),
            *([f"  --accept-loss would give up {lost}"] if (lost := done.would_give_up) else []),
            f"nothing was changed. {next_step}",
        ]
    )


# --- Restoring ------------------------------------------------------------------------------------


@ledger.command()
@click.argument("ledger_id", type=LedgerId())
@click.option(
    "--at",
    "time_ms",
    type=int,
    metavar="TIME",
    help="The write to undo (first column of the list).",
)
@click.option("--yes/--dry-run", help="Undo it, or change nothing (default).")
@click.option("--force", is_flag=True, help="Undo it even if copies may be missing.")
@cluster_options
def restore(
    ledger_id: int, time_ms: int | None, yes: bool, force: bool, config: Path | None, output: str
) -> None:
    """Undo a recorded write of metadata.

    \b
      bookmender ledger restore 17                             list the recorded writes
      bookmender ledger restore 17 --at 1700000000000          show what undoing one changes
      bookmender ledger restore 17 --at 1700000000000 --yes    undo it

    The daemon on this host records its own writes. Copies that the old metadata names may be
    deleted by now. So the command asks those bookies for every entry first, and refuses if copies
    may be missing (unless --force). It also marks the ledger, so nodes check it. Run the command as
    the daemon's user.

    Exit codes: 0 done, listed, or --yes would do it. 1 refused, or no such record or ledger.
    3 bookies or ZooKeeper failed, or another node holds the lock: try again.
    """
    settings = settings_for_command(config)
    log_errors_only(settings)
    if time_ms is None:
        if yes or force:
            raise click.UsageError("Name the write to undo with --at.")
        writes = recorded_writes(settings, ledger_id, tell=_tell)
        echo(output, writes, _writes_text(writes))
        return
    record = recorded_write(settings, ledger_id, time_ms, tell=_tell)
    if yes:
        restoring = restore_ledger(settings, record, is_forced=force, tell=_tell)
    else:
        restoring = look_before_restoring(settings, record, tell=_tell)
    done = asyncio.run(restoring)
    echo(output, done, restored_text(done))
    if done.is_in_doubt and not force:
        sys.exit(EXIT_FAILED)


def _writes_text(found: RecordedWrites) -> str:
    lines = []
    for write in found.writes:
        gone = [line for line in write.before if line not in write.after]
        new = [line for line in write.after if line not in write.before]
        lines.append(
            f"{write.time_ms}  {_time_text(write.time_ms)}  {write.cluster or 'unknown cluster'}  "
            f"{' | '.join(gone) or '…'}  =>  {' | '.join(new) or '…'}"
        )
    count = counted(len(found.writes), "write")
    return "\n".join([*lines, f"{count} of ledger {found.ledger_id} recorded on this host"])


def restored_text(done: Restored, *, as_of: str = "before the write of") -> str:
    doubts = done.doubts if done.is_in_doubt else []
    return "\n".join(
        [
            f"ledger {done.ledger_id}, as {as_of} {_time_text(done.time_ms)}:",
            *(f"  - {line}" for line in done.now),
            *(f"  + {line}" for line in done.restored),
            *(f"  doubt: {printable(doubt)}" for doubt in doubts),
            done.result,
        ]
    )
