"""Ledgers whose open last fragment misses a bookie, or too many copies: left to the writer, then
recovered.

Such a fragment is never copied (rule S4): its end is unknown, its writer goes on writing to the old
ensemble, and a fresh bookie was never fenced. A living writer replaces a lost bookie by itself, so
it gets the open-ledger grace. Then the absent bookie is asked directly (rule S13): ZooKeeper may
have dropped its znode while the writer goes on writing to it. If its last entry moved during the
grace, the ledger waits again, a bounded number of times; else it is fenced, recovered and closed. A
bookie that drains, and may be fenced for it (rule S16), is treated alike but for the question: it
is there, and its writer may well write to it until he is stopped. Likewise those that were wiped:
as many as leave an entry on fewer than an ack quorum, and the promise is broken that it would be
safe. Unless what they lacked has come meanwhile: it was on its way. While a safety hold stands
nothing is fenced at all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import structlog
from msgspec import structs

from ledgers.appending import BookiePool, can_go_on_without
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.errors import UnavailableError, UnprovenEndError
from ledgers.fencing import latecomers
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment, covers, fragments
from ledgers.placement import Candidate
from ledgers.quorum import RecoveredEnd
from ledgers.reading import NO_ENTRY, LastEntry, last_entry_id, ledger_digest, replicas_in
from ledgers.recovery import Beside, nothing_beside, recover_ledger
from ledgers.store import Operation
from replication.cluster import ClusterView, ViewSource
from replication.copy_checks import IndexFinding, Verdict, check
from replication.inspection import ENTRY_BYTES_GUESS, Inspection, RecoveryRequired
from replication.orders import Orders
from replication.reasons import IMPORT_HINT, Blocked, Reason, close_hint
from replication.targets import TargetSelector

log = structlog.get_logger()

GRACES_MAX = 10
"""Graces that a writer may earn by going on writing to a bookie that ZooKeeper does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSighting:
    """What was seen of an open last fragment when its grace began.

    ``last_entries``: per bookie that is absent, or lost entries, the last entry id it said it has,
    -1 for none, None when it did not answer. ``lacking``: those of them that are there;
    ``first_lacking``: as in ``RecoveryRequired``. ``draining``: members that are there, and are to be
    emptied.
    """

    segment: Segment
    last_entries: Mapping[BookieId, int | None]
    lacking: tuple[BookieId, ...] = ()
    first_lacking: int | None = None
    draining: tuple[BookieId, ...] = ()
    grace_count: int = 1

    @property
    def reason(self) -> Reason:
        return Reason.OPEN_LEDGER_GRACE if self.grace_count == 1 else Reason.WRITER_ALIVE

    @property
    def absent(self) -> frozenset[BookieId]:
        return frozenset(self.last_entries).difference(self.lacking)

    @property
    def detail(self) -> str:
        absent = ", ".join(sorted(self.absent))
        lacking = ", ".join(self.lacking)
        if self.grace_count == 1:
            if absent:
                what = f"misses {absent}"
            elif lacking:
                what = f"lacks copies of entry {self.first_lacking} on {lacking}"
            else:
                what = f"is on {', '.join(self.draining)}, which drains"
            return f"its open last fragment {what}: left to its writer for the grace"
        to = (
            f"{absent}, which ZooKeeper does not show"
            if absent
            else f"{lacking}, which lack entry {self.first_lacking}"
        )
        return f"its writer still writes to {to}: grace {self.grace_count} of {GRACES_MAX}"


def next_sighting(before: WriterSighting | None, now: WriterSighting) -> WriterSighting | None:
    """Another grace, or None: it is time to recover. A changed segment begins anew, and so does
    what was lacking then and is there now.

    ``now``: what is seen now, as if for the first time.
    """
    if before is None or before.segment != now.segment or _has_come(before, now):
        return now
    has_moved = any(
        last is not None and last > _or_none(before.last_entries.get(bookie))
        for bookie, last in now.last_entries.items()
    )
    if has_moved and before.grace_count < GRACES_MAX:
        return replace(now, grace_count=before.grace_count + 1)
    return None


