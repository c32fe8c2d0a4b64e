"""``bookmender local``: the commands of the local cluster.

Exit codes: 0 done; 1 ``status`` found a bookie that is not writable; 2 wrong usage; 3 failed.
"""

import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from daemon.answers import as_json
from daemon.cli.main import CommandGroup, output_option
from daemon.cli.option_types import Folder
from daemon.cli.progress import Line, echo_notes
from daemon.local import folder, jars
from daemon.local.cluster import LocalCluster
from daemon.local.spec import (
    BOOKIES_DEFAULT,
    FILE_NAME,
    ClusterSpec,
    Storage,
    find_bookie,
    port_of,
)
from daemon.local.status import ClusterStatus, status_of
from daemon.local.writing import Written, what_was_written, write_ledgers
from daemon.settings import Settings, load_settings
from daemon.words import counted, printable, shortened
from ledgers.errors import SessionLostError, SettingsError, UnavailableError

LEFT_SHOWN_MAX = 10


@click.group(
    cls=CommandGroup,
    lazy={"demo": ("daemon.cli.demo:demo", "Kill a bookie and watch the repair.")},
)
def local() -> None:
    """Run a BookKeeper cluster on this machine.

    It is for trials of bookmender, and consists of ZooKeeper and Java bookies on 127.0.0.1, with
    about 100 MB of memory each.

    \b
      bookmender local up              start ZooKeeper and five bookies
      bookmender local up --secured    the same, with TLS, SASL and ACLs
      bookmender local write           write a hundred ledgers
      bookmender local write --open 3  the same, but leave three of them open
      bookmender local status          show the processes and bookies
      bookmender local kill 2          crash the second bookie
      bookmender local start 2         start it again with its data
      bookmender local wipe 2          delete its data and its cookie
      bookmender local down            stop everything, keep the data
      bookmender local demo            all in one, on a cluster of its own

    BOOKIE is a number from `status`, a port, or an ID such as 127.0.0.1:23181.
    """


_data_option = click.option(
    "--data",
    type=Folder(),
    callback=lambda context, option, given: given or folder.default_data().resolve(),
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
    type=click.Choice(jars.versions()),
    help=f"Downloaded once (30 MB, with storage db 100 MB).  [default: {jars.BOOKKEEPER_DEFAULT}]",
)
@click.option(
    "--storage",
    type=click.Choice([storage.value for storage in Storage]),
    callback=lambda context, option, given: given and Storage(given),
    help="Entry storage.  [default: sorted]",
)
@click.option("--port", "zookeeper_port", type=click.IntRange(1, 65535), help="Port of ZooKeeper.")
@click.option(
    "--session-timeout",
    "session_timeout_s",
    type=click.FloatRange(1, 120),
    metavar="SECONDS",
    help="ZooKeeper session timeout.  [default: 10]",
)
@click.option(
    "--secured", "is_secured", is_flag=True, help="With TLS, SASL and ACLs. Needs openssl."
)
@click.option("--foreground", is_flag=True, help="Run until Ctrl-C.")
@_data_option
@output_option
def up(foreground: bool, data: Path, output: str, **options: Any) -> None:
    """Create or start the cluster.

    The command returns when every bookie is ready. The cluster runs in the background until `down`.
    The first start creates it in the folder (--data, by default bookmender/local in the user's data
    folder). Later starts use the same data, ports and options. A larger --bookies adds bookies.
    """
    began_s = time.monotonic()
    progress = Line(due_s=math.inf)  # shown on a terminal only
    on_event = partial(progress.write, now_s=0)
    with _cleaned_up(data):
        try:
            cluster = LocalCluster.start(data, is_detached=True, on_event=on_event, **options)
        finally:
            progress.erase()
        cluster.release()
    found = status_of(cluster.spec, data, cluster)
    if output == "json":
        click.echo(as_json(found))
    else:
        duration_s = time.monotonic() - began_s
        print_welcome(found, duration_s=duration_s, data_option=folder.data_option(data))
    if foreground:
        sys.stdout.flush()
        try:
            cluster.wait()
        except KeyboardInterrupt:
            _stop(data)
            click.echo("stopped", err=True)


@contextmanager
def _cleaned_up(data: Path) -> Iterator[None]:
    """Delete a folder that a failed start created, unless it contains a cluster or a log that
    explains the failure. After Ctrl-C delete it in any case."""
    is_new = not data.exists()
    try:
        yield
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        explains = any(log.stat().st_size for log in data.glob("logs/*.log"))
        is_needed = (data / FILE_NAME).exists() or explains
        if is_new and data.is_dir() and (is_interrupt or not is_needed):
            with suppress(SettingsError, OSError):  # e.g. another process uses the folder
                folder.delete(data)
        if is_interrupt:
            left = "no cluster was created"
            if (data / FILE_NAME).exists():
                down = f"bookmender local down --delete{folder.data_option(data)}"
                left = f"the cluster in {data} is stopped and its data kept. Delete it with: {down}"
            echo_notes([f"interrupted; {left}"])
        raise


