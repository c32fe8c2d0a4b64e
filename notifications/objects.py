"""Objects that applications publish: any name has a version, which each publication raises.

A publisher collects publications for a few milliseconds and writes them in one transaction: it sets
or creates the znode of each object, and adds a batch that lists their names. The zxid of this
transaction is the version of all of them. Batches are numbered without gaps, so a source reads the
new ones, and notices if one of them was deleted before it was read; then it reads all objects
again. Publishers keep the last 1,000 batches or a little more.

A znode that somebody else changes or deletes is noticed only when all objects are read. ZooKeeper
counts the children that a znode ever had in 31 bits, of which readers see 30. So a publisher
replaces the parent of the batches before that, which for readers is a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import starmap
from typing import Final

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import (
    ANY_VERSION,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    Stat,
    children_if_any,
    session_lost,
)
from ledgers.tasks import gather_in_parts
from notifications.protocol import OBJECT, Change, Key, Version, check_key, published
from notifications.sources import Batch, follow
from notifications.versions import VersionTable
from replication.records import Record
from replication.znodes import ClusterPaths, ensure_znode

log = structlog.get_logger()

OBJECTS_MAX: Final = 100_000
BUCKETS: Final = tuple(f"{number:02x}" for number in range(256))
"""All names in one list would exceed ZooKeeper's limit of a reply."""
LINGER_S: Final = 0.01
OBJECTS_A_BATCH: Final = 500
NAME_BYTES_A_BATCH: Final = 32 * 1024
WAITING_MAX: Final = 20_000
BATCHES_KEPT: Final = 1_000
BATCHES_OVER: Final = 100
"""So many more there may be before a publisher deletes old ones."""
NUMBERS_MAX: Final = (1 << 30) - 1_000_000
TRIES_MAX: Final = 10
COUNT_EVERY: Final = 1_000
"""Objects that a publisher creates before it counts them again. With several publishers, there may
be so many above the limit for each of them."""
BATCHES_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNames(Record):
    """The objects of one transaction, by name."""

    changed: frozenset[str] = frozenset()
    deleted: frozenset[str] = frozenset()


def object_path(paths: ClusterPaths, name: str) -> str:
    return f"{paths.objects}/{blake2b(name.encode(), digest_size=1).hexdigest()}/{name}"


