"""Publishing under-replicated ledgers, in the order given, as Java's auditor would mark them.

A new mark is {directory, leaf} in one transaction, many of which share a multi. A ledger that is
marked already gets the replicas it does not name yet, and keeps the time of its first mark.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress

from auditor.endangered import Endangered
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.metadata import BookieId
from ledgers.store import Create, MetadataStore, MultiFailed, SetData
from replication.queue import payloads
from replication.queue.batching import Batcher
from replication.queue.payloads import Mark

MARKS_AT_ONCE = 200
TRIES_MAX = 10


class Marker:
    """Marks ledgers through ``batcher``, whose guards prove the leadership."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, clock: Clock) -> None:
        self._store = store
        self._batcher = batcher
        self._ur = ur
        self._clock = clock

    async def mark_all(self, ledgers: Sequence[Endangered]) -> int:
        """Mark in order, ``MARKS_AT_ONCE`` under way; returns how many marks were new or grew."""
        count = 0
        ready: set[str] = set()
        for start in range(0, len(ledgers), MARKS_AT_ONCE):
            part = ledgers[start : start + MARKS_AT_ONCE]
            await self._ensure_parents(part, ready)
            changed = await asyncio.gather(*(self.mark(x.ledger_id, x.lost) for x in part))
            count += sum(changed)
        return count

    async def mark(self, ledger_id: int, replicas: Collection[BookieId]) -> bool:
        """Whether the mark is new or names more replicas now."""
        for _ in range(TRIES_MAX):
            try:
                return await self._try_mark(ledger_id, replicas)
            except (ConflictError, NoNodeError, NodeExistsError, UnknownOutcomeError):
                continue  # a worker, or Java's auditor, changed it meanwhile: look again
        raise UnavailableError("the mark keeps changing under our hands", ledger_id=ledger_id)

    async def _try_mark(self, ledger_id: int, replicas: Collection[BookieId]) -> bool:
        path = payloads.mark_path(self._ur, ledger_id)
        directory = path.rpartition("/")[0]
        new = Mark(replicas=tuple(sorted(replicas)), ctime_ms=self._clock.wall_ms())
        try:
            await self._batcher.commit(
                [Create(path=directory), Create(path=path, data=payloads.mark_to_bytes(new))]
            )
        except MultiFailed as failure:
            if isinstance(failure.cause, NoNodeError):  # a worker tidied the upper directories away
                await self._ensure(directory.rpartition("/")[0])
                raise failure.cause from failure
            if not isinstance(failure.cause, NodeExistsError):
                raise failure.cause from failure
            return await self._extend(path, new)
        return True

    async def _extend(self, path: str, new: Mark) -> bool:
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:  # an empty directory, left behind: the leaf alone is missing
            await self._commit_one(Create(path=path, data=payloads.mark_to_bytes(new)))
            return True
        merged = _merged(data, new)
        if merged is None:
            return False
        await self._commit_one(
            SetData(path=path, data=payloads.mark_to_bytes(merged), version=stat.version)
        )
        return True

    async def _commit_one(self, operation: Create | SetData) -> None:
        try:
            await self._batcher.commit([operation])
        except MultiFailed as failure:
            raise failure.cause from failure

    async def _ensure_parents(self, ledgers: Sequence[Endangered], ready: set[str]) -> None:
        """The three upper directories, shared by up to 65,536 ledgers each."""
        for ledger in ledgers:
            parent = payloads.mark_path(self._ur, ledger.ledger_id).rsplit("/", 2)[0]
            if parent not in ready:
                await self._ensure(parent)
                ready.add(parent)

    async def _ensure(self, directory: str) -> None:
        """Create the directory and those above it, up to the marks' own, unless they are there."""
        above = directory.rpartition("/")[0]
        if above != payloads.marks_path(self._ur):
            await self._ensure(above)
        with suppress(NodeExistsError):
            await self._commit_one(Create(path=directory))


def _merged(data: bytes, new: Mark) -> Mark | None:
    """The mark with the replicas it lacks; None when it lacks none. Its first time stays."""
    try:
        old = payloads.parse_mark(data)
    except CorruptionError:  # nobody can read it: better a good mark than none
        return new
    added = tuple(bookie for bookie in new.replicas if bookie not in old.replicas)
    if not added:
        return None
    ctime_ms = new.ctime_ms if old.ctime_ms is None else old.ctime_ms
    return Mark(replicas=(*old.replicas, *added), ctime_ms=ctime_ms)
