"""The types of the API's answers. ``openapi`` derives the schemas from them.

Keys that end in ``_ms`` are wall-clock milliseconds since 1970, keys that end in ``_s`` are
seconds. ``null`` means unknown or not applicable. The status has the keys of ``bookmender status``,
which docs/status.md describes; bookies, queue and checks have those of the commands in
docs/json.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from daemon.answers import Answer as Record
from daemon.operations.bookies import BookieRecord as BookieRecord
from daemon.operations.bookies import BookiesRecord as BookiesRecord
from daemon.operations.checks import ChecksRecord as ChecksRecord
from daemon.operations.checks import RunRecord
from daemon.operations.holds import HoldRecord
from daemon.operations.holds import HoldStateRecord as HoldStateRecord
from daemon.operations.switch import SwitchRecord as SwitchRecord
from daemon.words import DURATION_MAX_S, REASON_LENGTH_MAX
from replication.reasons import Blocked, Facts


class ErrorRecord(Record, frozen=True, kw_only=True):
    """Why a request failed, and what to do."""

    error: str


# --- Node and health ------------------------------------------------------------------------------


class RoleRecord(Record, frozen=True, kw_only=True):
    """One role of this node."""

    role: str
    """worker, auditor or observer"""
    is_alive: bool
    """Its event loop answered lately."""
    silent_s: float | None
    """For how long the event loop has not answered; null: its thread has ended."""
    is_connected: bool
    """It has a ZooKeeper session, and is connected."""
    is_working: bool
    is_leader: bool


class HealthRecord(Record, frozen=True, kw_only=True):
    is_ok: bool
    problem: str | None
    roles: list[RoleRecord]


class BacklogRecord(Record, frozen=True, kw_only=True):
    """What is left to repair, as the leader measured it last."""

    by_copies_left: dict[str, int]
    missing_bytes: int
    marked: int
    private: int
    waiting: int
    oldest_mark_ms: int | None
    remaining_s: float | None


class NodeRecord(Record, frozen=True, kw_only=True):
    """This node."""

    version: str
    host: str
    pid: int
    mode: str
    """repair or observe"""
    cluster: str
    """The metadata service URI."""
    started_ms: int
    is_leader: bool
    backlog: BacklogRecord | None
    """null unless this node leads."""
    roles: list[RoleRecord]


# --- Status ---------------------------------------------------------------------------------------

Severity = Literal["ERROR", "WARN", "UNKNOWN", "INFO"]
Health = Literal["OK", "UNKNOWN", "WARN", "ERROR"]


class ConditionRecord(Record, frozen=True, kw_only=True):
    """One condition that holds."""

    code: str
    severity: Severity
    fact: str
    action: str
    data: dict[str, Any]


class LiveNodeRecord(Record, frozen=True, kw_only=True):
    """A role of a bookmender node, or of a command that holds locks."""

    host: str
    pid: int
    role: str
    bookie_id: str | None
    started_ms: int


class AbsentInMaintenance(Record, frozen=True, kw_only=True):
    absent: list[str]
    until_ms: int | None


class BookiesByState(Record, frozen=True, kw_only=True):
    writable: list[str]
    read_only: list[str]
    lost: list[str]
    absent: list[str]
    reformatted: list[str]
    in_maintenance: AbsentInMaintenance


class ForeignLockRecord(Record, frozen=True, kw_only=True):
    ledger_id: int
    holder: str | None
    since_ms: int


class QueueCounts(Record, frozen=True, kw_only=True):
    total: int
    marked: int
    private: int
    private_damaged: int
    locked: int
    by_missing_count: dict[str, int]
    by_missing_bookie: dict[str, int]
    waiting_for_maintenance_by_missing_bookie: dict[str, int]
    by_cause: dict[str, int]
    foreign_locks: list[ForeignLockRecord]


class NoteRecord(Record, frozen=True, kw_only=True):
    """Why a worker postponed a ledger."""

    ledger_id: int
    reason: str
    facts: Facts
    besides: list[Blocked]
    detail: str
    node: str
    since_ms: int
    tries: int
    next_try_ms: int
    grace_until_ms: int


class WaitingRecord(Record, frozen=True, kw_only=True):
    count: int
    ledgers: list[NoteRecord]
    overtaken: list[int]


class LedgerMapCounts(Record, frozen=True, kw_only=True):
    is_complete: bool
    ledgers: int
    unreadable: int
    read: int
    expected: int | None
    written_ms: int


class PendingLossRecord(Record, frozen=True, kw_only=True):
    bookie: str
    since_ms: int
    lost_ms: int
    is_excused: bool


class RunningCheckRecord(RunRecord, frozen=True, kw_only=True):
    check: str


class AbsentNamedBy(Record, frozen=True, kw_only=True):
    ledgers: dict[str, int]
    is_complete: bool
    counted_age_s: float


class UnavailableRecord(Record, frozen=True, kw_only=True):
    count: int
    first: list[int]
    restored_by: dict[str, int]


class LeaderStateRecord(Record, frozen=True, kw_only=True):
    ledger_map: LedgerMapCounts | None
    recovery_delay_s: int
    recovery_delay_error: str | None
    pending_losses: list[PendingLossRecord]
    running_checks: list[RunningCheckRecord]
    absent_named_by: AbsentNamedBy
    unavailable_ledgers: UnavailableRecord | None


class CopyingRecord(Record, frozen=True, kw_only=True):
    speed: Literal["full", "yielding"]
    yields_to_writers: bool
    is_client_activity_known: bool
    active_bookies: list[str]
    unknown_bookies: list[str]
    copying_nodes: int
    bytes_per_s: int
    entries_per_s: int


class AuditSummary(Record, frozen=True, kw_only=True):
    finished_ms: int
    ledgers: int
    marks: int
    unreadable: int
    unreadable_ledgers: list[int]


class UnprovenEndsRecord(Record, frozen=True, kw_only=True):
    count: int
    ledgers: list[int]


class StatusRecord(Record, frozen=True, kw_only=True):
    """The state of the cluster's recovery, as ``bookmender status -o json`` prints it."""

    health: Health
    exit_code: int
    conditions: list[ConditionRecord]
    taken_ms: int
    leader: str | None
    leader_node: LiveNodeRecord | None
    nodes: list[LiveNodeRecord]
    bookies: BookiesByState
    ordered_bookies: list[BookieRecord]
    hold: HoldRecord | None
    is_disabled: bool
    unreadable_orders: list[str]
    unreadable_records: list[str]
    queue: QueueCounts
    waiting: WaitingRecord
    leader_state: LeaderStateRecord
    copying: CopyingRecord
    last_audit: AuditSummary | None
    last_fsck: dict[str, Any] | None
    closer_fsck: dict[str, Any] | None
    unproven_ends: UnprovenEndsRecord


