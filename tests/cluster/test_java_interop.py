"""Ledgers by us read by Java, and ledgers by Java read by us: content, ends and fencing."""

import asyncio
import random

import msgspec
import pytest

from daemon.local.cluster import LocalCluster
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState
from ledgers.writing import LedgerOptions
from tests.cluster.bookies_in_trouble import terminate
from tests.cluster.our_client import our_client, sha256_of
from tests.java.messages import Expected, Shape, Verdict
from tests.java.tool import JavaTool, JavaWriter

pytest_plugins = ["tests.java.fixtures"]
pytestmark = pytest.mark.cluster

MEGABYTE = 1_000_000
LONG_LEDGER_ID = 2**40
ON_THREE = LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=3)


def payloads(*sizes: int) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


# --- Closed ledgers ------------------------------------------------------------------------------


@pytest.mark.compat("BookKeeperAdminTest.testGetEntriesFromEmptyLedger", verdict="same")
@pytest.mark.parametrize(
    ("options", "sizes", "ledger_id"),
    [
        pytest.param(
            LedgerOptions(ensemble_size=5, write_quorum=3, ack_quorum=3, password=b"secret"),
            (100,) * 200,
            None,
            id="CRC32C, striped",
        ),
        pytest.param(
            LedgerOptions(digest_type=DigestType.CRC32, metadata_version=2, has_ctime=True),
            (1,) * 50,
            None,
            id="CRC32, metadata version 2, entries of one byte",
        ),
        pytest.param(
            LedgerOptions(
                digest_type=DigestType.HMAC,
                password=bytes(range(256)),
                custom=(("application", b"test"), ("binary", bytes(range(256)))),
            ),
            (1, 10, 1_000, 60_000),
            None,
            id="HMAC, a binary password, custom metadata",
        ),
        pytest.param(
            LedgerOptions(
                ensemble_size=1, write_quorum=1, ack_quorum=1, digest_type=DigestType.DUMMY
            ),
            (0, 100),
            None,
            id="DUMMY, one bookie, an entry without a payload",
        ),
        pytest.param(
            LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=3),
            (MEGABYTE, 1, MEGABYTE),
            None,
            id="entries of a megabyte",
        ),
        pytest.param(LedgerOptions(metadata_version=2), (), None, id="no entries"),
        pytest.param(LedgerOptions(), (5, 5), LONG_LEDGER_ID, id="a ledger id of 41 bits"),
    ],
)
def test_java_reads_our_ledgers(
    java: JavaTool, uri: str, options: LedgerOptions, sizes: tuple[int, ...], ledger_id: int | None
) -> None:
    async def write() -> int:
        async with our_client(uri) as ours, ours.create(options, ledger_id=ledger_id) as writer:
            await asyncio.gather(*[await writer.send(payload) for payload in payloads(*sizes)])
            await writer.close()
            return writer.ledger_id

    ledger_id = asyncio.run(write())

    expected = Expected(ledger=ledger_id, last=len(sizes) - 1, sha256=sha256_of(payloads(*sizes)))
    report = java.judge(uri, [ledger_id], expected=[expected])
    assert report.verdict is Verdict.WHOLE, report
    assert report.ledgers[ledger_id].bytes == sum(sizes)
    assert java.read(uri, ledger_id).length == sum(sizes)


@pytest.mark.parametrize("metadata_version", [2, 3])
def test_we_read_javas_ledgers_and_serialise_equal_metadata(
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

    async def look() -> None:
        async with our_client(uri) as ours:
            for expected in written:
                assert await ours.read(expected.ledger) == (expected.last, expected.sha256)
            for expected in [*written, *open_ledgers]:
                data = (await ours.manager.read(expected.ledger)).data
                javas = java.metadata(uri, expected.ledger)
                assert javas.metadata_version == metadata_version
                assert serialize_metadata(parse_metadata(data)) == data
                assert bytes.fromhex(javas.serialized) == data

    asyncio.run(look())


# --- Open ledgers --------------------------------------------------------------------------------


def test_java_and_we_find_the_same_end_of_an_open_ledger(java: JavaTool, uri: str) -> None:
    async def look() -> None:
        async with our_client(uri) as ours, ours.create(ON_THREE) as writer:
            for payload in payloads(1, 2, 3):
                await writer.add(payload)

            assert java.read(uri, writer.ledger_id).last == 1  # the LAC of entry 2
            assert (await ours.read(writer.ledger_id))[0] == 1

            await ours.write_lac(writer)

            assert java.read(uri, writer.ledger_id).last == 2
            assert (await ours.read(writer.ledger_id))[0] == 2

    asyncio.run(look())


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


def test_a_surviving_java_writer_is_fenced_by_our_recovery(java: JavaTool, uri: str) -> None:
    with JavaWriter(uri, Shape(), window=5) as writer:
        writer.wait_acknowledged(20)

        closed = recovered_by_us(uri, writer.ledger_id)
        stopped = writer.wait_stopped()

    assert stopped.error == "BKLedgerFencedException"
    assert stopped.last <= closed.last_entry_id
    acknowledged = java.read(uri, writer.ledger_id, last=stopped.last)
    assert acknowledged.sha256 == stopped.sha256


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
