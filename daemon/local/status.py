"""The state of a local cluster: its processes and the registrations of its bookies."""

import enum
from dataclasses import dataclass

from daemon.local import znodes, zookeeper
from daemon.local.cluster import LocalCluster
from daemon.local.processes import rss_bytes
from daemon.local.spec import ClusterSpec
from ledgers.model import BookieId


class BookieState(enum.Enum):
    WRITABLE = "writable"
    READ_ONLY = "read-only"
    UNREGISTERED = "unregistered"
    """The bookie runs, but is not registered: it is starting, or its session has expired."""
    DOWN = "down"
    UNKNOWN = "unknown"
    """The bookie runs, but ZooKeeper does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One process. ``pid`` and ``rss_bytes`` are None while it is down."""

    address: str
    state: str
    pid: int | None = None
    rss_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The whole cluster. ``is_running``: True if there is a supervisor; without one all processes
    are down."""

    version: int = 1
    is_running: bool
    metadata_service_uri: str
    bookkeeper: str
    storage: str
    layout: str
    data: str
    zookeeper: ServerStatus
    bookies: tuple[ServerStatus, ...]

    @property
    def is_whole(self) -> bool:
        return all(bookie.state == BookieState.WRITABLE.value for bookie in self.bookies)


def bookie_state(
    bookie: BookieId,
    *,
    is_running: bool,
    writable: frozenset[BookieId] | None,
    read_only: frozenset[BookieId] | None,
) -> BookieState:
    """Return the state of a bookie from its process and the registrations, which are None if
    ZooKeeper does not answer."""
    if not is_running:  # it may still be registered, until its session expires
        return BookieState.DOWN
    if writable is None or read_only is None:
        return BookieState.UNKNOWN
    if bookie in writable:
        return BookieState.WRITABLE
    return BookieState.READ_ONLY if bookie in read_only else BookieState.UNREGISTERED


def observe(cluster: LocalCluster) -> ClusterStatus:
    writable = read_only = None
    is_answering = zookeeper.is_ready(cluster.spec.zookeeper_port)
    if is_answering:
        with znodes.session(cluster.spec.zookeeper_port) as tree:
            writable, read_only = tree.writable(), tree.read_only()
    states = {
        bookie: bookie_state(
            bookie,
            is_running=cluster.pid(bookie) is not None,
            writable=writable,
            read_only=read_only,
        )
        for bookie in cluster.bookies
    }
    return _status(
        cluster.spec,
        data=str(cluster.data),
        is_running=True,
        zookeeper=_server(
            cluster.zookeeper_address, "up" if is_answering else "down", cluster.zookeeper_pid
        ),
        bookies=tuple(
            _server(bookie, state.value, cluster.pid(bookie)) for bookie, state in states.items()
        ),
    )


def at_rest(spec: ClusterSpec, *, data: str) -> ClusterStatus:
    """Return the status of a cluster that is not running."""
    return _status(
        spec,
        data=data,
        is_running=False,
        zookeeper=_server(spec.zookeeper_address, "down", None),
        bookies=tuple(_server(bookie, BookieState.DOWN.value, None) for bookie in spec.bookies),
    )


def _server(address: str, state: str, pid: int | None) -> ServerStatus:
    return ServerStatus(
        address=address, state=state, pid=pid, rss_bytes=None if pid is None else rss_bytes(pid)
    )


def _status(
    spec: ClusterSpec,
    *,
    data: str,
    is_running: bool,
    zookeeper: ServerStatus,
    bookies: tuple[ServerStatus, ...],
) -> ClusterStatus:
    return ClusterStatus(
        is_running=is_running,
        metadata_service_uri=spec.metadata_service_uri,
        bookkeeper=spec.bookkeeper,
        storage=spec.storage.value,
        layout=spec.layout.value,
        data=data,
        zookeeper=zookeeper,
        bookies=bookies,
    )
