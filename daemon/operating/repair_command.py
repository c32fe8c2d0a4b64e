"""``bookmender repair``."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from auditor.endangered import Endangered
from daemon.cli import EXIT_FAILED, LedgerId, config_option, output_option
from daemon.operating.bookie_ids import BookieArgument, known_bookies, require_known
from daemon.operating.progress import (
    NODES_GO_ON,
    ProgressLine,
    counted,
    duration_text,
    printable,
    saying_when_interrupted,
)
from daemon.operating.repair_by_hand import (
    RepairedByHand,
    find_ledgers,
    mark_by_hand,
    repair_by_hand,
)
from daemon.settings import Settings, load_settings
from daemon.state import open_journal
from daemon.status.records import help_text, note_record
from daemon.threads import own_cause
from daemon.visit import log_errors_only, visit
from ledgers.clock import SystemClock
from ledgers.metadata import BookieId
from replication.reasons import Reason
from replication.waiting.notes import WaitingNote


@click.command()
@click.argument("ledger_ids", metavar="[LEDGER]...", type=LedgerId(), nargs=-1)
@click.option("--bookie", type=BookieArgument(), help="Every ledger that names it, too.")
@click.option("--mark-only", is_flag=True, help="Leave the work to the nodes.")
@config_option
@output_option
def repair(
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    mark_only: bool,
    config: Path | None,
    output: str,
) -> None:
    """Check ledgers copy by copy and repair what they lack, here and now.

    Of each copy its first and last entry are asked for (replication.checked_share: some of the
    others, too), and every entry where a check or fsck found the copy bad; bookmender fsck run
    --level full reads all.

    They are marked in a queue that only bookmender's nodes see, and worked on by this very process,
    under the locks that all use; nodes that run take their part. It needs no daemon, and goes on
    while auto-recovery is disabled. Ctrl-C leaves the marks, and so the rest, to the nodes.

    An open ledger whose end misses a bookie is left to its writer for the open-ledger grace
    (replication.open_ledger_grace_s), which is waited for, and then closed. One that merely lacks
    copies at its end waits until it is closed, by its writer or bookmender ledger close: that is
    told, and not waited for.

    Exits 0 when every ledger is whole (or, with --mark-only, marked), 1 when some wait for help,
    for their writers, or for a safety hold or a maintenance window to end, have an end that cannot
    be proven, are not there or cannot be read, which keeps none of the others from being repaired;
    3 when it could not tell.
    """
    if not ledger_ids and bookie is None:
        raise click.UsageError("which ledgers? Name some, or a bookie with --bookie")
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    with saying_when_interrupted(f"what was marked stays marked: {NODES_GO_ON}"):
        done = asyncio.run(_run(settings, ledger_ids, bookie, mark_only))
    if output == "json":
        click.echo(json.dumps(_record(done), indent=2))
    else:
        now_ms = SystemClock().wall_ms()
        click.echo(result_text(done, mark_only=mark_only, now_ms=now_ms))
    sys.exit(EXIT_FAILED if done.waiting or done.unproven or done.failed else 0)


async def _run(
    settings: Settings, ledger_ids: tuple[int, ...], bookie: BookieId | None, mark_only: bool
) -> RepairedByHand:
    async with visit(settings) as cluster:
        if bookie is not None:
            require_known([bookie], await known_bookies(cluster))
        found = await find_ledgers(cluster, ledger_ids, bookie)
    if not found.ledgers:
        return RepairedByHand(ledger_count=0, failed=found.failed)
    done = await _repair(settings, found.ledgers, mark_only)
    return replace(done, failed={**found.failed, **done.failed})


async def _repair(
    settings: Settings, ledgers: Sequence[Endangered], mark_only: bool
) -> RepairedByHand:
    journal = open_journal(settings)
    line = ProgressLine("ledger")
    try:
        if mark_only:
            return await mark_by_hand(settings, journal, ledgers)
        return await repair_by_hand(settings, journal, ledgers, show=line.show)
    except BaseExceptionGroup as group:
        if (cause := own_cause(group)) is None:
            raise
        raise cause from group
    finally:
        line.close()
        journal.close()


def _record(done: RepairedByHand) -> dict[str, Any]:
    record: dict[str, Any] = {
        "ledgers": done.ledger_count,
        "waiting": [note_record(note) for note in done.waiting],
        "unproven_ends": [
            {"ledger_id": end.ledger_id, "detail": end.detail} for end in done.unproven
        ],
        "failed": [{"ledger_id": i, "error": error} for i, error in done.failed.items()],
    }
    if done.failed:
        record["error"] = f"nothing could be done for {counted(len(done.failed), 'ledger')}"
        record["exit_code"] = EXIT_FAILED
    return record


def result_text(done: RepairedByHand, *, mark_only: bool, now_ms: int) -> str:
    """For people."""
    lines = [help_text(note) + _next_try(note, now_ms=now_ms) for note in done.waiting]
    lines += [
        f"ledger {end.ledger_id} has its copies, and no end: {printable(end.detail)}"
        for end in done.unproven
    ]
    lines += [f"ledger {ledger_id}: {printable(error)}" for ledger_id, error in done.failed.items()]
    whole = counted(done.ledger_count - len(done.waiting) - len(done.unproven), "ledger")
    lines.append(f"{whole} {'marked' if mark_only else 'whole, as far as repair looks'}")
    return "\n".join(lines)


def _next_try(note: WaitingNote, *, now_ms: int) -> str:
    """Of what is away on purpose, when the nodes go on with it; empty where nobody knows."""
    if note.reason is not Reason.MAINTENANCE or note.next_try_ms <= now_ms:
        return ""
    left = duration_text((note.next_try_ms - now_ms) / 1000)
    return f"; next try in {left}, or when they are back"
