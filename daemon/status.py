"""The state of a cluster's recovery at one moment: gathered here, printed by ``status_command``."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.election import current_leader
from auditor.fsck.results.last import read_closer, read_last
from auditor.fsck.results.summary import Summary
from auditor.own_queue import read_own_queue
from auditor.records import AuditRecord, last_audit
from daemon.leader_status import LeaderState, gather_leader
from daemon.operating.bookies import BookieRow, BookieState, bookie_rows, missed, with_losses
from daemon.operating.hold import current_hold, hold_record
from daemon.operating.progress import printable
from daemon.visit import Visit
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.metadata import BookieId
from replication.cluster.membership import Half, NodeInfo, live_nodes
from replication.cluster.order_book import OrderBook
from replication.cluster.orders import HoldOrder
from replication.queue import payloads
from replication.queue.listing import (
    LockedLedger,
    MarkedLedger,
    locked_ledger_ids,
    marked_ledger_ids,
    read_locks,
    read_marks,
)
from replication.reasons import Reason
from replication.waiting.notes import WaitingNote, WaitingNotes
from replication.waiting.unproven_ends import unproven_ledger_ids

WAITING_SHOWN_MAX = 1_000
LOCKS_READ_MAX = 1_000
UNPROVEN_SHOWN_MAX = 1_000
UNREADABLE_VOTE = "unknown (its vote cannot be read)"

VERDICTS = {
    "no-bookies": "no bookie is registered at all: is it ZooKeeper, or the network? nothing is concluded",
    "held": "a safety hold stands: no further ledger is marked for lost bookies, and nothing is fenced",
    "whole": "no ledger is marked, no bookie is lost or away",
    "maintenance": "likewise, but bookies are away on purpose: their ledgers are a copy short meanwhile",
    "repairing": "ledgers are marked, and worked on or waiting for time to pass",
    "stuck": "every ledger that is marked waits for help: a bookie to come, or a person",
    "disabled": "ledgers are marked, and auto-recovery is switched off",
    "unattended": "ledgers are marked, and nobody is there to repair them: no node that would, no leader, no lock",
    "bookies-lost": "nothing is marked, but a bookie is lost",
    "bookies-wiped": "nothing is marked yet, but a bookie was set up anew, and may have lost what it had",
    "none-writable": "nothing is marked and no bookie is lost, but none takes writes, nor copies",
    "bookies-away": "nothing is marked yet: a bookie is away, and lost only after the recovery delay",
    "unreadable": "nothing is marked, but the last audit could not read some ledgers' metadata",
    "drain-stuck": "no ledger misses copies, but all that are to be drained or repaired by hand wait for help",
    "ends-unproven": "no ledger misses copies, but the end of some cannot be proven: they need an operator",
    "orders-unreadable": "nothing is marked, but an order of an operator's cannot be read",
    "no-auditor": "nothing is marked, but nobody looks for losses: no auditor is running, ours or Java's",
    "indexing": "nothing is marked so far: the leader has not read every ledger's metadata yet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``by_missing``: marked ledgers per number of missing bookies. ``under_repair``: locked ones."""

    leader: str | None
    """As it calls itself, or ``UNREADABLE_VOTE``; None when nobody stands for election."""
    leader_node: NodeInfo | None
    """None too while a Java auditor leads."""
    nodes: tuple[NodeInfo, ...]
    writable: tuple[BookieId, ...]
    read_only: tuple[BookieId, ...]
    lost: tuple[BookieId, ...]
    """With a cookie, but not registered for the recovery delay, and not under maintenance; none while no
    bookie is registered (rule S8)."""
    is_disabled: bool
    marked_count: int
    by_missing: tuple[tuple[int, int], ...]
    by_bookie: tuple[tuple[str, int], ...]
    under_repair: int
    waiting: tuple[WaitingNote, ...]
    """At most ``WAITING_SHOWN_MAX`` of them."""
    waiting_count: int
    away: tuple[BookieId, ...] = ()
    """Likewise, but the recovery delay is not over, as far as anybody knows (``auditing``)."""
    wiped: tuple[BookieId, ...] = ()
    """Those that were set up anew, while there is a leader of ours, which has not seen to their ledgers yet."""
    audit: AuditRecord | None = None
    """The last one that was completed."""
    own_marked_count: int = 0
    """Ledgers in our own queue alone: of draining bookies, of repairs by hand, that may well be whole; and damaged."""
    own_damaged_count: int = 0
    """Those in our own queue alone of which a check or fsck found copies missing or bad where Java's workers do not look."""
    ordered: tuple[BookieRow, ...] = ()
    """The bookies that drain, or are under maintenance."""
    hold: HoldOrder | None = None
    """The one that stands now."""
    auditing: LeaderState = field(default_factory=LeaderState)
    """Of the leader, where it is one of ours."""
    unreadable_orders: tuple[str, ...] = ()
    """Paths of orders that nobody can read."""
    foreign_locks: tuple[LockedLedger, ...] = ()
    """Held by other than our nodes, oldest first: Java's workers, bookies' garbage collectors; of at
    most ``LOCKS_READ_MAX``."""
    unproven: tuple[int, ...] = ()
    """Ledgers, marked or not, whose end could not be proven."""
    fsck: Summary | None = None
    """Of its last run."""
    fsck_closer: Summary | None = None
    """Of an earlier one that looked more closely and found something wrong, if none as close came after."""

    @property
    def verdict(self) -> str:
        """One word; ``VERDICTS`` says what each means."""
        if not self.has_bookies:
            return "no-bookies"
        if self.hold is not None:
            return "held"
        if self.marked_count or self.own_damaged_count:
            if self.is_disabled:
                return "disabled"
            if self._is_unattended:
                return "unattended"
            return "stuck" if self._is_stuck else "repairing"
        if self.lost:
            return "bookies-lost"
        if self.wiped:
            return "bookies-wiped"
        if not self.writable:
            return "none-writable"
        if self.away:
            return "bookies-away"
        if self.audit is not None and self.audit.unreadable_count:
            return "unreadable"
        if self.own_marked_count and self._is_stuck:
            return "drain-stuck"
        if self.unproven:
            return "ends-unproven"
        if self.unreadable_orders:
            return "orders-unreadable"
        if self.leader is None:
            return "no-auditor"
        if self.is_indexing:
            return "indexing"
        return "maintenance" if self.on_purpose else "whole"

    @property
    def exit_code(self) -> int:
        """0: all is well, or as an operator ordered it. 1: it is not. 3: nobody can tell."""
        if self.verdict in ("no-bookies", "no-auditor", "indexing"):
            return 3
        return 0 if self.verdict in ("whole", "maintenance") and not self.unreadable_orders else 1

    @property
    def queued_count(self) -> int:
        """Ledgers in either queue."""
        return self.marked_count + self.own_marked_count

    @property
    def has_bookies(self) -> bool:
        """An empty list is unknown, which is not the same as lost (rule S8)."""
        return bool(self.writable or self.read_only)

    @property
    def on_purpose(self) -> tuple[BookieRow, ...]:
        """The bookies that are away, and under maintenance."""
        return tuple(row for row in self.ordered if row.is_away_on_purpose)

    @property
    def on_purpose_until_ms(self) -> int | None:
        """When the last of their windows is over; None where nobody is away on purpose."""
        windows = (row.maintenance for row in self.on_purpose)
        return max((window.until_ms for window in windows if window is not None), default=None)

    @property
    def has_worker(self) -> bool:
        """Of ours."""
        return any(node.half is Half.WORKER for node in self.nodes)

    @property
    def is_indexing(self) -> bool:
        """Whether a leader of ours may yet find ledgers that miss copies. Of Java's nothing is known."""
        index = self.auditing.index
        return self.leader_node is not None and (index is None or not index.is_complete)

    @property
    def _is_unattended(self) -> bool:
        """Java's workers are seen by nothing but their locks, and mostly one of their auditors leads. In our own
        queue they do not look."""
        if not self.marked_count:
            return not self.has_worker
        return not self.nodes and self.leader is None and not self.under_repair

    @property
    def _is_stuck(self) -> bool:
        """Whether each ledger that is marked, in either queue, waits for help."""
        stuck_count = sum(note.reason.needs_help for note in self.waiting)
        return stuck_count >= self.queued_count

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "hold": None if self.hold is None else hold_record(self.hold),
            "leader": self.leader,
            "leader_node": node_record(self.leader_node) if self.leader_node else None,
            "nodes": [node_record(node) for node in self.nodes],
            "bookies": {
                "writable": list(self.writable),
                "read_only": list(self.read_only),
                "lost": list(self.lost),
                "away": list(self.away),
                "wiped": list(self.wiped),
                "on_purpose": {
                    "away": [row.bookie for row in self.on_purpose],
                    "until_ms": self.on_purpose_until_ms,
                },
            },
            "is_disabled": self.is_disabled,
            "last_audit": audit_record(self.audit) if self.audit else None,
            "last_fsck": self.fsck.to_record() if self.fsck else None,
            "closer_fsck": self.fsck_closer.to_record() if self.fsck_closer else None,
            "auditing": self.auditing.to_json(),
            "queue": {
                "total": self.queued_count,
                "marked": self.marked_count,
                "under_repair": self.under_repair,
                "by_missing_bookies": {str(missing): count for missing, count in self.by_missing},
                "by_lost_bookie": dict(self.by_bookie),
                "by_cause": dict(self.auditing.by_cause),
                "own_marked": self.own_marked_count,
                "own_damaged": self.own_damaged_count,
                "foreign_locks": [lock_record(lock) for lock in self.foreign_locks],
            },
            "ordered_bookies": [row.to_json() for row in self.ordered],
            "unreadable_orders": list(self.unreadable_orders),
            "unproven_ends": {
                "count": len(self.unproven),
                "ledgers": list(self.unproven[:UNPROVEN_SHOWN_MAX]),
            },
            "waiting": {
                "count": self.waiting_count,
                "ledgers": [note_record(note) for note in self.waiting],
            },
        }


