"""Ledgers by us read by Java, and Java's read by us: content, ends, recovery and fencing."""

import asyncio
import itertools
import random
from collections import Counter

import msgspec
import pytest

from daemon.local.cluster import LocalCluster
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import FencedError, LedgerClosedError
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState
from ledgers.writing import LedgerOptions, LedgerWriter
from tests.cluster.bookies_in_trouble import kill_and_expire, terminate
from tests.cluster.our_client import our_client, sha256_of
from tests.java.messages import Expected, Shape, Verdict
from tests.java.tool import JavaTool, JavaWriter

pytest_plugins = ["tests.java.fixtures"]
pytestmark = pytest.mark.cluster

LONG = pytest.mark.long(group="client")
MEGABYTE = 1_000_000
LONG_LEDGER_ID = 2**40
ON_THREE = LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=3)


def payloads(*sizes: int) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


# --- Closed ledgers ------------------------------------------------------------------------------

OURS = [
    (
        LedgerOptions(ensemble_size=5, write_quorum=3, ack_quorum=3, password=b"secret"),
        (100,) * 200,
    ),
    (
        LedgerOptions(
            ensemble_size=4,
            write_quorum=2,
            ack_quorum=2,
            digest_type=DigestType.CRC32,
            metadata_version=2,
            has_ctime=True,
        ),
        (1,) * 50,
    ),
    (
        LedgerOptions(
            digest_type=DigestType.HMAC,
            password=bytes(range(256)),
            custom=(("application", b"test"), ("binary", bytes(range(256)))),
        ),
        (1, 10, 1_000, 60_000),
    ),
    (
        LedgerOptions(ensemble_size=1, write_quorum=1, ack_quorum=1, digest_type=DigestType.DUMMY),
        (0, 100),
    ),
    (ON_THREE, (MEGABYTE, 1, MEGABYTE)),
    (LedgerOptions(metadata_version=2), ()),
]
"""Ledgers that differ in digest type, quorums, metadata version, password, and size of entries."""


@pytest.mark.compat("BookKeeperAdminTest.testGetEntriesFromEmptyLedger", verdict="same")
def test_java_reads_our_ledgers(java: JavaTool, uri: str) -> None:
    expected: list[Expected] = []

    async def write(options: LedgerOptions, *sizes: int, ledger_id: int | None = None) -> None:
        async with our_client(uri) as ours:
            async with ours.create(options, ledger_id=ledger_id) as writer:
                await asyncio.gather(*[await writer.send(payload) for payload in payloads(*sizes)])
                await writer.close()
            last, sha256 = len(sizes) - 1, sha256_of(payloads(*sizes))
            assert await ours.read(writer.ledger_id) == (last, sha256)
        expected.append(Expected(ledger=writer.ledger_id, last=last, sha256=sha256))

    async def write_all() -> None:
        for options, sizes in OURS:
            await write(options, *sizes)
        await write(LedgerOptions(), 5, 5, ledger_id=LONG_LEDGER_ID)

    asyncio.run(write_all())

    report = java.judge(uri, [each.ledger for each in expected], expected=expected)
    assert report.verdict is Verdict.WHOLE, report
    for each, (_, sizes) in zip(expected, OURS, strict=False):
        assert report.ledgers[each.ledger].bytes == sum(sizes)
        assert java.read(uri, each.ledger).length == sum(sizes)


@pytest.mark.parametrize("metadata_version", [pytest.param(2, marks=LONG), 3])
async def test_we_read_javas_ledgers_and_serialise_equal_metadata(
    java: JavaTool, uri: str, metadata_version: int
) -> None:
    shapes = [
        Shape(digest="CRC32C", ensemble_size=5, write_quorum=3, entries=100),
        Shape(digest="CRC32", ensemble_size=4, write_quorum=2, ack_quorum=2, password=""),
        Shape(digest="MAC", ensemble_size=1, write_quorum=1, ack_quorum=1, sizes=(1, 50_000)),
        Shape(digest="DUMMY", custom={"application": "tëst\x07\n"}, password="pässword\x0b"),
        Shape(sizes=(MEGABYTE,), entries=2),
        Shape(entries=0),
    ]
    written = java.write(uri, *shapes, metadata_version=metadata_version, with_ctime=True)
    open_ledgers = java.write(uri, Shape(close=False), metadata_version=metadata_version)

    async with our_client(uri) as ours:
        for expected in written:
            assert await ours.read(expected.ledger) == (expected.last, expected.sha256)
        for expected in [*written, *open_ledgers]:
            data = (await ours.manager.read(expected.ledger)).data
            javas = java.metadata(uri, expected.ledger)
            assert javas.metadata_version == metadata_version
            assert serialize_metadata(parse_metadata(data)) == data
            assert bytes.fromhex(javas.serialized) == data


