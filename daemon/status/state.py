"""The state of a cluster's recovery at one moment: what ``bookmender status`` gathers and judges.
No I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from auditor.backlog import RepairProgress
from auditor.checks.records import CheckRun
from auditor.fsck.results.summary import Summary
from auditor.records import AuditRecord
from daemon.operations.archive import ArchiveStatus
from daemon.operations.bookies import BookieRow
from daemon.operations.feed import FeedStall
from daemon.status.answers import CopyingRecord
from daemon.status.leader import LeaderState
from daemon.status.unreadable import UnreadableRecord
from ledgers.model import BookieId
from notifications.discovery import ServerRecord
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.nodes import NodeInfo, Role
from replication.orders import HoldOrder, Mute
from replication.reasons import Reason

LOCKS_READ_MAX = 1_000
UNREADABLE_VOTE = "unknown (its vote cannot be read)"
UNKNOWN_PACE = CopyingRecord(
    speed="yielding",
    yields_to_writers=True,
    is_client_activity_known=False,
    active_bookies=[],
    unknown_bookies=[],
    copying_nodes=1,
    bytes_per_s=0,
    entries_per_s=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The leader and bookmender's nodes. Java's workers are visible only through their locks."""

    leader: str | None = None
    """Name of the leader, or ``UNREADABLE_VOTE``. None: no auditor is elected."""
    leader_node: NodeInfo | None = None
    """None also while a Java auditor leads."""
    leader_session_id: int | None = None
    """Of ``leader_node``."""
    nodes: tuple[NodeInfo, ...] = ()

    @property
    def has_worker(self) -> bool:
        """True if a bookmender worker is registered."""
        return any(node.role is Role.WORKER for node in self.nodes)

    @property
    def has_auditor(self) -> bool:
        """True if a bookmender auditor is registered, elected or not."""
        return any(node.role is Role.AUDITOR for node in self.nodes)

    @property
    def is_java_leader(self) -> bool:
        return self.leader is not None and self.leader_node is None


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieStates:
    """The bookies by state. A bookie that is absent in its maintenance window is neither ``absent``
    nor ``lost``."""

    writable: tuple[BookieId, ...] = ()
    read_only: tuple[BookieId, ...] = ()
    lost: tuple[BookieId, ...] = ()
    """Absent longer than the recovery delay. Empty while no bookie is registered (rule S8)."""
    absent: tuple[BookieId, ...] = ()
    """Not registered, and not known to be lost. Empty while no bookie is registered."""
    reformatted: tuple[BookieId, ...] = ()
    """Reformatted bookies whose ledgers a bookmender leader has not processed yet."""
    ordered: tuple[BookieRow, ...] = ()
    """Bookies with a drain order or a maintenance window."""

    @property
    def is_any_registered(self) -> bool:
        """Return True if a bookie is registered. If none is, their state is unknown, not lost (rule
        S8)."""
        return bool(self.writable or self.read_only)

    @property
    def in_maintenance(self) -> tuple[BookieRow, ...]:
        """Bookies that are absent in their maintenance window."""
        return tuple(row for row in self.ordered if row.is_absent_in_maintenance)

    @property
    def maintenance_until_ms(self) -> int | None:
        """End of the last window of ``in_maintenance``. None: there is none."""
        windows = (row.maintenance for row in self.in_maintenance)
        return max((window.until_ms for window in windows if window is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """Ledgers that wait for repair, in the queue shared with Java and in bookmender's private
    queue."""

    marked_count: int = 0
    """Ledgers in the shared queue: they are under-replicated."""
    private_count: int = 0
    """Ledgers in the private queue only: to drain, to repair by hand, or damaged."""
    private_damaged_count: int = 0
    """Ledgers of ``private_count`` with findings that Java's workers do not see."""
    by_missing: tuple[tuple[int, int], ...] = ()
    """Number of ledgers in the shared queue by number of missing bookies."""
    by_bookie: tuple[tuple[str, int], ...] = ()
    """Number of ledgers in the shared queue by missing bookie."""
    by_bookie_in_maintenance: tuple[tuple[str, int], ...] = ()
    """Ledgers of ``by_bookie`` that wait for a maintenance window to end."""
    locked: frozenset[int] = frozenset()
    """Queued ledgers that a worker has locked."""
    foreign_locks: tuple[LockedLedger, ...] = ()
    """Locks of Java's workers and of garbage collectors, oldest first; of the first
    ``LOCKS_READ_MAX`` locks."""
    waiting: tuple[WaitingNote, ...] = ()
    """The readable notes of queued ledgers."""
    waiting_count: int = 0
    """Queued ledgers with a note, readable or not."""
    overtaken: frozenset[int] = frozenset()
    """Ledgers of ``waiting`` that are due: a bookie came or an order changed since the note was
    written."""

    @property
    def total(self) -> int:
        """Ledgers in both queues."""
        return self.marked_count + self.private_count

    @property
    def locked_count(self) -> int:
        return len(self.locked)

    @property
    def postponed(self) -> tuple[WaitingNote, ...]:
        """Notes of ledgers that no worker tries now. During a grace a worker keeps the lock."""
        return tuple(
            note
            for note in self.valid_notes
            if note.ledger_id not in self.locked or note.reason.is_a_grace
        )

    @property
    def needs_repair(self) -> bool:
        """True if a queued ledger is known to be short of copies or damaged. Ledgers that are only
        to be moved do not count."""
        return bool(self.marked_count or self.private_damaged_count)

    @property
    def valid_notes(self) -> tuple[WaitingNote, ...]:
        """Notes that are not overtaken."""
        return tuple(note for note in self.waiting if note.ledger_id not in self.overtaken)

    @property
    def blocked(self) -> tuple[WaitingNote, ...]:
        """Notes of ledgers that time alone does not help."""
        return tuple(note for note in self.valid_notes if note.reason.needs_help)

    @property
    def waiting_for_maintenance(self) -> tuple[WaitingNote, ...]:
        """The notes, if every queued ledger waits for a maintenance window to end; else empty."""
        notes = tuple(n for n in self.valid_notes if n.reason is Reason.MAINTENANCE)
        return notes if len(notes) >= self.total else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOrders:
    """Orders to the whole cluster."""

    hold: HoldOrder | None = None
    """The safety hold in force."""
    is_disabled: bool = False
    """True if auto-recovery is disabled, Java's too."""
    disabled_until_ms: int | None = None
    """When the leader enables it again; None: not by itself."""
    mutes: Mapping[str, Mute] = field(default_factory=dict)
    """By code of the condition, also those that are over."""
    unreadable: tuple[str, ...] = ()
    """Znodes of unreadable orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Results of the last audit and of fsck, and ledgers that need an operator."""

    audit: AuditRecord | None = None
    """The last completed audit, without ledgers that are readable or deleted by now."""
    fsck: Summary | None = None
    """The last run of fsck."""
    fsck_closer: Summary | None = None
    """An earlier run at a closer level that found something wrong, if no run at that level
    followed."""
    placement: CheckRun | None = None
    """The last complete run of the placement check."""
    unreadable_records: tuple[UnreadableRecord, ...] = ()
    """Records of bookmender that cannot be read, without orders."""
    unproven: tuple[int, ...] = ()
    """Ledgers whose end could not be proven, marked or not."""

    @property
    def fsck_runs(self) -> tuple[Summary, ...]:
        return tuple(run for run in (self.fsck, self.fsck_closer) if run is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The whole state. ``taken_ms``: wall clock at the end of the reading. ``leader_state``: what
    the leader recorded. ``copying``: by this host's settings where no order says else."""

    taken_ms: int = 0
    services: Services = field(default_factory=Services)
    bookies: BookieStates = field(default_factory=BookieStates)
    queue: QueueState = field(default_factory=QueueState)
    orders: ClusterOrders = field(default_factory=ClusterOrders)
    leader_state: LeaderState = field(default_factory=LeaderState)
    reports: Reports = field(default_factory=Reports)
    copying: CopyingRecord = UNKNOWN_PACE
    progress: RepairProgress | None = None
    """What the leader measured last. None: nothing, or it is older than the queue."""
    archive: ArchiveStatus | None = None
    """None: it is not enabled."""
    notify_servers: tuple[ServerRecord, ...] = ()
    feed_stall: FeedStall | None = None
    """Why the change feed is stalled; None: it is not, or is disabled."""

    @property
    def is_map_loading(self) -> bool:
        """True if a bookmender leader may still find under-replicated ledgers, because it has not
        read all metadata. Nothing is known about a Java leader."""
        ledger_map = self.leader_state.ledger_map
        return self.services.leader_node is not None and (
            ledger_map is None or not (ledger_map.is_complete or ledger_map.hidden)
        )

    @property
    def is_whole(self) -> bool:
        """True if every ledger has all its copies, as far as metadata and checks tell."""
        ledger_map = self.leader_state.ledger_map
        return (
            self.services.leader_node is not None
            and ledger_map is not None
            and ledger_map.is_complete
            and not ledger_map.unreadable_count
            and self.bookies.is_any_registered
            and not self.queue.total
            and not self.named_unregistered
            and not self.bookies.reformatted
            and not self.reports.unproven
            and not any(run.wrong for run in self.reports.fsck_runs)
        )

    @property
    def lost_with_ledgers(self) -> tuple[BookieId, ...]:
        """Lost bookies that ledgers name, or may name."""
        return self._named(self.bookies.lost)

    @property
    def named_in_maintenance(self) -> tuple[BookieId, ...]:
        """Bookies absent for maintenance that ledgers name, or may name."""
        return self._named(row.bookie for row in self.bookies.in_maintenance)

    @property
    def named_unregistered(self) -> tuple[BookieId, ...]:
        """Bookies that are not registered, and that ledgers name or may name."""
        others = (*self.bookies.lost, *self.bookies.absent)
        return (*self.named_in_maintenance, *self._named(others))

    def _named(self, bookies: Iterable[BookieId]) -> tuple[BookieId, ...]:
        return tuple(b for b in bookies if not self.leader_state.is_named_by_none(b))

    @property
    def marking_obstacle(self) -> str:
        """Return why ledgers of a lost or reformatted bookie are not marked; empty if they will
        be."""
        if self.orders.hold is not None:
            return "a safety hold is in force"
        if self.orders.is_disabled:
            return "auto-recovery is disabled"
        if self.services.leader is None:
            return "no auditor is running"
        return "the leader has not read all ledger metadata yet" if self.is_map_loading else ""
