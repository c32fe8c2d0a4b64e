"""The graded scale, for a single entry: what is known of its copies, and the grade that this makes.

Pure. Of its ``write_quorum`` copies each is good, bad, excused, missed with its bookie, or
unanswered for.
"""

from dataclasses import dataclass

from auditor.fsck.verdicts import Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCopies:
    """Of one entry, or of any number that are alike. What is none of these is good, or presumed to
    be."""

    write_quorum: int
    ack_quorum: int
    bad: int = 0
    """Missing, damaged, or refused with a read error twice."""
    excused: int = 0
    """Missing, on a bookie that the writer may have gone on without."""
    gone: int = 0
    """On bookies that are not registered: missed, although nobody knows that they are lost."""
    silent: int = 0
    """Not answered for."""
    is_elsewhere: bool = False
    """A bookie that the metadata does not name for it has a good copy."""

    @property
    def good(self) -> int:
        return self.write_quorum - self.bad - self.excused - self.gone - self.silent

    @property
    def is_legal(self) -> bool:
        """Whether only copies are missing that the ack quorum can do without."""
        standing = self.good + self.silent
        return self.excused > 0 and not self.bad and not self.gone and standing >= self.ack_quorum

    @property
    def grade(self) -> Grade:
        """What was not answered for makes a loss neither certain nor excused (rule S5).

        A bookie that is gone leaves an entry with fewer copies, but takes the last one with it only
        for all that is known.
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
