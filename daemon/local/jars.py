"""Finds and downloads the jars of BookKeeper and its ZooKeeper, once per user.

Each version has a list in ``jar_lists``, in the format of ``sha256sum``: digests, and paths in a
Maven repository. BookKeeper's own jar comes first. The list has what bookkeeper-server needs, and
two jars that only a ZooKeeper server needs (metrics-core, snappy-java). Each jar is downloaded into
the user's cache folder, and gets its name there only if its digest is right. So a download that was
interrupted goes on with the next jar.

Class-data sharing: the classes of a bookie are loaded and verified once, and later mapped into
memory. That saves each bookie almost half of its start. If there is no archive, the first bookie of
a cluster records one when it stops normally, which takes two seconds. A JVM checks that an archive
belongs to its own build and to these jars, and ignores it otherwise.
"""

import fcntl
import hashlib
import os
import shutil
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from daemon.home import home_folder
from daemon.local.java import Java
from ledgers.errors import SettingsError, UnavailableError

BOOKKEEPER_DEFAULT = "4.18.0"
LISTS = Path(__file__).with_name("jar_lists")
REPOSITORY = "https://repo1.maven.org/maven2"
REPOSITORY_VARIABLE = "MAVEN_REPOSITORY_URL"
"""Environment variable with the address of a mirror. Proxies are those of the environment too."""
TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20

ZOOKEEPER_JARS = (
    *("zookeeper-", "audience-annotations-", "metrics-core-", "netty-", "snappy-java-"),
    *("slf4j-api-", "log4j-"),
)
"""How the names of the jars begin that a ZooKeeper server needs. No others are on its class
path."""

OnProgress = Callable[[int, int], None]
"""Receives the number of jars downloaded so far, and how many are to be downloaded."""


def versions() -> list[str]:
    """Return the versions of BookKeeper that can be downloaded, the newest first."""
    return sorted((path.stem for path in LISTS.glob("*.sha256")), reverse=True)


def jars_folder(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(cache) / "bookmender" / "jars" / name


def bookkeeper_classpath(version: str) -> str:
    """Return the class path of a bookie. The jars must have been downloaded (``fetch``). Without
    the jar of RocksDB, the largest, a bookie of any storage hangs when it is stopped."""
    return os.pathsep.join(str(_jar(version, path)) for _, path in _listed(version))


def zookeeper_classpath(version: str) -> str:
    """Return the class path of the ZooKeeper that this version of BookKeeper uses."""
    jars = [_jar(version, path) for _, path in _listed(version)]
    return os.pathsep.join(str(jar) for jar in jars if jar.name.startswith(ZOOKEEPER_JARS))


def fetch(
    name: str = BOOKKEEPER_DEFAULT,
    *,
    lists: Path = LISTS,
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Return the folder with all jars of a list. Downloads those that are missing (a version of
    BookKeeper: 100 MB, a minute or two). One process at a time downloads.

    Raises SettingsError if there is no such list, UnavailableError if a download fails.
    """
    listed = _listed(name, lists)
    folder = jars_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second process finds the jars when it gets the lock
        missing = [(sha256, path) for sha256, path in listed if not _jar(name, path).exists()]
        for done, (sha256, path) in enumerate(missing):
            on_progress(done, len(missing))
            _download(path, sha256, _jar(name, path))
    return folder


def _listed(name: str, lists: Path = LISTS) -> list[tuple[str, str]]:
    """Return the digest and the path of each jar."""
    try:
        lines = (lists / f"{name}.sha256").read_text().splitlines()
    except OSError as error:
        raise SettingsError(
            f"the local cluster cannot run BookKeeper {name!r}, only {', '.join(versions())}"
        ) from error
    return [(sha256, path) for sha256, path in (line.split() for line in lines)]


def _jar(name: str, path: str) -> Path:
    return jars_folder(name) / Path(path).name


def _download(path: str, sha256: str, jar: Path) -> None:
    """Download one jar. Its digest is checked before it gets its name."""
    repository = os.environ.get(REPOSITORY_VARIABLE) or REPOSITORY
    url = f"{repository.rstrip('/')}/{path}"
    partial = jar.with_name("partial")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, partial.open("wb") as file:
            while piece := answer.read(PIECE_BYTES):
                digest.update(piece)
                file.write(piece)
    except (OSError, ValueError, HTTPException) as error:
        raise UnavailableError(
            f"cannot download {url}: {error}. {REPOSITORY_VARIABLE} may name a mirror of Maven "
            "Central; https_proxy a proxy"
        ) from error
    if digest.hexdigest() != sha256:
        partial.unlink()
        raise UnavailableError(f"{url} is not the jar that was expected: its SHA-256 differs")
    partial.rename(jar)


def archive_path(jars_folder: Path, java: Java) -> Path:
    """Return the path of the archive. It is in the jars folder, so it is deleted together with the
    jars."""
    return jars_folder / f"bookie-java-{java.version}.jsa"


def archive_flags(archive: Path, *, draft: Path | None) -> tuple[str, ...]:
    """Return the flags for a JVM. ``draft``: where the JVM records an archive if there is none. An
    archive of another class path is not used, without a word."""
    quiet = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
    if archive.exists():
        return (f"-XX:SharedArchiveFile={archive}", *quiet)
    return () if draft is None else (f"-XX:ArchiveClassesAtExit={draft}", *quiet)


def keep_archive(draft: Path, archive: Path) -> None:
    """Move the draft, if there is one, to its final path. Its JVM must have ended, so that the
    draft is complete."""
    if not draft.exists():
        return
    copy = archive.with_name(f"{archive.name}.{os.getpid()}")
    shutil.copyfile(draft, copy)  # the two paths may be on different disks
    os.replace(copy, archive)
    draft.unlink()
