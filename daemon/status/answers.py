"""The answers of ``bookmender status``, and of the API about the same state."""

from typing import Any, Literal

from daemon.answers import Answer
from daemon.operations.bookies import BookieRecord
from daemon.operations.checks import RunRecord
from daemon.operations.holds import HoldRecord
from daemon.status.records import (
    ForeignLockRecord,
    LiveNodeRecord,
    NoteRecord,
    PendingLossRecord,
    UnprovenEndsRecord,
)
from ledgers.model import BookieId

Severity = Literal["ERROR", "WARN", "UNKNOWN", "INFO"]
"""ERROR: data is unavailable, or nothing improves without an operator. WARN: something is wrong.
The daemons work on it, or an operator should act soon. UNKNOWN: ``status`` cannot tell whether
something is wrong. INFO: a fact that is no problem, such as an ordered maintenance."""
Health = Literal["OK", "UNKNOWN", "WARN", "ERROR"]


class ConditionRecord(Answer, frozen=True, kw_only=True):
    """One condition that holds."""

    code: str
    """Stable name."""
    severity: Severity
    fact: str
    """One line with numbers and names."""
    action: str
    """One line that says what to do."""
    data: dict[str, Any]
    """The numbers and names of ``fact``. Its keys depend on the code."""
    muted_until_ms: int | None = None
    """Until then it does not count for the health, the exit code, metrics and alerts. null: it is
    not muted."""


class MuteRecord(Answer, frozen=True, kw_only=True):
    """An operator muted a condition. It counts nevertheless while it is more severe, or about
    something else, than it was then."""

    code: str
    since_ms: int
    until_ms: int
    by: str
    """User and host."""
    reason: str


class AbsentInMaintenance(Answer, frozen=True, kw_only=True):
    absent: list[str]
    """Bookies that are absent in their maintenance window."""
    until_ms: int | None
    """End of the last of these windows."""


class BookiesByState(Answer, frozen=True, kw_only=True):
    writable: list[str]
    read_only: list[str]
    """Registered, as ``writable``."""
    lost: list[str]
    """Absent longer than the recovery delay. Empty while no bookie is registered."""
    absent: list[str]
    """Not registered, and not known to be lost."""
    reformatted: list[str]
    """Reformatted, and not processed by the leader yet."""
    in_maintenance: AbsentInMaintenance


class QueueCounts(Answer, frozen=True, kw_only=True):
    total: int
    """Ledgers in both queues."""
    marked: int
    """Ledgers in the queue shared with Java: under-replicated."""
    private: int
    """Ledgers only in bookmender's private queue: drains, repairs by hand, damage that Java does
    not see."""
    private_damaged: int
    """Ledgers of ``private`` with damage that Java does not see."""
    locked: int
    """Queued ledgers that a worker has locked."""
    by_missing_count: dict[str, int]
    """Shared queue: number of ledgers by number of missing bookies."""
    by_missing_bookie: dict[str, int]
    """Shared queue: number of ledgers by missing bookie."""
    waiting_for_maintenance_by_missing_bookie: dict[str, int]
    """The same, but only ledgers that wait for a maintenance window to end."""
    by_cause: dict[str, int]
    """Shared queue: number of ledgers by cause: ``lost``, ``reformatted``, the name of a check,
    ``unknown`` (another auditor)."""
    foreign_locks: list[ForeignLockRecord]
    """Locks that no bookmender node holds, oldest first."""


class SampleRecord(Answer, frozen=True, kw_only=True):
    """The queue at one moment."""

    at_ms: int
    ledgers: int
    bytes: int


class ProgressRecord(Answer, frozen=True, kw_only=True):
    """How far the repairs are. Each queued ledger counts as ``copying``, ``next``, ``waiting`` or
    ``needs_help``. The leader measures bytes and times every few seconds."""

    queued: int
    copying: int
    """A worker has locked them."""
    next: int
    """Neither locked nor postponed."""
    waiting: int
    """Postponed, and time helps."""
    needs_help: int
    """Postponed, and time alone does not help."""
    bytes_left: int | None
    """About how many bytes must be copied, to repair and to drain. null: unknown."""
    bytes_per_s: int | None
    """By the last minutes. null: unknown."""
    left_s: int | None
    """About how long it will take. null: unknown."""
    samples: list[SampleRecord]
    """Since the queue was last empty, at most 120, the oldest first. Empty while Java leads."""


class WaitingRecord(Answer, frozen=True, kw_only=True):
    """Queued ledgers that a worker postponed."""

    count: int
    ledgers: list[NoteRecord]
    """The first of them, at most 1000."""
    overtaken: list[int]
    """Waiting ledgers that are due, because a bookie registered or an order changed after the last
    try."""


class LedgerMapCounts(Answer, frozen=True, kw_only=True):
    is_complete: bool
    ledgers: int
    """Number of ledgers when the map was built, or so far."""
    unreadable: int
    read: int
    """Progress: number of ledgers of ``expected``."""
    expected: int | None
    written_ms: int


