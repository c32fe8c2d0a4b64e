"""The change feed as a stream of Spark: ``spark.readStream.format("bookkeeper-changes")``.

- Offsets are ids of checkpoints, with the ledger of the log that has them. Spark stores them in its
  checkpoint location, and a restarted query goes on there. A batch that was not complete is
  repeated, with the same changes.
- The receipt of the client is Spark's commit of a batch. Spark commits a batch when it plans the
  next one, so the receipt is one batch behind.
- A new query begins where its client is; a new client at the end of the log, or with ``fromStart``
  at its beginning.

The driver has one process with the client (``_ClientThread``): its receipts, and the end of the
log. Executors read the log themselves (``BatchReader``), and write nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from auditor.fsck.executor import read_session
from checkpoints.batches import (
    Batch,
    BatchReader,
    ChangesLostError,
    LedgerChange,
    Offset,
    batch_between,
    latest_offset,
)
from checkpoints.chain import FeedChain
from checkpoints.client import (
    IN_ZOOKEEPER,
    ClientProcess,
    ClusterConnection,
    FeedChangedError,
    FeedClient,
    bookies_of,
    open_client,
)
from checkpoints.model import CheckpointId
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import SessionLostError, SettingsError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.secret import Secret
from ledgers.security import SecuritySettings

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 120.0
"""A call of Spark that takes longer fails, and with it the query."""
TRIES: Final = 3
"""A client that has ended is opened again at most so often in one call."""
POLL_S: Final = 0.5
"""How soon it is found that the client has ended during a call."""

COLUMNS: Final = """
    ledger_id BIGINT NOT NULL,
    is_deleted BOOLEAN NOT NULL,
    version BIGINT NOT NULL COMMENT 'zxid of the last change; versions of all ledgers compare',
    time_ms BIGINT NOT NULL COMMENT 'when the leader published the change',
    fingerprint DECIMAL(20, 0) COMMENT 'hash of the metadata, null if the ledger is deleted'
