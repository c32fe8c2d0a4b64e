"""Receipts in an SQL database: SQLite in a file, or PostgreSQL.

All clients share four tables, keyed by the name of the client. Every call is one transaction. It
begins with the client's row: a write locks the row, and checks its epoch. So a process that was
fenced writes nothing more, even if its transaction began before.

SQLAlchemy's calls block, so each store has a thread of its own, which makes one call at a time. A
cancelled call may still be applied; the interface allows that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os.path import exists
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import ProgrammingError as SqlProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from checkpoints.errors import PositionUnknownError
from checkpoints.model import CheckpointId, Key, LogId, Version
from checkpoints.receipts import (
    CLIENT_CHARS_MAX,
    DELETED,
    FENCED,
    ClientProcess,
    ClientSummary,
    Failure,
    ReceiptRange,
    check_client_name,
    first_epoch,
)
from ledgers.errors import (
    BookmenderError,
    ClientDeletedError,
    ClientFencedError,
    ConflictError,
    RejectedError,
    SettingsError,
    UnavailableError,
)

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 10.0
"""Timeout of each answer of PostgreSQL, and of waiting for SQLite's lock."""
NO_STORE: Final = (
    "the database of the receipts does not work. Check its server or folder, its disk space and "
    "its permissions"
)
WRONG_URL: Final = (
    "the store of receipts is not a URL of a database. Examples: sqlite:///FILE, "
    "sqlite:////FOLDER/FILE, postgresql://USER:PASSWORD@HOST/DATABASE"
)
_ROWS_AT_ONCE: Final = 5_000

_metadata = MetaData()

