"""The repair of one leased ledger: inspect, plan, copy, commit, until it is whole or blocked.

A repair runs in rounds (``RepairAttempt._round``). A round reads the metadata, inspects the copies,
plans, copies, and writes all changed ensembles in one compare-and-set (rule S2) under the lock
(rule S3). Another round follows after a conflict, after a failed target, and after a bookie of the
ledger registered or disappeared. Copies of earlier rounds count while the registration of their
target is the same znode.

An open last fragment that misses a bookie is not changed. The closed fragments are repaired; then
the outcome says to wait, and the worker calls again after the open-ledger grace (``open_ledgers``).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace
from prometheus_client import Counter, Histogram

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
from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.quorum import RecoveredEnd
from ledgers.store import Check, Operation, OperationResult, SetData, Stat
from replication.cluster import ClusterView, ViewSource
from replication.commit import CopyResults, joined
from replication.copier import Copier, RememberedSuspects, RepairProgress
from replication.copy_reader import NOTHING_ASKED, ReadPlan
from replication.history import Cause, CausedBy, cause_at
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.locks import LedgerLease
from replication.open_ledgers import OpenLedgers, WriterSighting, held_back, must_finish_recovery
from replication.outcome import DONE, MARKED_AGAIN, Outcome, OutcomeKind, waiting
from replication.plan import Plan, plan_repair
from replication.reasons import Blocked, Facts, Reason, gravest
from replication.recent_copies import CopyRecorder
from replication.slots import Slots
from replication.work_queue import OnApplied, Queue

STEP_S = Histogram(
    "bookmender_repair_step_seconds",
    "Duration of one step of a repair: inspect, copy, commit (which includes unmarking) or recover "
    "(of an open ledger). Small ledgers are copied and inspected in one step, copy.",
    ["step"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600),
)
COPIED_LEDGERS = Counter(
    "bookmender_copied_ledgers_total",
    "Tries to repair a ledger that made at least one copy, by cause: loss (the mark names bookies) "
    "or placement (the mark names none).",
    ["cause"],
)
_LOSS_COPIED, _PLACEMENT_COPIED = (
    COPIED_LEDGERS.labels(cause=cause) for cause in ("loss", "placement")
)
_INSPECT_S, _COPY_S, _COMMIT_S, _RECOVER_S = (
    STEP_S.labels(step=step) for step in ("inspect", "copy", "commit", "recover")
)
"""Labels are looked up once, so that all steps are exported from the start, at 0."""

ROUNDS_MAX = 10
"""Rounds of one repair before the ledger is deferred. Each further round means a conflict or a
failed target."""
PATIENCE_S = 0.5
"""Time that a ledger keeps its slot while it waits for bookies. A hanging bookie may take ten times
as long, but other ledgers must not wait for it."""
PATIENT_BYTES_PER_S = 1_000_000
"""While a ledger is copied, it keeps its slot longer, by its size at this rate."""
SPLIT_AFTER_S = 3_600.0
"""A segment is split around entries that only absent bookies may still store after this node has
missed each of them for so long. Until then their return would repair the ledger without a split.
Afterwards the copies of the other entries matter more. The mark may be much older than the absence
of its bookies."""
SECOND_CHECK_ENTRIES = 1_000
"""After copying more entries than this, the other copies are checked again before the mark is
deleted."""

OnWritten = Callable[[VersionedMetadata], None]


def _ignore(written: VersionedMetadata) -> None:
    pass


@dataclass(kw_only=True)
class Repairer:
    """Repairs ledgers that the caller has leased. Shared by all repairs of a worker, which run
    concurrently.

    ``moves_misplaced``: move copies of ledgers that are marked only for their placement.
    ``on_written``: called with each metadata value that was written.
    """

    queue: Queue
    manager: LedgerManager
    views: ViewSource
    inspector: Inspector
    open_ledgers: OpenLedgers
    copier: Copier
    recorder: CopyRecorder
    clock: Clock
    moves_misplaced: bool = False
    on_written: OnWritten = _ignore
    _remembered: RememberedSuspects = field(default_factory=RememberedSuspects, init=False)

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
            perhaps_bad=lease.queued.perhaps_missed(self.views.absences),
            suspects={*suspects, *self._remembered.pop(lease.ledger_id)},
            copies=self.recorder.of_repair(lease.ledger_id),
        )
        outcome = None
        try:
            attempt = RepairAttempt(self, lease, sighting, progress, slots or Slots(1))
            outcome = await attempt.run()
        finally:
            progress.copies.end()
            if progress.has_copied:
                (_LOSS_COPIED if lease.queued.replicas else _PLACEMENT_COPIED).inc()
            if outcome is None or outcome.kind is not OutcomeKind.DONE:
                self._remembered.remember(lease.ledger_id, progress.suspects)
        return replace(outcome, suspects=frozenset(progress.suspects), caused_by=progress.caused_by)

    def suspects(self, ledger_id: int) -> frozenset[BookieId]:
        """Return the bookies whose copies the last attempt found bad, if the ledger is not done."""
        return self._remembered.of(ledger_id)

    async def _found_bad(self, lease: LedgerLease) -> frozenset[BookieId]:
        """Return the bookies of the mark whose copies a check found bad. Absent bookies are not
        among them: they count as missing."""
        if self.views.current.available.isdisjoint(lease.queued.replicas):
            return frozenset()
        _, found_bad = await asyncio.gather(
            self.views.confirm(lease.queued.replicas), self.queue.found_bad(lease)
        )
        view = self.views.current
        missed = lease.queued.missed_while_registered(view.czxid)
        return found_bad | (missed & view.available)


class RepairAttempt:
    """One call of ``Repairer.repair``. Owns what its rounds share: lease, progress and slots.

    The methods of a round return None if another round is needed.
    """

    def __init__(
        self,
        repairer: Repairer,
        lease: LedgerLease,
        sighting: WriterSighting | None,
        progress: RepairProgress,
        slots: Slots,
    ) -> None:
        self._repairer = repairer
        self._queue, self._manager, self._views = repairer.queue, repairer.manager, repairer.views
        self._inspector, self._copier = repairer.inspector, repairer.copier
        self._lease = lease
        self._sighting = sighting
        self._progress = progress
        self._slots = slots

    async def run(self) -> Outcome:
        """Run rounds until the ledger is done or blocked."""
        for _ in range(ROUNDS_MAX):
            try:
                outcome = await self._round()
            except JournalError as error:
                return waiting(_because_of(Reason.JOURNAL, error))
            except (ConflictError, NoNodeError):  # the metadata changed or is gone: read again
                continue
            except (QuotaError, RejectedError) as error:  # ZooKeeper would refuse the write again
                return waiting(_because_of(Reason.WRITE_REFUSED, error))
            except UnknownOutcomeError:
                if not await self._queue.is_completed(self._lease):
                    continue
                outcome = DONE
            if outcome is not None:
                return replace(
                    outcome,
                    entry_count=self._progress.entry_count,
                    entry_bytes=self._progress.entry_bytes,
                )
        return waiting(Blocked(reason=Reason.CONFLICTS, facts=Facts(round_count=ROUNDS_MAX)))

    async def _round(self) -> Outcome | None:
        """Inspect, plan, copy, commit."""
        view = self._views.current
        async with self._slots.lent_after(PATIENCE_S):
            versioned = await self._inspector.find(self._lease.ledger_id)
        match versioned:
            case None:
                self._progress.caused_by = CausedBy(Cause.DELETED)
                return await self._finish()
            case Blocked() as blocked:
                return waiting(blocked)
        if self._progress.caused_by is None:
            self._progress.caused_by = self._cause(versioned, view)
        if not self._progress.has_tried_optimistically:
            self._progress.has_tried_optimistically = True
            if results := await self._copy_optimistically(versioned, view):
                return await self._commit(results)
        match await self._inspect(versioned, view):
            case Blocked() as blocked:
                return waiting(blocked)
            case RecoveryRequired() as found:
                return await self._handle_open_fragment(found)
            case Inspection() as inspection:
                return await self._repair(inspection)

    async def _repair(self, inspection: Inspection) -> Outcome | None:
        """Plan, copy and commit. The ledger is closed, or its open fragment needs nothing."""
        if must_finish_recovery(inspection, self._progress.found_bad):
            return await self._recover(inspection.versioned, inspection.view)
        # A mark that names bookies is about their entries, not about placement.
        may_move = self._repairer.moves_misplaced and not self._lease.queued.replicas
        plan = self._plan(inspection, moves_misplaced=may_move)
        if plan.is_whole:
            return await self._finish_whole(inspection)
        if refused := self._write_refusal(inspection.versioned, plan):
            return waiting(refused)
        return await self._commit(await self._copy(plan, inspection))

    def _cause(self, versioned: VersionedMetadata, view: ClusterView) -> CausedBy | None:
        """Return why the ledger needs a repair; None if its marks name no bookie."""
        named = self._lease.queued.replicas
        found = cause_at(
            named,
            registered=view.available,
            reformatted=view.initialised_after(versioned.stat.czxid),
            draining=view.orders.draining.keys(),
            found_bad=self._progress.found_bad,
        )
        if found is not None or not named:
            return found
        # Only drains and findings name bookies in the private tree.
        cause = Cause.RETURNED if self._lease.queued.is_loss else Cause.CANCELLED
        return CausedBy(cause, tuple(sorted(named)))

    # --- Inspect and plan -------------------------------------------------------------------------

    async def _inspect(
        self, versioned: VersionedMetadata, view: ClusterView
    ) -> Inspection | RecoveryRequired | Blocked:
        with _INSPECT_S.time():
            async with self._slots.lent_after(PATIENCE_S):
                return await self._inspector.inspect_metadata(
                    versioned, view, suspects=self._progress.all_suspects
                )

    def _plan(self, inspection: Inspection, *, moves_misplaced: bool = False) -> Plan:
        targets = self._copier.targets(inspection, self._progress)
        return plan_repair(inspection, targets, moves_misplaced=moves_misplaced)

    def _write_refusal(self, versioned: VersionedMetadata, plan: Plan) -> Blocked | None:
        """Return why the metadata could not be written after the copies, so that no copy is made in
        vain."""
        if all(repair.is_in_place for repair in plan.repairs):
            return None
        if self._manager.has_room_for(versioned):
            return None
        return Blocked(
            reason=Reason.WRITE_REFUSED,
            facts=Facts(
                metadata_bytes=len(versioned.data),
                request_bytes_max=self._manager.request_bytes_max,
            ),
        )

    # --- Copy -------------------------------------------------------------------------------------

    async def _copy(
        self, plan: Plan, inspection: Inspection, *, asked: ReadPlan = NOTHING_ASKED
    ) -> CopyResults:
        """Make the copies of a plan. ``asked``: reads that check other copies at the same time."""
        progress, byte_count = self._progress, sum(repair.byte_count for repair in plan.repairs)
        # The record is written while the copies are made, so that no repair waits for it.
        progress.copies.add([repair.target for repair in plan.repairs if not repair.is_in_place])
        with _COPY_S.time():
            async with self._slots.lent_after(PATIENCE_S + byte_count / PATIENT_BYTES_PER_S):
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
            may_return=self._may_return,
        )

    def _may_return(self, bookie: BookieId) -> bool:
        """Return True if a bookie that is not registered, and not decommissioned, is not absent for
        long."""
        absent_s = self._views.absences.absent_s(bookie, now_s=self._repairer.clock.now_s())
        return bookie in self._views.current.cookies and absent_s < SPLIT_AFTER_S

    async def _copy_optimistically(
        self, versioned: VersionedMetadata, view: ClusterView
    ) -> CopyResults | None:
        """Copy the entries that a small ledger lost with its bookies, and check all its other
        copies at the same time.

        This sends one request per entry, where a check followed by a copy sends two. Returns None
        if the ledger is not eligible, or if a check failed; then the ledger must be inspected
        first.
        """
        optimistic = self._inspector.inspect_optimistically(
            versioned, view, suspects=self._progress.all_suspects
        )
        if optimistic is None:
            return None
        plan = self._plan(optimistic.inspection)
        if plan.blocked or not plan.repairs or self._write_refusal(versioned, plan):
            return None
        results = await self._copy(plan, optimistic.inspection, asked=optimistic.asked)
        return results if results.outcomes[0].gave_all_asked else None

    # --- Commit -----------------------------------------------------------------------------------

    async def _commit(self, results: CopyResults) -> Outcome | None:
        with _COMMIT_S.time():
            return await self._try_commit(results)

    async def _try_commit(self, results: CopyResults) -> Outcome | None:
        """Write the ensembles whose entries were all copied.

        The same transaction deletes the mark only if every copy was checked and nothing is missing
        (rule S6).
        """
        inspection, after = results.inspection, results.metadata
        is_ended = inspection.metadata.state is not LedgerState.IN_RECOVERY
        may_unmark = is_ended and results.entry_count <= SECOND_CHECK_ENTRIES
        if after != inspection.metadata:
            await self._progress.copies.wait_recorded()
            # One round trip confirms the targets, too: they are among these bookies.
            if (
                may_unmark
                and results.is_complete
                and await self._are_confirmed(after.bookies, inspection.view)
            ):
                return await self._unmark(inspection, after)
            if not await self._confirm_targets(results):
                return None
            write = await self._rewrite(inspection, after)
            replies = await self._queue.write(self._lease, [write])
            self._tell_written(inspection, after, write, replies)
        if results.is_split or not results.blocked:
            return None
        only_to_empty = results.only_to_empty
        if is_ended and only_to_empty and self._lease.queued.is_loss_besides(only_to_empty):
            if not may_unmark or not await self._are_confirmed(after.bookies, inspection.view):
                return None
            if await self._queue.unmark_loss(self._lease, self._member_checks(inspection)):
                return MARKED_AGAIN
        return waiting(gravest(results.blocked))

    async def _finish_whole(self, inspection: Inspection) -> Outcome | None:
        """Delete the mark of a ledger that misses nothing, unless its bookies changed meanwhile."""
        metadata = inspection.metadata
        if not await self._are_confirmed(metadata.bookies, inspection.view):
            return None
        # A split around entries that have copies again is undone.
        return await self._unmark(inspection, joined(metadata) if metadata.is_closed else metadata)

    async def _unmark(self, inspection: Inspection, metadata: LedgerMetadata) -> Outcome:
        """Delete the marks. The same transaction writes the metadata, or checks it if it is
        unchanged."""
        checks = self._member_checks(inspection)
        if metadata == inspection.metadata:
            return await self._finish([self._manager.check(inspection.versioned), *checks])
        write = await self._rewrite(inspection, metadata)
        on_applied = partial(self._tell_written, inspection, metadata, write)
        return await self._finish([write, *checks], on_applied)

    async def _finish(
        self, extra: Sequence[Operation] = (), on_applied: OnApplied = lambda results: None
    ) -> Outcome:
        is_done = await self._queue.complete(self._lease, extra, on_applied=on_applied)
        return DONE if is_done else MARKED_AGAIN

    async def _are_confirmed(self, bookies: Collection[BookieId], view: ClusterView) -> bool:
        """Check, right before the mark is deleted, that the copies on these bookies are still those
        that were judged. Returns False if another round is needed, like ``_confirm_targets``, whose
        interleaving can also happen to a bookie that held a copy before. Raises UnavailableError.

        If an ACL hides a registration, nobody can tell whether it changed; the ledger must not stay
        marked for ever.
        """
        seen = [bookie for bookie in bookies if view.czxid(bookie)]
        return self._is_unchanged(bookies, view) and await self._views.are_as_in(view, seen)

    async def _confirm_targets(self, results: CopyResults) -> bool:
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
        await self._progress.copies.wait_recorded()
        return await self._views.are_as_in(results.inspection.view, results.new_targets)

    def _member_checks(self, inspection: Inspection) -> list[Check]:
        """Return checks for the transaction that deletes the mark: bookies that the mark names, and
        that the inspection found registered, must still be registered.

        1. The mark names bookie b. b is back, and the inspection finds all its entries.
        2. b disappears again. The mark already names b, so Java's auditor does not write it, and
           its version stays.
        3. Without the check, deleting the mark at this version succeeds, and no node notices that b
           is missing.

        For a bookie that the mark does not name, the auditor writes the mark in step 2, so the
        deletion fails.
        """
        in_mark = self._lease.queued.replicas & inspection.metadata.bookies
        return self._views.checks_of(inspection.view, in_mark)

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

    async def _rewrite(self, inspection: Inspection, metadata: LedgerMetadata) -> SetData:
        return await self._manager.write_operation(
            inspection.ledger_id, metadata, read_as=inspection.versioned
        )

    def _tell_written(
        self,
        inspection: Inspection,
        metadata: LedgerMetadata,
        write: SetData,
        replies: Sequence[OperationResult],
    ) -> None:
        stat = replies[0]
        assert isinstance(stat, Stat), replies
        # A fragment may have no entries.
        self._progress.has_copied |= metadata.bookies != inspection.metadata.bookies
        self._repairer.on_written(
            VersionedMetadata(
                ledger_id=inspection.ledger_id, metadata=metadata, stat=stat, data=write.data
            )
        )

    # --- Open ledgers -----------------------------------------------------------------------------

    async def _handle_open_fragment(self, found: RecoveryRequired) -> Outcome | None:
        """An open fragment lacks copies: repair the closed fragments, leave the open one to its
        writer, and recover the ledger after the grace."""
        if self._sighting is None and await self._repair_closed_part(found):
            return None
        if hold := held_back(self._views.current.orders):
            return waiting(hold)
        async with self._slots.lent_after(PATIENCE_S):
            grace = await self._repairer.open_ledgers.judge(found, self._sighting)
        if grace is not None:
            return waiting(grace.blocked, grace)
        return await self._recover(found.versioned, found.view)

    async def _repair_closed_part(self, found: RecoveryRequired) -> bool:
        """Repair the closed fragments. Returns True if metadata changed.

        Fragments that cannot be repaired now are repaired after the ledger is closed.
        """
        async with self._slots.lent_after(PATIENCE_S):
            inspection = await self._inspector.inspect_closed_part(
                found, suspects=self._progress.all_suspects
            )
        if inspection is None:
            return False
        plan = self._plan(inspection)
        if not plan.repairs or self._write_refusal(inspection.versioned, plan):
            return False
        results = await self._copy(plan, inspection)
        if results.metadata == inspection.metadata:
            return False
        if not await self._confirm_targets(results):
            return True
        write = await self._rewrite(inspection, results.metadata)
        replies = await self._queue.write(self._lease, [write])
        self._tell_written(inspection, results.metadata, write, replies)
        return True

    async def _recover(self, versioned: VersionedMetadata, view: ClusterView) -> Outcome | None:
        """Recover and close the ledger. The next round repairs it."""
        if hold := held_back(self._views.current.orders):
            return waiting(hold)
        open_ledgers, copies = self._repairer.open_ledgers, self._progress.copies

        async def record_targets(end: RecoveredEnd) -> None:
            copies.add(end.new_members)
            await copies.wait_recorded()

        try:
            with _RECOVER_S.time():
                async with self._slots.lent_after(PATIENCE_S):
                    await open_ledgers.recover(
                        versioned,
                        view,
                        suspects=self._progress.found_bad,
                        guards=self._queue.guards(self._lease),
                        before_close=record_targets,
                    )
        except (ConflictError, JournalError, QuotaError, SessionLostError, LockLostError):
            raise
        except NoSuchLedgerError:
            return None
        except UnprovenEndError as error:
            return waiting(await open_ledgers.end_unproven(versioned, view, error))
        except NotEnoughBookiesError as error:
            return waiting(open_ledgers.no_target(versioned, error))
        except DamagedEndError as error:
            return waiting(_because_of(Reason.END_DAMAGED, error))
        except BookmenderError as error:
            return waiting(open_ledgers.recovery_failed(versioned, view, error))
        return None


def _because_of(reason: Reason, error: BookmenderError) -> Blocked:
    return Blocked(reason=reason, facts=Facts(errors=(str(error),)))
