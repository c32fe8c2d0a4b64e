"""The client for real bookies: it implements the ``Bookies`` interface.

``BookieClient`` uses up to three connections to each bookie, made on demand:

- V3, for requests whose replies must be told apart (fencing, last entries, LACs; rule S5), and by
  default for single reads and adds;
- V2, for single reads and adds if so configured, and for the largest entries;
- V2 for batch reads only, because a bookie before 4.17 closes the connection on the first one.

Transfers go to the bulk path (``bulk``), which has its own connections. Both share the read budgets.
``open_bookies`` returns a client with a bulk path of its own, without the daemon's flow control.
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
from ledgers.bulk.limiters import READS_IN_FLIGHT_DEFAULT, Budgets
from ledgers.clock import Clock
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.connection import (
    BackOffSettings,
    BrokenConnectionError,
    Channel,
    Connection,
    ConnectionSettings,
    OnBroken,
)
from ledgers.errors import AuthenticationRequiredError, UnavailableError
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
"""Larger ones are added over V2: in a V3 frame one that just fitted its writer's may be too long
for any bookie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieClientSettings:
    """How bookies are spoken to."""

    protocol: Literal["v2", "v3"] = "v3"
    """For single reads and adds; what must be told apart goes over V3 in any case."""
    batch_bytes_max: int = 256 * 1024
    """At most so much is asked for in one batch read, whatever the caller allows (rule S10)."""
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)
    back_off: BackOffSettings = field(default_factory=BackOffSettings)


class BulkPath(Protocol):
    """Whoever carries out transfers. It is closed with the client."""

    async def transfer(self, transfer: Transfer) -> TransferResult: ...

    def source_health(self, bookie: BookieId) -> SourceHealth: ...

    async def close(self) -> None: ...


class BookieClient:
    """The real ``Bookies``. Belongs to one loop; ``close`` it there."""

    def __init__(
        self,
        *,
        resolve: Resolve,
        budgets: Budgets,
        bulk: BulkPath,
        clock: Clock,
        rng: random.Random,
        settings: BookieClientSettings,
    ) -> None:
        self._resolve, self._budgets, self._bulk = resolve, budgets, bulk
        self._clock, self._rng, self._settings = clock, rng, settings
        self._lines: dict[BookieId, _Lines] = {}
        self._is_closed = False

    # --- Reads ---------------------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        lines = self._to(bookie)
        line = lines.v3 if entry_id == LAST_ENTRY else lines.data
        reply = await self._ask(line, Read(ledger_id=ledger_id, entry_id=entry_id))
        return _keyless(reply, bookie=bookie, ledger_id=ledger_id, entry_id=entry_id).entries[0]

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
            _keyless(reply, bookie=bookie, ledger_id=ledger_id)
        return reply.lac  # one of the two counts, although the status may tell of the other

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
            bytes_max=min(bytes_max, self._settings.batch_bytes_max),
        )
        lines = self._to(bookie)
        async with lines.probe:
            knows_batches = lines.knows_batches
            if knows_batches is None:
                return await self._probe_batch(bookie, request)
        if knows_batches:
            return _batch(bookie, request, await self._ask(lines.batch, request))
        return [await self.read(bookie, ledger_id, first_entry_id)]

    async def _probe_batch(self, bookie: BookieId, request: ReadBatch) -> list[bytes]:
        """The first one, on a connection that carries nothing else: what becomes of that tells."""
        lines = self._to(bookie)
        connection = await lines.batch.connection()
        try:
            return _batch(bookie, request, await connection.request(request))
        except BrokenConnectionError:
            try:
                return [await self.read(bookie, request.ledger_id, request.first_entry_id)]
            finally:
                lines.note_batch_refusal()

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        reply = await self._ask(self._to(bookie).v3, ListEntries(ledger_id=ledger_id))
        _keyless(reply, bookie=bookie, ledger_id=ledger_id)
        return decode_availability(reply.availability)

    async def room(self, bookie: BookieId) -> DiskSpace:
        reply = await self._ask(self._to(bookie).v3, ReadDiskSpace())
        room = _keyless(reply, bookie=bookie).room
        if room is None:
            raise UnavailableError("bookie tells of impossible disks", bookie=bookie)
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
        lines = self._to(bookie)
        line = lines.data if len(entry) <= V3_ENTRY_BYTES_MAX else lines.v2
        reply = await self._ask(line, request)
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
        """It registered anew: connect at once, and find out again what it can do."""
        if bookie in self._lines:
            self._lines[bookie].start_afresh()

    async def close(self) -> None:
        """Break all connections; requests in flight, and all later ones, fail."""
        self._is_closed = True
        for lines in self._lines.values():
            await lines.close()
        await self._bulk.close()

    async def _ask(self, line: Channel, request: Request) -> Reply:
        connection = await line.connection()
        return await connection.request(request)

    def _to(self, bookie: BookieId) -> "_Lines":
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=bookie)
        lines = self._lines.get(bookie)
        if lines is None:
            lines = self._lines[bookie] = self._new_lines(bookie)
        return lines

    def _new_lines(self, bookie: BookieId) -> "_Lines":
        line_v3, line_v2 = self._channel(bookie, v3), self._channel(bookie, v2)
        return _Lines(
            v3=line_v3,
            v2=line_v2,
            data=line_v3 if self._settings.protocol == "v3" else line_v2,
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
            )

        return Channel(
            bookie,
            connect,
            locate=partial(self._resolve, bookie),
            clock=self._clock,
            rng=self._rng,
            settings=self._settings.back_off,
        )


