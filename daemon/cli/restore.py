"""``bookmender ledger restore``: undoes a metadata write that a daemon on this host recorded."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from daemon.admin_session import (
    AdminSession,
    admin_session,
    log_errors_only,
    order_event,
    writing_session,
)
from daemon.cli.blocked import order_retries
from daemon.cli.main import EXIT_FAILED, LedgerId, config_option, output_option
from daemon.cli.progress import echo_notes
from daemon.messages import copy_doubt_text
from daemon.previews import open_inspection
from daemon.settings import Settings, load_settings
from daemon.state import JOURNAL_FOLDER, state_dir
from daemon.words import counted, printable
from ledgers.clock import SystemClock
from ledgers.errors import (
    LockLostError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.model import LedgerMetadata
from ledgers.registration import read_instance_id
from replication.by_hand import CopyDoubt, Restorer, RestoreRefusedError, Restoring, readable
from replication.journal import JournalRecord, read_journal
from replication.reasons import Blocked


@click.command()
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
@config_option
@output_option
def restore(
    ledger_id: int, time_ms: int | None, yes: bool, force: bool, config: Path | None, output: str
) -> None:
    """Undo a metadata write that a daemon on this host recorded.

    \b
      bookmender ledger restore 17                             list the recorded writes
      bookmender ledger restore 17 --at 1700000000000          show what undoing one changes
      bookmender ledger restore 17 --at 1700000000000 --yes    undo it

    Copies that the old metadata names may be deleted by now. So the command asks those bookies for
    every entry first, and refuses if copies may be missing (unless --force). It also marks the
    ledger, so nodes check it. Run the command as the daemon's user.

    Exit codes: 0 done, listed, or --yes would do it. 1 refused, or no such record or ledger.
    3 bookies or ZooKeeper failed, or another node holds the lock: try again.
    """
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    records = _recorded(settings, ledger_id)
    if time_ms is None:
        if yes or force:
            raise click.UsageError("Name the write to undo with --at.")
        click.echo(_listing(ledger_id, records, output))
        return
    record = next((each for each in records if each.time_ms == time_ms), None)
    if record is None:
        raise RejectedError(
            f"this host recorded no write of ledger {ledger_id} at {time_ms}. bookmender ledger "
            f"restore {ledger_id} lists the recorded writes"
        )
    if yes:
        done = asyncio.run(_restore(settings, record, is_forced=force))
        result = ALREADY if done.is_done else "done. The ledger is marked, so nodes check it"
    else:
        done = asyncio.run(_look(settings, record))
        result = ALREADY if done.is_done else f"nothing was changed. {_how(done)}"
    click.echo(_change(done, result, output))
    if done.doubts and not (done.is_done or force):
        sys.exit(EXIT_FAILED)


ALREADY = "nothing to do: the metadata is already the same"


def _how(found: Restoring) -> str:
    return "--yes --force undoes it despite the doubts" if found.doubts else "--yes undoes it"


def _recorded(settings: Settings, ledger_id: int) -> list[JournalRecord]:
    directory = state_dir(settings) / JOURNAL_FOLDER
    try:
        return read_journal(directory, ledger_id)
    except FileNotFoundError:
        echo_notes(
            [
                f"{directory} does not exist. Check node.state_dir, and run this command as the "
                "daemon's user."
            ]
        )
        return []
    except OSError as error:
        raise SettingsError(
            f"node.state_dir: cannot read {directory}: {error.strerror}. Run this command as the "
            "daemon's user",
            setting="node.state_dir",
        ) from error


async def _look(settings: Settings, record: JournalRecord) -> Restoring:
    async with admin_session(settings) as cluster:
        cluster_id = await read_instance_id(cluster.store, cluster.root)
        async with _open_restorer(cluster, cluster.manager, cluster_id) as restorer:
            return await restorer.plan(record)


async def _restore(settings: Settings, record: JournalRecord, *, is_forced: bool) -> Restoring:
    async with (
        writing_session(settings) as ours,
        _open_restorer(ours.cluster, ours.manager, ours.cluster_id) as restorer,
    ):
        try:
            done = await restorer.restore(
                record, session=ours.session, holder=ours.holder, is_forced=is_forced
            )
        except RestoreRefusedError as error:
            if not error.doubts:
                raise
            texts = [_doubt_text(record.ledger_id, doubt) for doubt in error.doubts]
            raise RestoreRefusedError("; ".join(texts), ledger_id=record.ledger_id) from error
        await ours.cluster.note_order(order_event("ledger restore"), [record.ledger_id])
        # The metadata is restored. If this order fails, a node tries the ledger later.
        with suppress(UnavailableError, SessionLostError, LockLostError, RejectedError):
            cluster = ours.cluster
            await order_retries([record.ledger_id], cluster.store, cluster.paths, SystemClock())
        return done


@asynccontextmanager
async def _open_restorer(
    cluster: AdminSession, manager: LedgerManager, cluster_id: str | None
) -> AsyncIterator[Restorer]:
    async with open_inspection(cluster) as inspection:
        yield Restorer(
            store=cluster.store,
            manager=manager,
            inspector=inspection.inspector,
            view=inspection.view,
            paths=cluster.paths,
            cluster=cluster_id,
            clock=inspection.clock,
            tell=lambda text: echo_notes([printable(text)]),
        )


def _listing(ledger_id: int, records: Sequence[JournalRecord], output: str) -> str:
    if output == "json":
        return json.dumps({"ledger_id": ledger_id, "writes": list(map(_record, records))}, indent=2)
    lines = [
        f"{record.time_ms}  {_when(record.time_ms)}  {record.cluster or 'unknown cluster'}  "
        f"{_difference(record.before, record.after)}"
        for record in records
    ]
    return "\n".join(
        [*lines, f"{counted(len(records), 'write')} of ledger {ledger_id} recorded on this host"]
    )


def _record(record: JournalRecord) -> dict[str, Any]:
    return {
        "time_ms": record.time_ms,
        "cluster": record.cluster,
        "before": _said(readable(record.before)),
        "after": _said(readable(record.after)),
    }


def _change(found: Restoring, result: str, output: str) -> str:
    if output == "json":
        return json.dumps(
            {
                "ledger_id": found.record.ledger_id,
                "time_ms": found.record.time_ms,
                "now": _said(found.now),
                "restored": _said(found.was),
                "doubts": [_doubt_text(found.record.ledger_id, doubt) for doubt in found.doubts],
                "result": result,
            },
            indent=2,
        )
    lines = [
        f"ledger {found.record.ledger_id}, as before the write of {_when(found.record.time_ms)}:",
        *(f"  - {line}" for line in _said(found.now)),
        *(f"  + {line}" for line in _said(found.was)),
        *(
            f"  doubt: {printable(_doubt_text(found.record.ledger_id, doubt))}"
            for doubt in ([] if found.is_done else found.doubts)
        ),
        result,
    ]
    return "\n".join(lines)


def _doubt_text(ledger_id: int, doubt: str | CopyDoubt | Blocked) -> str:
    return doubt if isinstance(doubt, str) else copy_doubt_text(ledger_id, doubt)


def _difference(before: bytes, after: bytes) -> str:
    """Return what a write changed, in one line."""
    was, became = _said(readable(before)), _said(readable(after))
    gone = [line for line in was if line not in became]
    new = [line for line in became if line not in was]
    return f"{' | '.join(gone) or '…'}  =>  {' | '.join(new) or '…'}"


def _said(metadata: LedgerMetadata | None) -> list[str]:
    if metadata is None:
        return ["(unreadable metadata)"]
    end = f", last entry {metadata.last_entry_id}" if metadata.is_closed else ""
    return [
        f"{metadata.state.name}{end}",
        *(f"from entry {s.first_entry_id}: {', '.join(s.ensemble)}" for s in metadata.segments),
    ]


def _when(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
