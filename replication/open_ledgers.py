"""Ledgers whose open last fragment lacks copies: left to the writer first, then recovered.

An open fragment is never copied (rule S4): its end is unknown, its writer continues to write to the
old ensemble, and a new bookie would not be fenced. Instead:

1. A running writer replaces a lost bookie by itself, so it gets the open-ledger grace.
2. After the grace the absent bookie is asked directly (rule S13), because ZooKeeper may have
   deleted its znode while the writer continues to write to it. If its last entry moved during the
   grace, the ledger waits again, a bounded number of times.
3. Otherwise the ledger is fenced, recovered and closed.

Two more kinds of bookies count like absent ones:

- a draining bookie whose order allows fencing (rule S16). It is not asked: it is registered, and
  the writer may write to it until the ledger is fenced.
- reformatted bookies, if they leave an entry on fewer bookies than the ack quorum. If the missing
  entry arrives during the grace, it was only in flight.

During a safety hold nothing is fenced.
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
from ledgers.errors import NotEnoughBookiesError, UnavailableError, UnprovenEndError
from ledgers.fencing import latecomers
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment, covers
from ledgers.placement import Candidate
from ledgers.quorum import RecoveredEnd
from ledgers.reading import NO_ENTRY, LastEntry, last_entry_id, replicas_in
from ledgers.recovery import Beside, nothing_beside, recover_ledger
from ledgers.store import Operation
from replication.cluster import ClusterView, ViewSource
from replication.copy_reader import Verdict
from replication.history import NO_HISTORY, Event, History, Kind, cause_at
from replication.inspection import Inspection, RecoveryRequired
from replication.orders import Orders
from replication.reasons import Blocked, Facts, Reason, absence_facts, named
from replication.targets import TargetSelector

log = structlog.get_logger()

GRACES_MAX = 10
"""Graces that a writer may earn by writing to a bookie that ZooKeeper does not show."""

BeforeClose = Callable[[RecoveredEnd], Awaitable[None]]
"""Records copies on new bookies, which must be read again later (rule S6), and entries that are
given up."""


# --- The grace of a writer ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSighting:
    """An open last fragment as it was when its grace began.

    ``last_entries``: for each absent or lacking bookie the last entry id that it reported, -1 for
    none, None if it did not answer. ``lacking``: those of them that are registered;
    ``first_lacking``: as in ``RecoveryRequired``. ``draining``: registered members whose drain
    allows fencing.
    """

    segment: Segment
    last_entries: Mapping[BookieId, int | None]
    lacking: tuple[BookieId, ...] = ()
    first_lacking: int | None = None
    draining: tuple[BookieId, ...] = ()
    grace_count: int = 1
    is_in_recovery: bool = False

    @property
    def absent(self) -> frozenset[BookieId]:
        return frozenset(self.last_entries).difference(self.lacking)

    @property
    def bookies(self) -> frozenset[BookieId]:
        """All bookies for which the ledger waits."""
        return frozenset(self.last_entries).union(self.draining)

    @property
    def blocked(self) -> Blocked:
        """The reason why the ledger waits during this grace."""
        return Blocked(
            reason=Reason.OPEN_LEDGER_GRACE if self.grace_count == 1 else Reason.WRITER_ALIVE,
            facts=Facts(
                absent=named(self.absent),
                lacking=named(self.lacking),
                draining=named(self.draining),
                entry_ids=() if self.first_lacking is None else (self.first_lacking,),
                grace_count=self.grace_count,
                grace_count_max=GRACES_MAX,
                is_in_recovery=self.is_in_recovery,
            ),
        )


def next_sighting(before: WriterSighting | None, now: WriterSighting) -> WriterSighting | None:
    """Return the sighting for another grace; None if the ledger must be recovered.

    ``now``: what was seen now, as if for the first time. The graces are counted from one again if
    the segment changed, if the entry that was lacking has arrived, or if every bookie for which the
    first grace began is well again: the bookies that are absent now may be absent for a moment.
    """
    if before is None or before.segment != now.segment or before.bookies.isdisjoint(now.bookies):
        return now
    # A lost entry never arrives, so it stays the first.
    then, first = before.first_lacking, now.first_lacking
    if then is not None and first is not None and then < first:
        return now
    has_moved = False
    for bookie, last in now.last_entries.items():
        last_before = before.last_entries.get(bookie)  # None: it was not asked or did not answer
        has_moved |= last is not None and last > (NO_ENTRY if last_before is None else last_before)
    if has_moved and before.grace_count < GRACES_MAX:
        return replace(now, grace_count=before.grace_count + 1)
    return None


def is_overtaken(sighting: WriterSighting, view: ClusterView) -> bool:
    """Return True if a running grace has lost its reason: every absent bookie is registered again,
    or a drain, or its permission to fence, was cancelled."""
    if sighting.absent and sighting.absent <= view.available:
        return True
    return not all(
        (order := view.orders.draining.get(bookie)) is not None and order.may_fence
        for bookie in sighting.draining
    )


# --- Whether and when to recover ------------------------------------------------------------------


def held_back(orders: Orders) -> Blocked | None:
    """Return the safety hold that forbids fencing; None if there is none."""
    hold = orders.hold
    if hold is None or not orders.is_held:
        return None
    return Blocked(reason=Reason.HOLD, facts=Facts(comment=hold.reason), until_ms=hold.until_ms)


def end_doubts(versioned: VersionedMetadata, view: ClusterView) -> Facts | None:
    """Return why the end of the ledger may not be provable; None if its registered bookies that
    were never reformatted suffice for it (rule S5)."""
    metadata, reformatted = versioned.metadata, view.initialised_after(versioned.stat.czxid)
    members = frozenset(metadata.last_segment.ensemble)
    if _do_cover(view.answering - reformatted, metadata):
        return None
    return structs.replace(
        absence_facts(members, view),
        superseded=named((members & view.available) - view.answering),
        reformatted=named(members & reformatted & view.answering),
        are_all_reformatted=view.are_all_younger_than(versioned.stat.czxid),
        is_end_doubtful=True,
    )


def untrusted_facts(versioned: VersionedMetadata, view: ClusterView) -> Facts:
    """Return the members of the last ensemble whose "no such entry" is not trusted, because they
    were reformatted after the ledger was created."""
    reformatted = view.initialised_after(versioned.stat.czxid).intersection(
        versioned.metadata.last_segment.ensemble
    )
    return Facts(
        reformatted=named(reformatted),
        are_all_reformatted=bool(reformatted) and view.are_all_younger_than(versioned.stat.czxid),
    )


def wiped_from_end(
    versioned: VersionedMetadata, view: ClusterView, *, lacking: Collection[BookieId] = ()
) -> tuple[BookieId, ...]:
    """Return the untrusted members of the last ensemble, if the end of the ledger cannot be proven
    without them (rule S5); otherwise nothing.

    A bookie that joined by an ensemble change is trusted unless it is in ``lacking``: it lacks its
    first entry.
    """
    metadata = versioned.metadata
    if metadata.is_closed:
        return ()
    members = metadata.last_segment.ensemble
    reformatted = view.initialised_after(versioned.stat.czxid).intersection(members)
    wiped = reformatted - latecomers(metadata, reformatted).difference(lacking)
    are_needed = bool(wiped) and not _do_cover(view.answering - wiped, metadata)
    return tuple(b for b in members if b in wiped) if are_needed else ()


def must_finish_recovery(inspection: Inspection, suspects: Collection[BookieId] = ()) -> bool:
    """Return True if an unfinished recovery must be finished before anything else.

    This is the case if the open fragment lacks copies, and also if nothing is missing and the end
    is provable. Otherwise the mark would be deleted, and no client would close the ledger, because
    its writer is fenced. ``suspects``: bookies that are known to have lost entries.
    """
    if inspection.is_abandoned:
        return True
    if inspection.metadata.state is not LedgerState.IN_RECOVERY:
        return False
    view, members = inspection.view, frozenset(inspection.metadata.last_segment.ensemble)
    believed = members.difference(view.initialised_after(inspection.versioned.stat.czxid), suspects)
    return (
        members <= view.checked  # a draining bookie is fenced only if its order says so (rule S16)
        and all(finding.verdict is Verdict.GOOD for finding in inspection.findings)
        and _do_cover(believed & view.answering, inspection.metadata)
    )


def wanted_for_coverage(
    metadata: LedgerMetadata, available: AbstractSet[BookieId]
) -> frozenset[BookieId]:
    """Return the members of the last ensemble that are not in ``available``, if ``available`` does
    not cover the ensemble. No recovery finds the end before enough of them return. Otherwise
    nothing."""
    if _do_cover(available, metadata):
        return frozenset()
    return frozenset(metadata.last_segment.ensemble) - available


def _do_cover(bookies: AbstractSet[BookieId], metadata: LedgerMetadata) -> bool:
    """Return True if the answers of these bookies suffice to find the end of the ledger (rule
    S5)."""
    return covers(
        {i for i, bookie in enumerate(metadata.last_segment.ensemble) if bookie in bookies},
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
    )


# --- Carrying it out ------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class OpenLedgers:
    """Asks bookies for the decisions above, and recovers ledgers. Shared by all repairs of a
    worker."""

    manager: LedgerManager
    bookies: Bookies
    views: ViewSource
    fallback_digest: EntryDigest
    target_selector: TargetSelector
    clock: Clock
    history: History = NO_HISTORY

    async def judge(
        self, found: RecoveryRequired, before: WriterSighting | None
    ) -> WriterSighting | None:
        """Return the grace to wait for; None if the ledger must be recovered now."""
        ledger_id, registered = found.versioned.ledger_id, found.view.available
        asked = [*(bookie for bookie in found.leaving if bookie not in registered), *found.lacking]
        now = WriterSighting(
            segment=found.versioned.metadata.last_segment,
            last_entries=await self._last_entry_ids(asked, ledger_id),
            lacking=found.lacking,
            first_lacking=found.first_lacking,
            draining=tuple(b for b in found.leaving if b in registered),
            is_in_recovery=found.versioned.metadata.state is LedgerState.IN_RECOVERY,
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
        """Fence the ledger, find its end, close it. Raises what ``recover_ledger`` raises.

        ``before_close``: called with the end before CLOSED is written, to record what must be
        recorded by then. ``suspects``: bookies that are known to have lost entries.
        ``accepts_loss``: trust reformatted bookies, and do without unresponsive ones. Entries that
        only these had may be cut off. The ledger may also end before an entry that has damaged
        copies only (``RecoveredEnd.given_up``). ``beside``: as in ``recover_ledger``.
        """

        ledger_id = versioned.ledger_id
        reformatted = view.initialised_after(versioned.stat.czxid)

        async def confirm(end: RecoveredEnd) -> None:
            """Called in every recovery right before CLOSED is written. Raises UnavailableError if
            an answer on which the end rests may not be valid any more.

            This defends against changes after the view was read, where a "no such entry" is not
            that of the old bookie:
            1. A member is reformatted: it has another cookie.
            2. A member disappears, and another bookie answers at its address: the member's
               registration is gone or another, or the other bookie's registration is new.
            """
            await before_close(end)
            if accepts_loss:
                return
            doubts = await self.views.doubts_about(view, members=end.members, believed=end.trusted)
            if doubts:
                listed = "; ".join(f"{bookie}: {why}" for bookie, why in sorted(doubts.items()))
                raise UnavailableError(
                    f"bookies changed during recovery, so that recovery must be retried: {listed}",
                    ledger_id=ledger_id,
                )

        def note_fenced(marked: VersionedMetadata) -> None:
            why = cause_at(
                frozenset(marked.metadata.last_segment.ensemble),
                registered=view.available,
                reformatted=view.initialised_after(marked.stat.czxid),
                draining=view.orders.draining.keys(),
                found_bad=frozenset(suspects),
            )
            self.history.record(
                Event(
                    kind=Kind.LEDGER_FENCED,
                    ledger_id=ledger_id,
                    cause="" if why is None else why.cause,
                    bookies=() if why is None else why.bookies,
                )
            )

        try:
            closed = await recover_ledger(
                versioned,
                manager=self.manager,
                bookies=self.bookies,
                pool=self._pool(versioned.metadata),
                clock=self.clock,
                fallback=self.fallback_digest,
                reformatted=() if accepts_loss else reformatted,
                distrusted=suspects,
                registered=view.answering,
                gives_up_damaged=accepts_loss,
                confirm=confirm,
                guards=guards,
                beside=beside,
                on_marked=note_fenced,
            )
        except UnavailableError as error:
            if versioned.metadata.state is LedgerState.OPEN:  # further tries tell nothing new
                self.history.record(
                    Event(kind=Kind.RECOVERY_UNFINISHED, ledger_id=ledger_id, reason=str(error))
                )
            raise
        last_entry_id = closed.metadata.last_entry_id
        self.history.record(
            Event(kind=Kind.LEDGER_RECOVERED, ledger_id=ledger_id, last_entry_id=last_entry_id)
        )
        log.info("ledger.recovered", ledger_id=ledger_id, last_entry_id=last_entry_id)
        return closed

    # --- Why a recovery failed --------------------------------------------------------------------

    async def end_unproven(
        self, versioned: VersionedMetadata, view: ClusterView, error: UnprovenEndError
    ) -> Blocked:
        """Return the facts for an operator after ``recover`` could not prove the end."""
        metadata = versioned.metadata
        if metadata.ack_quorum < 1:
            facts = Facts(ack_quorum=metadata.ack_quorum, errors=(str(error),))
            return Blocked(reason=Reason.END_UNPROVEN, facts=facts)
        members, silent = metadata.last_segment.ensemble, set[BookieId]()
        if error.has_unresponsive:
            # They say neither what they have nor that they have nothing. A reply at the address of
            # a bookie that is not registered counts as none.
            answering = self.views.current.answering
            replies = await self._last_entry_ids(members, versioned.ledger_id)
            silent = {b for b, last in replies.items() if last is None or b not in answering}
        others = frozenset(members) - silent
        return Blocked(
            reason=Reason.END_UNPROVEN,
            facts=structs.replace(
                untrusted_facts(versioned, view),
                unresponsive=named(silent),
                needed=named(wanted_for_coverage(metadata, others)),
                errors=(str(error),),
            ),
        )

    def no_target(
        self,
        versioned: VersionedMetadata,
        error: NotEnoughBookiesError | None = None,
        *,
        silent: Collection[BookieId] = (),
    ) -> Blocked:
        """Return why ``recover`` cannot write the last entries back.

        ``error``: the error of ``recover``, if it was tried. ``silent``: members of the last
        ensemble that do not answer, besides those that are not registered.
        """
        metadata, view = versioned.metadata, self.views.current
        members = metadata.last_segment.ensemble
        return Blocked(
            reason=Reason.NO_TARGET,
            facts=structs.replace(
                absence_facts(members, view),
                superseded=named([b for b in members if b in view.available - view.answering]),
                unresponsive=named([b for b in members if b in silent and b in view.answering]),
                ack_quorum=metadata.ack_quorum,
                excluded=self.target_selector.why_no_candidate(view, members, metadata),
                errors=() if error is None else (str(error),),
            ),
        )

    def recovery_failed(
        self, versioned: VersionedMetadata, view: ClusterView, error: Exception
    ) -> Blocked:
        """Return why ``recover`` failed with another error: too few bookies answer, or else."""
        now = self.views.current
        facts = structs.replace(untrusted_facts(versioned, view), errors=(str(error),))
        wanted = wanted_for_coverage(versioned.metadata, now.answering)
        if not wanted:
            return Blocked(reason=Reason.RECOVERY_FAILED, facts=facts)
        missing = absence_facts(wanted, now)
        return Blocked(
            reason=Reason.NO_COVERAGE,
            facts=structs.replace(
                facts,
                absent=missing.absent,
                decommissioned=missing.decommissioned,
                superseded=named(wanted & now.available),
            ),
        )

    async def can_write_back(
        self, metadata: LedgerMetadata, replies: Mapping[BookieId, LastEntry | None]
    ) -> bool:
        """Return True if ``recover`` could store each of the last entries on an ack quorum.

        ``replies``: how far each member of the last ensemble reaches, None if it does not answer.
        Bookies that do not answer store nothing.
        """
        last_entries = [each for each in replies.values() if each is not None]
        segment = metadata.last_segment
        # Recovery writes the entries after the LAC again, up to the last one that a bookie has.
        first = max([segment.first_entry_id, *(each.lac + 1 for each in last_entries)])
        last = max((each.last_entry_id for each in last_entries), default=NO_ENTRY)
        # Entries whose ids differ by the ensemble size are on the same bookies.
        written_back_to = {
            bookie
            for entry_id in range(first, min(last + 1, first + metadata.ensemble_size))
            for bookie in replicas_in(segment, entry_id, write_quorum=metadata.write_quorum)
        }
        failing = {b for b, reply in replies.items() if reply is None} & written_back_to
        return not failing or await can_go_on_without(
            metadata, failing, pool=self._pool(metadata), clock=self.clock
        )

    async def _last_entry_ids(
        self, bookies: Sequence[BookieId], ledger_id: int
    ) -> dict[BookieId, int | None]:
        """Return the last entry id of each bookie, -1 for none; None if it does not answer."""
        replies = (last_entry_id(self.bookies, bookie, ledger_id) for bookie in bookies)
        return dict(zip(bookies, await asyncio.gather(*replies), strict=True))

    def _pool(self, metadata: LedgerMetadata) -> BookiePool:
        async def writable() -> list[Candidate]:
            return self.target_selector.candidates(self.views.current, metadata)

        return BookiePool(writable=writable, placement=self.target_selector.placement)
