"""Where the orders stand in ZooKeeper: read by every session of ours, written by commands.

Whoever writes one names the version of what it overwrites, so that of two operators who change the
same thing at once one is told.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
)
from ledgers.metadata import BookieId
from ledgers.store import ANY_VERSION, Event, MetadataStore, Stat, children_if_any
from replication.cluster.orders import (
    ChecksOrder,
    DrainOrder,
    HoldOrder,
    IdentitiesOrder,
    LimitsOrder,
    MaintenanceWindow,
    Orders,
    TriesOrder,
)
from replication.cluster.own_state import orders_path

log = structlog.get_logger()


class Order(Protocol):
    def to_json(self) -> bytes: ...


T = TypeVar("T", bound=Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Generic[T]):
    """The znode of one order, and how its bytes are read.

    ``in_doubt``: gives what is kept to where they cannot be read; None: nothing is.
    """

    path: str
    parse: Callable[[bytes], T]
    in_doubt: Callable[[Stat], T] | None = None


def drain_place(ur: str, bookie: BookieId) -> Place[DrainOrder]:
    return Place(path=f"{draining_path(ur)}/{bookie}", parse=DrainOrder.parse)


def maintenance_place(ur: str, bookie: BookieId) -> Place[MaintenanceWindow]:
    return Place(path=f"{maintenance_path(ur)}/{bookie}", parse=MaintenanceWindow.parse)


def limits_place(ur: str) -> Place[LimitsOrder]:
    return Place(path=f"{orders_path(ur)}/limits", parse=LimitsOrder.parse)


def hold_place(ur: str) -> Place[HoldOrder]:
    return Place(
        path=f"{orders_path(ur)}/hold",
        parse=HoldOrder.parse,
        in_doubt=lambda stat: HoldOrder.unreadable(since_ms=stat.mtime_ms),
    )


def checks_place(ur: str) -> Place[ChecksOrder]:
    return Place(
        path=f"{orders_path(ur)}/checks",
        parse=ChecksOrder.parse,
        in_doubt=lambda stat: ChecksOrder(since_ms=stat.mtime_ms),
    )


def tries_place(ur: str) -> Place[TriesOrder]:
    return Place(path=f"{orders_path(ur)}/tries", parse=TriesOrder.parse)


def identities_place(ur: str) -> Place[IdentitiesOrder]:
    return Place(path=f"{orders_path(ur)}/identities", parse=IdentitiesOrder.parse)


def draining_path(ur: str) -> str:
    return f"{orders_path(ur)}/draining"


def maintenance_path(ur: str) -> str:
    return f"{orders_path(ur)}/maintenance"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingOrder(Generic[T]):
    """An order as it stands. ``version``: its znode's, any where ACLs shut that away.

    ``order``: where this release cannot read it, what is kept to instead; None: nothing is.
    """

    order: T | None
    version: int
    is_readable: bool = True


class OrderBook:
    """One session's access to the orders."""

    def __init__(self, store: MetadataStore, ur: str) -> None:
        self._store, self._ur = store, ur
        self._reported: dict[str, int] = {}
        """By path, the last write (mzxid) of an order that was said to be unreadable."""
        self._last = Orders()
        """As ``read`` gave them."""

    async def read(self) -> Orders:
        """All that is kept to, ended windows included.

        Limits that cannot be read are those that were in force before: a slip must not let every
        node run at full speed. Likewise drains and windows that cannot be listed: they may well
        stand (rule S8). A session that has seen none before keeps to its settings, and knows of no
        drain or window.
        """
        unreadable: list[str] = []
        identities_read = self._readable(identities_place(self._ur), unreadable)
        (draining, maintenance, limits, hold, checks, tries), identities = await asyncio.gather(
            asyncio.gather(
                self._each(draining_path(self._ur), drain_place, unreadable),
                self._each(maintenance_path(self._ur), maintenance_place, unreadable),
                self._readable(limits_place(self._ur), unreadable),
                self._readable(hold_place(self._ur), unreadable),
                self._readable(checks_place(self._ur), unreadable),
                self._readable(tries_place(self._ur), unreadable),
            ),
            identities_read,
        )
        if limits_place(self._ur).path in unreadable:
            limits = self._last.limits
        if draining_path(self._ur) in unreadable:
            draining = dict(self._last.draining)
        if maintenance_path(self._ur) in unreadable:
            maintenance = dict(self._last.maintenance)
        self._last = Orders(
            draining=draining,
            maintenance=maintenance,
            limits=limits or LimitsOrder(),
            hold=hold,
            paused_checks=checks,
            tries=tries or TriesOrder(),
            identities=identities,
            unreadable=tuple(sorted(unreadable)),
        )
        return self._last

    def changes(self) -> AsyncGenerator[Event, None]:
        """Something happened to some order; the first comes at once. One watch for all of them.

        What happens while nobody asks for the next one makes a single one together, or two.
        """
        return self._store.watch(orders_path(self._ur), is_recursive=True, events_max=1)

    async def standing(self, place: Place[T]) -> StandingOrder[T] | None:
        """None when there is no such order."""
        try:
            data, stat = await self._store.get(place.path)
        except NoNodeError:
            return None
        except UnauthorizedError as error:
            there = await self._stat_if_allowed(place.path)
            return None if there is None else self._unreadable(place, there, error)
        try:
            return StandingOrder(order=place.parse(data), version=stat.version)
        except CorruptionError as error:
            return self._unreadable(place, stat, error)

    async def give(self, place: Place[T], order: T, *, over: StandingOrder[T] | None) -> None:
        """Write it in the place of ``over``, what stood there when the decision was made.

        Raises ConflictError: somebody else was quicker.
        """
        try:
            if over is None:
                await self._store.create(place.path, order.to_json(), with_parents=True)
            else:
                await self._store.set(place.path, order.to_json(), version=over.version)
        except (NodeExistsError, NoNodeError, ConflictError) as error:
            raise ConflictError("somebody else has just changed it", order=place.path) from error

    async def withdraw(self, place: Place[T], *, over: StandingOrder[T]) -> None:
        """Delete it; one that is gone already is success. Raises ConflictError."""
        with suppress(NoNodeError):
            await self._store.delete(place.path, version=over.version)

    async def _each(
        self,
        parent: str,
        place_of: Callable[[str, BookieId], Place[T]],
        unreadable: list[str],
    ) -> dict[BookieId, T]:
        """By bookie. Where they cannot be listed ``parent`` is added to ``unreadable``."""
        try:
            names = sorted(await children_if_any(self._store, parent))
        except UnauthorizedError as error:
            self._report(parent, 0, error)
            unreadable.append(parent)
            return {}
        bookies = [BookieId(name) for name in names]
        found = await asyncio.gather(
            *(self._readable(place_of(self._ur, bookie), unreadable) for bookie in bookies)
        )
        return {b: order for b, order in zip(bookies, found, strict=True) if order is not None}

    async def _readable(self, place: Place[T], unreadable: list[str]) -> T | None:
        """What is kept to, if anything. One that cannot be read is added to ``unreadable``."""
        standing = await self.standing(place)
        if standing is None:
            return None
        if not standing.is_readable:
            unreadable.append(place.path)
        return standing.order

    async def _stat_if_allowed(self, path: str) -> Stat | None:
        """None when the order is gone. Newer ZooKeepers (3.9.5) forbid this, too: then only that it
        is there is known."""
        try:
            return await self._store.exists(path)
        except UnauthorizedError:
            return Stat(version=ANY_VERSION)

    def _unreadable(self, place: Place[T], stat: Stat, error: BookmenderError) -> StandingOrder[T]:
        self._report(place.path, stat.mzxid, error)
        order = None if place.in_doubt is None else place.in_doubt(stat)
        return StandingOrder(order=order, version=stat.version, is_readable=False)

    def _report(self, path: str, mzxid: int, error: BookmenderError) -> None:
        if self._reported.get(path) != mzxid:  # once, not at each reading
            self._reported[path] = mzxid
            log.warning("order.unreadable", path=path, error=str(error))
