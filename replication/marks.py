"""A tree of marks: the one that we share with Java's nodes, or our own, which is laid out alike.

Four levels of directories, one for each ledger at the bottom (``payloads``). Nobody reads it whole
to choose work: a look lists a bounded part, that begins at random places, so that many nodes do not
all look at the same ledgers.

A mark in our private queue that is made in the same transaction as another write.

Java's workers do not look there. The mark names no bookie: nodes check every copy's ends.

Reading the whole queue, for people and for proofs: every mark, every lock, complete or an
error.

The znodes that must stand before anything can be queued: Java's, and ours below them.

The leader's note of the most endangered ledgers: ``<ur>/bookmender/urgent``, versioned JSON.

A mark says how many bookies a ledger misses, not how many copies it has left, and a worker sees but
a part of a long queue. The leading auditor knows both, and names those that everybody should take
first. It is a hint, not the queue: ledgers on it may be done, or marked no more.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog
from msgspec import Struct

from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    UnauthorizedError,
)
from ledgers.store import Check, Create, Delete, Event, MetadataStore, SetData, children_if_any
from ledgers.tasks import gather_in_parts
from replication import znodes
from replication.znodes import (
    ClusterPaths,
    Mark,
    MarkPaths,
    ensure_znode,
    ints_field,
    read_record,
)

log = structlog.get_logger()

DIRECTORIES_LISTED_MAX = 16
"""Directories that one look lists at each level at most; the lowest hold up to 65,536 ids each."""
DIRECTORIES_AT_ONCE = 4
LEDGERS_ENOUGH = 20_000
"""Once so many are listed a look is content."""


class VersionedMark(Struct, frozen=True, kw_only=True):
    """A mark as it was read. ``version``, ``czxid`` and ``mzxid`` are those of its znode: adding a
    bookie to it changes the first and the last."""

    path: str
    mark: Mark
    version: int
    czxid: int = 0
    mzxid: int = 0

    @property
    def check(self) -> Check:
        """Holds as long as nobody has extended or deleted it."""
        return Check(path=self.path, version=self.version)

    @property
    def delete(self) -> Delete:
        """Rule S6: at the version that was read before locking, and no other."""
        return Delete(path=self.path, version=self.version)

    @property
    def directory(self) -> str:
        """That of this ledger alone."""
        return self.path.rpartition("/")[0]


class MarkTree:
    """The marks of one tree: the shared one, or bookmender's private one."""

    def __init__(self, store: MetadataStore, paths: MarkPaths) -> None:
        self._store = store
        self._paths = paths
        self._root = paths.marks
        self._listed: frozenset[int] = frozenset()
        """What the last look found, and whether that was all."""
        self._is_listed_whole = False
        self._leftovers: set[str] = set()
        """Directories that the last look found without child or mark."""
        self._shut: set[int] = set()
        """Ledgers whose marks ACLs shut away, as was said already."""
        self._shut_directories: set[str] = set()
        """Likewise, of directories that nobody of ours may list."""

    async def list_ledgers(self, rng: random.Random) -> frozenset[int]:
        """Ledgers that have a directory here, and so most likely a mark; a part of them in a large
        tree."""
        self._leftovers.clear()
        self._is_listed_whole = True
        directories = await self._leaf_directories(rng)
        found: set[int] = set()
        for start in range(0, len(directories), DIRECTORIES_AT_ONCE):
            if len(found) >= LEDGERS_ENOUGH:
                self._is_listed_whole = False
                break
            part = directories[start : start + DIRECTORIES_AT_ONCE]
            for directory, names in zip(part, await self._list(part), strict=True):
                below = directory[len(self._root) + 1 :]
                found.update(znodes.ledger_ids_below(below, names))
        self._listed = frozenset(found)
        return self._listed

    @property
    def is_listed_whole(self) -> bool:
        """Whether what the last look found was all."""
        return self._is_listed_whole

    @property
    def is_empty(self) -> bool:
        """Whether the last look found no ledger, and that was all."""
        return self._is_listed_whole and not self._listed

    def may_hold(self, ledger_id: int) -> bool:
        """Whether a mark of the ledger may stand here, for all that the last look told."""
        return not self._is_listed_whole or ledger_id in self._listed

    async def read(self, ledger_id: int) -> VersionedMark | None:
        """None also for a mark that ACLs shut away: it stays, as nobody may delete what they cannot
        read (rule S6)."""
        path = self._paths.mark(ledger_id)
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:  # done by somebody else, or an empty directory left behind
            if ledger_id in self._listed:
                self._leftovers.add(path.rpartition("/")[0])
            return None
        except UnauthorizedError as error:
            if ledger_id not in self._shut:  # once, not at each look
                self._shut.add(ledger_id)
                log.warning("mark.access_denied", ledger_id=ledger_id, error=str(error))
            return None
        self._shut.discard(ledger_id)
        try:
            mark = znodes.parse_mark(data)
        except CorruptionError:  # the ledger is checked from its metadata: this is but a hint
            mark = Mark()
        return VersionedMark(
            path=path, mark=mark, version=stat.version, czxid=stat.czxid, mzxid=stat.mzxid
        )

    async def holds(self, ledger_id: int) -> bool:
        try:
            return await self._store.exists(self._paths.mark(ledger_id)) is not None
        except UnauthorizedError:  # as ZooKeeper 3.9.5 says of what is there
            return True

    def owns(self, seen: VersionedMark) -> bool:
        return seen.path.startswith(f"{self._root}/")

    def watch(self) -> AsyncGenerator[Event, None]:
        """Of the root alone: the first mark in an empty tree."""
        return self._store.watch(self._root)

    async def tidy(self) -> None:
        """Delete what the last look found left over, from the leaves up."""
        while self._leftovers:
            await self.delete_if_empty(self._leftovers.pop())

    async def delete_if_empty(self, directory: str) -> None:
        """And the directories above it that are empty then. Needs no lock: nothing is lost."""
        while directory != self._root:
            try:
                await self._store.delete(directory)
            except (NotEmptyError, NoNodeError, UnauthorizedError):
                return
            directory = directory.rpartition("/")[0]

    async def _leaf_directories(self, rng: random.Random) -> list[str]:
        """Some directories of the third level, whose children stand for one ledger each."""
        directories = [self._root]
        for _ in range(3):
            listings = await self._list(directories)
            below = [
                f"{directory}/{name}"
                for directory, names in zip(directories, listings, strict=True)
                for name in names
            ]
            if len(below) > DIRECTORIES_LISTED_MAX:
                self._is_listed_whole = False
            directories = rng.sample(below, min(len(below), DIRECTORIES_LISTED_MAX))
        return directories

    async def _list(self, directories: Sequence[str]) -> list[list[str]]:
        """The children of each; those without any are left over. None of those that ACLs shut away:
        what is below them is nobody's business of ours, and the others' all the same."""
        listings = await asyncio.gather(*map(self._children, directories))
        self._leftovers.update(
            d for d, names in zip(directories, listings, strict=True) if names == []
        )
        self._leftovers.discard(self._root)
        return [names or [] for names in listings]

    async def _children(self, directory: str) -> list[str] | None:
        """None where ACLs shut it away, which is said once."""
        try:
            names = await children_if_any(self._store, directory)
        except UnauthorizedError as error:
            self._is_listed_whole = False
            if directory not in self._shut_directories:
                self._shut_directories.add(directory)
                log.warning("marks.access_denied", path=directory, error=str(error))
            return None
        self._shut_directories.discard(directory)
        return names


