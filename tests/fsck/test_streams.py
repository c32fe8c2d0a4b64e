"""Rows as streams of bytes, and back."""

from collections.abc import Iterator

import pyarrow as pa

from auditor.fsck.results.rows import SCHEMA, to_batch
from auditor.fsck.tasks import from_stream, in_streams, out_of_streams, to_stream
from tests.fsck.test_rows import VERDICTS

ROWS = to_batch(VERDICTS)


def one_by_one(position: int) -> Iterator[pa.RecordBatch]:
    """Yield two rows for each position."""
    start = 2 * position
    yield ROWS.slice(start, 1)
    yield ROWS.slice(start + 1, 1)


def test_rows_survive_streams_unchanged() -> None:
    streams = list(in_streams(one_by_one)(iter([0, 1])))

    assert len(streams) == 4
    rows = out_of_streams(streams, SCHEMA)
    assert rows.combine_chunks() == pa.Table.from_batches([ROWS])


def test_no_streams_are_no_rows() -> None:
    assert out_of_streams([], SCHEMA) == SCHEMA.empty_table()


def test_equal_rows_are_compressed() -> None:
    alike = pa.Table.from_batches([ROWS.slice(1, 1)] * 2_000).combine_chunks()

    stream = to_stream(alike)

    assert len(stream) < alike.nbytes / 10
    assert from_stream(stream) == alike
