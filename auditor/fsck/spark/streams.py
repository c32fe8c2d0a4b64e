"""Carries rows from executors to the driver as Arrow streams, which are plain bytes to Spark.

Given columns, Spark would convert each ledger's row twice, to its own form and back. It would also
plan a query for each task.
"""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

Work = Callable[[int], Iterator[pa.RecordBatch]]
"""The work of one task. The argument is its position among the tasks given out together."""


def in_streams(work: Work) -> Callable[[Iterable[int]], Iterator[bytes]]:
    """Return a function for ``mapPartitions``: it takes positions, and yields streams of their
    rows."""

    def run(positions: Iterable[int]) -> Iterator[bytes]:
        for position in positions:
            for batch in work(position):
                yield to_stream(pa.Table.from_batches([batch]))

    return run


def out_of_streams(streams: Iterable[bytes], schema: pa.Schema) -> pa.Table:
    """Return all rows of the streams, which have this schema."""
    return pa.concat_tables([schema.empty_table(), *map(from_stream, streams)])


def to_stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_stream(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()
