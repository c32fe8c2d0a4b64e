"""The inspection of one ledger: its end, its copies (``copy_inspection``), its placement, and
whether it is idle.

In a ledger that is not closed, only acknowledged entries are expected. Bookies report the last one
without being fenced. The recheck expects only what was acknowledged at the first inspection.

Entries beyond the LAC may be acknowledged too in two cases: after an interrupted recovery, and in
an idle ledger with a reformatted bookie. Then every entry that any bookie shows is expected. If no
bookie was reformatted, an interrupted recovery's entries end before the first one that all its
bookies deny: no writer was told that such an entry is acknowledged.
"""

import random
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from auditor.fsck.copy_inspection import CopyInspection
from auditor.fsck.judge import VerdictBuilder
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
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, DigestType, LedgerState, known_fragments
from ledgers.placement import Adherence, RuledPlacement
from ledgers.reading import LedgerReader, find_end, highest_entry_id, ledger_digest
from ledgers.tasks import read_ahead
from replication.cluster import ViewSource
from replication.copy_reader import CopyReader, EntryLists, Retries
from replication.inspection import IN_FLIGHT_WAIT_S, entry_bytes_guess
from replication.open_ledgers import wiped_from_end

RETRIES_MAX = 3
RETRY_WAIT_S = 0.5


