"""``bookmender local``: the commands of the local cluster.

Exit codes: 0 done; 1 ``status`` found a bookie that is not writable; 2 wrong usage; 3 failed.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from daemon.cli.main import output_option
from daemon.cli.progress import echo_notes, printable
from daemon.local import control, folder, views
from daemon.local.control import NotRunningError, Question, Verb
from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.spec import (
    BOOKIES_DEFAULT,
    FILE_NAME,
    ClusterSpec,
    Storage,
    find_bookie,
    port_of,
)
from daemon.local.status import ClusterStatus, at_rest
from daemon.local.supervisor import Listener, Wish, start_detached, supervise
from ledgers.errors import (
    SessionLostError,
    SettingsError,
    UnavailableError,
)
from ledgers.model import BookieId

LEFT_SHOWN_MAX = 10

Welcome = Callable[[ClusterStatus], None]
"""Prints the address and the bookies of a cluster that is ready."""


@click.group()
def local() -> None:
    """Run a BookKeeper cluster on this machine, to try bookmender.

    It consists of ZooKeeper and Java bookies on 127.0.0.1, with about 100 MB of memory each.

    \b
      bookmender local up              start ZooKeeper and five bookies
      bookmender local write           write a hundred ledgers
      bookmender local write --open 3  the same, but leave three of them open
      bookmender local status          show the processes and bookies
      bookmender local kill 2          crash the second bookie
      bookmender local start 2         start it again with its data
      bookmender local wipe 2          delete its data and its cookie
      bookmender local down            stop everything, keep the data

    BOOKIE is a number from `status`, a port, or an ID such as 127.0.0.1:23181.
    """


class _Folder(click.Path):
    """A folder that must not be an empty string. An unset shell variable would otherwise mean the
    current folder."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if value == "":
            self.fail("the name of the folder is empty", param, ctx)
        return super().convert(value, param, ctx)


_data_option = click.option(
    "--data",
    type=_Folder(),
    callback=lambda context, option, given: (given or folder.default_data()).resolve(),
    help="Folder of the cluster.",
)
_bookie_argument = click.argument("bookie")


@local.command()
@click.option(
    "--bookies",
    type=click.IntRange(1, 50),
    help=f"Number of bookies.  [default: {BOOKIES_DEFAULT}]",
)
@click.option(
    "--bookkeeper",
    metavar="VERSION",
    help=f"Downloaded once (100 MB).  [default: {BOOKKEEPER_DEFAULT}]",
)
@click.option(
    "--storage",
    type=click.Choice([storage.value for storage in Storage]),
    help="Entry storage.  [default: sorted]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of ZooKeeper.",
)
@click.option(
    "--session-timeout",
    "session_timeout_s",
    type=click.FloatRange(1, 120),
    metavar="SECONDS",
    help="ZooKeeper session timeout.  [default: 10]",
)
@click.option("--foreground", is_flag=True, help="Run until Ctrl-C.")
@_data_option
@output_option
def up(
    bookies: int | None,
    bookkeeper: str | None,
    storage: str | None,
    port: int | None,
    session_timeout_s: float | None,
    foreground: bool,
    data: Path,
    output: str,
) -> None:
    """Start the cluster, and return when every bookie is ready.

    The cluster runs in the background until `down`. The first start creates it in the folder
    (--data, by default bookmender/local in the user's data folder). Later starts use the same data,
    ports and options. A larger --bookies adds bookies.
    """
    wish = Wish(
        data=str(data),
        bookies=bookies,
        bookkeeper=bookkeeper,
        storage=None if storage is None else Storage(storage),
        zookeeper_port=port,
        session_timeout_s=session_timeout_s,
    )
    with (
        _explain_what_is_left(data),
        folder.left_as_before(data),
        views.StartProgress().shown() as progress,
    ):

        def welcome(found: ClusterStatus) -> None:
            if output == "json":
                click.echo(_json(found))
            else:
                views.print_welcome(
                    found, duration_s=progress.elapsed_s, data_option=folder.data_option(data)
                )

        start = _run_here if foreground else _start_in_background
        start(wish, progress, welcome)


def _run_here(wish: Wish, progress: views.StartProgress, welcome: Welcome) -> None:
    """Run until Ctrl-C, which stops everything. A Ctrl-C before the cluster is ready raises."""

    def on_ready(found: ClusterStatus) -> None:
        progress.end()
        welcome(found)

    try:
        supervise(
            wish, Listener(on_event=progress.event, on_fetch=progress.fetch, on_ready=on_ready)
        )
    except KeyboardInterrupt:
        if not progress.has_ended:
            raise
        click.echo("stopped", err=True)


def _start_in_background(wish: Wish, progress: views.StartProgress, welcome: Welcome) -> None:
    """Print the welcome after the start, so that a closed pipe does not end the cluster."""
    ready: list[ClusterStatus] = []

    def on_ready(found: ClusterStatus) -> None:
        progress.end()
        ready.append(found)

    start_detached(
        wish, Listener(on_event=progress.event, on_fetch=progress.fetch, on_ready=on_ready)
    )
    welcome(ready[0])


@contextmanager
def _explain_what_is_left(data: Path) -> Iterator[None]:
    """After Ctrl-C print what is left of the cluster, and how to delete it."""
    had_cluster = _has_cluster(data)
    try:
        yield
    except KeyboardInterrupt:
        if had_cluster:
            left = f"the cluster in {data} is stopped; its data is kept"
        elif _has_cluster(data):
            further = folder.data_option(data)
            left = (
                f"{data} contains a cluster that was not ready yet: `bookmender local up{further}` "
                f"starts it again, `bookmender local down --delete{further}` deletes it"
            )
        else:
            left = "no cluster was created" if data.exists() else "nothing is left of it"
        echo_notes([f"interrupted; {left}"])
        raise


