"""The trees of marks: listed for workers (``MarkTree``), and read completely for people and checks.

Both trees, the shared one and the private one, have four levels of directories; the lowest has one
directory for each ledger (``ClusterPaths``). A worker lists only a bounded part, which begins at
random places, so that many nodes do not all list the same ledgers.

The functions below ``MarkTree`` mark a ledger in the private tree as part of another transaction,
and read all marks and locks. They create the directories of the queue, and read and write the
leader's list of urgent ledgers. That list has two reasons. A mark says how many bookies a ledger
misses, not how many copies are left. And a worker sees only a part of a long queue. It is a hint:
its ledgers may be repaired and unmarked already.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    UnauthorizedError,
)
from ledgers.model import BookieId
from ledgers.store import Check, Create, Delete, MetadataStore, SetData, children_if_any
from ledgers.tasks import gather_in_parts
from replication import znodes
from replication.records import Count, Record, TimeMs, read_record
from replication.znodes import ClusterPaths, Mark, MarkPaths, ensure_znode

log = structlog.get_logger()

DIRECTORIES_LISTED_MAX = 16
"""Maximum number of directories listed at each level. The lowest hold up to 65,536 ids each."""
DIRECTORIES_AT_ONCE = 4
LEDGERS_ENOUGH = 20_000
"""A listing stops when it has found so many ledgers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLedger:
    """A marked ledger, and one of its marks as it was read. ``mark``: None if it is unreadable or
    access is denied; it may then name any bookie.

    ``refusal``: ZooKeeper's error if access is denied, else empty. Workers to which access is
    denied do not lease the ledger. The other fields are those of the znode, 0 if access is denied.
    Adding a bookie to the mark changes ``version`` and ``mzxid``.
    """

    ledger_id: int
    mark: Mark | None
    refusal: str = ""
    path: str = field(default="", compare=False)
    version: int = field(default=0, compare=False)
    czxid: int = field(default=0, compare=False)
    mzxid: int = field(default=0, compare=False)

    @property
    def replicas(self) -> tuple[BookieId, ...]:
        """The bookies that the mark is known to name."""
        return () if self.mark is None else self.mark.replicas

    @property
    def check(self) -> Check:
        """A check that fails when the mark was extended or deleted."""
        return Check(path=self.path, version=self.version)

    @property
    def delete(self) -> Delete:
        """Deletes the mark only at the version that was read before locking (rule S6)."""
        return Delete(path=self.path, version=self.version)

    @property
    def directory(self) -> str:
        """The directory that holds only this mark."""
        return self.path.rpartition("/")[0]


