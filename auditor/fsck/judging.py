"""From what was seen of a ledger's copies to what is said of the ledger. Pure.

A ledger is judged stretch by stretch, so that of ten million entries only some thousand are at hand
at a time, and these in a few bytes each: how many copies of an entry are bad, gone, silent.
Stretches without anything to tell, nearly all there are, cost nothing.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from auditor.fsck.scale import EntryCopies
from auditor.fsck.verdicts import Evidence, Finding, Grade
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.striping import StripedEntries, stores
from replication.planning.entry_runs import NO_ENTRIES, EntryRuns
from replication.planning.questions import Refused

_TWICE = "it stands in the ensemble twice: what it stores by both places is one copy"
_PLUS_ONE = bytes(min(count + 1, 255) for count in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A run of one fragment's entries, both ends included, and what was seen of their copies.

    What stands in none of the mappings is good, or was not looked at. ``excused``: bookie indexes
    that the writer may have gone on without.
    """

    fragment: Fragment
    first_entry_id: int
    last_entry_id: int
    ack_quorum: int
    refused: Mapping[BookieId, Refused] = field(default_factory=dict)
    gone: frozenset[BookieId] = frozenset()
    silent: frozenset[BookieId] = frozenset()
    """Bookies that answered for nothing."""
    excused: frozenset[int] = frozenset()
    elsewhere: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Good copies of entries without any recorded one, by the bookie that has them."""
    is_elsewhere_known: bool = True
    """Whether every former member is there, and answered."""
    differing: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Good copies that are not what most others are."""

    def entries_of(self, index: int) -> StripedEntries:
        return self.fragment.entries_of(index).between(self.first_entry_id, self.last_entry_id)

    def refused_by(self, index: int) -> Refused:
        """Within the stretch."""
        refused = self.refused.get(self.fragment.ensemble[index])
        entries = self.entries_of(index)
        if refused is None or not entries:
            return Refused()
        found = refused.between(entries[0], entries[-1])
        if self.fragment.ensemble.count(self.fragment.ensemble[index]) == 1:
            return found
        return found.only(lambda entry_id: self._is_of(index, entry_id))

    def _is_of(self, index: int, entry_id: int) -> bool:
        """Whether the index stores it, and none before it does that is the same bookie: that is one
        copy."""
        places = [*again_at(self.fragment, index), index]
        return _first_place(self.fragment, places, entry_id) == index

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to tell."""
        members = self.fragment.ensemble
        is_all_good = not (self.refused or self.differing or stand_again(self.fragment))
        return is_all_good and self.gone.union(self.silent).isdisjoint(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchVerdict:
    grade: Grade
    copies_least: int
    rests_on_unknown: bool
    evidence: tuple[Evidence, ...]


def judge(stretch: Stretch) -> StretchVerdict:
    """By the entry that is worst off, of those that it holds."""
    kinds = _Copies.of(stretch).kinds()
    is_excused = all(kind.is_legal for kind in kinds if kind.excused)
    return StretchVerdict(
        grade=min((kind.grade for kind in kinds), key=lambda grade: grade.rank),
        copies_least=min(kind.good for kind in kinds),
        rests_on_unknown=not stretch.is_elsewhere_known
        or any(kind.silent or kind.gone for kind in kinds),
        evidence=tuple(_evidence(stretch, is_excused=is_excused)),
    )


def again_at(fragment: Fragment, index: int) -> Sequence[int]:
    """The bookie indexes before this one at which the same bookie stands; none, as nearly always,
    but where Java's repairs conflicted."""
    ensemble = fragment.ensemble
    return [before for before in range(index) if ensemble[before] == ensemble[index]]


def stand_again(fragment: Fragment) -> bool:
    """Whether a bookie stands in the ensemble twice."""
    return len(set(fragment.ensemble)) < fragment.ensemble_size


def _first_place(fragment: Fragment, places: Sequence[int], entry_id: int) -> int | None:
    size, quorum = fragment.ensemble_size, fragment.write_quorum
    return next(
        (i for i in places if stores(i, entry_id, ensemble_size=size, write_quorum=quorum)), None
    )


def without_copy(stretch: Stretch) -> EntryRuns:
    """The entries of which every recorded copy is known to be bad: former members are to be
    asked."""
    if not any(refused.has_bad for refused in stretch.refused.values()):
        return NO_ENTRIES
    return _Copies.of(stretch).without_any()


def excused_indexes(
    metadata: LedgerMetadata, fragment: Fragment, *, young: Collection[BookieId] = ()
) -> frozenset[int]:
    """Where copies may be missing, as long as an ack quorum has the entry.

    Of an earlier fragment, those bookies that the writer replaced later: an entry that was on its
    way to one then needed it no more. Of one that may still be written, all: a copy may be on its
    way. ``young``: bookies that were set up after the ledger was made. In its first fragment one
    was wiped since, or came there by a repair, which gave it every entry; in a later one its writer
    may have chosen it.
    """
    if metadata.ack_quorum == metadata.write_quorum:
        return frozenset()
    if not fragment.is_closed:
        return frozenset(range(fragment.ensemble_size))
    segments = metadata.segments
    position = bisect_right(segments, fragment.first_entry_id, key=lambda s: s.first_entry_id)
    if position == len(segments):
        return frozenset()
    following, last = segments[position].ensemble, segments[-1].ensemble
    return frozenset(
        index
        for index, bookie in enumerate(fragment.ensemble)
        if (bookie != following[index] or bookie != last[index])
        and not (position == 1 and bookie in young)
    )


