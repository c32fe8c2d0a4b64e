"""Following the feed from any program: one call opens everything that a client needs.

Example::

    async with open_client(uri, name="catalogue", store="sqlite:///catalogue-feed.db") as client:
        missed = await client.service.subscribe(listener)

The store of receipts is named by a URL: ``sqlite:///FILE``, ``postgresql://USER@HOST/DATABASE``
(both need the extra ``feed`` of the package), or ``zookeeper:``, which keeps the receipts in the
cluster itself.

The block ends with an error when the client must open the feed again: SessionLostError after a lost
ZooKeeper session, FeedChangedError after the feed was disabled and enabled, or after ZooKeeper was
restored from a backup. Pass the same ``ClientProcess`` each time. Then the block ends with
ClientFencedError when another process follows the feed under the same name, also if that process
began in between.

A client keeps an ephemeral znode, so that operators see that it is connected. A client that may
not write to ZooKeeper has none.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from checkpoints.chain import NO_FEED, FeedChain, read_chain
from checkpoints.errors import FeedChangedError
from checkpoints.log import POLL_MAX_S, CheckpointLog
from checkpoints.model import NO_CHECKPOINT, CheckpointId, LogId, SpanFilter, Version
from checkpoints.receipts import ClientProcess, ClientTable, ReceiptStore
from checkpoints.recovery import RecoveryService, RecoverySettings
from checkpoints.stores.zookeeper import ZooKeeperClientTable, ZooKeeperReceiptStore
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Bookies
from ledgers.client import open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import (
    ConflictError,
    NodeExistsError,
    NoNodeError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.host_names import host_names
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.registration import Registration
from ledgers.security import OPEN, SecuritySettings
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope, until_answered
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster import ViewSource
from replication.records import Stored
from replication.znodes import ClusterPaths

__all__ = ["ClientProcess", "FeedChangedError", "FeedClient", "open_client"]

IN_ZOOKEEPER: Final = "zookeeper:"
READS_IN_FLIGHT_MAX: Final = 8
EVERYTHING: Final = RecoverySettings(recover_back_s=math.inf)
"""Recover everything that the log still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedClient:
    """A client that follows the feed.

    ``service``: gives the changes and takes the receipts. ``manager``: reads the metadata of
    ledgers. ``was_new``: the client had no receipts when it was opened. ``was_reset``: it had some
    of an earlier feed, or of one that a restore of ZooKeeper from a backup undid. They were
    deleted, so the client is new and may have missed changes. This is told until receipts are
    stored again.
    """

    service: RecoveryService
    manager: LedgerManager
    store: ReceiptStore
    log: CheckpointLog
    was_new: bool
    was_reset: bool

    async def metadata(self, ledger_id: int, *, version: Version = 0) -> VersionedMetadata | None:
        """Return the present metadata of a ledger, not older than this version; None if the ledger
        does not exist.

        The ZooKeeper server of this session may be behind the feed. So metadata that is older than
        the version is read again after a sync. Raises UnavailableError, CorruptionError.
        """
        found = await self.manager.find(ledger_id)
        if found is not None and found.stat.mzxid < version:
            await self.manager.sync(ledger_id)
            found = await self.manager.find(ledger_id)
        return found

    async def ledger_ids(self) -> AsyncGenerator[int, None]:
        """Yield the ids of all ledgers that exist by the log, in any order.

        Call it after ``subscribe``. Then the listener is given every later change of these ledgers,
        and every ledger that is not among them. ZooKeeper may have ledgers that the log does not
        have yet. If such a ledger is deleted before a leader has seen it, the feed never tells of
        it. So a list of the ledgers in ZooKeeper would leave it in a catalogue for ever. Raises
        UnavailableError, CorruptionError.
        """
        published = await self.log.published_versions()
        for ledger_id in published.ledger_ids():
            yield ledger_id

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        """Store receipts for everything up to this checkpoint, without the service."""
        if (log_id := self.log.log_of(checkpoint_id)) is not None:
            await self.store.store_log(log_id)
        await self.store.store_low_watermark(checkpoint_id)

    @property
    def is_enabled(self) -> bool:
        """False if the feed was disabled meanwhile. Then no change will come."""
        return self.log.chain.is_enabled


