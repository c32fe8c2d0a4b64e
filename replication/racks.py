"""The rack of each bookie: kept up to date from a source, and remembered in ZooKeeper.

``RackKeeper`` reads the source: a file, a script, or Pulsar's znode. A source that fails is
reported once; the last good racks stay in force. Only the start of a worker waits for the source,
and not for long.

``RackMemory`` belongs to the leader. It stores the last known racks for nodes that start later. A
source may know a bookie only by host or IP address, and an absent bookie has no registered address.
A node that starts then, or whose source is broken, would assume the default rack for that bookie,
and would consider the ledger's other copies well placed.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import structlog
from prometheus_client import Gauge

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NoNodeError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement.pulsar import PULSAR_RACKS_PATH, parse_pulsar_racks
from ledgers.placement.topology import Racks, clean_rack, find_rack, names_of
from ledgers.store import MetadataStore
from ledgers.tasks import Watching, until_answered
from replication.cluster import ClusterView, ViewSource
from replication.records import Record, read_record
from replication.transactions import Batcher
from replication.znodes import ClusterPaths

log = structlog.get_logger()

WITHOUT_RACK = Gauge(
    "bookmender_registered_bookies_without_rack",
    "Registered bookies that the source of racks does not name, so they are in the default rack. 0 "
    "without a source.",
)

RETRY_S = 10.0
"""Pause before a failed source is read again."""
START_TIMEOUT_S = 15.0
"""Maximum time that the start of a worker waits for racks."""

ResolveHost = Callable[[str], Awaitable[str | None]]
"""Returns a host name's IP address; None if it is unknown or takes too long."""


class RackSource(Protocol):
    """Where the racks of bookies are read from: a znode, a file or a script."""

    @property
    def name(self) -> str:
        """The name of the source for people: "file racks.txt"."""
        ...

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Return racks by bookie id, ``host:port``, host or IP address. ``hosts``: the names to
        look up.

        Raises UnavailableError or CorruptionError. The message says what to do.
        """
        ...

    def changes(self) -> AsyncGenerator[None, None]:
        """Yield at once, and whenever ``read`` may return something new."""
        ...


@dataclass(frozen=True, slots=True)
class ZnodeRacks:
    """Pulsar's znode of racks, read by one session."""

    _store: MetadataStore
    _path: str = PULSAR_RACKS_PATH

    @property
    def name(self) -> str:
        return f"znode {self._path}"

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        try:
            data, _ = await self._store.get(self._path)
        except NoNodeError as error:
            raise UnavailableError(
                "there is no such znode. Set racks in Pulsar (pulsar-admin bookies "
                "set-bookie-rack), or empty placement.racks_znode",
                path=self._path,
            ) from error
        return parse_pulsar_racks(data)

    async def changes(self) -> AsyncGenerator[None, None]:
        async with aclosing(self._store.watch(self._path)) as events:
            async for _ in events:
                yield


async def has_unused_racks(store: MetadataStore) -> bool:
    """Return True if Pulsar stores racks in this ZooKeeper, to warn if they are not used."""
    try:
        return await store.exists(PULSAR_RACKS_PATH) is not None
    except UnauthorizedError:  # ZooKeeper 3.9.5 denies access only if it exists
        return True