def _keyless(reply: Reply, **context: object) -> Reply:
    """``Reply.check`` for a request without a master key: it cannot be that which the bookie
    refuses."""
    if reply.status is Status.EUA:
        raise AuthenticationRequiredError(
            "it requires authentication (SASL), which bookmender has not", **context
        )
    return reply.check(**context)


def _batch(bookie: BookieId, request: ReadBatch, reply: Reply) -> list[bytes]:
    _keyless(reply, bookie=bookie, ledger_id=request.ledger_id, entry_id=request.first_entry_id)
    if not reply.entries:
        raise UnavailableError("batch read without an entry", bookie=bookie)
    return list(reply.entries)


@dataclass(slots=True, eq=False, kw_only=True)
class _Lines:
    """The connections to one bookie, made when they are needed. ``data`` is one of the first
    two."""

    v3: Channel
    v2: Channel
    data: Channel
    batch: Channel
    probe: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is being found out whether the bookie knows batch reads."""
    refused_beside: Connection | None = None
    """Where single reads went when batch reads were refused: while it lives, it is the same
    bookie."""

    @property
    def knows_batches(self) -> bool | None:
        """Whether the bookie at the other end knows batch reads; None while that is not known."""
        if self.refused_beside is not None and not self.refused_beside.is_broken:
            return False
        connection = self.batch.current
        if connection is not None and connection.has_answered and not connection.is_broken:
            return True
        return None

    def note_batch_refusal(self) -> None:
        """If single reads got no answer either, the bookie went down, and nothing is known."""
        self.refused_beside = self.data.current
        if self.knows_batches is False:
            self.batch.retry_now()  # that it closed this connection was no failure

    def start_afresh(self) -> None:
        self.refused_beside = None
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
    reads_in_flight_max: int = READS_IN_FLIGHT_DEFAULT,
) -> AsyncIterator[BookieClient]:
    """Closed at the end. ``resolve``: by default ids are read as ``host:port``.

    ``reads_in_flight_max``: at one bookie, single reads and bulk together (rule S10).
    """
    budgets = Budgets(reads_in_flight_max=reads_in_flight_max)
    bookies = BookieClient(
        resolve=resolve,
        budgets=budgets,
        bulk=BulkTransfers(budgets, resolve=resolve),
        clock=clock,
        rng=rng,
        settings=BookieClientSettings(),
    )
    try:
        yield bookies
    finally:
        await bookies.close()
