"""What commands do with single ledgers: plan a repair, hold a ledger's lock, restore its metadata.

A dry run (``Previewer``) shows what a worker would do now. It uses the worker's own inspection and
plan; it takes no lock, writes and fences nothing. Which copies succeed is known only after trying.

``locked`` holds a ledger's lock during a command, for marked and unmarked ledgers.

``Restorer`` restores the bytes before a recorded write (rule S2). It works under the ledger's lock.
It writes by compare-and-set on the version that it read, and records its own write, so that this
can be undone in turn. Only metadata is restored, not entries: copies that the old metadata names
may have been deleted since. So its bookies are asked first, and the same transaction marks the
ledger in the private queue. Nodes then inspect and repair it.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from msgspec import Struct, structs

from ledgers.clock import Clock
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    RejectedError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.store import Check, MetadataStore, MultiFailed, Operation, Stat
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding, Verdict
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.journal import JournalRecord
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.marks import prepare_tree, private_mark_operations, read_locks
from replication.open_ledgers import end_doubts, held_back, must_finish_recovery
from replication.plan import Plan, Repair, plan_repair
from replication.reasons import Blocked, Facts, Reason, named
from replication.recent_copies import record_by_hand
from replication.targets import TargetSelector
from replication.transactions import guarded_multi
from replication.work_queue import LedgerLock
from replication.znodes import ClusterPaths, lock_to_bytes

# --- Dry runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The copies that a repair of one ledger would try to make, and what blocks the rest.
    ``is_gone``: the ledger does not exist."""

    ledger_id: int
    plan: Plan
    is_gone: bool = False

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return self.plan.repairs

    @property
    def entry_count(self) -> int:
        return sum(len(repair.entry_ids) for repair in self.repairs)

    @property
    def byte_count(self) -> int:
        """An estimate from the length in the metadata."""
        return sum(repair.byte_count for repair in self.repairs)


@dataclass(frozen=True, slots=True)
class Previewer:
    """Makes the dry runs of a command.

    ``view``: the cluster as it is, or as it would be under other orders. ``moves_misplaced``: move
    misplaced copies, as a worker does with ledgers that are marked for their placement.
    """

    inspector: Inspector
    target_selector: TargetSelector
    view: ClusterView
    moves_misplaced: bool = False

    async def preview(self, ledger_id: int, *, suspects: Collection[BookieId] = ()) -> Preview:
        """Return the dry run of one ledger.

        ``suspects``: bookies that are asked for every entry, because a check or fsck found bad
        copies there. Raises UnavailableError if ZooKeeper does not answer.
        """
        inspector, view = self.inspector, self.view
        match await inspector.inspect(ledger_id, view, suspects=suspects):
            case None:
                return Preview(ledger_id=ledger_id, plan=Plan(), is_gone=True)
            case Blocked() as blocked:
                plan = Plan(blocked=(blocked,))
            case RecoveryRequired() as found:  # closed fragments are repaired, the rest waits
                closed_part = await inspector.inspect_closed_part(found, suspects=suspects)
                plan = Plan() if closed_part is None else self._plan(closed_part)
                waits = held_back(view.orders) or _until_closed(found)
                plan = structs.replace(plan, blocked=(*plan.blocked, waits))
            case Inspection() as inspection if must_finish_recovery(inspection, suspects):
                doubts = end_doubts(inspection.versioned, view) or Facts()
                waits = held_back(view.orders) or Blocked(
                    reason=Reason.OPEN_FRAGMENT, facts=structs.replace(doubts, is_in_recovery=True)
                )
                plan = Plan(blocked=(waits,))
            case Inspection() as inspection:
                plan = self._plan(inspection, moves_misplaced=self.moves_misplaced)
        return Preview(ledger_id=ledger_id, plan=plan)

    def _plan(self, inspection: Inspection, *, moves_misplaced: bool = False) -> Plan:
        """Return the plan; each reason that blocks a part of it is listed once."""
        targets = self.target_selector.targets(self.view, inspection.metadata)
        plan = plan_repair(inspection, targets, moves_misplaced=moves_misplaced)
        return structs.replace(plan, blocked=tuple(dict.fromkeys(plan.blocked)))


