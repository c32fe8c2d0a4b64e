"""The repair of one leased ledger: inspect, plan, copy, commit, until it is whole or blocked.

A repair runs in rounds (``Repairer._round``). A round reads the metadata, inspects the copies,
plans, copies, and writes all changed ensembles in one compare-and-set (rule S2) under the lock
(rule S3). Another round follows after a conflict, after a failed target, and after a bookie of the
ledger registered or disappeared. Copies of earlier rounds count while the registration of their
target is the same znode.

An open last fragment that misses a bookie is not changed. The closed fragments are repaired; then
the outcome says to wait, and the worker calls again after the open-ledger grace (``open_ledgers``).
"""

import asyncio
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter, Histogram

from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    DamagedEndError,
    JournalError,
    LocalLimitError,
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
from ledgers.store import Check, OperationResult, SetData, Stat
from replication.cluster import ClusterView, ViewSource
from replication.commit import CopyResults, joined
from replication.copy_reader import NOTHING_ASKED, ReadPlan
from replication.copying import Copier
from replication.history import Cause, CausedBy, cause_at
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.open_ledgers import OpenLedgers, WriterSighting, held_back, must_finish_recovery
from replication.plan import Plan, plan_repair
from replication.reasons import Blocked, Facts, Reason, gravest
from replication.recent_copies import CopyRecorder, RepairCopies
from replication.slots import Slots
from replication.targets import CopyKey
from replication.work_queue import LedgerLease, Queue


class OutcomeKind(enum.Enum):
    DONE = "done"
    """The ledger is whole, or deleted. Its mark and its lock are deleted."""
    WAITING = "waiting"
    """The repair is blocked. The worker still holds the lock."""
    MARKED_AGAIN = "marked-again"
    """The mark changed during the repair: more copies are missing, or a loss is over. The worker
    still holds the lock, and must release it so that the ledger is leased again."""


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one repair.

    ``blocked``: set if and only if the ledger is WAITING. ``sighting``: set during a grace; the
    next attempt needs it. ``caused_by``: for the history; None if the mark names no bookie.
    """

    kind: OutcomeKind
    blocked: Blocked | None = None
    sighting: WriterSighting | None = None
    entry_count: int = 0
    entry_bytes: int = 0
    caused_by: CausedBy | None = None

    @property
    def reason(self) -> Reason | None:
        return None if self.blocked is None else self.blocked.reason


DONE = Outcome(kind=OutcomeKind.DONE)
MARKED_AGAIN = Outcome(kind=OutcomeKind.MARKED_AGAIN)


def waiting(blocked: Blocked, sighting: WriterSighting | None = None) -> Outcome:
    """Return the outcome of a repair that is blocked."""
    return Outcome(kind=OutcomeKind.WAITING, blocked=blocked, sighting=sighting)


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


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One call of ``Repairer.repair``: its lease and slots, and what its rounds share."""

    lease: LedgerLease
    sighting: WriterSighting | None
    slots: Slots
    copies: RepairCopies
    """The record of copies on new targets, which are read again later (rule S6)."""
    found_bad: frozenset[BookieId]
    """Bookies whose copies a check or fsck found bad."""
    perhaps_bad: frozenset[BookieId]
    """Bookies whose copies a check may have found bad. Their "no" counts in a recovery."""
    suspects: set[BookieId]
    """Bookies that did not give a good copy of an entry that they should have, now or in an
    earlier repair."""
    failed: set[BookieId] = field(default_factory=set)
    """Bookies to which a copy failed. They are not tried again in this repair."""
    refilled: set[BookieId] = field(default_factory=set)
    """Bookies repaired in place. Their copies are read back (rule S15)."""
    copied: dict[CopyKey, tuple[BookieId, int]] = field(default_factory=dict)
    """Complete copies: the target, and the czxid of its registration (rule S3)."""
    has_tried_optimistically: bool = False
    """True after one attempt to copy without inspecting first. Later rounds inspect."""
    has_copied: bool = False
    """True if entries were copied, or if the metadata names a new bookie."""
    entry_count: int = 0
    entry_bytes: int = 0
    caused_by: CausedBy | None = None
    """Why the ledger needs a repair, as the first round saw it."""

    @property
    def all_suspects(self) -> frozenset[BookieId]:
        """Bookies to be read entry by entry: their first and last entries prove nothing."""
        return self.found_bad.union(self.perhaps_bad, self.refilled, self.suspects)