@dataclass(slots=True)
class _Copies:
    """How many copies of each entry of a stretch are what: a byte an entry and kind.

    Where a stretch refuses nothing but whole bookies, its first entries stand for all: entries E
    apart have their copies on the same bookies.
    """

    stretch: Stretch
    bad: bytearray
    excused: bytearray
    gone: bytearray
    silent: bytearray
    elsewhere: bytearray

    @classmethod
    def of(cls, stretch: Stretch) -> "_Copies":
        fragment = stretch.fragment
        span = stretch.last_entry_id - stretch.first_entry_id + 1
        refused = [stretch.refused_by(index) for index in range(fragment.ensemble_size)]
        if all(each.is_empty for each in refused):
            span = min(span, fragment.ensemble_size)
        made = cls(stretch, *(bytearray(span) for _ in range(5)))
        for index, each in enumerate(refused):
            bookie = fragment.ensemble[index]
            if again := again_at(fragment, index):
                made._count_again(index, again)
            if bookie in stretch.gone or bookie in stretch.silent:
                made._count_all(made.gone if bookie in stretch.gone else made.silent, index)
                continue
            made._count(made.excused if index in stretch.excused else made.bad, each.absent)
            made._count(made.bad, each.mismatched)
            made._count(made.bad, each.unreadable)
            made._count(made.silent, each.unknown)
        for runs in stretch.elsewhere.values():
            made._count(made.elsewhere, runs)
        return made

    def kinds(self) -> list[EntryCopies]:
        """Each that there is among the entries, once."""
        counts = set(
            zip(self.bad, self.excused, self.gone, self.silent, self.elsewhere, strict=True)
        )
        return [
            EntryCopies(
                write_quorum=self.stretch.fragment.write_quorum,
                ack_quorum=self.stretch.ack_quorum,
                bad=bad,
                excused=excused,
                gone=gone,
                silent=silent,
                is_elsewhere=elsewhere > 0,
            )
            for bad, excused, gone, silent, elsewhere in counts
        ]

    def without_any(self) -> EntryRuns:
        lacking = bytes(map(int.__add__, self.bad, self.excused))
        pattern = re.escape(bytes([self.stretch.fragment.write_quorum])) + b"+"
        first = self.stretch.first_entry_id
        return EntryRuns(
            first + position
            for run in re.finditer(pattern, lacking, re.DOTALL)
            for position in range(*run.span())
        )

    def _count(self, counts: bytearray, entries: EntryRuns) -> None:
        first = self.stretch.first_entry_id
        for run in entries.runs:
            part = slice(run.start - first, run.stop - first)
            counts[part] = counts[part].translate(_PLUS_ONE)

    def _count_all(self, counts: bytearray, index: int) -> None:
        """All that the index stores, and no other one of its bookie before it."""
        self._count_where(counts, partial(self.stretch._is_of, index))

    def _count_again(self, index: int, before: Sequence[int]) -> None:
        """What the bookie stores by an index before this one is no second copy."""
        fragment = self.stretch.fragment

        def is_of_both(entry_id: int) -> bool:
            is_of_one = _first_place(fragment, [index], entry_id) is not None
            return is_of_one and _first_place(fragment, before, entry_id) is not None

        self._count_where(self.bad, is_of_both)

    def _count_where(self, counts: bytearray, is_counted: Callable[[int], bool]) -> None:
        """Entries E apart are alike."""
        size, first = self.stretch.fragment.ensemble_size, self.stretch.first_entry_id
        for offset in range(min(size, len(counts))):
            if is_counted(first + offset):
                counts[offset::size] = counts[offset::size].translate(_PLUS_ONE)


def _evidence(stretch: Stretch, *, is_excused: bool) -> Iterable[Evidence]:
    """``is_excused``: whether every copy that may be missing is one that the entry can do
    without."""
    for index, bookie in enumerate(stretch.fragment.ensemble):
        if again_at(stretch.fragment, index):
            yield Evidence(
                finding=Finding.MISPLACED, bookie=bookie, code="stands_twice", detail=_TWICE
            )
        if bookie in stretch.gone:
            yield from _seen(
                Finding.BOOKIE_GONE, bookie, stretch.entries_of(index), "not_registered"
            )
            continue
        if bookie in stretch.silent:
            yield from _seen(Finding.NOT_ANSWERED, bookie, stretch.entries_of(index), "no_answer")
            continue
        refused = stretch.refused_by(index)
        may_lack = is_excused and index in stretch.excused
        absence = Finding.ACK_QUORUM_ONLY if may_lack else Finding.MISSING
        yield from _seen(absence, bookie, refused.absent, "no_such_entry")
        yield from _seen(Finding.BAD_DIGEST, bookie, refused.mismatched, "digest_mismatch")
        yield from _seen(Finding.READ_ERROR, bookie, refused.unreadable, "io_error")
        yield from _seen(Finding.NOT_ANSWERED, bookie, refused.unknown, "no_answer")
    for bookie, runs in stretch.elsewhere.items():
        yield from _seen(Finding.STRAY, bookie, runs, "only_copy")
    for bookie, runs in stretch.differing.items():
        yield from _seen(Finding.SUSPECT, bookie, runs, "payload_or_length")


def _seen(
    finding: Finding, bookie: BookieId, entries: EntryRuns | StripedEntries, code: str
) -> Iterable[Evidence]:
    if entries:
        yield Evidence(
            finding=finding,
            bookie=bookie,
            first_entry_id=entries[0],
            last_entry_id=entries[-1],
            entry_count=len(entries),
            code=code,
        )
