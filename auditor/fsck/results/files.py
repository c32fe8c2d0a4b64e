"""Files that are there whole or not at all, whatever kills the process that writes them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def replace_table(
    path: Path,
    table: pa.Table,
    *,
    note: Mapping[str, str] | None = None,
) -> None:
    """As Parquet; what was there is replaced. ``note``: kept beside the rows, for ``read_note``.

    On disk when this returns: what is built on it comes after. What is half written has a name that readers
    of Parquet folders pass over.
    """
    if note is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **note})
    with _in_place(path) as beside:
        pq.write_table(table, beside, compression="zstd")


def replace_tables(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Likewise, each a row group; none may be empty."""
    with _in_place(path) as beside, pq.ParquetWriter(beside, schema, compression="zstd") as file:
        for table in tables:
            file.write_table(table, row_group_size=table.num_rows)


@contextmanager
def _in_place(path: Path) -> Iterator[Path]:
    """Where to write what is to stand there."""
    beside = path.with_name(f".{path.name}.new")
    yield beside
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def read_note(path: Path, key: str) -> str:
    """Without reading the rows."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata
    return metadata[key.encode()].decode()
