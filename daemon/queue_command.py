"""``bookmender queue``."""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from daemon.cli import config_option, output_option
from daemon.status import note_record
from daemon.visit import Visit, run_visit
from replication.listing import MarkedLedger, locked_ledger_ids, marked_ledger_ids, read_marks
from replication.own_state import own_path
from replication.waiting import WaitingNotes


@click.group()
def queue() -> None:
    """The ledgers that are marked as under-replicated."""


@queue.command("list")
@config_option
@output_option
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True)
def list_queue(config: Path | None, output: str, limit: int) -> None:
    """Marked ledgers by id: what each misses, since when, and why it waits if it does.

    Those of draining bookies and of repairs by hand are in a queue of our own, which Java does not
    see; they may well be whole.

    Exits 0 when none is marked, 1 when some are, 3 when it could not tell.
    """

    async def look(cluster: Visit) -> tuple[int, list[dict[str, Any]]]:
        shared, own = (
            await _marked(cluster, cluster.ur),
            await _marked(cluster, own_path(cluster.ur)),
        )
        marked = own | shared
        chosen = [marked[ledger_id] for ledger_id in sorted(marked)[:limit]]
        return len(marked), await _rows(cluster, chosen, own=own.keys() - shared.keys())

    total, rows = run_visit(config, look)
    if output == "json":
        click.echo(json.dumps({"marked": total, "ledgers": rows}, indent=2))
    else:
        for row in rows:
            click.echo(_line(row))
        more = f", the first {len(rows)} shown" if total > len(rows) else ""
        click.echo(f"{total} ledgers marked{more}")
    sys.exit(1 if total else 0)


async def _marked(cluster: Visit, ur: str) -> dict[int, MarkedLedger]:
    """Of one of the two queues, by id."""
    marks = await read_marks(cluster.store, ur, await marked_ledger_ids(cluster.store, ur))
    return {marked.ledger_id: marked for marked in marks}


async def _rows(
    cluster: Visit, marked: Sequence[MarkedLedger], *, own: Collection[int]
) -> list[dict[str, Any]]:
    """``own``: ledgers that are in our own queue alone."""
    locked = await locked_ledger_ids(cluster.store, cluster.ur)
    notes = WaitingNotes(cluster.store, cluster.ur)
    noted = await notes.ledger_ids()
    rows = []
    for ledger in marked:
        note = await notes.read(ledger.ledger_id) if ledger.ledger_id in noted else None
        rows.append(
            {
                "ledger_id": ledger.ledger_id,
                "missing": list(ledger.mark.replicas) if ledger.mark else None,
                "ctime_ms": ledger.mark.ctime_ms if ledger.mark else None,
                "is_own": ledger.ledger_id in own,
                "is_locked": ledger.ledger_id in locked,
                "waiting": note_record(note) if note else None,
            }
        )
    return rows


def _line(row: dict[str, Any]) -> str:
    line = f"ledger {row['ledger_id']}: {_meant(row)}"
    if row["is_locked"]:
        line += " (locked)"
    if row["waiting"]:
        line += f" — {row['waiting']['reason']}: {row['waiting']['detail']}"
    return line


def _meant(row: dict[str, Any]) -> str:
    """What the mark asks for. One in our own queue names bookies to leave, or, made by hand, none."""
    if row["missing"] is None:
        return "misses unreadable mark"
    named = ", ".join(row["missing"])
    if row["is_own"]:
        return f"to leave {named}" if named else "to be checked"
    return f"misses {named or 'nothing'}"
