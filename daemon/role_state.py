"""What the services of a node publish about themselves, for the node's HTTP server.

A ``NodeService`` is a service's thread together with its ``RoleState``. The thread writes the
state; the HTTP thread reads it. Each field is replaced and never changed in place, so no lock is
needed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Gauge

from auditor.backlog import Backlog
from daemon.threads import ServiceThread
from ledgers.store import SessionState
from ledgers.zookeeper.store import ZooKeeperStore
from replication.worker import ReplicationWorker

LEADER = Gauge("bookmender_leader", "1 if this node's auditor leads, else 0.")


class RoleState:
    """The state of one service. ``name``: as in the log, for example ``auditor``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.store: ZooKeeperStore | None = None
        """The open session; None between two sessions."""
        self._answered_s = time.monotonic()
        """When ZooKeeper answered last, at the end of the last session."""
        self.is_working = False
        """True while the service does its work: a worker picks ledgers; an auditor leads, or takes
        part in the election; an observer looks."""
        self.worker: ReplicationWorker | None = None
        """Set while this service repairs."""
        self.backlog: Backlog | None = None
        """Set while this auditor leads."""

    @property
    def is_connected(self) -> bool:
        """True if the service has a session, and a server of ZooKeeper is connected and answers."""
        store = self.store
        if store is None or store.is_silent:
            return False
        return store.state is SessionState.CONNECTED

    @property
    def silent_s(self) -> float:
        """For how long ZooKeeper does not answer this service, or it has no session."""
        store = self.store
        return time.monotonic() - self._answered_s if store is None else store.silent_s

    @property
    def is_ready(self) -> bool:
        return self.is_working and self.is_connected

    @property
    def is_leader(self) -> bool:
        return self.backlog is not None

    @contextmanager
    def in_session(self, store: ZooKeeperStore) -> Iterator[None]:
        """Publish the session while the body runs."""
        self.store = store
        try:
            yield
        finally:
            self._answered_s = time.monotonic() - store.silent_s
            self.store = None

    @property
    def leased_count(self) -> int:
        """Return how many ledgers this service has leased."""
        worker = self.worker
        return 0 if worker is None else worker.leased_count

    @contextmanager
    def working(self, worker: ReplicationWorker | None = None) -> Iterator[None]:
        """Publish that the service works while the body runs. ``worker``: what repairs in it."""
        self.is_working, self.worker = True, worker
        try:
            yield
        finally:
            self.is_working, self.worker = False, None

    @contextmanager
    def leading(self, backlog: Backlog) -> Iterator[None]:
        """Publish the leadership while the body runs."""
        self.backlog = backlog
        LEADER.set(1)
        try:
            yield
        finally:
            self.backlog = None
            LEADER.set(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeService:
    """One service of this node: its thread, and what it publishes."""

    thread: ServiceThread
    state: RoleState
