"""The inspection of one ledger: its end, its copies, its placement, and whether it is idle.

``LedgerInspector.inspect`` is the one entry point. It asks the bookies as the level requires,
passes the answers about each range of entries to ``judge``, and returns the verdict on the ledger,
with one for each run of entries on one ensemble.

In a ledger that is not closed, only acknowledged entries are expected. Bookies report the last one
without being fenced. The recheck expects only what was acknowledged at the first inspection.

Entries beyond the LAC may be acknowledged too in two cases: after an interrupted recovery, and in
an idle ledger with a reformatted bookie. Then every entry that any bookie shows is expected. If no
bookie was reformatted, an interrupted recovery's entries end before the first one that all its
bookies deny: no writer was told that such an entry is acknowledged.

A fragment is inspected in ranges of entries, so that memory does not depend on its size. At the
levels ``ends`` and ``sample``, a bookie that lacks a requested entry is asked for all its entries
of that fragment. If no recorded copy of an entry is good, former members of the ensemble are asked
too. The recheck also asks all other registered bookies.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from math import ceil, floor

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
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.fencing import first_entry_of, latecomers
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.mixing import mix64
from ledgers.model import BookieId, DigestType, Fragment, LedgerState, known_fragments
from ledgers.placement import Adherence, PlacementPolicy
from ledgers.reading import LedgerReader, find_end, highest_entry_id, ledger_digest
from ledgers.tasks import read_ahead
from replication.cluster import ClusterView, ViewSource
from replication.copy_reader import GAVE_ALL, CopyReader, ReadFailures, ReadPlan, plan_reads
from replication.entry_runs import EntryRuns, merged
from replication.inspection import IN_FLIGHT_WAIT_S, entry_bytes_guess
from replication.open_ledgers import wiped_from_end

RANGE_COPIES = 32_768
"""Number of copies of one ledger that are requested at once."""

FailuresByBookie = Mapping[BookieId, ReadFailures]
_NO_END = "no_end"


@dataclass(kw_only=True)
class LedgerInspector:
    """Inspects ledgers, many at once. Each executor has one."""

    options: FsckOptions
    manager: LedgerManager
    bookies: Bookies
    views: ViewSource
    clock: Clock

    def __post_init__(self) -> None:
        options = self.options
        self.fallback = EntryDigest(
            DigestType[options.default_digest_type], options.default_password.reveal().encode()
        )
        self.policy = (
            PlacementPolicy(options.rule, random.Random(), locate=options.racks.get)
            if options.rule is not None
            else None
        )

    async def inspect(
        self, versioned: VersionedMetadata, previous: LedgerVerdict | None = None
    ) -> LedgerVerdict:
        """Return the verdict on one ledger, read at the level of the options. ``previous``: the
        verdict of the first inspection, if this is the recheck."""
        return await _Inspection(self, versioned, previous).run()


@dataclass
class _Inspection:
    """One inspection of one ledger."""

    _inspector: LedgerInspector
    _versioned: VersionedMetadata
    _previous: LedgerVerdict | None

    def __post_init__(self) -> None:
        inspector, versioned = self._inspector, self._versioned
        self._options, self._clock = inspector.options, inspector.clock
        self._bookies, self._metadata = inspector.bookies, versioned.metadata
        self._digest = ledger_digest(versioned.metadata, inspector.fallback)
        self._members = versioned.metadata.bookies
        """The bookies of all fragments."""
        self._asks = inspector.options.level is not Level.METADATA
        """True if the level asks bookies at all."""
        self._builder = VerdictBuilder(versioned)
        self._reader = CopyReader(
            versioned.ledger_id,
            bookies=inspector.bookies,
            digest=self._digest,
            entry_bytes=entry_bytes_guess(versioned.metadata, self._digest),
            retry_clock=inspector.clock,
        )

    @property
    def _view(self) -> ClusterView:
        return self._inspector.views.current

    def _find_reformatted(self) -> Collection[BookieId]:
        """Return the bookies whose cookie is newer than the ledger, in the present view."""
        return self._view.initialised_after(self._versioned.stat.czxid)

    async def run(self) -> LedgerVerdict:
        versioned, builder = self._versioned, self._builder
        expected, is_end_known = await self._find_end()
        is_idle = is_end_known and self._is_idle()
        if self._asks and is_end_known and not self._metadata.is_closed:
            expected, builder.is_tail_unseen = await self._last_to_inspect(
                expected, is_idle=is_idle and self._previous is not None
            )
        # All copies are judged by one view.
        self._available = self._view.available
        self._absent = self._members - self._available
        self._reformatted = self._find_reformatted()
        fragments = known_fragments(versioned.ledger_id, self._metadata, lac=expected)
        for position, fragment in enumerate(fragments):
            is_last = position == len(fragments) - 1
            builder.add_fragment(position, fragment, is_unknown=is_last and not is_end_known)
        await self._inspect_copies(
            {
                position: fragment
                for position, fragment in enumerate(fragments)
                if _last(fragment) >= fragment.first_entry_id
            }
        )
        builder.add_evidence(self._misplaced())
        builder.mark_end_unproven(self._unproven_end())
        if is_idle:
            builder.add_evidence([Evidence(finding=Finding.IDLE_OPEN, code="last_entry_unchanged")])
        builder.entries_read = self._reader.entry_count
        builder.bytes_read = self._reader.byte_count
        return builder.verdict(
            checked_ms=self._clock.wall_ms(),
            is_key_suspect=self._reader.is_key_suspect(self._metadata),
        )

    # --- The end ---------------------------------------------------------------------------------

    async def _find_end(self) -> tuple[int, bool]:
        """Return the last entry that is expected, and whether the end is known. Records the last
        acknowledged entry, the length, and why the end is not known. Sends no request if the ledger
        is closed, or at level ``metadata``."""
        metadata, previous, builder = self._metadata, self._previous, self._builder
        if metadata.is_closed:
            builder.last_entry_id, builder.length = metadata.last_entry_id, metadata.length
            return metadata.last_entry_id, True
        settled = metadata.last_segment.first_entry_id - 1
        builder.last_entry_id, builder.length = settled, 0
        if not self._asks:  # no bookie is asked for entries after the last ensemble change
            absent = sorted(set(metadata.last_segment.ensemble) - self._view.available)
            builder.add_evidence(
                Evidence(finding=Finding.BOOKIE_GONE, bookie=bookie, code="not_registered")
                for bookie in absent
            )
            return settled, not absent
        try:
            opened = await find_end(
                self._versioned,
                bookies=self._bookies,
                clock=self._clock,
                fallback=self._inspector.fallback,
            )
        except (UnavailableError, UnauthorizedError, CorruptionError) as error:
            why = Evidence(finding=Finding.NOT_ANSWERED, code=_NO_END, detail=str(error))
            builder.add_evidence([why])
            return settled, False
        builder.last_entry_id, builder.length = opened.lac, opened.length
        if previous is None or not previous.state:  # its metadata was unreadable
            return opened.lac, True
        knew_end = all(each.code != _NO_END for each in previous.evidence)
        if knew_end and settled <= previous.last_entry_id < opened.lac:
            return previous.last_entry_id, True  # copies of later entries may be in flight
        return opened.lac, True

    async def _last_to_inspect(self, last: int, *, is_idle: bool) -> tuple[int, bool]:
        """Return the last entry to inspect in a ledger that is not closed, and whether later
        entries may exist.

        The result exceeds ``last``, the LAC, only by entries that may have been acknowledged. Later
        entries may exist if no bookie was asked for any, or if one did not report its last entry.
        ``is_idle``: True if nothing was written since the first inspection.
        """
        members = self._view.available.intersection(self._metadata.last_segment.ensemble)
        has_reformatted = not members.isdisjoint(self._find_reformatted())
        is_in_recovery = self._metadata.state is LedgerState.IN_RECOVERY
        if not (is_in_recovery or (is_idle and has_reformatted)):
            return last, True
        shown, unresponsive = await highest_entry_id(
            self._bookies, members, self._versioned.ledger_id, digest=self._digest
        )
        is_unseen = bool(unresponsive)
        if shown <= last:
            return last, is_unseen
        if is_in_recovery and not has_reformatted:
            return await self._last_before_gap(last, shown), is_unseen
        if not is_in_recovery:
            await self._clock.sleep(IN_FLIGHT_WAIT_S)  # copies of the last adds may be in flight
        return shown, is_unseen

    async def _last_before_gap(self, last: int, shown: int) -> int:
        """Return the last entry up to ``shown`` before the first one that all its bookies deny. A
        writer that died may have left later entries that were in flight. Damaged or unanswered
        entries are no gap."""
        reader = LedgerReader(
            self._versioned.ledger_id,
            self._metadata,
            digest=self._digest,
            bookies=self._bookies,
            clock=self._clock,
        )

        async def read(entry_id: int) -> bytes | None:
            try:
                return await reader.read(entry_id)
            except NoSuchEntryError:
                return None
            except BookmenderError:
                return b""

        async with aclosing(read_ahead(range(last + 1, shown + 1), read)) as entries:
            return last + sum([1 async for _ in entries])

    def _unproven_end(self) -> Sequence[Evidence]:
        """Return an observation for each bookie whose "no such entry" recovery would not trust, if
        the end cannot be proven without it (rule S5)."""
        reformatted = self._find_reformatted()
        lacking = [
            bookie
            for bookie in reformatted
            if bookie in self._metadata.last_segment.ensemble
            and self._builder.lacks(bookie, first_entry_of(self._metadata, bookie))
        ]
        late = latecomers(self._metadata, reformatted)
        return [
            Evidence(
                finding=Finding.END_UNPROVEN,
                bookie=bookie,
                code="lacks_first_entry" if bookie in late else "set_up_later",
                detail="reformatted after the ledger was created; may have lost acknowledged "
                "entries of its end",
            )
            for bookie in wiped_from_end(self._versioned, self._view, lacking=lacking)
        ]

    def _is_idle(self) -> bool:
        """True if an open ledger seems abandoned: its metadata is old enough and, at the
        recheck, its last entry is unchanged."""
        metadata, previous = self._metadata, self._previous
        if metadata.is_closed or metadata.is_of_feed or not self._asks:
            return False
        age_s = (self._clock.wall_ms() - self._versioned.stat.mtime_ms) / 1_000
        if age_s < self._options.idle_open_after_s:
            return False
        return previous is None or (
            Finding.IDLE_OPEN in previous.findings
            and self._builder.last_entry_id == previous.last_entry_id
        )

    # --- The placement ---------------------------------------------------------------------------

    def _misplaced(self) -> Iterable[Evidence]:
        """Yield an observation for each ensemble that breaks the placement policy, at its first
        entry."""
        policy, metadata, racks = self._inspector.policy, self._metadata, self._options.racks
        if policy is None:
            return
        for segment in metadata.segments:
            found = policy.adherence(
                segment.ensemble, write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum
            )
            if found is Adherence.FAIL:
                yield Evidence(
                    finding=Finding.MISPLACED,
                    first_entry_id=segment.first_entry_id,
                    code="policy",
                    detail=", ".join(f"{b} in {racks.get(b, '?')}" for b in segment.ensemble),
                )

    # --- The copies ------------------------------------------------------------------------------

    async def _inspect_copies(self, fragments: Mapping[int, Fragment]) -> None:
        """Inspect the copies of these fragments, which have entries. The keys are their positions
        in the ledger."""
        level = self._options.level
        known: dict[int, dict[BookieId, ReadFailures]] = {}
        if level in (Level.ENDS, Level.SAMPLE):  # the ends of all fragments at once
            some = list(fragments.values())
            ends = plan_reads(some, available=self._available, suspects=())
            failures = (await self._reader.read(ends)).failures
            for position, fragment in fragments.items():
                parts = {
                    bookie: failures[bookie].between(fragment.first_entry_id, _last(fragment))
                    for bookie in fragment.ensemble
                    if bookie in failures
                }
                known[position] = {b: part for b, part in parts.items() if not part.is_empty}
        for position, fragment in fragments.items():
            found = known.get(position, {})
            asked = set(fragment.ensemble) if level is Level.FULL else set()
            asked |= {bookie for bookie, failed in found.items() if failed.bad_count}
            if level is Level.SAMPLE:
                asked |= await self._read_sample(fragment, asked, found)
            await self._inspect_fragment(position, fragment, asked, found)
        if level is Level.FULL:
            await self._find_strays(fragments.values())

    async def _read_sample(
        self, fragment: Fragment, lacking: Collection[BookieId], known: dict[BookieId, ReadFailures]
    ) -> set[BookieId]:
        """Return the bookies that lack a sampled entry. Unanswered entries of other bookies are
        added to ``known``."""
        ledger_id = self._versioned.ledger_id
        share, seed = self._options.share_of(ledger_id), self._options.seed ^ ledger_id
        width = max(1, int(RANGE_COPIES / share) // fragment.write_quorum)
        found: set[BookieId] = set()
        # Ranges are this long so that the sample of one is about ``RANGE_COPIES`` copies.
        for first, last in _ranges(fragment, width):
            sample = list(sampled(first, last, share=share, seed=seed))
            plan = _sample_plan(fragment, sample, self._available.difference(lacking, found))
            for bookie, failed in (await self._reader.read(plan)).failures.items():
                if failed.bad_count:
                    found.add(bookie)
                else:
                    before = known.get(bookie, ReadFailures())
                    known[bookie] = ReadFailures(unknown=merged(before.unknown, failed.unknown))
        return found

    async def _inspect_fragment(
        self,
        position: int,
        fragment: Fragment,
        asked: Collection[BookieId],
        known: FailuresByBookie,
    ) -> None:
        """Judge the whole fragment: by all entries of the ``asked`` bookies, and by the ``known``
        failures of the others."""
        asked = self._available.intersection(asked)
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
                self._builder.add_range(position, judge(await self._with_copies_elsewhere(entries)))

    async def _with_copies_elsewhere(self, entries: EntryRange) -> EntryRange:
        """Add good copies on other bookies, for entries whose recorded copies are all bad."""
        lost = entries_without_copy(entries)
        if not lost:
            return entries
        former = self._members - set(entries.fragment.ensemble)
        found = await self._good_copies(dict.fromkeys(sorted(former - self._absent), (lost,)))
        is_known = former.isdisjoint(self._reader.unresponsive | self._absent)
        is_recheck = self._previous is not None
        if is_recheck and not any(len(each) == len(lost) for each in found.values()):
            # One entry is enough to find the bookies that are worth asking for all of them.
            others = sorted(self._available - self._members)
            holders = await self._good_copies(dict.fromkeys(others, (lost[:1],)))
            found |= await self._good_copies(dict.fromkeys(holders, (lost,)))
        return replace(entries, elsewhere=found, is_elsewhere_known=is_known)

    async def _find_strays(self, fragments: Iterable[Fragment]) -> None:
        """Add evidence of former members that still have the first or last entry of a fragment."""
        asked: dict[BookieId, list[list[int]]] = {}
        for fragment in fragments:
            ends = sorted({fragment.first_entry_id, _last(fragment)})
            for bookie in sorted(self._members - set(fragment.ensemble) - self._absent):
                asked.setdefault(bookie, []).append(ends)
        found = await self._good_copies(asked)
        for bookie, good_copies in found.items():
            for ends in asked[bookie]:
                if good := [entry_id for entry_id in ends if entry_id in good_copies]:
                    stray = Evidence(
                        finding=Finding.STRAY,
                        bookie=bookie,
                        first_entry_id=good[0],
                        last_entry_id=good[-1],
                        entry_count=len(good),
                        code="good_copy",
                    )
                    self._builder.add_evidence([stray], fragment_start=ends[0])

    async def _good_copies(self, plan: ReadPlan) -> dict[BookieId, EntryRuns]:
        """Return by bookie which of the entries it has. Bookies that have none are left out."""
        failures = (await self._reader.read(plan)).failures
        found = {}
        for bookie, runs in plan.items():
            failed = failures.get(bookie, GAVE_ALL)
            good = EntryRuns(e for run in runs for e in run if e not in failed)
            if good and bookie not in self._reader.unresponsive:
                found[bookie] = good
        return found


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
