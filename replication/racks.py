"""Which rack each bookie is in, kept fresh from a source: a file, a script, or Pulsar's znode.

A source that fails is reported once, with what to do; the last good racks stay in force, and
nothing waits for it but the first choice after a start, and that not for long.

Where each bookie was when its rack was last known: kept by the leader, for all nodes that start
later.

A source may know a bookie by its host or IP address alone, and those of one that is away are not
registered. A node that was running then remembers; one that starts meanwhile, or whose source is
broken, reads it here: or it would take the default rack for the bookie's, and the ledger's other
copies for well placed (G19).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import structlog

from ledgers.clock import Clock
from ledgers.codec.pulsar import PULSAR_RACKS_PATH, parse_pulsar_racks
from ledgers.errors import (
    BookmenderError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.placement.topology import Racks, clean_rack, find_rack, names_of
from ledgers.store import MetadataStore
from ledgers.tasks import Changing
from replication.cluster import ClusterView, ViewSource
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, as_text, object_field, read_record

log = structlog.get_logger()

RETRY_S = 10.0
"""How long a source that failed is left alone."""
START_TIMEOUT_S = 15.0
"""How long the start of a worker waits for racks at most."""

ResolveHost = Callable[[str], Awaitable[str | None]]
"""A host name's IP address; None where it has none, or not in time."""


class RackSource(Protocol):
    """Somebody who knows racks."""

    @property
    def name(self) -> str:
        """For people: "file racks.txt"."""
        ...

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Racks by bookie id, ``host:port``, host or IP address. ``hosts``: who is asked about.

        Raises UnavailableError or CorruptionError, telling what to do.
        """
        ...

    def changes(self) -> AsyncGenerator[None, None]:
        """Whenever ``read`` may have something new to tell; the first comes at once."""
        ...


class ZnodeRacks:
    """Pulsar's map of racks. One session's."""

    def __init__(self, store: MetadataStore, path: str = PULSAR_RACKS_PATH) -> None:
        self._store, self._path = store, path

    @property
    def name(self) -> str:
        return f"znode {self._path}"

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        try:
            data, _ = await self._store.get(self._path)
        except NoNodeError as error:
            raise UnavailableError(
                "there is no such znode; have Pulsar set racks (pulsar-admin bookies set-bookie-rack), "
                "or empty placement.racks_znode",
                path=self._path,
            ) from error
        return parse_pulsar_racks(data)

    async def changes(self) -> AsyncGenerator[None, None]:
        async with aclosing(self._store.watch(self._path)) as events:
            async for _ in events:
                yield


async def has_unused_racks(store: MetadataStore) -> bool:
    """Whether Pulsar keeps racks in this ZooKeeper. For a warning where nobody reads them."""
    try:
        return await store.exists(PULSAR_RACKS_PATH) is not None
    except UnauthorizedError:  # as ZooKeeper 3.9.5 says of what is there
        return True


class RackKeeper(Changing):
    """Reads the source when it, or the list of bookies, has changed, and tells ``racks``."""

    def __init__(
        self,
        source: RackSource,
        racks: Racks,
        views: ViewSource,
        *,
        clock: Clock,
        resolve_host: ResolveHost,
    ) -> None:
        super().__init__()
        self._source, self._racks, self._views = source, racks, views
        self._clock, self._resolve_host = clock, resolve_host
        self._is_broken = False
        self._reading = asyncio.Lock()  # an older reading must not come last

    async def start(self) -> None:
        """Have racks before the first choice is made, if that can be without a long wait."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.refresh()
        except TimeoutError:
            log.warning("racks.late", source=self._source.name, timeout_s=START_TIMEOUT_S)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_source())
            tasks.create_task(self._follow_bookies())

    async def refresh(self) -> bool:
        """Read the source now; False when that was in vain."""
        async with self._reading:
            try:
                await self._read()
            except SessionLostError:
                raise
            except BookmenderError as error:
                if not self._is_broken:  # told once, not at each try
                    log.error(
                        "racks.unreadable",
                        source=self._source.name,
                        error=str(error),
                        kept_count=len(self._racks),
                    )
                self._is_broken = True
                return False
            if self._is_broken:
                log.info("racks.readable_again", source=self._source.name)
            self._is_broken = False
            return True

    async def _read(self) -> None:
        view = self._views.current  # who comes meanwhile is asked for next
        names = await self._names(view)
        # The last name is the IP address, where there is one: what BookKeeper asks its scripts for.
        table = await self._source.read(sorted({each[-1] for each in names.values()}))
        found = {
            bookie: rack
            for bookie, of_bookie in names.items()
            if (rack := find_rack(of_bookie, table)) is not None
        }
        if self._racks.learn(found, present=view.available):
            log.info(
                "racks.changed",
                source=self._source.name,
                rack_count=len(set(found.values())),
                bookie_count=len(found),
                nowhere_count=len(view.available - found.keys()),
            )
            self._tell_change()

    async def _names(self, view: ClusterView) -> Mapping[BookieId, tuple[str, ...]]:
        """Of every bookie, those that are away included."""
        bookies = sorted(view.available | view.cookies.keys())
        addresses = {bookie: self._views.last_address(bookie) for bookie in bookies}
        names = {bookie: names_of(bookie, address) for bookie, address in addresses.items()}
        hosts = sorted({of_bookie[-1] for of_bookie in names.values() if len(of_bookie) > 1})
        ips = dict(zip(hosts, await asyncio.gather(*map(self._resolve_host, hosts)), strict=True))
        return {
            bookie: names_of(bookie, addresses[bookie], ips.get(of_bookie[-1]))
            for bookie, of_bookie in names.items()
        }

    async def _follow_source(self) -> None:
        async with aclosing(self._source.changes()) as changes:
            async for _ in changes:
                while not await self.refresh():
                    await self._clock.sleep(RETRY_S)

    async def _follow_bookies(self) -> None:
        seen, known = self._views.change_count, self._views.current.available
        while True:
            await self._views.wait_change(seen)
            seen, available = self._views.change_count, self._views.current.available
            if not available <= known:
                while not await self.refresh():
                    await self._clock.sleep(RETRY_S)
            known = available


