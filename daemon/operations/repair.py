"""Repairs ledgers in this process, with the locks and code of a worker.

The ledgers are first marked in the private queue. So running nodes help, and they continue after a
crash or Ctrl-C. The lock keeps garbage collectors of bookies and Java's workers away from the
ledger (G16: Java's own tool takes no lock).
"""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing

from msgspec import UNSET, UnsetType

from auditor.marker import Marker
from auditor.scan import scan_ledgers
from auditor.underreplication import UnderreplicatedLedger, fewest_copies_first
from daemon.admin_session import AdminSession, admin_session, note_order, operator, order_event
from daemon.answers import Answer
from daemon.live_settings import LiveSettings
from daemon.messages import blocked_record
from daemon.operations.bookies import known_bookies, require_known
from daemon.operations.waiting import Show, order_retries
from daemon.roles import open_worker
from daemon.session import Session, open_session
from daemon.settings import Settings
from daemon.state import open_journal
from daemon.status.records import NoteRecord
from daemon.threads import own_cause
from daemon.words import counted, duration_text
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.typed import convert
from replication.journal import MetadataJournal
from replication.ledger_record import UnprovenEnd, WaitingNote, WaitingNotes, read_unproven
from replication.marks import marked_ledger_ids, read_marks
from replication.nodes import Role
from replication.reasons import Blocked, Facts, Reason
from replication.transactions import Batcher
from replication.work_queue import GivenLedgers
from replication.znodes import ClusterPaths

POLL_S = 0.5
POLLED_LEDGERS_PER_S = 2_000


class UnprovenEndRecord(Answer, frozen=True, kw_only=True):
    """A ledger with all its copies, but without a provable end, so an operator must close it."""

    ledger_id: int
    reason: Reason
    facts: Facts
    besides: tuple[Blocked, ...]
    detail: str


class FailedLedger(Answer, frozen=True, kw_only=True):
    """Nothing could be done: it does not exist, or its metadata or mark cannot be read."""

    ledger_id: int
    error: str


class Repaired(Answer, frozen=True, kw_only=True):
    """The result of a repair by hand."""

    ledgers: int
    """Number of ledgers that could be worked on."""
    waiting: list[NoteRecord]
    """Ledgers that are left: each needs an operator, or waits for others, perhaps for days."""
    unproven_ends: list[UnprovenEndRecord]
    failed: list[FailedLedger]
    error: str | UnsetType = UNSET
    """This, and ``exit_code``, only if some failed."""
    exit_code: int | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        ledger_count: int,
        *,
        waiting: Sequence[WaitingNote] = (),
        unproven: Sequence[UnprovenEnd] = (),
        failed: Mapping[int, str] = {},
    ) -> "Repaired":
        error = f"could not work on {counted(len(failed), 'ledger')}: see failed"
        return cls(
            ledgers=ledger_count,
            waiting=list(map(NoteRecord.of, waiting)),
            unproven_ends=[
                convert(
                    {"ledger_id": each.ledger_id, **blocked_record(each.ledger_id, each.blocked)},
                    UnprovenEndRecord,
                )
                for each in unproven
            ],
            failed=[FailedLedger(ledger_id=i, error=why) for i, why in failed.items()],
            error=error if failed else UNSET,
            exit_code=1 if failed else UNSET,
        )

    @property
    def is_complete(self) -> bool:
        """True if no ledger is left."""
        return not (self.waiting or self.unproven_ends or self.failed)


async def repair_ledgers(
    settings: Settings,
    ledger_ids: Sequence[int],
    bookie: BookieId | None,
    *,
    mark_only: bool,
    show: Show,
) -> Repaired:
    """Repair, or only mark, the named ledgers and those of the bookie, and return when no mark is
    left or each remaining ledger waits. Raises UsageError for an unknown bookie."""
    async with admin_session(settings) as cluster:
        if bookie is not None:
            require_known([bookie], await known_bookies(cluster))
        ledgers, failed = await find_ledgers(cluster, ledger_ids, bookie)
    if not ledgers:
        return Repaired.of(0, failed=failed)
    with closing(open_journal(settings)) as journal:
        try:
            if mark_only:
                return await _mark(settings, journal, ledgers, failed)
            return await _repair(settings, journal, ledgers, failed, show=show)
        except BaseExceptionGroup as group:
            if (cause := own_cause(group)) is None:
                raise
            raise cause from group


