"""What really happened to the objects of one kind, and whether a source has told it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from ledgers.store import Operation, OperationResult
from notifications.protocol import Change, Key, Version
from notifications.sources import Batch, Source
from notifications.versions import VersionTable
from tests.memory.store import Fault, MemoryStore, MemoryTree, Nodes

States = Mapping[Key, tuple[bool, object]]
"""By object, whether it exists, and what else there is to know of it."""


class Truth:
    """Each change of an object, with its zxid, as the tree applies the transactions."""

    def __init__(self, tree: MemoryTree, states: Callable[[Nodes], States]) -> None:
        self.changes: dict[Key, list[Change]] = {}
        self._tree, self._states, self._apply = tree, states, tree.apply
        self._now: States = states(tree.nodes)
        tree.apply = self._watched  # type: ignore[method-assign]

    def _watched(self, session_id: int, operations: Sequence[Operation]) -> list[OperationResult]:
        results = self._apply(session_id, operations)
        before, self._now = self._now, self._states(self._tree.nodes)
        for key in sorted(before.keys() | self._now.keys()):
            if before.get(key) != self._now.get(key):
                is_deleted = not self._now.get(key, (False, None))[0]
                change = Change(key, self._tree._zxid, is_deleted)
                self.changes.setdefault(key, []).append(change)
        return results

    def last(self, key: Key, position: Version | None = None) -> Change | None:
        """Return the last change up to this position."""
        changes = self.changes.get(key, [])
        known = [c for c in changes if position is None or (c.version or 0) <= position]
        return known[-1] if known else None


class Judge:
    """A server that follows a source. After each batch it checks rule W."""

    def __init__(self, source: Source, truth: Truth) -> None:
        self.source, self.truth = source, truth
        self.table: VersionTable
        self.batches: list[Batch] = []
        self.times_s: list[float] = []
        self.vague_count = 0

    async def run(self) -> None:
        self.table = await self.source.load()
        self.check()
        async with aclosing(self.source.changes()) as batches:
            async for batch in batches:
                assert batch.position >= self.table.position, "a position fell"
                self.table.apply(batch.changes, position=batch.position, horizon=batch.horizon)
                self.batches.append(batch)
                self.times_s.append(asyncio.get_running_loop().time())
                self.vague_count += sum(change.version is None for change in batch.changes)
                self.check()

    def check(self) -> None:
        """A client that knows an object just before its last change up to the position is told of
        this change, and one that knows the position is told nothing."""
        position = self.table.position
        for key in self.truth.changes:
            last = self.truth.last(key, position)
            assert self.table.answer(key, position) is None, f"{key} is told for nothing"
            if last is None:
                continue
            assert last.version is not None
            told = self.table.answer(key, last.version - 1)
            assert told is not None, f"{last} is not told at {position}"
            # A deletion of nothing is told as well.
            is_deleted_twice = last.is_deleted and told.is_deleted
            assert told.version in (None, last.version) or is_deleted_twice, (told, last)
            assert told.version is None or told.is_deleted == last.is_deleted, (told, last)
            assert bool(self.table.version_of(key)) != last.is_deleted, (told, last)

    def knows_all(self) -> bool:
        position = self.table.position
        changes = [self.truth.last(key) for key in self.truth.changes]
        return all(change is None or (change.version or 0) <= position for change in changes)


async def disturb(tree: MemoryTree, stores: Sequence[MemoryStore], chance: random.Random) -> None:
    """Suspend sessions, let their servers lag, and lose requests and replies, until cancelled. At
    the end everything works again."""

    def lose(store: MemoryStore, _: Sequence[Operation]) -> Fault | None:
        is_lost = store in stores and chance.random() < 0.03
        return chance.choice(list(Fault)) if is_lost else None

    tree.faults = lose
    try:
        while True:
            await asyncio.sleep(chance.random() * 0.5)
            store = chance.choice(stores)
            match chance.randrange(3):
                case 0:
                    tree.lag(store)
                case 1:
                    tree.suspend(store)
                case 2:
                    tree.resume(store)
    finally:
        tree.faults = None
        for store in stores:
            tree.resume(store)