async def private_mark_operations(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int, clock: Clock
) -> Sequence[Create | SetData]:
    """Return the operations that mark the ledger. They fail if the mark or its directories change
    first.

    A mark that stands stays: nothing deletes it while the caller holds the lock (rule S6). It is
    written again as it is, so that a worker that read it before, with the ledger's note, does not
    take it.
    """
    path = paths.private.mark(ledger_id)
    directory = path.rpartition("/")[0]
    with suppress(NoNodeError):
        data, stat = await store.get(path)
        return [SetData(path=path, data=data, version=stat.version)]
    mark = Create(path=path, data=znodes.mark_to_bytes(Mark(ctime_ms=clock.wall_ms())))
    if await store.exists(directory) is not None:  # a crash left it behind
        return [mark]
    await ensure_znode(store, directory.rpartition("/")[0])
    return [Create(path=directory), mark]


T = TypeVar("T")

READS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLedger:
    """``mark`` is None where the znode cannot be read as one, or ACLs shut it away: it may name any
    bookie. ``czxid``: when it was made, 0 where that is shut away, too.

    ``refusal``: what ZooKeeper says in the latter case, else empty. No worker that ACLs shut out
    likewise takes it.
    """

    ledger_id: int
    mark: Mark | None
    refusal: str = ""
    czxid: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedLedger:
    """A ledger that somebody holds. ``since_ms``: wall-clock time of ZooKeeper's.

    ``holder``: as it calls itself, None where that cannot be read. ``session_id``: 0 for a lock
    that somebody made by hand, and that goes with nobody. Of one that ACLs shut away these, and
    ``czxid``, are 0.
    """

    ledger_id: int
    holder: str | None
    since_ms: int
    session_id: int
    czxid: int = field(default=0, compare=False)


