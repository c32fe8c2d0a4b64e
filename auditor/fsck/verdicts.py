"""What is said of a ledger: a grade by its entry that is worst off, findings beside it, and the evidence."""

import enum
from dataclasses import dataclass

from ledgers.metadata import BookieId


class Grade(enum.Enum):
    """By the entry that is worst off. Its value stands in results: never change one."""

    LOST = "lost"
    """No good copy."""
    AT_RISK = "at_risk"
    """One good copy, where the write quorum is above one."""
    DEGRADED = "degraded"
    """Fewer good copies than the write quorum."""
    UNKNOWN = "unknown"
    """Too few copies were answered for to say anything better."""
    WHOLE = "whole"
    """As many good copies as the write quorum."""


class Finding(enum.Enum):
    """What was noticed, and what a grade rests on. Its value stands in results: never change one."""

    MISSING = "missing"
    """A bookie says that it does not have entries that it should have."""
    BAD_DIGEST = "bad_digest"
    READ_ERROR = "read_error"
    """Its bookie answered twice with a read error."""
    NOT_ANSWERED = "not_answered"
    """Nobody answered for a copy: it is unknown, never missing."""
    BOOKIE_GONE = "bookie_gone"
    """The bookie is not registered."""
    ACK_QUORUM_ONLY = "ack_quorum_only"
    """Entries of an earlier fragment with at least the ack quorum of copies, as is legal."""
    MISPLACED = "misplaced"
    """The ensemble breaks the placement policy."""
    STRAY = "stray"
    """A former member has copies; where the recorded ones are missing, they are the cure."""
    SUSPECT = "suspect"
    """Copies with right digests whose payload or length differ."""
    IDLE_OPEN = "idle_open"
    UNREADABLE_METADATA = "unreadable_metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation. ``first_entry_id`` to ``last_entry_id``, both included; -1 where it is of no entries.

    ``code``: what the bookie answered, or what was seen, in one word; ``detail`` for people.
    """

    finding: Finding
    bookie: BookieId | None = None
    first_entry_id: int = -1
    last_entry_id: int = -1
    entry_count: int = 0
    """Of the entries between, those that it is about."""
    code: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentVerdict:
    """``copies_least``: known good copies of its worst entry. ``last_entry_id`` -1: it holds none (yet)."""

    first_entry_id: int
    last_entry_id: int
    ensemble: tuple[BookieId, ...]
    grade: Grade
    copies_least: int
    rests_on_unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerVerdict:
    """One ledger's row. ``findings`` without repetition, in the order above; ``evidence`` is bounded.

    ``rests_on_unknown``: some copy was not answered for, so that the truth may be better, not worse.
    """

    ledger_id: int
    grade: Grade
    findings: tuple[Finding, ...] = ()
    rests_on_unknown: bool = False
    evidence: tuple[Evidence, ...] = ()
    evidence_left_out: int = 0
    fragments: tuple[FragmentVerdict, ...] = ()
    state: str = ""
    """``open``, ``in_recovery``, ``closed``; empty where the metadata cannot be read."""
    length: int = 0
    last_entry_id: int = -1
    metadata_version: int = -1
    """The znode's."""
    mtime_ms: int = 0
    """When the metadata was written last."""
    entries_read: int = 0
    bytes_read: int = 0
    checked_ms: int = 0
