"""The ZooKeeper session of a command.

``admin_session`` only reads, or writes orders. ``writing_session`` also writes ledger metadata.
Each write is recorded in the journal of this host and proves its session (rule S3).
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from daemon.logs import set_up_logs
from daemon.settings import Settings, load_settings
from daemon.state import open_journal
from daemon.zookeeper import open_store
from ledgers.clock import SystemClock
from ledgers.errors import UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.registration import Registration, read_instance_id
from ledgers.store import Check, MetadataStore
from replication.journal import ClusterJournal
from replication.nodes import Membership, NodeInfo, Role, SharedClock
from replication.znodes import ClusterPaths

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSession:
    """The connections and settings that a command works with."""

    settings: Settings
    store: MetadataStore
    manager: LedgerManager
    registration: Registration

    @classmethod
    async def on(cls, store: MetadataStore, settings: Settings) -> Self:
        """Return an AdminSession on an open store; the caller closes the store. Raises
        SettingsError (another layout), UnavailableError (no such cluster)."""
        return cls(
            settings=settings,
            store=store,
            manager=await LedgerManager.open(store, settings.uri),
            registration=Registration(store, settings.uri.root),
        )

    @property
    def paths(self) -> ClusterPaths:
        return ClusterPaths.below(self.settings.uri.root)


@asynccontextmanager
async def admin_session(
    settings: Settings, *, ends_with_loop: bool = False
) -> AsyncIterator[AdminSession]:
    """Open a session for a command and close it at the end.

    ``ends_with_loop``: see ``open_store``. Raises SettingsError (another layout), UnavailableError
    (no ZooKeeper, or no cluster there).
    """
    store = await open_store(settings, ends_with_loop=ends_with_loop)
    try:
        yield await AdminSession.on(store, settings)
    finally:
        await store.close()


def run_in_session(config: Path | None, action: Callable[[AdminSession], Awaitable[T]]) -> T:
    """Open a session, run ``action`` in it, close the session, and return the result."""
    settings = load_settings(config, os.environ)
    log_errors_only(settings)

    async def run() -> T:
        async with admin_session(settings) as cluster:
            return await action(cluster)

    return asyncio.run(run())


def log_errors_only(settings: Settings) -> None:
    """Log errors only, to standard error. Commands print their results."""
    set_up_logs(replace(settings.log, level="error"))


async def shared_clock(cluster: AdminSession) -> SharedClock:
    """Return a clock synchronised with ZooKeeper. Commands use it for deadlines that all nodes
    observe."""
    clock = SharedClock(SystemClock())
    with suppress(UnauthorizedError):  # without write access the clock of this host is used
        membership = await Membership.join(cluster.store, cluster.paths, by_hand())
        await membership.synchronise(clock)
    return clock


def by_hand() -> NodeInfo:
    """Return the node information of a command that holds ledger locks."""
    return NodeInfo(
        role=Role.HAND,
        host=socket.gethostname(),
        pid=os.getpid(),
        bookie_id=None,
        started_ms=SystemClock().wall_ms(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSession:
    """A session that may write ledger metadata.

    ``manager``: journals what it writes. ``session``: proves that the session still exists (rule
    S3). ``cluster_id``: the id of the cluster; None if the cluster has none. ``holder``: the text
    in the locks of the command.
    """

    cluster: AdminSession
    manager: LedgerManager
    cluster_id: str | None
    session: Check
    holder: str


@asynccontextmanager
async def writing_session(settings: Settings) -> AsyncIterator[WritingSession]:
    """Open a session that may write. Raises what ``admin_session`` raises; also SettingsError if
    the journal cannot be written."""
    with closing(open_journal(settings)) as journal:
        async with admin_session(settings, ends_with_loop=True) as cluster:
            cluster_id = await read_instance_id(cluster.store, settings.uri.root)
            manager = await LedgerManager.open(
                cluster.store, settings.uri, journal=ClusterJournal(journal, cluster_id).record
            )
            membership = await Membership.join(cluster.store, cluster.paths, by_hand())
            yield WritingSession(
                cluster=cluster,
                manager=manager,
                cluster_id=cluster_id,
                session=membership.guard.check,
                holder=socket.gethostname(),
            )
