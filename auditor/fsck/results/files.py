"""Files that are there whole or not at all, whatever kills the process that writes them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def replace_table(
    path: Path,
    table: pa.Table,
    *,
    note: Mapping[str, str] | None = None,
    row_group_size: int | None = None,
) -> None:
    """As Parquet; what was there is replaced. ``note``: kept beside the rows, for ``read_note``.

    On disk when this returns: what is built on it comes after. What is half written has a name that readers
    of Parquet folders pass over.
    """
    if note is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **note})
    beside = path.with_name(f".{path.name}.new")
    pq.write_table(table, beside, row_group_size=row_group_size, compression="zstd")
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def read_note(path: Path, key: str) -> str:
    """Without reading the rows."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata
    return metadata[key.encode()].decode()
