"""A ZooKeeper server without bookies, for tests that need no more."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from daemon.local.java import Java
from daemon.local.ports import free_ports
from daemon.local.processes import Child, wait_until
from daemon.local.servers import ZOOKEEPER_HEAP_MIB, Servers, is_zookeeper_ready
from daemon.local.spec import ClusterSpec
from ledgers.zookeeper.store import ZooKeeperStore

START_TIMEOUT_S = 60.0
PATIENT_SESSION_S = 60.0
"""Session timeout of a test itself. No slow phase of the machine should end the session."""


@contextmanager
def running_zookeeper(
    folder: Path,
    *,
    heap_mib: int = ZOOKEEPER_HEAP_MIB,
    flags: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Iterator["ZooKeeperServer"]:
    """Run a server. ``flags``: of the JVM. ``settings``: more settings of the server."""
    server = ZooKeeperServer(folder, heap_mib=heap_mib, flags=flags, settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.process.kill()


class ZooKeeperServer:
    """A server that keeps its data and its sessions over a restart."""

    def __init__(
        self,
        folder: Path,
        *,
        heap_mib: int = ZOOKEEPER_HEAP_MIB,
        flags: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings or {}
        self._heap_mib, self._flags = heap_mib, flags
        (self.port,) = free_ports(1)
        self._servers = Servers(data=folder, java=Java.find())
        self._process: Child | None = None

    @property
    def address(self) -> str:
        return self._spec.zookeeper_address

    @property
    def process(self) -> Child:
        assert self._process is not None, "not started"
        return self._process

    def start(self) -> None:
        self._process = self._servers.zookeeper(
            self._spec, heap_mib=self._heap_mib, flags=self._flags
        )
        wait_until(
            lambda: is_zookeeper_ready(self.port), [self._process], timeout_s=START_TIMEOUT_S
        )

    @property
    def _spec(self) -> ClusterSpec:
        return ClusterSpec(
            zookeeper_port=self.port, bookie_ports=(), zookeeper_settings=self._settings
        )


@asynccontextmanager
async def opened(
    server: ZooKeeperServer, session_timeout_s: float = PATIENT_SESSION_S, **options: Any
) -> AsyncIterator[ZooKeeperStore]:
    """Open a session on the server, and close it at the end."""
    store = await ZooKeeperStore.open(
        server.address, session_timeout_s=session_timeout_s, **options
    )
    try:
        yield store
    finally:
        await store.close()
