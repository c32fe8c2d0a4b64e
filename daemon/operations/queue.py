"""The marked ledgers: why they are marked, who has leased them, and what blocks their repair."""

from collections.abc import Collection, Sequence
from dataclasses import asdict

from auditor.mark_reasons import MarkExplainer
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.operations.waiting import access_denied_text, current_notes
from daemon.status.records import ForeignLockRecord, NoteRecord
from replication.ledger_record import WaitingNotes
from replication.marks import MarkedLedger, marked_ledger_ids, read_locks, read_marks
from replication.nodes import live_nodes

QUEUE_LIMIT = 1_000
"""Ledgers of one answer."""


class MarkReasonRecord(Answer, frozen=True, kw_only=True):
    cause: str
    bookie: str | None
    since_ms: int | None
    detail: str


class LockRecord(ForeignLockRecord, frozen=True, kw_only=True):
    is_ours: bool


class QueuedLedgerRecord(Answer, frozen=True, kw_only=True):
    ledger_id: int
    missing: list[str] | None
    mark_unreadable: str | None
    ctime_ms: int | None
    is_private: bool
    reasons: list[MarkReasonRecord]
    is_locked: bool
    lock: LockRecord | None
    waiting: NoteRecord | None


class QueueRecord(Answer, frozen=True, kw_only=True):
    """Marked ledgers of both queues. ``ledgers``: those with the lowest ids, at most 1000."""

    marked: int
    ledgers: list[QueuedLedgerRecord]


async def read_queue(cluster: AdminSession, *, limit: int = QUEUE_LIMIT) -> QueueRecord:
    """Return the marked ledgers of both queues, the first ``limit`` of them in detail. Only the
    marks of these are read. The mark in the queue shared with Java has priority."""
    shared = await marked_ledger_ids(cluster.store, cluster.paths)
    own = set(await marked_ledger_ids(cluster.store, cluster.paths.private)).difference(shared)
    chosen = sorted(own.union(shared))[:limit]
    marks = [
        *await read_marks(cluster.store, cluster.paths, [i for i in chosen if i not in own]),
        *await read_marks(cluster.store, cluster.paths.private, [i for i in chosen if i in own]),
    ]
    marks.sort(key=lambda marked: marked.ledger_id)
    rows = await queue_rows(cluster, marks, only_private=own)
    return QueueRecord(marked=len(own) + len(shared), ledgers=rows)


async def queue_rows(
    cluster: AdminSession, marked: Sequence[MarkedLedger], *, only_private: Collection[int]
) -> list[QueuedLedgerRecord]:
    """Return the details of these ledgers. ``only_private``: ledgers that have no mark in the
    shared queue."""
    ledger_ids = [ledger.ledger_id for ledger in marked]
    held = await read_locks(cluster.store, cluster.paths, ledger_ids)
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    locks = {
        lock.ledger_id: LockRecord(
            ledger_id=lock.ledger_id,
            holder=lock.holder,
            since_ms=lock.since_ms,
            is_ours=lock.session_id in ours,
        )
        for lock in held
    }
    noted = await WaitingNotes(cluster.store, cluster.paths).read_all(ledger_ids)
    notes = {note.ledger_id: NoteRecord.of(note) for note in await current_notes(cluster, noted)}
    explainer = await MarkExplainer.read(cluster.store, cluster.paths, ledger_ids)
    rows = []
    for ledger in marked:
        ledger_id, mark = ledger.ledger_id, ledger.mark
        is_private = ledger_id in only_private
        reasons = explainer.explain(ledger_id, mark, is_private=is_private)
        unreadable = None
        if mark is None:  # if access is denied, the text includes ZooKeeper's hint
            damaged = "its mark is unreadable, but the ledger is checked anyway"
            unreadable = access_denied_text(ledger) if ledger.refusal else damaged
        rows.append(
            QueuedLedgerRecord(
                ledger_id=ledger_id,
                missing=list(mark.replicas) if mark else None,
                mark_unreadable=unreadable,
                ctime_ms=mark.ctime_ms if mark else None,
                is_private=is_private,
                reasons=[MarkReasonRecord(**asdict(reason)) for reason in reasons],
                is_locked=ledger_id in locks,
                lock=locks.get(ledger_id),
                waiting=notes.get(ledger_id),
            )
        )
    return rows
