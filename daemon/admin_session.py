"""The ZooKeeper session of a command.

``admin_session`` only reads, or writes orders. ``writing_session`` also writes ledger metadata.
Each write is recorded in the journal of this host and proves its session (rule S3).
"""

import asyncio
import getpass
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import structlog
from msgspec import structs

from daemon.settings import Settings
from daemon.state import open_journal
from daemon.zookeeper import Tell, open_store, tell_on_stderr
from ledgers.clock import SystemClock
from ledgers.errors import (
    BookmenderError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.host_names import host_names
from ledgers.manager import LedgerManager
from ledgers.registration import Registration, read_instance_id
from ledgers.store import Check, MetadataStore
from replication.history import Event, Kind, order_events, record_order
from replication.journal import ClusterJournal
from replication.nodes import Membership, NodeInfo, Role, SharedClock
from replication.znodes import ACL_HINT, ClusterPaths

T = TypeVar("T")

log = structlog.get_logger()

RECONNECT_S = 5.0
"""Time between two tries to open a session in place of a lost one."""


def operator() -> str:
    """Return who runs this process, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSession:
    """The connections and settings that a command works with. ``by``: who gives its orders."""

    settings: Settings
    store: MetadataStore
    manager: LedgerManager
    registration: Registration
    by: str = field(default_factory=operator)

    @classmethod
    async def on(cls, store: MetadataStore, settings: Settings) -> Self:
        """Return an AdminSession on an open store; the caller closes the store. Raises
        SettingsError (another layout), UnavailableError (no such cluster)."""
        manager = await LedgerManager.open(store, settings.uri)
        return cls(
            settings=settings,
            store=store,
            manager=manager,
            registration=Registration(store, manager.root, resolve=host_names().addresses),
        )

    @property
    def root(self) -> str:
        """Return the ledgers root of the cluster. The URI of the settings may mean another one."""
        return self.manager.root

    @property
    def paths(self) -> ClusterPaths:
        return ClusterPaths.below(self.root)

    async def note_order(
        self, event: Event, ledger_ids: Collection[int] = (), *, effects: Sequence[Event] = ()
    ) -> None:
        """Record in the history an order that was carried out, as ``note_order`` does."""
        await note_order(self.store, self.paths, event, ledger_ids, by=self.by, effects=effects)


def order_event(name: str, **facts: Any) -> Event:
    """Return the event of an order. ``name``: the command without ``bookmender``, and an option
    that makes it another order. ``facts``: further fields of the event."""
    return Event(kind=Kind.ORDER, order=name, **facts)


async def note_order(
    store: MetadataStore,
    paths: ClusterPaths,
    event: Event,
    ledger_ids: Collection[int] = (),
    *,
    by: str,
    effects: Sequence[Event] = (),
) -> None:
    """Record an order in the history, and ``effects``: what the command did itself.

    A failure is logged: the order itself was carried out.
    """
    events = [*order_events(structs.replace(event, by=by), ledger_ids), *effects]
    try:
        await record_order(store, paths, node=socket.gethostname(), events=events)
    except BookmenderError as error:
        log.error(
            "history.order_not_recorded", order=event.order, error=str(error), next_step=ACL_HINT
        )


@asynccontextmanager
async def admin_session(
    settings: Settings, *, ends_with_loop: bool = False, tell: Tell = tell_on_stderr
) -> AsyncIterator[AdminSession]:
    """Open a session for a command and close it at the end.

    ``ends_with_loop``, ``tell``: see ``open_store``. Raises SettingsError (another layout),
    UnavailableError (no ZooKeeper, or no cluster there).
    """
    async with open_store(settings, ends_with_loop=ends_with_loop, tell=tell) as store:
        yield await AdminSession.on(store, settings)


async def in_each_session(cluster: AdminSession, wait: Callable[[AdminSession], Awaitable[T]]) -> T:
    """Run ``wait``, and run it again in a new session whenever its session is lost. For waiting
    that changes nothing: it goes on after an outage of ZooKeeper of any length."""
    try:
        return await wait(cluster)
    except SessionLostError:
        tell_on_stderr("The ZooKeeper session was lost. Waiting for ZooKeeper.")
    while True:
        await asyncio.sleep(RECONNECT_S)
        with suppress(SessionLostError, UnavailableError):
            async with admin_session(cluster.settings) as again:
                return await wait(again)


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
            cluster_id = await read_instance_id(cluster.store, cluster.root)
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
