"""The check of one ledger's copies: asks its bookies as the level requires, and judges the answers.

A ledger is checked stretch by stretch. At the levels ``ends`` and ``sample``, a bookie that lacks a
requested entry is asked for all its entries of that fragment. Entries without a recorded copy are
looked for on former members, which the metadata still names. The second look also tries all other
registered bookies.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from auditor.fsck.comparing import differing
from auditor.fsck.judging import Stretch, excused_indexes, judge, stand_again, without_copy
from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.reads import LedgerReads
from auditor.fsck.sampling import sampled
from auditor.fsck.summing_up import SummingUp
from auditor.fsck.verdicts import Evidence, Finding, LedgerVerdict
from ledgers.fragments import Fragment
from ledgers.manager import VersionedMetadata
from ledgers.metadata import BookieId
from replication.planning.entry_lists import EntryLists
from replication.planning.entry_runs import EntryRuns, merged
from replication.planning.questions import Refused, questions

STRETCH_COPIES = 32_768
"""Number of copies of one ledger that are requested at once."""

Refusals = Mapping[BookieId, Refused]
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
        distrusted: Collection[BookieId] = ()
        found = [fragment for _, fragment in self._with_entries()]
        if self._lists is not None and found:
            distrusted = await self._lists.lacking(found, self._available)
        ends = questions(found, available=self._available, distrusted=())
        refused = (await self._reads.ask_runs(ends)).refused
        for position, fragment in self._with_entries():
            seen = _within(fragment, refused)
            lacking = {b for b in fragment.ensemble if b in distrusted}
            lacking |= {bookie for bookie, refused in seen.items() if refused.has_bad}
            if self._options.level is Level.SAMPLE:
                lacking |= await self._look_at_sample(fragment, lacking, seen)
            await self._go_through(position, fragment, frozenset(lacking), seen)

    async def _look_at_sample(
        self, fragment: Fragment, lacking: Collection[BookieId], seen: dict[BookieId, Refused]
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
                    known = seen.get(bookie, Refused())
                    seen[bookie] = Refused(unknown=merged(known.unknown, refused.unknown))
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


def _within(fragment: Fragment, refused: Refusals) -> dict[BookieId, Refused]:
    """Return what the fragment's members refused of its entries."""
    first, last = fragment.first_entry_id, _last(fragment)
    found = {b: refused[b].between(first, last) for b in fragment.ensemble if b in refused}
    return {bookie: part for bookie, part in found.items() if not part.is_empty}
