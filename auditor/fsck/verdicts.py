"""Verdicts: the grade of a ledger, which its worst entry decides, its findings and the evidence.
Pure.

``EntryCopies`` grades a single entry. Each of its ``write_quorum`` copies is good, bad, excused, on
an absent bookie, or unanswered.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ledgers.model import BookieId


class Grade(enum.Enum):
    """The grade of the worst entry. The values appear in results: never change one.

    At a level that does not read all copies, unread ones count as good while everything that was
    read from that bookie is good. An unanswered copy may be good or bad: alone, it lowers a grade
    no further than ``UNKNOWN``, and it is no proof that data is there.
    """

    LOST = "lost"
    """No good copy is left. Every recorded copy was answered for, and no former member that
    answered has one."""
    AT_RISK = "at_risk"
    """At most one good copy, with a write quorum above one; or a good copy only on a bookie that
    the metadata does not name for the entry."""
    DEGRADED = "degraded"
    """Fewer good copies than the write quorum."""
    UNKNOWN = "unknown"
    """Some copies were not answered for, and nothing is known to be wrong."""
    WHOLE = "whole"
    """Each entry has as many good copies as the write quorum."""

    @property
    def rank(self) -> int:
        """The order of severity: 0 is the worst."""
        return _RANKS[self]


_RANKS = {grade: rank for rank, grade in enumerate(Grade)}


def worst(grades: Iterable[Grade]) -> Grade:
    return min(grades, key=_RANKS.__getitem__)


class Finding(enum.Enum):
    """One kind of finding, the reason of a grade. The values appear in results: never change
    one."""

    MISSING = "missing"
    """A bookie answered that it does not have an entry that it should have."""
    BAD_DIGEST = "bad_digest"
    READ_ERROR = "read_error"
    """The bookie answered twice with a read error."""
    NOT_ANSWERED = "not_answered"
    """The bookie did not answer. The copy is unknown, never missing."""
    END_UNPROVEN = "end_unproven"
    """The ledger is not closed, and too many of its last bookies were reformatted. No recovery can
    prove its end."""
    BOOKIE_GONE = "bookie_gone"
    """The bookie is not registered. Its copies are missing for now, but not known to be lost."""
    ACK_QUORUM_ONLY = "ack_quorum_only"
    """Entries without a copy on some bookie, as the ack quorum allows: the writer did not need that
    copy."""
    MISPLACED = "misplaced"
    """The ensemble breaks the placement policy, or has one bookie twice."""
    STRAY = "stray"
    """A bookie has copies that the metadata does not name it for, for example a former member. If
    the recorded copies are missing, these can replace them."""
    SUSPECT = "suspect"
    """Copies with correct digests differ in payload or length."""
    IDLE_OPEN = "idle_open"
    UNREADABLE_METADATA = "unreadable_metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation about the entries ``first_entry_id`` to ``last_entry_id``, both inclusive; -1
    if it is about no entry.

    ``code``: the bookie's answer or the observation, in one word. ``detail``: text for people.
    """

    finding: Finding
    bookie: BookieId | None = None
    first_entry_id: int = -1
    last_entry_id: int = -1
    entry_count: int = 0
    """Number of entries in this range that the observation is about."""
    code: str = ""
    detail: str = ""


def entries_text(evidence: Evidence) -> str:
    """Return ``entry 3``, ``entries 3 to 5`` or ``2 entries between 3 and 5``; empty if it is about
    no entry."""
    first, last = evidence.first_entry_id, evidence.last_entry_id
    if first < 0:
        return ""
    if first == last:
        return f"entry {first}"
    if evidence.entry_count == last - first + 1:
        return f"entries {first} to {last}"
    unit = "entry" if evidence.entry_count == 1 else "entries"
    return f"{evidence.entry_count:,} {unit} between {first} and {last}"


