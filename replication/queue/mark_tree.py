"""A tree of marks: the one that we share with Java's nodes, or our own, which is laid out alike.

Four levels of directories, one for each ledger at the bottom (``payloads``). Nobody reads it whole
to choose work: a look lists a bounded part, that begins at random places, so that many nodes do not
all look at the same ledgers.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

import structlog
from msgspec import Struct

from ledgers.errors import CorruptionError, NoNodeError, NotEmptyError, UnauthorizedError
from ledgers.store import Check, Delete, Event, MetadataStore, children_if_any
from replication.queue import payloads
from replication.queue.payloads import Mark

log = structlog.get_logger()

DIRECTORIES_LISTED_MAX = 16
"""Directories that one look lists at each level at most; the lowest hold up to 65,536 ids each."""
DIRECTORIES_AT_ONCE = 4
LEDGERS_ENOUGH = 20_000
"""Once so many are listed a look is content."""


class SeenMark(Struct, frozen=True, kw_only=True):
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
    """The marks below ``ur``: ``<root>/underreplication``, or what is ours alone below it."""

    def __init__(self, store: MetadataStore, ur: str) -> None:
        self._store = store
        self._ur = ur
        self._root = payloads.marks_path(ur)
        self._listed: frozenset[int] = frozenset()
        """What the last look found, and whether that was all."""
        self._is_listed_whole = False
        self._leftovers: set[str] = set()
        """Directories that the last look found without child or mark."""
        self._shut: set[int] = set()
        """Ledgers whose marks ACLs shut away, as was said already."""
        self._shut_directories: set[str] = set()
        """Likewise, of directories that nobody of ours may list."""

    async def look(self, rng: random.Random) -> frozenset[int]:
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
                found.update(payloads.ledger_ids_below(below, names))
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

    async def read(self, ledger_id: int) -> SeenMark | None:
        """None also for a mark that ACLs shut away: it stays, as nobody may delete what they cannot
        read (rule S6)."""
        path = payloads.mark_path(self._ur, ledger_id)
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:  # done by somebody else, or an empty directory left behind
            if ledger_id in self._listed:
                self._leftovers.add(path.rpartition("/")[0])
            return None
        except UnauthorizedError as error:
            if ledger_id not in self._shut:  # once, not at each look
                self._shut.add(ledger_id)
                log.warning("mark.shut_away", ledger_id=ledger_id, error=str(error))
            return None
        self._shut.discard(ledger_id)
        try:
            mark = payloads.parse_mark(data)
        except CorruptionError:  # the ledger is checked from its metadata: this is but a hint
            mark = Mark()
        return SeenMark(
            path=path, mark=mark, version=stat.version, czxid=stat.czxid, mzxid=stat.mzxid
        )

    async def holds(self, ledger_id: int) -> bool:
        try:
            return await self._store.exists(payloads.mark_path(self._ur, ledger_id)) is not None
        except UnauthorizedError:  # as ZooKeeper 3.9.5 says of what is there
            return True

    def owns(self, seen: SeenMark) -> bool:
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
                log.warning("marks.shut_away", path=directory, error=str(error))
            return None
        self._shut_directories.discard(directory)
        return names
