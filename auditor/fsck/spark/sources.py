"""A BookKeeper cluster as Spark tables, for any query: ``spark.read.format("bookkeeper-ledgers")``.

All sources need the option ``metadataServiceUri``. ``bookkeeper-entries`` also takes
``readsInFlightPerBookie``, the limit of one task (16), and ``defaultPassword`` and
``defaultDigestType`` for ledgers whose metadata holds none. Ledgers and entries take
``numPartitions``; by default the number of ledgers decides. The settings of ``[security]`` are
options, too, such as ``security.bookie_tls``. They name files, which executors must have.

Ledger ids are listed once, when the query is planned, and are part of its plan. So a repeated task
reads the same ledgers. An incomplete listing raises (rule S8). Conditions on ``ledger_id`` are
pushed down. Nothing is written, and no ledger is fenced.

The columns are stable: columns may be added, but a change of meaning needs a new name. Times are
milliseconds since 1970. Ranges are inclusive at both ends.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, ClassVar

import google_crc32c
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from auditor.fsck.executor import read_session
from auditor.fsck.ledger_list import cut, list_ledger_ids, pack, unpack
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Answer, Bookies
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.layout import LONG_ID_STOP, MetadataUri
from ledgers.digest import EntryDigest
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    DigestMismatchError,
    NoSuchEntryError,
    NoSuchLedgerError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.host_names import host_names
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, DigestType, fragments, known_fragments
from ledgers.reading import find_end
from ledgers.registration import Registration
from ledgers.secret import Secret
from ledgers.security import OPEN, SecuritySettings
from replication.marks import marked_ledger_ids, read_marks
from replication.znodes import ClusterPaths

READS_AT_ONCE = 500
PARTITIONS_MIN = 16
"""Minimum number of partitions, if each then has enough ledgers to be worth a session."""

Row = dict[str, Any]
# --- The columns ----------------------------------------------------------------------------------

LEDGERS = """
    ledger_id BIGINT NOT NULL,
    state STRING COMMENT 'open, in_recovery, closed; null if the metadata is unreadable',
    ensemble_size INT,
    write_quorum INT,
    ack_quorum INT,
    last_entry_id BIGINT COMMENT 'null unless closed; -1: empty',
    length BIGINT COMMENT 'bytes of payload, null unless closed',
    digest_type STRING COMMENT 'null if the metadata holds none',
    ctime_ms BIGINT COMMENT 'creation time, null if the metadata does not hold it',
    format_version INT COMMENT 'of the metadata: 1, 2 or 3',
    metadata_version INT COMMENT 'of the znode: number of changes',
    mtime_ms BIGINT COMMENT 'last change of the metadata',
    custom MAP<STRING, BINARY> COMMENT 'data of the application',
    fragments ARRAY<STRUCT<
        first_entry_id: BIGINT,
        last_entry_id: BIGINT COMMENT 'null: it may still be written',
        ensemble: ARRAY<STRING>>>,
    error STRING COMMENT 'why the metadata cannot be read'
"""
"""One row for each ledger, without its password."""

BOOKIES = """
    bookie STRING NOT NULL,
    state STRING COMMENT 'writable, read_only, or missing: has a cookie and is not registered',
    host STRING,
    port INT,
    has_cookie BOOLEAN COMMENT 'formatted, and not decommissioned',
    cookie_ctime_ms BIGINT COMMENT 'last format'
"""
"""One row for each bookie that is registered or has a cookie."""

UNDERREPLICATED = """
    ledger_id BIGINT NOT NULL,
    queue STRING COMMENT 'shared: Java reads it too; own: private, for work that Java cannot see',
    bookies ARRAY<STRING> COMMENT 'the missing ones; empty: repair the placement',
    ctime_ms BIGINT COMMENT 'time of the mark, or of its last extension',
    is_readable BOOLEAN
"""
"""One row for each mark."""

ENTRIES = """
    ledger_id BIGINT NOT NULL,
    entry_id BIGINT NOT NULL,
    bookie STRING NOT NULL,
    answer STRING COMMENT 'present: with a correct digest; absent, mismatch, unreadable, unknown',
    entry_bytes INT COMMENT 'as stored, headers and digest included',
    payload_bytes INT,
    payload_crc32c BIGINT,
    length BIGINT COMMENT 'of the ledger up to this entry, by its header',
    lac BIGINT COMMENT 'by its header; copies may differ'
"""
"""One row for each copy that should exist. A column is null if the bookie did not return it, or the
entry does not match its digest."""

# --- The sources ----------------------------------------------------------------------------------

Options = MutableMapping[str, str]


def register(spark: SparkSession) -> None:
    """Register the four formats in the session."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (LedgersSource, BookiesSource, UnderreplicatedSource, EntriesSource):
        spark.dataSource.register(source)