def _until_closed(found: RecoveryRequired) -> Blocked:
    """Return that the ledger waits for the open-ledger grace, and why its recovery may fail."""
    view = found.view
    doubts = end_doubts(found.versioned, view) or Facts()
    return Blocked(
        reason=Reason.OPEN_LEDGER_GRACE,
        facts=structs.replace(
            doubts,
            absent=named(
                {*doubts.absent, *found.leaving} - view.available - set(doubts.decommissioned)
            ),
            draining=named([b for b in found.leaving if b in view.available]),
            lacking=named(found.lacking),
            entry_ids=() if found.first_lacking is None else (found.first_lacking,),
            is_in_recovery=found.versioned.metadata.state is LedgerState.IN_RECOVERY,
        ),
    )


# --- The lock of a ledger -------------------------------------------------------------------------

WAIT_MAX_S, PAUSE_S = 10.0, 0.25
"""Maximum wait for a worker that repairs the ledger, and the pause between two attempts. A worker
waits five seconds for bookies that do not answer."""
GRACE_WAIT_MAX_S = 60.0
"""Maximum total wait for open-ledger graces: twice the default grace."""
TELL_INTERVAL_S = 10.0

Tell = Callable[[str], None]
"""Prints what the command waits for."""


class LockedError(UnavailableError):
    """Another holder keeps the ledger's lock. The message names the holder and what to do."""


@asynccontextmanager
async def locked(
    ledger_id: int,
    store: MetadataStore,
    paths: ClusterPaths,
    session: Check,
    holder: str,
    *,
    clock: Clock,
    tell: Tell,
) -> AsyncIterator[Check]:
    """Hold the ledger's lock, as a worker does. Yields the check that the lock still exists.

    ``session``: the check that this session still exists (rule S3). Waits for another holder up to
    ``WAIT_MAX_S``. If the holder waits for an open-ledger grace, waits for its end, and says so
    through ``tell``. Raises LockedError if the lock stays taken or the grace is too long, and
    SettingsError if the layout of the queue is unknown.
    """
    await prepare_tree(store, paths)  # it is possible that no node, ours or Java's, ever ran
    lock = LedgerLock.of(paths.lock(ledger_id), session_id=store.session_id)
    told_due_s = clock.now_s()
    until_s, graces_until_s = told_due_s + WAIT_MAX_S, told_due_s + GRACE_WAIT_MAX_S
    make: list[Operation] = [session, *lock.make(lock_to_bytes(holder))]
    while not await _try_multi(store, make, NodeExistsError):
        held = next(iter(await read_locks(store, paths, [ledger_id])), None)
        other = (held and held.holder) or "another client"
        note = None
        with suppress(UnauthorizedError):
            note = await WaitingNotes(store, paths).read(ledger_id)
        if note is not None and held is not None and note.is_older_than(held.czxid):
            note = None  # of another holder, or of an earlier attempt
        now_s = clock.now_s()
        grace_s = 0.0 if note is None else (note.grace_until_ms - clock.wall_ms()) / 1000
        if note is not None and grace_s > 0:
            if now_s + grace_s > graces_until_s:
                raise LockedError(
                    f"{other} holds its lock for another {grace_s:.0f} s ({note.reason.value}): "
                    "try again then",
                    ledger_id=ledger_id,
                )
            # After the grace, the holder works on the ledger itself, and the usual wait applies.
            until_s = now_s + grace_s + WAIT_MAX_S
            if now_s >= told_due_s:
                told_due_s = now_s + TELL_INTERVAL_S
                locks = f"for {other}, which locks ledger {ledger_id}: {note.reason.value}"
                tell(f"waiting up to {grace_s:.0f} s {locks}")
        elif now_s >= until_s:
            raise LockedError(
                f"{other} is at work on it, or waits for the open-ledger grace: "
                "try again in a moment",
                ledger_id=ledger_id,
            )
        await clock.sleep(PAUSE_S)
    try:
        yield lock.check
    finally:
        # The lock is ephemeral, so it ends with the session at the latest. An error here must not
        # replace the error of the body.
        with suppress(UnavailableError, SessionLostError):
            # NoNodeError, ConflictError: the lock ended with our session.
            await _try_multi(store, [session, lock.delete], NoNodeError, ConflictError)


async def _try_multi(
    store: MetadataStore, operations: Sequence[Operation], *tolerated: type[BookmenderError]
) -> bool:
    """Return False if the transaction failed with a tolerated error."""
    try:
        await store.multi(operations)
    except MultiFailed as failure:
        if not isinstance(failure.cause, tolerated):
            raise failure.cause from failure
        return False
    return True


# --- Restored metadata ----------------------------------------------------------------------------

MARK_TRIES_MAX = 5
"""An attempt fails only if at that moment a worker deletes the mark's empty directories, or the
leader writes the mark."""


