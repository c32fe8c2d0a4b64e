"""Where a server learns of the changes of one kind of object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.store import Event
from ledgers.tasks import until_answered, wait_woken, wake_on
from notifications.protocol import Change, Version
from notifications.versions import VersionTable

FRESH_EVERY_S: Final = 5.0
"""A source that hears everything says so at least this often."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All changes of a kind up to ``position`` that no earlier batch contained. Of an object with
    several changes, the last one is enough. Its version is None if it is only known that it is not
    above the position. Without changes, a batch proves that the source is fresh.

    ``horizon``: objects that do not exist may have been created and deleted again up to there,
    although no batch says so; 0: none. ``is_current``: False if later changes wait to be read, so
    that the batch does not prove anything about the present.
    """

    changes: list[Change]
    position: Version
    horizon: Version = 0
    is_current: bool = True


class Source(Protocol):
    """The changes of one kind of object. Rule W rests on it: every change whose zxid is not above
    the position of a batch is in that batch, in an earlier one, or in the table."""

    @property
    def kind(self) -> str: ...

    async def load(self) -> VersionTable:
        """Return the versions of all objects. The table is complete up to its position; earlier
        deletions are unknown, so the horizon is the position. Raises UnavailableError,
        UnauthorizedError, SessionLostError."""
        ...

    def changes(self) -> AsyncGenerator[Batch, None]:
        """Yield all changes after the last ``load``, by ascending position.

        An empty batch follows at least every ``FRESH_EVERY_S`` while ZooKeeper answers, and nothing
        while it does not. If changes were missed, everything is read again and the difference is
        yielded. Raises SessionLostError. Use it within ``aclosing``.
        """
        ...


async def follow(
    read: Callable[[], Awaitable[Batch]],
    watches: Sequence[AsyncGenerator[Event, None]],
    *,
    kind: str,
    clock: Clock,
) -> AsyncGenerator[Batch, None]:
    """Yield what ``read`` returns: at once, after events of the watches, which only save time, and
    every few seconds. A failed read is repeated. Raises SessionLostError."""
    wake = asyncio.Event()
    # Not a TaskGroup, which must not stay open across a yield, because another task may close the
    # generator. The ``finally`` below does its work.
    watching = [asyncio.ensure_future(wake_on(events, wake)) for events in watches]
    for task in watching:
        task.add_done_callback(lambda _: wake.set())
    try:
        while True:
            wake.clear()
            yield await until_answered(
                read,
                event="source.read_failed",
                clock=clock,
                errors=(UnavailableError, UnauthorizedError),
                kind=kind,
            )
            # The other half of the time is for the reading.
            await wait_woken(wake, timeout_s=FRESH_EVERY_S / 2)
            for task in watching:
                if task.done():
                    task.result()  # raises SessionLostError
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
