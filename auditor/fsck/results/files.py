"""Replaces files atomically: after any crash of the process or the machine, either the old or the
new content is there. Without pyarrow: the daemon imports this.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """Yield a path to write the new content to. At the end of the block the content is synced to
    disk and takes its place, so that later steps can rely on it.

    The temporary name starts with a dot: readers of Parquet folders ignore such files.
    """
    beside = path.with_name(f".{path.name}.new")
    yield beside
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def replace_file(path: Path, content: str) -> None:
    with in_place(path) as beside:
        beside.write_text(content, encoding="utf-8")