class CopyDoubt(Struct, frozen=True, kw_only=True):
    """A bookie that restored metadata would name although its copies may be incomplete.

    ``bad_count``: how many of its ``entry_count`` entries it lacks or has damaged, if it is
    MISSING. The counts and ids are None in an open last fragment.
    """

    bookie: BookieId
    verdict: Verdict
    entry_count: int | None = None
    bad_count: int | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None


class RestoreRefusedError(RejectedError):
    """The restore would undo more than the recorded write. ``doubts``: what, if not the message."""

    def __init__(
        self, message: str, *, doubts: Sequence[str | CopyDoubt | Blocked] = (), **context: object
    ) -> None:
        super().__init__(message, **context)
        self.doubts = doubts


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """The bytes to restore, the present bytes of the ledger's znode, and their meaning.

    ``now``: None if the present bytes are not readable metadata. ``copy_doubts``: missing or
    damaged copies on bookies that the restored metadata would name again.
    """

    record: JournalRecord
    was: LedgerMetadata
    present: bytes
    now: LedgerMetadata | None
    stat: Stat
    copy_doubts: tuple[CopyDoubt | Blocked, ...] = ()

    @property
    def is_done(self) -> bool:
        """True if the present bytes equal those to restore."""
        return self.present == self.record.before

    @property
    def doubts(self) -> Sequence[str | CopyDoubt | Blocked]:
        """Reasons why the restore needs an operator's confirmation."""
        was, now = self.was, self.now
        told: list[str] = []
        if self.present != self.record.after:
            told.append(
                "the metadata was written again later, or the recorded write never happened: "
                "undoing it would undo later changes, too"
            )
            # Equal bytes would prove the cluster, because they contain a time and bookies.
            if self.record.cluster is None:
                told.append("the record does not name its cluster")
        if now is not None and now.is_closed:
            if not was.is_closed:
                told.append(f"it would turn a closed ledger back to {was.state.name}")
            elif (was.last_entry_id, was.length) != (now.last_entry_id, now.length):
                told.append(
                    f"it would move the ledger's end from entry {now.last_entry_id} to "
                    f"{was.last_entry_id}"
                )
        return [*told, *self.copy_doubts]

    @property
    def named_again(self) -> frozenset[BookieId]:
        """Bookies of the segments that would change. Nothing has protected their copies since."""
        kept = () if self.now is None else self.now.segments
        changed = [segment for segment in self.was.segments if segment not in kept]
        return frozenset(bookie for segment in changed for bookie in segment.ensemble)


