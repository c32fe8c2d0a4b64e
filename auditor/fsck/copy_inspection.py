"""The inspection of one ledger's copies: asks its bookies as the level requires, and judges the
answers.

A fragment is inspected in ranges of entries, so that memory does not depend on its size. At the
levels ``ends`` and ``sample``, a bookie that lacks a requested entry is asked for all its entries
of that fragment. If no recorded copy of an entry is good, former members of the ensemble are asked
too. The recheck also asks all other registered bookies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from types import MappingProxyType

from msgspec import structs

from auditor.fsck.judge import (
    EntryRange,
    VerdictBuilder,
    differing_copies,
    entries_without_copy,
    excused_indexes,
    has_duplicate_bookie,
    judge,
)
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import Evidence, Finding, LedgerVerdict
from ledgers.manager import VersionedMetadata
from ledgers.mixing import mix64
from ledgers.model import BookieId, Fragment
from replication.copy_reader import CopyReader, EntryLists, ReadFailures, ReadPlan, plan_reads
from replication.entry_runs import EntryRuns, merged

RANGE_COPIES = 32_768
"""Number of copies of one ledger that are requested at once."""

FailuresByBookie = Mapping[BookieId, ReadFailures]
NO_FAILURES: FailuresByBookie = MappingProxyType({})


class CopyInspection:
    """One inspection of one ledger's copies. Call ``run`` once, then ``verdict``; ``builder``
    collects the result."""

    def __init__(
        self,
        versioned: VersionedMetadata,
        fragments: Sequence[Fragment],
        *,
        is_end_known: bool,
        available: frozenset[BookieId],
        reader: CopyReader,
        options: FsckOptions,
        lists: EntryLists | None,
        is_recheck: bool,
        reformatted: Collection[BookieId] = (),
    ) -> None:
        """``fragments``: all fragments, the last one as far as its end is known. ``available``: the
        registered bookies. ``is_recheck``: True if this is the recheck. ``reformatted``: bookies
        whose cookie is newer than the ledger."""
        self._metadata = versioned.metadata
        self._ledger_id = versioned.ledger_id
        self._fragments = fragments
        self._available = available
        self._members = versioned.metadata.bookies
        """The bookies of all fragments."""
        self._absent = self._members - available
        self._reader = reader
        self._options = options
        self._lists = lists
        self._is_recheck = is_recheck
        self._reformatted = reformatted
        self.builder = VerdictBuilder(versioned)
        for position, fragment in enumerate(fragments):
            is_last = position == len(fragments) - 1
            self.builder.add_fragment(position, fragment, is_unknown=is_last and not is_end_known)

    async def run(self) -> None:
        match self._options.level:
            case Level.METADATA:
                for position, fragment in self._with_entries():
                    await self._inspect_fragment(position, fragment)
            case Level.FULL:
                for position, fragment in self._with_entries():
                    await self._inspect_fragment(position, fragment, frozenset(fragment.ensemble))
                await self._find_strays()
            case _:
                await self._inspect_some()

    def verdict(self, *, checked_ms: int) -> LedgerVerdict:
        self.builder.entries_read = self._reader.entry_count
        self.builder.bytes_read = self._reader.byte_count
        has_key = self._metadata.password is not None
        return self.builder.verdict(
            checked_ms=checked_ms,
            is_key_suspect=not has_key and self._reader.has_only_mismatches,
        )

    def _with_entries(self) -> Iterator[tuple[int, Fragment]]:
        for position, fragment in enumerate(self._fragments):
            if _last(fragment) >= fragment.first_entry_id:
                yield position, fragment

    # --- Levels ends and sample -------------------------------------------------------------------

    async def _inspect_some(self) -> None:
        """Check the ends of all fragments at once, then the rest of each as needed."""
        lacking_by_list: Collection[BookieId] = ()
        fragments = [fragment for _, fragment in self._with_entries()]
        if self._lists is not None and fragments:
            lacking_by_list = await self._lists.lacking(fragments, self._available)
        ends = plan_reads(fragments, available=self._available, suspects=())
        failures = (await self._reader.read(ends)).failures
        for position, fragment in self._with_entries():
            known = _within(fragment, failures)
            lacking = {b for b in fragment.ensemble if b in lacking_by_list}
            lacking |= {bookie for bookie, failed in known.items() if failed.has_bad}
            if self._options.level is Level.SAMPLE:
                lacking |= await self._read_sample(fragment, lacking, known)
            await self._inspect_fragment(position, fragment, frozenset(lacking), known)

    async def _read_sample(
        self, fragment: Fragment, lacking: Collection[BookieId], known: dict[BookieId, ReadFailures]
    ) -> set[BookieId]:
        """Return the bookies that lack a sampled entry. Unanswered entries of other bookies are
        added to ``known``."""
        share = self._options.share_of(self._ledger_id)
        width = max(1, int(RANGE_COPIES / share) // fragment.write_quorum)
        found: set[BookieId] = set()
        # Ranges are this long so that the sample of one is about ``RANGE_COPIES`` copies.
        for first, last in _ranges(fragment, width):
            sample = list(
                sampled(first, last, share=share, seed=self._options.seed ^ self._ledger_id)
            )
            bookies = self._available.difference(lacking, found)
            plan = _sample_plan(fragment, sample, bookies)
            for bookie, failed in (await self._reader.read(plan)).failures.items():
                if failed.has_bad:
                    found.add(bookie)
                else:
                    before = known.get(bookie, ReadFailures())
                    known[bookie] = ReadFailures(unknown=merged(before.unknown, failed.unknown))
        return found

    # --- All entries of some bookies --------------------------------------------------------------

    async def _inspect_fragment(
        self,
        position: int,
        fragment: Fragment,
        asked: frozenset[BookieId] = frozenset(),
        known: FailuresByBookie = NO_FAILURES,
    ) -> None:
        """Judge the whole fragment: by all entries of the ``asked`` bookies, and by the ``known``
        failures of the others."""
        asked &= self._available
        others = {b: failed for b, failed in known.items() if b not in asked}
        unread = self._absent | self._reader.unresponsive
        is_all_good = unread.isdisjoint(fragment.ensemble) and not has_duplicate_bookie(fragment)
        if not asked and not others and is_all_good:
            return
        span = _last(fragment) - fragment.first_entry_id + 1
        width = max(1, RANGE_COPIES // fragment.write_quorum) if asked or others else span
        excused = excused_indexes(self._metadata, fragment, reformatted=self._reformatted)
        for first, last in _ranges(fragment, width):
            part = structs.replace(fragment, first_entry_id=first, last_entry_id=last)
            answers = await self._reader.read(
                plan_reads([part], available=asked, suspects=asked),
                compares=self._options.level is Level.FULL and fragment.write_quorum > 1,
            )
            failures = others | answers.failures
            entries = EntryRange(
                fragment=fragment,
                first_entry_id=first,
                last_entry_id=last,
                ack_quorum=self._metadata.ack_quorum,
                failures=failures,
                absent=self._absent,
                unresponsive=frozenset(self._reader.unresponsive - failures.keys()),
                excused=excused,
                differing=differing_copies(fragment, first, last, answers.fingerprints),
            )
            if not entries.is_good:
                self.builder.add_range(position, judge(await self._with_copies_elsewhere(entries)))

    # --- Copies elsewhere -------------------------------------------------------------------------

    async def _with_copies_elsewhere(self, entries: EntryRange) -> EntryRange:
        """Add good copies on other bookies, for entries whose recorded copies are all bad."""
        lost = entries_without_copy(entries)
        if not lost:
            return entries
        former = self._members - set(entries.fragment.ensemble)
        found = await self._copies_at(former - self._absent, lost)
        is_known = former.isdisjoint(self._reader.unresponsive | self._absent)
        if self._is_recheck and not any(len(each) == len(lost) for each in found.values()):
            # One entry is enough to find the bookies that are worth asking for all of them.
            others = self._available - self._members
            holders = await self._copies_at(others, EntryRuns(lost[:1]))
            found |= await self._copies_at(holders.keys(), lost)
        return replace(entries, elsewhere=found, is_elsewhere_known=is_known)

    async def _copies_at(
        self, bookies: Collection[BookieId], entries: EntryRuns
    ) -> dict[BookieId, EntryRuns]:
        """Return by bookie which of the entries it has. Bookies that have none are left out."""
        if not bookies:
            return {}
        plan = dict.fromkeys(sorted(bookies), (entries,))
        failures = (await self._reader.read(plan)).failures
        good_copies = {}
        for bookie in sorted(set(bookies) - self._reader.unresponsive):
            failed = failures.get(bookie)
            good = entries if failed is None else EntryRuns(e for e in entries if e not in failed)
            if good:
                good_copies[bookie] = good
        return good_copies

    async def _find_strays(self) -> None:
        """Add evidence of former members that still have the first or last entry of a fragment."""
        asked: dict[BookieId, list[list[int]]] = {}
        for _, fragment in self._with_entries():
            ends = sorted({fragment.first_entry_id, _last(fragment)})
            for bookie in sorted(self._members - set(fragment.ensemble) - self._absent):
                asked.setdefault(bookie, []).append(ends)
        if not asked:
            return
        failures = (await self._reader.read(asked)).failures
        for bookie, runs in asked.items():
            if bookie in self._reader.unresponsive:
                continue
            failed = failures.get(bookie)
            for ends in runs:
                good = [e for e in ends if failed is None or e not in failed]
                if good:
                    self.builder.add_evidence([_stray(bookie, good)], fragment_start=ends[0])


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


def _ranges(fragment: Fragment, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last entry of each range, both inclusive."""
    last = _last(fragment)
    for first in range(fragment.first_entry_id, last + 1, width):
        yield first, min(first + width - 1, last)


