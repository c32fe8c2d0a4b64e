"""The client for real bookies: it implements the ``Bookies`` interface.

``BookieClient`` uses up to three connections to each bookie, made on demand:

- V3, for requests whose replies must be told apart (fencing, last entries, LACs; rule S5), and by
  default for single reads and adds;
- V2, for single reads and adds if so configured, and for the largest entries;
- V2 for batch reads only, because a bookie before 4.17 closes the connection on the first one.

Transfers go to the bulk path (``bulk``), which has its own connections. Both share the read
budgets. ``open_bookies`` returns a client with a bulk path of its own, without the daemon's flow
control.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from ledgers.bookies import LAST_ENTRY, DiskSpace, LacAnswer, SourceHealth, Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.clock import Clock
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.connection import (
    BrokenConnectionError,
    Channel,
    Connection,
    ConnectionSettings,
    OnBroken,
)
from ledgers.errors import AuthenticationRequiredError, UnavailableError
from ledgers.host_names import Connector, connect
from ledgers.model import BookieId
from ledgers.wire import v2, v3
from ledgers.wire.messages import (
    Add,
    Codec,
    ListEntries,
    Read,
    ReadBatch,
    ReadDiskSpace,
    ReadLac,
    Reply,
    Request,
    Status,
    WriteLac,
    decode_availability,
)

V3_ENTRY_BYTES_MAX = 4 * 1024 * 1024
"""Larger entries are added over V2. A V3 frame is longer, so an entry that just fitted into the
frame of its writer could exceed the limit of every bookie."""
BATCH_BYTES_MAX = 256 * 1024
"""Upper limit of the bytes requested by one batch read (rule S10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieClientSettings:
    """Settings of the client."""

    protocol: Literal["v2", "v3"] = "v3"
    """For single reads and adds. Requests whose replies must be told apart always use V3."""
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)


class BulkPath(Protocol):
    """Runs transfers. Closed together with the client."""

    async def transfer(self, transfer: Transfer) -> TransferResult: ...

    def source_health(self, bookie: BookieId) -> SourceHealth: ...

    async def close(self) -> None: ...


