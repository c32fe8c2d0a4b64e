"""The client against bookies that differ, fail or reach a limit. See also the contract tests."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bookies import Answer, Transfer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.connection import ConnectionSettings
from ledgers.digest import EntryDigest
from ledgers.errors import UnavailableError
from ledgers.model import DigestType
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.conftest import MakeCluster

pytestmark = pytest.mark.cluster

DIGEST = EntryDigest(DigestType.DUMMY, b"foobar")
KEY = DIGEST.master_key
LARGEST_V2_PAYLOAD_BYTES = 5 * 1024 * 1024 - 4 - 24 - 32
"""The payload that fits in a frame beside its length, the header word with the master key, and the
entry's header."""


def entry(ledger_id: int, entry_id: int, payload: bytes = b"hello") -> bytes:
    return DIGEST.pack(ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=0, payload=payload)


@asynccontextmanager
async def client(*, request_timeout_s: float = 5.0) -> AsyncIterator[BookieClient]:
    made = BookieClient(
        BulkTransfers(Budgets(reads_in_flight_max=64)),
        settings=ConnectionSettings(request_timeout_s=request_timeout_s),
    )
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.close()


async def test_the_largest_entry_of_v2_can_be_read_over_v3(cluster: LocalCluster) -> None:
    bookie, ledger_id = cluster.bookies[0], 9_100_000_000
    largest = entry(ledger_id, 0, bytes(LARGEST_V2_PAYLOAD_BYTES))

    async with client() as ours:
        await ours.add(bookie, largest, master_key=KEY)
        assert await ours.read(bookie, ledger_id, 0) == largest

        with pytest.raises(UnavailableError):
            await ours.add(bookie, largest + b"x", master_key=KEY)
        assert await ours.read(bookie, ledger_id, 0) == largest


async def test_a_recovery_can_add_the_largest_entry_of_v2(
    cluster: LocalCluster,
) -> None:
    """In a V3 frame, the entry would be too long for the bookie."""
    bookie, ledger_id = cluster.bookies[0], 9_100_000_001
    largest = entry(ledger_id, 0, bytes(LARGEST_V2_PAYLOAD_BYTES))

    async with client() as ours:
        await ours.read_lac(bookie, ledger_id - 1)
        await ours.add(bookie, largest, master_key=KEY, is_recovery=True, is_high_priority=True)
        assert await ours.read(bookie, ledger_id, 0) == largest


@pytest.mark.long(group="client")
async def test_entries_above_the_default_frame_limit_are_copied(
    make_cluster: MakeCluster,
) -> None:
    """The bookies have a raised limit."""
    cluster = make_cluster(bookies=2, bookie_settings={"nettyMaxFrameSizeBytes": str(9 << 20)})
    source, target = cluster.bookies
    large = [entry(1, n, random.Random(n).randbytes(8 << 20)) for n in range(3)]

    async with client() as ours:
        for each in large:
            await ours.add(source, each, master_key=KEY)
        result = await ours.transfer(
            Transfer(ledger_id=1, digest=DIGEST, reads={source: range(3)}, target=target)
        )
        assert (result.entry_count, result.failures) == (3, {})
        for entry_id, each in enumerate(large):
            assert await ours.read(target, 1, entry_id) == each


@pytest.mark.long(group="matrix")
async def test_a_bookie_before_4_17_is_read_entry_by_entry(make_cluster: MakeCluster) -> None:
    (bookie,) = make_cluster(bookies=1, bookkeeper="4.16.6").bookies

    async with client() as asked:
        for entry_id in range(3):
            await asked.add(bookie, entry(1, entry_id), master_key=KEY)

        result = await asked.transfer(
            Transfer(ledger_id=1, digest=DIGEST, reads={bookie: range(4)})
        )

        assert result.entry_count == 3
        assert result.failures == {bookie: {3: Answer.ABSENT}}


async def test_a_killed_bookie_serves_requests_after_its_return(
    cluster: LocalCluster,
) -> None:
    bookie, ledger_id = cluster.bookies[0], 9_100_000_002

    async with client() as asked:
        await asked.add(bookie, entry(ledger_id, 0), master_key=KEY)

        await asyncio.to_thread(kill_and_expire, cluster, bookie)
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await asked.read(bookie, ledger_id, 0)
        await asyncio.to_thread(cluster.start_bookie, bookie)
        asked.bookie_returned(bookie)

        assert await asked.read(bookie, ledger_id, 0) == entry(ledger_id, 0)


async def test_a_bookie_that_hangs_times_out_and_is_used_again(
    cluster: LocalCluster,
) -> None:
    bookie, ledger_id = cluster.bookies[0], 9_100_000_003

    async with client(request_timeout_s=1.0) as asked:
        await asked.add(bookie, entry(ledger_id, 0), master_key=KEY)

        cluster.pause(bookie)
        try:
            with pytest.raises(UnavailableError, match="no answer in time"):
                await asked.read(bookie, ledger_id, 0)
        finally:
            cluster.resume(bookie)

        assert await eventually(lambda: asked.read(bookie, ledger_id, 0)) == entry(ledger_id, 0)


async def eventually(request: Callable[[], Awaitable[bytes]]) -> bytes:
    """Repeat the request until it succeeds. The client's own timeouts and pauses set the pace."""
    while True:
        try:
            return await request()
        except UnavailableError:
            await asyncio.sleep(0.1)
