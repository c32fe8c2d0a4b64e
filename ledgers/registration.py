"""Which bookies there are: their registrations below ``<root>/available``, and their cookies.

Writable and read-only bookies are read so that one that changes sides meanwhile is in the result,
and an empty or missing list is unknown, never a mass loss (rule S8).
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property

import structlog

from ledgers.errors import CorruptionError, NoNodeError, UnauthorizedError, UnavailableError
from ledgers.formats.bookie_info import (
    Address,
    parse_address,
    parse_bookie_id,
    registered_address,
    spelled_address,
)
from ledgers.metadata import BookieId
from ledgers.store import ANY_VERSION, Check, Event, MetadataStore, Stat, children_if_any

log = structlog.get_logger()

READ_ONLY = "readonly"
"""The child of ``available`` that is no bookie."""
NO_BOOKIE = (
    "its name cannot be a bookie's, so it counts as none: delete it, if nothing else needs it"
)
UNTOLD_CZXID = 2**63 - 1
"""Of a cookie that ACLs shut away: as it may be new, what its bookie lacks proves nothing of any
ledger (rule S5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBookie:
    """A bookie that is there. ``czxid``, of its registration, tells one life of it from the next; 0
    where ACLs shut that away."""

    bookie_id: BookieId
    address: Address | None
    """None when what it says of itself cannot be read."""
    czxid: int
    is_writable: bool


@dataclass(frozen=True, kw_only=True)  # no slots: ``available`` is computed once
class BookieView:
    """The bookies at one moment, by id."""

    writable: Mapping[BookieId, RegisteredBookie] = field(default_factory=dict)
    read_only: Mapping[BookieId, RegisteredBookie] = field(default_factory=dict)

    @cached_property
    def available(self) -> Mapping[BookieId, RegisteredBookie]:
        """Writable or read-only: those that can be read from."""
        return {**self.read_only, **self.writable}

    def address(self, bookie: BookieId) -> Address | None:
        registered = self.available.get(bookie)
        return None if registered is None else registered.address

    @cached_property
    def superseded(self) -> frozenset[BookieId]:
        """Registered bookies at whose address another bookie registered later. Requests to them
        would reach that one."""
        return frozenset(
            bookie
            for bookie, registered in self.available.items()
            if registered.address is not None and self._owners[registered.address] != bookie
        )

    def locate(self, bookie: BookieId, *, last_known: Address | None = None) -> Address:
        """Return the address at which this bookie itself answers, as far as the registrations show.

        An absent bookie is looked for at its ``last_known`` address, else at the one that its id
        spells out, but only while no other bookie is registered there: that one would answer "no
        such entry" for entries that it never stored (rule S5). Raises UnavailableError.
        """
        address = self.address(bookie)
        if address is None:
            address = last_known or spelled_address(bookie)
        if (owner := self._owners.get(address, bookie)) == bookie:
            return address
        others = [b for b, each in self.available.items() if each.address == address]
        named = ", ".join(sorted(b for b in others if b != bookie)) if owner is None else owner
        raise UnavailableError(f"another bookie is registered at its address: {named}")

    @cached_property
    def _owners(self) -> Mapping[Address, BookieId | None]:
        """Which bookie answers at each registered address; None where that cannot be told."""
        sharing: dict[Address, list[RegisteredBookie]] = {}
        for registered in self.available.values():
            if registered.address is not None:
                sharing.setdefault(registered.address, []).append(registered)
        return {address: latest_registrant(bookies) for address, bookies in sharing.items()}


def latest_registrant(sharing: Sequence[RegisteredBookie]) -> BookieId | None:
    """Return which of the bookies that registered one address answers there; None where that cannot
    be told.

    A port has one process. Where two ids registered one address, the process of the earlier one is
    gone, and only its session has not expired yet. Where ACLs hide a czxid, the order of the
    registrations is unknown.
    """
    if len(sharing) > 1 and any(registered.czxid == 0 for registered in sharing):
        return None
    return max(sharing, key=lambda registered: registered.czxid).bookie_id


class Registration:
    """The bookies of the cluster at ``root``. One loop's."""

    def __init__(self, store: MetadataStore, root: str) -> None:
        self._store = store
        self._available = f"{root}/available"
        self._read_only = f"{root}/available/{READ_ONLY}"
        self._cookies = f"{root}/cookies"
        self._known: dict[str, RegisteredBookie] = {}
        """By znode path, as of the last read: spares parsing them again. A registration never
        changes its data, but a bookie may come back under the same path: the czxid tells."""
        self._told: set[str] = set()
        """Paths of which it was said already that ACLs shut them away, or that they are no
        bookie's."""

    async def read(self) -> BookieView:
        """Raises UnavailableError when the list cannot be had whole, or is empty."""
        await self._store.sync(self._available)
        before = await self._writable_names()
        read_only = self._ids(self._read_only, await children_if_any(self._store, self._read_only))
        after = await self._writable_names()  # for those that became writable between the two
        found = await asyncio.gather(
            *(
                self._find(bookie, is_read_only=bookie in read_only)
                for bookie in sorted(before | read_only | after)
            )
        )
        self._known = {self._path(each): each for each in found if each is not None}
        if not self._known:
            raise UnavailableError("no bookie is registered at all", path=self._available)
        return BookieView(
            writable={b.bookie_id: b for b in self._known.values() if b.is_writable},
            read_only={b.bookie_id: b for b in self._known.values() if not b.is_writable},
        )

    async def is_as_in(self, view: BookieView, bookie: BookieId) -> bool:
        """Whether its registration, as this session reads it now, is the one that the view
        shows."""
        registered = view.available[bookie]
        if registered.czxid == 0:  # shut away: there is nothing to be compared
            return True
        try:
            znode = await self._get(f"{self._parent(registered.is_writable)}/{bookie}")
        except UnauthorizedError:
            return False
        return znode is not None and znode[1].czxid == registered.czxid

    async def czxid_now(self, registered: RegisteredBookie) -> int:
        """The czxid of this registration's znode, as this session reads it now; 0: it is gone, or
        hidden by ACLs."""
        try:
            znode = await self._get(self._path(registered))
        except UnauthorizedError:
            return 0
        return 0 if znode is None else znode[1].czxid

    def check_of(self, registered: RegisteredBookie) -> Check:
        """Holds as long as a bookie is registered there. It may be another life of the bookie: the
        check of a transaction compares no czxid."""
        return Check(path=self._path(registered), version=ANY_VERSION)

    async def doubtful_since(
        self, view: BookieView, bookies: Collection[BookieId]
    ) -> Mapping[BookieId, str]:
        """Return which of these bookies may not have answered at their addresses since ``view``,
        and why.

        A bookie is beyond doubt if its registration is the znode that the view shows, and no bookie
        has registered at its address that the view does not show. Costs a sync, two listings, a
        read for each bookie, and one for each bookie that is new. Raises UnavailableError.
        """
        await self._store.sync(self._available)
        doubts = {
            bookie: "it is not registered as it was"
            for bookie in bookies
            if bookie not in view.available or not await self.is_as_in(view, bookie)
        }
        addresses = {bookie: view.address(bookie) for bookie in bookies}
        for newcomer in sorted(await self._listed() - view.available.keys()):
            registered = await self._find(newcomer, is_read_only=False)
            if registered is not None and registered.address is not None:
                doubts |= {
                    bookie: f"{newcomer} registered at its address"
                    for bookie, address in addresses.items()
                    if address == registered.address
                }
        return doubts

    async def _listed(self) -> set[BookieId]:
        """Return every id in the two lists of bookies.

        A bookie that becomes read-only between the two listings is in both results. One that
        becomes writable is in neither; that is rare, and ``read`` lists writable bookies twice for
        it.
        """
        writable = await self._writable_names()
        read_only = await children_if_any(self._store, self._read_only)
        return writable | self._ids(self._read_only, read_only)

    async def cookies(self) -> Mapping[BookieId, Stat]:
        """Every bookie that was ever set up and not decommissioned; its cookie's znode
        (``UNTOLD_CZXID``)."""
        names = await children_if_any(self._store, self._cookies)  # comes with the first bookie
        return await self._cookies_of(sorted(self._ids(self._cookies, names)))

    async def cookies_now(self, bookies: Collection[BookieId]) -> Mapping[BookieId, Stat]:
        """Those of these bookies, none of them older than this call."""
        await self._store.sync(self._cookies)
        return await self._cookies_of(sorted(bookies))

    async def _cookies_of(self, bookies: Sequence[BookieId]) -> Mapping[BookieId, Stat]:
        found = await asyncio.gather(*map(self._cookie, bookies))
        return {
            bookie: stat for bookie, stat in zip(bookies, found, strict=True) if stat is not None
        }

    async def _cookie(self, bookie: BookieId) -> Stat | None:
        path = f"{self._cookies}/{bookie}"
        try:
            znode = await self._get(path)
        except UnauthorizedError as error:
            self._tell_once("cookie.shut_away", path, bookie=bookie, error=str(error))
            return Stat(version=0, czxid=UNTOLD_CZXID)
        return None if znode is None else znode[1]

    async def changes(self) -> AsyncGenerator[None, None]:
        """Something happened below ``available``; the first comes at once.

        What happens while nobody asks for the next one makes a single one together, or two.
        """
        async with aclosing(
            self._store.watch(self._available, is_recursive=True, events_max=1)
        ) as events:
            async for _ in events:
                yield

    def listing_changes(self) -> Sequence[AsyncGenerator[Event, None]]:
        """The same in two, for a server that watches no trees (``changes`` raises
        UnsupportedError)."""
        lists = (self._available, self._read_only)
        return [self._store.watch(path, events_max=1) for path in lists]

    async def _writable_names(self) -> set[BookieId]:
        try:
            names = await self._store.children(self._available)
        except NoNodeError as error:
            raise UnavailableError(
                "the list of bookies is missing", path=self._available
            ) from error
        return self._ids(self._available, [name for name in names if name != READ_ONLY])

    def _ids(self, parent: str, names: Iterable[str]) -> set[BookieId]:
        """Those that can be of bookies. What somebody else left there would be taken for one, and
        be given copies."""
        bookies = set()
        for name in names:
            try:
                bookies.add(parse_bookie_id(name))
            except CorruptionError:
                self._tell_once("registration.no_bookie", f"{parent}/{name}", next_step=NO_BOOKIE)
        return bookies

    async def _find(self, bookie: BookieId, *, is_read_only: bool) -> RegisteredBookie | None:
        """Where it is registered now; None when it is gone.

        Changing sides, it is registered on the new one before it leaves the old one. So it is on
        the other side if it is not where it was listed, or else back again.
        """
        for is_writable in (not is_read_only, is_read_only, not is_read_only):
            if registered := await self._registered(bookie, is_writable=is_writable):
                return registered
        return None

    async def _registered(self, bookie: BookieId, *, is_writable: bool) -> RegisteredBookie | None:
        path = f"{self._parent(is_writable)}/{bookie}"
        try:
            znode = await self._get(path)
        except UnauthorizedError as error:
            return self._shut_away(bookie, path, error)
        if znode is None:
            return None
        data, stat = znode
        known = self._known.get(path)
        if known is not None and known.czxid == stat.czxid:
            return known
        return RegisteredBookie(
            bookie_id=bookie,
            address=_address(bookie, data),
            czxid=stat.czxid,
            is_writable=is_writable,
        )

    def _shut_away(self, bookie: BookieId, path: str, error: UnauthorizedError) -> RegisteredBookie:
        """It is listed, so that it is there. But as nobody can tell one life of it from the next,
        it is not to be written to (rule S3)."""
        self._tell_once("registration.shut_away", path, bookie=bookie, error=str(error))
        known = self._known.get(path)
        address = parse_address(bookie) if known is None else known.address
        return RegisteredBookie(bookie_id=bookie, address=address, czxid=0, is_writable=False)

    def _tell_once(self, event: str, path: str, **fields: str) -> None:
        """Not at each look."""
        if path not in self._told:
            self._told.add(path)
            log.error(event, path=path, **fields)

    async def _get(self, path: str) -> tuple[bytes, Stat] | None:
        """None when it is gone. Gets, and no ``exists``: the store joins them, which spares
        ZooKeeper, as a change of one bookie makes every node read all of them.
        """
        try:
            return await self._store.get(path)
        except NoNodeError:
            return None

    def _path(self, registered: RegisteredBookie) -> str:
        return f"{self._parent(registered.is_writable)}/{registered.bookie_id}"

    def _parent(self, is_writable: bool) -> str:
        return self._available if is_writable else self._read_only


def _address(bookie: BookieId, data: bytes) -> Address | None:
    """What it says of itself; where that cannot be read, what its id says."""
    try:
        return registered_address(bookie, data)
    except CorruptionError:
        return parse_address(bookie)