class MarkTree:
    """The marks of one tree: the shared one, or bookmender's private one."""

    def __init__(self, store: MetadataStore, paths: MarkPaths) -> None:
        self._store = store
        self._paths = paths
        self._root = paths.marks
        self._listed: frozenset[int] = frozenset()
        """Ledgers that the last listing found."""
        self.is_listed_whole = False
        """True if the last listing was complete."""
        self._leftovers: set[str] = set()
        """Directories that were found without children or mark."""
        self._denied: set[int] = set()
        """Ledgers to whose marks access is denied. Logged once each."""
        self._denied_directories: set[str] = set()
        """Directories to which access is denied. Logged once each."""

    async def list_ledgers(self, rng: random.Random) -> frozenset[int]:
        """Return ledgers that have a directory, and so most likely a mark; a part of many."""
        self._leftovers.clear()
        self.is_listed_whole = True
        directories = await self._leaf_directories(rng)
        found: set[int] = set()
        for start in range(0, len(directories), DIRECTORIES_AT_ONCE):
            if len(found) >= LEDGERS_ENOUGH:
                self.is_listed_whole = False
                break
            part = directories[start : start + DIRECTORIES_AT_ONCE]
            listings = await asyncio.gather(*map(self._children, part))
            for directory, names in zip(part, listings, strict=True):
                below = directory[len(self._root) + 1 :]
                found.update(znodes.ledger_ids_below(below, names))
        self._listed = frozenset(found)
        return self._listed

    @property
    def is_empty(self) -> bool:
        """True if the last listing was complete and found no ledger."""
        return self.is_listed_whole and not self._listed

    def may_hold(self, ledger_id: int) -> bool:
        """Return False if the last listing proves that the ledger is not marked here."""
        return not self.is_listed_whole or ledger_id in self._listed

    async def read(self, ledger_id: int) -> MarkedLedger | None:
        """Return the mark; None if there is none or access is denied. Such a mark stays, because a
        mark may only be deleted at the version that was read (rule S6)."""
        found = await read_mark(self._store, self._paths, ledger_id)
        if found is None:
            if ledger_id in self._listed:  # another worker deleted it, or a crash left a directory
                self._leftovers.add(self._paths.mark(ledger_id).rpartition("/")[0])
        elif found.refusal:
            if ledger_id not in self._denied:  # log once, not at each poll
                self._denied.add(ledger_id)
                log.warning("mark.access_denied", ledger_id=ledger_id, error=found.refusal)
            return None
        else:
            self._denied.discard(ledger_id)
        return found

    async def holds(self, ledger_id: int) -> bool:
        """Return True if the ledger is marked here."""
        try:
            return await self._store.exists(self._paths.mark(ledger_id)) is not None
        except UnauthorizedError:  # ZooKeeper 3.9.5 denies access only if it exists
            return True

    async def tidy(self) -> None:
        """Delete the empty directories that were found, from the leaves up."""
        while self._leftovers:
            await self.delete_if_empty(self._leftovers.pop())

    async def delete_if_empty(self, directory: str) -> None:
        """Delete empty directories from this one upwards. Needs no lock: nothing is lost."""
        while directory != self._root:
            try:
                await self._store.delete(directory)
            except (NotEmptyError, NoNodeError, UnauthorizedError):
                return
            directory = directory.rpartition("/")[0]

    async def _leaf_directories(self, rng: random.Random) -> list[str]:
        """Return some directories of the third level, whose children belong to one ledger each."""
        directories = [self._root]
        for _ in range(3):
            listings = await asyncio.gather(*map(self._children, directories))
            below = [
                f"{directory}/{name}"
                for directory, names in zip(directories, listings, strict=True)
                for name in names
            ]
            if len(below) > DIRECTORIES_LISTED_MAX:
                self.is_listed_whole = False
            directories = rng.sample(below, min(len(below), DIRECTORIES_LISTED_MAX))
        return directories

    async def _children(self, directory: str) -> list[str]:
        """Return the children, and note an empty directory. Returns none if access is denied: that
        must not hide other directories. It is logged once."""
        try:
            names = await children_if_any(self._store, directory)
        except UnauthorizedError as error:
            self.is_listed_whole = False
            if directory not in self._denied_directories:
                self._denied_directories.add(directory)
                log.warning("marks.access_denied", path=directory, error=str(error))
            return []
        self._denied_directories.discard(directory)
        if not names and directory != self._root:
            self._leftovers.add(directory)
        return names


async def private_mark_operations(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int, clock: Clock
) -> Sequence[Create | SetData]:
    """Return the operations that mark the ledger. They fail if the mark or its directories change
    first.

    The caller holds the ledger's lock, so no worker deletes an existing mark (rule S6). An existing
    mark is written again unchanged. That raises its version, so a worker that read the mark and the
    ledger's note before cannot lock the ledger.
    """
    path = paths.private.mark(ledger_id)
    directory = path.rpartition("/")[0]
    with suppress(NoNodeError):
        data, stat = await store.get(path)
        return [SetData(path=path, data=data, version=stat.version)]
    mark = Create(path=path, data=znodes.mark_to_bytes(Mark(ctime_ms=clock.wall_ms())))
    if await store.exists(directory) is not None:  # a crash left the directory behind
        return [mark]
    await ensure_znode(store, directory.rpartition("/")[0])
    return [Create(path=directory), mark]


