"""The ZooKeeper session of one service: opens it, adds it to the list of live nodes, and closes it.

Each service has its own session, so the end of one session releases only that service's locks or
vote. Everything opened here is closed here, in reverse order. ``tell_of_returns`` informs the
bookie clients about bookies that register again.
"""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from daemon.limits import keep_to_requests_per_s
from daemon.live_settings import LiveSettings
from daemon.local_bookie import local_bookie
from daemon.zookeeper import open_store
from ledgers.bookie_auth import bookie_connector
from ledgers.client import BookieClient
from ledgers.clock import SystemClock
from ledgers.errors import SessionLostError
from ledgers.host_names import Connector, host_names
from ledgers.manager import LedgerManager, find_cluster
from ledgers.model import BookieId
from ledgers.registration import Registration, read_instance_id
from ledgers.security import SecuritySettings
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster import ViewSource
from replication.journal import ClusterJournal, MetadataJournal
from replication.marks import prepare_tree
from replication.nodes import Membership, NodeInfo, Role, SharedClock
from replication.orders import OrderStore
from replication.znodes import ClusterPaths

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open session of one service, with the objects that both services use."""

    store: ZooKeeperStore
    paths: ClusterPaths
    manager: LedgerManager
    views: ViewSource
    membership: Membership
    local: BookieId | None
    clock: SharedClock
    rng: random.Random
    connector: Connector
    """Opens connections to bookies, secured as the settings say."""

    @property
    def node(self) -> str:
        """The name of this node for other nodes and for people: the id of the local bookie, else
        the host name."""
        return self.local or socket.gethostname()


@asynccontextmanager
async def open_session(
    live: LiveSettings, role: Role, journal: MetadataJournal
) -> AsyncIterator[Session]:
    """Open a session, register it as a live node and read a first view of the bookies. Closes the
    session at the end.

    Raises UnavailableError (also if there is no such cluster), SettingsError (another layout),
    UnauthorizedError. The body is cancelled and SessionLostError raised when the session is lost.
    """
    settings = live.current
    async with open_store(settings, ends_with_loop=True, is_of_node=role is not Role.HAND) as store:
        store.outbox.requests_per_s = settings.zookeeper.requests_per_s
        session = await _join(store, live, role, journal)
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(session.views.run())
                limiter = tasks.create_task(keep_to_requests_per_s(live, session.views, store))
                ender = tasks.create_task(end_with_session(store))
                ticker = tasks.create_task(session.membership.keep_synchronised(session.clock))
                yield session
                for task in (watcher, limiter, ender, ticker):
                    task.cancel()
        finally:
            log.info("session.closed", role=role.value, request_count=store.request_count)


async def _join(
    store: ZooKeeperStore, live: LiveSettings, role: Role, journal: MetadataJournal
) -> Session:
    """Do everything that needs the session before work begins, including the registration as a live
    node."""
    settings, clock = live.current, SharedClock(SystemClock())
    uri = await find_cluster(store, settings.uri)
    cluster = await read_instance_id(store, uri.root)
    manager = await LedgerManager.open(store, uri, journal=ClusterJournal(journal, cluster).record)
    paths = ClusterPaths.below(uri.root)
    await _compare_acl(store, uri.root, settings.security)
    await prepare_tree(store, paths)
    registration = Registration(store, uri.root, resolve=host_names().addresses)
    views = ViewSource(registration, clock, OrderStore(store, paths, live.orders))
    view = await views.refresh()
    local = await local_bookie(settings.node.bookie_id, view)
    info = NodeInfo(
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        bookie_id=local,
        started_ms=clock.wall_ms(),
    )
    membership = await Membership.join(store, paths, info)
    await membership.synchronise(clock)
    await views.refresh()  # safety holds and maintenance windows depend on the synchronised clock
    log.info("session.opened", role=role.value, session=f"{store.session_id:#x}", bookie=local)
    return Session(
        store=store,
        paths=paths,
        manager=manager,
        views=views,
        membership=membership,
        local=local,
        clock=clock,
        rng=random.Random(),
        connector=bookie_connector(settings.security),
    )


async def _compare_acl(store: ZooKeeperStore, root: str, security: SecuritySettings) -> None:
    """Log a warning if the znodes that we create have other ACLs than those of BookKeeper.

    The directory of cookies tells, because BookKeeper creates it with the ACL of all its znodes.
    """
    path = f"{root}/cookies"
    is_restricted = await store.is_restricted(path)
    expected = {None: security.zookeeper_acl, True: "creator", False: "open"}[is_restricted]
    if expected != security.zookeeper_acl:
        log.warning(
            "acl.mismatched",
            path=path,
            zookeeper_acl=security.zookeeper_acl,
            next_step=f'set security.zookeeper_acl = "{expected}", as the bookies\' '
            "zkEnableSecurity requires",
        )


async def end_with_session(store: MetadataStore) -> None:
    """Wait for the end of the session, then raise SessionLostError."""
    await store.wait_lost()
    raise SessionLostError("the ZooKeeper session has ended")


async def tell_of_returns(views: ViewSource, bookies: BookieClient) -> None:
    """Drop what the client knows of a bookie's failures when it registers again. Runs until
    cancelled."""
    while True:
        seen, before = views.change_count, views.current
        await views.wait_change(seen)
        for bookie in views.current.available:
            if views.current.czxid(bookie) != before.czxid(bookie):
                bookies.bookie_returned(bookie)
