"""What is said of a ledger: a grade by its entry that is worst off, findings beside it, and the
evidence."""

import enum
from dataclasses import dataclass

from ledgers.metadata import BookieId


class Grade(enum.Enum):
    """By the entry that is worst off. Its value stands in results: never change one.

    A copy that a level does not look at counts as good, for as long as what it looked at of that
    bookie's was. One that was not answered for may be good or not: it makes no grade worse than
    ``UNKNOWN``, and none better.
    """

    LOST = "lost"
    """No good copy, and every recorded one was answered for; nor on a former member, as far as
    these answered."""
    AT_RISK = "at_risk"
    """One copy at most, where the write quorum is above one; or none but a former member's."""
    DEGRADED = "degraded"
    """Fewer copies than the write quorum."""
    UNKNOWN = "unknown"
    """Copies were not answered for, and nothing is known to be wrong."""
    WHOLE = "whole"
    """As many good copies as the write quorum."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return _RANKS[self]


_RANKS = {grade: rank for rank, grade in enumerate(Grade)}


class Finding(enum.Enum):
    """What was noticed, and what a grade rests on. Its value stands in results: never change
    one."""

    MISSING = "missing"
    """A bookie says that it does not have entries that it should have."""
    BAD_DIGEST = "bad_digest"
    READ_ERROR = "read_error"
    """Its bookie answered twice with a read error."""
    NOT_ANSWERED = "not_answered"
    """Nobody answered for a copy: it is unknown, never missing."""
    END_UNPROVEN = "end_unproven"
    """Of a ledger that is not closed: too many of its last bookies were wiped for a recovery to
    prove where it ends."""
    BOOKIE_GONE = "bookie_gone"
    """The bookie is not registered: its copies are missed, but that they are lost is not known."""
    ACK_QUORUM_ONLY = "ack_quorum_only"
    """Entries of a fragment that was, or is, written without some bookie, as is legal with the ack
    quorum."""
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
    """One observation. ``first_entry_id`` to ``last_entry_id``, both included; -1 where it is of no
    entries.

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
    """``copies_least``: good copies of its worst entry, as far as known. It is empty where
    ``last_entry_id`` is below ``first_entry_id``; of an open one, ``last_entry_id`` is the last
    that is known to be acknowledged."""

    first_entry_id: int
    last_entry_id: int
    ensemble: tuple[BookieId, ...]
    grade: Grade
    copies_least: int
    rests_on_unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerVerdict:
    """One ledger's row. ``findings`` without repetition, in the order above; ``evidence`` is
    bounded.

    ``rests_on_unknown``: some copy was not answered for (of a bookie that is gone, too), so that
    the truth may be another: worse than the grade, or, with a bookie that is gone, better.
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
    """Of a ledger that is not closed, the last that is known to be acknowledged."""
    is_tail_unseen: bool = False
    """Whether what comes after that one, if anything does, was left to the writer, and no copy of
    it looked at."""
    metadata_version: int = -1
    """The znode's."""
    mtime_ms: int = 0
    """When the metadata was written last."""
    entries_read: int = 0
    bytes_read: int = 0
    checked_ms: int = 0

    @property
    def is_wrong(self) -> bool:
        """Whether somebody should do something: exit code 1. Copies that are legally missing are no
        reason."""
        if Finding.SUSPECT in self.findings:
            return True
        if self.grade in (Grade.LOST, Grade.AT_RISK):
            return True
        return self.grade is Grade.DEGRADED and bool(DAMAGE.intersection(self.findings))

    @property
    def kept_away(self) -> frozenset[BookieId]:
        """Bookies that are gone, and with them all good copies of some entries: they are to be
        started.

        None where the loss is known, and where some other bookie may have copies: it did not
        answer, is a former member, or has what our key does not fit.
        """
        if self.grade is Grade.LOST or _MAY_HAVE_COPIES.intersection(self.findings):
            return frozenset()
        if any(each.code == WRONG_KEY for each in self.evidence):
            return frozenset()
        return frozenset(
            each.bookie
            for fragment in self.fragments
            for each in self.evidence
            if fragment.copies_least == 0
            and each.finding is Finding.BOOKIE_GONE
            and each.bookie in fragment.ensemble
            and each.first_entry_id <= fragment.last_entry_id
            and each.last_entry_id >= fragment.first_entry_id
        )

    @property
    def seems_wrong(self) -> bool:
        """Whether it is worth a second look, before anything is said of it."""
        return self.grade is not Grade.WHOLE or bool(_DOUBTFUL.intersection(self.findings))


DAMAGE = frozenset({Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR, Finding.BOOKIE_GONE})
"""What makes a ledger degraded that it should not be."""
WRONG_KEY = "wrong_key"
"""Code of evidence that no entry fits the key that ledgers without one are read by (rule S7)."""
_MAY_HAVE_COPIES = frozenset({Finding.NOT_ANSWERED, Finding.STRAY})
_DOUBTFUL = frozenset({Finding.SUSPECT, Finding.IDLE_OPEN, Finding.UNREADABLE_METADATA})
"""What a second look may make go away, whatever the grade."""
