"""The latest version of each object of one kind, as one server knows it.

A million ledgers take 16 MB: ids and versions are arrays, which a later version overwrites in
place. What was deleted is remembered for a time, then the horizon rises.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from notifications.protocol import LEDGER, Change, Key, Version

DELETED_MAX: Final = 1_000_000


class VersionTable:
    """``position``: all changes up to here are known. ``horizon``: deletions up to here may have
    been forgotten."""

    def __init__(
        self,
        kind: str,
        *,
        position: Version = 0,
        horizon: Version = 0,
        ids: array[int] | None = None,
        versions: array[int] | None = None,
        deleted_max: int = DELETED_MAX,
    ) -> None:
        """``ids``, ``versions``: of ledgers, by ascending id; both become the table's own."""
        self.kind = kind
        self.position, self.horizon = position, horizon
        self._ids = array("q") if ids is None else ids
        self._versions = array("q") if versions is None else versions
        self._others: dict[Key, Version] = {}
        """Objects that are not in the arrays."""
        self._deleted: dict[Key, Version] = {}
        """The oldest deletion first."""
        self._deleted_max = deleted_max
        self._vague: set[Key] = set()
        """Objects whose version here is only not below their last change."""

    def __len__(self) -> int:
        return len(self._ids) + len(self._others)

    def version_of(self, key: Key) -> Version:
        """Return the version of an object; 0 if it does not exist."""
        index = self._index(key)
        return self._others.get(key, 0) if index is None else self._versions[index]

    def apply(self, changes: Iterable[Change], *, position: Version, horizon: Version = 0) -> None:
        """Add all changes up to this position. ``horizon``: objects that are not here may have been
        created and deleted again up to there.

        A change without a version happened at an unknown zxid up to the position, and is told
        without a version. Any number would lose it: a client that crashes before it has finished
        begins again below that number, perhaps at another server, which knows the right one. A
        lower number would be no news to a client between the two.
        """
        for change in changes:
            key, is_deleted = change.key, change.is_deleted
            version = position if change.version is None else change.version
            (self._vague.add if change.version is None else self._vague.discard)(key)
            index = self._index(key)
            if index is not None:
                self._versions[index] = 0 if is_deleted else version
            elif is_deleted:
                self._others.pop(key, None)
            else:
                self._others[key] = version
            self._deleted.pop(key, None)
            if is_deleted:
                self._deleted[key] = version
        while len(self._deleted) > self._deleted_max:
            oldest = next(iter(self._deleted))
            self.horizon = max(self.horizon, self._deleted.pop(oldest))
            self._vague.discard(oldest)
        self.position = max(self.position, position)
        self.horizon = max(self.horizon, horizon)

    def answer(self, key: Key, known: Version) -> Change | None:
        """Return what a client that knows this version must be told; None: nothing.

        Of an object that is not here, nothing is to be told only if the client knows it at the
        horizon or later: else the object may have existed, and been deleted, since.
        """
        version, deleted = self.version_of(key), self._deleted.get(key, 0)
        if (last := version or deleted) > known:
            return Change(key, None if key in self._vague else last, not version)
        return Change(key, None) if not version and known < self.horizon else None

    def _index(self, key: Key) -> int | None:
        if self.kind != LEDGER or not self._ids:
            return None
        ledger_id = int(key[1:])
        index = bisect_left(self._ids, ledger_id)
        return index if index < len(self._ids) and self._ids[index] == ledger_id else None