def is_overtaken(sighting: WriterSighting, view: ClusterView) -> bool:
    """Whether a grace that goes on has lost its reason: a drain was taken back, or its order to
    fence; or every bookie that was absent is back."""
    if sighting.absent and sighting.absent <= view.available:
        return True
    return not all(
        (order := view.orders.draining.get(bookie)) is not None and order.may_fence
        for bookie in sighting.draining
    )


def _or_none(last_entry_id: int | None) -> int:
    """Of a bookie that did not say anything no entry is known."""
    return NO_ENTRY if last_entry_id is None else last_entry_id


def _has_come(before: WriterSighting, now: WriterSighting) -> bool:
    """Whether what was lacking was on its way: what is lost never comes, so that it stays the
    first."""
    then, first = before.first_lacking, now.first_lacking
    return then is not None and first is not None and then < first


def held_back(orders: Orders) -> Blocked | None:
    """What keeps every ledger from being fenced: a hold. None where nothing does."""
    hold = orders.hold
    if hold is None or not orders.is_held:
        return None
    why = f" ({hold.reason})" if hold.reason else ""
    return Blocked(
        reason=Reason.HOLD,
        detail=f"it is not closed, and nothing is fenced while a hold stands{why}",
        until_ms=hold.until_ms,
    )


def end_doubts(versioned: VersionedMetadata, view: ClusterView) -> str:
    """Why the ledger's end may not be provable, for people; empty where those of its bookies that
    are there, and were never wiped, suffice for it (rule S5)."""
    metadata, young = versioned.metadata, view.initialised_after(versioned.stat.czxid)
    members = metadata.last_segment.ensemble
    if _do_cover(view.answering - young, metadata):
        return ""
    doubtful = {
        "not registered": [b for b in members if b not in view.available],
        "another bookie is registered at the address": [
            b for b in members if b in view.available and b not in view.answering
        ],
        "set up after the ledger was made, so that their 'no' is not believed": [
            b for b in members if b in young and b in view.answering
        ],
    }
    told = [f"{why}: {', '.join(named)}" for why, named in doubtful.items() if named]
    if view.are_all_younger_than(versioned.stat.czxid):
        told.append(IMPORT_HINT)
    return "; ".join(told)


def wiped_from_end(
    versioned: VersionedMetadata, view: ClusterView, *, lacking: Collection[BookieId] = ()
) -> tuple[BookieId, ...]:
    """The members of the last ensemble whose "no" is not believed, where the ledger's end cannot be
    proven without it (rule S5), as far as is known: latecomers are believed but for those
    ``lacking`` their first entry. Else none.
    """
    metadata = versioned.metadata
    if metadata.is_closed:
        return ()
    members = metadata.last_segment.ensemble
    young = view.initialised_after(versioned.stat.czxid).intersection(members)
    wiped = young - latecomers(metadata, young).difference(lacking)
    are_needed = bool(wiped) and not _do_cover(view.answering - wiped, metadata)
    return tuple(b for b in members if b in wiped) if are_needed else ()


def is_to_be_ended(inspection: Inspection, suspects: Collection[BookieId] = ()) -> bool:
    """Whether a recovery that was begun and never ended comes before all else: where an open
    fragment lacks copies; and where nothing is missing, if the end can be proven. Else the ledger
    would be unmarked with its writer locked out, and nobody to close it. ``suspects``: bookies
    that are known to have lost entries.
    """
    if inspection.is_abandoned:
        return True
    if inspection.metadata.state is not LedgerState.IN_RECOVERY:
        return False
    view, members = inspection.view, frozenset(inspection.metadata.last_segment.ensemble)
    believed = members.difference(view.initialised_after(inspection.versioned.stat.czxid), suspects)
    return (
        members <= view.checked  # who drains is fenced on an order alone (rule S16)
        and all(finding.verdict is Verdict.GOOD for finding in inspection.findings)
        and _do_cover(believed & view.answering, inspection.metadata)
    )


def wanted_for_coverage(
    metadata: LedgerMetadata, available: AbstractSet[BookieId]
) -> frozenset[BookieId]:
    """The members of the last ensemble that are not among ``available``, where those that are do
    not cover it: no recovery finds its end before enough of these are back. Empty where they
    suffice."""
    if _do_cover(available, metadata):
        return frozenset()
    return frozenset(metadata.last_segment.ensemble) - available


