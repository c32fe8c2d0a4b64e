"""Our own client of a real cluster, put together as an application would."""

import asyncio
import hashlib
import random
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from ledgers.appending import BookiePool
from ledgers.client import BookieClient, open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.codec.registration import spelled_address
from ledgers.errors import ConflictError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.placement import Candidate, RandomPlacement
from ledgers.reading import LedgerReader, find_end, ledger_digest
from ledgers.recovery import recover_ledger
from ledgers.registration import Registration
from ledgers.store import MetadataStore
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire.framing import frame
from ledgers.writing import LedgerOptions, LedgerWriter
from ledgers.zookeeper.store import ZooKeeperStore
from tests.memory.bookies import lac_record
from tests.zookeeper_server import PATIENT_SESSION_S

TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OurClient:
    """Everything that our client functions need, bound to one cluster."""

    store: MetadataStore
    uri: MetadataUri
    manager: LedgerManager
    bookies: BookieClient
    pool: BookiePool
    clock: Clock

    def create(
        self, options: LedgerOptions, *, ledger_id: int | None = None
    ) -> AbstractAsyncContextManager[LedgerWriter]:
        return LedgerWriter.create(
            options,
            manager=self.manager,
            bookies=self.bookies,
            pool=self.pool,
            clock=self.clock,
            random=random.Random(1),
            ledger_id=ledger_id,
        )

    async def read(self, ledger_id: int) -> tuple[int, str]:
        """Return the LAC, and the sha256 over all payloads up to it, in hex."""
        versioned = await self.manager.read(ledger_id)
        opened = await find_end(versioned, bookies=self.bookies, clock=self.clock)
        reader = LedgerReader(
            ledger_id, opened.metadata, digest=opened.digest, bookies=self.bookies, clock=self.clock
        )
        sha256 = hashlib.sha256()
        async with aclosing(reader.entries(0, opened.lac)) as entries:
            async for entry in entries:
                sha256.update(entry.payload)
        return opened.lac, sha256.hexdigest()

    async def write_lac(self, writer: LedgerWriter) -> None:
        """Send the LAC to the bookies, as Java's writers may.

        Otherwise only the next entry has it.
        """
        digest = ledger_digest(writer.metadata)
        request = wire.Request()
        request.header.version, request.header.txnId = wire.VERSION_THREE, 1
        request.header.operation = wire.WRITE_LAC
        request.writeLacRequest.ledgerId = writer.ledger_id
        request.writeLacRequest.lac = writer.lac
        request.writeLacRequest.masterKey = digest.master_key
        request.writeLacRequest.body = lac_record(
            digest, ledger_id=writer.ledger_id, lac=writer.lac
        )
        for bookie in writer.metadata.last_segment.ensemble:
            reader, peer = await asyncio.open_connection(*spelled_address(bookie))
            peer.write(frame(request.SerializeToString()))
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            response = wire.Response.FromString(await reader.readexactly(size))
            assert response.writeLacResponse.status == 0, response
            peer.close()

    async def recover(self, ledger_id: int) -> VersionedMetadata:
        """Recover the ledger. Start again whenever another client has written the metadata."""
        while True:
            with suppress(ConflictError):
                return await recover_ledger(
                    await self.manager.read(ledger_id),
                    manager=self.manager,
                    bookies=self.bookies,
                    pool=self.pool,
                    clock=self.clock,
                )


@asynccontextmanager
async def our_client(metadata_service_uri: str) -> AsyncIterator[OurClient]:
    """Open the client within a deadline, so that no test hangs."""
    uri, clock = MetadataUri.parse(metadata_service_uri), SystemClock()
    async with asyncio.timeout(TIMEOUT_S):
        store = await ZooKeeperStore.open(uri.hosts, session_timeout_s=PATIENT_SESSION_S)
        registration = Registration(store, uri.root)

        async def writable() -> list[Candidate]:
            return [Candidate(bookie=bookie) for bookie in (await registration.read()).writable]

        try:
            async with open_bookies(reads_in_flight_max=64) as bookies:
                yield OurClient(
                    store=store,
                    uri=uri,
                    manager=await LedgerManager.open(store, uri),
                    bookies=bookies,
                    pool=BookiePool(writable=writable, placement=RandomPlacement(random.Random(1))),
                    clock=clock,
                )
        finally:
            await store.close()


async def abandoned(uri: str, payloads: Iterable[bytes], *, ack_quorum: int = 2) -> LedgerWriter:
    """Return the writer of an open ledger on three bookies. It has ended without closing it."""
    wide = LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=ack_quorum)
    async with our_client(uri) as client, client.create(wide) as writer:
        for sent in [await writer.send(payload) for payload in payloads]:
            await sent
    return writer


def sha256_of(payloads: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(payloads)).hexdigest()
