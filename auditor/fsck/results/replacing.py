"""A file put in the place of another: there whole or not at all, whatever kills the process, or the
machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """Where to write what is to stand there. On disk when this ends: what is built on it comes
    after.

    What is half written has a name that readers of Parquet folders pass over.
    """
    beside = path.with_name(f".{path.name}.new")
    yield beside
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def replace_file(path: Path, content: str) -> None:
    with in_place(path) as beside:
        beside.write_text(content, encoding="utf-8")
