"""The repair of one locked ledger: survey, plan, copy and write, until the ledger is whole or
blocked.

A repair runs in rounds. A round reads the metadata, surveys the copies, plans, copies, and writes
all changed ensembles in one compare-and-set (rule S2) under the lock (rule S3). A conflict starts
another round, and so does a bookie of the ledger that registers or disappears meanwhile. Copies
made in earlier rounds count as long as the registration of their target is the same znode.

An open last fragment that misses a bookie is not changed. After the repair of all earlier
fragments, the outcome says so, and the worker returns to the ledger after the open-ledger grace
(``open_ledger``).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    DamagedEndError,
    JournalError,
    LockLostError,
    NoNodeError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    QuotaError,
    RejectedError,
    SessionLostError,
    UnknownOutcomeError,
    UnprovenEndError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerState
from ledgers.quorum import RecoveredEnd
from ledgers.store import Check, OperationResult, SetData, Stat
from replication.cluster import ClusterView, ViewSource
from replication.commit import CopyResults
from replication.copier import Copier, RememberedSuspects, RepairProgress
from replication.copy_checks import NOTHING_ASKED, ReadPlan
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.locks import LedgerLease
from replication.open_ledgers import (
    OpenLedgers,
    WriterSighting,
    held_back,
    is_to_be_ended,
    wanted_for_coverage,
)
from replication.outcome import DONE, MARKED_AGAIN, Outcome, OutcomeKind, waiting
from replication.plan import Plan, plan_repair
from replication.reasons import Blocked, Reason, give_up_hint, gravest, not_believed, whereabouts
from replication.recent_copies import CopyRecorder
from replication.slots import Slots
from replication.work_queue import Queue

ROUNDS_MAX = 10
"""Rounds of one repair before the ledger is deferred. Each further round means a conflict or a
failed target."""
PATIENCE_S = 0.5
"""How long a ledger keeps its slot while it waits for bookies. A hanging bookie may take ten times
as long, but other ledgers must not wait for it."""
PATIENT_BYTES_PER_S = 1_000_000
"""While a ledger is copied, it keeps its slot longer, by its size at this rate."""
SPLIT_AFTER_S = 3_600.0
"""How long a ledger is marked before a segment is split around entries that only an absent bookie
may still store. Until then its return would repair the ledger without a split. Afterwards the
copies of the other entries matter more."""
SECOND_CHECK_ENTRIES = 1_000
"""After copying more entries than this, the other copies are checked again before the mark is
deleted."""

OnWritten = Callable[[VersionedMetadata], None]


class Repairer:
    """Repairs ledgers that the caller has locked. Shared by all repairs of a worker, which run
    concurrently."""

    def __init__(
        self,
        *,
        queue: Queue,
        manager: LedgerManager,
        views: ViewSource,
        inspector: Inspector,
        open_ledgers: OpenLedgers,
        copier: Copier,
        recorder: CopyRecorder,
        clock: Clock,
        moves_misplaced: bool = False,
        on_written: OnWritten = lambda written: None,
    ) -> None:
        """``moves_misplaced``: True if ledgers marked only for their placement are moved.
        ``on_written``: called with each metadata value that was written."""
        self._queue = queue
        self._manager = manager
        self._views = views
        self._inspector = inspector
        self._open_ledgers = open_ledgers
        self._copier = copier
        self._recorder = recorder
        self._clock = clock
        self._moves_misplaced = moves_misplaced
        self._on_written = on_written
        self._remembered = RememberedSuspects()

    async def repair(
        self,
        lease: LedgerLease,
        sighting: WriterSighting | None = None,
        *,
        slots: Slots | None = None,
        suspects: Collection[BookieId] = (),
    ) -> Outcome:
        """Repair the ledger until it is done or blocked.

        ``sighting``: from an earlier outcome, after its grace is over. ``slots``: the caller holds
        one slot, which is lent to other ledgers while a bookie is slow. ``suspects``: bookies
        with bad copies, as an earlier outcome of any node reported them. Raises SessionLostError
        and LockLostError (the lock is gone), and UnavailableError if ZooKeeper does not answer.
        """
        progress = RepairProgress(
            found_bad=await self._found_bad(lease),
            suspects={*suspects, *self._remembered.pop(lease.ledger_id)},
            copies=self._recorder.of_repair(lease.ledger_id),
        )
        outcome = None
        try:
            progress.may_split = (
                self._clock.wall_ms() - lease.queued.since_ms >= SPLIT_AFTER_S * 1000
            )
            outcome = await self._go_through_rounds(lease, sighting, progress, slots or Slots(1))
        finally:
            progress.copies.end()
            if outcome is None or outcome.kind is not OutcomeKind.DONE:
                self._remembered.remember(lease.ledger_id, progress.suspects)
        return replace(outcome, suspects=frozenset(progress.suspects))

    def suspects(self, ledger_id: int) -> frozenset[BookieId]:
        """Return the bookies whose copies the last attempt found bad, if the ledger is not done."""
        return self._remembered.of(ledger_id)

    async def _go_through_rounds(
        self,
        lease: LedgerLease,
        sighting: WriterSighting | None,
        progress: RepairProgress,
        slots: Slots,
    ) -> Outcome:
        for _ in range(ROUNDS_MAX):
            try:
                outcome = await self._round(lease, sighting, progress, slots)
            except JournalError as error:
                return waiting(Blocked(reason=Reason.JOURNAL, detail=str(error)))
            except (ConflictError, NoNodeError):  # the metadata changed or is gone: read again
                continue
            except (QuotaError, RejectedError) as error:  # ZooKeeper would refuse the write again
                return waiting(Blocked(reason=Reason.WRITE_REFUSED, detail=str(error)))
            except UnknownOutcomeError:
                if await self._queue.is_completed(lease):
                    outcome = DONE
                else:
                    continue
            if outcome is not None:
                return replace(
                    outcome, entry_count=progress.entry_count, entry_bytes=progress.entry_bytes
                )
        detail = f"no success in {ROUNDS_MAX} rounds: its metadata or its bookies keep changing"
        return waiting(Blocked(reason=Reason.CONFLICTS, detail=detail))

    async def _found_bad(self, lease: LedgerLease) -> frozenset[BookieId]:
        """Return the named bookies whose copies must all be read. Absent bookies are not among
        them: they count as missing."""
        if self._views.current.available.isdisjoint(lease.queued.replicas):
            return frozenset()
        _, found_bad = await asyncio.gather(
            self._views.confirm(lease.queued.replicas), self._queue.found_bad(lease)
        )
        view = self._views.current
        missed = lease.queued.missed_while_registered(view.czxid)
        return found_bad | (missed & view.available)

    async def _round(
        self,
        lease: LedgerLease,
        sighting: WriterSighting | None,
        progress: RepairProgress,
        slots: Slots,
    ) -> Outcome | None:
        """Run one round. Returns None if another round is needed."""
        view = self._views.current
        async with slots.lent_after(PATIENCE_S):
            versioned = await self._inspector.find(lease.ledger_id)
        match versioned:
            case None:
                return await self._finish(lease)
            case Blocked() as blocked:
                return waiting(blocked)
        if not progress.has_presumed:
            progress.has_presumed = True
            if results := await self._repair_optimistically(
                lease, versioned, view, progress, slots
            ):
                return await self._write(lease, results, progress)
        async with slots.lent_after(PATIENCE_S):
            found = await self._inspector.inspect_metadata(
                versioned, view, suspects=progress.all_suspects
            )
        match found:
            case Blocked() as blocked:
                return waiting(blocked)
            case RecoveryRequired() as open_end:
                if sighting is None and await self._repair_closed_part(
                    lease, open_end, progress, slots
                ):
                    return None
                return await self._settle(lease, open_end, sighting, progress, slots)
            case Inspection() as inspection:
                return await self._repair_once(lease, inspection, progress, slots)

    async def _repair_optimistically(
        self,
        lease: LedgerLease,
        versioned: VersionedMetadata,
        view: ClusterView,
        progress: RepairProgress,
        slots: Slots,
    ) -> CopyResults | None:
        """Copy the entries that a small ledger lost with its bookies, and check all its other
        copies at the same time.

        This sends one request per entry, where a check followed by a copy sends two. Returns None
        if the ledger is not eligible, or if a check failed; then the bookies must be surveyed
        first.
        """
        presumed = self._inspector.inspect_optimistically(
            versioned, view, suspects=progress.all_suspects
        )
        if presumed is None:
            return None
        inspection = presumed.inspection
        plan = plan_repair(inspection, self._copier.targets(inspection, progress))
        if plan.blocked or not plan.repairs or self._write_refusal(versioned, plan):
            return None
        results = await self._carry_out(plan, inspection, progress, slots, asked=presumed.asked)
        return results if results.outcomes[0].gave_all_asked else None

    async def _repair_once(
        self, lease: LedgerLease, inspection: Inspection, progress: RepairProgress, slots: Slots
    ) -> Outcome | None:
        """Plan, copy and write. Returns None if another round is needed."""
        if is_to_be_ended(inspection, progress.found_bad):
            return await self._recover(
                lease, inspection.versioned, inspection.view, progress, slots
            )
        plan = plan_repair(
            inspection,
            self._copier.targets(inspection, progress),
            # A mark that names bookies is about their entries, not about placement.
            moves_misplaced=self._moves_misplaced and not lease.queued.replicas,
        )
        if plan.is_whole:
            bookies = inspection.metadata.bookies
            if not self._is_unchanged(bookies, inspection.view):
                return None
            if not await self._views.are_as_in(
                inspection.view, bookies & inspection.view.available
            ):
                return None
            return await self._finish(
                lease,
                [
                    self._manager.check(inspection.versioned),
                    *self._member_checks(lease, inspection),
                ],
            )
        if refused := self._write_refusal(inspection.versioned, plan):
            return waiting(refused)
        return await self._write(
            lease, await self._carry_out(plan, inspection, progress, slots), progress
        )

    async def _repair_closed_part(
        self, lease: LedgerLease, found: RecoveryRequired, progress: RepairProgress, slots: Slots
    ) -> bool:
        """Repair the closed fragments during the grace of the open one. Returns True if metadata
        changed.

        Fragments that cannot be repaired now are repaired after the ledger is closed.
        """
        async with slots.lent_after(PATIENCE_S):
            inspection = await self._inspector.inspect_closed_part(
                found, suspects=progress.all_suspects
            )
        if inspection is None:
            return False
        plan = plan_repair(inspection, self._copier.targets(inspection, progress))
        if not plan.repairs or self._write_refusal(inspection.versioned, plan):
            return False
        results = await self._carry_out(plan, inspection, progress, slots)
        if results.metadata == inspection.metadata:
            return False
        if not await self._confirm_targets(results, progress):
            return True
        write = await self._rewrite(results)
        self._tell_written(results, write, await self._queue.write(lease, [write]))
        return True

    def _write_refusal(self, versioned: VersionedMetadata, plan: Plan) -> Blocked | None:
        """Return why the metadata could not be written after the copies, so that no copy is made in
        vain."""
        if all(repair.is_in_place for repair in plan.repairs):
            return None
        if self._manager.has_room_for(versioned):
            return None
        detail = (
            f"its metadata is {len(versioned.data):,} bytes, too large to be written again: "
            f"zookeeper.request_bytes_max is {self._manager.request_bytes_max:,}. Raise it on all nodes if the "
            "servers' jute.maxbuffer allows more"
        )
        return Blocked(reason=Reason.WRITE_REFUSED, detail=detail)

    async def _carry_out(
        self,
        plan: Plan,
        inspection: Inspection,
        progress: RepairProgress,
        slots: Slots,
        *,
        asked: ReadPlan = NOTHING_ASKED,
    ) -> CopyResults:
        byte_count = sum(repair.byte_count for repair in plan.repairs)
        # The record is written while the copies are made, so that no repair waits for it.
        progress.copies.add([repair.target for repair in plan.repairs if not repair.is_in_place])
        async with slots.lent_after(PATIENCE_S + byte_count / PATIENT_BYTES_PER_S):
            outcomes = await self._copier.copy_all(plan, inspection, progress, asked=asked)
        suspects = frozenset().union(*(outcome.suspects for outcome in outcomes))
        suspects -= progress.all_suspects  # the plan knew of these
        progress.suspects |= suspects
        return CopyResults(
            inspection=inspection,
            plan=plan,
            outcomes=outcomes,
            # A target that registered again may have lost what it acknowledged (rule S3).
            is_unchanged=lambda bookie: self._is_unchanged([bookie], inspection.view),
            has_bad_sources=bool(suspects),
            may_split=progress.may_split,
        )

    async def _confirm_targets(self, results: CopyResults, progress: RepairProgress) -> bool:
        """Check, right before the metadata names new bookies, that their copies are safe (rules S3,
        S6).

        The copies must be recorded, so that they are read again later. And a read that begins now
        must show that each target is still the registration that acknowledged the copies.
        Otherwise:

        1. The target acknowledges the copies.
        2. This process pauses, shorter than its session timeout.
        3. The target is stopped, wiped and started again.
        4. This process continues, and has not read that event yet. Its compare-and-set succeeds and
           names an empty bookie.

        Returns False if another round is needed. Raises UnavailableError.
        """
        await progress.copies.wait_recorded()
        return await self._views.are_as_in(results.inspection.view, results.new_targets)

    def _member_checks(self, lease: LedgerLease, inspection: Inspection) -> list[Check]:
        """Return checks for the transaction that deletes the mark: bookies that the mark names, and
        that the survey found registered, must still be registered.

        1. The mark names bookie b. b is back, and the survey finds all its entries.
        2. b disappears again. The mark already names b, so Java's auditor does not write it, and
           its version stays.
        3. Without the check, deleting the mark at this version succeeds, and nobody knows that b is
           missing.

        For a bookie that the mark does not name, the auditor writes the mark in step 2, so the
        deletion fails.
        """
        named = lease.queued.replicas & inspection.metadata.bookies
        return self._views.checks_of(inspection.view, named)

    async def _finish(self, lease: LedgerLease, checks: Sequence[Check] = ()) -> Outcome:
        return DONE if await self._queue.complete(lease, checks) else MARKED_AGAIN

    def _is_unchanged(self, bookies: Iterable[BookieId], view: ClusterView) -> bool:
        """Return True if none of the bookies registered, disappeared or began to drain since the
        view was read.

        The leader may have handled such a change already without writing the mark: the ledger was
        marked already, or did not name the target yet.
        """
        now = self._views.current
        if now is view:
            return True
        then, draining = view.orders.draining, now.orders.draining
        return all(
            now.czxid(bookie) == view.czxid(bookie) and (bookie in then or bookie not in draining)
            for bookie in bookies
        )

    async def _settle(
        self,
        lease: LedgerLease,
        found: RecoveryRequired,
        sighting: WriterSighting | None,
        progress: RepairProgress,
        slots: Slots,
    ) -> Outcome | None:
        """An open fragment misses a bookie: leave the ledger to its writer, or recover it after the
        grace."""
        if leased := held_back(self._views.current.orders):
            return waiting(leased)
        async with slots.lent_after(PATIENCE_S):
            grace = await self._open_ledgers.judge(found, sighting)
        if grace is not None:
            return waiting(Blocked(reason=grace.reason, detail=grace.detail), grace)
        return await self._recover(lease, found.versioned, found.view, progress, slots)

    async def _recover(
        self,
        lease: LedgerLease,
        versioned: VersionedMetadata,
        view: ClusterView,
        progress: RepairProgress,
        slots: Slots,
    ) -> Outcome | None:
        """Recover and close the ledger. The next round repairs it."""
        if leased := held_back(self._views.current.orders):
            return waiting(leased)

        async def record_targets(end: RecoveredEnd) -> None:
            progress.copies.add(end.new_members)
            await progress.copies.wait_recorded()

        try:
            async with slots.lent_after(PATIENCE_S):
                await self._open_ledgers.recover(
                    versioned,
                    view,
                    suspects=progress.found_bad,
                    guards=self._queue.guards(lease),
                    before_close=record_targets,
                )
        except (ConflictError, JournalError, QuotaError, SessionLostError, LockLostError):
            raise
        except NoSuchLedgerError:
            return None
        except UnprovenEndError as error:
            hint = await self._open_ledgers.way_out(versioned, error)
            detail = f"{error}{not_believed(versioned, view)}; {hint}"
            return waiting(Blocked(reason=Reason.END_UNPROVEN, detail=detail))
        except NotEnoughBookiesError as error:
            detail = f"{error}; {self._open_ledgers.why_no_target(versioned)}"
            return waiting(Blocked(reason=Reason.NO_TARGET, detail=detail))
        except DamagedEndError as error:
            detail = f"{error}; {give_up_hint(versioned.ledger_id)}"
            return waiting(Blocked(reason=Reason.RECOVERY_FAILED, detail=detail))
        except BookmenderError as error:
            detail = f"{error}{not_believed(versioned, view)}"
            now = self._views.current
            if wanted := wanted_for_coverage(versioned.metadata, now.answering):
                detail = f"{detail}; {whereabouts(wanted, now)}"
                return waiting(Blocked(reason=Reason.NO_COVERAGE, detail=detail))
            return waiting(Blocked(reason=Reason.RECOVERY_FAILED, detail=detail))
        return None

    async def _write(
        self, lease: LedgerLease, results: CopyResults, progress: RepairProgress
    ) -> Outcome | None:
        """Write the ensembles whose entries were all copied. Returns None if another round is
        needed.

        The same transaction deletes the mark only if every copy was checked and nothing is missing
        (rule S6).
        """
        inspection, after = results.inspection, results.metadata
        write = None
        if after != inspection.metadata:
            if not await self._confirm_targets(results, progress):
                return None
            write = await self._rewrite(results)
        is_ended = inspection.metadata.state is not LedgerState.IN_RECOVERY
        is_proven = (
            is_ended
            and results.entry_count <= SECOND_CHECK_ENTRIES
            and self._is_unchanged(after.bookies, inspection.view)
        )
        if write is not None:
            on_applied = partial(self._tell_written, results, write)
            if is_proven and results.is_complete:
                checks = self._member_checks(lease, inspection)
                is_done = await self._queue.complete(lease, [write, *checks], on_applied=on_applied)
                return DONE if is_done else MARKED_AGAIN
            on_applied(await self._queue.write(lease, [write]))
        if results.is_split or not results.in_the_way:
            return None
        only_to_empty = results.only_to_empty
        if is_ended and only_to_empty and lease.queued.is_loss_besides(only_to_empty):
            if not is_proven:
                return None
            if await self._queue.unmark_loss(lease, self._member_checks(lease, inspection)):
                return MARKED_AGAIN
        return waiting(gravest(results.in_the_way))

    async def _rewrite(self, results: CopyResults) -> SetData:
        inspection = results.inspection
        return await self._manager.write_operation(
            inspection.ledger_id, results.metadata, read_as=inspection.versioned
        )

    def _tell_written(
        self, results: CopyResults, write: SetData, replies: Sequence[OperationResult]
    ) -> None:
        stat = replies[0]
        assert isinstance(stat, Stat), replies
        self._on_written(
            VersionedMetadata(
                ledger_id=results.inspection.ledger_id,
                metadata=results.metadata,
                stat=stat,
                data=write.data,
            )
        )
