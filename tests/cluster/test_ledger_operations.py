"""Ledgers written, read and recovered on real bookies, with Java's client on the other side."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.appending import BookiePool
from ledgers.client import BookieClient, open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import ConflictError, FencedError, LedgerClosedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, DigestType, LedgerMetadata
from ledgers.placement import Candidate, RandomPlacement
from ledgers.reading import LedgerReader, find_end
from ledgers.recovery import recover_ledger
from ledgers.registration import Registration
from ledgers.writing import LedgerOptions, LedgerWriter
from ledgers.zookeeper.store import ZooKeeperStore
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.our_client import sha256_of
from tests.java.messages import Shape, Verdict
from tests.java.tool import JavaTool, JavaWriter
from tests.zookeeper_server import PATIENT_SESSION_S

pytest_plugins = ["tests.java.fixtures"]
pytestmark = pytest.mark.cluster

T = TypeVar("T")
DEADLINE_S = 60.0
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One process's view of the cluster: what the operations need."""

    manager: LedgerManager
    bookies: BookieClient
    pool: BookiePool

    def writer(self, options: LedgerOptions) -> AbstractAsyncContextManager[LedgerWriter]:
        return LedgerWriter.create(
            options,
            manager=self.manager,
            bookies=self.bookies,
            pool=self.pool,
            clock=CLOCK,
            random=Random(),
        )

    async def recover(self, ledger_id: int) -> LedgerMetadata:
        """Recover the ledger. Start again whenever another client has written the metadata."""
        while True:
            with suppress(ConflictError):
                versioned = await recover_ledger(
                    await self.manager.read(ledger_id),
                    manager=self.manager,
                    bookies=self.bookies,
                    pool=self.pool,
                    clock=CLOCK,
                )
                return versioned.metadata

    async def payloads(self, ledger_id: int) -> list[bytes]:
        versioned = await self.manager.read(ledger_id)
        opened = await find_end(versioned, bookies=self.bookies, clock=CLOCK)
        reader = LedgerReader(
            ledger_id, opened.metadata, digest=opened.digest, bookies=self.bookies, clock=CLOCK
        )
        return [entry.payload async for entry in reader.entries(0, opened.lac)]


@asynccontextmanager
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    uri = MetadataUri.parse(cluster.metadata_service_uri)
    store = await ZooKeeperStore.open(uri.hosts, session_timeout_s=PATIENT_SESSION_S)
    registration = Registration(store, uri.root)
    view = await registration.read()

    async def writable() -> Sequence[Candidate]:
        return [Candidate(bookie=bookie) for bookie in (await registration.read()).writable]

    try:
        async with open_bookies(view.locate, reads_in_flight_max=64) as bookies:
            yield Client(
                manager=await LedgerManager.open(store, uri),
                bookies=bookies,
                pool=BookiePool(writable=writable, placement=RandomPlacement(Random())),
            )
    finally:
        await store.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def payloads(count: int = 20) -> list[bytes]:
    """Return small payloads, and every seventh of 50,000 bytes."""
    return [b"%d" % number * (10_000 if number % 7 == 3 else 1) for number in range(count)]


async def write(writer: LedgerWriter, parts: Sequence[bytes]) -> None:
    """Send all payloads pipelined, and return when all are acknowledged."""
    adds = [await writer.send(part) for part in parts]
    await asyncio.gather(*adds)


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("quorums", [(1, 1, 1), (3, 3, 2), (4, 2, 2)], ids=str)
def test_our_ledger_is_read_by_us_and_by_java(
    cluster: LocalCluster, java: JavaTool, digest_type: DigestType, quorums: tuple[int, int, int]
) -> None:
    ensemble_size, write_quorum, ack_quorum = quorums
    options = LedgerOptions(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        password=b"secret",
        metadata_version=2 if digest_type is DigestType.CRC32 else 3,
    )

    async def scenario() -> int:
        async with client(cluster) as ours:
            async with ours.writer(options) as writer:
                await write(writer, payloads())
                await writer.close()
            assert await ours.payloads(writer.ledger_id) == payloads()
            return writer.ledger_id

    ledger_id = run(scenario())

    content = java.read(cluster.metadata_service_uri, ledger_id)
    assert content.error is None
    assert (content.state, content.last) == ("CLOSED", 19)
    assert content.length == content.bytes == sum(map(len, payloads()))
    assert content.sha256 == sha256_of(payloads())


@pytest.mark.compat(
    "BookieRecoveryTest.recoverWithoutPasswordInConf",
    "LedgerRecoveryTest.testLedgerRecovery",
    "LedgerRecoveryTest.testEmptyLedgerRecoveryOne",
    "LedgerRecoveryTest.testEmptyLedgerRecovery",
    verdict="same",
)
@pytest.mark.parametrize("digest", ["CRC32", "CRC32C", "MAC", "DUMMY"])
@pytest.mark.parametrize("entries", [0, 1, 25])
def test_an_open_java_ledger_is_recovered_with_all_entries(
    cluster: LocalCluster, java: JavaTool, digest: str, entries: int
) -> None:
    uri = cluster.metadata_service_uri
    shape = Shape(digest=digest, entries=entries, ensemble_size=4, write_quorum=3, close=False)
    (written,) = java.write(uri, shape)

    async def scenario() -> LedgerMetadata:
        async with client(cluster) as ours:
            return await ours.recover(written.ledger)

    closed = run(scenario())

    assert (closed.last_entry_id, closed.length) == (entries - 1, 100 * entries)
    report = java.judge(uri, [written.ledger], expected=[written])
    assert report.verdict is Verdict.WHOLE