def node_record(node: NodeInfo) -> dict[str, Any]:
    return {
        "host": node.host,
        "pid": node.pid,
        "half": node.half.value,
        "bookie_id": node.bookie_id,
        "started_ms": node.started_ms,
    }


def audit_record(audit: AuditRecord) -> dict[str, Any]:
    return {
        "finished_ms": audit.finished_ms,
        "ledgers": audit.ledger_count,
        "marks": audit.mark_count,
        "unreadable": audit.unreadable_count,
        "unreadable_ledgers": list(audit.unreadable),
    }


def note_record(note: WaitingNote) -> dict[str, Any]:
    return {
        "ledger_id": note.ledger_id,
        "reason": note.reason.value,
        "detail": note.detail,
        "node": note.node,
        "since_ms": note.since_ms,
        "tries": note.tries,
        "next_try_ms": note.next_try_ms,
        "grace_until_ms": note.grace_until_ms,
    }


def help_text(note: WaitingNote) -> str:
    """Of a ledger that time alone will not help, or that a hold keeps waiting, for people."""
    what = "the hold to end" if note.reason is Reason.HOLD else "help"
    return printable(
        f"ledger {note.ledger_id} waits for {what}: {note.reason.value}: {note.detail}"
    )


def lock_record(lock: LockedLedger) -> dict[str, Any]:
    return {"ledger_id": lock.ledger_id, "holder": lock.holder, "since_ms": lock.since_ms}


