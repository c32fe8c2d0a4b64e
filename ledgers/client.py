"""The client for real bookies: it implements the ``Bookies`` interface.

``BookieClient`` uses up to two connections to each bookie, made on demand: V3, whose replies can be
told apart (rule S5), and V2 for adds of the largest entries.

Transfers go to the bulk path (``bulk``), which has its own connections. Both share the read
budgets. ``open_bookies`` returns a client with a bulk path of its own, without the daemon's flow
control.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ledgers.bookies import DiskSpace, LacAnswer, SourceHealth, Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.codec.registration import Resolve, spelled_address
from ledgers.connection import DEFAULT_SETTINGS, Channel, Connection, ConnectionSettings, OnBroken
from ledgers.errors import AuthenticationRequiredError, UnavailableError
from ledgers.host_names import Connector, connect
from ledgers.model import BookieId
from ledgers.wire import v2, v3
from ledgers.wire.messages import Add, Codec, Read, ReadDiskSpace, ReadLac, Reply, Request, Status

V3_ENTRY_BYTES_MAX = 4 * 1024 * 1024
"""Larger entries are added over V2. A V3 frame is longer, so an entry that just fitted into the
frame of its writer could exceed the limit of every bookie."""


class BookieClient:
    """The ``Bookies`` for real bookies. Belongs to one event loop, which must also ``close`` it."""

    def __init__(
        self, bulk: BulkTransfers, *, settings: ConnectionSettings = DEFAULT_SETTINGS
    ) -> None:
        """``bulk``: its addresses, read budgets, health and connector are those of the client."""
        self._bulk, self._settings = bulk, settings
        self._channels: dict[tuple[BookieId, Codec], Channel] = {}
        self._is_closed = False

    # --- Reads ---------------------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        reply = await self._ask(bookie, Read(ledger_id=ledger_id, entry_id=entry_id))
        return _check_keyless(reply, bookie=bookie, ledger_id=ledger_id, entry_id=entry_id).entry

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
        reply = await self._ask(bookie, request)
        return reply.check(bookie=bookie, ledger_id=ledger_id, entry_id=entry_id).entry

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        reply = await self._ask(bookie, ReadLac(ledger_id=ledger_id))
        if reply.lac == LacAnswer():
            _check_keyless(reply, bookie=bookie, ledger_id=ledger_id)
        # The LAC is valid even if the status reports an error, which may concern the other field.
        return reply.lac

    async def room(self, bookie: BookieId) -> DiskSpace:
        reply = await self._ask(bookie, ReadDiskSpace())
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
        codec: Codec = v3 if len(entry) <= V3_ENTRY_BYTES_MAX else v2
        reply = await self._ask(bookie, request, codec)
        header = request.header
        reply.check(bookie=bookie, ledger_id=header.ledger_id, entry_id=header.entry_id)

    async def transfer(self, transfer: Transfer) -> TransferResult:
        return await self._bulk.transfer(transfer)

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return self._bulk.source_health(bookie)

    # --- Connections ---------------------------------------------------------------------------

    def bookie_returned(self, bookie: BookieId) -> None:
        """Forget the failures of a bookie that registered again."""
        self._bulk.bookie_returned(bookie)

    async def close(self) -> None:
        """Break all connections. Requests in flight and all later requests fail."""
        self._is_closed = True
        for channel in list(self._channels.values()):
            await channel.close()
        await self._bulk.close()

    async def _ask(self, bookie: BookieId, request: Request, codec: Codec = v3) -> Reply:
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=bookie)
        channel, bulk = self._channels.get((bookie, codec)), self._bulk
        if channel is None:

            async def connect(on_broken: OnBroken) -> Connection:
                connection = Connection(
                    bookie,
                    bulk.resolve(bookie),
                    codec=codec,
                    reads=bulk.budgets.reads(bookie),
                    settings=self._settings,
                    on_broken=on_broken,
                )
                return await connection.open(bulk.connector)

            locate = partial(bulk.resolve, bookie)
            channel = Channel(bookie, connect, locate=locate, health=bulk.health)
            self._channels[bookie, codec] = channel
        return await (await channel.connection()).request(request)


def _check_keyless(reply: Reply, **context: object) -> Reply:
    """Check a reply. Without a master key, EUA means that the bookie requires authentication."""
    if reply.status is Status.EUA:
        raise AuthenticationRequiredError(
            "the bookie requires authentication: set security.bookie_user and "
            "security.bookie_password_file, or security.bookie_tls with a certificate",
            **context,
        )
    return reply.check(**context)


@asynccontextmanager
async def open_bookies(
    resolve: Resolve = spelled_address, *, reads_in_flight_max: int, connector: Connector = connect
) -> AsyncIterator[BookieClient]:
    """Yield a client, and close it at the end. ``resolve``: by default ids are read as
    ``host:port``. ``reads_in_flight_max``: at one bookie, with the reads of transfers (rule
    S10)."""
    bookies = BookieClient(
        BulkTransfers(
            Budgets(reads_in_flight_max=reads_in_flight_max), resolve=resolve, connector=connector
        )
    )
    try:
        yield bookies
    finally:
        await bookies.close()
