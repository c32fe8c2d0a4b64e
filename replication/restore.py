"""Putting a ledger's metadata back as it was before a recorded write (rule S2).

Under the ledger's lock, by compare-and-set on the version that the decision was made from, and
recorded itself, so that it can be undone in turn. What the metadata says is put back, not what
bookies store: copies that it named then may be gone since. So its bookies are asked first, and in
the same transaction the ledger is marked in our private queue: nodes check it in any case, and mend it.
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
from replication.commit import copy_doubts
from replication.inspection import Inspector, RecoveryRequired
from replication.journal import JournalRecord
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.lock_by_hand import Tell, locked
from replication.locks import guarded_multi
from replication.marks import private_mark_operations
from replication.reasons import Reason
from replication.recent_copies import record_by_hand
from replication.znodes import ClusterPaths

MARK_TRIES_MAX = 5
"""Each fails only when a worker tidies the mark's empty directories away at that very moment, or
the leader adds to it."""
_CHANGED = NodeExistsError | NoNodeError | ConflictError


class RestoreRefusedError(RejectedError):
    """Putting the bytes back would undo more than the recorded write. The message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """What is to be put back in place of what: bytes of the ledger's znode, and what they say.

    ``now`` is None where the present ones cannot be read as metadata. ``stat``: the znode's.
    ``copy_doubts``: what the bookies that would be named again say against it.
    """

    record: JournalRecord
    was: LedgerMetadata
    present: bytes
    now: LedgerMetadata | None
    stat: Stat
    copy_doubts: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """The metadata is as it was already."""
        return self.present == self.record.before

    @property
    def doubts(self) -> Sequence[str]:
        """Why this should not be done without a person's word for it."""
        told = []
        if self.present != self.record.after:
            told.append(
                "the metadata was written again since (or the recorded write was never made): "
                "later changes would be undone with it"
            )
            # The very bytes would have told: they hold a time and bookies.
            if self.record.cluster is None:
                told.append("the record does not say which cluster it is of")
        return [*told, *self._end_doubts(), *self.copy_doubts]

    def _end_doubts(self) -> list[str]:
        was, now = self.was, self.now
        if now is None or not now.is_closed:
            return []
        if not was.is_closed:
            return [f"it would turn a closed ledger back to {was.state.name}"]
        if (was.last_entry_id, was.length) != (now.last_entry_id, now.length):
            return [
                f"it would move the ledger's end from entry {now.last_entry_id} to {was.last_entry_id}"
            ]
        return []

    @property
    def named_again(self) -> frozenset[BookieId]:
        """Bookies of the segments that would change: nobody has kept their copies since."""
        kept = () if self.now is None else self.now.segments
        changed = [segment for segment in self.was.segments if segment not in kept]
        return frozenset(bookie for segment in changed for bookie in segment.ensemble)


def readable(data: bytes) -> LedgerMetadata | None:
    """None for bytes that are no metadata."""
    try:
        return parse_metadata(data)
    except CorruptionError:
        return None


class Restorer:
    """Puts back what was recorded, or says what speaks against it. One for a command."""

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
        """``cluster``: its instance id. ``tell``: says what is waited for."""
        self._store, self._manager, self._inspector = store, manager, inspector
        # A bookie that drains may be named again, if it has the copies: it is not to be passed
        # over.
        self._view = replace(view, orders=replace(view.orders, draining={}))
        self._paths, self._cluster, self._clock, self._tell = paths, cluster, clock, tell

    async def plan(self, record: JournalRecord) -> Restoring:
        """Nothing is written, or fenced.

        Raises RestoreRefusedError for another cluster's record, NoSuchLedgerError, and
        CorruptionError when the record cannot be read as metadata.
        """
        if record.cluster not in (None, self._cluster):
            raise RestoreRefusedError(
                f"the write was made in another cluster, {record.cluster}: this one is {self._cluster}",
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
        """Put back what was before the recorded write, and mark the ledger; what was done.

        ``session``: proves that it is still ours (rule S3). ``is_forced``: whatever the doubts.
        Raises RestoreRefusedError; UnavailableError when somebody else holds the ledger;
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
                raise RestoreRefusedError("; ".join(found.doubts), ledger_id=ledger_id)
            write = await self._manager.put_back_operation(
                ledger_id, record.before, present=found.present, version=found.stat.version
            )
            guards = [session, lock]
            # What was in the way of its repair is not so any more. Before the mark: who takes that
            # must know.
            suspicion = self._suspicion(found, holder=holder)
            await WaitingNotes(self._store, self._paths).let_go(
                ledger_id, guards=guards, beside=suspicion
            )
            if found.named_again:
                # A bookie that is named again may have collected the ledger a moment ago (rule S6).
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
        """Whom bookies spoke against is read whole: its ends may be there, and entries between them
        not."""
        if not found.copy_doubts:
            return None
        return WaitingNote(
            ledger_id=found.record.ledger_id,
            reason=Reason.LEFT_TO_OTHERS,
            detail=f"its metadata was put back by hand, though {'; '.join(found.copy_doubts)}",
            node=holder,
            since_ms=self._clock.wall_ms(),
            suspects=found.named_again,
        )

    async def _copy_doubts(self, found: Restoring) -> list[str]:
        """Whoever would be named again is asked for every entry."""
        versioned = VersionedMetadata(
            ledger_id=found.record.ledger_id,
            metadata=found.was,
            stat=found.stat,
            data=found.record.before,
        )
        asked = found.named_again
        surveyed = await self._inspector.inspect_metadata(versioned, self._view, suspects=asked)
        if not isinstance(surveyed, RecoveryRequired):
            return copy_doubts(surveyed)
        closed_part = await self._inspector.inspect_closed_part(surveyed, suspects=asked)
        return copy_doubts(surveyed, closed_part)

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
        raise UnavailableError("its mark's directories keep changing", ledger_id=ledger_id)
