"""The state of a local cluster: its processes and the registrations of its bookies; its output."""

import shlex
from pathlib import Path
from typing import Literal

import click

from daemon.answers import Answer
from daemon.local import servers
from daemon.local.cluster import LocalCluster
from daemon.local.processes import rss_bytes
from daemon.local.security import settings_file
from daemon.local.spec import ClusterSpec
from daemon.words import counted
from ledgers.model import BookieId

State = Literal["writable", "read-only", "unregistered", "down", "unknown", "up"]
"""``unregistered``: the bookie runs, but it is starting, or its session has expired. ``unknown``:
it runs, but ZooKeeper does not answer. ``up``: of ZooKeeper."""
COLOURS = {"up": "green", "writable": "green", "down": "red"}
"""Colours of states. All others are yellow."""


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
    up = [place for place, each in enumerate(status.bookies, 1) if each.state != "down"]
    click.echo(
        f"BookKeeper {status.bookkeeper} is up: {counted(len(up), 'bookie')}, {status.storage} "
        f"storage, ready in {duration_s:.1f} s\n"
    )
    if not data_option:
        click.echo("Commands use it, unless settings name another cluster.\n")
    elif status.settings_file is None:
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
