"""The command line of the local cluster: ``bookmender local …``.

Exit codes: 0 all is well, 1 ``status`` found something down, 2 called wrongly, 3 it went wrong.
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
"""Shows a cluster that is ready."""


@click.group()
def local() -> None:
    """A real BookKeeper cluster on this machine, to try things on.

    Real ZooKeeper and real Java bookies on 127.0.0.1, small enough for a laptop: about 100 MB of
    memory each. A first look at how a cluster loses a bookie and gets it back:

    \b
      bookmender local up              start ZooKeeper and five bookies
      bookmender local write           a hundred ledgers of many shapes
      bookmender local write --open 3  … of which a writer that died left three unclosed
      bookmender local status          each process, each bookie's state
      bookmender local kill 2          the second bookie crashes
      bookmender local start 2         … and comes back with its data
      bookmender local wipe 2          its disk is lost: it may start again, empty
      bookmender local down            stop everything; the data stays for the next up

    BOOKIE is a number from `status`, a port, or a whole id such as 127.0.0.1:23181.
    """


class _Folder(click.Path):
    """A folder that is named: an empty text, as of a variable that is not set, would be where the
    caller stands."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if value == "":
            self.fail("it is empty: name a folder", param, ctx)
        return super().convert(value, param, ctx)


_data_option = click.option(
    "--data",
    type=_Folder(),
    callback=lambda context, option, given: (given or folder.default_data()).resolve(),
    help="The cluster's folder: another folder, another cluster.  "
    "[default: bookmender/local in the user's data folder]",
)
_bookie_argument = click.argument("bookie")


@local.command()
@click.option(
    "--bookies",
    type=click.IntRange(1, 50),
    help=f"How many; more than before adds some.  [default: as before, else {BOOKIES_DEFAULT}]",
)
@click.option(
    "--bookkeeper",
    metavar="VERSION",
    help="Fetched once, about 100 MB: 4.16.6, 4.17.3, 4.18.0 …  "
    f"[default: as before, else {BOOKKEEPER_DEFAULT}]",
)
@click.option(
    "--storage",
    type=click.Choice([storage.value for storage in Storage]),
    help="How bookies store entries.  [default: as before, else sorted]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="ZooKeeper's port.  [default: as before, else any that is free]",
)
@click.option(
    "--session-timeout",
    "session_timeout_s",
    type=click.FloatRange(1, 120),
    metavar="SECONDS",
    help="How long a crashed bookie stays registered.  [default: as before, else 10]",
)
@click.option("--foreground", is_flag=True, help="Stay here until Ctrl-C, which stops everything.")
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

    The first time on a folder it makes a new cluster; after `down`, or a crash, it brings the same
    one back, with its data and ports. It runs in the background until `down`.
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
        _saying_what_is_left(data),
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
    """Until Ctrl-C, which stops everything; one that comes before all is ready has broken off the
    start."""

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
    """The welcome comes after the start: that nobody reads it is no reason to end the cluster."""
    ready: list[ClusterStatus] = []

    def on_ready(found: ClusterStatus) -> None:
        progress.end()
        ready.append(found)

    start_detached(
        wish, Listener(on_event=progress.event, on_fetch=progress.fetch, on_ready=on_ready)
    )
    welcome(ready[0])


@contextmanager
def _saying_what_is_left(data: Path) -> Iterator[None]:
    """Whoever interrupts a start is told what there is, and how to be rid of it."""
    had_cluster = _has_cluster(data)
    try:
        yield
    except KeyboardInterrupt:
        if had_cluster:
            left = f"the cluster in {data} is stopped, and keeps what it stored"
        elif _has_cluster(data):
            further = folder.data_option(data)
            left = (
                f"{data} stays, with a cluster that was not ready yet: `bookmender local up{further}` "
                f"starts it again, `bookmender local down --delete{further}` deletes it"
            )
        else:
            left = "no cluster was made" if data.exists() else "nothing is left of it"
        echo_notes([f"interrupted; {left}"])
        raise


def _has_cluster(data: Path) -> bool:
    return (data / FILE_NAME).exists()