# --- Open ledgers --------------------------------------------------------------------------------


async def test_java_and_we_find_the_same_end_of_an_open_ledger(java: JavaTool, uri: str) -> None:
    async with our_client(uri) as ours, ours.create(ON_THREE) as writer:
        for payload in payloads(1, 2, 3):
            await writer.add(payload)

        assert java.read(uri, writer.ledger_id).last == 1  # the LAC of entry 2
        assert (await ours.read(writer.ledger_id))[0] == 1

        await ours.write_lac(writer)

        assert java.read(uri, writer.ledger_id).last == 2
        assert (await ours.read(writer.ledger_id))[0] == 2


def recovered_by_us(uri: str, ledger_id: int) -> LedgerMetadata:
    async def recover() -> LedgerMetadata:
        async with our_client(uri) as ours:
            return (await ours.recover(ledger_id)).metadata

    return asyncio.run(recover())


def test_our_recovery_of_a_killed_java_writer_is_read_by_java(java: JavaTool, uri: str) -> None:
    shape = Shape(ensemble_size=5, sizes=(10, 1_000, 20_000), seed=7)
    with JavaWriter(uri, shape, window=20) as writer:
        writer.wait_acknowledged(100)
        last_acknowledged = writer.kill()

    closed = recovered_by_us(uri, writer.ledger_id)

    assert closed.state is LedgerState.CLOSED
    assert closed.last_entry_id >= last_acknowledged
    # The same payloads, for as many entries as were recovered.
    whole = msgspec.structs.replace(shape, entries=closed.last_entry_id + 1)
    (twin,) = java.write(uri, whole)
    expected = msgspec.structs.replace(twin, ledger=writer.ledger_id)
    report = java.judge(uri, [writer.ledger_id], expected=[expected])
    assert report.verdict is Verdict.WHOLE, report
    assert report.ledgers[writer.ledger_id].bytes == closed.length


@pytest.mark.compat(
    "BookieRecoveryTest.recoverWithoutPasswordInConf",
    "LedgerRecoveryTest.testLedgerRecovery",
    "LedgerRecoveryTest.testEmptyLedgerRecoveryOne",
    "LedgerRecoveryTest.testEmptyLedgerRecovery",
    verdict="same",
)
def test_open_java_ledgers_are_recovered_with_all_entries(java: JavaTool, uri: str) -> None:
    written = java.write(
        uri,
        *(
            Shape(digest=digest, entries=entries, ensemble_size=4, write_quorum=3, close=False)
            for digest, entries in itertools.product(
                ("CRC32", "CRC32C", "MAC", "DUMMY"), (0, 1, 25)
            )
        ),
    )

    closed = [recovered_by_us(uri, each.ledger) for each in written]

    assert [(each.last_entry_id, each.length) for each in closed] == [
        (each.last, 100 * (each.last + 1)) for each in written
    ]
    report = java.judge(uri, [each.ledger for each in written], expected=written)
    assert report.verdict is Verdict.WHOLE, report


def test_a_java_writer_fenced_by_us_loses_no_acknowledged_entry(java: JavaTool, uri: str) -> None:
    with JavaWriter(uri, Shape(ack_quorum=2), window=20, pause_ms=0) as writer:
        writer.wait_acknowledged(100)

        closed = recovered_by_us(uri, writer.ledger_id)
        stopped = writer.wait_stopped()

    assert stopped.error is not None
    assert max(stopped.last, writer.last_acknowledged) <= closed.last_entry_id
    acknowledged = java.read(uri, writer.ledger_id, last=stopped.last)
    assert acknowledged.sha256 == stopped.sha256
    # The slowest of three bookies may lack entries up to the LAC, which two acknowledged: they
    # were on their way when it was fenced. A recovery writes only entries beyond the LAC again.
    judged = java.judge(uri, [writer.ledger_id]).ledgers[writer.ledger_id]
    assert judged.error is None
    assert judged.problems.keys() <= {"absent"}, judged
    lacking = Counter(copy.entry for copy in judged.examples)
    assert set(lacking.values()) <= {1}, "two bookies have every entry"