@asynccontextmanager
async def open_client(
    uri: str,
    *,
    name: str,
    store: str = IN_ZOOKEEPER,
    process: ClientProcess | None = None,
    security: SecuritySettings = OPEN,
    settings: RecoverySettings = EVERYTHING,
    wanted: SpanFilter | None = None,
    on_disabled: Callable[[], None] | None = None,
    from_end: bool = False,
    from_start: bool = False,
) -> AsyncIterator[FeedClient]:
    """Connect to a cluster and follow its feed as the client ``name``.

    ``uri``: the metadata service URI, as ``zk+hierarchical://zk1:2181,zk2:2181/ledgers``.
    ``store``: the URL of the store of receipts. ``process``: for a program that opens the feed
    again after errors; None: this is a new process. ``wanted``: a filter (``filters``).
    ``on_disabled``: called once if the feed is not enabled; the call waits until it is.
    ``from_end``, ``from_start``: where a new client begins, see ``open_client_in``. Raises
    SettingsError, UnavailableError, RejectedError.
    """
    place = MetadataUri.parse(uri)
    session = await ZooKeeperStore.open(place.hosts, security=security)
    try:
        manager = await LedgerManager.open(session, place)
        cluster = ClusterConnection(
            store=session,
            manager=manager,
            root=manager.root,
            security=security,
        )
        async with open_client_in(
            cluster,
            name=name,
            store=store,
            process=process,
            settings=settings,
            wanted=wanted,
            on_disabled=on_disabled,
            from_end=from_end,
            from_start=from_start,
        ) as client:
            yield client
    finally:
        await session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConnection:
    """A ZooKeeper session, and how bookies are reached. ``root``: the znode above the ledgers."""

    store: MetadataStore
    manager: LedgerManager
    root: str
    security: SecuritySettings = OPEN

    @property
    def paths(self) -> ClusterPaths:
        return ClusterPaths.below(self.root)

    def log(
        self, chain: FeedChain, bookies: Bookies, clock: Clock, *, poll_max_s: float = POLL_MAX_S
    ) -> CheckpointLog:
        """Return the log of this generation of the feed. The caller runs it. ``poll_max_s``: as for
        ``CheckpointLog``."""
        return CheckpointLog(
            store=self.store,
            paths=self.paths,
            manager=self.manager,
            bookies=bookies,
            clock=clock,
            generation=chain.generation,
            poll_max_s=poll_max_s,
        )


@asynccontextmanager
async def open_client_in(
    cluster: ClusterConnection,
    *,
    name: str,
    store: str = IN_ZOOKEEPER,
    process: ClientProcess | None = None,
    settings: RecoverySettings = EVERYTHING,
    wanted: SpanFilter | None = None,
    on_disabled: Callable[[], None] | None = None,
    from_end: bool = False,
    from_start: bool = False,
    clock: Clock | None = None,
    bookies: Bookies | None = None,
) -> AsyncIterator[FeedClient]:
    """Follow the feed over an open session, which stays the caller's.

    ``from_end``: store the present end of the log as the start of a new client, so that the client
    is given everything after this moment even if it dies before its first receipt. ``from_start``:
    the start is the beginning of the log, as always for a client of an earlier feed. Neither
    changes a client that has receipts. Without both, a client is new until its first receipt.
    ``bookies``: None: connect to them. For the others see ``open_client``.
    """
    clock, process = clock or SystemClock(), process or ClientProcess()
    _check_store(store)  # before the wait for a feed that is not enabled
    async with bookies_of(cluster, clock, bookies) as client, task_scope() as scope:
        chain = await wait_enabled(cluster, on_disabled)
        log = cluster.log(chain, client, clock)
        scope.start(log.run())
        generation, followed = process.log
        receipts, was_reset = await open_receipts(
            store,
            name=name,
            cluster=cluster,
            generation=chain.generation,
            process=process,
            is_restored=generation == chain.generation and not chain.knows(followed),
        )
        try:
            if await _is_unknown(await receipts.get_log(), chain, cluster):
                await receipts.reset()
                was_reset = True
            was_new = await receipts.get_low_watermark() is None
            await _show_connected(cluster, name)
            async with RecoveryService.open(
                log, receipts, settings=settings, clock=clock, wanted=wanted
            ) as service:
                opened = FeedClient(
                    service=service,
                    manager=cluster.manager,
                    store=receipts,
                    log=log,
                    was_new=was_new,
                    was_reset=was_reset,
                )
                if was_new and (from_end or from_start):
                    end = await log.wait_started()
                    start = NO_CHECKPOINT if from_start or was_reset else end
                    await opened.store_low_watermark(start)
                yield opened
        finally:
            if log.followed is not None:
                process.log = (chain.generation, log.followed)
            await receipts.close()


@asynccontextmanager
async def bookies_of(
    cluster: ClusterConnection, clock: Clock, bookies: Bookies | None = None
) -> AsyncIterator[Bookies]:
    """Connect to the bookies of a cluster. ``bookies``: yield these instead."""
    if bookies is not None:
        yield bookies
        return
    registration = Registration(cluster.store, cluster.root, resolve=host_names().addresses)
    views = ViewSource(registration, clock)
    await views.refresh()
    async with (
        open_bookies(
            views.resolve,
            reads_in_flight_max=READS_IN_FLIGHT_MAX,
            connector=bookie_connector(cluster.security),
        ) as opened,
        task_scope() as scope,
    ):
        scope.start(_follow_views(views))
        yield opened


