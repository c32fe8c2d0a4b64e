"""The queue of marked ledgers: the tree shared with Java, bookmender's private tree, and one set of
locks for both.

A worker locks a marked ledger (``Queue.lease``) and reads its waiting note. It then deletes the
marks, each at the version read before locking (``Queue.complete``, rule S6), or only unlocks the
ledger (``Queue.unlock_with_note``, ``Queue.release``). The transaction that deletes the lock also
writes or deletes the note. So whoever locks the ledger next reads everything that was found.

The private tree holds marks of ledgers that Java would find fully replicated: ledgers of draining
bookies, repairs made by hand, and damage where Java's workers do not look. A ledger marked in both
trees has one lock. Znodes and payloads are those of BookKeeper's ZkLedgerUnderreplicationManager.

``GivenLedgers`` is the queue of a repair by hand: only the named ledgers. They are marked in the
private tree, so the nodes repair them as well, under the same locks, and finish them if the
operator stops the command.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from zlib import crc32

import msgspec
import structlog
from msgspec import Struct

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RejectedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import (
    Check,
    Create,
    Delete,
    Event,
    MetadataStore,
    MultiFailed,
    Operation,
    OperationResult,
    SetData,
)
from ledgers.tasks import until_answered
from replication import znodes
from replication.cluster import SeenAbsences
from replication.ledger_record import ClusterFingerprint, WaitingNote, WaitingNotes, read_found_bad
from replication.marks import MarkedLedger, MarkTree, locked_ledger_ids, read_urgent
from replication.nodes import LiveNode, Role, live_nodes
from replication.orders import DisableSwitch
from replication.transactions import Batcher, WithdrawnError
from replication.znodes import ACL_HINT, ClusterPaths, ensure_znode

log = structlog.get_logger()


# --- Locks and leases -----------------------------------------------------------------------------

VERSION_MAX = 4
"""Each version above 1 costs one more operation when a lock is created."""


class LedgerLock(Struct, frozen=True, kw_only=True):
    """A lock of one of our sessions. ``version``: the version of its znode, as soon as it exists.

    Java's locks have version 0, and ours version 1 or higher, so neither side deletes the other's.
    Our versions also differ by session and ledger, because of this interleaving:

    1. Node A locks a ledger. The lock disappears: an operator deletes ``locks``, or a bookie's
       garbage collector resumes after its session expired.
    2. Node B locks the ledger.
    3. Node A writes the metadata, guarded by a check of the lock. The check must fail on B's lock
       (rule S3).

    With ``VERSION_MAX`` versions, three of four such writes fail. The others fail if B has written
    the metadata, because every write names its version.
    """

    path: str
    version: int

    @classmethod
    def of(cls, path: str, *, session_id: int) -> "LedgerLock":
        """Return the lock that this session creates at this path, always the same."""
        return cls(path=path, version=1 + crc32(f"{session_id} {path}".encode()) % VERSION_MAX)

    def make(self, data: bytes) -> list[Operation]:
        """Return the operations that create the lock. ``data``: the holder, in Java's format."""
        return [
            Create(path=self.path, data=data, is_ephemeral=True),
            *(
                SetData(path=self.path, data=data, version=version)
                for version in range(self.version)
            ),
        ]

    @property
    def check(self) -> Check:
        """A check that fails when the lock is gone or has another version (rule S3)."""
        return Check(path=self.path, version=self.version)

    @property
    def delete(self) -> Delete:
        return Delete(path=self.path, version=self.version)