def test_fencing_by_java_loses_no_entry_that_we_acknowledged(java: JavaTool, uri: str) -> None:
    async def write_until_stopped(writer: LedgerWriter, acknowledged: int) -> int:
        try:
            while True:
                acknowledged = await writer.add(b"entry")
        except (FencedError, LedgerClosedError):
            return acknowledged

    async def run() -> tuple[int, int]:
        async with our_client(uri) as ours, ours.create(LedgerOptions()) as writer:
            acknowledged = await writer.add(b"entry")
            acknowledged, _ = await asyncio.gather(
                write_until_stopped(writer, acknowledged),
                asyncio.to_thread(java.read, uri, writer.ledger_id, with_recovery=True),
            )
            return writer.ledger_id, acknowledged

    ledger_id, acknowledged = asyncio.run(run())

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
async def test_concurrent_recoveries_by_java_and_us_agree(java: JavaTool, uri: str) -> None:
    ledgers = java.write(uri, Shape(entries=5, close=False, count=10))

    async with our_client(uri) as one, our_client(uri) as other:
        for written in ledgers:
            theirs, first, second = await asyncio.gather(
                asyncio.to_thread(java.read, uri, written.ledger, with_recovery=True),
                one.recover(written.ledger),
                other.recover(written.ledger),
            )
            assert (theirs.error, theirs.last) == (None, 4)
            assert first.metadata == second.metadata
            assert first.metadata.last_entry_id == 4

    assert java.judge(uri, [w.ledger for w in ledgers], expected=ledgers).verdict is Verdict.WHOLE


# --- A bookie dies --------------------------------------------------------------------------------


async def test_a_bookie_killed_during_writes_is_replaced(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    written = payloads(*range(1, 20_000, 1_000))

    async with our_client(uri) as ours:
        async with ours.create(ON_THREE) as writer:
            await asyncio.gather(*[await writer.send(payload) for payload in written[:10]])
            killed = writer.metadata.last_segment.ensemble[1]
            kill_and_expire(module_cluster, killed)
            await asyncio.gather(*[await writer.send(payload) for payload in written[10:]])
            closed = await writer.close()
        _, second = closed.metadata.segments
        assert second.first_entry_id == 10
        assert killed not in second.ensemble
        assert await ours.read(writer.ledger_id) == (19, sha256_of(written))
    content = java.read(uri, writer.ledger_id)
    module_cluster.start_bookie(killed)

    assert content.sha256 == sha256_of(written)


@pytest.mark.compat("LedgerRecoveryTest.testEnsembleChangeDuringRecovery", verdict="same")
async def test_an_abandoned_ledger_is_recovered_with_one_bookie_dead(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    shape = Shape(entries=50, write_quorum=3, ack_quorum=2, close=False, count=5)
    written = java.write(uri, shape)
    victim = BookieId(java.metadata(uri, written[0].ledger).ensembles[0][0])
    kill_and_expire(module_cluster, victim)

    async with our_client(uri) as ours:
        closed = await asyncio.gather(*(ours.recover(each.ledger) for each in written))
        assert {each.metadata.last_entry_id for each in closed} == {49}
        for each in written:
            assert await ours.read(each.ledger) == (49, each.sha256)
    module_cluster.start_bookie(victim)

    for each in written:
        content = java.read(uri, each.ledger)
        assert (content.state, content.last, content.sha256) == ("CLOSED", 49, each.sha256)


@LONG
def test_we_read_a_ledger_with_an_ensemble_change_by_java(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    with JavaWriter(uri, Shape(), window=5) as writer:
        writer.wait_acknowledged(20)
        victim = BookieId(java.metadata(uri, writer.ledger_id).ensembles[0][1])
        terminate(module_cluster, victim)
        writer.wait_acknowledged(writer.last_acknowledged + 100)
        stopped = writer.stop()
    module_cluster.start_bookie(victim)

    async def read() -> tuple[int, str]:
        async with our_client(uri) as ours:
            return await ours.read(writer.ledger_id)

    assert len(java.metadata(uri, writer.ledger_id).ensembles) > 1
    assert asyncio.run(read()) == (stopped.last, stopped.sha256)