T = TypeVar("T")

READS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedLedger:
    """A locked ledger. ``since_ms``: wall-clock time by ZooKeeper.

    ``holder``: the name in the lock; None if it is unreadable. ``session_id``: 0 for a lock that
    was created by hand, which ends with no session. If access is denied, all numbers are 0.
    """

    ledger_id: int
    holder: str | None
    since_ms: int
    session_id: int
    czxid: int = field(default=0, compare=False)


async def marked_ledger_ids(store: MetadataStore, paths: MarkPaths) -> list[int]:
    """Return all marked ledgers, ascending, including directories that a crash left empty."""
    return [ledger_id async for part in marked_in_parts(store, paths) for ledger_id in part]


async def marked_in_parts(store: MetadataStore, paths: MarkPaths) -> AsyncIterator[list[int]]:
    """Yield all marked ledgers, up to 65,536 at a time."""
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


async def read_mark(store: MetadataStore, paths: MarkPaths, ledger_id: int) -> MarkedLedger | None:
    """Return the mark; None if there is none."""
    path = paths.mark(ledger_id)
    try:
        data, stat = await store.get(path)
    except NoNodeError:
        return None
    except UnauthorizedError as error:
        return MarkedLedger(ledger_id=ledger_id, mark=None, refusal=str(error))
    try:
        mark = znodes.parse_mark(data)
    except CorruptionError:  # repairs inspect the ledger itself; the mark is a hint
        mark = None
    return MarkedLedger(
        ledger_id=ledger_id,
        mark=mark,
        path=path,
        version=stat.version,
        czxid=stat.czxid,
        mzxid=stat.mzxid,
    )


async def read_marks(
    store: MetadataStore, paths: MarkPaths, ledger_ids: Sequence[int]
) -> list[MarkedLedger]:
    """Return the marked ones of these ledgers, in order."""
    return await _read_each(partial(read_mark, store, paths), ledger_ids)


async def locked_ledger_ids(store: MetadataStore, paths: ClusterPaths) -> set[int]:
    """Return the locked ledgers. The holder is a worker, ours or Java's, a command, or a bookie's
    garbage collector."""
    names = await children_if_any(store, paths.locks)
    return {i for name in names if (i := znodes.ledger_id_of_lock(name)) is not None}


async def read_locks(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> list[LockedLedger]:
    """Return the locked ones of these ledgers, in order."""
    return await _read_each(partial(_read_lock, store, paths), ledger_ids)


async def _read_each(
    read: Callable[[int], Awaitable[T | None]], ledger_ids: Sequence[int]
) -> list[T]:
    """Return the values that are not None, in order, with a bounded number of reads at once."""
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


async def prepare_tree(store: MetadataStore, paths: ClusterPaths) -> None:
    """Create missing directories. Raises SettingsError if the layout of the queue is unknown."""
    try:
        await store.create(paths.layout, znodes.LAYOUT_DATA, with_parents=True)
    except NodeExistsError:
        data, _ = await store.get(paths.layout)
        znodes.check_layout(data)
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


URGENT_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgentLedgers(Record):
    """The leader's list of the most urgent ledgers, for all workers."""

    written_ms: TimeMs
    """Wall-clock time, for people."""
    ledger_ids: tuple[Count, ...]

    @classmethod
    def of(cls, ledger_ids: Sequence[int], *, written_ms: int) -> Self:
        """Keep the first ``URGENT_MAX`` ledgers."""
        return cls(written_ms=written_ms, ledger_ids=tuple(ledger_ids[:URGENT_MAX]))


async def read_urgent(store: MetadataStore, paths: ClusterPaths) -> tuple[int, ...]:
    """Return the leader's urgent ledgers, most urgent first; none if the hint is unreadable."""
    found = await read_record(store, paths.urgent, UrgentLedgers.parse)
    return () if found is None else found.ledger_ids[:URGENT_MAX]