@dataclass(kw_only=True)
class Repairer:
    """Repairs ledgers that the caller has leased. Shared by all repairs of a worker, which run
    concurrently.

    ``moves_misplaced``: move copies of ledgers that are marked only for their placement.
    ``on_written``: called with each metadata value that was written. The methods of a round return
    None if another round is needed.
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
    on_written: OnWritten = lambda written: None

    async def repair(
        self,
        lease: LedgerLease,
        sighting: WriterSighting | None = None,
        *,
        slots: Slots | None = None,
    ) -> Outcome:
        """Repair the ledger until it is done or blocked.

        ``sighting``: from an earlier outcome, after its grace is over. ``slots``: the caller holds
        one slot, which is lent to other ledgers while a bookie is slow. Bookies with bad copies are
        added to ``lease.suspects``, also if an error is raised. Raises SessionLostError and
        LockLostError (the lock is gone), and UnavailableError if ZooKeeper does not answer.
        """
        named, found_bad = lease.queued.replicas, frozenset[BookieId]()
        # What a check found on absent bookies does not matter: their copies count as missing.
        if not self.views.current.available.isdisjoint(named):
            _, found_bad = await asyncio.gather(
                self.views.confirm(named), self.queue.found_bad(lease)
            )
            view = self.views.current
            found_bad |= lease.queued.missed_while_registered(view.czxid) & view.available
        at = Attempt(
            lease=lease,
            sighting=sighting,
            slots=slots or Slots(1),
            copies=RepairCopies(self.recorder, lease.ledger_id),
            found_bad=found_bad,
            perhaps_bad=lease.queued.perhaps_missed(self.views.absences),
            suspects=lease.suspects,
        )
        try:
            outcome = await self._run_rounds(at)
        finally:
            at.copies.end()
            if at.has_copied:
                (_LOSS_COPIED if named else _PLACEMENT_COPIED).inc()
        return replace(outcome, caused_by=at.caused_by)

    async def _run_rounds(self, at: Attempt) -> Outcome:
        """Run rounds until the ledger is done or blocked."""
        for _ in range(ROUNDS_MAX):
            try:
                outcome = await self._round(at)
            except JournalError as error:
                return waiting(_because_of(Reason.JOURNAL, error))
            except (ConflictError, NoNodeError):  # the metadata changed or is gone: read again
                continue
            except (QuotaError, RejectedError) as error:  # ZooKeeper would refuse the write again
                return waiting(_because_of(Reason.WRITE_REFUSED, error))
            except UnknownOutcomeError:
                if not await self.queue.is_completed(at.lease):
                    continue
                outcome = DONE
            if outcome is not None:
                return replace(outcome, entry_count=at.entry_count, entry_bytes=at.entry_bytes)
        return waiting(Blocked(reason=Reason.CONFLICTS, facts=Facts(round_count=ROUNDS_MAX)))

    async def _round(self, at: Attempt) -> Outcome | None:
        """Inspect, plan, copy, commit."""
        view = self.views.current
        async with at.slots.lent_after(PATIENCE_S):
            versioned = await self.inspector.find(at.lease.ledger_id)
        if versioned is None:
            at.caused_by = CausedBy(Cause.DELETED)
            return DONE if await self.queue.complete(at.lease) else MARKED_AGAIN
        if isinstance(versioned, Blocked):
            return waiting(versioned)
        if at.caused_by is None:
            at.caused_by = self._cause(at, versioned, view)
        if not at.has_tried_optimistically:
            at.has_tried_optimistically = True
            if results := await self._copy_optimistically(at, versioned, view):
                return await self._commit(at, results)
        with _INSPECT_S.time():
            async with at.slots.lent_after(PATIENCE_S):
                found = await self.inspector.inspect_metadata(
                    versioned, view, suspects=at.all_suspects
                )
        if isinstance(found, Blocked):
            return waiting(found)
        if isinstance(found, RecoveryRequired):
            return await self._handle_open_fragment(at, found)
        # The ledger is closed, or its open fragment needs nothing.
        if must_finish_recovery(found, at.found_bad):
            return await self._recover(at, versioned, view)
        # A mark that names bookies is about their entries, not about placement.
        may_move = self.moves_misplaced and not at.lease.queued.replicas
        plan = self._plan(at, found, moves_misplaced=may_move)
        if plan.is_whole:
            # Delete the mark, unless the bookies changed meanwhile. A split around entries that
            # have copies again is undone.
            before = versioned.metadata
            if not await self._are_confirmed(before.bookies, view):
                return None
            return await self._unmark(at, found, joined(before) if before.is_closed else before)
        if refused := self._write_refusal(versioned, plan):
            return waiting(refused)
        return await self._commit(at, await self._copy(at, plan, found))

    def _cause(
        self, at: Attempt, versioned: VersionedMetadata, view: ClusterView
    ) -> CausedBy | None:
        """Return why the ledger needs a repair; None if its marks name no bookie."""
        named = at.lease.queued.replicas
        found = cause_at(
            named,
            registered=view.available,
            reformatted=view.initialised_after(versioned.stat.czxid),
            draining=view.orders.draining.keys(),
            found_bad=at.found_bad,
        )
        if found is not None or not named:
            return found
        # Only drains and findings name bookies in the private tree.
        cause = Cause.RETURNED if at.lease.queued.is_loss else Cause.CANCELLED
        return CausedBy(cause, tuple(sorted(named)))

    def _plan(self, at: Attempt, inspection: Inspection, *, moves_misplaced: bool = False) -> Plan:
        view, metadata = inspection.view, inspection.metadata
        targets = self.copier.target_selector.targets(
            view,
            metadata,
            refused=at.failed | self.copier.refusals.of(inspection.ledger_id, view),
            refilled=at.refilled,
            # Copies on targets whose registration is unchanged since.
            copied={
                key: target
                for key, (target, czxid) in at.copied.items()
                if view.czxid(target) == czxid
            },
        )
        return plan_repair(inspection, targets, moves_misplaced=moves_misplaced)

    def _write_refusal(self, versioned: VersionedMetadata, plan: Plan) -> Blocked | None:
        """Return why the metadata could not be written, so that no copy is made in vain."""
        are_all_in_place = all(repair.is_in_place for repair in plan.repairs)
        if are_all_in_place or self.manager.has_room_for(versioned):
            return None
        size, most = len(versioned.data), self.manager.request_bytes_max
        facts = Facts(metadata_bytes=size, request_bytes_max=most)
        return Blocked(reason=Reason.WRITE_REFUSED, facts=facts)

    # --- Copy -------------------------------------------------------------------------------------

    async def _copy(
        self, at: Attempt, plan: Plan, inspection: Inspection, *, asked: ReadPlan = NOTHING_ASKED
    ) -> CopyResults:
        """Make the copies of a plan. ``asked``: reads that check other copies at the same time."""
        view, byte_count = inspection.view, sum(repair.byte_count for repair in plan.repairs)
        # The record is written while the copies are made, so that no repair waits for it.
        at.copies.add([repair.target for repair in plan.repairs if not repair.is_in_place])
        with _COPY_S.time():
            async with at.slots.lent_after(PATIENCE_S + byte_count / PATIENT_BYTES_PER_S):
                outcomes = await self.copier.copy_all(plan, inspection, asked=asked)
        suspects = frozenset[BookieId]()
        for repair, outcome in zip(plan.repairs, outcomes, strict=True):
            at.entry_count += outcome.entry_count
            at.entry_bytes += outcome.entry_bytes
            at.has_copied |= outcome.entry_count > 0
            suspects |= outcome.suspects - at.all_suspects  # the plan knew of these
            if isinstance(outcome.target_error, LocalLimitError):  # the target was not asked
                pass
            elif outcome.target_error is not None:
                at.failed.add(repair.target)
            elif outcome.is_complete and repair.is_in_place:
                at.refilled.add(repair.target)
            elif outcome.is_complete:
                key = repair.fragment, repair.index
                at.copied[key] = (repair.target, view.czxid(repair.target))
        at.suspects |= suspects

        def may_return(bookie: BookieId) -> bool:
            """Return True if a bookie has a cookie and is not absent for long."""
            absent_s = self.views.absences.absent_s(bookie, now_s=self.clock.now_s())
            return bookie in self.views.current.cookies and absent_s < SPLIT_AFTER_S

        return CopyResults(
            inspection=inspection,
            plan=plan,
            outcomes=outcomes,
            # A target that registered again may have lost what it acknowledged (rule S3).
            is_unchanged=lambda bookie: self._is_unchanged([bookie], view),
            has_bad_sources=bool(suspects),
            may_return=may_return,
        )

    async def _copy_optimistically(
        self, at: Attempt, versioned: VersionedMetadata, view: ClusterView
    ) -> CopyResults | None:
        """Copy the entries that a small ledger lost with its bookies, and check all its other
        copies at the same time.

        This sends one request per entry, where a check followed by a copy sends two. Returns None
        if the ledger is not eligible, or if a check failed; then the ledger must be inspected
        first.
        """
        expected = self.inspector.inspect_optimistically(versioned, view, suspects=at.all_suspects)
        if expected is None:
            return None
        inspection, asked = expected
        plan = self._plan(at, inspection)
        if plan.blocked or not plan.repairs or self._write_refusal(versioned, plan):
            return None
        results = await self._copy(at, plan, inspection, asked=asked)
        return results if results.outcomes[0].gave_all_asked else None

    # --- Commit -----------------------------------------------------------------------------------

    async def _commit(self, at: Attempt, results: CopyResults) -> Outcome | None:
        """Write the ensembles whose entries were all copied.

        The same transaction deletes the mark only if every copy was checked and nothing is missing
        (rule S6).
        """
        inspection, after = results.inspection, results.metadata
        is_ended = inspection.metadata.state is not LedgerState.IN_RECOVERY
        may_unmark = is_ended and results.entry_count <= SECOND_CHECK_ENTRIES
        with _COMMIT_S.time():
            if after != inspection.metadata:
                await at.copies.wait_recorded()
                # One round trip confirms the targets, too: they are among these bookies.
                if (
                    may_unmark
                    and results.is_complete
                    and await self._are_confirmed(after.bookies, inspection.view)
                ):
                    return await self._unmark(at, inspection, after)
                if not await self._write(at, results):
                    return None
            if results.is_split or not results.blocked:
                return None
            only_to_empty = results.only_to_empty
            if is_ended and only_to_empty and at.lease.queued.is_loss_besides(only_to_empty):
                if not may_unmark or not await self._are_confirmed(after.bookies, inspection.view):
                    return None
                if await self.queue.unmark_loss(at.lease, self._member_checks(at, inspection)):
                    return MARKED_AGAIN
        return waiting(gravest(results.blocked))

    async def _write(self, at: Attempt, results: CopyResults) -> bool:
        """Write the metadata that names the new targets, if their copies are safe (rules S3, S6).

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
        inspection = results.inspection
        await at.copies.wait_recorded()
        if not await self.views.are_as_in(inspection.view, results.new_targets):
            return False
        write = await self.manager.write_operation(
            inspection.ledger_id, results.metadata, read_as=inspection.versioned
        )
        replies = await self.queue.write(at.lease, [write])
        self._tell_written(at, inspection, results.metadata, write, replies)
        return True

    async def _unmark(
        self, at: Attempt, inspection: Inspection, metadata: LedgerMetadata
    ) -> Outcome:
        """Delete the marks. The same transaction writes the metadata, or checks it if it is
        unchanged."""
        checks, versioned = self._member_checks(at, inspection), inspection.versioned
        if metadata == inspection.metadata:
            extra = [self.manager.check(versioned), *checks]
            is_done = await self.queue.complete(at.lease, extra)
        else:
            write = await self.manager.write_operation(
                inspection.ledger_id, metadata, read_as=versioned
            )
            on_applied = partial(self._tell_written, at, inspection, metadata, write)
            is_done = await self.queue.complete(at.lease, [write, *checks], on_applied=on_applied)
        return DONE if is_done else MARKED_AGAIN

    async def _are_confirmed(self, bookies: Collection[BookieId], view: ClusterView) -> bool:
        """Check, right before the mark is deleted, that the copies on these bookies are still those
        that were judged. Returns False if another round is needed, like ``_write``, whose
        interleaving can also happen to a bookie that held a copy before. Raises UnavailableError.

        If an ACL hides a registration, nobody can tell whether it changed; the ledger must not stay
        marked for ever.
        """
        seen = [bookie for bookie in bookies if view.czxid(bookie)]
        return self._is_unchanged(bookies, view) and await self.views.are_as_in(view, seen)

    def _member_checks(self, at: Attempt, inspection: Inspection) -> list[Check]:
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
        in_mark = at.lease.queued.replicas & inspection.metadata.bookies
        return self.views.checks_of(inspection.view, in_mark)

    def _is_unchanged(self, bookies: Iterable[BookieId], view: ClusterView) -> bool:
        """Return True if none of the bookies registered, disappeared or began to drain since the
        view was read.

        The leader may have handled such a change already without writing the mark: the ledger was
        marked already, or did not name the target yet.
        """
        now = self.views.current
        if now is view:
            return True
        then, draining = view.orders.draining, now.orders.draining
        return all(
            now.czxid(bookie) == view.czxid(bookie) and (bookie in then or bookie not in draining)
            for bookie in bookies
        )

    def _tell_written(
        self,
        at: Attempt,
        inspection: Inspection,
        metadata: LedgerMetadata,
        write: SetData,
        replies: Sequence[OperationResult],
    ) -> None:
        stat = replies[0]
        assert isinstance(stat, Stat), replies
        # A fragment may have no entries.
        at.has_copied |= metadata.bookies != inspection.metadata.bookies
        self.on_written(
            VersionedMetadata(
                ledger_id=inspection.ledger_id, metadata=metadata, stat=stat, data=write.data
            )
        )

    # --- Open ledgers -----------------------------------------------------------------------------

    async def _handle_open_fragment(self, at: Attempt, found: RecoveryRequired) -> Outcome | None:
        """An open fragment lacks copies: repair the closed fragments, leave the open one to its
        writer, and recover the ledger after the grace.

        Closed fragments that cannot be repaired now are repaired after the ledger is closed.
        """
        if at.sighting is None:
            async with at.slots.lent_after(PATIENCE_S):
                closed = await self.inspector.inspect_closed_part(found, suspects=at.all_suspects)
            plan = Plan() if closed is None else self._plan(at, closed)
            if closed and plan.repairs and not self._write_refusal(found.versioned, plan):
                results = await self._copy(at, plan, closed)
                if results.metadata != closed.metadata:
                    await self._write(at, results)
                    return None
        if hold := held_back(self.views.current.orders):
            return waiting(hold)
        async with at.slots.lent_after(PATIENCE_S):
            grace = await self.open_ledgers.judge(found, at.sighting)
        if grace is not None:
            return waiting(grace.blocked, grace)
        return await self._recover(at, found.versioned, found.view)

    async def _recover(
        self, at: Attempt, versioned: VersionedMetadata, view: ClusterView
    ) -> Outcome | None:
        """Recover and close the ledger. The next round repairs it."""
        if hold := held_back(self.views.current.orders):
            return waiting(hold)

        async def record_targets(end: RecoveredEnd) -> None:
            at.copies.add(end.new_members)
            await at.copies.wait_recorded()

        try:
            with _RECOVER_S.time():
                async with at.slots.lent_after(PATIENCE_S):
                    await self.open_ledgers.recover(
                        versioned,
                        view,
                        suspects=at.found_bad,
                        guards=self.queue.guards(at.lease),
                        before_close=record_targets,
                    )
        except (ConflictError, JournalError, QuotaError, SessionLostError, LockLostError):
            raise
        except NoSuchLedgerError:
            return None
        except UnprovenEndError as error:
            return waiting(await self.open_ledgers.end_unproven(versioned, view, error))
        except NotEnoughBookiesError as error:
            return waiting(self.open_ledgers.no_target(versioned, error))
        except DamagedEndError as error:
            return waiting(_because_of(Reason.END_DAMAGED, error))
        except BookmenderError as error:
            return waiting(self.open_ledgers.recovery_failed(versioned, view, error))
        return None


def _because_of(reason: Reason, error: BookmenderError) -> Blocked:
    return Blocked(reason=reason, facts=Facts(errors=(str(error),)))
