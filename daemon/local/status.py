"""The state of a local cluster: its processes and the registrations of its bookies; its output."""

import enum
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import click

from daemon.local import servers
from daemon.local.cluster import LocalCluster
from daemon.local.processes import rss_bytes
from daemon.local.security import settings_file
from daemon.local.spec import ClusterSpec
from daemon.words import counted
from ledgers.model import BookieId


class BookieState(enum.StrEnum):
    WRITABLE = "writable"
    READ_ONLY = "read-only"
    UNREGISTERED = "unregistered"
    """The bookie runs, but is not registered: it is starting, or its session has expired."""
    DOWN = "down"
    UNKNOWN = "unknown"
    """The bookie runs, but ZooKeeper does not answer."""


COLOURS = {"up": "green", BookieState.WRITABLE: "green", BookieState.DOWN: "red"}
"""Colours of states. All others are yellow."""


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
    settings_file: str | None = None
    """Settings for a secured cluster."""
    bookkeeper: str
    storage: str
    layout: str
    data: str
    zookeeper: ServerStatus
    bookies: tuple[ServerStatus, ...]

    @property
    def is_whole(self) -> bool:
        return all(bookie.state == BookieState.WRITABLE for bookie in self.bookies)


def at_rest(spec: ClusterSpec, *, data: str) -> ClusterStatus:
    """Return the status of a cluster that is not running."""
    file = settings_file(Path(data), spec)
    return ClusterStatus(
        is_running=False,
        metadata_service_uri=spec.metadata_service_uri,
        settings_file=None if file is None else str(file),
        bookkeeper=spec.bookkeeper,
        storage=spec.storage.value,
        layout=spec.layout.value,
        data=data,
        zookeeper=ServerStatus(address=spec.zookeeper_address, state="down"),
        bookies=tuple(ServerStatus(address=b, state=BookieState.DOWN) for b in spec.bookies),
    )


def observe(cluster: LocalCluster) -> ClusterStatus:
    """Return the status of a running cluster."""
    writable = read_only = None
    if is_answering := servers.is_zookeeper_ready(cluster.spec.zookeeper_port):
        with cluster.session() as tree:
            writable, read_only = tree.writable(), tree.read_only()

    def server(address: str, state: str, pid: int | None) -> ServerStatus:
        rss = None if pid is None else rss_bytes(pid)
        return ServerStatus(address=address, state=state, pid=pid, rss_bytes=rss)

    def bookie_server(bookie: BookieId) -> ServerStatus:
        pid = cluster.pid(bookie)
        is_running = pid is not None
        state = bookie_state(bookie, is_running=is_running, writable=writable, read_only=read_only)
        return server(bookie, state, pid)

    return replace(
        at_rest(cluster.spec, data=str(cluster.data)),
        is_running=True,
        zookeeper=server(
            cluster.zookeeper_address, "up" if is_answering else "down", cluster.zookeeper_pid
        ),
        bookies=tuple(map(bookie_server, cluster.bookies)),
    )


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


# --- Output ---------------------------------------------------------------------------------------

# ``data_option``: the option that further commands need for this cluster, or an empty string.

LEFT_OUT = """  left out, because it has no cookie (it was decommissioned)
        To start it as an empty bookie: bookmender local wipe {place}{option},
        then bookmender local start {place}{option}"""

WELCOME = """
Try
  bookmender local write{option}     write a hundred ledgers
  bookmender local status{option}    the state of each process
  bookmender local kill {last}{option}    crash a bookie
  bookmender local start {last}{option}   start it again
  bookmender local down{option}      stop everything, keep the data"""


def print_welcome(status: ClusterStatus, *, duration_s: float, data_option: str) -> None:
    """Print the address and the bookies of a cluster that has started."""
    up = [place for place, each in enumerate(status.bookies, 1) if each.state != BookieState.DOWN]
    click.echo(
        f"BookKeeper {status.bookkeeper} is up: {counted(len(up), 'bookie')}, {status.storage} "
        f"storage, ready in {duration_s:.1f} s\n"
    )
    if status.settings_file is None:
        click.echo(f"  export BOOKMENDER_METADATA_SERVICE_URI={status.metadata_service_uri}\n")
    else:
        click.echo(
            "It has TLS, SASL and ACLs. Give its settings to the daemon and to each command:\n\n"
            f"  bookmender status -c {shlex.quote(status.settings_file)}\n"
        )
    for place, bookie in enumerate(status.bookies, start=1):
        note = "" if place in up else LEFT_OUT.format(place=place, option=data_option)
        click.echo(f"  {place:>4}  {bookie.address}{note}")
    click.echo(WELCOME.format(option=data_option, last=max(up, default=1)))


def print_status(status: ClusterStatus, *, data_option: str) -> None:
    rows = [("", f"ZooKeeper {status.zookeeper.address}", status.zookeeper)]
    rows += [(str(n), bookie.address, bookie) for n, bookie in enumerate(status.bookies, start=1)]
    width = max(len(name) for _, name, _ in rows)
    click.echo(f"    {'server':<{width}}  {'state':<12}  {'pid':>7}  {'memory':>8}")
    for place, name, server in rows:
        state = click.style(f"{server.state:<12}", fg=COLOURS.get(server.state, "yellow"))
        memory = "" if server.rss_bytes is None else f"{server.rss_bytes >> 20} MiB"
        click.echo(f"{place:>2}  {name:<{width}}  {state}  {server.pid or '':>7}  {memory:>8}")
    click.echo(
        f"\n{status.metadata_service_uri}  "
        f"(BookKeeper {status.bookkeeper}, {status.storage} storage)"
    )
    if not status.is_running:
        click.echo(f"It is not running. Start it with: bookmender local up{data_option}")
