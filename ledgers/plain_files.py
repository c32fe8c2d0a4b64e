"""Writes files in folders that other users may write to, without following a link. A link in such a
folder may lead to any file of the user who runs this process."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ELOOP
from pathlib import Path
from typing import IO

IS_A_LINK = "the file is a link or no plain file. Find out who made it, and delete it"


def plain(path: str, flags: int) -> int:
    """Open a plain file with one name, no symbolic link. For ``open(opener=…)``. Raises OSError."""
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, safe, 0o666)
    except OSError as error:
        if error.errno != ELOOP:
            raise
        raise OSError(ELOOP, IS_A_LINK, path) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise OSError(ELOOP, IS_A_LINK, path)
    if flags & os.O_TRUNC:
        os.ftruncate(fd, 0)
    return fd


def refuse_links(folder: Path) -> None:
    """Raise OSError if the folder contains a link that another user made, or may have made."""
    found, user = folder.stat(), os.geteuid()
    is_shared = found.st_uid != user or found.st_mode & stat.S_IWOTH
    for each in folder.iterdir():
        if each.is_symlink() and (is_shared or each.lstat().st_uid != user):
            raise OSError(ELOOP, IS_A_LINK, str(each))


@contextmanager
def in_place(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write the new content to. At the end of the block it is synced and takes its
    place: after any crash either content is there. Readers of Parquet folders ignore its name with
    a dot. A file or link of that name is deleted before."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with beside.open("xb") as file:  # x follows no link
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def replace_file(path: Path, content: str) -> None:
    with in_place(path) as beside:
        beside.write(content.encode())