def _has_cluster(data: Path) -> bool:
    return (data / FILE_NAME).exists()


@local.command()
@_data_option
@output_option
def status(data: Path, output: str) -> None:
    """Show each process and the state of each bookie.

    \b
      writable      takes reads and writes
      read-only     takes reads only
      unregistered  runs, but is not registered (starting, or session expired)
      down          does not run

    Exit code 1 unless every bookie is writable.
    """
    found = _status(data)
    if output == "json":
        click.echo(_json(found))
    else:
        views.print_status(found, data_option=folder.data_option(data))
    if not found.is_whole:
        sys.exit(1)


@local.command()
@click.option("--ledgers", default=100, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--open",
    "left_open",
    metavar="N",
    default=0,
    type=click.IntRange(min=0),
    help="Leave this many of them open.",
)
@_data_option
def write(ledgers: int, left_open: int, data: Path) -> None:
    """Write ledgers of many shapes, so that there is something to repair.

    The ledgers have entries of 0 bytes to 1 MB, two or more copies, and all digest types. Each
    ledger leaves out at least one bookie, which can take over from a lost one.

    Exit code 3: too few bookies answer. What was written by then stays.
    """
    if left_open > ledgers:
        raise click.UsageError(f"--open {left_open} is more than --ledgers {ledgers}")
    # Imported here, because the demo imports this package.
    from daemon.demo.scenario import so_far, what_was_written, write_ledgers
    from daemon.demo.workload import Written

    found = _status(data)
    if not found.is_running:
        raise NotRunningError(
            f"the cluster in {data} is not running; `bookmender local up` starts it"
        )
    written: list[Written] = []
    try:
        write_ledgers(found.metadata_service_uri, ledgers, written=written, open_count=left_open)
    except KeyboardInterrupt:
        echo_notes(so_far(written, ledger_count=ledgers, ended="interrupted"))
        raise
    except (UnavailableError, SessionLostError) as error:
        if written:
            echo_notes(so_far(written, ledger_count=ledgers, ended="stopped"))
        way_on = views.way_on(_status(data), data_option=folder.data_option(data))
        raise UnavailableError(f"{error}; {way_on}") from error
    for line in what_was_written(written, ledger_count=ledgers):
        click.echo(line)


@local.command()
@_bookie_argument
@click.option("--stop", is_flag=True, help="Stop it with SIGTERM instead.")
@_data_option
def kill(bookie: str, stop: bool, data: Path) -> None:
    """Crash a bookie (SIGKILL).

    As after a real crash, the bookie stays registered until its ZooKeeper session expires. With
    --stop it unregisters at once.
    """
    found = control.ask(data, Question(verb=Verb.TERMINATE if stop else Verb.KILL, bookie=bookie))
    if stop and not found.was_killed:
        click.echo(f"stopped {found.bookie}")
        return
    why = " because it did not stop in time" if found.was_killed else ""
    click.echo(f"killed {found.bookie}{why}; it stays registered until its session expires")


@local.command()
@_bookie_argument
@_data_option
def start(bookie: str, data: Path) -> None:
    """Start a bookie again, with the same ID and data.

    Soon after `kill`, the start waits until the old session has expired.
    """
    found = control.ask(data, Question(verb=Verb.START, bookie=bookie))
    click.echo(f"started {found.bookie}")


@local.command()
@_bookie_argument
@_data_option
def wipe(bookie: str, data: Path) -> None:
    """Kill a bookie, and delete its data and its cookie.

    The bookie stays down. `start` starts it as an empty bookie with the same ID. If the cluster is
    not running, `up` does.
    """
    try:
        wiped = control.ask(data, Question(verb=Verb.WIPE, bookie=bookie)).bookie
    except NotRunningError:
        wiped = find_bookie(_spec(data).bookies, bookie)
        folder.wipe(data, bookie_port=port_of(BookieId(wiped)))
    click.echo(f"wiped {wiped}")


@local.command()
@click.option("--delete", is_flag=True, help="Also delete its data.")
@_data_option
def down(delete: bool, data: Path) -> None:
    """Stop the cluster. Its data stays, and `up` starts it again.

    --delete deletes only files of the cluster, and the folder if it is then empty. Exit code 2: the
    folder contains no cluster.
    """
    spec = _spec(data) if delete else None
    try:
        control.ask(data, Question(verb=Verb.DOWN))
        click.echo("stopped")
    except NotRunningError as error:  # the cluster is already stopped, as requested
        click.echo(str(error))
    if spec is None:
        return
    left = folder.delete(data, bookie_ports=spec.bookie_ports)
    if left:
        shown = ", ".join(map(printable, left[:LEFT_SHOWN_MAX]))
        more = ", …" if len(left) > LEFT_SHOWN_MAX else ""
        click.echo(f"deleted the cluster in {data}; other files stay there: {shown}{more}")
    else:
        click.echo(f"deleted {data}")


def _spec(data: Path) -> ClusterSpec:
    """Return the spec of the cluster in this folder. Raises SettingsError if there is none."""
    spec = ClusterSpec.load(data)
    if spec is None:
        up = f"`bookmender local up{folder.data_option(data)}`"
        raise SettingsError(f"there is no cluster in {data}; {up} creates one")
    return spec


def _status(data: Path) -> ClusterStatus:
    try:
        found = control.ask(data, Question(verb=Verb.STATUS)).status
    except NotRunningError:
        return at_rest(_spec(data), data=str(data))
    assert found is not None
    return found


def _json(status: ClusterStatus) -> str:
    return msgspec.json.format(msgspec.json.encode(status), indent=2).decode()
