"""``bookmender repair``: repairs ledgers in this process, with the locks and code of a worker.

The ledgers are first marked in the private queue. So running nodes help, and they continue after a
crash or Ctrl-C. The lock keeps garbage collectors of bookies and Java's workers away from the
ledger (G16: Java's own tool takes no lock).
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from auditor.marker import Marker
from auditor.scan import scan_ledgers
from auditor.underreplication import UnderreplicatedLedger, fewest_copies_first
from daemon.admin_session import (
    AdminSession,
    admin_session,
    log_errors_only,
    note_order,
    operator,
    order_event,
)
from daemon.cli.blocked import order_retries
from daemon.cli.bookies import BookieArgument, known_bookies, require_known
from daemon.cli.main import EXIT_FAILED, LedgerId, config_option, output_option
from daemon.cli.plan import plan
from daemon.cli.progress import NODES_GO_ON, ProgressLine, Show, explain_interrupt
from daemon.live_settings import LiveSettings
from daemon.messages import blocked_record, message
from daemon.roles import open_worker
from daemon.session import Session, open_session
from daemon.settings import Settings, load_settings
from daemon.state import open_journal
from daemon.status.records import help_text, note_record
from daemon.threads import own_cause
from daemon.words import counted, duration_text, printable
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication.journal import MetadataJournal
from replication.ledger_record import UnprovenEnd, WaitingNote, WaitingNotes, read_unproven
from replication.marks import marked_ledger_ids, read_marks
from replication.nodes import Role
from replication.reasons import Reason
from replication.transactions import Batcher
from replication.work_queue import GivenLedgers
from replication.znodes import ClusterPaths

POLL_S = 0.5
POLLED_LEDGERS_PER_S = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedByHand:
    """The result of a repair by hand.

    ``ledger_count``: number of ledgers that could be worked on. ``waiting``: ledgers that are left.
    Each needs an operator, or waits for its writer, for a safety hold or for a maintenance window
    to end. ``unproven``: ledgers with all their copies, but without a provable end, so that an
    operator must close them. ``failed``: why nothing could be done for other ledgers, by ID: the
    ledger does not exist, or its metadata or mark cannot be read.
    """

    ledger_count: int
    waiting: tuple[WaitingNote, ...] = ()
    unproven: tuple[UnprovenEnd, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if no ledger is left."""
        return not (self.waiting or self.unproven or self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ledgers to mark. ``failed``: as in ``RepairedByHand``."""

    ledgers: tuple[UnderreplicatedLedger, ...]
    failed: Mapping[int, str] = field(default_factory=dict)


async def find_ledgers(
    cluster: AdminSession, ledger_ids: Collection[int], bookie: BookieId | None
) -> Found:
    """Return the named ledgers, then those of the bookie, with the fewest copies left first.

    Raises UnavailableError.
    """
    named: dict[int, UnderreplicatedLedger] = {}
    failed: dict[int, str] = {}
    for ledger_id in ledger_ids:
        try:
            named[ledger_id] = await _named(cluster.manager, ledger_id)
        except (NoSuchLedgerError, CorruptionError, UnauthorizedError) as error:
            failed[ledger_id] = str(error)
    if bookie is None:
        return Found(ledgers=tuple(named.values()), failed=failed)
    await cluster.store.sync(cluster.root)
    scan = await scan_ledgers(cluster.manager, lost=[bookie])
    others = [ledger for ledger in scan.underreplicated if ledger.ledger_id not in named]
    ledgers = (*named.values(), *fewest_copies_first(others, {}))
    return Found(ledgers=ledgers, failed=failed)


async def repair_by_hand(
    settings: Settings,
    journal: MetadataJournal,
    ledgers: Sequence[UnderreplicatedLedger],
    *,
    show: Show,
) -> RepairedByHand:
    """Mark the ledgers, and repair them until no mark is left or each remaining ledger waits.

    ``RepairedByHand`` says what a ledger may wait for.
    """
    ledger_ids = [ledger.ledger_id for ledger in ledgers]

    def queue(session: Session, batcher: Batcher) -> GivenLedgers:
        return GivenLedgers(
            session.store,
            batcher,
            session.paths,
            holder=socket.gethostname(),
            clock=session.clock,
            ledger_ids=ledger_ids,
        )

    async with open_worker(
        LiveSettings(settings), journal, role=Role.HAND, make_queue=queue
    ) as opened:
        session = opened.session
        await mark_for_repair(session, opened.batcher, ledgers)
        failed = await access_denied(session.store, session.paths, ledger_ids)
        leasable = set(ledger_ids) - failed.keys()
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(opened.worker.run())
            waiting = await wait_done(
                session.store, session.paths, leasable, show=show, clock=session.clock
            )
            worker.cancel()
        done = leasable.difference(note.ledger_id for note in waiting)
        unproven = await read_unproven(session.store, session.manager, session.paths, done)
    return RepairedByHand(
        ledger_count=len(leasable), waiting=waiting, unproven=tuple(unproven), failed=failed
    )


async def mark_by_hand(
    settings: Settings, journal: MetadataJournal, ledgers: Sequence[UnderreplicatedLedger]
) -> RepairedByHand:
    """Mark the ledgers, and leave the repair to the nodes."""
    async with open_session(LiveSettings(settings), Role.HAND, journal) as session:
        batcher = Batcher(session.store, [session.membership.guard])
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(batcher.run())
            await mark_for_repair(session, batcher, ledgers)
            sender.cancel()
        ledger_ids = [ledger.ledger_id for ledger in ledgers]
        failed = await access_denied(session.store, session.paths, ledger_ids)
    return RepairedByHand(ledger_count=len(ledgers) - len(failed), failed=failed)


async def mark_for_repair(
    session: Session, batcher: Batcher, ledgers: Sequence[UnderreplicatedLedger]
) -> None:
    """Mark the ledgers in the private queue, and cancel the backoff of earlier tries."""
    marker = Marker(session.store, batcher, session.paths.private, session.clock)
    await marker.mark_all(ledgers)
    ledger_ids = [ledger.ledger_id for ledger in ledgers]
    if ledger_ids:
        await note_order(
            session.store, session.paths, order_event("repair"), ledger_ids, by=operator()
        )
    notes = WaitingNotes(session.store, session.paths)
    noted = await notes.ledger_ids()
    waiting = [ledger.ledger_id for ledger in ledgers if ledger.ledger_id in noted]
    for ledger_id in waiting:
        await notes.let_go(ledger_id, guards=[session.membership.guard.check])
    if waiting:
        await order_retries(waiting, session.store, session.paths, session.clock)


async def access_denied(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> dict[int, str]:
    """Return why the mark of a ledger in the private queue cannot be read, if ACLs deny access.

    Such a mark exists, but no worker can lease the ledger.
    """
    return {
        marked.ledger_id: f"its mark cannot be read: {marked.refusal}"
        for marked in await read_marks(store, paths.private, ledger_ids)
        if marked.refusal
    }


async def _named(manager: LedgerManager, ledger_id: int) -> UnderreplicatedLedger:
    try:
        versioned = await manager.read(ledger_id)
    except NoSuchLedgerError:
        await manager.sync(ledger_id)
        versioned = await manager.read(ledger_id)
    return UnderreplicatedLedger(
        ledger_id=ledger_id, lost=(), copies_left=0, length=versioned.metadata.length
    )


async def wait_done(
    store: MetadataStore,
    paths: ClusterPaths,
    ledger_ids: Collection[int],
    *,
    show: Show,
    clock: Clock,
) -> tuple[WaitingNote, ...]:
    """Wait until no ledger is marked, or until every marked one waits for more than time to pass.

    Returns the notes of the latter. A safety hold or a maintenance window may last for hours, and a
    writer may write for days. The command reports such waits and ends. It does wait for the
    open-ledger grace.
    """
    left = sorted(ledger_ids)
    while left := await _still_marked(store, paths, left):
        notes = await _notes(store, paths, left)
        needy = tuple(note for note in notes if _is_in_vain(note))
        if len(needy) == len(left):
            return needy
        show(
            len(left),
            waiting=len(notes),
            beside=waits_text(notes, now_ms=clock.wall_ms()),
        )
        await clock.sleep(POLL_S + len(left) / POLLED_LEDGERS_PER_S)
    return ()


def waits_text(notes: Sequence[WaitingNote], *, now_ms: int) -> str:
    """Return how many ledgers wait, and which of them for their writers and until when.

    Empty if none waits.
    """
    if not notes:
        return ""
    told = f"{len(notes):,} of them {'is' if len(notes) == 1 else 'are'} waiting"
    graces = [n for n in notes if n.reason.is_a_grace and n.grace_until_ms > now_ms]
    if not graces:
        return told
    first, more = graces[0].ledger_id, len(graces) - 1
    which = f"ledger {first} and {more:,} more are" if more else f"ledger {first} is"
    left_s = (max(note.grace_until_ms for note in graces) - now_ms) / 1000
    return (
        f"{told}: {which} in the open-ledger grace for another {duration_text(left_s)}, then "
        "closed and repaired"
    )


def _is_in_vain(note: WaitingNote) -> bool:
    """Return True if time alone does not help: a bookie must register, an operator or the writer
    must act, or a safety hold or a maintenance window must end.

    If the end could not be proven at the first try, the worker has copied what was missing. That
    may have been the only problem, so the second try may succeed.
    """
    if note.reason is Reason.END_UNPROVEN:
        return note.tries > 1
    return note.reason.needs_help or note.reason in _ENDED_BY_OTHERS


_ENDED_BY_OTHERS = frozenset({Reason.HOLD, Reason.MAINTENANCE, Reason.OPEN_FRAGMENT})


async def _still_marked(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Collection[int]
) -> list[int]:
    listed = set(await marked_ledger_ids(store, paths.private))
    marks = await read_marks(store, paths.private, sorted(listed.intersection(ledger_ids)))
    return [marked.ledger_id for marked in marks]


async def _notes(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Collection[int]
) -> list[WaitingNote]:
    notes = WaitingNotes(store, paths)
    noted = (await notes.ledger_ids()).intersection(ledger_ids)
    return await notes.read_all(sorted(noted))


@click.command()
@click.argument("ledger_ids", metavar="[LEDGER]...", type=LedgerId(), nargs=-1)
@click.option(
    "--bookie", type=BookieArgument(), help="Also repair all ledgers that name this bookie."
)
@click.option("--dry-run", is_flag=True, help="Only show the plan, as bookmender plan does.")
@click.option("--mark-only", is_flag=True, help="Only mark them, and let nodes repair them.")
@config_option
@output_option
def repair(
    ledger_ids: tuple[int, ...],
    bookie: BookieId | None,
    dry_run: bool,
    mark_only: bool,
    config: Path | None,
    output: str,
) -> None:
    """Check ledgers and repair their missing copies in this process.

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
    if dry_run:
        click.get_current_context().invoke(
            plan, ledger_ids=ledger_ids, bookie=bookie, config=config, output=output
        )
    settings = load_settings(config, os.environ)
    log_errors_only(settings)
    with explain_interrupt(f"Marked ledgers stay marked, and {NODES_GO_ON}."):
        done = asyncio.run(repair_ledgers(settings, ledger_ids, bookie, mark_only=mark_only))
    if output == "json":
        click.echo(json.dumps(_record(done), indent=2))
    else:
        now_ms = SystemClock().wall_ms()
        click.echo(result_text(done, mark_only=mark_only, now_ms=now_ms))
    sys.exit(0 if done.is_complete else EXIT_FAILED)


async def repair_ledgers(
    settings: Settings, ledger_ids: tuple[int, ...], bookie: BookieId | None, *, mark_only: bool
) -> RepairedByHand:
    """Repair, or only mark, the named ledgers and those of the bookie. Shows the progress."""
    async with admin_session(settings) as cluster:
        if bookie is not None:
            require_known([bookie], await known_bookies(cluster))
        found = await find_ledgers(cluster, ledger_ids, bookie)
    if not found.ledgers:
        return RepairedByHand(ledger_count=0, failed=found.failed)
    done = await _repair(settings, found.ledgers, mark_only)
    return replace(done, failed={**found.failed, **done.failed})


async def _repair(
    settings: Settings, ledgers: Sequence[UnderreplicatedLedger], mark_only: bool
) -> RepairedByHand:
    with closing(open_journal(settings)) as journal, ProgressLine() as line:
        try:
            if mark_only:
                return await mark_by_hand(settings, journal, ledgers)
            return await repair_by_hand(settings, journal, ledgers, show=line.show)
        except BaseExceptionGroup as group:
            if (cause := own_cause(group)) is None:
                raise
            raise cause from group


def _record(done: RepairedByHand) -> dict[str, Any]:
    record: dict[str, Any] = {
        "ledgers": done.ledger_count,
        "waiting": [note_record(note) for note in done.waiting],
        "unproven_ends": [
            {"ledger_id": end.ledger_id, **blocked_record(end.ledger_id, end.blocked)}
            for end in done.unproven
        ],
        "failed": [{"ledger_id": i, "error": error} for i, error in done.failed.items()],
    }
    if done.failed:
        record["error"] = f"could not work on {counted(len(done.failed), 'ledger')}: see failed"
        record["exit_code"] = EXIT_FAILED
    return record


def result_text(done: RepairedByHand, *, mark_only: bool, now_ms: int) -> str:
    """Return the result as text."""
    lines = [help_text(note) + _next_try(note, now_ms=now_ms) for note in done.waiting]
    lines += [
        f"ledger {end.ledger_id} has all its copies, but its end cannot be proven: "
        + printable(message(end.ledger_id, end.blocked).text)
        for end in done.unproven
    ]
    lines += [f"ledger {ledger_id}: {printable(error)}" for ledger_id, error in done.failed.items()]
    whole = counted(done.ledger_count - len(done.waiting) - len(done.unproven), "ledger")
    lines.append(f"{whole} {'marked' if mark_only else 'checked and whole'}")
    return "\n".join(lines)


def _next_try(note: WaitingNote, *, now_ms: int) -> str:
    """Return when nodes retry a ledger that waits for maintenance; empty if that is unknown."""
    if note.reason is not Reason.MAINTENANCE or note.next_try_ms <= now_ms:
        return ""
    left = duration_text((note.next_try_ms - now_ms) / 1000)
    return f". Next try in {left}, or when the bookies are back"
