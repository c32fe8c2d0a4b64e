"""The bookies of a cluster: their registrations below ``<root>/available``, their cookies, the
instance id.

``Registration`` reads them, and ``BookieView`` is the result. A bookie that changes between
writable and read-only during a read is still in the result. An empty or missing list is an error,
never a mass loss (rule S8). The instance id is a UUID that BookKeeper creates when it formats a
cluster; cookies contain it. How long a bookie is absent, and what follows from that, is decided
elsewhere (``auditor.absence``).
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

import structlog

from ledgers.codec.registration import (
    Address,
    parse_address,
    parse_bookie_id,
    registered_address,
    spelled_address,
)
from ledgers.errors import (
    CorruptionError,
    LocalLimitError,
    NameNotResolvedError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import ANY_VERSION, Check, Event, MetadataStore, Stat, children_if_any

log = structlog.get_logger()

READ_ONLY = "readonly"
"""The child of ``available`` that is not a bookie, but the parent of the read-only bookies."""
NO_BOOKIE = (
    "the name is not a bookie ID, so the znode is ignored; delete it if nothing else needs it"
)
HIDDEN_CZXID = 2**63 - 1
"""Assumed czxid of a cookie that an ACL hides. The cookie may be new, so a "no" from its bookie
proves nothing about any ledger (rule S5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBookie:
    """A registered bookie. ``czxid``: of its registration znode, which differs for each new
    registration; 0 if an ACL hides the znode."""

    bookie_id: BookieId
    address: Address | None
    """None if neither the registration nor the id yields one."""
    czxid: int
    is_writable: bool
    ctime_ms: int = field(default=0, compare=False)
    """When it registered, by ZooKeeper's clock; 0 if an ACL hides the znode."""
    endpoints: frozenset[Address] = frozenset()
    """The numeric addresses to which the host of ``address`` resolves, with the port; none if it
    does not resolve, or if this process can look up no name now."""

    @property
    def spots(self) -> frozenset[Address]:
        """All spellings of its address. Two bookies are at the same address if they share one."""
        return self.endpoints if self.address is None else self.endpoints | {self.address}

    def is_later_than(self, other: "RegisteredBookie") -> bool:
        """Return True if this bookie registered after the other one; False if an ACL hides it."""
        return 0 < other.czxid < self.czxid


@dataclass(frozen=True, kw_only=True)  # no slots: ``available`` is computed once
class BookieView:
    """The bookies at one moment, by id."""

    writable: Mapping[BookieId, RegisteredBookie] = field(default_factory=dict)
    read_only: Mapping[BookieId, RegisteredBookie] = field(default_factory=dict)
    zxid: int = field(default=0, compare=False)
    """The zxid of the lists' last change: missing bookies disappeared by then."""
    change_count: int = field(default=0, compare=False)
    """Number of registrations and deregistrations until then."""

    @cached_property
    def available(self) -> Mapping[BookieId, RegisteredBookie]:
        """All registered bookies, writable or read-only. Entries can be read from them."""
        return {**self.read_only, **self.writable}

    def address(self, bookie: BookieId) -> Address | None:
        registered = self.available.get(bookie)
        return None if registered is None else registered.address

    @cached_property
    def superseded(self) -> frozenset[BookieId]:
        """Registered bookies at whose address another one answers, because it registered later."""
        return frozenset(self.rivals)

    def locate(self, bookie: BookieId, *, last: RegisteredBookie | None = None) -> Address:
        """Return the address at which this bookie itself answers, as far as the registrations show.

        For an absent bookie this is the address of its ``last`` registration, else the one in its
        id, but only while no other bookie is registered there. Another bookie would answer "no such
        entry" for entries that it never stored (rule S5). Raises UnavailableError.
        """
        registered = self.available.get(bookie)
        if registered is not None and registered.address is not None:
            address, rivals = registered.address, self.rivals.get(bookie, frozenset())
        else:
            known = None if last is None else last.address
            address = known or spelled_address(bookie)
            spots = {address} if last is None else {address, *last.endpoints}
            here = frozenset(b.bookie_id for spot in spots for b in self._at.get(spot, ()))
            rivals = here - {bookie}
        if rivals:
            named = ", ".join(sorted(rivals))
            raise UnavailableError(f"another bookie is registered at its address: {named}")
        return address

    @cached_property
    def _at(self) -> Mapping[Address, Sequence[RegisteredBookie]]:
        """The bookies at each address, as it is spelled and as it resolves."""
        found: dict[Address, list[RegisteredBookie]] = {}
        for registered in self.available.values():
            for spot in registered.spots:
                found.setdefault(spot, []).append(registered)
        return found

    @cached_property
    def rivals(self) -> Mapping[BookieId, frozenset[BookieId]]:
        """By registered bookie, the others that may answer at its address instead.

        Only one process can listen on a port. If two ids registered one address, the process of the
        earlier one has ended, and only its session has not expired yet. If an ACL hides a czxid,
        the order of the registrations is unknown.
        """
        rivals: dict[BookieId, set[BookieId]] = {}
        for sharing in self._at.values():
            for each, other in permutations(sharing, 2):
                if not each.is_later_than(other):
                    rivals.setdefault(each.bookie_id, set()).add(other.bookie_id)
        return {bookie: frozenset(others) for bookie, others in rivals.items()}


SESSION_EXPIRED_S = 60.0
"""Time after which ZooKeeper has deleted the registration of a bookie whose process has ended."""

ResolveHost = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the numeric addresses of a host. Raises NameNotResolvedError, LocalLimitError."""


async def as_spelled(host: str) -> Sequence[str]:
    """The ``ResolveHost`` of a cluster whose bookies have one spelling for each host."""
    return [host]


class Registration:
    """Reads the registrations and cookies of the cluster at ``root``. Belongs to one event loop."""

    def __init__(
        self, store: MetadataStore, root: str, *, resolve: ResolveHost = as_spelled
    ) -> None:
        """``resolve``: bookies at one address may spell it differently, as name or IP address."""
        self._store = store
        self._resolve = resolve
        self._available = f"{root}/available"
        self._read_only = f"{root}/available/{READ_ONLY}"
        self._cookies = f"{root}/cookies"
        self._known: dict[str, RegisteredBookie] = {}
        """The bookies of the last read by znode path, so that they are not parsed again. The data
        of a registration never changes. A new registration at the same path has another czxid."""
        self._known_since_s: dict[tuple[BookieId, int], float] = {}
        """By bookie and czxid of its registration, since when this process knows it (loop time)."""
        self._logged: set[str] = set()
        """Paths already reported: an ACL denies access, or the name cannot be a bookie id."""

    async def read(self) -> BookieView:
        """Return all registered bookies. Writable ones are listed before and after the read-only
        ones, so that a bookie that changes meanwhile is in a list; ``_find`` looks for it in both.
        Raises UnavailableError if a list cannot be read, or if no bookie is registered."""
        await self._store.sync(self._available)
        before = await self._writable_names()
        read_only = self._ids(self._read_only, await children_if_any(self._store, self._read_only))
        after = await self._writable_names()
        found = await asyncio.gather(
            *(
                self._find(bookie, is_read_only=bookie in read_only)
                for bookie in sorted(before | read_only | after)
            )
        )
        self._known = {self._path(each): each for each in found if each is not None}
        if not self._known:
            raise UnavailableError("no bookie is registered at all", path=self._available)
        # Read after the lists, so they contain the deletion of every bookie that is missing there.
        found_lists = await asyncio.gather(*map(self._get, (self._available, self._read_only)))
        lists = [each[1] for each in found_lists if each is not None]
        placed = await self._placed(self._known.values())
        return BookieView(
            writable={each.bookie_id: each for each in placed if each.is_writable},
            read_only={each.bookie_id: each for each in placed if not each.is_writable},
            zxid=max((each.pzxid for each in lists), default=HIDDEN_CZXID),
            change_count=sum(each.cversion for each in lists),
        )

    async def _placed(self, bookies: Collection[RegisteredBookie]) -> list[RegisteredBookie]:
        """Return the bookies with their endpoints. Records since when each one is known."""

        async def place(registered: RegisteredBookie) -> RegisteredBookie:
            if registered.address is None:
                return registered
            host, port = registered.address
            try:
                hosts = await self._resolve(host)
            except (NameNotResolvedError, LocalLimitError):
                hosts = ()
            endpoints = frozenset(Address(host=each, port=port) for each in hosts)
            return replace(registered, endpoints=endpoints)

        placed = await asyncio.gather(*map(place, bookies))
        now_s, known = asyncio.get_running_loop().time(), self._known_since_s
        keys = [(each.bookie_id, each.czxid) for each in placed]
        self._known_since_s = {key: known.get(key, now_s) for key in keys}
        return placed

    async def czxid_now(self, registered: RegisteredBookie) -> int:
        """Return the czxid of the registration's znode now; 0: it is gone, or an ACL hides it."""
        try:
            znode = await self._get(self._path(registered))
        except UnauthorizedError:
            return 0
        return 0 if znode is None else znode[1].czxid

    def check_of(self, registered: RegisteredBookie) -> Check:
        """Return a check that the bookie is registered. No transaction can check a czxid."""
        return Check(path=self._path(registered), version=ANY_VERSION)

    async def doubtful_since(
        self, view: BookieView, bookies: Collection[BookieId]
    ) -> Mapping[BookieId, str]:
        """Return which of these bookies may not have answered at their addresses since ``view``,
        and why: its registration changed, or another bookie registered there later, or may have.
        Costs a sync, two listings, and a read for each bookie and each new one. Raises
        UnavailableError."""
        await self._store.sync(self._available)
        doubts: dict[BookieId, str] = {}
        for bookie in bookies:
            seen = view.available.get(bookie)
            # If an ACL hid the znode from the view (czxid 0), there is nothing to compare.
            if seen is None or (seen.czxid and await self.czxid_now(seen) != seen.czxid):
                doubts[bookie] = "its registration changed"
        # A bookie that becomes read-only between the two listings is in both of them. A bookie that
        # becomes writable is in neither. This is rare; ``read`` lists the writable bookies twice to
        # exclude it.
        listed = await self._writable_names()
        read_only = await children_if_any(self._store, self._read_only)
        listed |= self._ids(self._read_only, read_only)
        newcomers = sorted(listed - view.available.keys())
        found = [await self._find(newcomer, is_read_only=False) for newcomer in newcomers]
        placed = await self._placed(
            [*view.available.values(), *(each for each in found if each is not None)]
        )
        now = BookieView(writable={each.bookie_id: each for each in placed})
        for bookie in bookies:
            if rivals := now.rivals.get(bookie):
                doubts[bookie] = f"{', '.join(sorted(rivals))} registered at its address"
            elif nearby := self._unresolved_later_than(now.available.get(bookie), placed):
                doubts[bookie] = f"{', '.join(nearby)}, whose host is unknown, may have its address"
        return doubts

    def _unresolved_later_than(
        self, registered: RegisteredBookie | None, others: Iterable[RegisteredBookie]
    ) -> list[BookieId]:
        """Return the bookies that may be at the address of this one although their hosts do not
        resolve: on the same port, registered later, and not longer ago than the registration of an
        ended process is kept."""
        if registered is None or registered.address is None:
            return []
        since_s = asyncio.get_running_loop().time() - SESSION_EXPIRED_S
        return sorted(
            each.bookie_id
            for each in others
            if each.address is not None
            and each.address.port == registered.address.port
            and not each.endpoints
            and not registered.is_later_than(each)
            and each.bookie_id != registered.bookie_id
            and self._known_since_s[each.bookie_id, each.czxid] > since_s
        )

    async def cookies(self) -> Mapping[BookieId, Stat]:
        """Return the cookie znodes of all bookies that were formatted and not decommissioned. The
        czxid is ``HIDDEN_CZXID`` if an ACL hides the cookie."""
        # ``cookies`` does not exist before the first bookie.
        names = await children_if_any(self._store, self._cookies)
        return await self._cookies_of(self._ids(self._cookies, names))

    async def cookies_now(self, bookies: Collection[BookieId]) -> Mapping[BookieId, Stat]:
        """Return the cookies of these bookies, read after a sync: no older than this call."""
        await self._store.sync(self._cookies)
        return await self._cookies_of(bookies)

    async def _cookies_of(self, bookies: Collection[BookieId]) -> Mapping[BookieId, Stat]:
        async def read(bookie: BookieId) -> Stat | None:
            path = f"{self._cookies}/{bookie}"
            try:
                znode = await self._get(path)
            except UnauthorizedError as error:
                self._log_once("cookie.access_denied", path, bookie=bookie, error=str(error))
                return Stat(version=0, czxid=HIDDEN_CZXID)
            return None if znode is None else znode[1]

        names = sorted(bookies)
        stats = zip(names, await asyncio.gather(*map(read, names)), strict=True)
        return {bookie: stat for bookie, stat in stats if stat is not None}

    def changes(self) -> AsyncGenerator[object, None]:
        """Watch the bookies: an event at the start, and one or two after changes while busy."""
        return self._store.watch(self._available, is_recursive=True, events_max=1)

    def cookie_changes(self) -> AsyncGenerator[Event, None]:
        """Watch the list of cookies: a decommission deletes one, and nothing at ``available``."""
        return self._store.watch(self._cookies, events_max=1)

    async def _writable_names(self) -> set[BookieId]:
        try:
            names = await self._store.children(self._available)
        except NoNodeError as error:
            raise UnavailableError(
                "the list of bookies is missing", path=self._available
            ) from error
        return self._ids(self._available, [name for name in names if name != READ_ONLY])

    def _ids(self, parent: str, names: Iterable[str]) -> set[BookieId]:
        """Return the names that are valid bookie ids. Others must never be chosen as targets."""
        bookies = set()
        for name in names:
            try:
                bookies.add(parse_bookie_id(name))
            except CorruptionError:
                self._log_once("registration.no_bookie", f"{parent}/{name}", next_step=NO_BOOKIE)
        return bookies

    async def _find(self, bookie: BookieId, *, is_read_only: bool) -> RegisteredBookie | None:
        """Return the current registration of a bookie; None if it is not registered.
        ``is_read_only``: the list it was in. A bookie registers in the new list before it leaves
        the old one, so it may be in the other list, or, if it left that again, back in the first
        one."""
        for is_writable in (not is_read_only, is_read_only, not is_read_only):
            if registered := await self._registered(bookie, is_writable=is_writable):
                return registered
        return None

    async def _registered(self, bookie: BookieId, *, is_writable: bool) -> RegisteredBookie | None:
        path = f"{self._parent(is_writable)}/{bookie}"
        known = self._known.get(path)
        try:
            znode = await self._get(path)
        except UnauthorizedError as error:
            # It is listed, so it is present. But a restart of the bookie cannot be detected, so it
            # must not become a target (rule S3): it counts as read-only, with czxid 0.
            self._log_once("registration.access_denied", path, bookie=bookie, error=str(error))
            address = parse_address(bookie) if known is None else known.address
            return RegisteredBookie(bookie_id=bookie, address=address, czxid=0, is_writable=False)
        if znode is None:
            return None
        data, stat = znode
        if known is not None and known.czxid == stat.czxid:
            return known
        try:
            registered = registered_address(bookie, data)
        except CorruptionError:
            registered = parse_address(bookie)
        return RegisteredBookie(
            bookie_id=bookie,
            address=registered,
            czxid=stat.czxid,
            ctime_ms=stat.ctime_ms,
            is_writable=is_writable,
        )

    def _log_once(self, event: str, path: str, **fields: str) -> None:
        """Log the event as an error, once per path."""
        if path not in self._logged:
            self._logged.add(path)
            log.error(event, path=path, **fields)

    async def _get(self, path: str) -> tuple[bytes, Stat] | None:
        """Return data and state of a znode; None if it does not exist. Not by ``exists``, because
        the store joins ``get`` requests, and every node reads all registrations after a change."""
        try:
            return await self._store.get(path)
        except NoNodeError:
            return None

    def _path(self, registered: RegisteredBookie) -> str:
        return f"{self._parent(registered.is_writable)}/{registered.bookie_id}"

    def _parent(self, is_writable: bool) -> str:
        return self._available if is_writable else self._read_only


async def read_instance_id(store: MetadataStore, root: str) -> str | None:
    """Return the instance id; None if the cluster has none, which Java allows."""
    try:
        data, _ = await store.get(f"{root}/INSTANCEID")
    except NoNodeError:
        return None
    return data.decode(errors="replace").strip() or None