def test_fencing_a_java_writer_loses_no_acknowledged_entry(
    cluster: LocalCluster, java: JavaTool
) -> None:
    uri = cluster.metadata_service_uri
    writer = JavaWriter(uri, Shape(ack_quorum=2), window=20, pause_ms=0)
    writer.wait_acknowledged(100)

    async def scenario() -> LedgerMetadata:
        async with client(cluster) as ours:
            return await ours.recover(writer.ledger_id)

    closed = run(scenario())

    stopped = writer.wait_stopped()
    assert stopped.error is not None
    assert writer.last_acknowledged <= closed.last_entry_id
    # The slowest of three bookies may lack entries up to the LAC, which two acknowledged: they
    # were on their way when it was fenced. A recovery writes only entries beyond the LAC again.
    judged = java.judge(uri, [writer.ledger_id]).ledgers[writer.ledger_id]
    assert judged.error is None
    assert judged.problems.keys() <= {"absent"}, judged
    lacking = Counter(copy.entry for copy in judged.examples)
    assert set(lacking.values()) <= {1}, "two bookies have every entry"


def test_fencing_by_java_loses_no_entry_that_we_acknowledged(
    cluster: LocalCluster, java: JavaTool
) -> None:
    uri = cluster.metadata_service_uri

    async def write_until_stopped(writer: LedgerWriter, acknowledged: int) -> int:
        try:
            while True:
                acknowledged = await writer.add(b"entry")
        except (FencedError, LedgerClosedError):
            return acknowledged

    async def scenario() -> tuple[int, int]:
        async with client(cluster) as ours, ours.writer(LedgerOptions()) as writer:
            acknowledged = await writer.add(b"entry")
            acknowledged, _ = await asyncio.gather(
                write_until_stopped(writer, acknowledged),
                asyncio.to_thread(java.read, uri, writer.ledger_id, with_recovery=True),
            )
            return writer.ledger_id, acknowledged

    ledger_id, acknowledged = run(scenario())

    content = java.read(uri, ledger_id)
    assert content.state == "CLOSED"
    assert content.last is not None
    assert content.last >= acknowledged


@pytest.mark.compat(
    "ConcurrentV2RecoveryTest.testConcurrentOpen",
    verdict="better",
    why="the loser of the race adopts the result of the winner instead of failing",
)
@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testConcurrentRecovery1",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery2",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery3",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery4",
    verdict="same",
)
def test_concurrent_recoveries_by_java_and_us_agree(cluster: LocalCluster, java: JavaTool) -> None:
    uri = cluster.metadata_service_uri
    ledgers = java.write(uri, Shape(entries=5, close=False, count=10))

    async def scenario() -> list[LedgerMetadata]:
        async with client(cluster) as one, client(cluster) as other:
            closed: list[LedgerMetadata] = []
            for written in ledgers:
                theirs, *ours = await asyncio.gather(
                    asyncio.to_thread(java.read, uri, written.ledger, with_recovery=True),
                    one.recover(written.ledger),
                    other.recover(written.ledger),
                )
                assert (theirs.error, theirs.last) == (None, 4)
                assert ours[0] == ours[1]
                closed.append(ours[0])
            return closed

    assert [metadata.last_entry_id for metadata in run(scenario())] == [4] * len(ledgers)
    assert java.judge(uri, [w.ledger for w in ledgers], expected=ledgers).verdict is Verdict.WHOLE


def test_a_bookie_killed_during_writes_is_replaced(cluster: LocalCluster, java: JavaTool) -> None:
    options = LedgerOptions(write_quorum=3, ack_quorum=3, password=b"secret")

    async def scenario() -> LedgerMetadata:
        async with client(cluster) as ours:
            async with ours.writer(options) as writer:
                await write(writer, payloads()[:10])
                killed = writer.metadata.last_segment.ensemble[1]
                kill_and_expire(cluster, killed)
                await write(writer, payloads()[10:])
                closed = await writer.close()
            assert await ours.payloads(writer.ledger_id) == payloads()
            _, second = closed.metadata.segments
            assert second.first_entry_id == 10
            assert killed not in second.ensemble
            content = await asyncio.to_thread(
                java.read, cluster.metadata_service_uri, writer.ledger_id
            )
            assert content.sha256 == sha256_of(payloads())
            cluster.start_bookie(killed)
            return closed.metadata

    assert run(scenario()).last_entry_id == 19


@pytest.mark.compat("LedgerRecoveryTest.testEnsembleChangeDuringRecovery", verdict="same")
def test_an_abandoned_ledger_is_recovered_with_one_bookie_dead(
    cluster: LocalCluster, java: JavaTool
) -> None:
    uri = cluster.metadata_service_uri
    shape = Shape(entries=50, write_quorum=3, ack_quorum=2, close=False, count=5)
    written = java.write(uri, shape)
    victim = BookieId(java.metadata(uri, written[0].ledger).ensembles[0][0])
    kill_and_expire(cluster, victim)

    async def scenario() -> list[LedgerMetadata]:
        async with client(cluster) as ours:
            closed = await asyncio.gather(*(ours.recover(each.ledger) for each in written))
            for each in written:
                assert sha256_of(await ours.payloads(each.ledger)) == each.sha256
            return closed

    closed = run(scenario())
    cluster.start_bookie(victim)

    assert {metadata.last_entry_id for metadata in closed} == {49}
    for each in written:
        content = java.read(uri, each.ledger)
        assert (content.state, content.last, content.sha256) == ("CLOSED", 49, each.sha256)