# --- The source -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the batches at one moment. ``parent``: the czxid of their parent, 0 if there is
    none. ``number``: of the next batch. ``zxid``: all publications up to here are in batches with
    lower numbers."""

    parent: int = 0
    number: int = 0
    zxid: Version = 0


def _next_number(parent: Stat) -> int:
    """Return how many children the znode ever had: ``cversion`` counts creations and deletions."""
    return (parent.cversion + parent.child_count) // 2


class ObjectSource:
    """A ``Source``. Remembers all objects, to tell what changed during a gap."""

    kind = OBJECT

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store, self._paths, self._clock = store, paths, clock
        self._versions: dict[Key, Version] = {}
        self._end = _End()

    async def load(self) -> VersionTable:
        self._versions, self._end = await self._read_all()
        position = self._end.zxid
        table = VersionTable(OBJECT, position=position, horizon=position)
        table.apply(starmap(Change, self._versions.items()), position=position)
        return table

    def changes(self) -> AsyncGenerator[Batch, None]:
        watch = self._store.watch(self._paths.object_batches, events_max=1)
        return follow(self._read_batch, [watch], kind=self.kind, clock=self._clock)

    async def _read_batch(self) -> Batch:
        try:
            changes, self._end = await self._read_since(self._end)
            _apply(changes, self._versions)
        except _GAPS as gap:
            if self._end.parent:  # else nothing was published before
                log.warning("objects.read_again", reason=str(gap))
            before = self._versions
            self._versions, self._end = await self._read_all()
            now = self._versions
            changes = [Change(key, zxid) for key, zxid in now.items() if before.get(key) != zxid]
            # The zxid of a deletion was in a batch that is gone.
            changes += [Change(key, None, True) for key in before.keys() - now.keys()]
            return Batch(changes, self._end.zxid, horizon=self._end.zxid)
        return Batch(changes, self._end.zxid)

    async def _read_all(self) -> tuple[dict[Key, Version], _End]:
        """Return the versions of all objects as they were at the returned end. What is published
        while they are read is in batches that are read afterwards."""
        for _ in range(TRIES_MAX):
            begin = await self._read_end()
            versions: dict[Key, Version] = {}
            for bucket in BUCKETS:
                parent = f"{self._paths.objects}/{bucket}"
                names = await children_if_any(self._store, parent)
                znodes = await self._store.get_each([f"{parent}/{name}" for name in names])
                for name, znode in zip(names, znodes, strict=True):
                    if isinstance(znode, UnauthorizedError):
                        raise znode
                    if not isinstance(znode, NoNodeError):
                        versions[published(name)] = znode[1].mzxid
            with suppress(*_GAPS):
                changes, end = await self._read_since(begin)
                _apply(changes, versions)
                return versions, end
        raise UnavailableError("objects are published faster than they can be read")

    async def _read_end(self) -> _End:
        parent = self._paths.object_batches
        await self._store.sync(parent)
        stat = await self._store.exists(parent)
        return _End() if stat is None else _End(stat.czxid, _next_number(stat), stat.pzxid)

    async def _read_since(self, seen: _End) -> tuple[list[Change], _End]:
        """Return the last change of each object since this end, and the end now. Raises one of
        ``_GAPS`` if a batch is missing or unreadable."""
        end = await self._read_end()
        is_far = end.number - seen.number > BATCHES_KEPT + BATCHES_OVER
        if end.parent != seen.parent or is_far:
            raise NoNodeError("publications were deleted before they were read")
        parent = self._paths.object_batches
        paths = [f"{parent}/b-{number:010d}" for number in range(seen.number, end.number)]
        changes: dict[Key, Change] = {}
        for data, stat in await gather_in_parts(self._store.get, paths, at_once=BATCHES_AT_ONCE):
            names = PublishedNames.parse(data)
            for name in (*names.changed, *names.deleted):
                key = published(name)
                changes[key] = Change(key, stat.czxid, name in names.deleted)
        return list(changes.values()), end


_GAPS: Final = (NoNodeError, CorruptionError)


def _apply(changes: Iterable[Change], versions: dict[Key, Version]) -> None:
    for change in changes:
        assert change.version is not None
        if change.is_deleted:
            versions.pop(change.key, None)
        else:
            versions[change.key] = change.version


# --- The publisher --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Wanted:
    """What is to be done to one object, and who waits for it."""

    is_deleted: bool
    callers: list[asyncio.Future[Version]] = field(default_factory=list)

    def settle(self, outcome: Version | Exception) -> None:
        for caller in self.callers:
            if caller.done():  # it was cancelled
                continue
            if isinstance(outcome, Exception):
                caller.set_exception(outcome)
            else:
                caller.set_result(outcome)


class ObjectPublisher:
    """Publishes objects. Any number of publishers may do so; ``run`` must be running."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store, self._paths, self._clock = store, paths, clock
        self._waiting: dict[str, _Wanted] = {}
        self._arrived = asyncio.Event()
        self._room = 0
        """Objects that may be created before they are counted again."""
        self._is_over = False

    async def publish(self, name: str) -> Version:
        """Give the object a new version, and return it once it is durable. Creates the object if
        there is none.

        Publications of one object that wait together become one. Raises SettingsError (no object
        can have this name), RejectedError (too many objects), UnavailableError (it may have been
        published), SessionLostError (likewise).
        """
        return await self._ask(name, is_deleted=False)

    async def delete(self, name: str) -> Version:
        """Delete the object, and return the version of its deletion, which is told also if there
        is no such object. Raises what ``publish`` raises."""
        return await self._ask(name, is_deleted=True)

    async def _ask(self, name: str, *, is_deleted: bool) -> Version:
        check_key(published(name))
        if max(name) > "\uffef":
            raise SettingsError(
                f"{name!r} is no name of an object: ZooKeeper's paths have no characters above "
                "U+FFEF, such as emoji"
            )
        if self._is_over:
            raise session_lost()
        if len(self._waiting) >= WAITING_MAX and name not in self._waiting:
            raise UnavailableError("too many publications wait for ZooKeeper: try again later")
        wanted = self._waiting.setdefault(name, _Wanted(is_deleted))
        wanted.is_deleted = is_deleted
        caller: asyncio.Future[Version] = asyncio.get_running_loop().create_future()
        wanted.callers.append(caller)
        self._arrived.set()
        return await caller

    async def run(self) -> None:
        """Write what is published, until cancelled. Raises SessionLostError."""
        batch: dict[str, _Wanted] = {}
        try:
            while True:
                await self._arrived.wait()
                if len(self._waiting) < OBJECTS_A_BATCH:
                    await self._clock.sleep(LINGER_S)
                batch = self._take()
                try:
                    end = await self._write(batch)
                    if end is not None:
                        await self._clean(end)
                except SessionLostError:
                    raise
                except BookmenderError as error:
                    for wanted in batch.values():
                        wanted.settle(error)
        finally:
            self._is_over = True
            for wanted in (*batch.values(), *self._waiting.values()):
                wanted.settle(session_lost())

    def _take(self) -> dict[str, _Wanted]:
        """Return the publications that have waited longest, as many as fit into a batch."""
        batch: dict[str, _Wanted] = {}
        byte_count = 0
        for name, wanted in self._waiting.items():
            byte_count += len(name.encode())
            if batch and (byte_count > NAME_BYTES_A_BATCH or len(batch) >= OBJECTS_A_BATCH):
                break
            batch[name] = wanted
        for name in batch:
            del self._waiting[name]
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _write(self, batch: dict[str, _Wanted]) -> Stat | None:
        """Publish in one transaction, and return the state of the batches' parent; None if nothing
        was left to write. Objects beyond the limit are refused, and removed from ``batch``."""
        failure: Exception = UnavailableError("other publishers keep changing the same objects")
        for _ in range(TRIES_MAX):
            try:
                operations = await self._operations(batch)
                if not batch:
                    return None
                *_, end = await self._store.multi(operations)
            except UnavailableError as error:  # also an unknown outcome: publishing again is safe
                failure = error
            except MultiFailed as error:
                if not isinstance(error.cause, NoNodeError | NodeExistsError):
                    raise error.cause from error
                await self._prepare()
            else:
                assert isinstance(end, Stat), end
                self._room -= sum(isinstance(each, Create) for each in operations) - 1
                for wanted in batch.values():
                    wanted.settle(end.mzxid)
                return end
        raise failure

    async def _operations(self, batch: dict[str, _Wanted]) -> list[Operation]:
        """Return the transaction that publishes the objects."""
        paths = {name: object_path(self._paths, name) for name in batch}
        found = await self._store.get_each(list(paths.values()))
        there = {n for n, znode in zip(batch, found, strict=True) if isinstance(znode, tuple)}
        new = [name for name in batch if name not in there and not batch[name].is_deleted]
        if len(new) > self._room:
            self._room = min(COUNT_EVERY, OBJECTS_MAX - await self._count())
        for name in new[max(0, self._room) :]:
            text = f"there are {OBJECTS_MAX} published objects: delete some of them first"
            batch.pop(name).settle(RejectedError(text, name=name))
        operations: list[Operation] = []
        for name, wanted in batch.items():
            path = paths[name]
            if wanted.is_deleted:
                # Creating it first fails if another publisher has created it since.
                operations += [] if name in there else [Create(path=path)]
                operations.append(Delete(path=path))
            elif name in there:
                operations.append(SetData(path=path, data=b"", version=ANY_VERSION))
            else:
                operations.append(Create(path=path))
        deleted = frozenset(name for name, wanted in batch.items() if wanted.is_deleted)
        names = PublishedNames(changed=frozenset(batch.keys() - deleted), deleted=deleted)
        parent = self._paths.object_batches
        operations.append(Create(path=f"{parent}/b-", data=names.to_json(), is_sequential=True))
        # Its result has the zxid, which the result of a creation lacks.
        operations.append(SetData(path=parent, data=b"", version=ANY_VERSION))
        return operations

    async def _count(self) -> int:
        buckets = [f"{self._paths.objects}/{bucket}" for bucket in BUCKETS]
        found = await self._store.get_each(buckets)
        return sum(each[1].child_count for each in found if isinstance(each, tuple))

    async def _prepare(self) -> None:
        """Create the parents that are missing."""
        await ensure_znode(self._store, self._paths.object_batches)
        await ensure_znode(self._store, self._paths.objects)
        missing = set(BUCKETS) - set(await self._store.children(self._paths.objects))
        with suppress(MultiFailed):  # another publisher creates them
            await self._store.multi(
                [Create(path=f"{self._paths.objects}/{bucket}") for bucket in sorted(missing)]
            )

    async def _clean(self, end: Stat) -> None:
        """Delete old batches. Before the numbers run out, replace their parent."""
        are_numbers_used = _next_number(end) >= NUMBERS_MAX
        if end.child_count <= BATCHES_KEPT + BATCHES_OVER and not are_numbers_used:
            return
        parent = self._paths.object_batches
        names = sorted(await self._store.children(parent))
        old = names if are_numbers_used else names[:-BATCHES_KEPT]
        operations: list[Operation] = [Delete(path=f"{parent}/{name}") for name in old]
        if are_numbers_used:
            operations += [Delete(path=parent), Create(path=parent)]
        with suppress(MultiFailed):  # another publisher did it, or has added a batch
            await self._store.multi(operations)
