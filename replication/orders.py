"""What is ordered of the whole cluster: bookies to drain, maintenance windows, limits, holds,
pauses, tries.

Below ``<ur>/bookmender/orders``: ``draining/<bookie id>``, ``maintenance/<bookie id>``, ``limits``,
``hold``, ``checks``, ``identities`` and ``tries``, each versioned JSON. An operator gives them; the
leader, too, orders a hold. ``order_store`` reads and writes them, and every session of ours sees
them as part of its ``ClusterView``. An order that cannot be read (a later release's, a slip of
somebody's hand) is reported and never stops a node: it is passed over, but for limits, which stay
as they were, and for a hold or a pause of the checks, which stand. Drains and windows stay as they
were where they cannot even be listed.

Where the orders stand in ZooKeeper: read by every session of ours, written by commands.

Whoever writes one names the version of what it overwrites, so that of two operators who change the
same thing at once one is told.

The switch by which operators stop auto-recovery, Java's and ours: ``<ur>/disable``, there or
not.
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
"""Of every order's record. Raised when a reader of the release before would misunderstand it;
fields that it may leave out of account come without."""

TRIES_TOLD_S = 600.0
"""So long after a try was ordered a node that had lost its connection still learns of it, though
others were since."""
TRIES_TOLD_MAX = 1_000

LIMIT_RANGES: Mapping[str, tuple[int, int]] = {
    "bytes_per_s": (0, 10**12),
    "entries_per_s": (0, 10**9),
    "reads_in_flight_per_bookie": (1, 500),
    "requests_per_s": (0, 1_000_000),
}
"""The least and the most of each number in ``LimitsOrder``: what the settings of the same name
allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Move all that the bookie holds elsewhere, while it serves (rule S16)."""

    since_ms: int
    may_fence: bool = False
    """Whether open ledgers on it are to be recovered and closed, instead of left until they
    close."""

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
    """The bookie may be away until then: neither lost nor a target. Wall-clock milliseconds."""

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
    """What each node may cost, in place of its settings; None: as its settings say. 0: no limit."""

    bytes_per_s: int | None = None
    entries_per_s: int | None = None
    reads_in_flight_per_bookie: int | None = None
    requests_per_s: int | None = None
    yields_to_writers: bool | None = None

    def to_json(self) -> bytes:
        return _to_json({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError, also for a number that no setting would be allowed (rule S10)."""
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
    """Mark nothing and fence nothing; or, released, let nothing hold on account of these bookies.

    ``bookies``: those that were away when it was written. ``until_ms``: wall-clock; None: until
    somebody ends it. ``is_by_operator``: an operator's stands whatever the bookies do.
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
        """What is kept to where the order cannot be read: a hold. Perhaps one was meant, and a hold
        for nothing costs time only, while fencing for nothing stops writers. ``since_ms``: when it
        was written."""
        reason = "so it is taken, as the order cannot be read"
        return cls(since_ms=since_ms, reason=reason, is_by_operator=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksOrder:
    """The periodic checks pause while it stands."""

    since_ms: int

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        return cls(since_ms=time_field(_record(data), "since_ms"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesOrder:
    """Marked ledgers that are to be tried now, whatever they waited for, and when that was ordered
    (wall-clock): each counts once, for who has not seen it before."""

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
        """That one, too; what was ordered long ago, or before very many others, is forgotten."""
        told = {i: ms for i, ms in self.ordered_ms.items() if now_ms - ms <= TRIES_TOLD_S * 1000}
        told.pop(ledger_id, None)  # the latest comes last
        latest = [*told.items(), (ledger_id, now_ms)][-TRIES_TOLD_MAX:]
        return replace(self, ordered_ms=dict(latest))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentitiesOrder:
    """These bookies have lost nothing since they were first set up, though their cookies may be
    younger.

    A cookie that is younger than a ledger says that its bookie may have been reformatted since.
    That is wrong for all bookies at once where ZooKeeper was imported by a tool that creates znodes
    again, or where bookie ids were changed (``updatecookie``). ``cookies``: the czxid that each
    bookie's cookie had when the order was given; the order says nothing of a bookie whose cookie is
    another one by now.
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
    """All of them at one moment. In a ``ClusterView`` windows that are over are not among them."""

    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    maintenance: Mapping[BookieId, MaintenanceWindow] = field(default_factory=dict)
    limits: LimitsOrder = field(default_factory=LimitsOrder)
    hold: HoldOrder | None = None
    """Also one that is released. ``is_held`` says whether it holds."""
    paused_checks: ChecksOrder | None = None
    tries: TriesOrder = field(default_factory=TriesOrder)
    identities: IdentitiesOrder | None = None
    unreadable: tuple[str, ...] = ()
    """Paths of those that stand there and cannot be read."""

    @property
    def is_held(self) -> bool:
        """Whether nothing may be marked, and nothing fenced."""
        return self.hold is not None and not self.hold.is_released

    def at(self, now_ms: int) -> "Orders":
        """As they stand then, an end itself being outside: a hold that is over is as good as
        released."""
        current = {b: window for b, window in self.maintenance.items() if now_ms < window.until_ms}
        hold = self.hold
        if hold is not None and hold.until_ms is not None and hold.until_ms <= now_ms:
            hold = replace(hold, is_released=True)
        if len(current) == len(self.maintenance) and hold == self.hold:
            return self
        return replace(self, maintenance=current, hold=hold)

    @property
    def trusted_cookies(self) -> Mapping[BookieId, int]:
        """The czxid of each cookie that counts as old, whatever it is (``IdentitiesOrder``)."""
        return {} if self.identities is None else self.identities.cookies

    @property
    def next_end_ms(self) -> int | None:
        """When the first of the windows, or the hold, ends; None where nothing does."""
        ends_ms = [window.until_ms for window in self.maintenance.values()]
        if self.hold is not None and self.hold.until_ms is not None and self.is_held:
            ends_ms.append(self.hold.until_ms)
        return min(ends_ms, default=None)


