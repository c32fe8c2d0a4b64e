"""The check of one ledger's copies: asks its bookies as the level requires, and judges the answers.

A ledger is checked stretch by stretch. At the levels ``ends`` and ``sample``, a bookie that lacks a
requested entry is asked for all its entries of that fragment. Entries without a recorded copy are
looked for on former members, which the metadata still names. The second look also tries all other
registered bookies.

Reads one ledger's entries from its bookies in bulk, until each answer is reliable.

A read error counts when the bookie gave it twice. An entry that a bookie left unanswered while it
answered for others is requested again after a pause: the bookie may have been busy. A bookie that
answers for nothing is silent, and is not asked again during this look. An explicit "no" is certain;
the run's second look confirms it.

Chooses the entries that a sample reads: the same entries of each copy. Pure.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from math import ceil, floor
from types import MappingProxyType

from auditor.fsck.judging import (
    Stretch,
    SummingUp,
    differing,
    excused_indexes,
    judge,
    stand_again,
    without_copy,
)
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.verdicts import Evidence, Finding, LedgerVerdict
from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.digest import NO_FINGERPRINT, EntryDigest, Fingerprints
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, Fragment
from replication.copy_checks import EntryLists, ReadFailures, plan_reads, transfer_slices
from replication.entry_runs import EntryRuns, merged

AGAIN_MAX = 3
"""Number of repeated requests for unreliable answers, ``AGAIN_AFTER_S`` apart."""
AGAIN_AFTER_S = 0.5

Reads = Mapping[BookieId, Sequence[int]]
"""Ascending entry ids to read, by bookie."""
Errors = Counter[tuple[BookieId, int]]
"""Number of read errors, by bookie and entry."""


@dataclass(slots=True)
class Answers:
    """The answers to one request. ``refused`` has only bookies that did not give everything; the
    ``fingerprints`` are of the good copies."""

    refused: dict[BookieId, ReadFailures] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


class LedgerReads:
    """The reads of one look at one ledger, with their totals."""

    def __init__(
        self,
        ledger_id: int,
        *,
        bookies: Bookies,
        clock: Clock,
        digest: EntryDigest,
        entry_bytes: int,
    ) -> None:
        """``entry_bytes``: a guess at the stored size of an entry."""
        self._ledger_id = ledger_id
        self._bookies = bookies
        self._clock = clock
        self._digest = digest
        self._entry_bytes = entry_bytes
        self.silent: set[BookieId] = set()
        """Bookies that answered no request, or stopped answering."""
        self.entry_count = 0
        """Good entries; an entry that was read twice counts twice."""
        self.byte_count = 0
        self.mismatch_count = 0

    async def ask_runs(self, asked: Mapping[BookieId, Sequence[Sequence[int]]]) -> Answers:
        """Read ascending, disjoint runs of entries, of any number."""
        whole = Answers()
        slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
        for parts in zip_longest(*slices, fillvalue=()):
            answers = await self.ask(dict(zip(asked, parts, strict=True)))
            for bookie, refused in answers.refused.items():
                whole.refused.setdefault(bookie, ReadFailures()).extend(refused)
        return whole

    async def ask(self, reads: Reads, *, compares: bool = False) -> Answers:
        """Read these entries, ``TRANSFER_ENTRIES_MAX`` at most. ``compares``: True to get
        fingerprints; the entry ids should be close together then."""
        reads = {b: ids for b, ids in reads.items() if ids and b not in self.silent}
        if not reads:
            return Answers()
        assert sum(map(len, reads.values())) <= TRANSFER_ENTRIES_MAX, self._ledger_id
        result = await self._transfer(reads, compares)
        failures = {bookie: dict(answers) for bookie, answers in result.failures.items() if answers}
        if failures:
            await self._ask_again(reads, failures, result.fingerprints)
        answers = Answers(fingerprints=result.fingerprints)
        for bookie, kept in failures.items():
            if _answered_nothing(reads[bookie], kept):
                self.silent.add(bookie)
            elif kept:
                refused = answers.refused[bookie] = ReadFailures()
                refused.add(kept)
                self.mismatch_count += len(refused.mismatched)
        return answers

    async def _ask_again(
        self,
        reads: Reads,
        failures: dict[BookieId, dict[int, Answer]],
        fingerprints: Mapping[BookieId, Fingerprints],
    ) -> None:
        """Repeat failed reads until each entry is given, or its failure is certain. Changes
        ``failures`` and ``fingerprints``."""
        errors = Counter(_unreadable(failures))
        for _ in range(AGAIN_MAX):
            again = self._still_open(reads, failures, errors)
            if not again:
                break
            await self._clock.sleep(AGAIN_AFTER_S)
            result = await self._transfer(again, bool(fingerprints))
            errors.update(_unreadable(result.failures))
            for bookie, entry_ids in again.items():
                now = result.failures.get(bookie, {})
                failures[bookie].update(now)
                for given in set(entry_ids).difference(now):
                    del failures[bookie][given]
                if bookie in result.fingerprints:
                    _complete(fingerprints[bookie], result.fingerprints[bookie], entry_ids)
        for bookie, answers in failures.items():
            for entry_id in _open_entries(bookie, answers, errors):
                answers[entry_id] = Answer.UNKNOWN

    def _still_open(
        self, reads: Reads, failures: Mapping[BookieId, Mapping[int, Answer]], errors: Errors
    ) -> dict[BookieId, list[int]]:
        """Return the entries whose answers prove nothing yet, for bookies that answered at least
        once."""
        still_open = {
            bookie: _open_entries(bookie, answers, errors)
            for bookie, answers in failures.items()
            if bookie not in self.silent and not _answered_nothing(reads[bookie], answers)
        }
        return {bookie: entry_ids for bookie, entry_ids in still_open.items() if entry_ids}

    async def _transfer(self, reads: Reads, compares: bool) -> TransferResult:
        result = await self._bookies.transfer(
            Transfer(
                ledger_id=self._ledger_id,
                digest=self._digest,
                reads=reads,
                entry_bytes_hint=self._entry_bytes,
                takes_fingerprints=compares,
            )
        )
        self.entry_count += result.entry_count
        self.byte_count += result.entry_bytes
        self.silent |= result.silent
        return result


def _open_entries(bookie: BookieId, answers: Mapping[int, Answer], errors: Errors) -> list[int]:
    """Return the entries, ascending, for which the bookie's answer proves nothing yet."""
    return [
        entry_id
        for entry_id, answer in sorted(answers.items())
        if answer is Answer.UNKNOWN
        or (answer is Answer.UNREADABLE and errors[bookie, entry_id] < 2)
    ]