def _sample_plan(
    fragment: Fragment, sample: Sequence[int], bookies: Collection[BookieId]
) -> ReadPlan:
    """Return the sampled entries that each bookie index stores, except its first and last entry,
    for these bookies."""
    plan: dict[BookieId, tuple[Sequence[int]]] = {}
    for index, bookie in enumerate(fragment.ensemble):
        inner = fragment.entries_of(index)[1:-1]
        if bookie in bookies and (entry_ids := [e for e in sample if e in inner]):
            if bookie in plan:  # it is in the ensemble twice
                entry_ids = sorted({*plan[bookie][0], *entry_ids})
            plan[bookie] = (entry_ids,)
    return plan


def _within(fragment: Fragment, failures: FailuresByBookie) -> dict[BookieId, ReadFailures]:
    """Return the failed reads of the fragment's entries, by member."""
    first, last = fragment.first_entry_id, _last(fragment)
    found = {b: failures[b].between(first, last) for b in fragment.ensemble if b in failures}
    return {bookie: part for bookie, part in found.items() if not part.is_empty}


def sampled(first: int, last: int, *, share: float, seed: int) -> Iterator[int]:
    """Yield about ``share`` of the ids from the first to the last, ascending: one of each
    ``1 / share`` consecutive ids.

    The seed and the position decide which one, so that every reader of the ledger draws the same
    entries. Each group of ids has a draw of its own, so that striping does not favour a bookie.
    """
    assert 0 < share <= 1, share
    previous, mixed_seed = first - 1, mix64(seed)
    for group in range(floor(first * share), ceil((last + 1) * share)):
        draw = (mix64(mixed_seed + group) >> 11) / (1 << 53)  # from 0 to 1, exclusive
        entry_id = floor((group + draw) / share)
        if previous < entry_id <= last:
            previous = entry_id
            yield entry_id