async def gather_status(cluster: Visit, *, clock: Clock | None = None) -> Status:
    """Raises UnavailableError when something could not be read whole. ``clock``: the real one, if None."""
    clock = clock or SystemClock()
    store, ur = cluster.store, cluster.ur
    nodes = await live_nodes(store, ur)
    leader = await current_leader(store, ur)
    marked = await read_marks(store, ur, await marked_ledger_ids(store, ur))
    marked_ids = {ledger.ledger_id for ledger in marked}
    own = await read_own_queue(store, ur, shared=marked_ids)
    queued_ids = marked_ids.union(own.ledger_ids)
    locked_ids = await locked_ledger_ids(store, ur)
    notes = WaitingNotes(store, ur)
    noted = sorted(await notes.ledger_ids() & queued_ids)
    orders = await OrderBook(store, ur).read()
    bookies = await bookie_rows(cluster, orders, clock=clock)
    leader_node = next(
        (n.info for n in nodes if leader and n.session_id == leader.session_id), None
    )
    away = missed(bookies)
    auditing = await gather_leader(
        cluster,
        leader_session_id=leader.session_id if leader and leader_node else None,
        away=away,
        on_purpose=[row.bookie for row in bookies if row.is_away_on_purpose],
        marked=marked,
        clock=clock,
    )
    not_lost = auditing.loss_due_ms.keys()
    return Status(
        leader=(leader.candidate or UNREADABLE_VOTE) if leader else None,
        leader_node=leader_node,
        nodes=tuple(sorted((n.info for n in nodes), key=lambda n: (n.host, n.pid, n.half.value))),
        writable=tuple(row.bookie for row in bookies if row.state is BookieState.WRITABLE),
        read_only=tuple(row.bookie for row in bookies if row.state is BookieState.READ_ONLY),
        lost=tuple(bookie for bookie in away if bookie not in not_lost),
        away=tuple(bookie for bookie in away if bookie in not_lost),
        wiped=tuple(row.bookie for row in bookies if row.is_wiped and leader_node is not None),
        is_disabled=await store.exists(payloads.disable_path(ur)) is not None,
        marked_count=len(marked),
        by_missing=tuple(sorted(_missing_counts(marked).items(), reverse=True)),
        by_bookie=tuple(sorted(_bookie_counts(marked).items())),
        under_repair=len(locked_ids & queued_ids),
        waiting=tuple(await notes.read_all(noted[:WAITING_SHOWN_MAX])),
        waiting_count=len(noted),
        audit=await _audit_as_it_is_now(cluster),
        own_marked_count=len(own),
        own_damaged_count=len(own.damaged),
        ordered=tuple(
            row
            for row in with_losses(bookies, auditing.loss_due_ms)
            if row.drain is not None or row.maintenance is not None
        ),
        hold=await current_hold(cluster, clock=clock),
        auditing=auditing,
        unreadable_orders=orders.unreadable,
        foreign_locks=await foreign_locks(cluster, sorted(locked_ids)),
        unproven=tuple(await unproven_ledger_ids(store, cluster.manager, ur)),
        fsck=await read_last(store, ur),
        fsck_closer=await read_closer(store, ur),
    )