async def marked_ledger_ids(store: MetadataStore, paths: MarkPaths) -> list[int]:
    """Ascending. Directories without a mark (left behind by a crash) are listed too."""
    return [ledger_id async for part in marked_in_parts(store, paths) for ledger_id in part]


async def marked_in_parts(store: MetadataStore, paths: MarkPaths) -> AsyncIterator[list[int]]:
    """Likewise, up to 65,536 at a time."""
    marks = paths.marks
    directories = [marks]
    for _ in range(3):
        directories = [
            f"{directory}/{name}"
            for directory in directories
            for name in sorted(await children_if_any(store, directory))
        ]
    for directory in directories:
        names = await children_if_any(store, directory)
        yield sorted(znodes.ledger_ids_below(directory[len(marks) + 1 :], names))


async def read_marks(
    store: MetadataStore, paths: MarkPaths, ledger_ids: Sequence[int]
) -> list[MarkedLedger]:
    """Those of the ledgers that are marked, in order."""
    return await _read_each(partial(_read_mark, store, paths), ledger_ids)


async def locked_ledger_ids(store: MetadataStore, paths: ClusterPaths) -> set[int]:
    """Ledgers that some worker, ours or Java's, or a bookie's garbage collector holds now."""
    names = await children_if_any(store, paths.locks)
    return {i for name in names if (i := znodes.ledger_id_of_lock(name)) is not None}


async def read_locks(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> list[LockedLedger]:
    """Those of the ledgers that are locked, in order."""
    return await _read_each(partial(_read_lock, store, paths), ledger_ids)


async def _read_each(
    read: Callable[[int], Awaitable[T | None]], ledger_ids: Sequence[int]
) -> list[T]:
    """What ``read`` gives for each, in order, without the Nones; a bounded number at a time."""
    values = await gather_in_parts(read, ledger_ids, at_once=READS_AT_ONCE)
    return [value for value in values if value is not None]


async def _read_lock(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> LockedLedger | None:
    try:
        data, stat = await store.get(paths.lock(ledger_id))
    except NoNodeError:
        return None
    except UnauthorizedError:
        return LockedLedger(ledger_id=ledger_id, holder=None, since_ms=0, session_id=0)
    try:
        holder = znodes.parse_lock(data)
    except CorruptionError:
        holder = None
    return LockedLedger(
        ledger_id=ledger_id,
        holder=holder,
        since_ms=stat.ctime_ms,
        session_id=stat.ephemeral_owner,
        czxid=stat.czxid,
    )


async def _read_mark(store: MetadataStore, paths: MarkPaths, ledger_id: int) -> MarkedLedger | None:
    try:
        data, stat = await store.get(paths.mark(ledger_id))
    except NoNodeError:
        return None
    except UnauthorizedError as error:
        return MarkedLedger(ledger_id=ledger_id, mark=None, refusal=str(error))
    try:
        mark = znodes.parse_mark(data)
    except CorruptionError:
        mark = None
    return MarkedLedger(ledger_id=ledger_id, mark=mark, czxid=stat.czxid)


async def prepare_tree(store: MetadataStore, paths: ClusterPaths) -> None:
    """Create what is missing. Raises SettingsError when the queue has a layout that we do not
    know."""
    await _agree_on_layout(store, paths)
    for path in (
        paths.marks,
        paths.locks,
        paths.election,
        paths.nodes,
        paths.waiting,
        paths.recent_copies,
        paths.orders,
        paths.private.marks,
    ):
        await ensure_znode(store, path)


async def _agree_on_layout(store: MetadataStore, paths: ClusterPaths) -> None:
    path = paths.layout
    try:
        await store.create(path, znodes.LAYOUT_DATA, with_parents=True)
    except NodeExistsError:
        data, _ = await store.get(path)
        znodes.check_layout(data)


URGENT_MAX = 1_000


async def read_urgent(store: MetadataStore, paths: ClusterPaths) -> tuple[int, ...]:
    """Most endangered first; empty also when a later release wrote what we cannot read."""
    try:
        ledger_ids = await read_record(
            store, paths.urgent, lambda note: ints_field(note, "ledger_ids")
        )
    except UnauthorizedError:  # it is a hint
        return ()
    return (ledger_ids or ())[:URGENT_MAX]


def urgent_to_bytes(ledger_ids: Sequence[int], *, written_ms: int) -> bytes:
    """The first ``URGENT_MAX`` of them. ``written_ms``: wall-clock time, for people."""
    record = {
        "version": 1,
        "written_ms": written_ms,
        "ledger_ids": list(ledger_ids[:URGENT_MAX]),
    }
    return json.dumps(record).encode()
