"""Judges what bookies answered about a ledger's copies. Pure.

A ledger is judged stretch by stretch, so that only some thousand of ten million entries are in
memory at a time. Each entry takes a few bytes there: its number of bad, unregistered and unanswered
copies. Stretches without findings, nearly all, cost nothing.
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
    """A range of one fragment's entries, inclusive at both ends, and the answers about their
    copies.

    A copy that no mapping names is good, or was not requested. ``excused``: bookie indexes whose
    copies the writer did not need.
    """

    fragment: Fragment
    first_entry_id: int
    last_entry_id: int
    ack_quorum: int
    refused: Mapping[BookieId, Refused] = field(default_factory=dict)
    gone: frozenset[BookieId] = frozenset()
    """Bookies that are not registered."""
    silent: frozenset[BookieId] = frozenset()
    """Bookies that answered no request."""
    excused: frozenset[int] = frozenset()
    elsewhere: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Good copies of entries that have no good recorded copy, by the bookie that stores them."""
    is_elsewhere_known: bool = True
    """True if all former members are registered and answered."""
    differing: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Copies with correct digests whose content differs from most others."""

    def entries_of(self, index: int) -> StripedEntries:
        return self.fragment.entries_of(index).between(self.first_entry_id, self.last_entry_id)

    def refused_by(self, index: int) -> Refused:
        """Return what the bookie at ``index`` refused of its entries in this stretch."""
        refused = self.refused.get(self.fragment.ensemble[index])
        entries = self.entries_of(index)
        if refused is None or not entries:
            return Refused()
        found = refused.between(entries[0], entries[-1])
        if self.fragment.ensemble.count(self.fragment.ensemble[index]) == 1:
            return found
        return found.only(lambda entry_id: self._is_of(index, entry_id))

    def _is_of(self, index: int, entry_id: int) -> bool:
        """True if the index stores the entry and no lower index of the same bookie does. A bookie
        that is in the ensemble twice has one copy only."""
        places = [*again_at(self.fragment, index), index]
        return _first_place(self.fragment, places, entry_id) == index

    @property
    def is_good(self) -> bool:
        """True if there is nothing to report."""
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
    """Return the verdict on the stretch. Its worst entry decides."""
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
    """Return the lower indexes at which the same bookie is in the ensemble. Conflicting repairs by
    Java can leave such duplicates; otherwise there are none."""
    ensemble = fragment.ensemble
    return [before for before in range(index) if ensemble[before] == ensemble[index]]


def stand_again(fragment: Fragment) -> bool:
    """True if a bookie is in the ensemble twice."""
    return len(set(fragment.ensemble)) < fragment.ensemble_size


def _first_place(fragment: Fragment, places: Sequence[int], entry_id: int) -> int | None:
    size, quorum = fragment.ensemble_size, fragment.write_quorum
    return next(
        (i for i in places if stores(i, entry_id, ensemble_size=size, write_quorum=quorum)), None
    )


def without_copy(stretch: Stretch) -> EntryRuns:
    """Return the entries whose recorded copies are all known to be bad, so that former members must
    be asked."""
    if not any(refused.has_bad for refused in stretch.refused.values()):
        return NO_ENTRIES
    return _Copies.of(stretch).without_any()


def excused_indexes(
    metadata: LedgerMetadata, fragment: Fragment, *, young: Collection[BookieId] = ()
) -> frozenset[int]:
    """Return the indexes whose copies may be missing, as long as an ack quorum has the entry.

    In an earlier fragment, the bookies that the writer replaced later: entries in flight to them no
    longer needed these copies. In a fragment that may still be written, all: copies may be in
    flight.

    ``young``: bookies that were set up after the ledger was created. In the first fragment such a
    bookie is not excused. Either it was reformatted since, or it joined by a repair, which gave it
    every entry. In a later fragment the writer itself may have chosen it.
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
    """Counts of bad, excused, unregistered, unanswered and other copies of each entry of a stretch.

    Each count is one byte. If the only fault is that whole bookies are unregistered or silent, the
    first E entries represent all: entries whose ids differ by E have their copies on the same
    bookies.
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
        """Return each combination of counts that occurs, once."""
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
        """Return the entries whose recorded copies are all bad or excused."""
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
        """Count the entries that the index stores and no lower index of the same bookie stores."""
        self._count_where(counts, partial(self.stretch._is_of, index))

    def _count_again(self, index: int, before: Sequence[int]) -> None:
        """Count a bad copy for each entry that the bookie stores by this index and by a lower one.
        Both are the same copy."""
        fragment = self.stretch.fragment

        def is_of_both(entry_id: int) -> bool:
            is_of_one = _first_place(fragment, [index], entry_id) is not None
            return is_of_one and _first_place(fragment, before, entry_id) is not None

        self._count_where(self.bad, is_of_both)

    def _count_where(self, counts: bytearray, is_counted: Callable[[int], bool]) -> None:
        """Count the matching entries. Entries whose ids differ by E are alike."""
        size, first = self.stretch.fragment.ensemble_size, self.stretch.first_entry_id
        for offset in range(min(size, len(counts))):
            if is_counted(first + offset):
                counts[offset::size] = counts[offset::size].translate(_PLUS_ONE)


def _evidence(stretch: Stretch, *, is_excused: bool) -> Iterable[Evidence]:
    """Yield the observations. ``is_excused``: True if every copy that may be missing is one that
    its entry does not need."""
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
