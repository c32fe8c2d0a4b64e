"""Restoring a ledger's metadata to the bytes before a recorded write (rule S2).

``Restorer`` works under the ledger's lock. It writes by compare-and-set on the version that it
read, and records its own write, so that this can be undone in turn. Only metadata is restored, not
entries: copies that the old metadata names may have been deleted since. So its bookies are asked
first, and the same transaction marks the ledger in the private queue. Nodes then inspect and repair
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ledgers.clock import Clock
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    RejectedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata
from ledgers.store import Check, MetadataStore, MultiFailed, SetData, Stat
from replication.cluster import ClusterView
from replication.commit import CopyDoubt, copy_doubts
from replication.inspection import Inspector, RecoveryRequired
from replication.journal import JournalRecord
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.lock_by_hand import Tell, locked
from replication.locks import guarded_multi
from replication.marks import private_mark_operations
from replication.reasons import Blocked, Facts, Reason, named
from replication.recent_copies import record_by_hand
from replication.znodes import ClusterPaths

MARK_TRIES_MAX = 5
"""An attempt fails only if at that moment a worker deletes the mark's empty directories, or the
leader writes the mark."""
_CHANGED = NodeExistsError | NoNodeError | ConflictError


class RestoreRefusedError(RejectedError):
    """Putting the bytes back would undo more than the recorded write. The message, or ``doubts``,
    say what."""

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
        told = []
        if self.present != self.record.after:
            told.append(
                "the metadata was written again later, or the recorded write never happened: "
                "undoing it would undo later changes, too"
            )
            # Equal bytes would prove the cluster, because they contain a time and bookies.
            if self.record.cluster is None:
                told.append("the record does not name its cluster")
        return [*told, *self._end_doubts(), *self.copy_doubts]

    def _end_doubts(self) -> list[str]:
        was, now = self.was, self.now
        if now is None or not now.is_closed:
            return []
        if not was.is_closed:
            return [f"it would turn a closed ledger back to {was.state.name}"]
        if (was.last_entry_id, was.length) != (now.last_entry_id, now.length):
            return [
                f"it would move the ledger's end from entry {now.last_entry_id} to "
                f"{was.last_entry_id}"
            ]
        return []

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


class Restorer:
    """Restores metadata, or reports the doubts. One for each command."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        manager: LedgerManager,
        inspector: Inspector,
        view: ClusterView,
        paths: ClusterPaths,
        cluster: str | None,
        clock: Clock,
        tell: Tell,
    ) -> None:
        """``cluster``: the instance id of the cluster. ``tell``: prints what the command waits
        for."""
        self._store, self._manager, self._inspector = store, manager, inspector
        # A draining bookie may be named again if it has the copies, so drains are ignored.
        self._view = replace(view, orders=replace(view.orders, draining={}))
        self._paths, self._cluster, self._clock, self._tell = paths, cluster, clock, tell

    async def plan(self, record: JournalRecord) -> Restoring:
        """Inspect what a restore would do, without writing or fencing.

        Raises RestoreRefusedError for another cluster's record, NoSuchLedgerError, and
        CorruptionError when the record cannot be read as metadata.
        """
        if record.cluster not in (None, self._cluster):
            raise RestoreRefusedError(
                f"the write was made in another cluster, {record.cluster}: this one is "
                f"{self._cluster}",
                ledger_id=record.ledger_id,
            )
        try:
            was = parse_metadata(record.before)
        except CorruptionError as error:
            raise CorruptionError(
                f"the record cannot be read as metadata: {error}", ledger_id=record.ledger_id
            ) from error
        try:
            present, stat = await self._store.get(self._manager.path(record.ledger_id))
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
        ledger_id = record.ledger_id
        async with locked(
            ledger_id, self._store, self._paths, session, holder, clock=self._clock, tell=self._tell
        ) as lock:
            found = await self.plan(record)
            if found.is_done:
                return found
            if found.doubts and not is_forced:
                raise RestoreRefusedError(
                    "there are doubts", doubts=found.doubts, ledger_id=ledger_id
                )
            write = await self._manager.put_back_operation(
                ledger_id, record.before, present=found.present, version=found.stat.version
            )
            guards = [session, lock]
            # The old reason for deferring does not apply any more. Written before the mark,
            # because a worker reads the note after the mark.
            suspicion = self._suspicion(found, holder=holder)
            await WaitingNotes(self._store, self._paths).let_go(
                ledger_id, guards=guards, beside=suspicion
            )
            if found.named_again:
                # A bookie that is named again may just have deleted its copies as garbage (rule
                # S6).
                await record_by_hand(
                    self._store,
                    self._paths,
                    ledger_id=ledger_id,
                    targets=found.named_again,
                    session=session,
                    guards=guards,
                )
            await self._write_and_mark(ledger_id, guards, write)
            return found

    def _suspicion(self, found: Restoring, *, holder: str) -> WaitingNote | None:
        """Return the note that makes workers read the doubtful copies entry by entry, if there are
        any: the first and last entries may exist without those between them."""
        if not found.copy_doubts:
            return None
        return WaitingNote(
            ledger_id=found.record.ledger_id,
            blocked=Blocked(
                reason=Reason.LEFT_TO_OTHERS, facts=Facts(lacking=named(found.named_again))
            ),
            node=holder,
            since_ms=self._clock.wall_ms(),
            suspects=found.named_again,
        )

    async def _copy_doubts(self, found: Restoring) -> list[CopyDoubt | Blocked]:
        """Ask the bookies that would be named again for every entry."""
        versioned = VersionedMetadata(
            ledger_id=found.record.ledger_id,
            metadata=found.was,
            stat=found.stat,
            data=found.record.before,
        )
        asked = found.named_again
        inspected = await self._inspector.inspect_metadata(versioned, self._view, suspects=asked)
        if not isinstance(inspected, RecoveryRequired):
            return copy_doubts(inspected)
        closed_part = await self._inspector.inspect_closed_part(inspected, suspects=asked)
        return copy_doubts(inspected, closed_part)

    async def _write_and_mark(
        self, ledger_id: int, guards: Sequence[Check], write: SetData
    ) -> None:
        for _ in range(MARK_TRIES_MAX):
            mark = await private_mark_operations(self._store, self._paths, ledger_id, self._clock)
            try:
                await guarded_multi(self._store, guards, [write, *mark], ledger_id=ledger_id)
                return
            except MultiFailed as failure:
                is_of_mark = failure.index > 0
                if not is_of_mark or not isinstance(failure.cause, _CHANGED):
                    raise failure.cause from failure
        raise UnavailableError(
            "other clients keep changing the directories of its mark", ledger_id=ledger_id
        )
