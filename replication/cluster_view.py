"""Which bookies there are, as this session last saw it: kept fresh by a watch, handed out as values."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property

import structlog

from ledgers.clock import Clock
from ledgers.errors import SessionLostError, UnavailableError
from ledgers.formats.bookie_info import Address
from ledgers.metadata import BookieId
from ledgers.registration import BookieView, Registration
from ledgers.store import Stat
from replication.orders import Orders

log = structlog.get_logger()

RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)  # no slots: the properties are computed once
class ClusterView:
    """Bookies and their cookies at one moment. Immutable."""

    bookies: BookieView
    cookies: Mapping[BookieId, Stat] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)

    @cached_property
    def writable(self) -> frozenset[BookieId]:
        return frozenset(self.bookies.writable)

    @cached_property
    def available(self) -> frozenset[BookieId]:
        """Writable or read-only: those that can be read from."""
        return frozenset(self.bookies.available)

    @cached_property
    def receiving(self) -> frozenset[BookieId]:
        """Writable, and neither draining nor under maintenance: the possible targets (rule S11)."""
        return self.writable - self.orders.draining.keys() - self.orders.maintenance.keys()

    def czxid(self, bookie: BookieId) -> int:
        """Of the bookie's registration, which tells one life of it from the next; 0: not registered."""
        registered = self.bookies.available.get(bookie)
        return 0 if registered is None else registered.czxid

    def initialised_after(self, zxid: int) -> frozenset[BookieId]:
        """Bookies whose identity (cookie) is younger than ``zxid``.

        Whatever stood in metadata before may have been wiped there: their "no" is not to be
        believed, and their ends prove nothing of the middle (rules S5, S6).
        """
        return frozenset(bookie for bookie, stat in self.cookies.items() if stat.czxid > zxid)


class ViewSource:
    """The current view. ``run`` keeps it fresh; ``changed`` counts the changes, for those who wait."""

    def __init__(self, registration: Registration, clock: Clock) -> None:
        self._registration = registration
        self._clock = clock
        self._current: ClusterView | None = None
        self._condition = asyncio.Condition()
        self._addresses: dict[BookieId, Address] = {}
        self._is_blind = False
        """The last try to read the list failed."""
        self.change_count = 0

    def resolve(self, bookie: BookieId) -> Address | None:
        """Where the bookie is, or was when last seen: an absent one is asked too (rule S13)."""
        return self._addresses.get(bookie)

    @property
    def current(self) -> ClusterView:
        """Raises UnavailableError before the first ``refresh``."""
        if self._current is None:
            raise UnavailableError("the list of bookies has not been read yet")
        return self._current

    async def refresh(self) -> ClusterView:
        """Read bookies and cookies now. Raises UnavailableError when the list cannot be trusted."""
        view = ClusterView(
            bookies=await self._registration.read(), cookies=await self._registration.cookies()
        )
        for bookie, registered in view.bookies.available.items():
            if registered.address is not None:
                self._addresses[bookie] = registered.address
        if view != self._current:
            async with self._condition:
                self._current = view
                self.change_count += 1
                self._condition.notify_all()
        return view

    async def wait_change(self, since: int) -> None:
        """Until ``change_count`` differs from ``since``."""
        async with self._condition:
            await self._condition.wait_for(lambda: self.change_count != since)

    async def run(self) -> None:
        """Refresh at every change, until cancelled. A failing read keeps the view as it is."""
        async with aclosing(self._registration.changes()) as changes:
            async for _ in changes:
                while not await self._try_refresh():
                    await self._clock.sleep(RETRY_S)

    async def _try_refresh(self) -> bool:
        try:
            await self.refresh()
        except SessionLostError:
            raise
        except UnavailableError as error:
            if not self._is_blind:  # told once, not at each try
                log.warning("bookies.unreadable", error=str(error))
            self._is_blind = True
            return False
        self._is_blind = False
        return True
