"""The output of the local cluster's commands."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from daemon.cli.progress import counted
from daemon.local.status import BookieState, ClusterStatus, ServerStatus

COLOURS = {
    "up": "green",
    BookieState.WRITABLE.value: "green",
    BookieState.READ_ONLY.value: "yellow",
    BookieState.UNREGISTERED.value: "yellow",
    BookieState.UNKNOWN.value: "yellow",
    BookieState.DOWN.value: "red",
}
WIDEST = 1_000
"""Width in columns for output that must not be cut short on a narrow terminal."""
BOOKIES_TO_WRITE_MIN = 3
"""Two bookies for the copies of each entry, and one that takes over from a lost one."""
LEFT_OUT = """  left out, as its cookie is gone (it was decommissioned):
        `bookmender local wipe {place}{option}`, then `bookmender local start {place}{option}`, bring it back as an empty one"""


class StartProgress:
    """One line of progress at the foot of the terminal while a cluster starts. Prints nothing if
    there is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._started_s = time.monotonic()
        self.has_ended = False
        self._task = self._progress.add_task("Starting", total=None)

    @contextmanager
    def shown(self) -> Iterator["StartProgress"]:
        with self._progress:
            yield self

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def fetch(self, fetched: int, total: int | None) -> None:
        count = "" if total is None else f": {fetched} of {total}"
        self._progress.update(
            self._task,
            description=f"Fetching BookKeeper's jars, once{count}",
            completed=fetched,
            total=total,
        )

    def event(self, event: str) -> None:
        self._progress.update(self._task, description=f"{event} is ready", total=None)

    def end(self) -> None:
        self._progress.stop()
        self.has_ended = True


def print_welcome(status: ClusterStatus, *, duration_s: float, data_option: str) -> None:
    """Print the address and the bookies. ``data_option``: the option that further commands need for
    this cluster."""
    left_out = [bookie for bookie in status.bookies if bookie.state == BookieState.DOWN.value]
    click.echo(
        f"BookKeeper {status.bookkeeper} is up: {counted(len(status.bookies) - len(left_out), 'bookie')}, "
        f"{status.storage} storage, ready in {duration_s:.1f} s\n"
        f"\n"
        f"  export BOOKMENDER_METADATA_SERVICE_URI={status.metadata_service_uri}\n"
    )
    for place, bookie in enumerate(status.bookies, start=1):
        note = LEFT_OUT.format(place=place, option=data_option) if bookie in left_out else ""
        click.echo(f"  {place:>4}  {bookie.address}{note}")
    click.echo("\nTry")
    running = [n for n, bookie in enumerate(status.bookies, start=1) if bookie not in left_out]
    last = running[-1] if running else 1
    for command, effect in (
        ("status", "how it is"),
        (f"kill {last}", "a bookie crashes"),
        (f"start {last}", "and comes back"),
        ("down", "stop everything, keep the data"),
    ):
        click.echo(f"  bookmender local {command + data_option:<20}  {effect}")


def print_status(status: ClusterStatus, *, data_option: str) -> None:
    """Print the status. ``data_option``: as in ``print_welcome``."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("server")
    table.add_column("state")
    table.add_column("pid", justify="right")
    table.add_column("memory", justify="right")
    table.add_row(*_row("", "ZooKeeper " + status.zookeeper.address, status.zookeeper))
    for place, bookie in enumerate(status.bookies, start=1):
        table.add_row(*_row(str(place), bookie.address, bookie))
    console = _Console(highlight=False)
    uncut = console.options.update(width=WIDEST)  # an address that is cut short is useless
    console.width = max(console.width, console.measure(table, options=uncut).maximum)
    console.print(table)
    console.print(
        f"\n{status.metadata_service_uri}  (BookKeeper {status.bookkeeper}, {status.storage} storage)",
        soft_wrap=True,
    )
    if not status.is_running:
        console.print(
            f"It is not running: `bookmender local up{data_option}` brings it back.", soft_wrap=True
        )


def way_on(status: ClusterStatus, *, data_option: str) -> str:
    """Return advice for a cluster on which ledgers cannot be written. ``data_option``: as in
    ``print_welcome``."""
    up = f"`bookmender local up{data_option}"
    if not status.is_running:
        return f"the cluster has stopped: {up}` starts it again"
    down = [
        (place, bookie.address)
        for place, bookie in enumerate(status.bookies, start=1)
        if bookie.state == BookieState.DOWN.value
    ]
    if down:
        place, address = down[0]
        also = f", like {len(down) - 1} more" if len(down) > 1 else ""
        return (
            f"{address} is down{also}: `bookmender local start {place}{data_option}` brings it back"
        )
    if len(status.bookies) < BOOKIES_TO_WRITE_MIN:
        return f"`bookmender local down{data_option}`, then {up} --bookies {BOOKIES_TO_WRITE_MIN}`, adds some"
    return f"`bookmender local status{data_option}` shows each bookie's state: try again when all are writable"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error for ``daemon.cli.main`` to handle, as for all other output. rich itself
        would exit with 1."""
        raise BrokenPipeError


def _row(place: str, name: str, server: ServerStatus) -> tuple[str, ...]:
    colour = COLOURS[server.state]
    memory = "" if server.rss_bytes is None else f"{server.rss_bytes >> 20} MiB"
    pid = "" if server.pid is None else str(server.pid)
    return place, name, f"[{colour}]{server.state}[/]", pid, memory
