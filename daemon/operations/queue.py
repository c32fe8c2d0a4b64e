"""The marked ledgers: why they are marked, who has leased them, and what blocks their repair."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Literal

from msgspec import structs

from auditor.mark_reasons import MarkExplainer
from auditor.scan import READS_AT_ONCE, read_each
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.operations.topics import DOMAIN, NONE, Topic, topic_of
from daemon.operations.waiting import access_denied_text, current_notes
from daemon.status.records import ForeignLockRecord, NoteRecord
from ledgers.manager import VersionedMetadata
from replication.ledger_record import WaitingNotes
from replication.marks import MarkedLedger, marked_ledger_ids, read_locks, read_marks
from replication.nodes import live_nodes
from replication.reasons import Reason

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
    topic: str | None
    """``tenant/namespace/topic`` of Pulsar, or another application's custom metadata; null: it has
    none, or its metadata cannot be read."""
    tenant: str | None
    bytes: int | None
    """Length of the ledger; null: it is not closed, or its metadata cannot be read."""
    missing: list[str] | None
    mark_unreadable: str | None
    ctime_ms: int | None
    is_private: bool
    reasons: list[MarkReasonRecord]
    is_locked: bool
    lock: LockRecord | None
    waiting: NoteRecord | None

    @property
    def needs_help(self) -> bool:
        """Return True if time alone does not help it."""
        return self.waiting is not None and Reason(self.waiting.reason).needs_help


class QueueRecord(Answer, frozen=True, kw_only=True):
    """Marked ledgers of both queues. ``ledgers``: those with the lowest ids, at most 1000."""

    marked: int
    """Marked ledgers in both queues, of the tenant or the topics if some were named."""
    ledgers: list[QueuedLedgerRecord]


class QueueSumRecord(Answer, frozen=True, kw_only=True):
    """The marked ledgers of a topic or a tenant."""

    name: str
    """Empty: ledgers for which it is unknown."""
    ledgers: int
    needs_help: int
    """Ledgers that time alone does not help."""
    bytes: int
    """Length of the closed ledgers."""


class QueueSumsRecord(Answer, frozen=True, kw_only=True):
    marked: int
    sums: list[QueueSumRecord]
    """Those with most ledgers that need help first, and then those with most ledgers."""


def queue_sums(found: QueueRecord, *, by: Literal["topic", "tenant"]) -> QueueSumsRecord:
    groups: dict[str, list[QueuedLedgerRecord]] = {}
    for row in found.ledgers:
        groups.setdefault(getattr(row, by) or "", []).append(row)
    sums = [
        QueueSumRecord(
            name=name,
            ledgers=len(rows),
            needs_help=sum(row.needs_help for row in rows),
            bytes=sum(row.bytes or 0 for row in rows),
        )
        for name, rows in groups.items()
    ]
    sums.sort(key=lambda each: (-each.needs_help, -each.ledgers, each.name))
    return QueueSumsRecord(marked=found.marked, sums=sums)


async def read_queue(
    cluster: AdminSession, *, limit: int | None = QUEUE_LIMIT, tenant: str = "", topic: str = ""
) -> QueueRecord:
    """Return the marked ledgers of both queues, the first ``limit`` of them in detail. The mark in
    the queue shared with Java has priority.

    ``tenant``, ``topic``: only ledgers of this tenant, or whose topic begins so. For this the
    metadata of all marked ledgers is read, else of those in detail only.
    """
    shared = await marked_ledger_ids(cluster.store, cluster.paths)
    own = set(await marked_ledger_ids(cluster.store, cluster.paths.private)).difference(shared)
    chosen = sorted(own.union(shared))
    if tenant or topic:
        ledgers, prefix = await _read_ledgers(cluster, chosen), topic.removeprefix(DOMAIN)
        chosen = [
            ledger_id
            for ledger_id, (found, _) in ledgers.items()
            if found.name.startswith(prefix) and tenant in ("", found.tenant)
        ]
    marked_count, chosen = len(chosen), chosen[:limit]
    marks = [
        *await read_marks(cluster.store, cluster.paths, [i for i in chosen if i not in own]),
        *await read_marks(cluster.store, cluster.paths.private, [i for i in chosen if i in own]),
    ]
    marks.sort(key=lambda marked: marked.ledger_id)
    rows = await queue_rows(cluster, marks, only_private=own)
    return QueueRecord(marked=marked_count, ledgers=rows)


async def _read_ledgers(
    cluster: AdminSession, ledger_ids: Sequence[int]
) -> dict[int, tuple[Topic, int | None]]:
    """Return the topic of each ledger that exists, and its length if it is closed."""
    ledgers: dict[int, tuple[Topic, int | None]] = {}
    for start in range(0, len(ledger_ids), READS_AT_ONCE):
        part = await read_each(cluster.manager, ledger_ids[start : start + READS_AT_ONCE])
        for ledger_id, found in part.items():
            topic, length = NONE, None
            if isinstance(found, VersionedMetadata):
                topic = topic_of(found.metadata.custom)
                length = found.metadata.length if found.metadata.is_closed else None
            ledgers[ledger_id] = topic, length
    return ledgers


async def queue_rows(
    cluster: AdminSession, marked: Sequence[MarkedLedger], *, only_private: Collection[int]
) -> list[QueuedLedgerRecord]:
    """Return the details of these ledgers. ``only_private``: ledgers that have no mark in the
    shared queue."""
    ledger_ids = [ledger.ledger_id for ledger in marked]
    ledgers = await _read_ledgers(cluster, ledger_ids)
    held = await read_locks(cluster.store, cluster.paths, ledger_ids)
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    locks = {
        lock.ledger_id: LockRecord(
            **structs.asdict(ForeignLockRecord.of(lock)), is_ours=lock.session_id in ours
        )
        for lock in held
    }
    noted = await WaitingNotes(cluster.store, cluster.paths).read_all(ledger_ids)
    notes = {note.ledger_id: NoteRecord.of(note) for note in await current_notes(cluster, noted)}
    explainer = await MarkExplainer.read(cluster.store, cluster.paths, ledger_ids)
    rows = []
    for ledger in marked:
        ledger_id, mark = ledger.ledger_id, ledger.mark
        topic, length = ledgers.get(ledger_id, (NONE, None))
        is_private = ledger_id in only_private
        reasons = explainer.explain(ledger_id, mark, is_private=is_private)
        unreadable = None
        if mark is None:  # if access is denied, the text includes ZooKeeper's hint
            damaged = "its mark is unreadable, but the ledger is checked anyway"
            unreadable = access_denied_text(ledger) if ledger.refusal else damaged
        rows.append(
            QueuedLedgerRecord(
                ledger_id=ledger_id,
                topic=topic.name or None,
                tenant=topic.tenant,
                bytes=length,
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
