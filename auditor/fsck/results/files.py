"""Replaces files and Parquet tables atomically: after any crash of the process or the machine, either
the old or the new content is there.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


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


def replace_table(
    path: Path,
    table: pa.Table,
    *,
    note: Mapping[str, str] | None = None,
) -> None:
    """Write the table as Parquet in place of an old file. ``note``: stored in the file's metadata,
    for ``read_note``."""
    if note is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **note})
    with in_place(path) as beside:
        pq.write_table(table, beside, compression="zstd")


def replace_tables(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write the tables into one file, each as a row group. No table may be empty."""
    with in_place(path) as beside, pq.ParquetWriter(beside, schema, compression="zstd") as file:
        for table in tables:
            file.write_table(table, row_group_size=table.num_rows)


def read_note(path: Path, key: str) -> str:
    """Return a note without reading the rows."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata
    return metadata[key.encode()].decode()