@local.command()
@_data_option
@output_option
def status(data: Path, output: str) -> None:
    """Show each process and each bookie's state. Exits 1 unless every bookie is writable.

    \b
      writable      takes reads and writes
      read-only     takes reads only
      unregistered  runs, but ZooKeeper does not know it (starting, or its session has expired)
      down          does not run
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
    help="Leave so many of them unclosed, as a writer that died does.",
)
@_data_option
def write(ledgers: int, left_open: int, data: Path) -> None:
    """Write ledgers of many shapes, so that there is something to lose.

    Entries of 0 bytes to 1 MB, each on two bookies or more, every digest type; one bookie fewer
    than there are holds each ledger, so that another can take over from a lost one.

    Interrupted, or where too few bookies answer (exit code 3), it says what was written by then:
    that stays, and so do the ledgers that were begun, as by a writer that died.
    """
    if left_open > ledgers:
        raise click.UsageError(f"--open {left_open}: there are to be {ledgers} --ledgers in all")
    # Here, because the demonstration is built upon this package.
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
@click.option("--stop", is_flag=True, help="Stop it in good order (SIGTERM) instead.")
@_data_option
def kill(bookie: str, stop: bool, data: Path) -> None:
    """Crash a bookie (SIGKILL).

    As with a real crash, ZooKeeper goes on listing it until its session has expired; with --stop it
    takes its leave at once.
    """
    found = control.ask(data, Question(verb=Verb.TERMINATE if stop else Verb.KILL, bookie=bookie))
    if stop and not found.was_killed:
        click.echo(f"stopped {found.bookie}")
        return
    why = ", as it did not end when asked" if found.was_killed else ""
    click.echo(f"killed {found.bookie}{why}; ZooKeeper lists it until its session has expired")


@local.command()
@_bookie_argument
@_data_option
def start(bookie: str, data: Path) -> None:
    """Bring a bookie back, with the same id and whatever data it has.

    Right after `kill` that takes until its former session has expired.
    """
    found = control.ask(data, Question(verb=Verb.START, bookie=bookie))
    click.echo(f"started {found.bookie}")


@local.command()
@_bookie_argument
@_data_option
def wipe(bookie: str, data: Path) -> None:
    """Lose a bookie's disk: kill it, delete its data and its cookie.

    It stays down. `start` then brings it back as an empty bookie with the same id; so does `up`,
    where the cluster is not running.
    """
    try:
        wiped = control.ask(data, Question(verb=Verb.WIPE, bookie=bookie)).bookie
    except NotRunningError:
        wiped = find_bookie(_spec(data).bookies, bookie)
        folder.wipe(data, bookie_port=port_of(BookieId(wiped)))
    click.echo(f"wiped {wiped}")


@local.command()
@click.option("--delete", is_flag=True, help="Delete all that it stored, too.")
@_data_option
def down(delete: bool, data: Path) -> None:
    """Stop everything. The data stays, and `up` brings the cluster back.

    With --delete only what the cluster made goes, and the folder if nothing else is in it. A folder
    without a cluster is left alone: exit code 2.
    """
    spec = _spec(data) if delete else None
    try:
        control.ask(data, Question(verb=Verb.DOWN))
        click.echo("stopped")
    except NotRunningError as error:  # which is what was wanted
        click.echo(str(error))
    if spec is None:
        return
    left = folder.delete(data, bookie_ports=spec.bookie_ports)
    if left:
        shown = ", ".join(map(printable, left[:LEFT_SHOWN_MAX]))
        more = ", …" if len(left) > LEFT_SHOWN_MAX else ""
        click.echo(f"deleted the cluster in {data}; what is not of it stays there: {shown}{more}")
    else:
        click.echo(f"deleted {data}")


def _spec(data: Path) -> ClusterSpec:
    """Of the cluster in this folder. Raises SettingsError where there is none, or nobody can
    tell."""
    spec = ClusterSpec.load(data)
    if spec is None:
        up = f"`bookmender local up{folder.data_option(data)}`"
        raise SettingsError(f"there is no cluster in {data}; {up} makes one")
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