"""
"""One row for each ledger that changed within a batch, at its latest version."""
SCHEMA: Final = pa.schema(
    [
        pa.field("ledger_id", pa.int64(), nullable=False),
        pa.field("is_deleted", pa.bool_(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("time_ms", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.decimal128(20, 0)),
    ]
)


def register(spark: SparkSession) -> None:
    """Register the format in the session."""
    spark.dataSource.register(ChangesSource)


class ChangesSource(DataSource):
    """The ledgers that changed, as a stream."""

    @classmethod
    def name(cls) -> str:
        return "bookkeeper-changes"

    def schema(self) -> str:
        return COLUMNS

    def streamReader(self, schema: StructType) -> ChangesReader:  # noqa: N802  # Spark's name
        return ChangesReader(StreamOptions.parse(self.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of a stream. ``may_lose``: go on if the feed has deleted changes."""

    metadata_service_uri: str
    client: str
    store: Secret[str]
    """A URL, which may contain a password."""
    from_start: bool
    may_lose: bool
    security: SecuritySettings

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Raises SettingsError."""
        for name, what in (
            ("metadataServiceUri", "a metadata service URI"),
            ("client", "the name of this client of the change feed"),
        ):
            if not options.get(name):
                raise SettingsError.not_allowed(name, options.get(name), what)
        MetadataUri.parse(options["metadataServiceUri"])
        return cls(
            metadata_service_uri=options["metadataServiceUri"],
            client=options["client"],
            store=Secret(options.get("store", IN_ZOOKEEPER)),
            from_start=_flag(options, "fromStart", default=False),
            may_lose=not _flag(options, "failOnDataLoss", default=True),
            security=_security(options),
        )


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise SettingsError.not_allowed(name, value, "true or false")
    return value == "true"


def _security(options: Mapping[str, str]) -> SecuritySettings:
    """Return the settings of ``[security]`` among the options, such as ``security.bookie_tls``."""
    given: dict[str, Any] = {}
    for field in fields(SecuritySettings):
        name = f"security.{field.name}"
        if name in options:
            is_flag = isinstance(field.default, bool)
            given[field.name] = _flag(options, name, default=False) if is_flag else options[name]
    return SecuritySettings(**given)


# --- The reader: in a process of the driver, and as a copy in executors ---------------------------


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches for Spark."""

    def __init__(self, options: StreamOptions) -> None:
        self._options, self._process = options, ClientProcess()
        self._client: _ClientThread | None = None
        self._target: Offset | None = None
        """Where a query ends that takes what is available now."""

    def __getstate__(self) -> dict[str, Any]:
        copy = ChangesReader(self._options)
        return copy.__dict__

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's names, here and below
        """Called for new queries only."""

        async def begin(client: FeedClient) -> Offset:
            begin = await client.store.get_low_watermark()
            assert begin is not None
            return _offset(client, begin)

        return self._call(begin).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        end = self._target or self._call(_known_end)
        chain = self._call(_chain)
        return latest_offset(Offset.parse(start), end, chain=chain).to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._call(_present_end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return one partition: only then is each ledger once in the batch."""
        begin, stop = Offset.parse(start), Offset.parse(end)
        may_lose, chain = self._options.may_lose, self._call(_chain)
        with advising():
            batch = batch_between(begin, stop, may_lose=may_lose, chain=chain)
        return [InputPartition(batch)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with asyncio.Runner() as runner:  # its loop runs only while Spark waits for rows
            changes = _changes(self._options, partition.value)
            while (some := runner.run(_next(changes))) is not None:
                yield to_batch(some)

    def commit(self, end: dict[str, Any]) -> None:
        offset = Offset.parse(end)

        async def store(client: FeedClient) -> None:
            # Receipts belong to one feed. Those of an earlier one mean nothing any more, nor do
            # those of a log that a restore of ZooKeeper undid.
            chain = client.log.chain
            if chain.generation == offset.generation and chain.knows(offset.log):
                await client.store_low_watermark(offset.checkpoint)

        self._call(store)

    def stop(self) -> None:
        if self._client is not None:
            self._client.stop()
            self._client = None

    def _call(self, action: Callable[[FeedClient], Awaitable[T]]) -> T:
        """Run the action in the client. The client is opened again after a lost session, and when
        another feed has begun."""
        for number in range(TRIES):
            if self._client is None:
                self._client = _ClientThread(self._options, self._process)
            try:
                return self._client.call(action)
            except (SessionLostError, UnavailableError, FeedChangedError):
                self.stop()
                if number == TRIES - 1:
                    raise
        raise AssertionError


def _offset(client: FeedClient, checkpoint_id: CheckpointId) -> Offset:
    generation, log_id = client.log.chain.generation, client.log.log_of(checkpoint_id)
    return Offset(generation=generation, checkpoint=checkpoint_id, log=log_id)


async def _chain(client: FeedClient) -> FeedChain:
    await client.log.wait_started()
    return client.log.chain


async def _known_end(client: FeedClient) -> Offset:
    """Return the end of the log as it was found last. Spark asks many times a second."""
    return _offset(client, await client.log.wait_started())


async def _present_end(client: FeedClient) -> Offset:
    known = await _known_end(client)
    async with aclosing(client.log.request_checkpoints(0)) as checkpoints:
        async for checkpoint in checkpoints:
            return _offset(client, checkpoint.id)
    return known


async def _next(changes: AsyncIterator[list[LedgerChange]]) -> list[LedgerChange] | None:
    return await anext(changes, None)


async def _changes(options: StreamOptions, batch: Batch) -> AsyncIterator[list[LedgerChange]]:
    """Yield the changes of a batch, over a session of its own."""
    clock = SystemClock()
    async with read_session(options.metadata_service_uri, options.security) as (store, uri):
        cluster = ClusterConnection(
            store=store,
            manager=await LedgerManager.open(store, uri),
            root=uri.root,
            security=options.security,
        )
        async with bookies_of(cluster, clock) as bookies:
            reader = BatchReader(
                store=store,
                paths=cluster.paths,
                manager=cluster.manager,
                bookies=bookies,
                clock=clock,
            )
            async with aclosing(reader.read(batch, may_lose=options.may_lose)) as found:
                with advising():
                    async for some in found:
                        yield some


@contextmanager
def advising() -> Iterator[None]:
    """Add to the error what the owner of a query can do when the feed lacks changes."""
    try:
        yield
    except ChangesLostError as error:
        raise ChangesLostError(
            f"{error.args[0]}. Compare your state with all ledgers, and go on with another "
            "checkpoint location, or with failOnDataLoss=false",
            **error.context,
        ) from error


def to_batch(changes: Sequence[LedgerChange]) -> pa.RecordBatch:
    """Return the changes as rows."""
    fingerprints = pa.array((each.fingerprint for each in changes), pa.uint64())
    return pa.RecordBatch.from_arrays(
        [
            pa.array((each.ledger_id for each in changes), pa.int64()),
            pa.array((each.is_deleted for each in changes), pa.bool_()),
            pa.array((each.version for each in changes), pa.int64()),
            pa.array((each.time_ms for each in changes), pa.int64()),
            fingerprints.cast(pa.decimal128(20, 0)),
        ],
        schema=SCHEMA,
    )


# --- The client of the feed -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    action: Callable[[FeedClient], Awaitable[Any]]
    result: Future[Any]


class _ClientThread:
    """A client of the feed in an event loop on a thread of its own, for callers that block."""

    def __init__(self, options: StreamOptions, process: ClientProcess) -> None:
        self._options, self._process = options, process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: asyncio.Queue[_Call | None] = asyncio.Queue()
        self._opened: Future[None] = Future()
        self._error: BaseException | None = None
        """The error that ended the client, once the thread has ended."""
        # daemon: a stuck call must not keep Spark's process alive.
        self._thread = threading.Thread(target=self._run, name="feed-client", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[FeedClient], Awaitable[T]]) -> T:
        """Run the action in the loop. Raises what it raises, or what ended the client."""
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        try:
            self._opened.result(CALL_TIMEOUT_S)
        except TimeoutError as error:
            if self._opened.done():  # the error of the client itself
                raise
            raise UnavailableError(
                f"the change feed could not be opened within {CALL_TIMEOUT_S:g} s"
            ) from error
        assert self._loop is not None
        result: Future[T] = Future()
        # A closed loop refuses calls. The thread has ended then, or is about to.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._calls.put_nowait, _Call(action, result))
        while True:
            try:
                return result.result(POLL_S)
            except TimeoutError:
                if result.done():  # just now, or the error is the action's own
                    return result.result()
                if not self._thread.is_alive():
                    raise self._error or UnavailableError("the client was closed") from None
                if time.monotonic() > deadline_s:
                    raise UnavailableError("the client of the feed does not answer") from None

    def stop(self) -> None:
        """Close the client. May be called repeatedly."""
        if self._loop is not None and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._calls.put_nowait, None)
            except RuntimeError:
                return
            self._thread.join(CALL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        options = self._options
        self._loop = asyncio.get_running_loop()
        async with open_client(
            options.metadata_service_uri,
            name=options.client,
            store=options.store.reveal(),
            process=self._process,
            security=options.security,
            on_disabled=_refuse,
            from_end=True,
            from_start=options.from_start,
        ) as client:
            self._opened.set_result(None)
            while (call := await self._calls.get()) is not None:
                try:
                    call.result.set_result(await call.action(client))
                except Exception as error:
                    call.result.set_exception(error)


def _refuse() -> None:
    raise SettingsError("the change feed is not enabled. Enable it first (docs/feed.md)")
