"""Where a server learns of the changes of one kind of object."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

from notifications.protocol import Change, Version
from notifications.versions import VersionTable

FRESH_EVERY_S: Final = 5.0
"""A source that hears everything says so at least this often."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All changes of a kind up to ``position`` that no earlier batch contained. Of an object with
    several changes, the last one is enough. Without changes, it proves that the source is fresh."""

    changes: list[Change]
    position: Version


class Source(Protocol):
    """The changes of one kind of object. Rule W rests on it: every change whose zxid is not above
    the position of a batch is in that batch, in an earlier one, or in the table."""

    @property
    def kind(self) -> str: ...

    async def load(self) -> VersionTable:
        """Return the versions of all objects. The table is complete up to its position; earlier
        deletions are unknown, so the horizon is the position. Raises UnavailableError,
        SessionLostError."""
        ...

    def changes(self) -> AsyncGenerator[Batch, None]:
        """Yield all changes after the last ``load``, by ascending position.

        An empty batch follows at least every ``FRESH_EVERY_S`` while ZooKeeper answers, and nothing
        while it does not. If changes were missed, everything is read again and the difference is
        yielded; a missed deletion has a version that is not below its zxid. Raises
        SessionLostError.
        """
        ...