CLIENTS: Final = Table(
    "feed_clients",
    _metadata,
    Column("client", String(CLIENT_CHARS_MAX), primary_key=True),
    # Grows each time that the store is opened: see first_epoch.
    Column("epoch", BigInteger, nullable=False),
    # The id of the process that opened the store last: see ClientProcess.
    Column("process", String(32), nullable=False),
    # Of the feed. Receipts of another feed mean nothing.
    Column("generation", BigInteger, nullable=False),
    # Receipts of an earlier feed were deleted.
    Column("was_reset", Boolean, nullable=False),
    # NULL: the client is new.
    Column("low_watermark", BigInteger),
    sqlite_with_rowid=False,
)
RECEIPTS: Final = Table(
    "feed_receipts",
    _metadata,
    Column("client", String(CLIENT_CHARS_MAX), primary_key=True),
    Column("begin_id", BigInteger, primary_key=True, autoincrement=False),
    Column("end_id", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
LOGS: Final = Table(  # a table of its own, because earlier releases created the others
    "feed_logs",
    _metadata,
    Column("client", String(CLIENT_CHARS_MAX), primary_key=True),
    # Of the feed. An earlier release that begins to follow another feed leaves the row as it is.
    Column("generation", BigInteger, nullable=False),
    Column("ledger_id", BigInteger, nullable=False),
    Column("begun_ms", BigInteger, nullable=False),
    Column("previous_id", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
FAILURES: Final = Table(
    "feed_failures",
    _metadata,
    Column("client", String(CLIENT_CHARS_MAX), primary_key=True),
    Column("object_key", LargeBinary, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("because", Text, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("is_deleted", Boolean, nullable=False),
    Column("is_retry_ordered", Boolean, nullable=False),
    sqlite_with_rowid=False,
)


class _Database:
    """An engine, whose calls run in a thread of their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_closed = engine, False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed-receipts")

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._engine.dispose)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        assert not self._is_closed
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _translated, work, self._engine)


class SqlReceiptStore(_Database):
    """A ``ReceiptStore`` in a database."""

    def __init__(
        self, client: str, engine: Engine, *, process: ClientProcess, generation: int = 0
    ) -> None:
        super().__init__(engine)
        self._client, self._generation, self._process = client, generation, process
        self._epoch = 0
        self.was_reset = False
        """True if receipts of an earlier feed were deleted, and none was stored since."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        client: str,
        generation: int = 0,
        process: ClientProcess | None = None,
        is_restored: bool = False,
    ) -> SqlReceiptStore:
        """Return the store of a client, and fence the process that opened it before. Creates the
        tables if they do not exist.

        ``url``: as for SQLAlchemy: ``sqlite:////var/lib/catalogue/feed.db``, or
        ``postgresql+pg8000://user:password@host/database``. ``generation``: of the feed; receipts
        of an earlier feed are deleted. ``process``: who opens the store; None: a new process.
        ``is_restored``: as for ``ZooKeeperReceiptStore.open``. Raises SettingsError,
        UnavailableError, RejectedError (the database refuses, for example for want of rights),
        ClientFencedError, and ConflictError if the client has receipts of a later feed.
        """
        check_client_name(client)
        process = process or ClientProcess()
        store = cls(client, _engine(url), process=process, generation=generation)
        try:
            await store._in_thread(lambda: store._begin(is_restored))
        except BaseException:
            await store.close()
            raise
        process.epoch = store._epoch
        return store

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        raise_it = (
            update(CLIENTS)
            .where(CLIENTS.c.client == self._client)
            .where(CLIENTS.c.low_watermark.is_(None) | (CLIENTS.c.low_watermark < checkpoint_id))
            .values(low_watermark=checkpoint_id)
        )
        await self._write(lambda connection: connection.execute(raise_it))

    async def get_low_watermark(self) -> CheckpointId | None:
        query = select(CLIENTS.c.low_watermark).where(CLIENTS.c.client == self._client)
        found: int | None = await self._read(lambda connection: connection.scalar(query))
        return found

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        insert = self._insert(RECEIPTS)
        extend = insert.on_conflict_do_update(
            index_elements=[RECEIPTS.c.client, RECEIPTS.c.begin_id],
            set_={"end_id": insert.excluded.end_id},
            where=RECEIPTS.c.end_id < insert.excluded.end_id,
        )
        rows = [{"client": self._client, "begin_id": begin, "end_id": end} for begin, end in ranges]
        if rows:
            await self._write(lambda connection: connection.execute(extend, rows))

    async def get_checkpoint_range_receipts(
        self, antecedent: CheckpointId
    ) -> AsyncGenerator[ReceiptRange, None]:
        query = (
            select(RECEIPTS.c.begin_id, RECEIPTS.c.end_id)
            .where(RECEIPTS.c.client == self._client, RECEIPTS.c.end_id > antecedent)
            .order_by(RECEIPTS.c.begin_id.desc())
            .limit(_ROWS_AT_ONCE)
        )
        page = query
        while True:
            rows = await self._rows(page)
            for begin, end in rows:
                yield ReceiptRange(begin, end)
            if len(rows) < _ROWS_AT_ONCE:
                return
            page = query.where(RECEIPTS.c.begin_id < rows[-1][0])

    async def purge_checkpoint_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        begin: Any = bindparam("begin")
        end: Any = bindparam("end")
        purge = delete(RECEIPTS).where(
            RECEIPTS.c.client == self._client,
            RECEIPTS.c.begin_id >= begin,
            RECEIPTS.c.begin_id <= end,
            RECEIPTS.c.end_id <= end,
            ~((RECEIPTS.c.begin_id == begin) & (RECEIPTS.c.end_id == end)),
        )
        rows = [each._asdict() for each in ranges]
        if rows:
            await self._write(lambda connection: connection.execute(purge, rows))

    async def store_failure(self, failure: Failure) -> None:
        row = {
            "version": failure.version,
            "because": failure.because.replace("\0", " "),  # PostgreSQL stores no zero character
            "time_ms": failure.time_ms,
            "is_deleted": failure.is_deleted,
            "is_retry_ordered": failure.is_retry_ordered,
        }
        insert = self._insert(FAILURES)
        replace = insert.values(
            client=self._client, object_key=failure.key, **row
        ).on_conflict_do_update(
            index_elements=[FAILURES.c.client, FAILURES.c.object_key],
            set_=row,
            where=FAILURES.c.version <= failure.version,
        )
        await self._write(lambda connection: connection.execute(replace))

    async def get_failures(self) -> Sequence[Failure]:
        return await self._read(lambda connection: _failures(connection, self._client))

    async def delete_failure(self, key: Key, *, up_to: Version) -> None:
        remove = delete(FAILURES).where(
            FAILURES.c.client == self._client,
            FAILURES.c.object_key == key,
            FAILURES.c.version <= up_to,
        )
        await self._write(lambda connection: connection.execute(remove))

    async def store_log(self, log_id: LogId) -> None:
        row = {"generation": self._generation, **log_id._asdict()}
        replace = (
            self._insert(LOGS)
            .values(client=self._client, **row)
            .on_conflict_do_update(index_elements=[LOGS.c.client], set_=row)
        )
        await self._write(lambda connection: connection.execute(replace))

    async def get_log(self) -> LogId | None:
        query = select(LOGS.c.ledger_id, LOGS.c.begun_ms, LOGS.c.previous_id).where(
            LOGS.c.client == self._client, LOGS.c.generation == self._generation
        )
        return next((LogId(*row) for row in await self._rows(query)), None)

    async def reset(self) -> None:
        await self._write(self._delete_receipts)

    # --- In the thread ----------------------------------------------------------------------------

    def _begin(self, is_restored: bool) -> None:
        """Create the tables, and raise the epoch of the client."""
        try:
            _metadata.create_all(self._engine)
        except DBAPIError:  # another process may have created the same tables at this moment
            _metadata.create_all(self._engine)
        insert = self._insert(CLIENTS).values(
            client=self._client,
            epoch=first_epoch(),
            process=self._process.id,
            generation=self._generation,
            was_reset=False,
        )
        own, process = CLIENTS.c.client == self._client, self._process
        with self._engine.begin() as connection:
            if is_restored or not process.has_opened:
                connection.execute(insert.on_conflict_do_nothing(index_elements=[CLIENTS.c.client]))
            # The update changes nothing, but locks.
            if (
                connection.execute(
                    update(CLIENTS).where(own).values(epoch=CLIENTS.c.epoch)
                ).rowcount
                != 1
            ):
                raise self._fenced(connection)
            row = connection.execute(select(CLIENTS).where(own)).one()
            if process.is_fenced_by(epoch=row.epoch, process=row.process):
                raise self._fenced(connection)
            if row.generation > self._generation:
                raise ConflictError("this client follows a later feed", client=self._client)
            is_older = is_restored or process.is_after(row.epoch)
            was_reset = row.was_reset and row.low_watermark is None
            if is_older or row.generation != self._generation:
                was_reset = is_older or row.was_reset or row.low_watermark is not None
                self._delete_receipts(connection, was_reset=was_reset)
            epoch = max(row.epoch, process.epoch or 0) + 1
            opened = {"epoch": epoch, "process": process.id, "generation": self._generation}
            connection.execute(update(CLIENTS).where(own).values(opened))
        self._epoch, self.was_reset = epoch, was_reset

    def _delete_receipts(self, connection: Connection, *, was_reset: bool = True) -> None:
        for table in (RECEIPTS, FAILURES, LOGS):
            connection.execute(delete(table).where(table.c.client == self._client))
        own = CLIENTS.c.client == self._client
        new = {"was_reset": was_reset, "low_watermark": None}
        connection.execute(update(CLIENTS).where(own).values(new))

    def _transaction(self, work: Callable[[Connection], T], *, is_write: bool) -> T:
        """Check the epoch, and do the work, in one transaction."""
        own = (CLIENTS.c.client == self._client) & (CLIENTS.c.epoch == self._epoch)
        with self._engine.begin() as connection:
            if is_write:
                # The update changes nothing, but locks: a process that opens the store waits for
                # this transaction, or this one waits and then finds the higher epoch.
                lock = update(CLIENTS).where(own).values(epoch=self._epoch)
                is_own = connection.execute(lock).rowcount == 1
            else:
                is_own = connection.scalar(select(CLIENTS.c.epoch).where(own)) is not None
            if not is_own:
                raise self._fenced(connection)
            return work(connection)

    def _fenced(self, connection: Connection) -> BookmenderError:
        """Return why this process may not use the store any longer."""
        query = select(CLIENTS.c.epoch).where(CLIENTS.c.client == self._client)
        epoch = connection.scalar(query)
        if epoch is None:
            return ClientDeletedError(DELETED, client=self._client)
        if epoch < self._epoch:  # no later process: the row is from a backup
            return PositionUnknownError(client=self._client)
        return ClientFencedError(FENCED, client=self._client)

    async def _write(self, work: Callable[[Connection], object]) -> None:
        await self._in_thread(lambda: self._transaction(work, is_write=True))

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._in_thread(lambda: self._transaction(work, is_write=False))

    async def _rows(self, query: Any) -> Sequence[tuple[Any, ...]]:
        return await self._read(
            lambda connection: [tuple(row) for row in connection.execute(query)]
        )

    def _insert(self, table: Table) -> Any:
        """Return an INSERT that can handle conflicts: both databases spell it alike."""
        if self._engine.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)


class SqlClientTable(_Database):
    """A ``ClientTable`` of a database."""

    @classmethod
    async def open(cls, url: str) -> SqlClientTable:
        """Raises SettingsError, also if the file of SQLite does not exist; UnavailableError,
        RejectedError."""
        engine = _engine(url)
        _check_exists(engine.url)
        table = cls(engine)
        try:
            await table._transact(_metadata.create_all)
        except BaseException:
            await table.close()
            raise
        return table

    async def list(self) -> Sequence[ClientSummary]:
        query = select(CLIENTS).order_by(CLIENTS.c.client)
        return await self._transact(
            lambda connection: [_summary(connection, row) for row in connection.execute(query)]
        )

    async def find(self, name: str) -> ClientSummary | None:
        check_client_name(name)
        query = select(CLIENTS).where(CLIENTS.c.client == name)

        def find(connection: Connection) -> ClientSummary | None:
            row = connection.execute(query).one_or_none()
            return None if row is None else _summary(connection, row)

        return await self._transact(find)

    async def delete(self, name: str) -> bool:
        def delete_rows(connection: Connection) -> bool:
            # The row of the client first: it is the lock of all its writes.
            count = connection.execute(delete(CLIENTS).where(CLIENTS.c.client == name)).rowcount
            for table in (RECEIPTS, FAILURES, LOGS):
                connection.execute(delete(table).where(table.c.client == name))
            return count > 0

        return await self._transact(delete_rows)

    async def order_retries(self, name: str) -> int:
        order = update(FAILURES).where(FAILURES.c.client == name).values(is_retry_ordered=True)
        return await self._transact(lambda connection: connection.execute(order).rowcount)

    async def _transact(self, work: Callable[[Connection], T]) -> T:
        def transact() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return await self._in_thread(transact)


def _summary(connection: Connection, row: Any) -> ClientSummary:
    count = select(func.count()).where(RECEIPTS.c.client == row.client)
    if row.low_watermark is not None:
        count = count.where(RECEIPTS.c.end_id > row.low_watermark)
    return ClientSummary(
        name=row.client,
        generation=row.generation,
        low_watermark=row.low_watermark,
        receipt_count=connection.scalar(count) or 0,
        failures=_failures(connection, row.client),
    )


def _failures(connection: Connection, client: str) -> Sequence[Failure]:
    query = select(FAILURES).where(FAILURES.c.client == client).order_by(FAILURES.c.version)
    return [
        Failure(
            key=row.object_key,
            version=row.version,
            because=row.because,
            time_ms=row.time_ms,
            is_deleted=row.is_deleted,
            is_retry_ordered=row.is_retry_ordered,
        )
        for row in connection.execute(query)
    ]


def _translated(work: Callable[[], T], engine: Engine) -> T:
    """Do the work, and raise our own errors in place of the database's."""
    database = shown(engine.url)
    try:
        return work()
    except (SqlProgrammingError, DataError, IntegrityError) as error:
        raise RejectedError("the database refused", error=_reason(error)) from error
    except DBAPIError as error:
        raise UnavailableError(NO_STORE, database=database, error=_reason(error)) from error
    except (PoolTimeoutError, OSError) as error:
        raise UnavailableError(NO_STORE, database=database, error=str(error)) from error
    except SQLAlchemyError as error:
        raise RejectedError("the database cannot be used", error=str(error)) from error
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise SettingsError(
            f"the database driver {engine.url.drivername!r} does not know an option in the query "
            f"of the URL: {error}"
        ) from error


def shown(url: URL) -> str:
    """Return the URL without secrets: the query may hold a password, too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _reason(error: DBAPIError) -> str:
    """Return what the database said."""
    details = error.orig.args[0] if error.orig is not None and error.orig.args else None
    if isinstance(details, dict) and "M" in details:  # pg8000: the fields of PostgreSQL's message
        return str(details["M"])
    return str(error.orig)


def _engine(text: str) -> Engine:
    """Return an engine with one connection. Raises SettingsError."""
    try:
        return _engine_of(make_url(text))
    except (ArgumentError, ValueError):
        raise SettingsError(WRONG_URL) from None  # the cause may quote the URL
    except ImportError as error:
        raise SettingsError(f"the driver of the database is not installed: {error.name}") from None


def _engine_of(url: URL) -> Engine:
    match url.get_backend_name():
        case "sqlite":
            return _sqlite(url)
        case "postgresql":
            if url.drivername == "postgresql":
                url = url.set(drivername="postgresql+pg8000")
            is_pg8000 = url.get_driver_name() == "pg8000"
            if is_pg8000 and not url.username:
                raise SettingsError(WRONG_URL)
            connect_args: dict[str, Any] = {"timeout": ANSWER_TIMEOUT_S} if is_pg8000 else {}
            if is_pg8000 and url.password is None and "password" not in url.query:
                connect_args["password"] = ""  # pg8000 fails if the server wants one
            try:
                return create_engine(
                    url,
                    pool_size=1,
                    max_overflow=0,
                    pool_pre_ping=True,
                    connect_args=connect_args,
                )
            except (ImportError, ArgumentError) as error:
                raise SettingsError(
                    f"the database driver {url.drivername!r} cannot be loaded: {error}. Install "
                    "it, or begin the URL with postgresql://"
                ) from error
        case name:
            raise SettingsError(f"the database is {name!r}; allowed: sqlite, postgresql")


def _check_exists(url: URL) -> None:
    """Raise SettingsError if it names a file of SQLite that does not exist. A connection would
    create the file."""
    file = url.database or ""
    if url.get_backend_name() == "sqlite" and not file.startswith("file:") and not exists(file):
        raise SettingsError("no client has stored receipts: the file does not exist", file=file)


def _sqlite(url: URL) -> Engine:
    if url.host:  # two slashes in place of three
        raise SettingsError(WRONG_URL)
    if not url.database or url.database == ":memory:":
        raise SettingsError("SQLite in memory keeps no receipts: name a file")
    engine = create_engine(
        url,
        pool_size=1,
        max_overflow=0,
        # A timeout in the URL comes first. Connections stay in the store's thread.
        connect_args={} if "timeout" in url.query else {"timeout": ANSWER_TIMEOUT_S},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        for pragma in (
            # A new file gets small pages, and shrinks when receipts are merged: 5 KB for a client.
            "page_size=1024",
            "auto_vacuum=FULL",
            "journal_mode=WAL",  # readers and the writer do not block each other
            "synchronous=FULL",  # a stored receipt survives a power failure
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    return engine