class BookieClient:
    """The ``Bookies`` for real bookies. Belongs to one event loop, which must also ``close`` it."""

    def __init__(
        self,
        *,
        resolve: Resolve,
        budgets: Budgets,
        bulk: BulkPath,
        clock: Clock,
        rng: random.Random,
        settings: BookieClientSettings,
        connector: Connector = connect,
    ) -> None:
        """``connector``: opens the connections, except those of ``bulk``."""
        self._connector = connector
        self._resolve, self._budgets, self._bulk = resolve, budgets, bulk
        self._clock, self._rng, self._settings = clock, rng, settings
        self._connections: dict[BookieId, _Connections] = {}
        self._is_closed = False

    # --- Reads ---------------------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        connections = self._to(bookie)
        channel = connections.v3 if entry_id == LAST_ENTRY else connections.data
        reply = await self._ask(channel, Read(ledger_id=ledger_id, entry_id=entry_id))
        return _check_keyless(reply, bookie=bookie, ledger_id=ledger_id, entry_id=entry_id).entries[
            0
        ]

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        request = Read(
            ledger_id=ledger_id,
            entry_id=entry_id,
            fencing_key=master_key,
            is_high_priority=is_high_priority,
        )
        reply = await self._ask(self._to(bookie).v3, request)
        return reply.check(bookie=bookie, ledger_id=ledger_id, entry_id=entry_id).entries[0]

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        reply = await self._ask(self._to(bookie).v3, ReadLac(ledger_id=ledger_id))
        if reply.lac == LacAnswer():
            _check_keyless(reply, bookie=bookie, ledger_id=ledger_id)
        # The LAC is valid even if the status reports an error, which may concern the other field.
        return reply.lac

    async def read_batch(
        self,
        bookie: BookieId,
        ledger_id: int,
        first_entry_id: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> list[bytes]:
        request = ReadBatch(
            ledger_id=ledger_id,
            first_entry_id=first_entry_id,
            count_max=count_max,
            bytes_max=min(bytes_max, BATCH_BYTES_MAX),
        )
        connections = self._to(bookie)
        async with connections.probe:
            supports_batches = connections.supports_batches
            if supports_batches is None:
                return await self._probe_batch(bookie, request)
        if supports_batches:
            return _batch(bookie, request, await self._ask(connections.batch, request))
        return [await self.read(bookie, ledger_id, first_entry_id)]

    async def _probe_batch(self, bookie: BookieId, request: ReadBatch) -> list[bytes]:
        """Send the first batch read, on a connection of its own. If the bookie closes the
        connection, it may not support batch reads, and a single read replaces it."""
        connections = self._to(bookie)
        connection = await connections.batch.connection()
        try:
            return _batch(bookie, request, await connection.request(request))
        except BrokenConnectionError:
            try:
                return [await self.read(bookie, request.ledger_id, request.first_entry_id)]
            finally:
                connections.note_batch_refusal()

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        reply = await self._ask(self._to(bookie).v3, ListEntries(ledger_id=ledger_id))
        _check_keyless(reply, bookie=bookie, ledger_id=ledger_id)
        return decode_availability(reply.availability)

    async def room(self, bookie: BookieId) -> DiskSpace:
        reply = await self._ask(self._to(bookie).v3, ReadDiskSpace())
        room = _check_keyless(reply, bookie=bookie).room
        if room is None:
            raise UnavailableError("the bookie reports impossible disk sizes", bookie=bookie)
        return room

    # --- Writes --------------------------------------------------------------------------------

    async def add(
        self,
        bookie: BookieId,
        entry: bytes,
        *,
        master_key: bytes,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        request = Add(
            entry=entry,
            master_key=master_key,
            is_recovery=is_recovery,
            is_high_priority=is_high_priority,
        )
        connections = self._to(bookie)
        channel = connections.data if len(entry) <= V3_ENTRY_BYTES_MAX else connections.v2
        reply = await self._ask(channel, request)
        header = request.header
        reply.check(bookie=bookie, ledger_id=header.ledger_id, entry_id=header.entry_id)

    async def write_lac(
        self, bookie: BookieId, ledger_id: int, lac: int, *, master_key: bytes, record: bytes
    ) -> None:
        request = WriteLac(ledger_id=ledger_id, lac=lac, master_key=master_key, record=record)
        reply = await self._ask(self._to(bookie).v3, request)
        reply.check(bookie=bookie, ledger_id=ledger_id)

    async def transfer(self, transfer: Transfer) -> TransferResult:
        return await self._bulk.transfer(transfer)

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return self._bulk.source_health(bookie)

    # --- Connections ---------------------------------------------------------------------------

    def bookie_returned(self, bookie: BookieId) -> None:
        """Allow connections to a bookie that registered again, and find out again what it
        supports."""
        if bookie in self._connections:
            self._connections[bookie].forget_refusal()

    async def close(self) -> None:
        """Break all connections. Requests in flight and all later requests fail."""
        self._is_closed = True
        for connections in self._connections.values():
            await connections.close()
        await self._bulk.close()

    async def _ask(self, channel: Channel, request: Request) -> Reply:
        connection = await channel.connection()
        return await connection.request(request)

    def _to(self, bookie: BookieId) -> "_Connections":
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=bookie)
        connections = self._connections.get(bookie)
        if connections is None:
            connections = self._connections[bookie] = self._new_connections(bookie)
        return connections

    def _new_connections(self, bookie: BookieId) -> "_Connections":
        channel_v3, channel_v2 = self._channel(bookie, v3), self._channel(bookie, v2)
        return _Connections(
            v3=channel_v3,
            v2=channel_v2,
            data=channel_v3 if self._settings.protocol == "v3" else channel_v2,
            batch=self._channel(bookie, v2),
        )

    def _channel(self, bookie: BookieId, codec: Codec) -> Channel:
        async def connect(on_broken: OnBroken) -> Connection:
            return await Connection.open(
                bookie,
                self._resolve(bookie),
                codec=codec,
                reads=self._budgets.reads(bookie),
                settings=self._settings.connection,
                on_broken=on_broken,
                connector=self._connector,
            )

        return Channel(
            bookie,
            connect,
            locate=partial(self._resolve, bookie),
            clock=self._clock,
            rng=self._rng,
        )


def _check_keyless(reply: Reply, **context: object) -> Reply:
    """Check the reply to a request without a master key.

    EUA then cannot mean a wrong key, so the bookie requires authentication.
    """
    if reply.status is Status.EUA:
        raise AuthenticationRequiredError(
            "the bookie requires authentication: set security.bookie_user and "
            "security.bookie_password_file, or security.bookie_tls with a certificate",
            **context,
        )
    return reply.check(**context)


def _batch(bookie: BookieId, request: ReadBatch, reply: Reply) -> list[bytes]:
    _check_keyless(
        reply, bookie=bookie, ledger_id=request.ledger_id, entry_id=request.first_entry_id
    )
    if not reply.entries:
        raise UnavailableError("batch read without an entry", bookie=bookie)
    return list(reply.entries)


@dataclass(slots=True, eq=False, kw_only=True)
class _Connections:
    """The connections to one bookie, made on demand. ``data``, for single reads and adds, is ``v3``
    or ``v2``."""

    v3: Channel
    v2: Channel
    data: Channel
    batch: Channel
    probe: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a batch read finds out whether the bookie supports batch reads."""
    single_reads_at_refusal: Connection | None = None
    """The connection for single reads at the time when batch reads were refused. While it is not
    broken, the bookie has not restarted, so it still does not support them."""

    @property
    def supports_batches(self) -> bool | None:
        """True if the bookie supports batch reads; None if that is not known."""
        if self.single_reads_at_refusal is not None and not self.single_reads_at_refusal.is_broken:
            return False
        connection = self.batch.current
        if connection is not None and connection.has_answered and not connection.is_broken:
            return True
        return None

    def note_batch_refusal(self) -> None:
        """Record that the bookie closed the connection on a batch read.

        If the single read failed as well, the bookie is down, and nothing is known.
        """
        self.single_reads_at_refusal = self.data.current
        if self.supports_batches is False:
            self.batch.retry_now()  # the refusal was not a failure

    def forget_refusal(self) -> None:
        self.single_reads_at_refusal = None
        for channel in (self.v3, self.v2, self.batch):
            channel.retry_now()

    async def close(self) -> None:
        for channel in (self.v3, self.v2, self.batch):
            await channel.close()


@asynccontextmanager
async def open_bookies(
    resolve: Resolve = spelled_address,
    *,
    clock: Clock,
    rng: random.Random,
    reads_in_flight_max: int,
    connector: Connector = connect,
) -> AsyncIterator[BookieClient]:
    """Yield a client, and close it at the end.

    ``resolve``: by default ids are read as ``host:port``. ``reads_in_flight_max``: at one bookie,
    including the reads of transfers (rule S10). ``connector``: opens all connections.
    """
    budgets = Budgets(reads_in_flight_max=reads_in_flight_max)
    bookies = BookieClient(
        resolve=resolve,
        budgets=budgets,
        bulk=BulkTransfers(budgets, resolve=resolve, connector=connector),
        clock=clock,
        rng=rng,
        settings=BookieClientSettings(),
        connector=connector,
    )
    try:
        yield bookies
    finally:
        await bookies.close()