async def _audit_as_it_is_now(cluster: Visit) -> AuditRecord | None:
    """The last audit, without those that it could not read and that can be read by now, or are gone.

    Of very many only the ids that it tells of, a hundred at most, are looked at again.
    """
    audit = await last_audit(cluster.store, cluster.ur)
    if audit is None or not audit.unreadable:
        return audit
    are_unreadable = await asyncio.gather(*(_is_unreadable(cluster, i) for i in audit.unreadable))
    still = tuple(i for i, is_so in zip(audit.unreadable, are_unreadable, strict=True) if is_so)
    mended_count = len(audit.unreadable) - len(still)
    return replace(audit, unreadable=still, unreadable_count=audit.unreadable_count - mended_count)


async def _is_unreadable(cluster: Visit, ledger_id: int) -> bool:
    try:
        await cluster.manager.read(ledger_id)
    except (CorruptionError, UnauthorizedError):
        return True
    except NoSuchLedgerError:
        return False
    return False


async def foreign_locks(cluster: Visit, locked_ids: Sequence[int]) -> tuple[LockedLedger, ...]:
    """Of the first ``LOCKS_READ_MAX`` locks, those known to be of no node of ours; the oldest first."""
    locks = await read_locks(cluster.store, cluster.ur, locked_ids[:LOCKS_READ_MAX])
    # After the locks: a node that joined in between is not to be taken for somebody else.
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.ur)}
    foreign = [lock for lock in locks if lock.since_ms and lock.session_id not in ours]
    return tuple(sorted(foreign, key=lambda lock: lock.since_ms))


def _missing_counts(marked: Sequence[MarkedLedger]) -> Counter[int]:
    return Counter(len(ledger.mark.replicas) for ledger in marked if ledger.mark is not None)


def _bookie_counts(marked: Sequence[MarkedLedger]) -> Counter[str]:
    return Counter(
        replica for ledger in marked if ledger.mark is not None for replica in ledger.mark.replicas
    )
