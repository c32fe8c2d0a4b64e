"""What operators order for the whole cluster: drains, maintenance windows, limits, holds, pauses of
the checks, retries, trusted identities; and the disable switch that Java's nodes share.

Orders are versioned JSON below ``<ur>/bookmender/orders``. Commands write them, and the leader
writes safety holds. A writer names the version that it overwrites, so of two operators who change
the same order at once, one gets an error. Every session reads the orders through ``OrderStore`` as
part of its ``ClusterView``.

An unreadable order (of a later release, or edited by hand) is reported and never stops a node:

- unreadable limits: the limits that were read before stay in force;
- an unreadable hold or pause of the checks: it is in force;
- drains or maintenance windows that cannot be listed: those that were read before stay in force;
- any other order: it is ignored.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import structlog

from ledgers.clock import Clock
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
from replication.znodes import (
    ClusterPaths,
    bool_field,
    int_field,
    ledger_id_of_name,
    object_field,
    parse_record,
    text_field,
    texts_field,
    time_field,
)

VERSION = 1
"""Version of every order. It is raised when older releases would misunderstand an order, and not
for fields that they may ignore."""

TRIES_TOLD_S = 600.0
"""How long an ordered retry is kept, so that a node that had lost its connection learns of it, even
if other retries were ordered since."""
TRIES_TOLD_MAX = 1_000

LIMIT_RANGES: Mapping[str, tuple[int, int]] = {
    "bytes_per_s": (0, 10**12),
    "entries_per_s": (0, 10**9),
    "reads_in_flight_per_bookie": (1, 500),
    "requests_per_s": (0, 1_000_000),
}
"""Minimum and maximum of each number in ``LimitsOrder``, equal to those of the setting of that
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Copy everything that the bookie stores to other bookies, while it serves (rule S16)."""

    since_ms: int
    may_fence: bool = False
    """True: recover and close its open ledgers. False: wait until they are closed."""

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_field(record, "since_ms"),
            may_fence=_holds(record, "may_fence") and bool_field(record, "may_fence"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """The bookie may be absent until ``until_ms`` (wall-clock). It is neither lost nor a target."""

    since_ms: int
    until_ms: int
    reason: str = ""

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_field(record, "since_ms"),
            until_ms=time_field(record, "until_ms"),
            reason=text_field(record, "reason") if "reason" in record else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsOrder:
    """Limits of each node instead of its settings. None: as in the settings. 0: no limit."""

    bytes_per_s: int | None = None
    entries_per_s: int | None = None
    reads_in_flight_per_bookie: int | None = None
    requests_per_s: int | None = None
    yields_to_writers: bool | None = None

    def to_json(self) -> bytes:
        return _to_json({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError, also for a number that the settings would not allow (rule S10)."""
        record = _record(data)
        numbers = {
            key: int_field(record, key, least=least, most=most)
            for key, (least, most) in LIMIT_RANGES.items()
            if _holds(record, key)
        }
        yields = "yields_to_writers"
        return cls(
            **numbers,
            yields_to_writers=bool_field(record, yields) if _holds(record, yields) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrder:
    """A safety hold: nothing is marked or fenced. If released, these bookies cause no new hold.

    ``bookies``: the absent bookies when it was written. ``until_ms``: wall-clock; None: until it is
    ended. ``is_by_operator``: stays in force whatever the bookies do.
    """

    since_ms: int
    until_ms: int | None = None
    bookies: tuple[BookieId, ...] = ()
    reason: str = ""
    is_by_operator: bool = False
    is_released: bool = False

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_field(record, "since_ms"),
            until_ms=time_field(record, "until_ms") if _holds(record, "until_ms") else None,
            bookies=tuple(BookieId(each) for each in texts_field(record, "bookies")),
            reason=text_field(record, "reason") if _holds(record, "reason") else "",
            is_by_operator=bool_field(record, "is_by_operator"),
            is_released=bool_field(record, "is_released"),
        )

    @classmethod
    def unreadable(cls, *, since_ms: int) -> Self:
        """Return the hold that replaces an unreadable order. An unneeded hold only costs time,
        while unneeded fencing stops writers. ``since_ms``: when the order was written."""
        reason = "the order cannot be read, so a hold is assumed"
        return cls(since_ms=since_ms, reason=reason, is_by_operator=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksOrder:
    """The periodic checks are paused while this order exists."""

    since_ms: int

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        return cls(since_ms=time_field(_record(data), "since_ms"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesOrder:
    """Marked ledgers that must be retried now, and when that was ordered (wall-clock). Each node
    acts on each order once."""

    ordered_ms: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return _to_json({"ledgers": {str(i): ms for i, ms in self.ordered_ms.items()}})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        told = object_field(_record(data), "ledgers")
        ordered_ms = {ledger_id_of_name(name): time_field(told, name) for name in told}
        return cls(ordered_ms={i: ms for i, ms in ordered_ms.items() if i is not None})

    def with_ledger(self, ledger_id: int, *, now_ms: int) -> Self:
        """Return an order with one more ledger, and without the old ones."""
        told = {i: ms for i, ms in self.ordered_ms.items() if now_ms - ms <= TRIES_TOLD_S * 1000}
        told.pop(ledger_id, None)  # the latest comes last
        latest = [*told.items(), (ledger_id, now_ms)][-TRIES_TOLD_MAX:]
        return replace(self, ordered_ms=dict(latest))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentitiesOrder:
    """These bookies were not reformatted, although their cookies are newer than ledgers.

    A cookie that is newer than a ledger usually means that the bookie was reformatted. That is
    wrong after ZooKeeper was imported by a tool that creates znodes again, or after bookie ids were
    changed (``updatecookie``). ``cookies``: the czxid of each bookie's cookie when the order was
    given. The order does not apply to a bookie whose cookie was replaced since.
    """

    since_ms: int
    cookies: Mapping[BookieId, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return _to_json({"since_ms": self.since_ms, "cookies": dict(self.cookies)})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        cookies = object_field(record, "cookies")
        return cls(
            since_ms=time_field(record, "since_ms"),
            cookies={BookieId(bookie): int_field(cookies, bookie) for bookie in cookies},
        )


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
        """Return the orders in force at that time. A hold that is over becomes a released one. Ends
        are exclusive."""
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
        """When the first maintenance window or the hold ends; None if nothing ends."""
        ends_ms = [window.until_ms for window in self.maintenance.values()]
        if self.hold is not None and self.hold.until_ms is not None and self.is_held:
            ends_ms.append(self.hold.until_ms)
        return min(ends_ms, default=None)


def _to_json(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **fields}).encode()


def _holds(record: Mapping[str, Any], key: str) -> bool:
    """Return True if an optional field is present and not null."""
    return record.get(key) is not None


def _record(data: bytes) -> dict[str, Any]:
    record = parse_record(data)
    if record.get("version") != VERSION:
        raise CorruptionError("an order of a kind that this release does not know", data=data[:80])
    return record


log = structlog.get_logger()


class Order(Protocol):
    def to_json(self) -> bytes: ...


T = TypeVar("T", bound=Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderZnode(Generic[T]):
    """The znode of one order, and how to parse it.

    ``in_doubt``: returns the order that applies if the znode is unreadable; None: none applies.
    """

    path: str
    parse: Callable[[bytes], T]
    in_doubt: Callable[[Stat], T] | None = None


def drain_znode(paths: ClusterPaths, bookie: BookieId) -> OrderZnode[DrainOrder]:
    return OrderZnode(path=f"{paths.draining_orders}/{bookie}", parse=DrainOrder.parse)


def maintenance_znode(paths: ClusterPaths, bookie: BookieId) -> OrderZnode[MaintenanceWindow]:
    return OrderZnode(path=f"{paths.maintenance_orders}/{bookie}", parse=MaintenanceWindow.parse)


def limits_znode(paths: ClusterPaths) -> OrderZnode[LimitsOrder]:
    return OrderZnode(path=f"{paths.orders}/limits", parse=LimitsOrder.parse)


def hold_znode(paths: ClusterPaths) -> OrderZnode[HoldOrder]:
    return OrderZnode(
        path=f"{paths.orders}/hold",
        parse=HoldOrder.parse,
        in_doubt=lambda stat: HoldOrder.unreadable(since_ms=stat.mtime_ms),
    )


def checks_znode(paths: ClusterPaths) -> OrderZnode[ChecksOrder]:
    return OrderZnode(
        path=f"{paths.orders}/checks",
        parse=ChecksOrder.parse,
        in_doubt=lambda stat: ChecksOrder(since_ms=stat.mtime_ms),
    )


def tries_znode(paths: ClusterPaths) -> OrderZnode[TriesOrder]:
    return OrderZnode(path=f"{paths.orders}/tries", parse=TriesOrder.parse)


def identities_znode(paths: ClusterPaths) -> OrderZnode[IdentitiesOrder]:
    return OrderZnode(path=f"{paths.orders}/identities", parse=IdentitiesOrder.parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedOrder(Generic[T]):
    """An order as it was read. ``version``: of its znode; ANY_VERSION if access is denied.

    ``order``: if the znode is unreadable, the order that applies instead; None: none applies.
    """

    order: T | None
    version: int
    is_readable: bool = True


class OrderStore:
    """One session's access to the orders."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths) -> None:
        self._store, self._paths = store, paths
        self._reported: dict[str, int] = {}
        """By path, the mzxid of the unreadable order that was logged last."""
        self._last = Orders()
        """The result of the last ``read``."""

    async def read(self) -> Orders:
        """Return all orders that apply, including maintenance windows that are over.

        If limits are unreadable, the former ones apply, because a mistake must not let every node
        run at full speed. If drains or windows cannot be listed, the former ones apply as well
        (rule S8). A session that has read none before uses its settings, without drains and
        windows.
        """
        unreadable: list[str] = []
        identities_read = self._readable(identities_znode(self._paths), unreadable)
        (draining, maintenance, limits, hold, checks, tries), identities = await asyncio.gather(
            asyncio.gather(
                self._each(self._paths.draining_orders, drain_znode, unreadable),
                self._each(self._paths.maintenance_orders, maintenance_znode, unreadable),
                self._readable(limits_znode(self._paths), unreadable),
                self._readable(hold_znode(self._paths), unreadable),
                self._readable(checks_znode(self._paths), unreadable),
                self._readable(tries_znode(self._paths), unreadable),
            ),
            identities_read,
        )
        if limits_znode(self._paths).path in unreadable:
            limits = self._last.limits
        if self._paths.draining_orders in unreadable:
            draining = dict(self._last.draining)
        if self._paths.maintenance_orders in unreadable:
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
        """Yield at once, and after changes of any order. Changes in quick succession are merged."""
        return self._store.watch(self._paths.orders, is_recursive=True, events_max=1)

    async def stored(self, znode: OrderZnode[T]) -> VersionedOrder[T] | None:
        """Read one order. Returns None if it does not exist."""
        try:
            data, stat = await self._store.get(znode.path)
        except NoNodeError:
            return None
        except UnauthorizedError as error:
            there = await self._stat_if_allowed(znode.path)
            return None if there is None else self._unreadable(znode, there, error)
        try:
            return VersionedOrder(order=znode.parse(data), version=stat.version)
        except CorruptionError as error:
            return self._unreadable(znode, stat, error)

    async def give(self, znode: OrderZnode[T], order: T, *, over: VersionedOrder[T] | None) -> None:
        """Write an order over ``over``, the one that was read before.

        Raises ConflictError if the order was changed since.
        """
        try:
            if over is None:
                await self._store.create(znode.path, order.to_json(), with_parents=True)
            else:
                await self._store.set(znode.path, order.to_json(), version=over.version)
        except (NodeExistsError, NoNodeError, ConflictError) as error:
            raise ConflictError("somebody else has just changed it", order=znode.path) from error

    async def withdraw(self, znode: OrderZnode[T], *, over: VersionedOrder[T]) -> None:
        """Delete an order, if it still exists. Raises ConflictError if it was changed."""
        with suppress(NoNodeError):
            await self._store.delete(znode.path, version=over.version)

    async def _each(
        self,
        parent: str,
        znode_of: Callable[[ClusterPaths, BookieId], OrderZnode[T]],
        unreadable: list[str],
    ) -> dict[BookieId, T]:
        """Return the orders below ``parent`` by bookie. Adds ``parent`` to ``unreadable`` if access
        is denied."""
        try:
            names = sorted(await children_if_any(self._store, parent))
        except UnauthorizedError as error:
            self._report(parent, 0, error)
            unreadable.append(parent)
            return {}
        bookies = [BookieId(name) for name in names]
        found = await asyncio.gather(
            *(self._readable(znode_of(self._paths, bookie), unreadable) for bookie in bookies)
        )
        return {b: order for b, order in zip(bookies, found, strict=True) if order is not None}

    async def _readable(self, znode: OrderZnode[T], unreadable: list[str]) -> T | None:
        """Return the order that applies, or None. Adds an unreadable one to ``unreadable``."""
        stored = await self.stored(znode)
        if stored is None:
            return None
        if not stored.is_readable:
            unreadable.append(znode.path)
        return stored.order

    async def _stat_if_allowed(self, path: str) -> Stat | None:
        """Return None if the order does not exist. ZooKeeper 3.9.5 denies this, too; then only its
        existence is known."""
        try:
            return await self._store.exists(path)
        except UnauthorizedError:
            return Stat(version=ANY_VERSION)

    def _unreadable(
        self, znode: OrderZnode[T], stat: Stat, error: BookmenderError
    ) -> VersionedOrder[T]:
        self._report(znode.path, stat.mzxid, error)
        order = None if znode.in_doubt is None else znode.in_doubt(stat)
        return VersionedOrder(order=order, version=stat.version, is_readable=False)

    def _report(self, path: str, mzxid: int, error: BookmenderError) -> None:
        if self._reported.get(path) != mzxid:  # log once, not at each reading
            self._reported[path] = mzxid
            log.warning("order.unreadable", path=path, error=str(error))


class DisableSwitch:
    """The disable switch (``<ur>/disable``) as one session last saw it. Watched, because polling by
    many nodes would be expensive."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._path = paths.disable
        self._is_watched = False
        self.may_lease = True
        """True if the switch was off when it was last read, and no attempt to read it has failed
        since. While it is False, no lock is created, not even for a lease whose transaction waits
        in the batcher already."""

    async def is_on(self) -> bool:
        """Return True if auto-recovery is disabled. Reads the znode only while it is not watched.
        Raises UnavailableError."""
        if not self._is_watched:
            await self._read()
        return not self.may_lease

    async def watch(self) -> AsyncGenerator[None, None]:
        """Keep ``may_lease`` up to date, and yield after each reading. Ends with the session."""
        async with aclosing(self._store.watch(self._path)) as events:
            try:
                async for event in events:
                    if event.kind is EventKind.RESET:  # our knowledge may be old until it is read
                        self._is_watched = False
                    if event.kind is EventKind.CREATED:  # no lock while it is being read
                        self.may_lease = False
                    await until_answered(
                        self._read, event="disable_switch.read_failed", clock=self._clock
                    )
                    self._is_watched = True
                    yield
            finally:
                self._is_watched = False

    async def _read(self) -> None:
        """Read the switch. If it is unreadable, it counts as on (rule S8). If access is denied, it
        exists."""
        try:
            self.may_lease = await self._store.exists(self._path) is None
        except UnauthorizedError as error:
            self.may_lease = False
            log.warning("disable_switch.access_denied", path=self._path, error=str(error))
        except (UnavailableError, SessionLostError):
            self.may_lease = self._is_watched = False
            raise


class IgnoredDisableSwitch(DisableSwitch):
    """For repairs by hand: the switch disables only automatic repairs."""

    async def is_on(self) -> bool:
        return False

    async def watch(self) -> AsyncGenerator[None, None]:
        never: tuple[None, ...] = ()
        for event in never:
            yield event