# dict: the properties are computed once.
class QueuedLedger(Struct, frozen=True, kw_only=True, dict=True):
    """A marked ledger, and its marks as they were read: at least one, the shared one first."""

    ledger_id: int
    marks: tuple[MarkedLedger, ...]
    is_loss: bool = True
    """True if it is marked in the shared tree: copies are lost. A ledger that is marked only in the
    private tree must be inspected or moved, or single entries lack a copy."""

    def __post_init__(self) -> None:
        assert self.marks, self

    @cached_property
    def replicas(self) -> frozenset[BookieId]:
        """Bookies that the marks name as missing. Without any: repair the placement."""
        return frozenset(replica for seen in self.marks for replica in seen.replicas)

    def is_loss_besides(self, bookies: frozenset[BookieId]) -> bool:
        """Return True if it is marked in both trees, and the shared mark names other bookies."""
        lost = self.marks[0].replicas
        return self.is_loss and len(self.marks) > 1 and bool(lost) and bookies.isdisjoint(lost)

    def missed_while_registered(self, czxid: Callable[[BookieId], int]) -> frozenset[BookieId]:
        """Return bookies that the shared mark names although they were registered when it was last
        written.

        Such a bookie was not lost. A check found that it lacks entries; Java's auditor does if
        ``auditorLedgerVerificationPercentage`` is set. ``czxid``: returns the czxid of a bookie's
        registration, 0 if unknown.
        """
        if not self.is_loss:
            return frozenset()  # in the private queue the finding names the bookies
        shared = self.marks[0]
        return frozenset(b for b in shared.replicas if czxid(b) < shared.mzxid)

    def perhaps_missed(self, absences: SeenAbsences) -> frozenset[BookieId]:
        """Return the bookies that the shared mark names, unless they are known to have been absent
        when it was created and last written.

        A mark does not say why it names a bookie. A check may have found that the bookie lacks
        entries, and the bookie may have restarted since. So its first and last entries prove
        nothing.
        """
        if not self.is_loss:
            return frozenset()
        mark = self.marks[0]
        return frozenset(
            bookie
            for bookie in mark.replicas
            if not absences.was_absent(bookie, from_zxid=mark.czxid, to_zxid=mark.mzxid)
        )

    @cached_property
    def since_ms(self) -> int:
        """Wall-clock time of the oldest loss; 0 for a mark without a time, which counts as old."""
        return min((seen.mark and seen.mark.ctime_ms) or 0 for seen in self.marks)

    @property
    def czxid(self) -> int:
        """The czxid of the shared mark, or else of the private one. Older waiting notes do not
        count: they explain what blocked a repair before copies were lost."""
        return self.marks[0].czxid


class LedgerLease(Struct, kw_only=True):
    """A ledger that this session has locked, with its marks as they were read before locking."""

    queued: QueuedLedger
    lock: LedgerLock
    note: WaitingNote | None = None
    """The waiting note in ZooKeeper, as it was read or written under the lock. No other worker
    writes it meanwhile; an operator may."""
    suspects: set[BookieId] = msgspec.field(default_factory=set)
    """Bookies whose copies this try or an earlier one, on any node, found bad. The repair adds to
    it, and the note keeps it for the next try."""
    fingerprint: ClusterFingerprint | None = None
    """The cluster when this try began."""

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id

    @property
    def new_suspects(self) -> set[BookieId]:
        """The suspects that the note does not name."""
        return self.suspects if self.note is None else self.suspects - self.note.suspects


# --- The queue ------------------------------------------------------------------------------------

