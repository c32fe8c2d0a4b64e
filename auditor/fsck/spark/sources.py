"""A BookKeeper cluster as Spark tables, for any query: ``spark.read.format("bookkeeper-ledgers")``.

All sources need the option ``metadataServiceUri``. ``bookkeeper-entries`` also takes
``readsInFlightPerBookie``, the limit of one task (16), and ``defaultPassword`` and
``defaultDigestType`` for ledgers whose metadata holds none. Ledgers and entries take
``numPartitions``; by default the number of ledgers decides.

Ledger ids are listed once, when the query is planned, and are part of its plan. So a repeated task
reads the same ledgers. Conditions on ``ledger_id`` are pushed down.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, MutableMapping

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from auditor.fsck.ledger_ids import cut, list_ledger_ids, pack, unpack
from auditor.fsck.spark import schemas
from auditor.fsck.spark.contents import Reach, Row, bookie_rows, entry_rows, ledger_rows, mark_rows
from auditor.fsck.spark.ranges import WantedLedgers, push
from ledgers.errors import SettingsError
from ledgers.metadata import DigestType

PARTITIONS_MIN = 16
"""Minimum number of partitions, if each then has enough ledgers to be worth a session."""

Options = MutableMapping[str, str]


def register(spark: SparkSession) -> None:
    """Register the four formats in the session."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (LedgersSource, BookiesSource, UnderreplicatedSource, EntriesSource):
        spark.dataSource.register(source)


class LedgersSource(DataSource):
    """One row for each ledger: its metadata."""

    @classmethod
    def name(cls) -> str:
        return "bookkeeper-ledgers"

    def schema(self) -> str:
        return schemas.LEDGERS

    def reader(self, schema: StructType) -> "LedgersReader":
        return LedgersReader(self.options, schema)


class EntriesSource(DataSource):
    """One row for each copy of an entry. Every copy is read, and its digest checked."""

    @classmethod
    def name(cls) -> str:
        return "bookkeeper-entries"

    def schema(self) -> str:
        return schemas.ENTRIES

    def reader(self, schema: StructType) -> "EntriesReader":
        return EntriesReader(self.options, schema)


class BookiesSource(DataSource):
    """One row for each bookie."""

    @classmethod
    def name(cls) -> str:
        return "bookkeeper-bookies"

    def schema(self) -> str:
        return schemas.BOOKIES

    def reader(self, schema: StructType) -> "BookiesReader":
        return BookiesReader(self.options, schema)


class UnderreplicatedSource(DataSource):
    """One row for each mark in the queues of under-replicated ledgers."""

    @classmethod
    def name(cls) -> str:
        return "bookkeeper-underreplicated"

    def schema(self) -> str:
        return schemas.UNDERREPLICATED

    def reader(self, schema: StructType) -> "MarksReader":
        return MarksReader(self.options, schema)


# --- Readers: made in the driver, sent to the tasks -----------------------------------------------------


class _Reader(DataSourceReader):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._reach = _reach(options)
        self._schema = schema

    @abstractmethod
    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]: ...

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for rows in _in_steps(self._rows(partition)):
            if rows:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)


class BookiesReader(_Reader):
    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return bookie_rows(self._reach)


class MarksReader(_Reader):
    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return mark_rows(self._reach)


class _OfLedgers(_Reader):
    """A reader of ledgers. Its partitions have about equal numbers of them, and hold packed ids."""

    ledgers_max: int
    """Maximum number of ledgers in a partition, unless ``numPartitions`` is given."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._partition_count = _number(options, "numPartitions", default=0, allowed=range(100_001))
        self._wanted = WantedLedgers()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        self._wanted, left = push(filters, self._wanted)
        return left

    def partitions(self) -> list[InputPartition]:
        listed = asyncio.run(list_ledger_ids(self._reach.metadata_service_uri))
        wanted = self._wanted.of(listed)
        count = self._partition_count or max(
            -(-len(wanted) // self.ledgers_max), min(PARTITIONS_MIN, len(wanted) // 100), 1
        )
        parts = cut(wanted, count=count) or [[]]  # given no partition, Spark makes one of its own
        return [InputPartition(pack(part)) for part in parts]


class LedgersReader(_OfLedgers):
    ledgers_max = 10_000

    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return ledger_rows(self._reach, unpack(partition.value))


class EntriesReader(_OfLedgers):
    ledgers_max = 500

    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return entry_rows(self._reach, unpack(partition.value))


def _in_steps(rows: AsyncIterator[list[Row]]) -> Iterator[list[Row]]:
    """Yield the rows of an asynchronous iterator. Its event loop runs only while Spark waits for
    rows."""
    with asyncio.Runner() as runner:  # its end closes iterators that were not exhausted
        while True:
            step = runner.run(_next(rows))
            if step is None:
                return
            yield step


async def _next(rows: AsyncIterator[list[Row]]) -> list[Row] | None:
    return await anext(rows, None)


# --- Options -----------------------------------------------------------------------------------------


def _reach(options: Options) -> Reach:
    uri = options.get("metadataServiceUri")
    if not uri:
        raise SettingsError.not_allowed("metadataServiceUri", uri, "a metadata service URI")
    known = Reach(metadata_service_uri=uri)
    reads = known.reads_in_flight_per_bookie
    reach = Reach(
        metadata_service_uri=uri,
        default_password=options.get("defaultPassword", known.default_password),
        default_digest_type=options.get("defaultDigestType", known.default_digest_type),
        reads_in_flight_per_bookie=_number(
            options, "readsInFlightPerBookie", default=reads, allowed=range(1, 501)
        ),
    )
    if reach.default_digest_type not in DigestType.__members__:
        allowed = ", ".join(DigestType.__members__)
        raise SettingsError.not_allowed("defaultDigestType", reach.default_digest_type, allowed)
    assert reach.uri  # raises SettingsError if it is invalid
    return reach


def _number(options: Options, name: str, *, default: int, allowed: range) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or int(value) not in allowed:
        raise SettingsError.not_allowed(name, value, f"{allowed.start} to {allowed.stop - 1}")
    return int(value)