async def _follow_views(views: ViewSource) -> None:
    """Keep the addresses of bookies up to date. Raises the error itself, such as SessionLostError,
    in place of a group of errors."""
    try:
        await views.run()
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def wait_enabled(
    cluster: ClusterConnection, on_disabled: Callable[[], None] | None
) -> FeedChain:
    """Return the chain once the feed is enabled."""
    is_told = False
    async with aclosing(cluster.store.watch(cluster.paths.feed)) as events:
        async for _ in events:
            stored = await until_answered(
                lambda: _read_latest(cluster),
                event="feed.read_failed",
                clock=SystemClock(),
            )
            if stored.error is not None:
                raise stored.error
            chain = stored.value or NO_FEED
            if chain.is_enabled:
                return chain
            if not is_told and on_disabled is not None:
                on_disabled()
            is_told = True
    raise UnavailableError("the watch on the feed ended", path=cluster.paths.feed)


async def _is_unknown(log_id: LogId | None, chain: FeedChain, cluster: ClusterConnection) -> bool:
    """Return True if the feed does not have this ledger of its log. The process that stored it may
    have read a later chain than ``chain``, so that is read again."""
    if chain.knows(log_id):
        return False
    latest = (await _read_latest(cluster)).value or NO_FEED
    return latest.generation == chain.generation and not latest.knows(log_id)


async def _read_latest(cluster: ClusterConnection) -> Stored[FeedChain]:
    """Read the chain after a sync: with an earlier generation, receipts would be deleted."""
    await cluster.store.sync(cluster.paths.feed)
    return await read_chain(cluster.store, cluster.paths)


# --- Stores ---------------------------------------------------------------------------------------


async def open_receipts(
    url: str,
    *,
    name: str,
    cluster: ClusterConnection,
    generation: int,
    process: ClientProcess | None = None,
    is_restored: bool = False,
) -> tuple[ReceiptStore, bool]:
    """Open the store of a client, and say whether receipts of an earlier feed were deleted.

    ``is_restored``: as for ``ZooKeeperReceiptStore.open``. Fences the process that follows the feed
    under this name. Raises SettingsError, UnavailableError, RejectedError, ClientFencedError
    (``ClientProcess``), and FeedChangedError if ``generation`` is not the present one, or if the
    receipts are of a later one.
    """
    _check_store(url)
    try:
        if url == IN_ZOOKEEPER:
            in_znode = await ZooKeeperReceiptStore.open(
                cluster.store,
                folder=cluster.paths.feed_clients,
                client=name,
                generation=generation,
                process=process,
                is_restored=is_restored,
            )
            return in_znode, in_znode.was_reset
        from checkpoints.stores.sql import SqlReceiptStore

        in_sql = await SqlReceiptStore.open(
            url, client=name, generation=generation, process=process, is_restored=is_restored
        )
        return in_sql, in_sql.was_reset
    except ConflictError as error:
        latest = (await _read_latest(cluster)).value
        if latest is None or latest.generation != generation:
            raise FeedChangedError("the feed was disabled and enabled again") from error
        raise FeedChangedError(
            "the receipts of this client are of a later feed than the cluster has: ZooKeeper was "
            "restored from a backup, or the receipts are of another cluster. After a restore, "
            "disable the feed and enable it again"
        ) from error


async def open_client_table(url: str, cluster: ClusterConnection) -> ClientTable:
    """Return the clients of a store, for operators. Fences no process. Raises SettingsError,
    UnavailableError, RejectedError."""
    _check_store(url)
    if url == IN_ZOOKEEPER:
        return ZooKeeperClientTable(cluster.store, folder=cluster.paths.feed_clients)
    from checkpoints.stores.sql import SqlClientTable

    return await SqlClientTable.open(url)


def _check_store(url: str) -> None:
    """Raise SettingsError if receipts cannot be stored there."""
    if url == IN_ZOOKEEPER:
        return
    if not url.startswith(("sqlite:", "sqlite+", "postgresql:", "postgresql+")):
        # The rest of the URL may contain a password.
        scheme = f"has the scheme {url.partition('://')[0]!r}" if "://" in url else "is not a URL"
        raise SettingsError(
            f"the store of receipts {scheme}; allowed: {IN_ZOOKEEPER}, sqlite:///FILE, "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    try:
        import checkpoints.stores.sql  # noqa: F401  # SQLAlchemy is an optional extra
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"a store of receipts in a database needs the package {error.name!r}. "
            "Install it: pip install 'bookmender[feed]'"
        ) from error


# --- Who is connected -----------------------------------------------------------------------------


async def _show_connected(cluster: ClusterConnection, name: str) -> None:
    """Create the ephemeral znode of this client, in place of that of an earlier process."""
    path = f"{cluster.paths.feed_followers}/{urllib.parse.quote(name, safe='')}"
    with suppress(UnauthorizedError):
        for _ in range(2):
            try:
                await cluster.store.create(path, is_ephemeral=True, with_parents=True)
            except NodeExistsError:
                with suppress(NoNodeError):
                    await cluster.store.delete(path)
            else:
                return


async def connected_names(cluster: ClusterConnection) -> frozenset[str]:
    """Return the names of all clients that are connected."""
    try:
        names = await cluster.store.children(cluster.paths.feed_followers)
    except NoNodeError:
        return frozenset()
    return frozenset(map(urllib.parse.unquote, names))
