"""The data folder of a local cluster. In it lie:

lock            held while the cluster runs: one owner at a time
cluster.json    what it is made of (``spec``), so that it comes back the same
control.sock    where the supervisor of ``local up`` listens
logs/           what each process printed
zookeeper/      its settings and data
bookies/PORT/   settings, journal and ledgers of each bookie
autorecovery/   settings of Java's AutoRecovery daemons
"""

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from daemon.local import spec
from ledgers.errors import SettingsError

LOCK_NAME = "lock"
FILES = (LOCK_NAME, spec.FILE_NAME, "control.sock", "log4j2.properties", "bookies/classes.jsa")
FOLDERS = ("zookeeper", "autorecovery")
"""Ours with all that is in them."""


def default_data() -> Path:
    """Where a cluster lies that nobody gave another folder."""
    share = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(share) / "bookmender" / "local"


def data_option(data: Path) -> str:
    """What a command of ``local`` needs to mean the cluster in this folder."""
    return "" if data == default_data().resolve() else f" --data {shlex.quote(str(data))}"


class TakenError(SettingsError):
    """Somebody else owns the folder."""


def lease(data: Path) -> IO[str]:
    """Make the folder if need be and own it, until what is returned is closed or this process ends.

    Raises TakenError when somebody else owns it. A lock needs no cleaning up after a crash.
    """
    make(data)
    lock = (data / LOCK_NAME).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise TakenError(
            f"a cluster is running already on {data}: `bookmender local down{data_option(data)}` stops it, and "
            "keeps what it stored; "
            "then give the same command again"
        ) from error
    return lock


@contextmanager
def left_as_before(data: Path) -> Iterator[None]:
    """A folder that is made within goes again if that fails, unless a cluster, or a log of why, is
    in it.

    Whoever interrupts it wants neither: then all that was made goes.
    """
    is_new = not data.exists()
    try:
        yield
    except KeyboardInterrupt:
        if is_new and data.is_dir():
            with suppress(SettingsError, OSError):  # as below; what stays the caller sees
                made = spec.ClusterSpec.load(data)
                delete(data, bookie_ports=made.bookie_ports if made else ())
        raise
    except BaseException:
        if is_new and data.is_dir() and not _is_needed(data):
            with suppress(TakenError):  # somebody else makes a cluster there
                delete(data, bookie_ports=())
        raise


def _is_needed(data: Path) -> bool:
    logs = data.glob("logs/*.log")
    return (data / spec.FILE_NAME).exists() or any(log.stat().st_size for log in logs)


def make(path: Path) -> None:
    """Make a folder here if need be. Raises SettingsError when nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise SettingsError(f"cannot make the folder {path}: {error.strerror}") from error
    if not writable:
        raise SettingsError(f"cannot write to the folder {path}")


def wipe(data: Path, *, bookie_port: int) -> None:
    """Delete what a bookie of a cluster that is not running stored. Raises TakenError."""
    with lease(data):
        shutil.rmtree(data / "bookies" / str(bookie_port), ignore_errors=True)


def delete(data: Path, *, bookie_ports: Iterable[int]) -> tuple[str, ...]:
    """Delete all that a cluster which is not running keeps here, and nothing else.

    The caller has seen that it is a cluster's folder. Returns the names of what is left in it,
    which is not ours; where nothing is, the folder goes, too. Raises TakenError.
    """
    with lease(data):
        ours = [*FOLDERS, *(f"bookies/{port}" for port in bookie_ports)]
        for folder in map(data.joinpath, ours):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        for file in [*data.glob("logs/*.log"), *map(data.joinpath, FILES)]:
            if not file.is_dir():
                file.unlink(missing_ok=True)
    for folder in (data / "logs", data / "bookies", data):
        with suppress(OSError):  # somebody else's files are in it
            folder.rmdir()
    return tuple(sorted(path.name for path in data.iterdir())) if data.exists() else ()
