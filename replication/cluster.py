"""The bookies and orders of the cluster as last seen, and Pulsar's isolation groups.

``ViewSource`` keeps a ``ClusterView`` up to date with two watches and a timer; maintenance windows
end without an event. A view is an immutable value. ``SeenAbsences`` remembers which bookies were
absent in earlier views.

``IsolationGroups`` holds the groups. A ledger that Pulsar isolates may have copies only on bookies
of its groups (IsolatedBookieEnsemblePlacementPolicy). The groups are in Pulsar's znode of racks. A
failed read is reported once; the last good groups stay in force.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

import structlog
from prometheus_client import Gauge

from ledgers.clock import Clock
from ledgers.codec.registration import Address
from ledgers.errors import BookmenderError, NoNodeError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId, LedgerMetadata
from ledgers.placement.pulsar import PULSAR_RACKS_PATH, Isolation, isolation_of, parse_pulsar_groups
from ledgers.registration import BookieView, RegisteredBookie, Registration
from ledgers.store import Check, MetadataStore, Stat
from ledgers.tasks import SharedReads, Watching
from replication.orders import Orders, OrderStore

log = structlog.get_logger()
HOLD = Gauge(
    "bookmender_hold",
    "1 during a safety hold: no ledger is marked for lost bookies, and nothing is fenced; else 0.",
)
BOOKIES = Gauge(
    "bookmender_registered_bookies",
    "Registered bookies as this node sees them, by state: writable or read-only.",
    ["state"],
)
_WRITABLE, _READ_ONLY = (BOOKIES.labels(state=state) for state in ("writable", "read-only"))

RESTORE_COOKIES = (
    "write the cookies again (bookkeeper shell cookie_create): a bookie does not start without one"
)
WINDOW_CHECK_S = 60.0
"""Longest wait before the wall clock is read again during a maintenance window. The wait is in
elapsed time, and the wall clock may be changed."""
RESOLVE_AGAIN_S = 60.0
"""Interval at which bookies are read again while two seem to have the same address."""


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
        """Registered bookies, writable or read-only."""
        return frozenset(self.bookies.available)

    @cached_property
    def answering(self) -> frozenset[BookieId]:
        """Available bookies whose address no other bookie took since, so that their "no" is their
        own (rule S5)."""
        return self.available - self.bookies.superseded

    @cached_property
    def checked(self) -> frozenset[BookieId]:
        """Available bookies that are not draining: their copies count (rule S16)."""
        return self.available - self.orders.draining.keys()

    @cached_property
    def receiving(self) -> frozenset[BookieId]:
        """Possible targets: writable, answering, neither draining nor in maintenance (rule S11)."""
        able = self.writable & self.answering
        return able - self.orders.draining.keys() - self.orders.maintenance.keys()

    def czxid(self, bookie: BookieId) -> int:
        """Return the czxid of the bookie's registration, which changes when it restarts; 0: not
        registered."""
        registered = self.bookies.available.get(bookie)
        return 0 if registered is None else registered.czxid

    def initialised_after(self, zxid: int) -> frozenset[BookieId]:
        """Return the bookies whose cookie is newer than ``zxid`` and not trusted by an order.

        They may have been reformatted after ``zxid`` and have lost what they stored before. So
        their "no" does not count, and their first and last entries prove nothing (rules S5, S6).
        """
        if zxid >= self._last_cookie_zxid:  # nearly always; saves a loop over all bookies
            return frozenset()
        return frozenset(bookie for bookie, czxid in self._doubtful.items() if czxid > zxid)

    def are_all_younger_than(self, zxid: int) -> bool:
        """Return True if every cookie is newer than ``zxid``, as after an import of ZooKeeper."""
        return len(self.cookies) > 1 and self.initialised_after(zxid) >= self.cookies.keys()

    @cached_property
    def _doubtful(self) -> Mapping[BookieId, int]:
        """The czxid of each cookie that no order trusts."""
        trusted = self.orders.trusted_cookies
        return {b: stat.czxid for b, stat in self.cookies.items() if trusted.get(b) != stat.czxid}

    @cached_property
    def _last_cookie_zxid(self) -> int:
        """The czxid of the newest of these cookies."""
        return max(self._doubtful.values(), default=0)


ABSENCES_KEPT = 16
"""Earlier absences of a bookie that are remembered. Marks of older ones are rare."""


class SeenAbsences:
    """The absences of bookies with a cookie, as this process saw them.

    What it did not see is unknown, and the careful answer holds: a bookie is absent only since this
    process first missed it, and a mark was made while its bookies were registered. Between two
    views an absent bookie may register, be marked, and disappear again. The number of changes of
    the lists tells whether the views show all of them.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, frozenset[object]] = (0, frozenset())
        """The last view: the number of changes, and the registrations."""
        self._now: dict[BookieId, tuple[float, int]] = {}
        """By absent bookie: since when it is missing, in monotonic seconds, and a zxid since when
        it is absent."""
        self._ended: dict[BookieId, deque[tuple[int, int]]] = {}
        """The absences that ended: a zxid since when, and the czxid of the registration that ended
        it."""

    def note(self, view: "ClusterView", *, now_s: float) -> None:
        bookies = view.bookies
        registrations = frozenset(
            (each.bookie_id, each.czxid, each.is_writable)
            for each in (*bookies.writable.values(), *bookies.read_only.values())
        )
        change_count, before = self._seen
        self._seen = bookies.change_count, registrations
        if bookies.change_count - change_count != len(registrations ^ before):
            self._now = {b: (since_s, bookies.zxid) for b, (since_s, _) in self._now.items()}
        absent = view.cookies.keys() - view.available
        for bookie in self._now.keys() - absent:
            _, since_zxid = self._now.pop(bookie)
            if czxid := view.czxid(bookie):
                ended = self._ended.setdefault(bookie, deque(maxlen=ABSENCES_KEPT))
                ended.append((since_zxid, czxid))
        for bookie in absent:
            self._now.setdefault(bookie, (now_s, view.bookies.zxid))

    def absent_s(self, bookie: BookieId, *, now_s: float) -> float:
        """Return how long this process has missed the bookie; 0 if it is registered or unknown."""
        since_s, _ = self._now.get(bookie, (now_s, 0))
        return now_s - since_s

    def was_absent(self, bookie: BookieId, *, from_zxid: int, to_zxid: int) -> bool:
        """Return True if a registered bookie was absent all the time between the two zxids."""
        return any(
            since < from_zxid and to_zxid < end for since, end in self._ended.get(bookie, ())
        )


