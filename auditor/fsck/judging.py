"""Judges what bookies answered about a ledger's copies. Pure.

A ledger is judged stretch by stretch, so that only some thousand of ten million entries are in
memory at a time. Each entry takes a few bytes there: its number of bad, unregistered and unanswered
copies. Stretches without findings, nearly all, cost nothing.

Compares copies with correct digests, and finds those that differ from the others. Pure.

LAC and digest may differ: a recovery, and Java's repair, write the LAC that they know by then.
Payload and length may not differ.

One ledger's verdict, collected stretch by stretch. Pure. Its size depends on the metadata, not
on the number of entries.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from auditor.fsck.verdicts import (
    DAMAGE,
    WRONG_KEY,
    EntryCopies,
    Evidence,
    Finding,
    FragmentVerdict,
    Grade,
    LedgerVerdict,
)
from ledgers.digest import NO_FINGERPRINT, Fingerprints
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, Fragment, LedgerMetadata, StripedEntries, stores, write_set
from replication.copy_checks import ReadFailures
from replication.entry_runs import NO_ENTRIES, EntryRuns

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
    refused: Mapping[BookieId, ReadFailures] = field(default_factory=dict)
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

    def refused_by(self, index: int) -> ReadFailures:
        """Return what the bookie at ``index`` refused of its entries in this stretch."""
        refused = self.refused.get(self.fragment.ensemble[index])
        entries = self.entries_of(index)
        if refused is None or not entries:
            return ReadFailures()
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


def differing(
    fragment: Fragment,
    first_entry_id: int,
    last_entry_id: int,
    found: Mapping[BookieId, Fingerprints],
) -> dict[BookieId, EntryRuns]:
    """Return by bookie the entries from the first to the last, inclusive, that differ from most
    copies.

    If no value is the most frequent one, nobody knows which is right, and all copies are named.
    Entries whose ids differ by E have their copies on the same bookies, so whole columns are
    compared at once.
    """
    if len(found) < 2:
        return {}
    size, quorum = fragment.ensemble_size, fragment.write_quorum
    step = 1 if size == quorum else size
    odd: dict[BookieId, list[int]] = defaultdict(list)
    for start in range(first_entry_id, min(first_entry_id + step, last_entry_id + 1)):
        indexes = write_set(start, ensemble_size=size, write_quorum=quorum)
        # A bookie may be in the ensemble twice.
        bookies = dict.fromkeys(map(fragment.ensemble.__getitem__, indexes))
        members = [bookie for bookie in bookies if bookie in found]
        columns = [_column(found[bookie], start, last_entry_id, step) for bookie in members]
        if all(column == columns[0] for column in columns):
            continue
        for position, values in enumerate(zip(*columns, strict=True)):
            for place in _odd_places(values):
                odd[members[place]].append(start + position * step)
    return {bookie: EntryRuns(sorted(entry_ids)) for bookie, entry_ids in odd.items()}


def _column(found: Fingerprints, start: int, last: int, step: int) -> Sequence[int]:
    """Return the fingerprints of every ``step``-th entry."""
    return found.values[start - found.first_entry_id : last - found.first_entry_id + 1 : step]


def _odd_places(values: Sequence[int]) -> Sequence[int]:
    """Return the positions of the values that differ from the most frequent one; of all, if two are
    equally frequent."""
    there = Counter(value for value in values if value != NO_FINGERPRINT)
    if len(there) < 2:
        return ()
    (common, count), (_, next_count) = there.most_common(2)
    right = common if count > next_count else NO_FINGERPRINT
    return [place for place, value in enumerate(values) if value not in (right, NO_FINGERPRINT)]


EVIDENCE_MAX = 100
"""Number of observations kept for one ledger; the worst come first."""
_ORDER = tuple(Finding)
_LACKS = frozenset(
    {Finding.MISSING, Finding.ACK_QUORUM_ONLY, Finding.BAD_DIGEST, Finding.READ_ERROR}
)

_Key = tuple[Finding, BookieId | None, int, str]
"""What observations have in common that are merged. The number is the first entry of the fragment,
or -1; the last item is the code."""


class SummingUp:
    """The verdict of one look at one ledger, while it grows."""

    def __init__(self, versioned: VersionedMetadata) -> None:
        self._versioned = versioned
        self._fragments: dict[int, FragmentVerdict] = {}
        """By position in the ledger."""
        self._evidence: dict[_Key, Evidence] = {}
        self.entries_read = 0
        self.bytes_read = 0
        self.last_entry_id = -1
        self.is_tail_unseen = False
        self.length = versioned.metadata.length

    def add_fragment(self, position: int, fragment: Fragment, *, is_unknown: bool = False) -> None:
        """Add a fragment that is whole until ``add`` says otherwise. ``is_unknown``: True if its
        end is unknown."""
        assert fragment.last_entry_id is not None, fragment
        self._fragments[position] = FragmentVerdict(
            first_entry_id=fragment.first_entry_id,
            last_entry_id=fragment.last_entry_id,
            ensemble=fragment.ensemble,
            grade=Grade.UNKNOWN if is_unknown else Grade.WHOLE,
            copies_least=0 if is_unknown else fragment.write_quorum,
            rests_on_unknown=is_unknown,
        )

    def add(self, position: int, found: StretchVerdict) -> None:
        """Merge the verdict on a stretch. ``position``: of its fragment in the ledger."""
        known = self._fragments[position]
        self._fragments[position] = replace(
            known,
            grade=min(known.grade, found.grade, key=lambda grade: grade.rank),
            copies_least=min(known.copies_least, found.copies_least),
            rests_on_unknown=known.rests_on_unknown or found.rests_on_unknown,
        )
        self.note(found.evidence, fragment_start=known.first_entry_id)

    def doubt_end(self, evidence: Collection[Evidence]) -> None:
        """Note that nobody can prove where the last fragment ends. Does nothing without evidence of
        that."""
        if not evidence:
            return
        position = max(self._fragments)
        known = self._fragments[position]
        grade = min(known.grade, Grade.UNKNOWN, key=lambda grade: grade.rank)
        self._fragments[position] = replace(known, grade=grade, rests_on_unknown=True)
        self.note(evidence)

    def lacks(self, bookie: BookieId, entry_id: int) -> bool:
        """True if the bookie was seen to lack the entry, which must be the first one requested from
        it in a fragment."""
        return any(
            each.bookie == bookie and each.first_entry_id == entry_id and each.finding in _LACKS
            for each in self._evidence.values()
        )

    def note(self, evidence: Iterable[Evidence], *, fragment_start: int = -1) -> None:
        """Add observations. Those of one kind in one fragment are merged into one."""
        for each in evidence:
            key = (each.finding, each.bookie, fragment_start, each.code)
            known = self._evidence.get(key)
            self._evidence[key] = each if known is None else _joined(known, each)

    def verdict(self, *, checked_ms: int, is_key_suspect: bool = False) -> LedgerVerdict:
        """Return the verdict. ``is_key_suspect``: True if no entry matches our key and the metadata
        holds none, so that nothing is known (rule S7)."""
        if is_key_suspect:
            self.note([_WRONG_KEY])
            for position, fragment in self._fragments.items():
                self._fragments[position] = replace(
                    fragment, grade=Grade.UNKNOWN, copies_least=0, rests_on_unknown=True
                )
        metadata, stat = self._versioned.metadata, self._versioned.stat
        fragments = tuple(verdict for _, verdict in sorted(self._fragments.items()))
        evidence = sorted(self._evidence.values(), key=_weight)
        found = {each.finding for each in evidence}
        return LedgerVerdict(
            ledger_id=self._versioned.ledger_id,
            grade=_grade(fragments, found),
            findings=tuple(sorted(found, key=_ORDER.index)),
            rests_on_unknown=any(fragment.rests_on_unknown for fragment in fragments),
            evidence=tuple(evidence[:EVIDENCE_MAX]),
            evidence_left_out=max(0, len(evidence) - EVIDENCE_MAX),
            fragments=fragments,
            state=metadata.state.name.lower(),
            length=self.length,
            last_entry_id=self.last_entry_id,
            is_tail_unseen=self.is_tail_unseen,
            metadata_version=stat.version,
            mtime_ms=stat.mtime_ms,
            entries_read=self.entries_read,
            bytes_read=self.bytes_read,
            checked_ms=checked_ms,
        )


def _grade(fragments: Sequence[FragmentVerdict], found: Set[Finding]) -> Grade:
    """Return the grade of the worst fragment. If only legally missing copies degrade the ledger,
    but other copies were not answered for, it is ``UNKNOWN``."""
    worst = min((fragment.grade for fragment in fragments), key=lambda grade: grade.rank)
    is_legal = worst is Grade.DEGRADED and DAMAGE.isdisjoint(found)
    is_silent = any(fragment.rests_on_unknown for fragment in fragments)
    return Grade.UNKNOWN if is_legal and is_silent else worst


_WRONG_KEY = Evidence(
    finding=Finding.BAD_DIGEST,
    code=WRONG_KEY,
    detail="no entry fits the default password and digest type, and the metadata holds none",
)


def _joined(before: Evidence, after: Evidence) -> Evidence:
    return replace(
        before,
        first_entry_id=min(before.first_entry_id, after.first_entry_id),
        last_entry_id=max(before.last_entry_id, after.last_entry_id),
        entry_count=before.entry_count + after.entry_count,
    )


def _weight(evidence: Evidence) -> tuple[int, int, str]:
    return _ORDER.index(evidence.finding), evidence.first_entry_id, evidence.bookie or ""