def evidence_text(evidence: Evidence) -> str:
    """Return ``missing, a:3181, entry 3, no_such_entry``."""
    finding = evidence.finding.value.replace("_", " ")
    parts = [finding, evidence.bookie or "", entries_text(evidence), evidence.code, evidence.detail]
    return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentVerdict:
    """The verdict on one fragment. ``copies_least``: known good copies of its worst entry.

    An empty fragment has a ``last_entry_id`` below ``first_entry_id``. In an open one,
    ``last_entry_id`` is the last entry known to be acknowledged.
    """

    first_entry_id: int
    last_entry_id: int
    ensemble: tuple[BookieId, ...]
    grade: Grade
    copies_least: int
    rests_on_unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerVerdict:
    """One row of the results. ``findings``: without repetition, in the order of ``Finding``.
    ``evidence`` is bounded.

    ``rests_on_unknown``: True if some copy was not answered for, also because its bookie is not
    registered. The true grade may then be worse; with an unregistered bookie, also better.
    """

    ledger_id: int
    grade: Grade
    findings: tuple[Finding, ...] = ()
    rests_on_unknown: bool = False
    evidence: tuple[Evidence, ...] = ()
    evidence_left_out: int = 0
    fragments: tuple[FragmentVerdict, ...] = ()
    state: str = ""
    """``open``, ``in_recovery`` or ``closed``; empty if the metadata is unreadable."""
    length: int = 0
    last_entry_id: int = -1
    """If the ledger is not closed, the last entry known to be acknowledged."""
    is_tail_unseen: bool = False
    """True if entries after ``last_entry_id`` may exist that were left to the writer and not
    checked."""
    metadata_version: int = -1
    """Version of the metadata's znode; -1 if it is unreadable."""
    mtime_ms: int = 0
    """Time of the last write to the metadata."""
    entries_read: int = 0
    bytes_read: int = 0
    checked_ms: int = 0

    @property
    def is_wrong(self) -> bool:
        """True if the ledger needs a repair or an operator (exit code 1). Copies that the ack
        quorum allows to be missing are not wrong."""
        if Finding.SUSPECT in self.findings:
            return True
        if self.grade in (Grade.LOST, Grade.AT_RISK):
            return True
        return self.grade is Grade.DEGRADED and bool(DAMAGE.intersection(self.findings))

    @property
    def bookies_to_start(self) -> frozenset[BookieId]:
        """The absent bookies without which some entry has no good copy. Starting them should
        help.

        Empty if the loss is known, or if another bookie may have copies: one that did not answer, a
        former member, or one whose entries do not match our key.
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
    def needs_recheck(self) -> bool:
        """True if the ledger must be rechecked before anything is reported."""
        return self.grade is not Grade.WHOLE or bool(_RECHECKED.intersection(self.findings))


DAMAGE = frozenset({Finding.MISSING, Finding.BAD_DIGEST, Finding.READ_ERROR, Finding.BOOKIE_GONE})
"""Findings that make a ``DEGRADED`` ledger wrong."""
WRONG_KEY = "wrong_key"
"""Code of the evidence that no entry matches the fallback key, which applies if the metadata holds
none (rule S7)."""
_MAY_HAVE_COPIES = frozenset({Finding.NOT_ANSWERED, Finding.STRAY})
_RECHECKED = frozenset({Finding.SUSPECT, Finding.IDLE_OPEN, Finding.UNREADABLE_METADATA})
"""Findings that a recheck may clear, for any grade."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCopies:
    """Counts of the copies of one entry, or of many entries with equal counts. A copy in no count
    is good, or presumed good."""

    write_quorum: int
    ack_quorum: int
    bad: int = 0
    """Missing, damaged, or refused twice with a read error."""
    excused: int = 0
    """Missing on a bookie whose copy the writer did not need."""
    on_absent: int = 0
    """On bookies that are not registered. These copies are not known to be lost."""
    unanswered: int = 0
    """Not answered for."""
    is_elsewhere: bool = False
    """True if a bookie that the metadata does not name for the entry has a good copy."""

    @property
    def good(self) -> int:
        return self.write_quorum - self.bad - self.excused - self.on_absent - self.unanswered

    @property
    def is_legal(self) -> bool:
        """True if copies are missing, but only such as the ack quorum allows. One copy must be left
        even if the ack quorum is 0."""
        is_excused = self.excused > 0 and not self.bad and not self.on_absent
        return is_excused and self.good + self.unanswered >= max(1, self.ack_quorum)

    @property
    def grade(self) -> Grade:
        """The entry's grade. Unanswered copies make a loss neither certain nor legal (rule S5).

        An absent bookie lowers the number of copies. But the entry does not count as lost
        while that bookie may still have the last one.
        """
        if self.good == self.write_quorum:
            return Grade.WHOLE
        if self.is_legal:
            return Grade.UNKNOWN if self.unanswered else Grade.DEGRADED
        possibly_good = self.good + self.unanswered
        is_known_bad = self.bad + self.excused > 0
        if possibly_good + self.on_absent == 0:
            return Grade.AT_RISK if self.is_elsewhere else Grade.LOST
        if not is_known_bad and (self.on_absent == 0 or self.good == 0):
            return Grade.UNKNOWN
        return Grade.AT_RISK if possibly_good <= 1 else Grade.DEGRADED
