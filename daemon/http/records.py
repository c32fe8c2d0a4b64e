"""The types of the API's answers. ``openapi`` derives the schemas from them.

Keys that end in ``_ms`` are wall-clock milliseconds since 1970, keys that end in ``_s`` are
seconds. ``null`` means unknown or not applicable. ``daemon/status/answers.py`` has the status.
Bookies, queue and checks have the keys of the commands in docs/json.md.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from daemon.answers import Answer as Record
from daemon.operations.bookies import BookieRecord as BookieRecord
from daemon.operations.bookies import BookiesRecord as BookiesRecord
from daemon.operations.checks import ChecksRecord as ChecksRecord
from daemon.operations.holds import HoldStateRecord as HoldStateRecord
from daemon.operations.switch import SwitchRecord as SwitchRecord
from daemon.words import DURATION_MAX_S, REASON_LENGTH_MAX


class ErrorRecord(Record, frozen=True, kw_only=True):
    """Why a request failed, and what to do."""

    error: str
    taken_ms: int | None = None
    """When the cluster was last read for this path; null: never, or that is not what failed."""


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


# --- Parts of the state ---------------------------------------------------------------------------


# --- Changes --------------------------------------------------------------------------------------

Seconds = Annotated[int, Meta(ge=1, le=DURATION_MAX_S)]
ReasonText = Annotated[str, Meta(max_length=REASON_LENGTH_MAX, description="One line of text")]


class HoldOrderRecord(Record, frozen=True, kw_only=True):
    """``for_s``: length from now on; null: until it is ended."""

    for_s: Seconds | None = None
    reason: ReasonText = ""


class DisableOrderRecord(Record, frozen=True, kw_only=True):
    """``for_s``: a bookmender leader enables auto-recovery again after this time; null: nobody
    does."""

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
