"""The queue of marked ledgers: shared with Java, and our own beside it; one set of locks for both.

A worker *takes* a marked ledger (our lock is made in one multi at a version above 0, where Java's stands
at 0, and is only ever deleted at that version: ``locks``), is *done* with it
(its marks go, each at the version read before locking, rule S6), or *gives* it *back*. A ledger may be
marked in the shared tree, in our own (what Java would find whole: ledgers of draining bookies, repairs
made by hand, damage where Java's workers do not look), or in both; it is one ledger with one lock. Znodes and payloads: BookKeeper's
ZkLedgerUnderreplicationManager.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from ledgers.answers import until_answered
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.metadata import BookieId
from ledgers.store import (
    Check,
    Delete,
    Event,
    MetadataStore,
    MultiFailed,
    Operation,
    OperationResult,
    SetData,
)
from replication.cluster.membership import Half, LiveNode, ensure, live_nodes
from replication.cluster.own_state import OPEN_UP, own_path, read_found_bad
from replication.queue import payloads
from replication.queue.batching import Batcher, WithdrawnError
from replication.queue.disable_switch import DisableSwitch
from replication.queue.listing import locked_ledger_ids
from replication.queue.locks import LedgerLock
from replication.queue.mark_tree import MarkTree, SeenMark
from replication.queue.take import QueuedLedger, Take
from replication.queue.urgent import read_urgent

log = structlog.get_logger()
T = TypeVar("T")


OnApplied = Callable[[Sequence[OperationResult]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at the queue found: ids only; whose marks are worth reading is for the reader."""

    free: frozenset[int]
    """Ledgers that seem marked and are not locked; of a long queue a part."""
    losses: frozenset[int]
    """Those of them that seem marked in the shared tree."""
    urgent: tuple[int, ...]
    """The leader's note, without what is locked; may hold ledgers that are marked no more."""
    marked: frozenset[int] | None = None
    """All that seem marked, locked or not; None of a long queue, of which nobody lists all."""
    is_queue_empty: bool = False
    """No ledger at all is marked: the next one that is will be told (``Queue.first_marks``)."""


