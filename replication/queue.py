"""The under-replication queue as it is shared with Java: marks, locks, and the disable switch.

A worker *takes* a marked ledger (our lock is made by {create, set data} in one multi, so it stands at
version 1, where Java's stands at 0, and is only ever deleted at that version), is *done* with it
(the mark goes, at the version read before locking, rule S6), or *gives* it *back*.
Znodes and payloads: BookKeeper's ZkLedgerUnderreplicationManager.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from dataclasses import dataclass

from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    UnknownOutcomeError,
)
from ledgers.store import (
    Check,
    Create,
    Delete,
    Event,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
)
from replication import payloads
from replication.batching import Batcher, Results
from replication.payloads import Mark

OWN_LOCK_VERSION = 1
LEAF_DIRECTORIES_LISTED_MAX = 16
"""Directories (of up to 65,536 ids each) that one look at the queue lists at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedLedger:
    """A mark as it was read. ``version`` is that of its znode."""

    ledger_id: int
    mark: Mark
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A ledger whose lock we hold, and the mark as it was before we took it."""

    queued: QueuedLedger
    lock_path: str

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id

    @property
    def guard(self) -> Check:
        """Holds as long as the lock is the one we made (rule S3)."""
        return Check(path=self.lock_path, version=OWN_LOCK_VERSION)


class Queue:
    """One node's access to the queue below ``ur`` (``<root>/underreplication``).

    ``batcher`` carries the transactions and proves our session; ``holder`` is what our locks say.
    """

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, *, holder: str) -> None:
        self._store = store
        self._batcher = batcher
        self._ur = ur
        self._marks = payloads.marks_path(ur)
        self._locks = payloads.locks_path(ur)
        self._lock_data = payloads.lock_to_bytes(holder)
        self._leftovers: set[str] = set()
        """Directories that the last look found without child or mark."""

    async def look(
        self, *, limit: int, passed_over: Collection[int], rng: random.Random
    ) -> list[QueuedLedger]:
        """Up to ``limit`` marked ledgers that nobody has locked, most endangered first.

        The order holds within the window that was looked at, which begins at random places of the
        tree, so that many nodes do not all reach for the same ledgers.
        """
        self._leftovers.clear()
        locked = {payloads.ledger_id_of_lock(name) for name in await self._names(self._locks)}
        queued: list[QueuedLedger] = []
        for directory in await self._leaf_directories(rng):
            found = payloads.ledger_ids_below(
                directory[len(self._marks) + 1 :], await self._children(directory)
            )
            free = [i for i in found if i not in locked and i not in passed_over]
            rng.shuffle(free)
            # Many of them may be left over without a mark: those are not to hide the others.
            for start in range(0, len(free), limit):
                queued += await self._read_marks(free[start : start + limit])
                if len(queued) >= limit:
                    return sorted(queued[:limit], key=_urgency)
        return sorted(queued, key=_urgency)

    async def take(self, queued: QueuedLedger) -> Take | None:
        """Lock a ledger; None when somebody else was quicker, or its mark has changed."""
        lock_path = payloads.lock_path(self._ur, queued.ledger_id)
        try:
            await self._batcher.commit(
                [
                    Check(
                        path=payloads.mark_path(self._ur, queued.ledger_id), version=queued.version
                    ),
                    Create(path=lock_path, data=self._lock_data, is_ephemeral=True),
                    SetData(path=lock_path, data=self._lock_data, version=0),
                ]
            )
        except MultiFailed as failure:
            if isinstance(failure.cause, NodeExistsError | NoNodeError | ConflictError):
                return None
            raise failure.cause from failure
        except UnknownOutcomeError:
            if not await self._is_ours(lock_path):
                return None
        return Take(queued=queued, lock_path=lock_path)

    async def finish(self, take: Take, extra: Sequence[Operation] = ()) -> bool:
        """Done: delete the mark at its version, and our lock, with ``extra`` in the same multi.

        ``extra`` may hold the metadata write. When the ledger was marked again meanwhile, only
        ``extra`` is applied, and False returned: the new mark stays, and the lock is still ours.
        Raises the cause of an operation of ``extra`` that failed, or LockLostError when the lock
        is not ours any more; nothing was applied then.
        """
        mark_path = payloads.mark_path(self._ur, take.ledger_id)
        unmark = [
            Delete(path=mark_path, version=take.queued.version),
            Delete(path=mark_path.rpartition("/")[0]),
        ]
        unlock = Delete(path=take.lock_path, version=OWN_LOCK_VERSION)
        try:
            await self._batcher.commit([*extra, *unmark, unlock])
        except MultiFailed as failure:
            if failure.index < len(extra):
                raise failure.cause from failure
            if failure.index == len(extra) + len(unmark):
                raise LockLostError("our lock is gone", path=take.lock_path) from failure
            return await self._finish_in_steps(take, extra)
        return True

    async def _finish_in_steps(self, take: Take, extra: Sequence[Operation]) -> bool:
        """The mark has changed, or its directory holds something strange: what can be done still?"""
        if extra:
            await self.write(take, extra)
        mark_path = payloads.mark_path(self._ur, take.ledger_id)
        try:
            await self.write(take, [Delete(path=mark_path, version=take.queued.version)])
        except ConflictError:
            return False
        except NoNodeError:  # an operator's hand, or a second deletion: it is gone, as it should
            pass
        await self._delete_if_empty(mark_path.rpartition("/")[0])
        await self.give_back(take)
        return True

    async def write(self, take: Take, operations: Sequence[Operation]) -> Results:
        """Apply ``operations`` under the lock, all or none; the results are theirs.

        Raises the cause of the one that failed, LockLostError when the lock is not ours any more.
        """
        try:
            results = await self._batcher.commit([take.guard, *operations])
        except MultiFailed as failure:
            if failure.index == 0:
                raise LockLostError("our lock is gone", path=take.lock_path) from failure
            raise failure.cause from failure
        return results[1:]

    def guards(self, take: Take) -> list[Check]:
        """What must hold for any write about the ledger, whoever makes it (rule S3)."""
        return [*(guard.check for guard in self._batcher.guards), take.guard]

    async def give_back(self, take: Take) -> None:
        """Delete our lock, if it still is ours. The mark stays.

        Another node of ours would have made it at the same version: only the session tells them
        apart, and the batcher's guards prove it.
        """
        if not await self._is_ours(take.lock_path):
            return
        try:
            await self._batcher.commit([Delete(path=take.lock_path, version=OWN_LOCK_VERSION)])
        except MultiFailed as failure:
            if not isinstance(failure.cause, NoNodeError | ConflictError):
                raise failure.cause from failure

    async def is_disabled(self) -> bool:
        return await self._store.exists(payloads.disable_path(self._ur)) is not None

    async def is_marked(self, ledger_id: int) -> bool:
        return await self._store.exists(payloads.mark_path(self._ur, ledger_id)) is not None

    async def is_finished(self, take: Take) -> bool:
        """After a lost reply: whether our ``finish`` went through, as far as anybody can tell.

        Raises LockLostError when the ledger is marked and the lock is not ours any more.
        """
        if await self._is_ours(take.lock_path):
            return False
        if await self.is_marked(take.ledger_id):
            raise LockLostError("our lock is gone", path=take.lock_path)
        return True

    def changes(self) -> AsyncGenerator[Event, None]:
        """Events that may mean work: the first mark in an empty tree, a reconnection.

        Not each mark: with many nodes that would be a herd. The rest is found by looking.
        """
        return self._store.watch(self._marks)

    def switch_changes(self) -> AsyncGenerator[Event, None]:
        """Events of the disable switch; what it says now has to be read."""
        return self._store.watch(payloads.disable_path(self._ur))

    async def tidy(self) -> None:
        """Delete what the last look found left over in the mark tree, from the leaves up."""
        while self._leftovers:
            await self._delete_if_empty(self._leftovers.pop())

    async def _delete_if_empty(self, directory: str) -> None:
        while directory != self._marks:
            try:
                await self._store.delete(directory)
            except (NotEmptyError, NoNodeError):
                return
            directory = directory.rpartition("/")[0]

    async def _leaf_directories(self, rng: random.Random) -> list[str]:
        """Some directories of the third level, whose children stand for one ledger each."""
        directories = [self._marks]
        for _ in range(3):
            below = [f"{d}/{name}" for d in directories for name in await self._children(d)]
            rng.shuffle(below)
            directories = below[:LEAF_DIRECTORIES_LISTED_MAX]
        return directories

    async def _read_marks(self, ledger_ids: Iterable[int]) -> list[QueuedLedger]:
        marks = await asyncio.gather(*(self._read_mark(i) for i in ledger_ids))
        return [mark for mark in marks if mark is not None]

    async def _read_mark(self, ledger_id: int) -> QueuedLedger | None:
        path = payloads.mark_path(self._ur, ledger_id)
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:  # done by somebody else, or an empty directory left behind
            self._leftovers.add(path.rpartition("/")[0])
            return None
        try:
            mark = payloads.parse_mark(data)
        except CorruptionError:  # the ledger is checked from its metadata: this is but a hint
            mark = Mark()
        return QueuedLedger(ledger_id=ledger_id, mark=mark, version=stat.version)

    async def _is_ours(self, lock_path: str) -> bool:
        """Whether the lock stands, made by this very session; after a lost reply, too.

        The connection may be to another server since, one that has not heard of it yet.
        """
        await self._store.sync(lock_path)
        stat = await self._store.exists(lock_path)
        return (
            stat is not None
            and stat.ephemeral_owner == self._store.session_id
            and stat.version == OWN_LOCK_VERSION
        )

    async def _children(self, directory: str) -> list[str]:
        """Of a directory of the mark tree."""
        names = await self._names(directory)
        if not names:
            self._leftovers.add(directory)
        return names

    async def _names(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoNodeError:
            return []


def _urgency(queued: QueuedLedger) -> tuple[int, int]:
    """Most copies missing first, then the oldest loss. A mark without a time counts as old."""
    return -len(queued.mark.replicas), queued.mark.ctime_ms or 0
