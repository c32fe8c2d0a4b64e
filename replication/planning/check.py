"""Which copies of a ledger are missing: from its metadata, the bookies' states and their answers.

What to ask of whom, ``questions`` say; ``judge``, what the answers mean. Answers are three-valued
(rule S5): only an explicit no is a missing copy, a mismatched digest is one as well (rule S7), and
whatever was not answered is unknown.
"""

import enum
import random
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from ledgers.bookies import Bookies
from ledgers.entry import EntryDigest
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import StripedEntries
from replication.planning.entry_runs import NO_ENTRIES, EntryRuns, merged
from replication.planning.questions import GAVE_ALL, Refused, put_questions, questions


class Verdict(enum.Enum):
    """What is known of one bookie index of one fragment."""

    GOOD = "good"
    LOST = "lost"
    """Its bookie is neither writable nor read-only: every entry of the index misses a copy."""
    AWAY = "away"
    """Its bookie is gone or silent on purpose: within a maintenance window it is not missed."""
    DRAINING = "draining"
    """Its bookie is to be emptied: it counts as missing although it serves (rule S16)."""
    MISSING = "missing"
    """Its bookie is there, and explicitly lacks entries, or holds them damaged, or says that it
    cannot read them."""
    UNKNOWN = "unknown"
    """Its bookie is there and did not say."""


class IndexFinding(Struct, frozen=True, kw_only=True):
    """The verdict on one bookie index. ``absent``, ``mismatched``, ``unreadable``: entries, when
    MISSING."""

    fragment: Fragment
    index: int
    verdict: Verdict
    absent: EntryRuns = NO_ENTRIES
    mismatched: EntryRuns = NO_ENTRIES
    unreadable: EntryRuns = NO_ENTRIES

    @property
    def damaged(self) -> EntryRuns:
        """What is there, and of no use."""
        return merged(self.mismatched, self.unreadable)

    @property
    def bad_count(self) -> int:
        return len(self.absent) + len(self.mismatched) + len(self.unreadable)

    def is_bad(self, entry_id: int) -> bool:
        return any(entry_id in bad for bad in (self.absent, self.mismatched, self.unreadable))

    @property
    def bookie(self) -> BookieId:
        return self.fragment.ensemble[self.index]

    @property
    def entries(self) -> StripedEntries:
        """All entries that the index stores of the fragment."""
        return self.fragment.entries_of(self.index)


def judge(
    fragments: Sequence[Fragment],
    refusals: Mapping[BookieId, Refused],
    *,
    available: Collection[BookieId],
) -> tuple[IndexFinding, ...]:
    """One finding for every bookie index of every fragment, in their order.

    ``refusals``: of every bookie that was asked.
    """
    return tuple(
        _judge_index(fragment, index, refusals.get(bookie), is_available=bookie in available)
        for fragment in fragments
        for index, bookie in enumerate(fragment.ensemble)
    )


def _judge_index(
    fragment: Fragment, index: int, refused: Refused | None, *, is_available: bool
) -> IndexFinding:
    def finding(verdict: Verdict) -> IndexFinding:
        return IndexFinding(fragment=fragment, index=index, verdict=verdict)

    if not is_available:
        return finding(Verdict.LOST)
    if refused is GAVE_ALL:  # nearly always, and worth a look at its entries saved
        return finding(Verdict.GOOD)
    entries = fragment.entries_of(index)
    if not entries:
        return finding(Verdict.GOOD)
    if refused is None or refused.is_silent:
        return finding(Verdict.UNKNOWN)
    # Whatever was asked of the bookie between the fragment's ends is this index's: a bookie stands
    # in an ensemble once.
    first, last = entries[0], entries[-1]
    if refused.unknown.between(first, last):
        return finding(Verdict.UNKNOWN)
    absent, mismatched, unreadable = (
        runs.between(first, last)
        for runs in (refused.absent, refused.mismatched, refused.unreadable)
    )
    if not absent and not mismatched and not unreadable:
        return finding(Verdict.GOOD)
    return IndexFinding(
        fragment=fragment,
        index=index,
        verdict=Verdict.MISSING,
        absent=absent,
        mismatched=mismatched,
        unreadable=unreadable,
    )


async def check(
    fragments: Sequence[Fragment],
    *,
    bookies: Bookies,
    digest: EntryDigest,
    available: Collection[BookieId],
    distrusted: Collection[BookieId],
    entry_bytes: int,
    share: float = 0.0,
    rng: random.Random | None = None,
) -> tuple[IndexFinding, ...]:
    """Ask the bookies and judge. What one does not answer is a finding, never an error.

    ``entry_bytes``: a guess at the stored size of an entry, by which reads in flight are weighed
    (rule S10). The rest as in ``questions``.
    """
    asked = questions(fragments, available=available, distrusted=distrusted, share=share, rng=rng)
    refusals = await put_questions(
        fragments, asked, bookies=bookies, digest=digest, entry_bytes=entry_bytes
    )
    findings = judge(fragments, refusals, available=available)
    suspects = frozenset(f.bookie for f in findings if f.verdict is Verdict.MISSING)
    suspects -= frozenset(distrusted)
    if not suspects or share >= 1:
        return findings
    # Something is missing: only reading the whole index tells what else is.
    asked = questions(fragments, available=suspects, distrusted=suspects)
    refusals |= await put_questions(
        fragments, asked, bookies=bookies, digest=digest, entry_bytes=entry_bytes
    )
    return judge(fragments, refusals, available=available)