class ViewSource(Watching):
    """The current view, kept up to date by ``run``. Reports a change when the view differs."""

    def __init__(
        self, registration: Registration, clock: Clock, orders: OrderStore | None = None
    ) -> None:
        """``orders``: None if the view has no orders."""
        super().__init__(clock)
        self._registration = registration
        self._order_store = orders
        self._orders = Orders()
        """The orders that were read last, including maintenance windows that are over."""
        self._current: ClusterView | None = None
        # Guards the two above: an older reading must not overwrite a newer one.
        self._reading = asyncio.Lock()
        self._czxids = SharedReads(registration.czxid_now)
        self.absences = SeenAbsences()
        self._last: dict[BookieId, RegisteredBookie] = {}
        """The last registration of each bookie that had an address."""
        self._without_cookie: AbstractSet[BookieId] = frozenset()
        """Registered bookies that had no cookie at the last reading."""

    def resolve(self, bookie: BookieId) -> Address:
        """Return the address of the bookie, for an absent one the last known (rule S13).

        Raises UnavailableError where no address is known, or another bookie is registered there
        (``BookieView.locate``).
        """
        bookies = BookieView() if self._current is None else self._current.bookies
        return bookies.locate(bookie, last=self._last.get(bookie))

    def last_address(self, bookie: BookieId) -> Address | None:
        """Return the last registered address. For racks only: another bookie may have it now."""
        last = self._last.get(bookie)
        return None if last is None else last.address

    @property
    def is_reading(self) -> bool:
        """True while the view is read again, after a change or a call of ``refresh``."""
        return self._reading.locked()

    @property
    def current(self) -> ClusterView:
        """Return the current view. Raises UnavailableError before the first ``refresh``."""
        if self._current is None:
            raise UnavailableError("the list of bookies has not been read yet")
        return self._current

    def life(self, bookie: BookieId) -> int:
        """Return ``ClusterView.czxid`` of the current view."""
        return self.current.czxid(bookie)

    async def refresh(self) -> ClusterView:
        """Read everything now. Raises UnavailableError."""
        async with self._reading:
            return await self._read_all()

    async def _read_all(self) -> ClusterView:
        """Read everything.

        An operator starts a bookie and then ends its maintenance, or begins a maintenance and then
        stops the bookie. So orders are read after the bookies, and the bookies again if a
        maintenance ended meanwhile. Otherwise a bookie would look absent without an excuse.
        """
        if self._current is None:
            await self._read_orders()
        while True:
            bookies = await self._registration.read()
            cookies = await self._registration.cookies()
            before = self._orders
            await self._read_orders()
            ended = before.maintenance.keys() - self._orders.maintenance.keys()
            if ended <= bookies.available.keys():
                break
        # A bookie writes its cookie before it registers.
        without = bookies.available.keys() - cookies.keys()
        if without - self._without_cookie:  # logged once for each
            log.warning("cookies.missing", bookies=sorted(without), next_step=RESTORE_COOKIES)
        self._without_cookie = without
        return self._show(bookies, cookies)

    async def confirm(self, bookies: Collection[BookieId]) -> None:
        """Refresh the view if one of these bookies is no longer registered as the view shows.

        A mark may reach this session before the loss of the bookie that caused it does. Raises
        UnavailableError.
        """
        view = self.current
        await self.are_as_in(view, [b for b in bookies if view.czxid(b)])  # 0: an ACL hides it

    async def are_as_in(self, view: ClusterView, bookies: Collection[BookieId]) -> bool:
        """Return True if each bookie is still registered by the same znode as in the view.

        Reads from ZooKeeper, because ``current`` may be old: this process may have been paused with
        an event unread. If a registration differs, refreshes the view. Raises UnavailableError.
        """
        shown = [view.bookies.available.get(bookie) for bookie in bookies]
        there = [registered for registered in shown if registered is not None and registered.czxid]
        czxids = await self._czxids.get(there)
        same = {each.bookie_id for each in there if czxids[each] == each.czxid}
        changed = [bookie for bookie in bookies if bookie not in same]
        if not changed:
            return True
        async with self._reading:
            # Another task may have refreshed the view meanwhile.
            if any(self.current.czxid(bookie) == view.czxid(bookie) for bookie in changed):
                await self._read_all()
        return False

    def checks_of(self, view: ClusterView, bookies: Collection[BookieId]) -> list[Check]:
        """Return checks that fail if a bookie that the view shows is not registered any more."""
        return [
            self._registration.check_of(view.bookies.available[bookie])
            for bookie in sorted(bookies)
            if bookie in view.bookies.available
        ]

    async def set_up_since(
        self, view: ClusterView, bookies: Collection[BookieId]
    ) -> frozenset[BookieId]:
        """Return the bookies whose cookie differs from the view. Reads the cookies from ZooKeeper.
        Raises UnavailableError."""
        then = {bookie: cookie.czxid for bookie, cookie in view.cookies.items()}
        now = await self._registration.cookies_now(bookies)
        return frozenset(b for b, cookie in now.items() if then.get(b) != cookie.czxid)

    async def doubts_about(
        self, view: ClusterView, *, members: Collection[BookieId], believed: Collection[BookieId]
    ) -> Mapping[BookieId, str]:
        """Return the bookies whose answers since ``view`` cannot be trusted, and why.

        ``members``: bookies that must not have been reformatted since. ``believed``: bookies whose
        "no" was counted; each must have kept its address all the time. Raises UnavailableError.
        """
        doubts = dict(await self._registration.doubtful_since(view.bookies, believed))
        superseded = self.current.bookies.superseded.intersection(believed)
        doubts |= dict.fromkeys(superseded, "another bookie is registered at its address")
        set_up = await self.set_up_since(view, members)
        return doubts | dict.fromkeys(set_up, "it was reformatted")

    async def run(self) -> None:
        """Refresh at every change, until cancelled. A failing read keeps the view as it is."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._registration.changes(), self.refresh))
            cookie_changes = self._registration.cookie_changes()
            tasks.create_task(self._follow(cookie_changes, self._refresh_cookies))
            if self._order_store is not None:
                changes = self._order_store.changes()
                tasks.create_task(self._follow(changes, self._refresh_orders))
                tasks.create_task(self._end_windows())
            tasks.create_task(self._resolve_again())

    async def _refresh_cookies(self) -> None:
        """Read only the cookies. Before the first view there is nothing to refresh: its reading
        comes after this watch."""
        async with self._reading:
            cookies = await self._registration.cookies()
            if self._current is not None:
                self._show(self._current.bookies, cookies)

    async def _refresh_orders(self) -> None:
        """Read only the orders, so that a change of an order does not make every node read all
        bookies. Reads all if a bookie whose maintenance ended is absent in the current view."""
        async with self._reading:
            await self._read_orders()
            view = self._current
            if view is not None:
                ended = view.orders.maintenance.keys() - self._orders.maintenance.keys()
                if ended <= view.available:
                    self._show(view.bookies, view.cookies)
                else:
                    await self._read_all()

    async def _read_orders(self) -> None:
        if self._order_store is not None:
            self._orders = await self._order_store.read()

    def _show(self, bookies: BookieView, cookies: Mapping[BookieId, Stat]) -> ClusterView:
        """Make this the current view, and report a change if it differs."""
        orders = self._orders.at(self._clock.wall_ms())
        view = ClusterView(bookies=bookies, cookies=cookies, orders=orders)
        HOLD.set(orders.is_held)
        _WRITABLE.set(len(bookies.writable))
        _READ_ONLY.set(len(bookies.read_only))
        for bookie, registered in bookies.available.items():
            if registered.address is not None:
                self._last[bookie] = registered
        self.absences.note(view, now_s=self._clock.now_s())
        if view != self._current:
            self._current = view
            self._notify_change()
        return view

    def _log_failure(self, error: BookmenderError) -> None:
        log.warning("bookies.read_failed", error=str(error))

    async def _end_windows(self) -> None:
        """Update the view when a maintenance window or a hold ends."""
        while True:
            seen, wait_s = self.change_count, None
            if self._current is not None and (end_ms := self._current.orders.next_end_ms):
                wait_s = min((end_ms - self._clock.wall_ms()) / 1000, WINDOW_CHECK_S)
            await self.wait_change(seen, timeout_s=wait_s)
            async with self._reading:
                if self.change_count == seen and self._current is not None:
                    self._show(self._current.bookies, self._current.cookies)

    async def _resolve_again(self) -> None:
        """Read the bookies again while two of them seem to have the same address. DNS may have been
        out of date: an address that one of them had before may now be the other's."""
        while True:
            await self._clock.sleep(RESOLVE_AGAIN_S)
            if self._current is not None and self._current.bookies.superseded:
                await self._try(self.refresh)