async def remembered_racks(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, str]:
    """Nothing where nothing is stored, or nothing that this release can read, or may."""
    try:
        return await read_record(store, paths.racks, _racks) or {}
    except UnauthorizedError as error:
        log.warning("racks.access_denied", error=str(error))
        return {}


def _racks(record: Mapping[str, Any]) -> dict[BookieId, str]:
    told = {
        b: clean_rack(as_text(rack, "rack")) for b, rack in object_field(record, "racks").items()
    }
    return {BookieId(bookie): rack for bookie, rack in told.items() if rack is not None}


class RackMemory:
    """The leader's. Written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        racks: Racks,
        rack_keeper: RackKeeper,
        views: ViewSource,
        clock: Clock,
    ) -> None:
        self._store = store
        self._batcher = batcher
        self._paths = paths
        self._racks = racks
        self._rack_keeper = rack_keeper
        self._views = views
        self._clock = clock

    async def run(self) -> None:
        """Write at every change, until cancelled. Raises SessionLostError or
        LeadershipLostError."""
        while True:
            seen = self._rack_keeper.change_count
            while not await self._try_write():
                await self._clock.sleep(RETRY_S)
            await self._rack_keeper.wait_change(seen)

    async def _try_write(self) -> bool:
        try:
            await self.write()
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("racks.not_remembered", error=str(error))
            return False
        return True

    async def write(self) -> None:
        """What is known now, if that is not what stands there. A decommissioned bookie is
        forgotten."""
        view = self._views.current
        there_are = view.available | view.cookies.keys()
        racks = {b: rack for b, rack in self._racks.known.items() if b in there_are}
        if racks != await remembered_racks(self._store, self._paths):
            record = {"version": 1, "racks": dict(sorted(racks.items()))}
            await self._batcher.put(self._paths.racks, json.dumps(record).encode())