def _to_json(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **fields}).encode()


def _holds(record: Mapping[str, Any], key: str) -> bool:
    """Null is as good as nothing, in what may be left out."""
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
    """The znode of one order, and how its bytes are read.

    ``in_doubt``: gives what is kept to where they cannot be read; None: nothing is.
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
    """An order as it stands. ``version``: its znode's, any where ACLs shut that away.

    ``order``: where this release cannot read it, what is kept to instead; None: nothing is.
    """

    order: T | None
    version: int
    is_readable: bool = True


class OrderStore:
    """One session's access to the orders."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths) -> None:
        self._store, self._paths = store, paths
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
        """Something happened to some order; the first comes at once. One watch for all of them.

        What happens while nobody asks for the next one makes a single one together, or two.
        """
        return self._store.watch(self._paths.orders, is_recursive=True, events_max=1)

    async def stored(self, znode: OrderZnode[T]) -> VersionedOrder[T] | None:
        """None when there is no such order."""
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
        """Write it in the place of ``over``, what stood there when the decision was made.

        Raises ConflictError: somebody else was quicker.
        """
        try:
            if over is None:
                await self._store.create(znode.path, order.to_json(), with_parents=True)
            else:
                await self._store.set(znode.path, order.to_json(), version=over.version)
        except (NodeExistsError, NoNodeError, ConflictError) as error:
            raise ConflictError("somebody else has just changed it", order=znode.path) from error

    async def withdraw(self, znode: OrderZnode[T], *, over: VersionedOrder[T]) -> None:
        """Delete it; one that is gone already is success. Raises ConflictError."""
        with suppress(NoNodeError):
            await self._store.delete(znode.path, version=over.version)

    async def _each(
        self,
        parent: str,
        znode_of: Callable[[ClusterPaths, BookieId], OrderZnode[T]],
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
            *(self._readable(znode_of(self._paths, bookie), unreadable) for bookie in bookies)
        )
        return {b: order for b, order in zip(bookies, found, strict=True) if order is not None}

    async def _readable(self, znode: OrderZnode[T], unreadable: list[str]) -> T | None:
        """What is kept to, if anything. One that cannot be read is added to ``unreadable``."""
        stored = await self.stored(znode)
        if stored is None:
            return None
        if not stored.is_readable:
            unreadable.append(znode.path)
        return stored.order

    async def _stat_if_allowed(self, path: str) -> Stat | None:
        """None when the order is gone. Newer ZooKeepers (3.9.5) forbid this, too: then only that it
        is there is known."""
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
        if self._reported.get(path) != mzxid:  # once, not at each reading
            self._reported[path] = mzxid
            log.warning("order.unreadable", path=path, error=str(error))


class DisableSwitch:
    """What one session knows of it: with many nodes it is not to be asked for at each look."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._path = paths.disable
        self._is_watched = False
        self.may_lease = True
        """Whether the switch was off when it was last read, and no attempt to read it has failed
        since. While it is False no lock is asked for, not even by a take that was begun before and
        whose turn comes only now."""

    async def is_on(self) -> bool:
        """Read only while nothing tells of its changes (``watch``). Raises UnavailableError."""
        if not self._is_watched:
            await self._read()
        return not self.may_lease

    async def watch(self) -> AsyncGenerator[None, None]:
        """Keep ``may_lease`` as the switch says; tells of each time it was read. Ends with the
        session."""
        async with aclosing(self._store.watch(self._path)) as events:
            try:
                async for event in events:
                    if event.kind is EventKind.RESET:  # what we know may be old until it is read
                        self._is_watched = False
                    if event.kind is EventKind.CREATED:  # locks could be asked for while it is read
                        self.may_lease = False
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
            self.may_lease = await self._store.exists(self._path) is None
        except UnauthorizedError as error:
            self.may_lease = False
            log.warning("disable_switch.access_denied", path=self._path, error=str(error))
        except (UnavailableError, SessionLostError):
            self.may_lease = self._is_watched = False
            raise


class IgnoredDisableSwitch(DisableSwitch):
    """For what somebody asked for by hand: the switch is about what nobody asked for."""

    async def is_on(self) -> bool:
        return False

    async def watch(self) -> AsyncGenerator[None, None]:
        never: tuple[None, ...] = ()
        for event in never:
            yield event
