"""The state of a local cluster: its processes and the registrations of its bookies; its output."""

import enum
import shlex
from collections.abc import Iterator
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

BOOKIES_TO_WRITE_MIN = 3
"""Two bookies for the copies of each entry, and one that takes over from a lost one."""


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
        zookeeper=_server(spec.zookeeper_address, "down", None),
        bookies=tuple(_server(bookie, BookieState.DOWN, None) for bookie in spec.bookies),
    )


def observe(cluster: LocalCluster) -> ClusterStatus:
    """Return the status of a running cluster."""
    port, writable, read_only = cluster.spec.zookeeper_port, None, None
    is_answering = servers.is_zookeeper_ready(port)
    if is_answering:
        with cluster.session() as tree:
            writable, read_only = tree.writable(), tree.read_only()

    def server(bookie: BookieId) -> ServerStatus:
        pid = cluster.pid(bookie)
        is_running = pid is not None
        state = bookie_state(bookie, is_running=is_running, writable=writable, read_only=read_only)
        return _server(bookie, state, pid)

    return replace(
        at_rest(cluster.spec, data=str(cluster.data)),
        is_running=True,
        zookeeper=_server(
            cluster.zookeeper_address, "up" if is_answering else "down", cluster.zookeeper_pid
        ),
        bookies=tuple(map(server, cluster.bookies)),
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


def _server(address: str, state: str, pid: int | None) -> ServerStatus:
    return ServerStatus(
        address=address, state=state, pid=pid, rss_bytes=None if pid is None else rss_bytes(pid)
    )


# --- Output ---------------------------------------------------------------------------------------

# ``data_option``: the option that further commands need for this cluster, or an empty string.

LEFT_OUT = """  left out, because it has no cookie (it was decommissioned)
        To start it as an empty bookie: bookmender local wipe {place}{option},
        then bookmender local start {place}{option}"""


def print_welcome(status: ClusterStatus, *, duration_s: float, data_option: str) -> None:
    """Print the address and the bookies of a cluster that has started."""
    left_out = [bookie for bookie in status.bookies if bookie.state == BookieState.DOWN]
    count = counted(len(status.bookies) - len(left_out), "bookie")
    click.echo(
        f"BookKeeper {status.bookkeeper} is up: {count}, {status.storage} storage, "
        f"ready in {duration_s:.1f} s\n"
        f"\n"
        f"{_how_to_connect(status)}\n"
    )
    last = 1
    for place, bookie in enumerate(status.bookies, start=1):
        note = LEFT_OUT.format(place=place, option=data_option) if bookie in left_out else ""
        click.echo(f"  {place:>4}  {bookie.address}{note}")
        last = last if note else place
    click.echo("\nTry")
    commands = (
        ("write", "write a hundred ledgers"),
        ("status", "the state of each process"),
        (f"kill {last}", "crash a bookie"),
        (f"start {last}", "start it again"),
        ("down", "stop everything, keep the data"),
    )
    width = max(len(command) for command, _ in commands) + len(data_option)
    for command, effect in commands:
        click.echo(f"  bookmender local {command + data_option:<{width}}  {effect}")


def _how_to_connect(status: ClusterStatus) -> str:
    if status.settings_file is None:
        return f"  export BOOKMENDER_METADATA_SERVICE_URI={status.metadata_service_uri}"
    file = shlex.quote(status.settings_file)
    return (
        "It has TLS, SASL and ACLs. Give its settings to the daemon and to each command:\n"
        f"\n  bookmender status -c {file}"
    )


def print_status(status: ClusterStatus, *, data_option: str) -> None:
    for line in _table(status):
        click.echo(line)
    click.echo(
        f"\n{status.metadata_service_uri}  "
        f"(BookKeeper {status.bookkeeper}, {status.storage} storage)"
    )
    if not status.is_running:
        click.echo(f"It is not running. Start it with: bookmender local up{data_option}")


def _table(status: ClusterStatus) -> Iterator[str]:
    rows = [("", f"ZooKeeper {status.zookeeper.address}", status.zookeeper)]
    rows += [(str(n), bookie.address, bookie) for n, bookie in enumerate(status.bookies, start=1)]
    width = max(len(name) for _, name, _ in rows)
    yield f"    {'server':<{width}}  {'state':<12}  {'pid':>7}  {'memory':>8}"
    for place, name, server in rows:
        state = click.style(f"{server.state:<12}", fg=COLOURS.get(server.state, "yellow"))
        memory = "" if server.rss_bytes is None else f"{server.rss_bytes >> 20} MiB"
        yield f"{place:>2}  {name:<{width}}  {state}  {server.pid or '':>7}  {memory:>8}"


def write_advice(status: ClusterStatus, *, data_option: str) -> str:
    """Return advice for a cluster on which ledgers cannot be written."""
    up = f"bookmender local up{data_option}"
    if not status.is_running:
        return f"the cluster has stopped. Start it with: {up}"
    if len(status.bookies) < BOOKIES_TO_WRITE_MIN:
        down = f"bookmender local down{data_option}"
        return f"add bookies with: {down}, then {up} --bookies {BOOKIES_TO_WRITE_MIN}"
    for place, bookie in enumerate(status.bookies, start=1):
        if bookie.state == BookieState.DOWN:
            start = f"bookmender local start {place}{data_option}"
            return f"{bookie.address} is down. Start it with: {start}"
    return f"try again when all bookies are writable (bookmender local status{data_option})"
