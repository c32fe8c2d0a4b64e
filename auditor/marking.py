"""Publishing under-replicated ledgers, in the order given, as Java's auditor would mark them.

A new mark is {directory, leaf}; those of many ledgers share a multi (rule S14), a few of which are
under way. A ledger that is marked already gets the replicas it does not name yet, and keeps the
time of its first mark.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

import structlog

from auditor.endangered import Endangered
from auditor.java_sight import Sight
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.metadata import BookieId
from ledgers.operations.tasks import task_scope
from ledgers.store import (
    Create,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    request_bytes,
)
from replication.cluster.membership import ensure
from replication.cluster.own_state import own_path
from replication.queue import payloads
from replication.queue.batching import BATCH_BYTES_MAX, BATCH_TRANSACTIONS_MAX, Batcher
from replication.queue.payloads import Mark

log = structlog.get_logger()

MARKS_PER_MULTI = BATCH_TRANSACTIONS_MAX
MULTIS_AT_ONCE = 4
"""Of one stream of marks: enough to keep ZooKeeper busy, whose latency the store's window heeds."""
TRIES_MAX = 10


class MarkSource(Protocol):
    """Ledgers to be marked, one after the other."""

    async def take(self, count_max: int) -> Sequence[Endangered]:
        """The next ones, at least one; none when there are no more."""
        ...

    def is_renewed(self, ledger: Endangered) -> bool:
        """As in ``Marker.mark``."""
        ...

    def done(self, ledgers: Sequence[Endangered], *, new: Sequence[Endangered]) -> None:
        """Of a ``take``: their marks stand now. ``new``: those whose marks are, or grew."""
        ...