def readable(data: bytes) -> LedgerMetadata | None:
    """Parse metadata. Returns None if the bytes are not metadata."""
    try:
        return parse_metadata(data)
    except CorruptionError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Restores metadata, or reports the doubts. One for each command. ``cluster``: the instance id
    of the cluster. ``tell``: prints what the command waits for."""

    store: MetadataStore
    manager: LedgerManager
    inspector: Inspector
    view: ClusterView
    paths: ClusterPaths
    cluster: str | None
    clock: Clock
    tell: Tell

    async def plan(self, record: JournalRecord) -> Restoring:
        """Inspect what a restore would do, without writing or fencing.

        Raises RestoreRefusedError for another cluster's record, NoSuchLedgerError, and
        CorruptionError when the record cannot be read as metadata.
        """
        if record.cluster not in (None, self.cluster):
            raise RestoreRefusedError(
                f"the write was made in another cluster, {record.cluster}: this one is "
                f"{self.cluster}",
                ledger_id=record.ledger_id,
            )
        try:
            was = parse_metadata(record.before)
        except CorruptionError as error:
            raise CorruptionError(
                f"the record cannot be read as metadata: {error}", ledger_id=record.ledger_id
            ) from error
        try:
            present, stat = await self.store.get(self.manager.path(record.ledger_id))
        except NoNodeError as error:
            raise NoSuchLedgerError("no such ledger", ledger_id=record.ledger_id) from error
        found = Restoring(record=record, was=was, present=present, now=readable(present), stat=stat)
        if found.is_done:
            return found
        return replace(found, copy_doubts=tuple(await self._copy_doubts(found)))

    async def restore(
        self, record: JournalRecord, *, session: Check, holder: str, is_forced: bool = False
    ) -> Restoring:
        """Restore the bytes before the recorded write, and mark the ledger. Returns what was done.

        The steps under the ledger's lock, and what a kill -9 after each of them leaves:

        1. Inspect the copies and decide. Nothing is written yet.
        2. Write the waiting note with the suspects, or delete the note. A note without a mark has
           no effect; with a mark it makes a worker read the suspects completely.
        3. Record the copies to be read again. Without the metadata write, reading them is harmless.
        4. Write metadata and mark in one multi. The lock ends with the session.

        ``session``: the check that this session still exists (rule S3). ``is_forced``: ignore the
        doubts. Raises RestoreRefusedError; UnavailableError if another holder keeps the lock;
        ConflictError, LockLostError and UnknownOutcomeError as ``LedgerManager.write``.
        """
        ledger_id, store, paths = record.ledger_id, self.store, self.paths
        async with locked(
            ledger_id, store, paths, session, holder, clock=self.clock, tell=self.tell
        ) as lock:
            found = await self.plan(record)
            if found.is_done:
                return found
            if (doubts := found.doubts) and not is_forced:
                raise RestoreRefusedError("there are doubts", doubts=doubts, ledger_id=ledger_id)
            write = await self.manager.put_back_operation(
                ledger_id, record.before, present=found.present, version=found.stat.version
            )
            guards, again, suspicion = [session, lock], found.named_again, None
            if found.copy_doubts:
                # Workers then read the copies entry by entry: the first and last entries may exist
                # without those between them.
                facts = Facts(lacking=named(again))
                suspicion = WaitingNote(
                    ledger_id=ledger_id,
                    blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=facts),
                    node=holder,
                    since_ms=self.clock.wall_ms(),
                    suspects=again,
                )
            # The old reason for deferring does not apply any more. Written before the mark,
            # because a worker reads the note after the mark.
            await WaitingNotes(store, paths).let_go(ledger_id, guards=guards, beside=suspicion)
            if again:
                # Such a bookie may just have deleted its copies as garbage (rule S6).
                await record_by_hand(
                    store, paths, ledger_id=ledger_id, targets=again, session=session, guards=guards
                )
            for _ in range(MARK_TRIES_MAX):
                mark = await private_mark_operations(store, paths, ledger_id, self.clock)
                try:
                    await guarded_multi(store, guards, [write, *mark], ledger_id=ledger_id)
                    return found
                except MultiFailed as failure:
                    has_changed = isinstance(
                        failure.cause, NodeExistsError | NoNodeError | ConflictError
                    )
                    if not has_changed or failure.index == 0:  # 0: the metadata, not the mark
                        raise failure.cause from failure
            raise UnavailableError(
                "other clients keep changing the directories of its mark", ledger_id=ledger_id
            )

    async def _copy_doubts(self, found: Restoring) -> list[CopyDoubt | Blocked]:
        """Ask the bookies that would be named again for every entry, and return the doubts."""
        versioned = VersionedMetadata(
            ledger_id=found.record.ledger_id,
            metadata=found.was,
            stat=found.stat,
            data=found.record.before,
        )
        # A draining bookie may be named again if it has the copies, so drains are ignored.
        view = replace(self.view, orders=replace(self.view.orders, draining={}))
        asked = found.named_again
        match await self.inspector.inspect_metadata(versioned, view, suspects=asked):
            case Blocked() as blocked:
                return [blocked]
            case Inspection() as inspection:
                return [*_doubts(inspection.findings)]
            case RecoveryRequired() as open_part:
                closed = await self.inspector.inspect_closed_part(open_part, suspects=asked)
                return [
                    *(
                        CopyDoubt(bookie=b, verdict=Verdict.BOOKIE_ABSENT)
                        for b in open_part.leaving
                    ),
                    *(CopyDoubt(bookie=b, verdict=Verdict.MISSING) for b in open_part.lacking),
                    *(_doubts(closed.findings) if closed else ()),
                ]


_DOUBTFUL = (Verdict.BOOKIE_ABSENT, Verdict.IN_MAINTENANCE, Verdict.MISSING, Verdict.UNKNOWN)
"""Draining bookies are asked like all others; see ``Restorer._copy_doubts``."""


def _doubts(findings: Sequence[CopyFinding]) -> list[CopyDoubt]:
    """Return one doubt for each bookie and verdict."""
    doubted = defaultdict[tuple[BookieId, Verdict], list[CopyFinding]](list)
    for finding in findings:
        if finding.verdict in _DOUBTFUL and finding.entries:
            doubted[finding.bookie, finding.verdict].append(finding)
    return [
        CopyDoubt(
            bookie=bookie,
            verdict=verdict,
            entry_count=sum(len(each.entries) for each in found),
            bad_count=sum(each.bad_count for each in found),
            first_entry_id=min(each.entries[0] for each in found),
            last_entry_id=max(each.entries[-1] for each in found),
        )
        for (bookie, verdict), found in doubted.items()
    ]