class RunningCheckRecord(RunRecord, frozen=True, kw_only=True):
    check: str


class AbsentNamedBy(Answer, frozen=True, kw_only=True):
    ledgers: dict[str, int]
    """Number of ledgers that name each absent bookie."""
    is_complete: bool
    """All ledgers were counted."""
    counted_age_s: float
    """Age of the count."""


class UnavailableRecord(Answer, frozen=True, kw_only=True):
    count: int
    """Ledgers with entries without a copy on a registered bookie."""
    first: list[int]
    """Their first ids."""
    restored_by: dict[str, int]
    """By absent bookie: how many of them become available if this bookie alone returns."""


class LeaderStateRecord(Answer, frozen=True, kw_only=True):
    """What a bookmender leader recorded."""

    ledger_map: LedgerMapCounts | None
    """null: not recorded."""
    recovery_delay_s: int
    """Recovery delay in force."""
    recovery_delay_error: str | None
    """Why ``lostBookieRecoveryDelay`` cannot be read."""
    pending_losses: list[PendingLossRecord]
    running_checks: list[RunningCheckRecord]
    absent_named_by: AbsentNamedBy
    unavailable_ledgers: UnavailableRecord | None
    """null: not counted."""


class CopyingRecord(Answer, frozen=True, kw_only=True):
    """The pace of copying, by the limits in force and the published activity of clients."""

    speed: Literal["full", "yielding"]
    """``yielding`` at bookies with active clients or unknown activity."""
    yields_to_writers: bool
    """Copies yield to clients (``bookmender limits``)."""
    is_client_activity_known: bool
    """The leader publishes the activity of clients."""
    active_bookies: list[BookieId]
    """Bookies with active clients."""
    unknown_bookies: list[BookieId]
    """Bookies whose activity is unknown."""
    copying_nodes: int
    """Number of nodes that copy."""
    bytes_per_s: int
    """Rate limit of each node. 0: none."""
    entries_per_s: int


class AuditSummary(Answer, frozen=True, kw_only=True):
    finished_ms: int
    ledgers: int
    marks: int
    unreadable: int
    unreadable_ledgers: list[int]
    """The first 100."""


class StatusRecord(Answer, frozen=True, kw_only=True):
    """The state of the cluster's recovery, as ``bookmender status -o json`` prints it."""

    health: Health
    exit_code: int
    """Exit code of the command."""
    is_whole: bool
    """Every ledger has all its copies, as far as metadata and checks tell: the leader knows all
    ledgers, none is queued, and none names a bookie that is not registered."""
    conditions: list[ConditionRecord]
    """Most severe first; muted ones last."""
    mutes: list[MuteRecord]
    """The mutes in force, whether or not their conditions hold."""
    taken_ms: int
    """When the state was read."""
    leader: str | None
    """null: no auditor leads."""
    leader_node: LiveNodeRecord | None
    """The leader, if it is a bookmender node."""
    nodes: list[LiveNodeRecord]
    """The roles of bookmender nodes: ``host``, ``pid``, ``role``, ``bookie_id``, ``started_ms``."""
    bookies: BookiesByState
    ordered_bookies: list[BookieRecord]
    """Bookies with a drain order or a maintenance window."""
    hold: HoldRecord | None
    """The safety hold in force."""
    is_disabled: bool
    """Auto-recovery is disabled."""
    disabled_until_ms: int | None
    """Then the leader enables it again. null: not by itself."""
    unreadable_orders: list[str]
    """Znodes of unreadable orders."""
    unreadable_records: list[str]
    """Znodes of other unreadable records of bookmender."""
    progress: ProgressRecord
    """How far the repairs are."""
    queue: QueueCounts
    """Queued ledgers."""
    waiting: WaitingRecord
    """Queued ledgers that a worker postponed."""
    leader_state: LeaderStateRecord
    """What a bookmender leader recorded."""
    copying: CopyingRecord
    """The pace of copying."""
    last_audit: AuditSummary | None
    """The last completed audit."""
    last_fsck: dict[str, Any] | None
    """Summary of the last fsck run. ``marked``: ledgers marked for repair since."""
    closer_fsck: dict[str, Any] | None
    """An earlier run at a closer level that found something wrong, if no run at that level
    followed."""
    unproven_ends: UnprovenEndsRecord
    """Ledgers whose last entry cannot be proven."""


class ConditionsRecord(Answer, frozen=True, kw_only=True):
    health: Health
    taken_ms: int
    conditions: list[ConditionRecord]


class BlockedRecord(Answer, frozen=True, kw_only=True):
    """Queued ledgers that time alone does not help. ``ledgers``: at most 1000."""

    count: int
    by_reason: dict[str, int]
    taken_ms: int
    ledgers: list[NoteRecord]