class Queue:
    """One node's access to the queue below ``ur`` (``<root>/underreplication``).

    ``batcher`` carries the transactions and proves our session; ``holder`` is what our locks say.
    """

    def __init__(
        self, store: MetadataStore, batcher: Batcher, ur: str, *, holder: str, clock: Clock
    ) -> None:
        self._store = store
        self._batcher = batcher
        self._clock = clock
        self._ur = ur
        self._lock_data = payloads.lock_to_bytes(holder)
        self._shared, self._own = MarkTree(store, ur), MarkTree(store, own_path(ur))
        self._known_nodes: dict[str, LiveNode | None] = {}
        self.switch = DisableSwitch(store, ur, clock)

    async def look(self, rng: random.Random) -> Look:
        """List a bounded part of both trees and, unless they are empty, the locks."""
        shared, own = await asyncio.gather(self._shared.look(rng), self._own.look(rng))
        if self._shared.is_empty and self._own.is_empty:
            nothing: frozenset[int] = frozenset()
            return Look(
                free=nothing, losses=nothing, urgent=(), marked=nothing, is_queue_empty=True
            )
        locked, urgent = await asyncio.gather(
            locked_ledger_ids(self._store, self._ur), read_urgent(self._store, self._ur)
        )
        marked = shared | own
        are_all = self._shared.is_listed_whole and self._own.is_listed_whole
        return Look(
            free=marked - locked,
            losses=shared - locked,
            urgent=tuple(i for i in urgent if i not in locked),
            marked=marked if are_all else None,
        )

    def may_hold(self, ledger_id: int) -> bool:
        """Whether the ledger may be marked, for all that the last look told."""
        return self._shared.may_hold(ledger_id) or self._own.may_hold(ledger_id)

    async def read(self, ledger_ids: Iterable[int]) -> list[QueuedLedger]:
        """Those of the ledgers that are marked, with their marks, in order."""
        found = await asyncio.gather(*map(self._read_one, ledger_ids))
        return [queued for queued in found if queued is not None]

    async def take(self, queued: QueuedLedger) -> Take | None:
        """Lock a ledger; None when somebody else was quicker, a mark has changed, or all is disabled.

        While nobody can tell whether the lock is ours it is asked for: it would stand as long as the session.
        """
        path = payloads.lock_path(self._ur, queued.ledger_id)
        lock = LedgerLock.of(path, session_id=self._store.session_id)
        operations: list[Operation] = [
            *(seen.check for seen in queued.marks),
            *lock.make(self._lock_data),
        ]
        try:
            await self._batcher.commit(operations, is_wanted=lambda: self.switch.may_take)
        except WithdrawnError:
            return None
        except MultiFailed as failure:
            is_of_lock = failure.index >= len(queued.marks)
            if is_of_lock and isinstance(failure.cause, NoNodeError):
                await self._restore_locks_directory()
                return None
            if isinstance(failure.cause, NodeExistsError | NoNodeError | ConflictError):
                return None
            raise failure.cause from failure
        except UnavailableError:  # it may have been done
            if not await self._answered(lambda: self._is_ours(lock)):
                return None
        return Take(queued=queued, lock=lock)

    async def _restore_locks_directory(self) -> None:
        """Without it no lock can be made. An operator may delete it with a lock that seems stuck."""
        path = payloads.locks_path(self._ur)
        log.warning("locks.directory_missing", path=path, next_step="it is created again")
        await ensure(self._store, path)

    async def found_bad(self, take: Take) -> frozenset[BookieId]:
        """Of the bookies that its marks name, those whose copies a check or fsck found bad: it looked closer than a
        worker does, who would find the ledger whole by its ends. All of them, where nobody can say."""
        try:
            found = await read_found_bad(self._store, self._ur, take.ledger_id)
        except UnauthorizedError as error:
            log.warning(
                "finding.shut_away",
                ledger_id=take.ledger_id,
                error=str(error),
                next_step=OPEN_UP,
            )
            return take.queued.replicas
        if found and not await self._are_as_read(take.queued.marks):
            return found  # who marked it anew may have found more
        return take.queued.replicas & found

    async def _are_as_read(self, marks: Sequence[SeenMark]) -> bool:
        """Whether they are the very same: one that was worked off and made anew has the same version."""
        stats = await asyncio.gather(*(self._store.exists(seen.path) for seen in marks))
        return all(
            stat is not None and stat.czxid == seen.czxid
            for seen, stat in zip(marks, stats, strict=True)
        )

    async def finish(
        self,
        take: Take,
        extra: Sequence[Operation] = (),
        *,
        on_applied: OnApplied = lambda results: None,
    ) -> bool:
        """Done: delete the marks at their versions, and our lock, with ``extra`` in the same multi.

        ``extra`` may hold the metadata write, and checks of what the ledger was found whole by. When the ledger was marked again meanwhile, only
        ``extra`` is applied (and the deletion of a mark that has not changed), and False returned: the
        new mark stays, and the lock is still ours. ``on_applied``: takes the results of ``extra``. Raises the
        cause of an operation of ``extra`` that failed, or LockLostError when the lock is not ours any more; nothing was applied then.
        """
        unmark = [
            delete
            for seen in take.queued.marks
            for delete in (seen.delete, Delete(path=seen.directory))
        ]
        unlock = take.lock.delete
        try:
            results = await self._batcher.commit([*extra, *unmark, unlock])
        except MultiFailed as failure:
            if failure.index < len(extra):
                raise failure.cause from failure
            if failure.index == len(extra) + len(unmark) and isinstance(
                failure.cause, NoNodeError | ConflictError
            ):
                raise LockLostError("our lock is gone", path=take.lock.path) from failure
            return await self._finish_in_steps(take, extra, on_applied)
        on_applied(results[: len(extra)])
        return True

    async def _finish_in_steps(
        self, take: Take, extra: Sequence[Operation], on_applied: OnApplied
    ) -> bool:
        """A mark has changed, or its directory holds something strange: what can be done still?"""
        if extra:
            on_applied(await self.write(take, extra))
        checks = [each for each in extra if isinstance(each, Check)]
        unmarked = [await self._unmark(take, seen, checks) for seen in take.queued.marks]
        if not all(unmarked):
            return False
        await self.give_back(take)
        return True

    async def _unmark(self, take: Take, seen: SeenMark, checks: Sequence[Check]) -> bool:
        """False when the mark has been extended, and so stays."""
        try:
            await self._batcher.commit([take.guard, *checks, seen.delete])
        except MultiFailed as failure:
            if failure.index == 0:
                raise LockLostError("our lock is gone", path=take.lock.path) from failure
            if failure.index <= len(checks):
                raise failure.cause from failure
            if isinstance(failure.cause, ConflictError):
                return False
            # An operator's hand, or a second deletion: it is gone, as it should.
            if not isinstance(failure.cause, NoNodeError):
                raise failure.cause from failure
        tree = self._own if self._own.owns(seen) else self._shared
        await tree.delete_if_empty(seen.directory)
        return True

    async def unmark_loss(self, take: Take, checks: Sequence[Check]) -> bool:
        """No copy is lost any more: only the mark in our own queue stays. False when another loss was marked meanwhile.

        ``checks``: must hold in the same multi; raises the cause of one that does not.
        """
        return await self._unmark(take, take.queued.marks[0], checks)

    async def renew_marks(self, take: Take) -> None:
        """Write them anew as they are: whoever read them before, and the ledger's note with them, takes it no more."""
        for seen in take.queued.marks:
            await self._answered(partial(self._renew, take, seen), UnknownOutcomeError)

    async def _renew(self, take: Take, seen: SeenMark) -> None:
        with suppress(NoNodeError, ConflictError):  # it is another already
            data, _ = await self._store.get(seen.path)
            await self.write(take, [SetData(path=seen.path, data=data, version=seen.version)])

    async def write(self, take: Take, operations: Sequence[Operation]) -> list[OperationResult]:
        """Apply ``operations`` under the lock, all or none; the results are theirs.

        Raises the cause of the one that failed, LockLostError when the lock is not ours any more.
        """
        try:
            results = await self._batcher.commit([take.guard, *operations])
        except MultiFailed as failure:
            if failure.index == 0:
                raise LockLostError("our lock is gone", path=take.lock.path) from failure
            raise failure.cause from failure
        return results[1:]

    def guards(self, take: Take) -> list[Check]:
        """What must hold for any write about the ledger, whoever makes it (rule S3)."""
        return [*(guard.check for guard in self._batcher.guards), take.guard]

    async def give_back(self, take: Take) -> None:
        """Delete our lock, if it still is ours. The marks stay.

        Another node of ours may have made it at the same version: the session tells them apart, and the
        batcher's guards prove it. Raises SessionLostError alone: it is tried until it is known
        to be gone, as nobody else could take the ledger; but for one that ACLs keep us from deleting.
        """
        try:
            await self._answered(lambda: self._unlock(take.lock))
        except RejectedError as error:
            log.error("lock.kept", ledger_id=take.ledger_id, error=str(error), next_step=OPEN_UP)

    async def _unlock(self, lock: LedgerLock) -> None:
        """Any number of times."""
        if not await self._is_ours(lock):
            return
        with suppress(NoNodeError, ConflictError):
            await self._batcher.apply(lock.delete)

    async def is_marked(self, ledger_id: int) -> bool:
        """In either tree."""
        return await self._shared.holds(ledger_id) or await self._own.holds(ledger_id)

    async def is_finished(self, take: Take) -> bool:
        """After a lost reply: whether our ``finish`` went through, as far as anybody can tell.

        Raises LockLostError when the ledger is marked and the lock is not ours any more.
        """
        if await self._is_ours(take.lock):
            return False
        stats = [await self._store.exists(seen.path) for seen in take.queued.marks]
        if any(stats):
            raise LockLostError("our lock is gone", path=take.lock.path)
        return True

    def first_marks(self) -> tuple[AsyncGenerator[Event, None], ...]:
        """Watches that tell of what may mean work: the first mark in an empty tree, a reconnection.

        Not of each mark: with many nodes that would be a herd. The rest is found by looking.
        """
        return self._shared.watch(), self._own.watch()

    @property
    def session_id(self) -> int:
        """Of this node's worker."""
        return self._store.session_id

    async def workers(self) -> frozenset[int]:
        """Session ids of the workers that share the queue now, this one's among them."""
        nodes = await live_nodes(self._store, self._ur, self._known_nodes)
        others = {node.session_id for node in nodes if node.info.half is Half.WORKER}
        return frozenset({self.session_id, *others})

    async def tidy(self) -> None:
        """Delete what the last look found left over in the trees."""
        await self._shared.tidy()
        await self._own.tidy()

    async def _read_one(self, ledger_id: int) -> QueuedLedger | None:
        trees = [tree for tree in (self._shared, self._own) if tree.may_hold(ledger_id)]
        if len(trees) == 1:  # nearly always, and worth a task saved
            found = [await trees[0].read(ledger_id)]
        else:
            found = await asyncio.gather(*(tree.read(ledger_id) for tree in trees))
        marks = tuple(seen for seen in found if seen is not None)
        if not marks:
            return None
        is_loss = any(map(self._shared.owns, marks))
        return QueuedLedger(ledger_id=ledger_id, marks=marks, is_loss=is_loss)

    async def _answered(
        self, call: Callable[[], Awaitable[T]], errors: type[BookmenderError] = UnavailableError
    ) -> T:
        return await until_answered(
            call, event="queue.unanswered", clock=self._clock, errors=errors
        )

    async def _is_ours(self, lock: LedgerLock) -> bool:
        """Whether the lock stands, made by this very session; after a lost reply, too.

        The connection may be to another server since, one that has not heard of it yet.
        """
        await self._store.sync(lock.path)
        stat = await self._store.exists(lock.path)
        return (
            stat is not None
            and stat.ephemeral_owner == self._store.session_id
            and stat.version == lock.version
        )