class RackKeeper(Watching):
    """Reads the source when it or the list of bookies has changed, and updates ``racks``."""

    def __init__(
        self,
        source: RackSource,
        racks: Racks,
        views: ViewSource,
        *,
        clock: Clock,
        resolve_host: ResolveHost,
    ) -> None:
        super().__init__(clock, errors=BookmenderError, retry_s=RETRY_S)
        self._source, self._racks, self._views = source, racks, views
        self._resolve_host = resolve_host
        self._named: frozenset[BookieId] = frozenset()
        """Bookies that the source named when it was last read."""
        self._reading = asyncio.Lock()  # an older reading must not overwrite a newer one

    async def start(self) -> None:
        """Read the racks before the first placement, if that does not take long."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.refresh()
        except TimeoutError:
            log.warning(
                "racks.source_timed_out", source=self._source.name, timeout_s=START_TIMEOUT_S
            )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._source.changes(), self._read))
            tasks.create_task(self._follow(self._new_bookies(), self._read))

    async def refresh(self) -> bool:
        """Read the source now. Returns False if that failed."""
        return await self._try(self._read)

    async def _read(self) -> None:
        async with self._reading:
            view = self._views.current  # bookies that register meanwhile are read next time
            names = await self._names(view)
            # The last name is the IP address, if there is one: BookKeeper passes IP addresses to
            # its scripts.
            table = await self._source.read(sorted({each[-1] for each in names.values()}))
            found = {
                bookie: rack
                for bookie, of_bookie in names.items()
                if (rack := find_rack(of_bookie, table)) is not None
            }
            self._named = frozenset(found)
            self._count_unnamed()
            if self._racks.learn(found, present=view.available):
                log.info(
                    "racks.changed",
                    source=self._source.name,
                    rack_count=len(set(found.values())),
                    bookie_count=len(found),
                    nowhere_count=len(view.available - found.keys()),
                )
                self._notify_change()

    def _log_failure(self, error: BookmenderError) -> None:
        name, kept_count = self._source.name, len(self._racks)
        log.error("racks.unreadable", source=name, error=str(error), kept_count=kept_count)

    def _log_success(self) -> None:
        log.info("racks.readable_again", source=self._source.name)

    def _count_unnamed(self) -> None:
        WITHOUT_RACK.set(len(self._views.current.available - self._named))

    async def _names(self, view: ClusterView) -> Mapping[BookieId, tuple[str, ...]]:
        """Return the names of every bookie, including absent ones."""
        bookies = sorted(view.available | view.cookies.keys())
        addresses = {bookie: self._views.last_address(bookie) for bookie in bookies}
        names = {bookie: names_of(bookie, address) for bookie, address in addresses.items()}
        hosts = sorted({of_bookie[-1] for of_bookie in names.values() if len(of_bookie) > 1})
        ips = dict(zip(hosts, await asyncio.gather(*map(self._resolve_host, hosts)), strict=True))
        return {
            bookie: names_of(bookie, addresses[bookie], ips.get(of_bookie[-1]))
            for bookie, of_bookie in names.items()
        }

    async def _new_bookies(self) -> AsyncGenerator[None, None]:
        """Yield when bookies are registered that were not before."""
        known = self._views.current.available
        async with aclosing(self._views.changes()) as changes:
            async for _ in changes:
                available = self._views.current.available
                if not available <= known:
                    yield
                self._count_unnamed()
                known = available


async def remembered_racks(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, str]:
    """Return the stored racks; none if the record is absent or unreadable."""
    stored = await read_record(store, paths.racks, StoredRacks.parse)
    cleaned = {} if stored is None else {b: clean_rack(rack) for b, rack in stored.racks.items()}
    return {bookie: rack for bookie, rack in cleaned.items() if rack is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRacks(Record):
    racks: Mapping[BookieId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RackMemory:
    """Stores the racks while this node leads, which ``batcher`` proves (rule S9)."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    racks: Racks
    rack_keeper: RackKeeper
    views: ViewSource
    clock: Clock

    async def run(self) -> None:
        """Write at every change, until cancelled. Raises SessionLostError or
        LeadershipLostError."""
        while True:
            seen = self.rack_keeper.change_count
            await until_answered(
                self.write,
                event="racks.write_failed",
                clock=self.clock,
                errors=(UnavailableError, UnauthorizedError),
                retry_min_s=RETRY_S,
            )
            await self.rack_keeper.wait_change(seen)

    async def write(self) -> None:
        """Store the known racks if they changed. A decommissioned bookie is forgotten."""
        view = self.views.current
        there_are = view.available | view.cookies.keys()
        racks = {b: rack for b, rack in self.racks.known.items() if b in there_are}
        if racks != await remembered_racks(self.store, self.paths):
            await self.batcher.put(self.paths.racks, StoredRacks(racks=racks).to_json())
