"""The switch by which operators stop auto-recovery, Java's and ours: ``<ur>/disable``, there or
not."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from ledgers.answers import until_answered
from ledgers.clock import Clock
from ledgers.errors import (
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import EventKind, MetadataStore
from replication.queue import payloads

log = structlog.get_logger()


class DisableSwitch:
    """What one session knows of it: with many nodes it is not to be asked for at each look."""

    def __init__(self, store: MetadataStore, ur: str, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._path = payloads.disable_path(ur)
        self._is_watched = False
        self.may_take = True
        """Whether the switch was off when it was last read, and no attempt to read it has failed
        since. While it is False no lock is asked for, not even by a take that was begun before and
        whose turn comes only now."""

    async def is_on(self) -> bool:
        """Read only while nothing tells of its changes (``watch``). Raises UnavailableError."""
        if not self._is_watched:
            await self._read()
        return not self.may_take

    async def watch(self) -> AsyncGenerator[None, None]:
        """Keep ``may_take`` as the switch says; tells of each time it was read. Ends with the
        session."""
        async with aclosing(self._store.watch(self._path)) as events:
            try:
                async for event in events:
                    if event.kind is EventKind.RESET:  # what we know may be old until it is read
                        self._is_watched = False
                    if event.kind is EventKind.CREATED:  # locks could be asked for while it is read
                        self.may_take = False
                    await until_answered(
                        self._read, event="disable_switch.unread", clock=self._clock
                    )
                    self._is_watched = True
                    yield
            finally:
                self._is_watched = False

    async def _read(self) -> None:
        """One that cannot be read may be on: nothing is begun before it is known to be off (rule
        S8). One that ACLs shut away is there."""
        try:
            self.may_take = await self._store.exists(self._path) is None
        except UnauthorizedError as error:
            self.may_take = False
            log.warning("disable_switch.shut_away", path=self._path, error=str(error))
        except (UnavailableError, SessionLostError):
            self.may_take = self._is_watched = False
            raise


class UnheededSwitch(DisableSwitch):
    """For what somebody asked for by hand: the switch is about what nobody asked for."""

    async def is_on(self) -> bool:
        return False

    async def watch(self) -> AsyncGenerator[None, None]:
        never: tuple[None, ...] = ()
        for event in never:
            yield event
