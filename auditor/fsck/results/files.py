"""Replaces files atomically: after any crash of the process or the machine, either the old or the
new content is there. Without pyarrow: the daemon imports this.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def in_place(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write the new content to. At the end of the block the content is synced to
    disk and takes its place, so that later steps can rely on it.

    The temporary name starts with a dot: readers of Parquet folders ignore such files. What has
    this name is deleted: the rest of a crash, or a link that another user made.
    """
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
