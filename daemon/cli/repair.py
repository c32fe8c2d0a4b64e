"""``bookmender repair``: repairs ledgers in this process."""

import asyncio
import sys
from pathlib import Path

import click

from daemon.cli.main import EXIT_FAILED, LedgerId, cluster_options
from daemon.cli.option_types import BookieArgument
from daemon.cli.output import echo
from daemon.cli.progress import NODES_GO_ON, ProgressLine, explain_interrupt
from daemon.cli.session import log_errors_only, settings_for_command
from daemon.operations.repair import Repaired, repair_ledgers
from daemon.settings import Settings
from daemon.status.records import NoteRecord
from daemon.words import counted, duration_text, printable
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from replication.reasons import Reason


@click.command()
@click.argument("ledger_ids", metavar="[LEDGER]...", type=LedgerId(), nargs=-1)
@click.option(
    "--bookie", type=BookieArgument(), help="Also repair all ledgers that name this bookie."
)
@click.option("--mark-only", is_flag=True, help="Only mark them, and let nodes repair them.")
@cluster_options
def repair(
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    mark_only: bool,
    config: Path | None,
    output: str,
) -> None:
    """Check and repair ledgers in this process.

    \b
      bookmender repair 17 4711
      bookmender repair --bookie host:3181

    It needs no daemon, and works while auto-recovery is disabled. It reads the first and last entry
    of each copy, and every entry where a check found damage. bookmender fsck run --level full reads
    every entry. The ledgers are marked in bookmender's private queue, so nodes help, and continue
    after Ctrl-C. Open ledgers are repaired after the open-ledger grace.

    Exit codes: 0 repaired (--mark-only: marked). 1 some ledgers are blocked, have no provable end,
    do not exist or are unreadable. 3 unknown.
    """
    if not ledger_ids and bookie is None:
        raise click.UsageError("Name ledgers, or a bookie with --bookie.")
    settings = settings_for_command(config)
    log_errors_only(settings)
    done = repair_visibly(settings, ledger_ids, bookie, mark_only=mark_only)
    text = result_text(done, mark_only=mark_only, now_ms=SystemClock().wall_ms())
    echo(output, done, text)
    sys.exit(0 if done.is_complete else EXIT_FAILED)


def repair_visibly(
    settings: Settings,
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    *,
    mark_only: bool = False,
) -> Repaired:
    """Repair, or only mark, the ledgers, and show the progress."""
    with (
        explain_interrupt(f"Marked ledgers stay marked, and {NODES_GO_ON}."),
        ProgressLine() as line,
    ):
        return asyncio.run(
            repair_ledgers(settings, ledger_ids, bookie, mark_only=mark_only, show=line.show)
        )


def result_text(done: Repaired, *, mark_only: bool, now_ms: int) -> str:
    """Return the result as text."""
    lines = [printable(_waiting_text(note, now_ms=now_ms)) for note in done.waiting]
    lines += [
        f"ledger {end.ledger_id} has all its copies, but its end cannot be proven: "
        + printable(end.detail)
        for end in done.unproven_ends
    ]
    lines += [f"ledger {each.ledger_id}: {printable(each.error)}" for each in done.failed]
    whole = counted(done.ledgers - len(done.waiting) - len(done.unproven_ends), "ledger")
    return "\n".join([*lines, f"{whole} {'marked' if mark_only else 'checked and whole'}"])


def _waiting_text(note: NoteRecord, *, now_ms: int) -> str:
    what = "waits" if Reason(note.reason).ends_by_others else "is blocked"
    text = f"ledger {note.ledger_id} {what}: {note.reason}: {note.detail}"
    if note.reason == Reason.MAINTENANCE.value and note.next_try_ms > now_ms:
        left = duration_text((note.next_try_ms - now_ms) / 1000)
        text += f". Next try in {left}, or when the bookies are back"
    return text