async def find_ledgers(
    cluster: AdminSession, ledger_ids: Collection[int], bookie: BookieId | None
) -> tuple[list[UnderreplicatedLedger], dict[int, str]]:
    """Return the named ledgers, then those of the bookie, with the fewest copies left first; and
    why named ledgers cannot be repaired, by id.

    Raises UnavailableError.
    """
    named: dict[int, UnderreplicatedLedger] = {}
    failed: dict[int, str] = {}
    for ledger_id in ledger_ids:
        try:
            try:
                versioned = await cluster.manager.read(ledger_id)
            except NoSuchLedgerError:
                await cluster.manager.sync(ledger_id)
                versioned = await cluster.manager.read(ledger_id)
            named[ledger_id] = UnderreplicatedLedger(
                ledger_id=ledger_id, lost=(), copies_left=0, length=versioned.metadata.length
            )
        except (NoSuchLedgerError, CorruptionError, UnauthorizedError) as error:
            failed[ledger_id] = str(error)
    if bookie is None:
        return [*named.values()], failed
    await cluster.store.sync(cluster.root)
    scan = await scan_ledgers(cluster.manager, lost=[bookie])
    others = [ledger for ledger in scan.underreplicated if ledger.ledger_id not in named]
    return [*named.values(), *fewest_copies_first(others, {})], failed


async def _repair(
    settings: Settings,
    journal: MetadataJournal,
    ledgers: Sequence[UnderreplicatedLedger],
    failed: Mapping[int, str],
    *,
    show: Show,
) -> Repaired:
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
        denied = await access_denied(session.store, session.paths, ledger_ids)
        leasable = set(ledger_ids) - denied.keys()
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(opened.worker.run())
            waiting = await wait_done(
                session.store, session.paths, leasable, show=show, clock=session.clock
            )
            worker.cancel()
        done = leasable.difference(note.ledger_id for note in waiting)
        unproven = await read_unproven(session.store, session.manager, session.paths, done)
    return Repaired.of(
        len(leasable), waiting=waiting, unproven=unproven, failed={**failed, **denied}
    )


async def _mark(
    settings: Settings,
    journal: MetadataJournal,
    ledgers: Sequence[UnderreplicatedLedger],
    failed: Mapping[int, str],
) -> Repaired:
    """Mark the ledgers, and leave the repair to the nodes."""
    async with open_session(LiveSettings(settings), Role.HAND, journal) as session:
        batcher = Batcher(session.store, [session.membership.guard])
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(batcher.run())
            await mark_for_repair(session, batcher, ledgers)
            sender.cancel()
        ledger_ids = [ledger.ledger_id for ledger in ledgers]
        denied = await access_denied(session.store, session.paths, ledger_ids)
    return Repaired.of(len(ledgers) - len(denied), failed={**failed, **denied})


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
    left, notes_of_all = sorted(ledger_ids), WaitingNotes(store, paths)
    while True:
        listed = set(await marked_ledger_ids(store, paths.private))
        marks = await read_marks(store, paths.private, sorted(listed.intersection(left)))
        if not (left := [marked.ledger_id for marked in marks]):
            return ()
        noted = (await notes_of_all.ledger_ids()).intersection(left)
        notes = await notes_of_all.read_all(sorted(noted))
        needy = tuple(note for note in notes if _is_in_vain(note))
        if len(needy) == len(left):
            return needy
        show(
            len(left),
            waiting=len(notes),
            beside=waits_text(notes, now_ms=clock.wall_ms()),
        )
        await clock.sleep(POLL_S + len(left) / POLLED_LEDGERS_PER_S)


def waits_text(notes: Sequence[WaitingNote], *, now_ms: int) -> str:
    """Return how many ledgers wait, and until when writers keep them. Empty if none waits."""
    if not notes:
        return ""
    told = f"{len(notes):,} of them {'is' if len(notes) == 1 else 'are'} waiting"
    ends_ms = [note.grace_until_ms for note in notes if note.reason.is_a_grace]
    left_s = (max(ends_ms, default=0) - now_ms) / 1000
    if left_s <= 0:
        return told
    return f"{told}, for the open-ledger grace another {duration_text(left_s)}"


def _is_in_vain(note: WaitingNote) -> bool:
    """Return True if time alone does not help: a bookie must register, an operator or the writer
    must act, or a safety hold or a maintenance window must end.

    If the end could not be proven at the first try, the worker has copied what was missing. That
    may have been the only problem, so the second try may succeed.
    """
    if note.reason is Reason.END_UNPROVEN:
        return note.tries > 1
    return note.reason.needs_help or note.reason.ends_by_others
