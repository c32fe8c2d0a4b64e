"""Judges what bookies answered about one ledger's copies, and builds the ledger's verdict. Pure.

``judge`` judges one range of a fragment's entries; ``VerdictBuilder`` merges the ranges. So only
some thousand of ten million entries are in memory at a time, and each takes a few bytes there: its
number of bad, absent and unanswered copies. Ranges without findings, nearly all, cost nothing.

``differing_copies`` compares copies with correct digests. LAC and digest may differ: a recovery,
and Java's repair, write the LAC that they know by then. Payload and length may not differ.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from auditor.fsck.verdicts import (
    DAMAGE,
    WRONG_KEY,
    EntryCopies,
    Evidence,
    Finding,
    FragmentVerdict,
    Grade,
    LedgerVerdict,
    worst,
)
from ledgers.digest import NO_FINGERPRINT, Fingerprints
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, Fragment, LedgerMetadata, StripedEntries, write_set
from replication.copy_reader import GAVE_ALL, ReadFailures
from replication.entry_runs import NO_ENTRIES, EntryRuns

_TWICE = "the ensemble names this bookie twice, so both bookie indexes share one copy"
_PLUS_ONE = bytes(min(count + 1, 255) for count in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRange:
    """A range of one fragment's entries, inclusive at both ends, and the answers about their
    copies.

    A copy that no mapping names is good, or was not requested. ``excused``: bookie indexes whose
    copies the writer did not need.
    """

    fragment: Fragment
    first_entry_id: int
    last_entry_id: int
    ack_quorum: int
    failures: Mapping[BookieId, ReadFailures] = field(default_factory=dict)
    absent: frozenset[BookieId] = frozenset()
    """Bookies that are not registered."""
    unresponsive: frozenset[BookieId] = frozenset()
    """Registered bookies that answered no request."""
    excused: frozenset[int] = frozenset()
    elsewhere: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Good copies of entries that have no good recorded copy, by the bookie that stores them."""
    is_elsewhere_known: bool = True
    """True if all former members are registered and answered."""
    differing: Mapping[BookieId, EntryRuns] = field(default_factory=dict)
    """Copies with correct digests whose content differs from most others."""

    def entries_of(self, index: int) -> StripedEntries:
        return self.fragment.entries_of(index).between(self.first_entry_id, self.last_entry_id)

    def failures_at(self, index: int) -> ReadFailures:
        """Return the failed reads of the entries that the bookie at ``index`` stores of this
        range. A bookie that is in the ensemble twice has one copy only, at the lower index."""
        ensemble, entries = self.fragment.ensemble, self.entries_of(index)
        failures = self.failures.get(ensemble[index])
        if failures is None or not entries:
            return GAVE_ALL
        found = failures.between(entries[0], entries[-1])
        if ensemble.count(ensemble[index]) == 1:
            return found

        def is_here(entry_id: int) -> bool:
            places = [
                i for i in _write_set(self.fragment, entry_id) if ensemble[i] == ensemble[index]
            ]
            return bool(places) and min(places) == index

        return found.map(lambda runs: EntryRuns(filter(is_here, runs)))

    @property
    def is_good(self) -> bool:
        """True if there is nothing to report."""
        members = self.fragment.ensemble
        is_all_good = not (self.failures or self.differing or has_duplicate_bookie(self.fragment))
        return is_all_good and self.absent.union(self.unresponsive).isdisjoint(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeVerdict:
    """The verdict on one ``EntryRange``."""

    grade: Grade
    copies_least: int
    rests_on_unknown: bool
    evidence: tuple[Evidence, ...]


def judge(entries: EntryRange) -> RangeVerdict:
    """Return the verdict on the range. Its worst entry decides."""
    combinations = [  # each that occurs, once
        EntryCopies(
            write_quorum=entries.fragment.write_quorum,
            ack_quorum=entries.ack_quorum,
            bad=bad,
            excused=excused,
            on_absent=on_absent,
            unanswered=unanswered,
            is_elsewhere=elsewhere > 0,
        )
        for bad, excused, on_absent, unanswered, elsewhere in set(
            zip(*_copy_counts(entries), strict=True)
        )
    ]
    is_excused = all(each.is_legal for each in combinations if each.excused)
    return RangeVerdict(
        grade=worst(each.grade for each in combinations),
        copies_least=min(each.good for each in combinations),
        rests_on_unknown=not entries.is_elsewhere_known
        or any(each.unanswered or each.on_absent for each in combinations),
        evidence=tuple(_evidence(entries, is_excused=is_excused)),
    )


def has_duplicate_bookie(fragment: Fragment) -> bool:
    """True if a bookie is in the ensemble twice. Conflicting repairs by Java can leave this."""
    return len(set(fragment.ensemble)) < fragment.ensemble_size


def entries_without_copy(entries: EntryRange) -> EntryRuns:
    """Return the entries whose recorded copies are all known to be bad, so that former members must
    be asked."""
    if not any(failures.bad_count for failures in entries.failures.values()):
        return NO_ENTRIES
    bad_counts, excused_counts, *_ = _copy_counts(entries)
    # The first E entries may represent all. Then no entry lacks all copies.
    return EntryRuns(
        entries.first_entry_id + offset
        for offset, counts in enumerate(zip(bad_counts, excused_counts, strict=True))
        if sum(counts) == entries.fragment.write_quorum
    )


def excused_indexes(
    metadata: LedgerMetadata, fragment: Fragment, *, reformatted: Collection[BookieId] = ()
) -> frozenset[int]:
    """Return the indexes whose copies may be missing, as long as an ack quorum has the entry.

    In an earlier fragment, the bookies that the writer replaced later: entries in flight to them no
    longer needed these copies. In a fragment that may still be written, all: copies may be in
    flight.

    ``reformatted``: bookies whose cookie is newer than the ledger. In the first fragment such a
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
        and not (position == 1 and bookie in reformatted)
    )


def _copy_counts(entries: EntryRange) -> tuple[bytearray, ...]:
    """Return the numbers of copies of each entry of a range: bad ones, excused ones, those on
    absent bookies, unanswered ones, and those elsewhere.

    Each count is one byte. If the only fault is that whole bookies are absent or unresponsive, the
    first E entries represent all. Entries whose ids differ by E have their copies on the same
    bookies.
    """
    fragment, size, first = entries.fragment, entries.fragment.ensemble_size, entries.first_entry_id
    span = entries.last_entry_id - first + 1
    failures = [entries.failures_at(index) for index in range(size)]
    if all(each.is_empty for each in failures):
        span = min(span, size)
    bad, excused, on_absent, unanswered, elsewhere = made = tuple(bytearray(span) for _ in range(5))

    def add(counts: bytearray, part: slice, count: int = 1) -> None:
        for _ in range(count):
            counts[part] = counts[part].translate(_PLUS_ONE)

    def add_entries(counts: bytearray, added: EntryRuns) -> None:
        for run in added.each_run():
            add(counts, slice(run.start - first, run.stop - first))

    silent = entries.absent | entries.unresponsive
    for offset in range(min(span, size)):
        alike = slice(offset, None, size)
        indexes = _write_set(fragment, first + offset)
        bookies = {fragment.ensemble[index] for index in indexes}
        absent_count = len(bookies & entries.absent)
        add(bad, alike, len(indexes) - len(bookies))  # one copy each
        add(on_absent, alike, absent_count)
        add(unanswered, alike, len(bookies & silent) - absent_count)
    for index, each in enumerate(failures):
        if fragment.ensemble[index] not in silent:
            add_entries(excused if index in entries.excused else bad, each.absent)
            add_entries(bad, each.mismatched)
            add_entries(bad, each.unreadable)
            add_entries(unanswered, each.unknown)
    for runs in entries.elsewhere.values():
        add_entries(elsewhere, runs)
    return made


def _write_set(fragment: Fragment, entry_id: int) -> Sequence[int]:
    return write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )


def _evidence(entries: EntryRange, *, is_excused: bool) -> Iterable[Evidence]:
    """Yield the observations. ``is_excused``: True if the ack quorum allows each missing copy of
    an excused index."""
    for index, bookie in enumerate(entries.fragment.ensemble):
        if bookie in entries.fragment.ensemble[:index]:
            yield Evidence(
                finding=Finding.MISPLACED, bookie=bookie, code="named_twice", detail=_TWICE
            )
        own = entries.entries_of(index)
        if bookie in entries.absent:
            yield from _observation(Finding.BOOKIE_GONE, bookie, own, "not_registered")
            continue
        if bookie in entries.unresponsive:
            yield from _observation(Finding.NOT_ANSWERED, bookie, own, "no_answer")
            continue
        failures = entries.failures_at(index)
        may_lack = is_excused and index in entries.excused
        missing = Finding.ACK_QUORUM_ONLY if may_lack else Finding.MISSING
        yield from _observation(missing, bookie, failures.absent, "no_such_entry")
        yield from _observation(Finding.BAD_DIGEST, bookie, failures.mismatched, "digest_mismatch")
        yield from _observation(Finding.READ_ERROR, bookie, failures.unreadable, "io_error")
        yield from _observation(Finding.NOT_ANSWERED, bookie, failures.unknown, "no_answer")
    for bookie, runs in entries.elsewhere.items():
        yield from _observation(Finding.STRAY, bookie, runs, "only_copy")
    for bookie, runs in entries.differing.items():
        yield from _observation(Finding.SUSPECT, bookie, runs, "payload_or_length")


def _observation(
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


def differing_copies(
    fragment: Fragment,
    first_entry_id: int,
    last_entry_id: int,
    found: Mapping[BookieId, Fingerprints],
) -> dict[BookieId, EntryRuns]:
    """Return by bookie the entries from the first to the last, inclusive, that differ from most
    copies.

    If no value is the most frequent one, it is unknown which is right, and all copies are named.
    Entries whose ids differ by E have their copies on the same bookies, so whole columns are
    compared at once.
    """
    if len(found) < 2:
        return {}
    step = 1 if fragment.ensemble_size == fragment.write_quorum else fragment.ensemble_size
    odd, end = defaultdict[BookieId, list[int]](list), last_entry_id + 1
    for start in range(first_entry_id, min(first_entry_id + step, end)):
        # A bookie may be in the ensemble twice.
        bookies = dict.fromkeys(fragment.ensemble[index] for index in _write_set(fragment, start))
        members = [bookie for bookie in bookies if bookie in found]
        columns = [
            prints.values[start - prints.first_entry_id : end - prints.first_entry_id : step]
            for prints in map(found.__getitem__, members)
        ]
        if all(column == columns[0] for column in columns):
            continue
        for position, values in enumerate(zip(*columns, strict=True)):
            for member in _odd_positions(values):
                odd[members[member]].append(start + position * step)
    return {bookie: EntryRuns(sorted(entry_ids)) for bookie, entry_ids in odd.items()}


def _odd_positions(values: Sequence[int]) -> Sequence[int]:
    """Return the positions of the values that differ from the most frequent one; of all, if two are
    equally frequent."""
    counts = Counter(value for value in values if value != NO_FINGERPRINT)
    if len(counts) < 2:
        return ()
    (common, count), (_, next_count) = counts.most_common(2)
    right = common if count > next_count else NO_FINGERPRINT
    return [
        position for position, value in enumerate(values) if value not in (right, NO_FINGERPRINT)
    ]


EVIDENCE_MAX = 100
"""Number of observations kept for one ledger; the worst come first."""
_ORDER = tuple(Finding)
_LACKS = frozenset(
    {Finding.MISSING, Finding.ACK_QUORUM_ONLY, Finding.BAD_DIGEST, Finding.READ_ERROR}
)


class VerdictBuilder:
    """The verdict on one ledger while it is built. Its size depends on the metadata, not on the
    number of entries."""

    def __init__(self, versioned: VersionedMetadata) -> None:
        self._versioned = versioned
        self._fragments: dict[int, FragmentVerdict] = {}
        """By position in the ledger."""
        self._evidence: dict[tuple[Finding, BookieId | None, int, str], Evidence] = {}
        """By what is merged: finding, bookie, the first entry of the fragment or -1, and code."""
        self.entries_read = self.bytes_read = 0
        self.last_entry_id = -1
        self.is_tail_unseen = False
        self.length = versioned.metadata.length

    def add_fragment(self, position: int, fragment: Fragment, *, is_unknown: bool = False) -> None:
        """Add a fragment that is whole until ``add_range`` says otherwise. ``is_unknown``: True if
        its end is unknown."""
        assert fragment.last_entry_id is not None, fragment
        self._fragments[position] = FragmentVerdict(
            first_entry_id=fragment.first_entry_id,
            last_entry_id=fragment.last_entry_id,
            ensemble=fragment.ensemble,
            grade=Grade.UNKNOWN if is_unknown else Grade.WHOLE,
            copies_least=0 if is_unknown else fragment.write_quorum,
            rests_on_unknown=is_unknown,
        )

    def add_range(self, position: int, found: RangeVerdict) -> None:
        """Merge the verdict on a range. ``position``: of its fragment in the ledger."""
        known = self._fragments[position]
        self._fragments[position] = replace(
            known,
            grade=worst((known.grade, found.grade)),
            copies_least=min(known.copies_least, found.copies_least),
            rests_on_unknown=known.rests_on_unknown or found.rests_on_unknown,
        )
        self.add_evidence(found.evidence, fragment_start=known.first_entry_id)

    def mark_end_unproven(self, evidence: Collection[Evidence]) -> None:
        """Record that the end of the last fragment cannot be proven. Does nothing without
        evidence."""
        if not evidence:
            return
        position = max(self._fragments)
        known = self._fragments[position]
        grade = worst((known.grade, Grade.UNKNOWN))
        self._fragments[position] = replace(known, grade=grade, rests_on_unknown=True)
        self.add_evidence(evidence)

    def lacks(self, bookie: BookieId, entry_id: int) -> bool:
        """True if the bookie lacks the entry, which must be the first one requested from
        it in a fragment."""
        return any(
            each.bookie == bookie and each.first_entry_id == entry_id and each.finding in _LACKS
            for each in self._evidence.values()
        )

    def add_evidence(self, evidence: Iterable[Evidence], *, fragment_start: int = -1) -> None:
        """Add observations. Those of one kind in one fragment are merged into one."""
        for each in evidence:
            key = (each.finding, each.bookie, fragment_start, each.code)
            if known := self._evidence.get(key):
                each = replace(
                    known,
                    first_entry_id=min(known.first_entry_id, each.first_entry_id),
                    last_entry_id=max(known.last_entry_id, each.last_entry_id),
                    entry_count=known.entry_count + each.entry_count,
                )
            self._evidence[key] = each

    def verdict(self, *, checked_ms: int, is_key_suspect: bool = False) -> LedgerVerdict:
        """Return the verdict on the ledger.

        ``is_key_suspect``: the metadata holds no key, and no entry fits our default key. Then our
        key may be wrong, and every fragment is unknown (rule S7).
        """
        if is_key_suspect:
            why = Evidence(
                finding=Finding.BAD_DIGEST,
                code=WRONG_KEY,
                detail="no entry matches the default password and digest type, and the metadata "
                "has neither",
            )
            self.add_evidence([why])
            for position, fragment in self._fragments.items():
                self._fragments[position] = replace(
                    fragment, grade=Grade.UNKNOWN, copies_least=0, rests_on_unknown=True
                )
        metadata, stat = self._versioned.metadata, self._versioned.stat
        fragments = tuple(verdict for _, verdict in sorted(self._fragments.items()))
        evidence = sorted(
            self._evidence.values(),
            key=lambda each: (_ORDER.index(each.finding), each.first_entry_id, each.bookie or ""),
        )
        found = {each.finding for each in evidence}
        grade = worst(fragment.grade for fragment in fragments)
        rests_on_unknown = any(fragment.rests_on_unknown for fragment in fragments)
        if grade is Grade.DEGRADED and DAMAGE.isdisjoint(found) and rests_on_unknown:
            grade = Grade.UNKNOWN  # only legally missing copies, but others did not answer
        return LedgerVerdict(
            ledger_id=self._versioned.ledger_id,
            grade=grade,
            findings=tuple(sorted(found, key=_ORDER.index)),
            rests_on_unknown=rests_on_unknown,
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