# --- Parts of the state ---------------------------------------------------------------------------


class ConditionsRecord(Record, frozen=True, kw_only=True):
    health: Health
    taken_ms: int
    conditions: list[ConditionRecord]


class BlockedRecord(Record, frozen=True, kw_only=True):
    """Queued ledgers that time alone does not help. ``ledgers``: at most 1000."""

    count: int
    by_reason: dict[str, int]
    taken_ms: int
    ledgers: list[NoteRecord]


# --- Changes --------------------------------------------------------------------------------------

Seconds = Annotated[int, Meta(ge=1, le=DURATION_MAX_S)]
ReasonText = Annotated[str, Meta(max_length=REASON_LENGTH_MAX, description="One line of text")]


class HoldOrderRecord(Record, frozen=True, kw_only=True):
    """``for_s``: length from now on; null: until it is ended."""

    for_s: Seconds | None = None
    reason: ReasonText = ""


class MaintenanceOrderRecord(Record, frozen=True, kw_only=True):
    """``accept_unavailable``: begin the window although ledgers would become unreadable."""

    for_s: Seconds
    reason: ReasonText = ""
    accept_unavailable: bool = False


class DrainOrderRecord(Record, frozen=True, kw_only=True):
    """``fence_open``: close open ledgers; null: as before, at first no. ``accept_absent``: order
    the drain although the bookie is absent."""

    fence_open: bool | None = None
    accept_absent: bool = False


class ChangedRecord(Record, frozen=True, kw_only=True):
    """``has_changed``: false if it was so before. ``concerns``: what may prevent its effect."""

    has_changed: bool
    concerns: list[str]