class _Source(DataSource):
    format_name: ClassVar[str]
    columns: ClassVar[str]
    reader_class: ClassVar[type[_Reader]]

    @classmethod
    def name(cls) -> str:
        return cls.format_name

    def schema(self) -> str:
        return self.columns

    def reader(self, schema: StructType) -> _Reader:
        return self.reader_class(self.options, schema)


# --- Readers: made in the driver, sent to the tasks -----------------------------------------------


class _Reader(DataSourceReader):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._connection = _connection_of(options)
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
        return bookie_rows(self._connection)


class MarksReader(_Reader):
    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return mark_rows(self._connection)


class _OfLedgers(_Reader):
    """A reader of ledgers. Its partitions have about equal numbers of them, and hold packed ids."""

    ledgers_max: int
    """Maximum number of ledgers in a partition, unless ``numPartitions`` is given."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._partition_count = _number(options, "numPartitions", default=0, allowed=range(100_001))
        self._wanted = WantedLedgers()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        self._wanted, left = push_filters(filters, self._wanted)
        return left

    def partitions(self) -> list[InputPartition]:
        listed = asyncio.run(
            list_ledger_ids(self._connection.metadata_service_uri, self._connection.security)
        )
        wanted = self._wanted.of(listed)
        count = self._partition_count or max(
            -(-len(wanted) // self.ledgers_max), min(PARTITIONS_MIN, len(wanted) // 100), 1
        )
        parts = cut(wanted, count=count) or [[]]  # given no partition, Spark makes one of its own
        return [InputPartition(pack(part)) for part in parts]


class LedgersReader(_OfLedgers):
    ledgers_max = 10_000

    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return ledger_rows(self._connection, unpack(partition.value))


class EntriesReader(_OfLedgers):
    ledgers_max = 500

    def _rows(self, partition: InputPartition) -> AsyncIterator[list[Row]]:
        return entry_rows(self._connection, unpack(partition.value))


class LedgersSource(_Source):
    """One row for each ledger: its metadata."""

    format_name, columns, reader_class = "bookkeeper-ledgers", LEDGERS, LedgersReader


class EntriesSource(_Source):
    """One row for each copy of an entry. Every copy is read, and its digest checked."""

    format_name, columns, reader_class = "bookkeeper-entries", ENTRIES, EntriesReader


class BookiesSource(_Source):
    """One row for each bookie."""

    format_name, columns, reader_class = "bookkeeper-bookies", BOOKIES, BookiesReader


class UnderreplicatedSource(_Source):
    """One row for each mark in the queues of under-replicated ledgers."""

    format_name = "bookkeeper-underreplicated"
    columns, reader_class = UNDERREPLICATED, MarksReader


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


# --- Options --------------------------------------------------------------------------------------


def _connection_of(options: Options) -> ClusterConnection:
    uri = options.get("metadataServiceUri")
    if not uri:
        raise SettingsError.not_allowed("metadataServiceUri", uri, "a metadata service URI")
    known = ClusterConnection(metadata_service_uri=uri)
    reads = known.reads_in_flight_per_bookie
    connection = ClusterConnection(
        metadata_service_uri=uri,
        default_password=Secret(options.get("defaultPassword", "")),
        default_digest_type=options.get("defaultDigestType", known.default_digest_type),
        reads_in_flight_per_bookie=_number(
            options, "readsInFlightPerBookie", default=reads, allowed=range(1, 501)
        ),
        security=security_of(options),
    )
    if connection.default_digest_type not in DigestType.__members__:
        allowed = ", ".join(DigestType.__members__)
        raise SettingsError.not_allowed(
            "defaultDigestType", connection.default_digest_type, allowed
        )
    assert connection.uri  # raises SettingsError if it is invalid
    return connection


def security_of(options: Options) -> SecuritySettings:
    """Return the settings of ``[security]`` that are given as options, such as
    ``security.bookie_tls``."""
    given: dict[str, Any] = {}
    for field in fields(SecuritySettings):
        name = f"security.{field.name}"
        value = options.get(name)
        if value is None:
            continue
        if isinstance(field.default, bool):
            if value.lower() not in ("true", "false"):
                raise SettingsError.not_allowed(name, value, "true or false")
            given[field.name] = value.lower() == "true"
        else:
            given[field.name] = value
    return SecuritySettings(**given)


def _number(options: Options, name: str, *, default: int, allowed: range) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or int(value) not in allowed:
        raise SettingsError.not_allowed(name, value, f"{allowed.start} to {allowed.stop - 1}")
    return int(value)


# --- Which ledgers a query needs ------------------------------------------------------------------

_COLUMN = ("ledger_id",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLedgers:
    """The ids from ``first`` to ``last``, both inclusive. If ``among`` is not None, only those in
    it."""

    first: int = 0
    last: int = LONG_ID_STOP - 1
    among: frozenset[int] | None = None

    def of(self, ledger_ids: Sequence[int]) -> Sequence[int]:
        """Return the wanted ones among these ids, which ascend."""
        start, stop = bisect_left(ledger_ids, self.first), bisect_right(ledger_ids, self.last)
        chosen = ledger_ids[start:stop]
        if self.among is None:
            return chosen
        return [ledger_id for ledger_id in chosen if ledger_id in self.among]

    def narrowed(self, condition: Filter) -> WantedLedgers | None:
        """Return what a further condition leaves. None if it is about another column, or of an
        unsupported kind."""
        match condition:
            case EqualTo(column, int(value)) | EqualNullSafe(column, int(value)):
                bounds = (value, value)
            case GreaterThan(column, int(value)):
                bounds = (value + 1, self.last)
            case GreaterThanOrEqual(column, int(value)):
                bounds = (value, self.last)
            case LessThan(column, int(value)):
                bounds = (self.first, value - 1)
            case LessThanOrEqual(column, int(value)):
                bounds = (self.first, value)
            case In(column, values) if column == _COLUMN:
                found = frozenset(values)
                return replace(self, among=found if self.among is None else self.among & found)
            case _:
                return None
        if column != _COLUMN:
            return None
        return replace(self, first=max(self.first, bounds[0]), last=min(self.last, bounds[1]))


def push_filters(
    filters: Iterable[Filter], wanted: WantedLedgers
) -> tuple[WantedLedgers, Iterator[Filter]]:
    """Return the ledgers that all filters allow, and the filters that Spark must still apply."""
    left = []
    for condition in filters:
        narrowed = wanted.narrowed(condition)
        if narrowed is None:
            left.append(condition)
        else:
            wanted = narrowed
    return wanted, iter(left)


# --- Rows: each function opens its own session and yields lists of rows ---------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConnection:
    """The connection settings of a cluster. ``default_*``: for ledgers whose metadata holds neither
    (version 1)."""

    metadata_service_uri: str
    default_password: Secret[str] = Secret("")
    default_digest_type: str = "CRC32"
    reads_in_flight_per_bookie: int = 16
    """Limit for one task."""
    security: SecuritySettings = OPEN

    @property
    def uri(self) -> MetadataUri:
        """The parsed URI. Raises SettingsError."""
        return MetadataUri.parse(self.metadata_service_uri)


async def ledger_rows(
    connection: ClusterConnection, ledger_ids: Sequence[int]
) -> AsyncIterator[list[Row]]:
    """Yield a row for each ledger. A deleted ledger has none."""
    async with read_session(connection.metadata_service_uri, connection.security) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = ledger_ids[start : start + READS_AT_ONCE]
            rows = await asyncio.gather(*(_ledger_row(manager, each) for each in part))
            yield [row for row in rows if row is not None]


async def bookie_rows(connection: ClusterConnection) -> AsyncIterator[list[Row]]:
    """Yield a row for each bookie that is registered or has a cookie."""
    async with read_session(connection.metadata_service_uri, connection.security) as (store, uri):
        registration = Registration(store, uri.root)
        view, cookies = await registration.read(), await registration.cookies()
    rows = []
    for bookie in sorted({*view.available, *cookies}):
        address, cookie = view.address(bookie), cookies.get(bookie)
        is_there = "read_only" if bookie in view.read_only else "missing"
        rows.append(
            {
                "bookie": bookie,
                "state": "writable" if bookie in view.writable else is_there,
                "host": None if address is None else address[0],
                "port": None if address is None else address[1],
                "has_cookie": cookie is not None,
                "cookie_ctime_ms": None if cookie is None else cookie.ctime_ms,
            }
        )
    yield rows


async def mark_rows(connection: ClusterConnection) -> AsyncIterator[list[Row]]:
    """Yield a row for each mark, of the shared queue and of our own."""
    async with read_session(connection.metadata_service_uri, connection.security) as (store, uri):
        shared = ClusterPaths.below(uri.root)
        for queue, paths in (("shared", shared), ("own", shared.private)):
            marked = await read_marks(store, paths, await marked_ledger_ids(store, paths))
            yield [
                {
                    "ledger_id": each.ledger_id,
                    "queue": queue,
                    "bookies": None if each.mark is None else list(each.mark.replicas),
                    "ctime_ms": None if each.mark is None else each.mark.ctime_ms,
                    "is_readable": each.mark is not None,
                }
                for each in marked
            ]


async def entry_rows(
    connection: ClusterConnection, ledger_ids: Sequence[int]
) -> AsyncIterator[list[Row]]:
    """Yield a row for each copy. An open ledger has rows up to its last acknowledged entry; a
    ledger that cannot be opened has none."""
    async with read_session(connection.metadata_service_uri, connection.security) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        view = await Registration(store, uri.root, resolve=host_names().addresses).read()
        async with open_bookies(
            view.locate,
            clock=SystemClock(),
            rng=random.Random(),
            reads_in_flight_max=connection.reads_in_flight_per_bookie,
            connector=bookie_connector(connection.security),
        ) as bookies:
            for ledger_id in ledger_ids:
                async for rows in _entries_of(ledger_id, connection, manager, bookies):
                    yield rows


# --- One ledger -----------------------------------------------------------------------------------


async def _ledger_row(manager: LedgerManager, ledger_id: int) -> Row | None:
    try:
        versioned = await manager.read(ledger_id)
    except NoSuchLedgerError:
        return None
    except (CorruptionError, UnauthorizedError) as error:
        return {"ledger_id": ledger_id, "error": str(error)}
    return ledger_row(versioned)


def ledger_row(versioned: VersionedMetadata) -> Row:
    metadata, stat = versioned.metadata, versioned.stat
    is_closed, digest_type = metadata.is_closed, metadata.digest_type
    settled = metadata.last_segment.first_entry_id - 1
    return {
        "ledger_id": versioned.ledger_id,
        "state": metadata.state.name.lower(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "last_entry_id": metadata.last_entry_id if is_closed else None,
        "length": metadata.length if is_closed else None,
        "digest_type": None if digest_type is None else digest_type.name,
        "ctime_ms": metadata.ctime_ms,
        "format_version": metadata.metadata_version,
        "metadata_version": stat.version,
        "mtime_ms": stat.mtime_ms,
        "custom": list(metadata.custom),
        "fragments": [
            {
                "first_entry_id": fragment.first_entry_id,
                "last_entry_id": fragment.last_entry_id,
                "ensemble": list(fragment.ensemble),
            }
            for fragment in fragments(versioned.ledger_id, metadata, lac=settled)
        ],
    }


async def _entries_of(
    ledger_id: int, connection: ClusterConnection, manager: LedgerManager, bookies: Bookies
) -> AsyncIterator[list[Row]]:
    fallback = EntryDigest(
        DigestType[connection.default_digest_type], connection.default_password.reveal().encode()
    )
    try:
        versioned = await manager.read(ledger_id)
        opened = await find_end(versioned, bookies=bookies, clock=SystemClock(), fallback=fallback)
    except (NoSuchLedgerError, CorruptionError, UnauthorizedError, UnavailableError):
        return
    known = known_fragments(ledger_id, versioned.metadata, lac=opened.lac)
    copies = chain.from_iterable(
        ((bookie, entry_id) for entry_id in fragment.entries_of(index))
        for fragment in known
        for index, bookie in enumerate(fragment.ensemble)
    )
    while part := [each for each, _ in zip(copies, range(READS_AT_ONCE), strict=False)]:
        yield await asyncio.gather(
            *(_entry_row(ledger_id, each, bookie, opened.digest, bookies) for bookie, each in part)
        )


async def _entry_row(
    ledger_id: int, entry_id: int, bookie: BookieId, digest: EntryDigest, bookies: Bookies
) -> Row:
    row: Row = {"ledger_id": ledger_id, "entry_id": entry_id, "bookie": bookie}
    try:
        entry = await bookies.read(bookie, ledger_id, entry_id)
        header = digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
    except BookmenderError as error:
        return {**row, "answer": _answer(error).value}
    payload = digest.payload(entry)
    return {
        **row,
        "answer": Answer.PRESENT.value,
        "entry_bytes": len(entry),
        "payload_bytes": len(payload),
        "payload_crc32c": google_crc32c.value(payload),
        "length": header.length,
        "lac": header.lac,
    }


def _answer(error: BookmenderError) -> Answer:
    match error:
        case NoSuchEntryError():
            return Answer.ABSENT
        case DigestMismatchError():
            return Answer.MISMATCH
        case UnreadableError():
            return Answer.UNREADABLE
        case _:
            return Answer.UNKNOWN