class LedgerInspector:
    """Inspects ledgers, many at once. Each executor has one."""

    def __init__(
        self, options: FsckOptions, *, bookies: Bookies, views: ViewSource, clock: Clock
    ) -> None:
        self._options = options
        self._bookies = bookies
        self._views = views
        self._clock = clock
        self._retries = Retries(clock=clock, count_max=RETRIES_MAX, wait_s=RETRY_WAIT_S)
        self._lists = EntryLists(bookies, clock) if options.entry_lists else None
        self._fallback = EntryDigest(
            DigestType[options.default_digest_type], options.default_password.reveal().encode()
        )
        self._policy = (
            RuledPlacement(options.rule, random.Random(), locate=options.racks.get)
            if options.rule is not None
            else None
        )

    async def inspect(
        self, versioned: VersionedMetadata, previous: LedgerVerdict | None = None
    ) -> LedgerVerdict:
        """Return the verdict on one ledger. ``previous``: the verdict of the first inspection, if
        this is the recheck."""
        end = await self._end(versioned, previous)
        is_idle = self._is_idle(versioned, end, previous)
        expected, is_tail_unseen = end.expected, False
        if self._asks and end.is_known and not versioned.metadata.is_closed:
            expected, is_tail_unseen = await self._last_to_inspect(
                versioned, expected, is_idle=is_idle and previous is not None
            )
        digest = ledger_digest(versioned.metadata, self._fallback)
        reader = CopyReader(
            versioned.ledger_id,
            bookies=self._bookies,
            digest=digest,
            entry_bytes=entry_bytes_guess(versioned.metadata, digest),
            retries=self._retries,
        )
        inspection = CopyInspection(
            versioned,
            known_fragments(versioned.ledger_id, versioned.metadata, lac=expected),
            is_end_known=end.is_known,
            available=self._views.current.available,
            reader=reader,
            options=self._options,
            lists=self._lists,
            is_recheck=previous is not None,
            reformatted=self._views.current.initialised_after(versioned.stat.czxid),
        )
        await inspection.run()
        builder = inspection.builder
        builder.last_entry_id, builder.length = end.last_entry_id, end.length
        builder.is_tail_unseen = is_tail_unseen
        builder.add_evidence(end.evidence)
        builder.add_evidence(self._misplaced(versioned))
        builder.mark_end_unproven(self._unproven_end(versioned, builder))
        if is_idle:
            builder.add_evidence([Evidence(finding=Finding.IDLE_OPEN, code="last_entry_unchanged")])
        return inspection.verdict(checked_ms=self._clock.wall_ms())

    async def _end(self, versioned: VersionedMetadata, previous: LedgerVerdict | None) -> "End":
        """Return the end of the ledger as far as known. Sends no request if it is closed, or at
        level ``metadata``."""
        metadata = versioned.metadata
        if metadata.is_closed:
            last = metadata.last_entry_id
            return End(last_entry_id=last, expected=last, length=metadata.length)
        settled = metadata.last_segment.first_entry_id - 1
        if not self._asks:
            absent = sorted(set(metadata.last_segment.ensemble) - self._views.current.available)
            return End(
                last_entry_id=settled,
                expected=settled,
                # No bookie is asked for entries after the last ensemble change.
                is_known=not absent,
                evidence=tuple(_not_registered(bookie) for bookie in absent),
            )
        try:
            opened = await find_end(
                versioned, bookies=self._bookies, clock=self._clock, fallback=self._fallback
            )
        except (UnavailableError, UnauthorizedError, CorruptionError) as error:
            why = Evidence(finding=Finding.NOT_ANSWERED, code=_NO_END, detail=str(error))
            return End(last_entry_id=settled, expected=settled, is_known=False, evidence=(why,))
        lac = expected = opened.lac
        if previous is not None and _knew_end(previous) and settled <= previous.last_entry_id < lac:
            expected = previous.last_entry_id  # copies of later entries may be in flight
        return End(last_entry_id=lac, expected=expected, length=opened.length)

    async def _last_to_inspect(
        self, versioned: VersionedMetadata, last: int, *, is_idle: bool
    ) -> tuple[int, bool]:
        """Return the last entry to inspect in a ledger that is not closed, and whether later
        entries may exist.

        The result exceeds ``last``, the LAC, only by entries that may have been acknowledged. Later
        entries may exist if no bookie was asked for any, or if one did not report its last entry.
        ``is_idle``: True if nothing was written since the first inspection.
        """
        metadata, view = versioned.metadata, self._views.current
        members = view.available.intersection(metadata.last_segment.ensemble)
        has_reformatted = not members.isdisjoint(view.initialised_after(versioned.stat.czxid))
        is_in_recovery = metadata.state is LedgerState.IN_RECOVERY
        if not (is_in_recovery or (is_idle and has_reformatted)):
            return last, True
        shown, unresponsive = await highest_entry_id(
            self._bookies,
            members,
            versioned.ledger_id,
            digest=ledger_digest(metadata, self._fallback),
        )
        is_unseen = bool(unresponsive)
        if shown <= last:
            return last, is_unseen
        if is_in_recovery and not has_reformatted:
            return await self._last_before_gap(versioned, last, shown), is_unseen
        if not is_in_recovery:
            await self._clock.sleep(IN_FLIGHT_WAIT_S)  # copies of the last adds may be in flight
        return shown, is_unseen

    async def _last_before_gap(self, versioned: VersionedMetadata, last: int, shown: int) -> int:
        """Return the last entry up to ``shown`` before the first one that all its bookies deny. A
        writer that died may have left later entries that were in flight. Damaged or unanswered
        entries are no gap."""
        reader = LedgerReader(
            versioned.ledger_id,
            versioned.metadata,
            digest=ledger_digest(versioned.metadata, self._fallback),
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

    @property
    def _asks(self) -> bool:
        """True if the level asks bookies at all."""
        return self._options.level is not Level.METADATA

    def _misplaced(self, versioned: VersionedMetadata) -> Iterable[Evidence]:
        """Yield an observation for each ensemble that breaks the placement policy, at its first
        entry."""
        policy, metadata = self._policy, versioned.metadata
        if policy is None:
            return
        for segment in metadata.segments:
            found = policy.adherence(
                segment.ensemble,
                write_quorum=metadata.write_quorum,
                ack_quorum=metadata.ack_quorum,
            )
            if found is Adherence.FAIL:
                racks = self._options.racks
                yield Evidence(
                    finding=Finding.MISPLACED,
                    first_entry_id=segment.first_entry_id,
                    code="policy",
                    detail=", ".join(f"{b} in {racks.get(b, '?')}" for b in segment.ensemble),
                )

    def _unproven_end(
        self, versioned: VersionedMetadata, builder: VerdictBuilder
    ) -> Sequence[Evidence]:
        """Return an observation for each bookie whose "no such entry" recovery would not trust, if
        the end cannot be proven without it (rule S5)."""
        view, metadata = self._views.current, versioned.metadata
        reformatted = view.initialised_after(versioned.stat.czxid)
        lacking = [
            bookie
            for bookie in reformatted.intersection(metadata.last_segment.ensemble)
            if builder.lacks(bookie, first_entry_of(metadata, bookie))
        ]
        late = latecomers(metadata, reformatted)
        return [
            Evidence(
                finding=Finding.END_UNPROVEN,
                bookie=bookie,
                code="lacks_first_entry" if bookie in late else "set_up_later",
                detail="reformatted after the ledger was created; may have lost acknowledged "
                "entries of its end",
            )
            for bookie in wiped_from_end(versioned, view, lacking=lacking)
        ]

    def _is_idle(
        self, versioned: VersionedMetadata, end: "End", previous: LedgerVerdict | None
    ) -> bool:
        """True if an open ledger seems abandoned: its metadata is old enough and, at the
        recheck, its last entry is unchanged."""
        metadata = versioned.metadata
        if metadata.is_closed or metadata.is_of_feed or not end.is_known or not self._asks:
            return False
        age_s = (self._clock.wall_ms() - versioned.stat.mtime_ms) / 1_000
        if age_s < self._options.idle_open_after_s:
            return False
        return previous is None or (
            Finding.IDLE_OPEN in previous.findings and end.last_entry_id == previous.last_entry_id
        )


_NO_END = "no_end"


def _not_registered(bookie: BookieId) -> Evidence:
    return Evidence(finding=Finding.BOOKIE_GONE, bookie=bookie, code="not_registered")


def _knew_end(previous: LedgerVerdict) -> bool:
    """True if the first inspection read the metadata and found the ledger's end."""
    return bool(previous.state) and all(each.code != _NO_END for each in previous.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a ledger as far as known: ``last_entry_id`` is the last acknowledged entry.

    Copies are checked at least up to ``expected``. ``evidence``: why the end is not known.
    """

    last_entry_id: int
    expected: int
    length: int = 0
    is_known: bool = True
    evidence: tuple[Evidence, ...] = ()