@local.command()
@_data_option
@output_option
def status(data: Path, output: str) -> None:
    """Show each process and each bookie's state.

    \b
      writable      takes reads and writes
      read-only     takes reads only
      unregistered  runs, but is not registered (starting, or session expired)
      down          does not run

    Exit code 1 unless every bookie is writable.
    """
    found = _status(data)
    if output == "json":
        click.echo(as_json(found))
    else:
        print_status(found, data_option=folder.data_option(data))
    if not found.is_whole:
        sys.exit(1)


@local.command()
@click.option(
    "--ledgers",
    default=100,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of ledgers.",
)
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
    """Write ledgers, to have something to repair.

    The ledgers have entries of 0 bytes to 1 MB, two or more copies, and all digest types. Each
    ledger leaves out at least one bookie, which can take over from a lost one.

    Exit code 3: too few bookies answer. What was written by then stays.
    """
    if left_open > ledgers:
        raise click.UsageError(f"--open {left_open} is more than --ledgers {ledgers}")
    found = _status(data)
    if not found.is_running:
        up = f"`bookmender local up{folder.data_option(data)}`"
        raise SettingsError(f"the cluster in {data} is not running; {up} starts it")
    settings = Settings(metadata_service_uri=found.metadata_service_uri)
    if found.settings_file is not None:
        settings = load_settings(Path(found.settings_file), environment={})
    written: list[Written] = []
    try:
        write_ledgers(settings, ledgers, written=written, open_count=left_open)
    except KeyboardInterrupt:
        echo_notes(what_was_written(written, ledger_count=ledgers, ended="interrupted"))
        raise
    except (UnavailableError, SessionLostError) as error:
        if written:
            echo_notes(what_was_written(written, ledger_count=ledgers, ended="stopped"))
        option = folder.data_option(data)
        raise UnavailableError(
            f"{error}; `bookmender local status{option}` shows which bookies are down, and "
            f"`bookmender local start BOOKIE{option}` starts one"
        ) from error
    for line in what_was_written(written, ledger_count=ledgers):
        click.echo(line)


@local.command()
@_bookie_argument
@click.option("--stop", is_flag=True, help="Stop it with SIGTERM instead.")
@_data_option
def kill(bookie: str, stop: bool, data: Path) -> None:
    """Crash a bookie (SIGKILL).

    The bookie stays registered until its ZooKeeper session expires, as after a real crash. With
    --stop it unregisters at once.
    """
    cluster = _running(data)
    named = find_bookie(cluster.bookies, bookie)
    if stop and cluster.terminate(named):
        click.echo(f"stopped {named}")
        return
    if not stop:
        cluster.kill(named)
    why = " because it did not stop in time" if stop else ""
    click.echo(f"killed {named}{why}; it stays registered until its session expires")


@local.command()
@_bookie_argument
@_data_option
def start(bookie: str, data: Path) -> None:
    """Start a bookie again with its data.

    Soon after `kill`, the start waits until the old session has expired.
    """
    cluster = _running(data)
    named = find_bookie(cluster.bookies, bookie)
    cluster.start_bookie(named)
    click.echo(f"started {named}")


@local.command()
@_bookie_argument
@_data_option
def wipe(bookie: str, data: Path) -> None:
    """Kill a bookie and delete its data.

    Its cookie is deleted, too. The bookie stays down. `start` starts it as an empty bookie with the
    same ID. If the cluster is not running, `up` starts it as part of the cluster.
    """
    named = find_bookie(_spec(data).bookies, bookie)
    if cluster := LocalCluster.find(data):
        cluster.wipe(named)
    else:
        with folder.lease(data):
            shutil.rmtree(data / "bookies" / str(port_of(named)), ignore_errors=True)
    click.echo(f"wiped {named}")


@local.command()
@click.option("--delete", is_flag=True, help="Also delete its data.")
@_data_option
def down(delete: bool, data: Path) -> None:
    """Stop the cluster. Its data stays, and `up` starts it again.

    --delete deletes only files of the cluster, and the folder if it is then empty. Exit code 2: the
    folder contains no cluster.
    """
    if delete:
        _spec(data)  # a folder without a cluster is refused before anything is stopped
    click.echo("stopped" if _stop(data) else f"no cluster is running on {data}")
    if not delete:
        return
    if left := folder.delete(data):
        shown = printable(shortened(left, at_most=LEFT_SHOWN_MAX))
        click.echo(f"deleted the cluster in {data}; other files stay there: {shown}")
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
    return status_of(_spec(data), data, LocalCluster.find(data))


def _running(data: Path) -> LocalCluster:
    cluster = LocalCluster.find(data)
    if cluster is None:
        raise SettingsError(f"no cluster is running on {data}")
    return cluster


def _stop(data: Path) -> bool:
    """Stop the cluster. Return False if it did not run."""
    cluster = LocalCluster.find(data)
    if cluster is not None:
        cluster.stop()
    return cluster is not None


# --- Output ---------------------------------------------------------------------------------------

COLOURS = {"up": "green", "writable": "green", "down": "red"}
"""Colours of states. All others are yellow."""

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
