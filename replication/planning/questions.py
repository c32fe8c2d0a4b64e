"""What to ask the bookies of a ledger, and what they did not give of it.

The ends (first and last entry that an index stores of a fragment) are asked of every bookie that is
there, and as large a share of the entries between them as is set. Where one of them is missing, or
the bookie's identity is younger than the ledger (it may have been wiped, rule S6), every entry of
that index is asked for.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import ceil
from typing import overload

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer
from ledgers.entry import EntryDigest
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import StripedEntries
from replication.planning.entry_runs import EntryRuns

Questions = Mapping[BookieId, Sequence[Sequence[int]]]
"""Runs of entry ids to ask of each bookie: ascending, and disjoint."""
NOTHING_ASKED: Questions = {}

SILENT_ENTRIES_MAX = 1_000
"""A bookie that left so many reads unanswered is asked no more: it is unknown in any case."""


def questions(
    fragments: Sequence[Fragment],
    *,
    available: Collection[BookieId],
    distrusted: Collection[BookieId],
    share: float = 0.0,
    rng: random.Random | None = None,
) -> Questions:
    """What to ask of each available bookie: ends and a sample, or all of a distrusted one's.

    A bookie that stands twice in an ensemble, as Java's repairs may leave it when they conflict, is
    asked once for each.

    ``share``: of the entries of a copy how many are asked for besides the ends, 0 to 1; ``rng``
    says which, and is needed only for a share between.
    """
    asked: dict[BookieId, list[Sequence[int]]] = {}
    twice: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            entries = fragment.entries_of(index)
            if bookie in available and entries:
                is_all = bookie in distrusted or share >= 1
                runs = [entries] if is_all else _ends_and_sample(entries, share, rng)
                asked.setdefault(bookie, []).extend(runs)
                if bookie in fragment.ensemble[:index]:
                    twice.add(bookie)
    for bookie in twice:
        asked[bookie] = [EntryRuns(sorted(set(chain.from_iterable(asked[bookie]))))]
    return {bookie: tuple(runs) for bookie, runs in asked.items()}


def _ends_and_sample(
    entries: StripedEntries, share: float, rng: random.Random | None
) -> list[Sequence[int]]:
    first, last = entries[0], entries[-1]
    if first == last:
        return [[first]]
    if share <= 0 or len(entries) == 2:
        return [[first, last]]
    inner = entries[1:-1]
    assert rng is not None, "a sample is drawn"
    count = min(ceil(share * len(entries)), len(inner))
    return [[first], Sample(inner, size=count, phase=rng.randrange(len(inner))), [last]]


@dataclass(frozen=True, slots=True)
class Sample(Sequence[int]):
    """``size`` of ``entries``, evenly spread over them; which, ``phase`` decides.

    ``1 <= size <= len(entries)``, ``0 <= phase < len(entries)``: so no entry comes twice. Nothing
    is listed: of ten million entries half may be asked for.
    """

    entries: Sequence[int]
    size: int
    phase: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            return [self[rank] for rank in range(*position.indices(self.size))]
        if not 0 <= position < self.size:
            raise IndexError(position)
        return self.entries[(position * len(self.entries) + self.phase) // self.size]


@dataclass(slots=True, kw_only=True)
class Refused:
    """The entries that one bookie did not give of those it was asked for, and why."""

    absent: EntryRuns = field(default_factory=EntryRuns)
    mismatched: EntryRuns = field(default_factory=EntryRuns)
    unreadable: EntryRuns = field(default_factory=EntryRuns)
    unknown: EntryRuns = field(default_factory=EntryRuns)
    is_silent: bool = False
    """It answered so little that it was not asked for the rest."""

    def add(self, answers: Mapping[int, Answer]) -> None:
        """Of entries greater than those before."""
        kinds = {
            Answer.ABSENT: self.absent,
            Answer.MISMATCH: self.mismatched,
            Answer.UNREADABLE: self.unreadable,
            Answer.UNKNOWN: self.unknown,
        }
        for entry_id in sorted(answers):
            kinds[answers[entry_id]].append(entry_id)

    def extend(self, others: "Refused") -> None:
        """Likewise."""
        self.absent.extend(others.absent)
        self.mismatched.extend(others.mismatched)
        self.unreadable.extend(others.unreadable)
        self.unknown.extend(others.unknown)

    def between(self, first: int, last: int) -> "Refused":
        """Those from ``first`` to ``last``, both inclusive."""
        return Refused(
            absent=self.absent.between(first, last),
            mismatched=self.mismatched.between(first, last),
            unreadable=self.unreadable.between(first, last),
            unknown=self.unknown.between(first, last),
            is_silent=self.is_silent,
        )

    def only(self, is_wanted: Callable[[int], bool]) -> "Refused":
        """Those of the entries that are."""
        return Refused(
            absent=EntryRuns(filter(is_wanted, self.absent)),
            mismatched=EntryRuns(filter(is_wanted, self.mismatched)),
            unreadable=EntryRuns(filter(is_wanted, self.unreadable)),
            unknown=EntryRuns(filter(is_wanted, self.unknown)),
            is_silent=self.is_silent,
        )

    @property
    def has_bad(self) -> bool:
        """Whether any copy is known to be of no use."""
        return bool(self.absent or self.mismatched or self.unreadable)

    @property
    def is_empty(self) -> bool:
        return not self.has_bad and not self.unknown

    def __contains__(self, entry_id: int) -> bool:
        return any(
            entry_id in runs
            for runs in (self.absent, self.mismatched, self.unreadable, self.unknown)
        )


GAVE_ALL = Refused()
"""Nearly every answer there is: nothing is ever added to it."""


async def put_questions(
    fragments: Sequence[Fragment],
    asked: Questions,
    *,
    bookies: Bookies,
    digest: EntryDigest,
    entry_bytes: int,
) -> dict[BookieId, Refused]:
    """What each bookie did not give of what it was asked for: of every bookie that was asked.

    All bookies at once: in a single transfer, unless there is very much to ask. ``fragments``: of
    one ledger, not empty.
    """
    refusals = dict.fromkeys(asked, GAVE_ALL)
    slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
    for parts in zip_longest(*slices, fillvalue=()):
        reads = {
            bookie: part
            for bookie, part in zip(asked, parts, strict=True)
            if part and not refusals[bookie].is_silent
        }
        if not reads:
            continue
        result = await bookies.transfer(
            Transfer(
                ledger_id=fragments[0].ledger_id,
                digest=digest,
                reads=reads,
                entry_bytes_hint=entry_bytes,
            )
        )
        for bookie, answers in result.failures.items():
            if refusals[bookie] is GAVE_ALL:
                refusals[bookie] = Refused()
            refusals[bookie].add(answers)
            if len(refusals[bookie].unknown) >= SILENT_ENTRIES_MAX:
                refusals[bookie].is_silent = True
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
