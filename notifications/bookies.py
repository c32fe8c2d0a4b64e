"""The bookies as a source of changes.

A bookie changes when it registers, is no longer registered, enters or leaves the list of read-only
bookies, is formatted, loses its cookie, or, while it is not registered, is counted as lost by the
leader. It exists while it is registered.

ZooKeeper tells when a znode was created, and when the children of a znode last changed. So the zxid
of a disappearance is known only if it is the last change of its list: of several bookies that
disappear between two readings, all but the last do so at an unknown zxid.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from auditor.mark_reasons import LossKind, LossRecords
from ledgers.clock import Clock
from ledgers.errors import NoNodeError, UnauthorizedError, UnavailableError
from ledgers.registration import READ_ONLY
from ledgers.store import MetadataStore, children_if_any
from notifications.protocol import BOOKIE, Change, Version, bookie
from notifications.sources import Batch, follow
from notifications.versions import VersionTable
from replication.records import read_stored
from replication.znodes import ClusterPaths

ROUNDS_MAX: Final = 100
"""So many times everything is read, until nothing changes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one znode says of the bookies. ``is_list``: True if its children name bookies, False for
    the record of losses. ``zxid``: of the znode's last change; 0 if it does not exist.
    ``change_count``: how often the znode has changed."""

    is_list: bool = True
    zxid: Version = 0
    change_count: int = 0
    says: Mapping[str, int] = field(default_factory=dict)
    """By bookie, the czxid of its child, or below 0 if an ACL hides it; in the record of losses,
    since when it is lost."""


_Parts = tuple[_Part, _Part, _Part, _Part]
"""Writable bookies, read-only bookies, cookies, losses."""


class BookieSource:
    """A ``Source``. Costs five small requests every few seconds, and, after a change of a list, a
    read of each of its children."""

    kind = BOOKIE

    def __init__(self, store: MetadataStore, root: str, clock: Clock) -> None:
        """``root``: the ledgers root."""
        self._store, self._clock = store, clock
        self._available = f"{root}/available"
        self._read_only = f"{root}/available/{READ_ONLY}"
        self._cookies = f"{root}/cookies"
        self._losses = ClusterPaths.below(root).losses
        self._parts: _Parts = (_Part(), _Part(), _Part(), _Part(is_list=False))
        self._position: Version = 0

    async def load(self) -> VersionTable:
        await self._read_again()
        table = VersionTable(BOOKIE, position=self._position, horizon=self._position)
        steps = [_Step(None, part, may_hide=True) for part in self._parts]
        for name in self._parts[0].says.keys() | self._parts[1].says.keys():
            if found := _last_change(name, steps):
                table.apply([found[1]], position=found[0])
        return table

    def changes(self) -> AsyncGenerator[Batch, None]:
        watch = self._store.watch
        watches = [
            watch(self._available, is_recursive=True, events_max=1),
            watch(self._cookies, events_max=1),
            watch(self._losses, events_max=1),
        ]
        return follow(self._read_batch, watches, kind=self.kind, clock=self._clock)

    async def _read_batch(self) -> Batch:
        before = self._parts
        await self._read_again()
        steps = [_Step.between(*pair) for pair in zip(before, self._parts, strict=True)]
        names = {name for part in (*before, *self._parts) for name in part.says}
        found = [_last_change(name, steps) for name in sorted(names)]
        return Batch(
            [each[1] for each in found if each is not None],
            self._position,
            horizon=self._position if any(step.may_hide for step in steps) else 0,
        )

    async def _read_again(self) -> None:
        """Read all parts as they were at one moment.

        Each part is read after the zxid of its last change. If the next round finds the same zxids,
        nothing changed from the first reads of the round before to its last ones.
        """
        parts = self._parts
        for _ in range(ROUNDS_MAX):
            before = parts
            await self._store.sync(self._available)
            parts = await asyncio.gather(
                self._read_list(self._available, before[0]),
                self._read_list(self._read_only, before[1]),
                self._read_list(self._cookies, before[2]),
                self._read_losses(before[3]),
            )
            if all(now is then for now, then in zip(parts, before, strict=True)):
                self._parts = parts
                self._position = max(self._position, *(part.zxid for part in parts))
                return
        raise UnavailableError("the bookies change faster than they can be read")

    async def _read_list(self, path: str, known: _Part) -> _Part:
        """Return the children of a znode; ``known`` itself if they are the same."""
        stat = await self._store.exists(path)
        if stat is None:
            if path == self._available:  # never a mass loss (rule S8)
                raise UnavailableError("the list of bookies is missing", path=path)
            return known if not known.zxid else _Part()
        if stat.pzxid == known.zxid:
            return known
        names = [name for name in await children_if_any(self._store, path) if name != READ_ONLY]
        paths = [f"{path}/{name}" for name in names]
        czxids = {}
        for name, found in zip(names, await self._store.get_each(paths), strict=True):
            if isinstance(found, UnauthorizedError):  # it may have registered again at any time
                czxids[name] = -stat.pzxid
            elif not isinstance(found, NoNodeError):
                czxids[name] = found[1].czxid
        return _Part(zxid=stat.pzxid, change_count=stat.cversion, says=czxids)

    async def _read_losses(self, known: _Part) -> _Part:
        """Return which bookies the leader counts as lost; ``known`` itself if nothing changed."""
        stored = await read_stored(self._store, self._losses, LossRecords.parse)
        zxid = 0 if stored.stat is None else stored.stat.mzxid
        if zxid == known.zxid:
            return known
        lost: dict[str, int] = {
            name: loss.since_ms
            for name, loss in (stored.value.bookies if stored.value else {}).items()
            if loss.kind is LossKind.LOST and loss.ended_ms is None
        }
        return _Part(
            is_list=False, zxid=zxid, change_count=stored.version if zxid else 0, says=lost
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """Two readings of a part; ``then``: None if nothing is known of the first. ``may_hide``: what
    both say of a bookie may have been different between them."""

    then: _Part | None
    now: _Part
    may_hide: bool

    @classmethod
    def between(cls, then: _Part, now: _Part) -> _Step:
        if then is now:
            return cls(then, now, may_hide=False)
        change_count = now.change_count - then.change_count
        if not now.is_list:
            return cls(then, now, may_hide=change_count != 1)
        names = then.says.keys() | now.says.keys()
        changed = [name for name in names if then.says.get(name) != now.says.get(name)]
        seen_count = sum((name in then.says) + (name in now.says) for name in changed)
        return cls(then, now, may_hide=change_count != seen_count)

    def last_change(self, name: str) -> tuple[Version, bool] | None:
        """Return a zxid that the last change of a bookie is not above, and whether it is exact;
        None if the bookie did not change."""
        then, now, said = self.then, self.now, self.now.says.get(name)
        if then is not None and then.says.get(name) == said:
            # No two children have one czxid, so a child that is the same was there all the time.
            is_hidden = self.may_hide and not (now.is_list and said is not None)
            return (now.zxid, False) if is_hidden else None
        if now.is_list and said is not None and said > 0:
            return said, True
        return now.zxid, then is not None and now.change_count == then.change_count + 1


def _last_change(name: str, steps: Sequence[_Step]) -> tuple[Version, Change] | None:
    """Return the last change of a bookie, with a zxid that it is not above; None if it did not
    change. ``steps``: of all parts."""
    *lists, losses = steps
    is_registered = any(name in step.now.says for step in lists[:2])
    found = [step.last_change(name) for step in (lists if is_registered else (*lists, losses))]
    ends = [end for end in found if end is not None]
    if not ends:
        return None
    zxid, is_exact = max(ends)
    return zxid, Change(bookie(name), zxid if is_exact else None, not is_registered)