ISOLATION_RETRY_S = 10.0
"""Pause after a failed read."""

REFUSED_S = 300.0
"""Pause after access was denied."""

Groups = Mapping[str, frozenset[BookieId]]


def bookies_within(
    isolation: Isolation, groups: Groups, writable: Collection[BookieId], *, ensemble_size: int
) -> frozenset[BookieId]:
    """Return the bookies that may store a ledger with this isolation.

    These are the bookies of the primary groups. If fewer of them are writable than the ensemble
    has, those of the secondary groups are added. If still too few are writable, those without any
    group are added. Bookies only in other groups are never allowed.
    """

    def members(names: Collection[str]) -> frozenset[BookieId]:
        return frozenset().union(*(groups.get(name, frozenset()) for name in names))

    within = members(isolation.primary)
    for more in (members(isolation.secondary), frozenset(writable) - members(groups)):
        if len(within.intersection(writable)) >= ensemble_size:
            break
        within |= more
    return within


class IsolationGroups(Watching):
    """Pulsar's isolation groups, kept up to date by ``run``. ``may_leave``: if True, copies may
    leave the groups when no other bookie of them is writable."""

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        *,
        path: str = PULSAR_RACKS_PATH,
        may_leave: bool = False,
    ) -> None:
        super().__init__(clock, errors=BookmenderError, retry_s=ISOLATION_RETRY_S)
        self._store, self._path, self._may_leave = store, path, may_leave
        self._groups: Groups = {}

    def allowed(
        self, metadata: LedgerMetadata, writable: Collection[BookieId]
    ) -> frozenset[BookieId] | None:
        """Return the possible targets of the ledger; None: all bookies.

        Without a znode of groups all bookies are allowed, as in Pulsar, because a missing copy
        would be worse.
        """
        isolation = isolation_of(metadata)
        if isolation is None or not self._groups:
            return None
        within = bookies_within(
            isolation, self._groups, writable, ensemble_size=metadata.ensemble_size
        )
        if self._may_leave and not within.intersection(writable) - metadata.bookies:
            return None
        return within

    async def run(self) -> None:
        """Read the groups whenever they have changed, until cancelled."""
        while True:
            try:
                await self._follow(self._store.watch(self._path), self._read)
            except UnauthorizedError as error:
                # An ACL may deny the watch as well; the session must go on.
                self._note_failure(error)
            await self._clock.sleep(REFUSED_S)

    async def refresh(self) -> bool:
        """Read the groups now. Returns False if that failed."""
        return await self._try(self._read)

    async def _read(self) -> None:
        try:
            data, _ = await self._store.get(self._path)
            self._groups = parse_pulsar_groups(data)
        except NoNodeError:
            self._groups = {}

    def _log_failure(self, error: BookmenderError) -> None:
        log.error("isolation.unreadable", path=self._path, error=str(error))


def anywhere(
    metadata: LedgerMetadata, writable: Collection[BookieId]
) -> frozenset[BookieId] | None:
    """Return None: all bookies, as ``IsolationGroups.allowed`` does without isolation."""
    return None
