"""The scale of grades for a single entry: what is known of its copies, and the resulting grade.
Pure.

Each of the ``write_quorum`` copies is good, bad, excused, on an unregistered bookie, or unanswered.
"""

from dataclasses import dataclass

from auditor.fsck.verdicts import Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCopies:
    """Counts of the copies of one entry, or of many entries alike. A copy in no count is good, or
    presumed good."""

    write_quorum: int
    ack_quorum: int
    bad: int = 0
    """Missing, damaged, or refused twice with a read error."""
    excused: int = 0
    """Missing on a bookie whose copy the writer did not need."""
    gone: int = 0
    """On bookies that are not registered. These copies are not known to be lost."""
    silent: int = 0
    """Not answered for."""
    is_elsewhere: bool = False
    """True if a bookie that the metadata does not name for the entry has a good copy."""

    @property
    def good(self) -> int:
        return self.write_quorum - self.bad - self.excused - self.gone - self.silent

    @property
    def is_legal(self) -> bool:
        """True if copies are missing, but only such as the ack quorum allows."""
        standing = self.good + self.silent
        return self.excused > 0 and not self.bad and not self.gone and standing >= self.ack_quorum

    @property
    def grade(self) -> Grade:
        """The entry's grade. Unanswered copies make a loss neither certain nor legal (rule S5).

        An unregistered bookie lowers the number of copies. But the entry does not count as lost
        while that bookie may still have the last one.
        """
        if self.good == self.write_quorum:
            return Grade.WHOLE
        if self.is_legal:
            return Grade.UNKNOWN if self.silent else Grade.DEGRADED
        standing = self.good + self.silent
        is_known_bad = self.bad + self.excused > 0
        if standing + self.gone == 0:
            return Grade.AT_RISK if self.is_elsewhere else Grade.LOST
        if not is_known_bad and (self.gone == 0 or self.good == 0):
            return Grade.UNKNOWN
        return Grade.AT_RISK if standing <= 1 else Grade.DEGRADED
