"""Which copies of a ledger are missing: from its metadata, the bookies' states and their answers.

Two pure functions with a reading in between: ``questions`` says what to ask of whom, ``judge`` what
the answers mean. Answers are three-valued (rule S5): only an explicit no is a missing copy, a
mismatched digest is one as well (rule S7), and whatever was not answered is unknown.

The ends (first and last entry that an index stores of a fragment) are asked of every bookie that is
there. Where one of them is missing, or the bookie's identity is younger than the ledger (it may have
been wiped, rule S6), every entry of that index is asked for.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer
from ledgers.entry import EntryDigest
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import StripedEntries


class Verdict(enum.Enum):
    """What is known of one bookie index of one fragment."""

    GOOD = "good"
    LOST = "lost"
    """Its bookie is neither writable nor read-only: every entry of the index misses a copy."""
    MISSING = "missing"
    """Its bookie is there, and explicitly lacks entries, or holds them damaged."""
    UNKNOWN = "unknown"
    """Its bookie is there and did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one bookie index. ``absent`` and ``mismatched``: entry ids, when MISSING."""

    fragment: Fragment
    index: int
    verdict: Verdict
    absent: tuple[int, ...] = ()
    mismatched: tuple[int, ...] = ()

    @property
    def bookie(self) -> BookieId:
        return self.fragment.ensemble[self.index]

    @property
    def entries(self) -> StripedEntries:
        """All entries that the index stores of the fragment."""
        return self.fragment.entries_of(self.index)


Refusals = Mapping[BookieId, Mapping[int, Answer]]
"""Per bookie that was asked, the entries that it did not give, and why; empty when it gave all."""


def questions(
    fragments: Sequence[Fragment],
    *,
    available: Collection[BookieId],
    distrusted: Collection[BookieId],
) -> dict[BookieId, Sequence[Sequence[int]]]:
    """Entry ids to ask of each available bookie: the ends, or all of a distrusted one's."""
    asked: dict[BookieId, list[Sequence[int]]] = {}
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            entries = fragment.entries_of(index)
            if bookie in available and entries:
                ends = sorted({entries[0], entries[-1]})
                asked.setdefault(bookie, []).append(entries if bookie in distrusted else ends)
    return {bookie: tuple(runs) for bookie, runs in asked.items()}


def judge(
    fragments: Sequence[Fragment], refusals: Refusals, *, available: Collection[BookieId]
) -> tuple[Finding, ...]:
    """One finding for every bookie index of every fragment, in their order."""
    return tuple(
        _judge_index(fragment, index, refusals.get(bookie), is_available=bookie in available)
        for fragment in fragments
        for index, bookie in enumerate(fragment.ensemble)
    )


def _judge_index(
    fragment: Fragment,
    index: int,
    refusals: Mapping[int, Answer] | None,
    *,
    is_available: bool,
) -> Finding:
    def finding(verdict: Verdict, *missing: tuple[int, ...]) -> Finding:
        absent, mismatched = missing or ((), ())
        return Finding(
            fragment=fragment,
            index=index,
            verdict=verdict,
            absent=absent,
            mismatched=mismatched,
        )

    if not is_available:
        return finding(Verdict.LOST)
    entries = fragment.entries_of(index)
    if not entries:
        return finding(Verdict.GOOD)
    if refusals is None:
        return finding(Verdict.UNKNOWN)
    said = {entry_id: answer for entry_id, answer in refusals.items() if entry_id in entries}
    if not said:
        return finding(Verdict.GOOD)
    if Answer.UNKNOWN in said.values():
        return finding(Verdict.UNKNOWN)
    return finding(Verdict.MISSING, _which(said, Answer.ABSENT), _which(said, Answer.MISMATCH))


def _which(said: Mapping[int, Answer], wanted: Answer) -> tuple[int, ...]:
    return tuple(sorted(entry_id for entry_id, answer in said.items() if answer is wanted))


async def check(
    fragments: Sequence[Fragment],
    *,
    bookies: Bookies,
    digest: EntryDigest,
    available: Collection[BookieId],
    distrusted: Collection[BookieId],
) -> tuple[Finding, ...]:
    """Ask the bookies and judge. What one does not answer is a finding, never an error."""
    asked = questions(fragments, available=available, distrusted=distrusted)
    refusals = await _ask(fragments, asked, bookies=bookies, digest=digest)
    findings = judge(fragments, refusals, available=available)
    suspects = frozenset(f.bookie for f in findings if f.verdict is Verdict.MISSING)
    suspects -= frozenset(distrusted)
    if not suspects:
        return findings
    # An end is missing: only reading the whole index tells which others are.
    asked = questions(fragments, available=suspects, distrusted=suspects)
    refusals |= await _ask(fragments, asked, bookies=bookies, digest=digest)
    return judge(fragments, refusals, available=available)


async def _ask(
    fragments: Sequence[Fragment],
    asked: Mapping[BookieId, Sequence[Sequence[int]]],
    *,
    bookies: Bookies,
    digest: EntryDigest,
) -> dict[BookieId, dict[int, Answer]]:
    """All bookies at once: in a single transfer, unless there is very much to ask."""
    refusals: dict[BookieId, dict[int, Answer]] = {bookie: {} for bookie in asked}
    slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
    for parts in zip_longest(*slices, fillvalue=()):
        reads = {bookie: part for bookie, part in zip(asked, parts, strict=True) if part}
        result = await bookies.transfer(
            Transfer(ledger_id=fragments[0].ledger_id, digest=digest, reads=reads)
        )
        for bookie, answers in result.failures.items():
            refusals[bookie].update(answers)
    return refusals


def transfer_slices(runs: Iterable[Sequence[int]], *, sharing: int = 1) -> Iterator[list[int]]:
    """The ids of ascending, disjoint runs in lists, of which one transfer may hold ``sharing``."""
    count_max = TRANSFER_ENTRIES_MAX // sharing
    part: list[int] = []
    for run in runs:
        for start in range(0, len(run), count_max):
            ids = run[start : start + count_max]
            room = count_max - len(part)
            part.extend(ids[:room])
            if len(part) == count_max:
                yield part
                part = list(ids[room:])
    if part:
        yield part
