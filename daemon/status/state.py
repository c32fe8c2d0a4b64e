"""The state of a cluster's recovery at one moment, and the one word for it. Pure."""

from dataclasses import dataclass, field
from typing import Any

from auditor.fsck.results.summary import Summary
from auditor.records import AuditRecord
from daemon.cli.bookies import BookieRow
from daemon.cli.hold import hold_record
from daemon.status.leader import LeaderState
from daemon.status.pace import CopyingPace
from daemon.status.records import audit_record, lock_record, node_record, note_record
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.nodes import NodeInfo, Role
from replication.orders import HoldOrder
from replication.reasons import Reason

WAITING_SHOWN_MAX = 1_000
LOCKS_READ_MAX = 1_000
UNPROVEN_SHOWN_MAX = 1_000
UNREADABLE_VOTE = "unknown (its vote cannot be read)"

VERDICTS = {
    "no-bookies": "no bookie is registered at all: is it ZooKeeper, or the network? nothing is concluded",
    "held": "a safety hold stands: no further ledger is marked for lost bookies, and nothing is fenced",
    "whole": "no ledger misses copies, no bookie is lost or away; drains may be under way, and are told beside it",
    "maintenance": "likewise, but bookies are away on purpose: their ledgers are short of copies meanwhile",
    "copies-away": "nothing is marked, but of some entries every copy is on a bookie that is away: nobody can read them",
    "repairing": "ledgers are marked, and worked on or waiting for time to pass",
    "stuck": "every ledger that is marked waits for help: a bookie to come, or a person",
    "disabled": "ledgers are marked, and auto-recovery is switched off",
    "unattended": "ledgers are marked, and nobody is there to repair them: no node that would, no leader, no lock",
    "bookies-lost": "nothing is marked, but a bookie is lost",
    "bookies-wiped": "nothing is marked, but a bookie was set up anew just now, and may lack what it had",
    "none-writable": "nothing is marked and no bookie is lost, but none takes writes, nor copies",
    "bookies-away": "nothing is marked yet: a bookie is away, and lost only after the recovery delay, or the time to return after an "
    "outage of ZooKeeper",
    "unreadable": "nothing is marked, but the last audit could not read some ledgers' metadata",
    "drain-stuck": "no ledger misses copies, but all that are to be drained or repaired by hand wait for help",
    "ends-unproven": "no ledger misses copies, but the end of some cannot be proven: they need an operator",
    "orders-unreadable": "nothing is marked, but an order of an operator's cannot be read",
    "no-auditor": "nothing is marked, but nobody looks for losses: no auditor is running, ours or Java's",
    "indexing": "nothing is marked so far: the leader has not read every ledger's metadata yet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``by_missing``: marked ledgers per number of missing bookies. ``under_repair``: locked
    ones."""

    leader: str | None
    """As it calls itself, or ``UNREADABLE_VOTE``; None when nobody stands for election."""
    leader_node: NodeInfo | None
    """None too while a Java auditor leads."""
    nodes: tuple[NodeInfo, ...]
    writable: tuple[BookieId, ...]
    read_only: tuple[BookieId, ...]
    lost: tuple[BookieId, ...]
    """With a cookie, but not registered for the recovery delay, and not under maintenance; none
    while no bookie is registered (rule S8)."""
    is_disabled: bool
    marked_count: int
    by_missing: tuple[tuple[int, int], ...]
    by_bookie: tuple[tuple[str, int], ...]
    under_repair: int
    waiting: tuple[WaitingNote, ...]
    """Those whose notes can be read: all count, and ``WAITING_SHOWN_MAX`` of them are told of one
    by one."""
    waiting_count: int
    away: tuple[BookieId, ...] = ()
    """Likewise, but the recovery delay is not over, as far as anybody knows (``auditing``)."""
    wiped: tuple[BookieId, ...] = ()
    """Those that were set up anew, while there is a leader of ours, which has not seen to their
    ledgers yet."""
    audit: AuditRecord | None = None
    """The last one that was completed."""
    own_marked_count: int = 0
    """Ledgers in our private queue alone: of draining bookies, of repairs by hand, that may well be
    whole; and damaged."""
    own_damaged_count: int = 0
    """Those in our private queue alone of which a check or fsck found copies missing or bad where
    Java's workers do not look."""
    ordered: tuple[BookieRow, ...] = ()
    """The bookies that drain, or are under maintenance."""
    hold: HoldOrder | None = None
    """The one that stands now."""
    auditing: LeaderState = field(default_factory=LeaderState)
    """Of the leader, where it is one of ours."""
    unreadable_orders: tuple[str, ...] = ()
    """Paths of orders that nobody can read."""
    foreign_locks: tuple[LockedLedger, ...] = ()
    """Held by other than our nodes, oldest first: Java's workers, bookies' garbage collectors; of
    at most ``LOCKS_READ_MAX``."""
    unproven: tuple[int, ...] = ()
    """Ledgers, marked or not, whose end could not be proven."""
    fsck: Summary | None = None
    """Of its last run."""
    fsck_closer: Summary | None = None
    """Of an earlier one that looked more closely and found something wrong, if none as close came
    after."""
    overtaken: frozenset[int] = frozenset()
    """Ledgers of ``waiting`` that are tried before their time: what their notes tell was before a
    bookie came."""
    pace: CopyingPace = field(default_factory=CopyingPace)
    """Of copying, as this host's settings have it where no order says anything."""
    for_windows: tuple[tuple[str, int], ...] = ()
    """As ``by_bookie``, of the ledgers of ``waiting`` that wait for a maintenance window to end."""

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
        if self.auditing.unavailable_count:
            return "copies-away"
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
        if self.verdict == "maintenance" and self.may_lack_copies and not self.unreadable_orders:
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
    def may_lack_copies(self) -> bool:
        """Whether so many bookies are away on purpose that ledgers may have entries without any
        copy that is there, and nobody has counted these."""
        named = [row for row in self.on_purpose if not self.auditing.is_named_by_none(row.bookie)]
        return len(named) > 1 and self.auditing.unavailable is None

    @property
    def windows_waited_for(self) -> tuple[WaitingNote, ...]:
        """What is told of every ledger that is marked, where each waits for a maintenance window to
        end; else none."""
        notes = tuple(
            note
            for note in self.waiting
            if note.reason is Reason.MAINTENANCE and note.ledger_id not in self.overtaken
        )
        return notes if len(notes) >= self.queued_count else ()

    @property
    def has_worker(self) -> bool:
        """Of ours."""
        return any(node.role is Role.WORKER for node in self.nodes)

    @property
    def is_indexing(self) -> bool:
        """Whether a leader of ours may yet find ledgers that miss copies. Of Java's nothing is
        known."""
        index = self.auditing.index
        return self.leader_node is not None and (index is None or not index.is_complete)

    @property
    def _is_unattended(self) -> bool:
        """Java's workers are seen by nothing but their locks, and mostly one of their auditors
        leads. In our private queue they do not look."""
        if not self.marked_count:
            return not self.has_worker
        return not self.nodes and self.leader is None and not self.under_repair

    @property
    def _is_stuck(self) -> bool:
        """Whether each ledger that is marked, in either queue, waits for help."""
        stuck_count = sum(
            note.reason.needs_help and note.ledger_id not in self.overtaken for note in self.waiting
        )
        return stuck_count >= self.queued_count

    def to_json(self) -> dict[str, Any]:
        waiting = self.waiting[:WAITING_SHOWN_MAX]
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
            "copying": self.pace.to_json(),
            "queue": {
                "total": self.queued_count,
                "marked": self.marked_count,
                "under_repair": self.under_repair,
                "by_missing_bookies": {str(missing): count for missing, count in self.by_missing},
                "by_lost_bookie": dict(self.by_bookie),
                "for_windows_by_lost_bookie": dict(self.for_windows),
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
                "ledgers": [note_record(note) for note in waiting],
                "overtaken": sorted(self.overtaken.intersection(n.ledger_id for n in waiting)),
            },
        }