OnApplied = Callable[[Sequence[OperationResult]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueListing:
    """The ledger ids of one listing of the queue. Marks are read later (``Queue.read``)."""

    free: frozenset[int]
    """Ledgers that are probably marked and not locked. Of a long queue only a part."""
    losses: frozenset[int]
    """The subset that is marked in the shared tree."""
    urgent: tuple[int, ...]
    """Unlocked ledgers from the leader's note of the most urgent ones. Some may no longer be
    marked."""
    marked: frozenset[int] | None = None
    """All ledgers that are probably marked, locked or not. None if the queue is too long to be
    listed."""


@dataclass(eq=False)
class Queue:
    """The access of one node to the queue of under-replicated ledgers.

    ``batcher`` sends the transactions and guards them by the session. ``holder`` is the text in the
    locks.
    """

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    _: KW_ONLY
    holder: str
    clock: Clock

    def __post_init__(self) -> None:
        self._shared = MarkTree(self.store, self.paths)
        self._private = MarkTree(self.store, self.paths.private)
        self._known_nodes: dict[str, LiveNode | None] = {}
        self._lock_data = znodes.lock_to_bytes(self.holder)
        self.notes = WaitingNotes(self.store, self.paths)
        self.switch = DisableSwitch(self.store, self.paths, self.clock)

    async def list_ledgers(self, rng: random.Random) -> QueueListing:
        """List a bounded part of both trees and, unless they are empty, the locks."""
        shared, private = await asyncio.gather(
            self._shared.list_ledgers(rng), self._private.list_ledgers(rng)
        )
        if self._shared.is_empty and self._private.is_empty:
            nothing: frozenset[int] = frozenset()
            return QueueListing(free=nothing, losses=nothing, urgent=(), marked=nothing)
        locked, urgent = await asyncio.gather(
            locked_ledger_ids(self.store, self.paths), read_urgent(self.store, self.paths)
        )
        marked = shared | private
        are_all = self._shared.is_listed_whole and self._private.is_listed_whole
        return QueueListing(
            free=marked - locked,
            losses=shared - locked,
            urgent=tuple(i for i in urgent if i not in locked),
            marked=marked if are_all else None,
        )

    def may_hold(self, ledger_id: int) -> bool:
        """Return False if the last listing shows that the ledger is not marked."""
        return self._shared.may_hold(ledger_id) or self._private.may_hold(ledger_id)

    async def read(self, ledger_ids: Iterable[int]) -> list[QueuedLedger]:
        """Return the marked ones of these ledgers with their marks, in order."""
        found = await asyncio.gather(*map(self._read_one, ledger_ids))
        return [queued for queued in found if queued is not None]

    async def lease(self, queued: QueuedLedger) -> LedgerLease | None:
        """Lock a ledger. Returns None if it is locked already, if a mark changed, or if
        auto-recovery is disabled.

        The multi checks the marks at the versions that were read, so any change makes it fail.
        After a lost reply, asks until it is known whether the lock was created. The lock would last
        as long as the session, and no other worker could repair the ledger.
        """
        path = self.paths.lock(queued.ledger_id)
        lock = LedgerLock.of(path, session_id=self.store.session_id)
        operations = [*(seen.check for seen in queued.marks), *lock.make(self._lock_data)]
        try:
            await self.batcher.commit(operations, is_wanted=lambda: self.switch.may_lease)
        except WithdrawnError:
            return None
        except MultiFailed as failure:
            is_of_lock = failure.index >= len(queued.marks)
            if is_of_lock and isinstance(failure.cause, NoNodeError):
                # An operator may have deleted the directory together with a stuck lock.
                path = self.paths.locks
                log.warning("locks.directory_missing", path=path, next_step="it is created again")
                await ensure_znode(self.store, path)
                return None
            if isinstance(failure.cause, NodeExistsError | NoNodeError | ConflictError):
                return None
            raise failure.cause from failure
        except UnavailableError:  # the lock may have been created
            if not await until_answered(
                partial(self._is_ours, lock), event="queue.request_failed", clock=self.clock
            ):
                return None
        return LedgerLease(queued=queued, lock=lock)

    async def found_bad(self, lease: LedgerLease) -> frozenset[BookieId]:
        """Return the bookies named by the marks whose copies a check or fsck found bad; all of them
        if the finding is unreadable.

        A worker checks only the first and the last entry of each copy, and would find such a ledger
        whole.
        """
        stored = await read_found_bad(self.store, self.paths, lease.ledger_id)
        if stored.is_unreadable:
            return lease.queued.replicas
        found = stored.value.bookies if stored.value else frozenset()
        marks = lease.queued.marks if found else ()
        for seen, stat in zip(
            marks, await asyncio.gather(*(self.store.exists(m.path) for m in marks)), strict=True
        ):
            # A deleted and recreated mark has the same version but another czxid. It may belong to
            # newer findings.
            if stat is None or stat.czxid != seen.czxid:
                return found
        return lease.queued.replicas & found

    async def complete(
        self,
        lease: LedgerLease,
        extra: Sequence[Operation] = (),
        *,
        on_applied: OnApplied = lambda results: None,
    ) -> bool:
        """Delete the marks at their versions, the lock and the note, with ``extra`` in the same
        multi.

        ``extra``: the metadata write, and checks of the facts by which the ledger was found whole.
        If a mark changed meanwhile, only ``extra`` and the deletion of unchanged marks are applied,
        and False is returned; the changed mark and the lock stay. ``on_applied``: receives the
        results of ``extra``.

        The version of the mark protects this interleaving (rule S6):

        1. Worker A reads the mark (version 0) and repairs what it names.
        2. The auditor adds a lost bookie to the mark (version 1).
        3. A deletes the mark at version 0. That fails, the mark stays, and the ledger is repaired
           again.

        A kill -9 before the multi leaves marks and lock; the lock ends with the session. A kill
        after it leaves nothing.

        If an operation of ``extra`` fails, raises its cause; if the lock is lost, LockLostError.
        Nothing is applied then.
        """
        if lease.note is not None and lease.note.version is None:  # the reply to its write was lost
            await self.read_note(lease)
        return await self._unmark(lease, lease.queued.marks, extra, on_applied, unlocks=True)

    async def unmark_loss(self, lease: LedgerLease, checks: Sequence[Check]) -> bool:
        """Delete the mark in the shared tree and keep the private one. Returns False if it was
        written meanwhile.

        ``checks``: part of the same multi. Raises the cause of a failed check.
        """
        return await self._unmark(lease, lease.queued.marks[:1], checks, unlocks=False)

    async def _unmark(
        self,
        lease: LedgerLease,
        marks: Sequence[MarkedLedger],
        extra: Sequence[Operation],
        on_applied: OnApplied = lambda results: None,
        *,
        unlocks: bool,
    ) -> bool:
        """Apply ``extra`` and delete the marks that are unchanged, in one multi. If all are
        unchanged and ``unlocks``, it deletes the lock and the note, too.

        Where a deletion fails, the multi is sent again without it. Returns False if a mark was
        written meanwhile, and so stays.
        """
        unmark = [each for seen in marks for each in (seen.delete, Delete(path=seen.directory))]
        unnote = self._without_note(lease) if unlocks else []
        is_unmarked, is_denied, left_behind = True, False, set[str]()
        while True:
            lock = lease.lock.delete if unlocks and is_unmarked else lease.lock.check
            try:
                results = await self.batcher.commit([lock, *extra, *unmark, *unnote])
                break
            except MultiFailed as failure:
                if unlocks and failure.index == 0 and isinstance(failure.cause, RejectedError):
                    unlocks, is_denied = False, True  # an ACL denies it: the session's end unlocks
                    continue
                _raise_if_ours(failure, lease, count=1 + len(extra))
                index, cause = failure.index - 1 - len(extra), failure.cause
            if index >= len(unmark):  # an operator wrote the note, or access is denied
                unnote = []
                if isinstance(cause, ConflictError):
                    await self.read_note(lease)
                    unnote = self._without_note(lease)
                continue
            if not isinstance(cause, ConflictError | NoNodeError | NotEmptyError):
                raise cause
            path = unmark[index].path
            seen = next(each for each in marks if path in (each.path, each.directory))
            gone = {path, seen.directory}  # a mark stays or goes together with its directory
            unmark = [each for each in unmark if each.path not in gone]
            if isinstance(cause, ConflictError):  # the mark was written
                is_unmarked, unnote = False, []
            else:
                # An operator or an earlier attempt has deleted the mark, or the directory holds an
                # unknown znode.
                left_behind.add(seen.directory)
        on_applied(results[1 : 1 + len(extra)])
        for directory in left_behind:
            tree = self._private if directory.startswith(self.paths.private.marks) else self._shared
            await tree.delete_if_empty(directory)
        if is_denied and is_unmarked:
            await self.release(lease)  # which logs it
        return is_unmarked

    def _without_note(self, lease: LedgerLease) -> list[Operation]:
        """Return the operation that deletes the note of a repaired ledger, except why its end is
        not proven. None is needed if there is no note."""
        if lease.note is None or lease.note.version is None:
            return []
        path, version = self.paths.waiting_note(lease.ledger_id), lease.note.version
        left = replace(lease.note, suspects=frozenset()).let_go()
        if left is None:
            return [Delete(path=path, version=version)]
        return [SetData(path=path, data=left.to_json(), version=version)]

    # --- Waiting notes ----------------------------------------------------------------------------

    async def read_note(self, lease: LedgerLease) -> None:
        """Read the note of the ledger into the lease. Raises UnavailableError."""
        lease.note = await self.notes.read(lease.ledger_id)

    async def write_note(self, lease: LedgerLease, note: WaitingNote) -> None:
        """Write the note, and keep the lock. Raises what ``write`` raises."""

        async def apply(operation: Operation) -> None:
            await self.write(lease, [operation])

        lease.note = await self.notes.write(note, before=lease.note, apply=apply)

    async def unlock_with_note(self, lease: LedgerLease, note: WaitingNote) -> None:
        """Write the note and delete the lock in one transaction. Raises what ``write`` raises;
        LockLostError also if an earlier attempt, whose reply was lost, succeeded.

        If the note names new suspects, the marks are written again unchanged. This raises their
        versions, so that a worker that read the marks before cannot lock the ledger (rule S6):

        1. Worker A finds that a copy lacks entries between its first and its last one.
        2. Worker B reads the mark, and that there is no note.
        3. A cannot repair the ledger now. It writes the suspect into the note and unlocks.
        4. B locks the ledger, checks only the first and the last entry of each copy, finds no
           fault, and deletes the mark.
        """

        async def apply(operation: Operation) -> None:
            renewed = []
            for seen in lease.queued.marks if lease.new_suspects else ():
                with suppress(NoNodeError):
                    data, stat = await self.store.get(seen.path)
                    if stat.version == seen.version:  # not for a mark that has changed
                        renewed.append(SetData(path=seen.path, data=data, version=stat.version))
            await self.write(lease, [operation, *renewed, lease.lock.delete])

        lease.note = await self.notes.write(note, before=lease.note, apply=apply)

    async def delete_note(self, ledger_id: int, *, version: int) -> None:
        """Delete the note of an unmarked ledger, unless it was written since, for a new mark."""
        with suppress(ConflictError, NoNodeError):
            await self.batcher.apply(
                Delete(path=self.paths.waiting_note(ledger_id), version=version)
            )

    # --- Writing and unlocking --------------------------------------------------------------------

    async def write(
        self, lease: LedgerLease, operations: Sequence[Operation]
    ) -> list[OperationResult]:
        """Apply all operations or none, guarded by the lock, and return their results. Raises the
        cause of a failed operation, LockLostError if the lock is lost."""
        try:
            results = await self.batcher.commit([lease.lock.check, *operations])
        except MultiFailed as failure:
            _raise_if_ours(failure, lease, count=1 + len(operations))
            raise
        return results[1:]

    def guards(self, lease: LedgerLease) -> list[Check]:
        """Return the checks for writes about the ledger: session and lock (rule S3)."""
        return [*(guard.check for guard in self.batcher.guards), lease.lock.check]

    async def release(self, lease: LedgerLease) -> None:
        """Delete the lock if it still belongs to this session. The marks stay.

        Another node may hold a lock with the same version, so the owner is compared as well, and
        the batcher's guards prove the session. Retries until the lock is gone, because no other
        node could lock the ledger. Raises only SessionLostError; if an ACL denies the deletion, the
        lock stays and this is logged.
        """

        async def unlock() -> None:
            if await self._is_ours(lease.lock):
                with suppress(NoNodeError, ConflictError):
                    await self.batcher.apply(lease.lock.delete)

        try:
            await until_answered(unlock, event="queue.request_failed", clock=self.clock)
        except RejectedError as error:
            log.error(
                "lock.release_denied",
                ledger_id=lease.ledger_id,
                error=str(error),
                next_step=ACL_HINT,
            )

    async def is_marked(self, ledger_id: int) -> bool:
        """Return True if the ledger is marked in one of the trees."""
        return await self._shared.holds(ledger_id) or await self._private.holds(ledger_id)

    async def is_completed(self, lease: LedgerLease) -> bool:
        """Return True if ``complete`` was applied although its reply was lost. Raises LockLostError
        if the ledger is marked and the lock is lost."""
        if await self._is_ours(lease.lock):
            return False
        stats = [await self.store.exists(seen.path) for seen in lease.queued.marks]
        if any(stats):
            raise LockLostError("our lock no longer exists", path=lease.lock.path)
        return True

    def watch_first_marks(self) -> tuple[AsyncGenerator[Event, None], ...]:
        """Return watches for the first mark in an empty tree, and for reconnections. A watch on
        every mark would wake all nodes at once. Further marks are found by polling."""
        return self.store.watch(self.paths.marks), self.store.watch(self.paths.private.marks)

    async def workers(self) -> frozenset[int]:
        """Return the session ids of all workers that share the queue, including this one."""
        nodes = await live_nodes(self.store, self.paths, self._known_nodes)
        others = {node.session_id for node in nodes if node.info.role is Role.WORKER}
        return frozenset({self.store.session_id, *others})

    async def tidy(self) -> None:
        """Delete the empty directories of the last listing."""
        await self._shared.tidy()
        await self._private.tidy()

    async def _read_one(self, ledger_id: int) -> QueuedLedger | None:
        trees = [tree for tree in (self._shared, self._private) if tree.may_hold(ledger_id)]
        if len(trees) == 1:  # nearly always; saves a task
            found = [await trees[0].read(ledger_id)]
        else:
            found = await asyncio.gather(*(tree.read(ledger_id) for tree in trees))
        marks = tuple(seen for seen in found if seen is not None)
        if not marks:
            return None
        is_loss = marks[0].path == self.paths.mark(ledger_id)
        return QueuedLedger(ledger_id=ledger_id, marks=marks, is_loss=is_loss)

    async def _is_ours(self, lock: LedgerLock) -> bool:
        """Return True if the lock exists and belongs to this session. Works also after a lost
        reply.

        Syncs first: the connection may have moved to a server that does not know the lock yet.
        """
        await self.store.sync(lock.path)
        stat = await self.store.exists(lock.path)
        return (
            stat is not None
            and stat.ephemeral_owner == self.store.session_id
            and stat.version == lock.version
        )


def _raise_if_ours(failure: MultiFailed, lease: LedgerLease, *, count: int) -> None:
    """Raise the cause if one of the first ``count`` operations failed, the first for the lock."""
    if failure.index == 0 and isinstance(failure.cause, NoNodeError | ConflictError):
        raise LockLostError("our lock no longer exists", path=lease.lock.path) from failure
    if failure.index < count:
        raise failure.cause from failure


@dataclass(eq=False, kw_only=True)
class GivenLedgers(Queue):
    """A queue of the given ledgers only. Its worker owns all of them."""

    ledger_ids: Collection[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.switch = DisableSwitch(self.store, self.paths, self.clock, is_ignored=True)
        self._left = set(self.ledger_ids)
        """Ledgers that are still marked, as far as is known. At first all of them are."""

    async def list_ledgers(self, rng: random.Random) -> QueueListing:
        """List the given ledgers that are not locked. A listing of a long queue would be
        incomplete."""
        free = frozenset(self._left - await locked_ledger_ids(self.store, self.paths))
        return QueueListing(free=free, losses=free, urgent=())

    async def read(self, ledger_ids: Iterable[int]) -> list[QueuedLedger]:
        wanted = list(ledger_ids)
        found = await super().read(wanted)
        self._left -= set(wanted).difference(queued.ledger_id for queued in found)
        return found

    async def workers(self) -> frozenset[int]:
        """Return only this session: a repair by hand leaves no ledger to other workers."""
        return frozenset({self.store.session_id})
