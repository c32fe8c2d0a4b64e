"""Operators' orders for the whole cluster: drains, maintenance windows, limits, holds, pauses of
the checks, retries, trusted identities, muted conditions; and the disable switch that Java's nodes
share, with the time when it ends.

Orders are versioned JSON below ``<ur>/bookmender/orders``. Commands write them, and the leader
writes safety holds. A writer names the version that it overwrites, so of two operators who change
the same order at once, one gets an error. Every session reads the orders through ``OrderStore`` as
part of its ``ClusterView``.

An unreadable order (of a later release, edited by hand, or denied by an ACL) is reported and never
stops a node. ``Order.in_doubt`` returns the careful order that applies instead, usually the
last one that this process could read (``OrderStore``). If there was none:

- a hold or a pause of the checks: it is in force, also if the last order said otherwise;
- a drain: it is in force, and fences no ledger;
- a maintenance window: it is in force until a day after it was written, or without an end if an ACL
  hides that time;
- limits: the settings of the node apply;
- retries: none is ordered;
- muted conditions: none is muted;
- the end of the disable switch: it does not end by itself;
- trusted identities: none is trusted, also if the last order said otherwise (rule S5).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar, cast

import structlog
from prometheus_client import Gauge

from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING
from ledgers.clock import Clock
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import ANY_VERSION, Event, EventKind, MetadataStore, Stat, children_if_any
from ledgers.tasks import until_answered
from replication.records import Count, Record, Stored, TimeMs
from replication.znodes import TIME_MS_MAX, ClusterPaths

TRIES_TOLD_S = 600.0
"""Time that an ordered retry is kept. So a node that had lost its connection sees it, even if other
retries were ordered since."""
TRIES_TOLD_MAX = 1_000
WINDOW_IN_DOUBT_MS = 86_400_000
"""Length of a maintenance window that cannot be read. It has an end, because the bookie may be lost
for good, unless an ACL hides when it was written."""

LIMIT_RANGES: Mapping[str, tuple[int, int]] = {
    "bytes_per_s": (0, 10**12),
    "entries_per_s": (0, 10**9),
    "reads_in_flight_per_bookie": (1, READS_IN_FLIGHT_CEILING),
    "requests_per_s": (0, 1_000_000),
}
"""Minimum and maximum of each number in ``LimitsOrder``, equal to those of the setting of that
name."""


class Order(Record):
    """Base of the orders."""

    __slots__ = ()

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> Self | None:
        """Return the order that applies while its znode is unreadable; None: none applies.
        ``last``: the last that could be read."""
        return last


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder(Order):
    """Copy everything that the bookie stores to other bookies, while it serves (rule S16)."""

    since_ms: TimeMs
    may_fence: bool = False
    """True: recover and close its open ledgers. False: wait until they are closed."""

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> Self:
        return last or cls(since_ms=stat.mtime_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow(Order):
    """The bookie may be absent until ``until_ms`` (wall-clock). It is neither lost nor a target."""

    since_ms: TimeMs
    until_ms: TimeMs
    reason: str = ""

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> Self:
        # The unreadable window may be longer than the last. 0: an ACL hides when it was written.
        since_ms, end_ms = stat.mtime_ms, stat.mtime_ms + WINDOW_IN_DOUBT_MS
        if last is not None:
            return replace(last, until_ms=max(last.until_ms, end_ms if since_ms else 0))
        until_ms = end_ms if since_ms else TIME_MS_MAX
        return cls(since_ms=since_ms, until_ms=until_ms, reason="the order cannot be read")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsOrder(Order):
    """Limits for every node, which replace the limits in its settings. None: the setting of the
    node applies. 0: no limit."""

    bytes_per_s: int | None = None
    entries_per_s: int | None = None
    reads_in_flight_per_bookie: int | None = None
    requests_per_s: int | None = None
    yields_to_writers: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no setting allows: unreadable (rule S10)."""
        for key, (least, most) in LIMIT_RANGES.items():
            number: int | None = getattr(self, key)
            if number is not None and not least <= number <= most:
                raise ValueError(f"{key} is not between {least} and {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrder(Order):
    """A safety hold: nothing is marked or fenced. If released, these bookies cause no new hold.

    ``bookies``: the absent bookies when it was written. ``until_ms``: wall-clock; None: until it is
    ended. ``is_by_operator``: it stays in force even if the bookies return.
    """

    since_ms: TimeMs
    until_ms: TimeMs | None = None
    bookies: tuple[BookieId, ...] = ()
    reason: str = ""
    is_by_operator: bool = False
    is_released: bool = False

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> Self:
        # An unneeded hold only costs time, while unneeded fencing stops writers.
        reason = "the order cannot be read, so a hold is assumed"
        return cls(since_ms=stat.mtime_ms, reason=reason, is_by_operator=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksOrder(Order):
    """The periodic checks are paused while this order exists."""

    since_ms: TimeMs

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> Self:
        return cls(since_ms=stat.mtime_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesOrder(Order):
    """Marked ledgers that must be retried now, and when that was ordered (wall-clock). Each node
    acts on each order once."""

    ordered_ms: Mapping[Count, TimeMs] = field(default_factory=dict)

    def with_ledger(self, ledger_id: int, *, now_ms: int) -> Self:
        """Return an order with one more ledger, and without the old ones."""
        told = {i: ms for i, ms in self.ordered_ms.items() if now_ms - ms <= TRIES_TOLD_S * 1000}
        told.pop(ledger_id, None)
        others = sorted(told.items(), key=lambda each: each[1])[-TRIES_TOLD_MAX + 1 :]
        return replace(self, ordered_ms=dict([*others, (ledger_id, now_ms)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentitiesOrder(Order):
    """These bookies were not reformatted, although their cookies are newer than ledgers.

    A cookie that is newer than a ledger usually means that the bookie was reformatted. That is
    wrong after ZooKeeper was imported by a tool that creates znodes again, or after bookie ids were
    changed (``updatecookie``). ``cookies``: the czxid of each bookie's cookie when the order was
    given. The order does not apply to a bookie whose cookie was replaced since.
    """

    since_ms: TimeMs
    cookies: Mapping[BookieId, Count] = field(default_factory=dict)

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """A condition of ``bookmender status`` that an operator muted until ``until_ms``.

    ``severity`` and ``subjects``: of the condition when it was muted. The mute does not apply while
    the condition is more severe, or is about something else, such as another lost bookie.
    """

    since_ms: TimeMs
    until_ms: TimeMs
    severity: str
    subjects: tuple[str, ...] = ()
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutesOrder(Order):
    """The muted conditions, by code."""

    by_code: Mapping[str, Mute] = field(default_factory=dict)

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DisableEndOrder(Order):
    """The leader enables auto-recovery again at ``until_ms``, if the disable znode still has this
    version. Without an end nobody does, and a znode that was created since has version 0."""

    until_ms: TimeMs
    version: Count

    @classmethod
    def in_doubt(cls, stat: Stat, last: Self | None) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All orders at one moment. In a ``ClusterView``, without maintenance windows that are over."""

    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    maintenance: Mapping[BookieId, MaintenanceWindow] = field(default_factory=dict)
    limits: LimitsOrder = field(default_factory=LimitsOrder)
    hold: HoldOrder | None = None
    """May be a released hold; see ``is_held``."""
    paused_checks: ChecksOrder | None = None
    tries: TriesOrder = field(default_factory=TriesOrder)
    identities: IdentitiesOrder | None = None
    unreadable: tuple[str, ...] = ()
    """Paths of existing orders that cannot be read."""

    @property
    def is_held(self) -> bool:
        """True if nothing may be marked or fenced."""
        return self.hold is not None and not self.hold.is_released

    def at(self, now_ms: int) -> "Orders":
        """Return the orders in force then. A hold that is over is released. Ends are exclusive."""
        current = {b: window for b, window in self.maintenance.items() if now_ms < window.until_ms}
        hold = self.hold
        if hold is not None and hold.until_ms is not None and hold.until_ms <= now_ms:
            hold = replace(hold, is_released=True)
        if len(current) == len(self.maintenance) and hold == self.hold:
            return self
        return replace(self, maintenance=current, hold=hold)

    @property
    def trusted_cookies(self) -> Mapping[BookieId, int]:
        """The czxid of each cookie that an ``IdentitiesOrder`` trusts."""
        return {} if self.identities is None else self.identities.cookies

    @property
    def next_end_ms(self) -> int | None:
        """Return when the first maintenance window or the hold ends; None if nothing ends."""
        ends_ms = [window.until_ms for window in self.maintenance.values()]
        if self.hold is not None and self.hold.until_ms is not None and self.is_held:
            ends_ms.append(self.hold.until_ms)
        return min(ends_ms, default=None)


log = structlog.get_logger()
DISABLED = Gauge(
    "bookmender_disabled",
    "1 while auto-recovery is disabled for the cluster, or while this node cannot read that.",
)


T = TypeVar("T", bound=Order)


@dataclass(frozen=True, slots=True)
class OrderZnode(Generic[T]):
    """The znode of one order."""

    path: str
    kind: type[T]


def drain_znode(paths: ClusterPaths, bookie: BookieId) -> OrderZnode[DrainOrder]:
    return OrderZnode(f"{paths.draining_orders}/{bookie}", DrainOrder)


def maintenance_znode(paths: ClusterPaths, bookie: BookieId) -> OrderZnode[MaintenanceWindow]:
    return OrderZnode(f"{paths.maintenance_orders}/{bookie}", MaintenanceWindow)


def limits_znode(paths: ClusterPaths) -> OrderZnode[LimitsOrder]:
    return OrderZnode(f"{paths.orders}/limits", LimitsOrder)


def hold_znode(paths: ClusterPaths) -> OrderZnode[HoldOrder]:
    return OrderZnode(f"{paths.orders}/hold", HoldOrder)


def checks_znode(paths: ClusterPaths) -> OrderZnode[ChecksOrder]:
    return OrderZnode(f"{paths.orders}/checks", ChecksOrder)


def tries_znode(paths: ClusterPaths) -> OrderZnode[TriesOrder]:
    return OrderZnode(f"{paths.orders}/tries", TriesOrder)


def identities_znode(paths: ClusterPaths) -> OrderZnode[IdentitiesOrder]:
    return OrderZnode(f"{paths.orders}/identities", IdentitiesOrder)


def mutes_znode(paths: ClusterPaths) -> OrderZnode[MutesOrder]:
    return OrderZnode(f"{paths.orders}/mutes", MutesOrder)


def disable_end_znode(paths: ClusterPaths) -> OrderZnode[DisableEndOrder]:
    return OrderZnode(f"{paths.orders}/disable-end", DisableEndOrder)


@dataclass(slots=True, eq=False)
class OrderStore:
    """One session's access to the orders."""

    store: MetadataStore
    paths: ClusterPaths
    last: dict[str, Record] = field(default_factory=dict)
    """By path, the last order that could be read. A process passes the same one to all its
    sessions, so the end of a session forgets no order."""
    _reported: dict[str, int] = field(default_factory=dict, init=False)
    """By path, the mzxid of the unreadable order that was logged last."""

    async def read(self) -> Orders:
        """Return all orders that apply to nodes, including maintenance windows that are over."""
        unreadable: list[str] = []
        paths = self.paths
        (draining, maintenance), (limits, hold, checks, tries, identities) = await asyncio.gather(
            asyncio.gather(
                self._each(paths.draining_orders, drain_znode, unreadable),
                self._each(paths.maintenance_orders, maintenance_znode, unreadable),
            ),
            asyncio.gather(
                self._readable(limits_znode(paths), unreadable),
                self._readable(hold_znode(paths), unreadable),
                self._readable(checks_znode(paths), unreadable),
                self._readable(tries_znode(paths), unreadable),
                self._readable(identities_znode(paths), unreadable),
            ),
        )
        return Orders(
            draining=draining,
            maintenance=maintenance,
            limits=limits or LimitsOrder(),
            hold=hold,
            paused_checks=checks,
            tries=tries or TriesOrder(),
            identities=identities,
            unreadable=tuple(sorted(unreadable)),
        )

    def changes(self) -> AsyncGenerator[Event, None]:
        """Yield at once, and after changes of any order. Changes in quick succession are merged."""
        return self.store.watch(self.paths.orders, is_recursive=True, events_max=1)

    async def stored(self, znode: OrderZnode[T]) -> Stored[T] | None:
        """Read one order. Returns None if it does not exist. The value of an unreadable one is the
        order that applies instead; None: none applies."""
        stat = None
        try:
            data, stat = await self.store.get(znode.path)
            order = self.last[znode.path] = znode.kind.parse(data)
            return Stored(value=order, stat=stat)
        except NoNodeError:
            self.last.pop(znode.path, None)
            return None
        except (UnauthorizedError, CorruptionError) as error:
            if stat is None:
                try:
                    stat = await self.store.exists(znode.path)
                except UnauthorizedError:  # so does ZooKeeper 3.9.5; only its existence is known
                    stat = Stat(version=ANY_VERSION)
                if stat is None:
                    return None
            self._report(znode.path, stat.mzxid, error)
            last = cast(T | None, self.last.get(znode.path))
            return Stored(value=znode.kind.in_doubt(stat, last), stat=stat, error=error)

    async def give(self, znode: OrderZnode[T], order: T, *, over: Stored[T] | None) -> None:
        """Write an order over ``over``, the one that was read before. Raises ConflictError if the
        order was changed since."""
        try:
            if over is None:
                await self.store.create(znode.path, order.to_json(), with_parents=True)
            else:
                await self.store.set(znode.path, order.to_json(), version=over.version)
        except (NodeExistsError, NoNodeError, ConflictError) as error:
            raise ConflictError("another client has just changed it", order=znode.path) from error

    async def withdraw(self, znode: OrderZnode[T], *, over: Stored[T]) -> None:
        """Delete an order, if it still exists. Raises ConflictError if it was changed."""
        with suppress(NoNodeError):
            await self.store.delete(znode.path, version=over.version)

    async def _each(
        self,
        parent: str,
        znode_of: Callable[[ClusterPaths, BookieId], OrderZnode[T]],
        unreadable: list[str],
    ) -> dict[BookieId, T]:
        """Return the orders below ``parent`` by bookie. Adds ``parent`` to ``unreadable`` if access
        is denied, and orders whose name is no bookie ID: no command could withdraw them.

        If the orders cannot be listed, those that were read before are read again (rule S8).
        """
        last = [p.removeprefix(f"{parent}/") for p in list(self.last) if p.startswith(f"{parent}/")]
        try:
            names = sorted(await children_if_any(self.store, parent))
            for name in set(last).difference(names):
                self.last.pop(f"{parent}/{name}", None)
        except UnauthorizedError as error:
            self._report(parent, 0, error)
            unreadable.append(parent)
            names = sorted(last)
        bookies = []
        for name in names:
            try:
                bookies.append(parse_bookie_id(name))
            except CorruptionError as error:
                self._report(f"{parent}/{name}", 0, error)
                unreadable.append(f"{parent}/{name}")
        found = await asyncio.gather(
            *(self._readable(znode_of(self.paths, bookie), unreadable) for bookie in bookies)
        )
        return {b: order for b, order in zip(bookies, found, strict=True) if order is not None}

    async def _readable(self, znode: OrderZnode[T], unreadable: list[str]) -> T | None:
        """Return the order that applies, or None. Adds an unreadable one to ``unreadable``."""
        stored = await self.stored(znode)
        if stored is None:
            return None
        if stored.is_unreadable:
            unreadable.append(znode.path)
        return stored.value

    def _report(self, path: str, mzxid: int, error: BookmenderError) -> None:
        if self._reported.get(path) != mzxid:  # log once, not at each reading
            self._reported[path] = mzxid
            log.warning(
                "order.unreadable",
                path=path,
                error=str(error),
                next_step="give the order again, or delete its znode",
            )


@dataclass(slots=True, eq=False)
class DisableSwitch:
    """The disable switch (``<ur>/disable``), watched because polling by many nodes is expensive."""

    store: MetadataStore
    paths: ClusterPaths
    clock: Clock
    is_ignored: bool = False
    """For repairs by hand: the switch disables only automatic repairs."""
    may_lease: bool = field(default=True, init=False)
    """True if the switch was off when it was last read, and no attempt to read it has failed since.
    While it is False, no lock is created, not even for a lease whose transaction waits in the
    batcher already."""
    _is_watched: bool = field(default=False, init=False)

    async def is_on(self) -> bool:
        """Return True if auto-recovery is disabled. Reads the znode only while it is not watched.
        Raises UnavailableError."""
        if self.is_ignored:
            return False
        if not self._is_watched:
            await self._read()
        return not self.may_lease

    async def watch(self) -> AsyncGenerator[None, None]:
        """Keep ``may_lease`` up to date, and yield after each reading. Ends with the session."""
        if self.is_ignored:
            return
        async with aclosing(self.store.watch(self.paths.disable)) as events:
            try:
                async for event in events:
                    if event.kind is EventKind.RESET:  # our knowledge may be old until it is read
                        self._is_watched = False
                    if event.kind is EventKind.CREATED:  # no lock while it is being read
                        self.may_lease = False
                    await until_answered(
                        self._read, event="disable_switch.read_failed", clock=self.clock
                    )
                    self._is_watched = True
                    yield
            finally:
                self._is_watched = False

    async def _read(self) -> None:
        """Read the switch. If it is unreadable, it counts as on (rule S8). If access is denied, it
        exists."""
        try:
            self.may_lease = await self.store.exists(self.paths.disable) is None
        except UnauthorizedError as error:
            self.may_lease = False
            log.warning("disable_switch.access_denied", path=self.paths.disable, error=str(error))
        except (UnavailableError, SessionLostError):
            self.may_lease = self._is_watched = False
            raise
        finally:
            DISABLED.set(not self.may_lease)
