"""One ledger looked at: its metadata, its end, the copies that are missing. Writes and fences
nothing.

What comes of it is a value: a ``Inspection``, from which a plan is made, or what keeps one from being
made. Worker and ``bookmender plan`` look through the same eyes.

The last fragment of a ledger that is not closed: whom it is to be rid of, and what is missing of
its tail.

Its end is unknown. Up to the LAC its entries are acknowledged; those after it may be, as far as any
bookie shows them, and nobody will tell any more where the writer has died.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct, structs
from msgspec.structs import replace

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import HEADER_BYTES, EntryDigest
from ledgers.errors import (
    CorruptionError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import (
    BookieId,
    Fragment,
    LedgerMetadata,
    LedgerState,
    fragments,
    known_fragments,
)
from ledgers.reading import find_end, highest_entry_id, ledger_digest
from ledgers.wire.framing import FRAME_BYTES_MAX
from replication.cluster import ClusterView
from replication.copy_checks import (
    GAVE_ALL,
    EntryLists,
    IndexFinding,
    ReadPlan,
    Verdict,
    check,
    judge,
    plan_reads,
)
from replication.entry_runs import EntryRuns, merged
from replication.reasons import Blocked, Reason

IN_FLIGHT_WAIT_S = 1.0
"""A copy that a writer has sent is there by then."""
ENTRY_BYTES_GUESS = 1_024
"""Of an entry's size, while the ledger's length is not known."""


def leaving_members(metadata: LedgerMetadata, view: ClusterView) -> tuple[BookieId, ...]:
    """Bookies that the open fragment is to be rid of; none for a closed ledger.

    Those that are gone, but for the ones under maintenance; and those that drain and may be fenced
    for it (rule S16). A read-only bookie is no reason to fence: an idle writer would lose its
    ledger for it. Java takes the fragment before the last for open too while its reader has not
    heard that its end is acknowledged (BookKeeper's pull request 3917); ours knows it from the
    metadata.
    """
    if metadata.is_closed:
        return ()
    members = metadata.last_segment.ensemble
    return tuple(sorted(bookie for bookie in members if _is_leaving(bookie, view)))


def _is_leaving(bookie: BookieId, view: ClusterView) -> bool:
    if bookie not in view.available:
        return bookie not in view.orders.maintenance
    order = view.orders.draining.get(bookie)
    return order is not None and order.may_fence


async def inspect_tail(
    versioned: VersionedMetadata,
    view: ClusterView,
    *,
    digest: EntryDigest,
    lac: int,
    bookies: Bookies,
    clock: Clock,
) -> tuple[IndexFinding, ...]:
    """What is missing of the entries after the LAC that any member shows; and who does not say, as
    he may know of more.

    In recovery nobody adds any more, and every member is asked. While there may be a writer his
    copies are on their way: only who was set up after the ledger was made is asked, and that twice.
    """
    metadata = versioned.metadata
    is_abandoned = metadata.state is LedgerState.IN_RECOVERY
    members = view.checked.intersection(metadata.last_segment.ensemble)
    asked = members if is_abandoned else members & view.initialised_after(versioned.stat.czxid)
    if not asked:
        return ()
    shown, silent = await highest_entry_id(bookies, members, versioned.ledger_id, digest=digest)
    tail = structs.replace(
        fragments(versioned.ledger_id, metadata, lac=lac)[-1],
        first_entry_id=lac + 1,
        last_entry_id=max(lac, shown),
    )
    unknown = tuple(
        IndexFinding(fragment=tail, index=index, verdict=Verdict.UNKNOWN)
        for index, bookie in enumerate(tail.ensemble)
        if bookie in silent
    )
    lacking = await _lacking(tail, asked, digest=digest, bookies=bookies)
    if lacking and not is_abandoned:
        await clock.sleep(IN_FLIGHT_WAIT_S)
        lacking = await _lacking(tail, asked, digest=digest, bookies=bookies)
    return unknown + lacking


async def _lacking(
    fragment: Fragment, asked: frozenset[BookieId], *, digest: EntryDigest, bookies: Bookies
) -> tuple[IndexFinding, ...]:
    findings = await check(
        [fragment],
        bookies=bookies,
        digest=digest,
        available=asked,
        suspects=asked,
        entry_bytes=ENTRY_BYTES_GUESS,
    )
    return tuple(finding for finding in findings if finding.verdict is Verdict.MISSING)


def first_damaged(
    findings: Sequence[IndexFinding], *, first_entry_id: int, last_entry_id: int
) -> int | None:
    """The first entry of the range that no bookie gives a good copy of, though some have a damaged
    one.

    ``findings``: of every entry of one fragment. Both ends of the range are inclusive.
    """
    for entry_id in range(first_entry_id, last_entry_id + 1):
        holders = [f for f in findings if entry_id in f.entries]
        is_good = any(
            f.verdict in (Verdict.GOOD, Verdict.MISSING) and not f.is_bad(entry_id) for f in holders
        )
        if not is_good and any(entry_id in f.damaged for f in holders):
            return entry_id
    return None


class UnderreplicatedEntry(Struct, frozen=True, kw_only=True):
    """An entry of an open fragment, and the members that lack it, more than it may do without."""

    entry_id: int
    lacking: tuple[BookieId, ...]


def first_underreplicated(
    findings: Sequence[IndexFinding], metadata: LedgerMetadata
) -> UnderreplicatedEntry | None:
    """The first such entry; None where there is none, and of a ledger that is not OPEN.

    A writer cannot tell: who was wiped takes what he adds, and so the fragment stays as it is until
    the last copy is gone too.
    """
    if metadata.state is not LedgerState.OPEN:
        return None
    lacked = list(_lacked(findings))
    runs = [run for _, entries in lacked for run in entries.each_run()]
    steps = [(run.start, 1) for run in runs] + [(run.stop, -1) for run in runs]
    depth = 0
    for entry_id, step in sorted(steps):
        depth += step
        if depth > metadata.write_quorum - metadata.ack_quorum:
            lacking = {bookie for bookie, entries in lacked if entry_id in entries}
            return UnderreplicatedEntry(entry_id=entry_id, lacking=tuple(sorted(lacking)))
    return None


def _lacked(findings: Sequence[IndexFinding]) -> Iterator[tuple[BookieId, EntryRuns]]:
    """What members of the open fragment lack of it, or have damaged."""
    for finding in findings:
        if finding.verdict is Verdict.MISSING and not finding.fragment.is_closed:
            yield finding.bookie, merged(finding.absent, finding.damaged)


SMALL_ENTRIES = 64
"""A ledger of no more than that is copied while what is presumed of it is being proven."""


class Inspection(Struct, frozen=True, kw_only=True):
    """All that a plan is made from. ``findings``: one for every bookie index of every fragment that
    was looked at."""

    versioned: VersionedMetadata
    view: ClusterView
    digest: EntryDigest
    findings: tuple[IndexFinding, ...]

    @property
    def ledger_id(self) -> int:
        return self.versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        return self.versioned.metadata

    @property
    def is_abandoned(self) -> bool:
        """Whether an open fragment lacks copies that no writer will add: a recovery has locked him
        out."""
        return self.metadata.state is LedgerState.IN_RECOVERY and any(
            finding.verdict is Verdict.MISSING and not finding.fragment.is_closed
            for finding in self.findings
        )

    @property
    def has_good_entry(self) -> bool:
        """Whether any entry was read and found good: then our key is the ledger's (rule S7)."""
        return any(
            f.bad_count < len(f.entries)
            for f in self.findings
            if f.verdict in (Verdict.GOOD, Verdict.MISSING)
        )

    @property
    def entry_bytes(self) -> int:
        return entry_bytes_guess(self.metadata, self.digest)


class OptimisticInspection(Struct, frozen=True, kw_only=True):
    """What a survey will find if every bookie that is there has its copies; ``asked``: what proves
    it."""

    inspection: Inspection
    asked: ReadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRequired:
    """A ledger that must be closed first, for its open fragment's sake.

    ``leaving``: members that it is to be rid of. ``lacking``: members that are there and lack an
    entry, ``first_lacking``, which may be on fewer than an ack quorum of bookies for it; it is the
    first such.
    """

    versioned: VersionedMetadata
    view: ClusterView
    leaving: tuple[BookieId, ...] = ()
    lacking: tuple[BookieId, ...] = ()
    first_lacking: int | None = None


Surveyed = Inspection | RecoveryRequired | Blocked | None
"""None: the ledger is gone."""


class Inspector:
    """Looks at ledgers, many at once. One for a worker or a command."""

    def __init__(
        self,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        clock: Clock,
        rng: random.Random,
        fallback_digest: EntryDigest,
        checked_share: float = 0.0,
        entry_lists: bool = False,
    ) -> None:
        """``checked_share``, ``entry_lists``: see ``ReplicationSettings``."""
        self._manager = manager
        self._bookies = bookies
        self._clock = clock
        self._rng = rng
        self._fallback_digest = fallback_digest
        self._checked_share = checked_share
        self._lists = EntryLists(bookies, clock) if entry_lists else None

    async def inspect(
        self, ledger_id: int, view: ClusterView, *, suspects: Collection[BookieId] = ()
    ) -> Surveyed:
        """``suspects``: bookies to be asked for every entry, besides those set up anew."""
        match await self.find(ledger_id):
            case VersionedMetadata() as versioned:
                return await self.inspect_metadata(versioned, view, suspects=suspects)
            case found:
                return found

    async def find(self, ledger_id: int) -> VersionedMetadata | Blocked | None:
        """Its metadata alone; None: the ledger is deleted."""
        try:
            return await self._manager.find(ledger_id)
        except CorruptionError as error:
            return Blocked(reason=Reason.CORRUPT_METADATA, detail=str(error))
        except UnauthorizedError as error:
            detail = f"its metadata cannot be read: {error}"
            return Blocked(reason=Reason.SHUT_AWAY, detail=detail)

    def inspect_optimistically(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        suspects: Collection[BookieId] = (),
    ) -> OptimisticInspection | None:
        """Asks nobody. None where it is not worth presuming anything: the ledger is open, or not
        small."""
        metadata = versioned.metadata
        is_small = metadata.is_closed and metadata.last_entry_id < SMALL_ENTRIES
        if not is_small or self._lists is not None:
            return None
        try:
            digest = ledger_digest(metadata, self._fallback_digest)
        except UnauthorizedError:
            return None
        judged = known_fragments(versioned.ledger_id, metadata, lac=metadata.last_entry_id)
        asked = plan_reads(
            judged,
            available=view.checked,
            suspects=self._suspects(versioned, view, suspects),
            share=self._checked_share,
            rng=self._rng,
        )
        findings = judge(judged, dict.fromkeys(asked, GAVE_ALL), available=view.checked)
        inspection = Inspection(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )
        return OptimisticInspection(inspection=inspection, asked=asked)

    async def inspect_metadata(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        suspects: Collection[BookieId] = (),
    ) -> Inspection | RecoveryRequired | Blocked:
        """Of metadata that was read already, or that is yet to be written."""
        if leaving := leaving_members(versioned.metadata, view):
            return RecoveryRequired(versioned=versioned, view=view, leaving=leaving)
        try:
            digest = ledger_digest(versioned.metadata, self._fallback_digest)
            lac = await self._lac(versioned)
        except UnauthorizedError as error:
            return Blocked(reason=Reason.DIGEST_SUSPECT, detail=str(error))
        except UnavailableError as error:
            return _without_end(versioned, view, error)
        judged = known_fragments(versioned.ledger_id, versioned.metadata, lac=lac)
        inspection = await self._inspect(versioned, judged, digest, view, suspects)
        if not versioned.metadata.is_closed:
            tail = await inspect_tail(
                versioned, view, digest=digest, lac=lac, bookies=self._bookies, clock=self._clock
            )
            inspection = replace(
                inspection, findings=inspection.findings + under_orders(tail, view)
            )
            if underreplicated := first_underreplicated(inspection.findings, versioned.metadata):
                return RecoveryRequired(
                    versioned=versioned,
                    view=view,
                    lacking=underreplicated.lacking,
                    first_lacking=underreplicated.entry_id,
                )
        return inspection

    async def inspect_closed_part(
        self, found: RecoveryRequired, *, suspects: Collection[BookieId] = ()
    ) -> Inspection | None:
        """All fragments but the last, which need not wait for that one; None where there are none.

        That the last one was begun says that every entry before it is acknowledged: they are
        closed, whatever its bookies may tell (rule S4).
        """
        versioned, metadata = found.versioned, found.versioned.metadata
        lac = metadata.last_segment.first_entry_id - 1
        closed = [f for f in fragments(versioned.ledger_id, metadata, lac=lac) if f.is_closed]
        if not closed:
            return None
        try:
            digest = ledger_digest(metadata, self._fallback_digest)
        except UnauthorizedError:
            return None
        return await self._inspect(versioned, closed, digest, found.view, suspects)

    async def _lac(self, versioned: VersionedMetadata) -> int:
        """The last entry known to be acknowledged. Errors are those of ``find_end``."""
        if versioned.metadata.is_closed:
            return versioned.metadata.last_entry_id
        opened = await find_end(
            versioned, bookies=self._bookies, clock=self._clock, fallback=self._fallback_digest
        )
        return opened.lac

    async def _inspect(
        self,
        versioned: VersionedMetadata,
        judged: Sequence[Fragment],
        digest: EntryDigest,
        view: ClusterView,
        suspects: Collection[BookieId],
    ) -> Inspection:
        suspects = self._suspects(versioned, view, suspects)
        if self._lists is not None:
            suspects |= await self._lists.lacking(judged, view.checked - suspects)
        findings = await check(
            judged,
            bookies=self._bookies,
            digest=digest,
            available=view.checked,
            suspects=suspects,
            entry_bytes=entry_bytes_guess(versioned.metadata, digest),
            share=self._checked_share,
            rng=self._rng,
        )
        return Inspection(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )

    @staticmethod
    def _suspects(
        versioned: VersionedMetadata, view: ClusterView, suspects: Collection[BookieId]
    ) -> frozenset[BookieId]:
        """Bookies to be asked for every entry: an identity younger than the ledger may be an empty
        one's."""
        return view.initialised_after(versioned.stat.czxid).union(suspects)


def entry_bytes_guess(metadata: LedgerMetadata, digest: EntryDigest) -> int:
    """A guess at the stored size of an entry, from what the metadata says."""
    if not metadata.is_closed or metadata.last_entry_id < 0:
        return ENTRY_BYTES_GUESS
    overhead = HEADER_BYTES + digest.size
    length = max(0, metadata.length) // (metadata.last_entry_id + 1)
    return overhead + min(length, FRAME_BYTES_MAX)


def _without_end(
    versioned: VersionedMetadata, view: ClusterView, error: UnavailableError
) -> Blocked:
    """Too few bookies told where an open ledger ends: perhaps because some are away on purpose."""
    windows = view.orders.maintenance
    away = sorted(b for b in versioned.metadata.last_segment.ensemble if b in windows)
    if not away:
        return Blocked(reason=Reason.NO_ANSWER, detail=str(error))
    return Blocked(
        reason=Reason.MAINTENANCE,
        detail=f"{error}; under maintenance: {', '.join(away)}",
        until_ms=min(windows[bookie].until_ms for bookie in away),
    )


def under_orders(findings: tuple[IndexFinding, ...], view: ClusterView) -> tuple[IndexFinding, ...]:
    """What an operator ordered makes of findings: who drains is missing, who is away is not.

    The draining bookies were not asked, so that they seem lost.
    """
    if not view.orders.draining and not view.orders.maintenance:
        return findings
    return tuple(_under_orders(finding, view) for finding in findings)


def _under_orders(finding: IndexFinding, view: ClusterView) -> IndexFinding:
    is_seen = finding.bookie in view.available
    if finding.verdict is Verdict.LOST and is_seen:
        return replace(finding, verdict=Verdict.DRAINING)
    is_silent = finding.verdict is Verdict.UNKNOWN or not is_seen
    if is_silent and finding.bookie in view.orders.maintenance:
        return replace(finding, verdict=Verdict.AWAY)
    return finding
