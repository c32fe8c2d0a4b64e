"""Rows on their way from an executor to the driver: Arrow's streams, which are bytes to Spark.

Columns it would take apart into rows of its own, and put together again, twice for each ledger; and
it would plan a query for each task.
"""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

Work = Callable[[int], Iterator[pa.RecordBatch]]
"""What a task does, by its position among those that were given out with it."""


def in_streams(work: Work) -> Callable[[Iterable[int]], Iterator[bytes]]:
    """For ``mapPartitions``: in go positions, out come the rows of each."""

    def run(positions: Iterable[int]) -> Iterator[bytes]:
        for position in positions:
            for batch in work(position):
                yield to_stream(pa.Table.from_batches([batch]))

    return run


def out_of_streams(streams: Iterable[bytes], schema: pa.Schema) -> pa.Table:
    """All their rows, which have that schema."""
    return pa.concat_tables([schema.empty_table(), *map(from_stream, streams)])


def to_stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_stream(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()
