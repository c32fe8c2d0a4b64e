"""The state of a local cluster: its processes and the registrations of its bookies."""

from pathlib import Path
from typing import Literal

from daemon.answers import Answer
from daemon.local import servers
from daemon.local.cluster import LocalCluster
from daemon.local.processes import rss_bytes
from daemon.local.security import settings_file
from daemon.local.spec import ClusterSpec
from ledgers.model import BookieId

State = Literal["writable", "read-only", "unregistered", "down", "unknown", "up"]
"""``unregistered``: the bookie runs, but it is starting, or its session has expired. ``unknown``:
it runs, but ZooKeeper does not answer. ``up``: of ZooKeeper."""


class ServerStatus(Answer, frozen=True, kw_only=True):
    """One process. ``pid`` and ``rss_bytes`` are None while it is down."""

    address: str
    state: State
    pid: int | None = None
    rss_bytes: int | None = None


class ClusterStatus(Answer, frozen=True, kw_only=True):
    """The whole cluster. ``is_running``: False: all processes are
    down. ``settings_file``: settings for a secured cluster."""

    version: int = 1
    is_running: bool
    metadata_service_uri: str
    settings_file: str | None = None
    bookkeeper: str
    storage: str
    layout: str
    data: str
    zookeeper: ServerStatus
    bookies: tuple[ServerStatus, ...]

    @property
    def is_whole(self) -> bool:
        return all(bookie.state == "writable" for bookie in self.bookies)


def status_of(spec: ClusterSpec, data: Path, cluster: LocalCluster | None = None) -> ClusterStatus:
    """Return the status of a cluster. ``cluster``: None if it is not running."""
    is_answering, writable, read_only = False, None, None
    if cluster is not None and (is_answering := servers.is_zookeeper_ready(spec.zookeeper_port)):
        with cluster.session() as tree:
            writable, read_only = tree.writable(), tree.read_only()

    def server(address: str, state: State, pid: int | None) -> ServerStatus:
        rss = None if pid is None else rss_bytes(pid)
        return ServerStatus(address=address, state=state, pid=pid, rss_bytes=rss)

    def bookie_server(bookie: BookieId) -> ServerStatus:
        pid = None if cluster is None else cluster.pid(bookie)
        is_running = pid is not None
        state = bookie_state(bookie, is_running=is_running, writable=writable, read_only=read_only)
        return server(bookie, state, pid)

    file = settings_file(data, spec)
    return ClusterStatus(
        is_running=cluster is not None,
        metadata_service_uri=spec.metadata_service_uri,
        settings_file=None if file is None else str(file),
        bookkeeper=spec.bookkeeper,
        storage=spec.storage.value,
        layout=spec.layout.value,
        data=str(data),
        zookeeper=server(
            spec.zookeeper_address,
            "up" if is_answering else "down",
            None if cluster is None else cluster.zookeeper_pid,
        ),
        bookies=tuple(map(bookie_server, spec.bookies)),
    )


def bookie_state(
    bookie: BookieId,
    *,
    is_running: bool,
    writable: frozenset[BookieId] | None,
    read_only: frozenset[BookieId] | None,
) -> State:
    """Return the state of a bookie from its process and the registrations, which are None if
    ZooKeeper does not answer."""
    if not is_running:  # it may still be registered, until its session expires
        return "down"
    if writable is None or read_only is None:
        return "unknown"
    if bookie in writable:
        return "writable"
    return "read-only" if bookie in read_only else "unregistered"