class Marker:
    """Marks ledgers through ``batcher``, whose guards prove the leadership."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, clock: Clock) -> None:
        self._store = store
        self._batcher = batcher
        self._ur = ur
        self._clock = clock
        self._ensuring = asyncio.Lock()
        """Directories are made by one at a time: what another one's multi made, and NodeExists told
        us of, is not there before that multi was sent again without us."""
        self._ensured_count = 0
        """How often that was done."""

    async def mark_all(self, ledgers: Sequence[Endangered]) -> int:
        """Mark in order, but for the few multis that are under way together; returns how many marks
        were new or grew.
        """
        return await self.mark_stream(_Listed(iter(ledgers)))

    async def mark_stream(self, source: MarkSource) -> int:
        """Likewise, as they come, a few multis under way."""
        async with task_scope() as scope:
            senders = [scope.start(self._mark_next(source)) for _ in range(MULTIS_AT_ONCE)]
            return sum(await asyncio.gather(*senders))

    async def mark(
        self, ledger_id: int, replicas: Collection[BookieId], *, is_renewed: bool = False
    ) -> bool:
        """Whether the mark is new or names more replicas now.

        ``is_renewed``: written also where it says all that already, for a worker that has the
        ledger in hand as it was before, and is about to unmark it: it will find another version
        (rule S6).
        """
        for _ in range(TRIES_MAX):
            try:
                return await self._try_mark(ledger_id, replicas, is_renewed=is_renewed)
            except (ConflictError, NoNodeError, NodeExistsError, UnknownOutcomeError):
                continue  # a worker, or Java's auditor, changed it meanwhile: look again
            except UnauthorizedError as error:  # only this one's ledger is in doubt
                log.error("mark.shut_away", ledger_id=ledger_id, error=str(error))
                return False
        raise UnavailableError("the mark keeps changing under our hands", ledger_id=ledger_id)

    # --- Many together -----------------------------------------------------------------------------

    async def _mark_next(self, source: MarkSource) -> int:
        """Until there are no more. Where one part was marked already the next is thought to be,
        too."""
        count, are_new = 0, True
        while part := await source.take(MARKS_PER_MULTI):
            if are_new and await self._create_all(part):
                new = part
            else:
                new = await self._mark_each(part, source)
            are_new = len(new) > 0
            count += len(new)
            source.done(part, new=new)
        return count

    async def _mark_each(
        self, ledgers: Sequence[Endangered], source: MarkSource
    ) -> Sequence[Endangered]:
        """Those whose marks are new, or grew."""
        changed = await asyncio.gather(
            *(
                self.mark(each.ledger_id, each.lost, is_renewed=source.is_renewed(each))
                for each in ledgers
            )
        )
        return [each for each, is_new in zip(ledgers, changed, strict=True) if is_new]

    async def _create_all(self, ledgers: Sequence[Endangered]) -> bool:
        """Whether they were all marked, in one multi; if not, none was, or nobody knows."""
        ctime_ms = self._clock.wall_ms()
        creations: list[Operation] = []
        for ledger in ledgers:
            new = Mark(replicas=ledger.lost, ctime_ms=ctime_ms)
            creations += _creations(payloads.mark_path(self._ur, ledger.ledger_id), new)
        if request_bytes(creations) > BATCH_BYTES_MAX:  # each names very many bookies
            return False
        for _ in range(TRIES_MAX):
            ensured_count = self._ensured_count
            try:
                await self._batcher.send(creations)
            except UnknownOutcomeError:
                return False
            except MultiFailed as failure:
                if not isinstance(failure.cause, NoNodeError):
                    return False
                try:
                    await self._ensure_parents(ledgers, unless_since=ensured_count)
                except (UnauthorizedError, NoNodeError):
                    # Some are shut away, or a worker tidies away what we make: each is tried by
                    # itself.
                    return False
            else:
                return True
        return False

    async def _ensure_parents(self, ledgers: Sequence[Endangered], *, unless_since: int) -> None:
        """The three upper directories, shared by up to 65,536 ledgers each.

        ``unless_since``: as ``_ensured_count`` was when they lacked; what somebody made since may
        be them.
        """
        async with self._ensuring:
            if self._ensured_count == unless_since:
                paths = (payloads.mark_path(self._ur, ledger.ledger_id) for ledger in ledgers)
                for parent in dict.fromkeys(path.rsplit("/", 2)[0] for path in paths):
                    await self._ensure(parent)
                self._ensured_count += 1

    # --- One ---------------------------------------------------------------------------------------

    async def _try_mark(
        self, ledger_id: int, replicas: Collection[BookieId], *, is_renewed: bool
    ) -> bool:
        path = payloads.mark_path(self._ur, ledger_id)
        new = Mark(replicas=tuple(sorted(replicas)), ctime_ms=self._clock.wall_ms())
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:
            await self._create(path, new)
            return True
        merged = _merged(data, new)
        if merged is not None or is_renewed:
            written = data if merged is None else payloads.mark_to_bytes(merged)
            await self._batcher.apply(SetData(path=path, data=written, version=stat.version))
        return merged is not None

    async def _create(self, path: str, new: Mark) -> None:
        directory, leaf = _creations(path, new)
        try:
            await self._batcher.apply(directory, leaf)
        except NoNodeError:  # a worker tidied the upper directories away, or nobody made them yet
            async with self._ensuring:
                await self._ensure(directory.path.rpartition("/")[0])
            raise
        except NodeExistsError:  # an empty directory, left behind: the leaf alone is missing
            await self._batcher.apply(leaf)

    async def _ensure(self, directory: str) -> None:
        """Create the directory and those above it, unless they are there."""
        above = directory.rpartition("/")[0]
        if above == payloads.marks_path(self._ur):
            await ensure(self._store, above)  # missing only if an operator deleted the whole queue
        else:
            await self._ensure(above)
        with suppress(NodeExistsError):
            await self._batcher.apply(Create(path=directory))


class BothQueues:
    """Marks where it helps: in the shared queue what Java's workers see, in our own what they would
    find whole."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, clock: Clock) -> None:
        self._shared = Marker(store, batcher, ur, clock)
        self._own = Marker(store, batcher, own_path(ur), clock)

    async def mark(self, ledger_id: int, sight: Sight) -> bool:
        """Whether a mark is new or names more replicas now. Raises UnavailableError.

        Our own comes first: whoever unmarks the shared one meanwhile leaves that.
        """
        is_news = False
        if sight.needs_own_mark:
            is_news = await self._own.mark(ledger_id, sight.unseen)
        if sight.seen:
            is_news |= await self._shared.mark(ledger_id, sight.seen)
        return is_news


class _Listed:
    """A source that is a list."""

    def __init__(self, ledgers: Iterator[Endangered]) -> None:
        self._ledgers = ledgers

    async def take(self, count_max: int) -> Sequence[Endangered]:
        return list(islice(self._ledgers, count_max))

    def is_renewed(self, ledger: Endangered) -> bool:
        return False

    def done(self, ledgers: Sequence[Endangered], *, new: Sequence[Endangered]) -> None:
        pass


def _creations(path: str, mark: Mark) -> tuple[Create, Create]:
    """The ledger's own directory, and the mark in it."""
    directory = Create(path=path.rpartition("/")[0])
    return directory, Create(path=path, data=payloads.mark_to_bytes(mark))


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
