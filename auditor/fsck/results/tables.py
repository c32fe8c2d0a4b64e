"""Replaces and reads Parquet tables. They are replaced atomically, as in ``files``."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from auditor.fsck.results.files import in_place


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


def read_note(path: Path, key: str, *, default: str | None = None) -> str:
    """Return a note without reading the rows. Raises KeyError without ``default``."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata
    if default is not None and key.encode() not in metadata:
        return default
    return metadata[key.encode()].decode()
