"""The data folder of a local cluster. It contains:

lock            held while the cluster runs, by its servers or their owner
cluster.json    the description of the cluster (``spec``), used at each later start
logs/           the output of each process
zookeeper/      settings and data of ZooKeeper
bookies/PORT/   settings, journal and ledgers of each bookie
autorecovery/   settings of Java's AutoRecovery daemons
security/       certificates and passwords of a secured cluster, and our settings for it
"""

import fcntl
import os
import shlex
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from daemon.home import home_folder
from daemon.local import spec
from ledgers.errors import SettingsError

LOCK_NAME = "lock"
LEASE_TIMEOUT_S = 1.0
"""A server that has just been killed closes its files, and so the lock, a moment later."""
FILES = (LOCK_NAME, spec.FILE_NAME, "log4j2.properties", "bookies/classes.jsa")
FOLDERS = ("zookeeper", "autorecovery", "security")
"""Folders that belong to the cluster with everything in them."""


def default_data() -> Path:
    """Return the data folder of a cluster if the user gave none."""
    share = os.environ.get("XDG_DATA_HOME") or home_folder() / ".local" / "share"
    return Path(share) / "bookmender" / "local"


def data_option(data: Path) -> str:
    """Return the option that a command of ``local`` needs for the cluster in this folder."""
    return "" if data == default_data().resolve() else f" --data {shlex.quote(str(data))}"


def lease(data: Path) -> IO[str]:
    """Create the folder if necessary and own it until the returned file is closed by this process
    and by those that inherit it.

    Raises SettingsError if another process owns it. The lock needs no cleanup after a crash.
    """
    make(data)
    lock = (data / LOCK_NAME).open("a")
    deadline_s = time.monotonic() + LEASE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                lock.close()
                raise SettingsError(
                    f"a cluster is running already on {data}. Stop it, which keeps its data, and "
                    f"try again: bookmender local down{data_option(data)}"
                ) from error
        time.sleep(0.02)


def is_in_use(data: Path) -> bool:
    """Return True if a cluster runs on this folder."""
    try:
        with (data / LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def make(path: Path) -> None:
    """Create the folder if necessary. Raises SettingsError if it is not writable, or if other users
    may write there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
        status = path.stat()
    except OSError as error:
        raise SettingsError(f"cannot make the folder {path}: {error.strerror}") from error
    if not writable:
        raise SettingsError(f"cannot write to the folder {path}")
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise SettingsError(
            f"another user may write to the folder {path}, and a link there may lead to any file "
            "of yours. Use a folder of your own"
        )


def delete(data: Path) -> tuple[str, ...]:
    """Delete the files of a cluster that is not running, and no other files.

    Returns the names of the remaining files, which do not belong to the cluster. If there are none,
    the folder itself is deleted. Raises SettingsError if the cluster runs or the
    saved spec is unreadable.
    """
    with lease(data):
        saved = spec.ClusterSpec.load(data)
        ours = [*FOLDERS, *(f"bookies/{port}" for port in (saved.bookie_ports if saved else ()))]
        for folder in map(data.joinpath, ours):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        for file in [*data.glob("logs/*.log"), *map(data.joinpath, FILES)]:
            if not file.is_dir():
                file.unlink(missing_ok=True)
    for folder in (data / "logs", data / "bookies", data):
        with suppress(OSError):  # the folder contains files of others
            folder.rmdir()
    return tuple(sorted(path.name for path in data.iterdir())) if data.exists() else ()