def _unreadable(failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[tuple[BookieId, int]]:
    return [
        (bookie, entry_id)
        for bookie, answers in failures.items()
        for entry_id, answer in answers.items()
        if answer is Answer.UNREADABLE
    ]


def _answered_nothing(asked: Sequence[int], answers: Mapping[int, Answer]) -> bool:
    return len(answers) == len(asked) and all(a is Answer.UNKNOWN for a in answers.values())


def _complete(known: Fingerprints, more: Fingerprints, entry_ids: Sequence[int]) -> None:
    for entry_id in entry_ids:
        if (value := more.of(entry_id)) != NO_FINGERPRINT:
            known.values[entry_id - known.first_entry_id] = value


_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def sampled(first: int, last: int, *, share: float, seed: int) -> Iterator[int]:
    """Yield about ``share`` of the ids from the first to the last, ascending: one of each
    ``1 / share`` consecutive ids.

    The seed and the position decide which one, so that every reader of the ledger draws the same
    entries. Each group of ids has a draw of its own, so that striping does not favour a bookie.
    """
    assert 0 < share <= 1, share
    previous = first - 1
    for row in range(floor(first * share), ceil((last + 1) * share)):
        entry_id = floor((row + _drawn(row, seed)) / share)
        if previous < entry_id <= last:
            previous = entry_id
            yield entry_id


def _drawn(row: int, seed: int) -> float:
    """Return a pseudo-random number, evenly distributed from 0 (inclusive) to 1 (exclusive)."""
    mixed = (row * _MIX + seed * 0xD1B5_4A32_D192_ED03 + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    return (mixed >> 11) / (1 << 53)


STRETCH_COPIES = 32_768
"""Number of copies of one ledger that are requested at once."""

Refusals = Mapping[BookieId, ReadFailures]
NOTHING_SEEN: Refusals = MappingProxyType({})


class LedgerLook:
    """One check of one ledger's copies. Call ``run`` once; ``summing_up`` holds the result."""

    def __init__(
        self,
        versioned: VersionedMetadata,
        fragments: Sequence[Fragment],
        *,
        is_end_known: bool,
        available: frozenset[BookieId],
        reads: LedgerReads,
        options: FsckOptions,
        lists: EntryLists | None,
        is_last_word: bool,
        young: Collection[BookieId] = (),
    ) -> None:
        """``fragments``: all fragments, the last one as far as its end is known. ``available``: the
        registered bookies. ``is_last_word``: True at the second look. ``young``: bookies that were
        set up after the ledger was created."""
        self._metadata = versioned.metadata
        self._ledger_id = versioned.ledger_id
        self._fragments = fragments
        self._available = available
        self._members = versioned.metadata.bookies
        """The bookies of all fragments."""
        self._gone = self._members - available
        self._reads = reads
        self._options = options
        self._lists = lists
        self._is_last_word = is_last_word
        self._young = young
        self.summing_up = SummingUp(versioned)
        for position, fragment in enumerate(fragments):
            is_last = position == len(fragments) - 1
            self.summing_up.add_fragment(
                position, fragment, is_unknown=is_last and not is_end_known
            )

    async def run(self) -> None:
        match self._options.level:
            case Level.METADATA:
                for position, fragment in self._with_entries():
                    await self._go_through(position, fragment)
            case Level.FULL:
                for position, fragment in self._with_entries():
                    await self._go_through(position, fragment, frozenset(fragment.ensemble))
                await self._look_for_strays()
            case _:
                await self._look_at_some()

    def verdict(self, *, checked_ms: int) -> LedgerVerdict:
        self.summing_up.entries_read = self._reads.entry_count
        self.summing_up.bytes_read = self._reads.byte_count
        has_key = self._metadata.password is not None
        is_key_suspect = (
            not has_key and self._reads.mismatch_count > 0 and self._reads.entry_count == 0
        )
        return self.summing_up.verdict(checked_ms=checked_ms, is_key_suspect=is_key_suspect)

    def _with_entries(self) -> Iterator[tuple[int, Fragment]]:
        for position, fragment in enumerate(self._fragments):
            if _last(fragment) >= fragment.first_entry_id:
                yield position, fragment

    # --- Some of the entries -----------------------------------------------------------------------

    async def _look_at_some(self) -> None:
        """Check the ends of all fragments at once, then the rest of each as needed."""
        suspects: Collection[BookieId] = ()
        found = [fragment for _, fragment in self._with_entries()]
        if self._lists is not None and found:
            suspects = await self._lists.lacking(found, self._available)
        ends = plan_reads(found, available=self._available, suspects=())
        refused = (await self._reads.ask_runs(ends)).refused
        for position, fragment in self._with_entries():
            seen = _within(fragment, refused)
            lacking = {b for b in fragment.ensemble if b in suspects}
            lacking |= {bookie for bookie, refused in seen.items() if refused.has_bad}
            if self._options.level is Level.SAMPLE:
                lacking |= await self._look_at_sample(fragment, lacking, seen)
            await self._go_through(position, fragment, frozenset(lacking), seen)

    async def _look_at_sample(
        self, fragment: Fragment, lacking: Collection[BookieId], seen: dict[BookieId, ReadFailures]
    ) -> set[BookieId]:
        """Return the bookies that lack a sampled entry. Unanswered entries of other bookies are
        added to ``seen``."""
        share = self._options.sample_share
        width = max(1, int(STRETCH_COPIES / share) // fragment.write_quorum)
        found: set[BookieId] = set()
        # Stretches are this long so that a sample of one is about ``STRETCH_COPIES`` copies.
        for first, last in _stretches(fragment, width):
            sample = list(
                sampled(first, last, share=share, seed=self._options.seed ^ self._ledger_id)
            )
            asked = self._available.difference(lacking, found)
            reads = _by_bookie(fragment, asked, partial(_sampled_of, fragment, sample))
            for bookie, refused in (await self._reads.ask(reads)).refused.items():
                if refused.has_bad:
                    found.add(bookie)
                else:
                    known = seen.get(bookie, ReadFailures())
                    seen[bookie] = ReadFailures(unknown=merged(known.unknown, refused.unknown))
        return found

    # --- All entries of some bookies ---------------------------------------------------------------

    async def _go_through(
        self,
        position: int,
        fragment: Fragment,
        asked: frozenset[BookieId] = frozenset(),
        seen: Refusals = NOTHING_SEEN,
    ) -> None:
        """Judge the whole fragment: by all entries of the ``asked`` bookies, and by ``seen`` for
        the others."""
        asked &= self._available
        others = {b: refused for b, refused in seen.items() if b not in asked}
        missed = self._gone | self._reads.silent
        is_all_there = missed.isdisjoint(fragment.ensemble) and not stand_again(fragment)
        if not asked and not others and is_all_there:
            return
        span = _last(fragment) - fragment.first_entry_id + 1
        width = max(1, STRETCH_COPIES // fragment.write_quorum) if asked or others else span
        excused = excused_indexes(self._metadata, fragment, young=self._young)
        for first, last in _stretches(fragment, width):
            answers = await self._reads.ask(
                _by_bookie(fragment, asked, partial(_listed, fragment, first=first, last=last)),
                compares=self._options.level is Level.FULL and fragment.write_quorum > 1,
            )
            refused = others | answers.refused
            stretch = Stretch(
                fragment=fragment,
                first_entry_id=first,
                last_entry_id=last,
                ack_quorum=self._metadata.ack_quorum,
                refused=refused,
                gone=self._gone,
                silent=frozenset(self._reads.silent - refused.keys()),
                excused=excused,
                differing=differing(fragment, first, last, answers.fingerprints),
            )
            if not stretch.is_good:
                self.summing_up.add(position, judge(await self._with_cures(stretch)))

    # --- Copies elsewhere --------------------------------------------------------------------------

    async def _with_cures(self, stretch: Stretch) -> Stretch:
        """Add good copies on other bookies, for entries whose recorded copies are all bad."""
        lost = without_copy(stretch)
        if not lost:
            return stretch
        former = self._members - set(stretch.fragment.ensemble)
        found = await self._copies_at(former - self._gone, lost)
        is_known = former.isdisjoint(self._reads.silent | self._gone)
        if self._is_last_word and not any(len(each) == len(lost) for each in found.values()):
            # One entry is enough to find the bookies that are worth asking for all of them.
            others = self._available - self._members
            holders = await self._copies_at(others, EntryRuns(lost[:1]))
            found |= await self._copies_at(holders.keys(), lost)
        return replace(stretch, elsewhere=found, is_elsewhere_known=is_known)

    async def _copies_at(
        self, bookies: Collection[BookieId], entries: EntryRuns
    ) -> dict[BookieId, EntryRuns]:
        """Return by bookie which of the entries it has. Bookies that have none are left out."""
        if not bookies:
            return {}
        refused = (await self._reads.ask_runs(dict.fromkeys(sorted(bookies), (entries,)))).refused
        given = {}
        for bookie in sorted(set(bookies) - self._reads.silent):
            refusal = refused.get(bookie)
            good = entries if refusal is None else EntryRuns(e for e in entries if e not in refusal)
            if good:
                given[bookie] = good
        return given

    async def _look_for_strays(self) -> None:
        """Note former members that still have the first or last entry of a fragment."""
        asked: dict[BookieId, list[list[int]]] = {}
        for _, fragment in self._with_entries():
            ends = sorted({fragment.first_entry_id, _last(fragment)})
            for bookie in sorted(self._members - set(fragment.ensemble) - self._gone):
                asked.setdefault(bookie, []).append(ends)
        if not asked:
            return
        refused = (await self._reads.ask_runs(asked)).refused
        for bookie, runs in asked.items():
            if bookie in self._reads.silent:
                continue
            refusal = refused.get(bookie)
            for ends in runs:
                given = [e for e in ends if refusal is None or e not in refusal]
                if given:
                    self.summing_up.note([_stray(bookie, given)], fragment_start=ends[0])


def _stray(bookie: BookieId, entry_ids: Sequence[int]) -> Evidence:
    return Evidence(
        finding=Finding.STRAY,
        bookie=bookie,
        first_entry_id=entry_ids[0],
        last_entry_id=entry_ids[-1],
        entry_count=len(entry_ids),
        code="good_copy",
    )


def _last(fragment: Fragment) -> int:
    assert fragment.last_entry_id is not None, fragment
    return fragment.last_entry_id


def _stretches(fragment: Fragment, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last entry of each stretch, both inclusive."""
    last = _last(fragment)
    for first in range(fragment.first_entry_id, last + 1, width):
        yield first, min(first + width - 1, last)


def _by_bookie(
    fragment: Fragment, asked: Collection[BookieId], listed: Callable[[int], Sequence[int]]
) -> dict[BookieId, Sequence[int]]:
    """Return the entries to read from each bookie. ``listed``: returns the entries of a bookie
    index. For a bookie that is in the ensemble twice, the entries of both indexes are merged."""
    reads: dict[BookieId, Sequence[int]] = {}
    for index, bookie in enumerate(fragment.ensemble):
        if bookie in asked and (entries := listed(index)):
            known = reads.get(bookie)
            reads[bookie] = entries if known is None else sorted({*known, *entries})
    return reads


def _sampled_of(fragment: Fragment, sample: Sequence[int], index: int) -> Sequence[int]:
    """Return the sampled entries that the index stores, except its first and last entry."""
    inner = fragment.entries_of(index)[1:-1]
    return [entry_id for entry_id in sample if entry_id in inner]


def _listed(fragment: Fragment, index: int, *, first: int, last: int) -> Sequence[int]:
    """Return the index's entries in this range; as a ``range``, which is cheap to slice, if the
    bookie stores all of them."""
    if fragment.ensemble_size == fragment.write_quorum:
        return range(first, last + 1)
    return list(fragment.entries_of(index).between(first, last))


def _within(fragment: Fragment, refused: Refusals) -> dict[BookieId, ReadFailures]:
    """Return what the fragment's members refused of its entries."""
    first, last = fragment.first_entry_id, _last(fragment)
    found = {b: refused[b].between(first, last) for b in fragment.ensemble if b in refused}
    return {bookie: part for bookie, part in found.items() if not part.is_empty}