def _do_cover(bookies: AbstractSet[BookieId], metadata: LedgerMetadata) -> bool:
    """Whether the answers of these would suffice to find the ledger's end (rule S5)."""
    return covers(
        {i for i, bookie in enumerate(metadata.last_segment.ensemble) if bookie in bookies},
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
    )


def written_back_to(
    metadata: LedgerMetadata, last_entries: Collection[LastEntry]
) -> frozenset[BookieId]:
    """The bookies that a recovery would send entries again: those after the LAC, as far as any of
    ``last_entries`` shows them."""
    segment = metadata.last_segment
    first = max([segment.first_entry_id, *(each.lac + 1 for each in last_entries)])
    last = max((each.last_entry_id for each in last_entries), default=NO_ENTRY)
    # Entries that are an ensemble's size apart are on the same bookies.
    entries = range(first, min(last + 1, first + metadata.ensemble_size))
    return frozenset(
        bookie
        for entry_id in entries
        for bookie in replicas_in(segment, entry_id, write_quorum=metadata.write_quorum)
    )


BeforeClose = Callable[[RecoveredEnd], Awaitable[None]]
"""Records copies on new bookies, to be read again later (rule S6), and what was given up."""


class OpenLedgers:
    """The decisions above, carried out."""

    def __init__(
        self,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        views: ViewSource,
        fallback_digest: EntryDigest,
        target_selector: TargetSelector,
        clock: Clock,
    ) -> None:
        self._manager = manager
        self._bookies = bookies
        self._views = views
        self._fallback_digest = fallback_digest
        self._target_selector = target_selector
        self._clock = clock

    async def judge(
        self, found: RecoveryRequired, before: WriterSighting | None
    ) -> WriterSighting | None:
        """A grace to wait out, or None: recover now."""
        ledger_id, there = found.versioned.ledger_id, found.view.available
        asked = [*(bookie for bookie in found.leaving if bookie not in there), *found.lacking]
        told = await asyncio.gather(
            *(last_entry_id(self._bookies, bookie, ledger_id) for bookie in asked)
        )
        now = WriterSighting(
            segment=found.versioned.metadata.last_segment,
            last_entries=dict(zip(asked, told, strict=True)),
            lacking=found.lacking,
            first_lacking=found.first_lacking,
            draining=tuple(b for b in found.leaving if b in there),
        )
        return next_sighting(before, now)

    async def recover(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        suspects: Collection[BookieId] = (),
        accepts_loss: bool = False,
        guards: Sequence[Operation],
        before_close: BeforeClose,
        beside: Beside = nothing_beside,
    ) -> VersionedMetadata:
        """Fence, find the end, close. Errors are those of ``recover_ledger``; ``beside``: as there.

        ``before_close``: called with the end before CLOSED is written, for what has to be on record
        by then. ``suspects``: bookies that are known to have lost entries. ``accepts_loss``:
        those set up anew are believed, though entries may be cut off that only they had, and
        bookies that are silent now; and the ledger may end before an entry of which there are
        damaged copies alone (``RecoveredEnd.given_up``).
        """

        async def confirm(end: RecoveredEnd) -> None:
            """Called right before CLOSED is written, in every recovery."""
            await before_close(end)
            if not accepts_loss:
                await self._confirm_answers(versioned.ledger_id, view, end)

        closed = await recover_ledger(
            versioned,
            manager=self._manager,
            bookies=self._bookies,
            pool=self._pool(versioned.metadata),
            clock=self._clock,
            fallback=self._fallback_digest,
            young=() if accepts_loss else view.initialised_after(versioned.stat.czxid),
            distrusted=suspects,
            registered=view.answering,
            gives_up_damaged=accepts_loss,
            confirm=confirm,
            guards=guards,
            beside=beside,
        )
        log.info(
            "ledger.recovered",
            ledger_id=versioned.ledger_id,
            last_entry_id=closed.metadata.last_entry_id,
        )
        return closed

    async def _confirm_answers(self, ledger_id: int, view: ClusterView, end: RecoveredEnd) -> None:
        """Make sure that the answers which the end rests on stand. Raises UnavailableError where
        one may not.

        This defends against what happens after the view was read, and would pass for a "no" of the old bookie:
        1. A member is wiped and set up again: its cookie is another.
        2. A member goes, and another bookie answers at its address: the member's registration is gone or another, or
           the other bookie's registration is new.
        """
        doubts = await self._views.doubts_about(view, members=end.members, believed=end.believed)
        if doubts:
            told = "; ".join(f"{bookie}: {why}" for bookie, why in sorted(doubts.items()))
            raise UnavailableError(
                f"bookies changed while the end was sought, so the ledger must be recovered again: {told}",
                ledger_id=ledger_id,
            )

    async def tail_findings(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        first_entry_id: int,
        last_entry_id: int,
    ) -> tuple[IndexFinding, ...]:
        """What the registered members of the last ensemble have of these entries. Fences nothing.

        Both ends are inclusive. Raises UnauthorizedError where no key is known.
        """
        if last_entry_id < first_entry_id:
            return ()
        digest = ledger_digest(versioned.metadata, self._fallback_digest)
        last = fragments(versioned.ledger_id, versioned.metadata, lac=first_entry_id - 1)[-1]
        tail = structs.replace(last, first_entry_id=first_entry_id, last_entry_id=last_entry_id)
        return await check(
            [tail],
            bookies=self._bookies,
            digest=digest,
            available=view.answering,
            suspects=view.answering,
            entry_bytes=ENTRY_BYTES_GUESS,
        )

    async def way_out(self, versioned: VersionedMetadata, error: UnprovenEndError) -> str:
        """What an operator can do where ``recover`` failed so: a hint."""
        wanted = await self._silent(versioned) if error.are_any_silent else frozenset()
        if _do_cover(set(versioned.metadata.last_segment.ensemble) - wanted, versioned.metadata):
            wanted = frozenset()
        return close_hint(
            versioned.ledger_id, are_any_silent=error.are_any_silent, wanted=sorted(wanted)
        )

    async def can_write_back(
        self, metadata: LedgerMetadata, told: Mapping[BookieId, LastEntry | None]
    ) -> bool:
        """Whether ``recover`` could give each of the last entries its ack quorum of copies, while
        those members of the last ensemble that do not say how far they reach (None in ``told``)
        take none."""
        last_entries = [each for each in told.values() if each is not None]
        silent = {bookie for bookie, last in told.items() if last is None}
        failing = silent & written_back_to(metadata, last_entries)
        return not failing or await can_go_on_without(
            metadata, failing, pool=self._pool(metadata), clock=self._clock
        )

    def why_no_target(self, versioned: VersionedMetadata, silent: Collection[BookieId] = ()) -> str:
        """Why ``recover`` cannot write the last entries back, where it raised
        NotEnoughBookiesError, and what helps.

        ``silent``: members of the last ensemble that are to be started, besides those that are not
        registered.
        """
        metadata, view = versioned.metadata, self._views.current
        members = metadata.last_segment.ensemble
        rules = self._target_selector.why_no_candidate(view, members, metadata)
        missed = [b for b in members if b in silent or b not in view.answering]
        start = f"start {', '.join(missed)}, or " if missed else ""
        return (
            f"each of its last entries has to be on {metadata.ack_quorum} bookies (its ack quorum) before it is closed, "
            f"and none can take over: {rules or 'the placement policy allows none of the others'}; {start}add a bookie"
        )

    async def _silent(self, versioned: VersionedMetadata) -> frozenset[BookieId]:
        """Return the members of the last ensemble that say neither what they have nor that they
        have nothing.

        Whatever is said in the place of a bookie that is not registered counts as nothing.
        """
        members, answering = versioned.metadata.last_segment.ensemble, self._views.current.answering
        told = await asyncio.gather(
            *(last_entry_id(self._bookies, bookie, versioned.ledger_id) for bookie in members)
        )
        return frozenset(
            b for b, last in zip(members, told, strict=True) if last is None or b not in answering
        )

    def _pool(self, metadata: LedgerMetadata) -> BookiePool:
        async def writable() -> list[Candidate]:
            return self._target_selector.candidates(self._views.current, metadata)

        return BookiePool(writable=writable, placement=self._target_selector.placement)
