"""Reading a ledger: order, replicas and reading ahead."""

from contextlib import aclosing

import pytest

from ledgers.errors import BookmenderError, DigestMismatchError, NoSuchEntryError, UnavailableError
from ledgers.model import LedgerState
from ledgers.reading import LedgerEntry, LedgerReader
from tests.ledgers.memory_cluster import DIGEST, LEDGER_ID, A, B, C, D, MemoryCluster
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import in_virtual_time


async def cluster_with_entries(count: int = 1) -> MemoryCluster:
    return await MemoryCluster.with_ledger(
        [A, B, C],
        state=LedgerState.CLOSED,
        last_entry_id=count - 1,
        entries=range(count),
        on=[A, B, C],
    )


async def reader(cluster: MemoryCluster) -> LedgerReader:
    return LedgerReader(
        LEDGER_ID,
        await cluster.metadata(),
        digest=DIGEST,
        bookies=cluster.bookies,
        clock=cluster.clock,
    )


@in_virtual_time
async def test_entries_come_in_order_with_their_payloads() -> None:
    cluster = await cluster_with_entries(5)

    entries = [entry async for entry in (await reader(cluster)).entries(1, 3)]

    assert entries == [
        LedgerEntry(entry_id=entry_id, length=10 * (entry_id + 1), payload=b"%010d" % entry_id)
        for entry_id in (1, 2, 3)
    ]


@in_virtual_time
async def test_the_write_set_is_asked_in_its_order_as_far_as_needed() -> None:
    cluster = await cluster_with_entries(2)

    await (await reader(cluster)).read(1)

    assert [call.bookie for call in cluster.bookies.called("read")] == [B]


@pytest.mark.parametrize("spoilt", ["lost", "corrupt", "down", "busy"])
@in_virtual_time
async def test_the_next_replica_is_asked_after_any_failure(spoilt: str) -> None:
    cluster = await cluster_with_entries()
    bookie = cluster.bookies.bookie(A)
    match spoilt:
        case "lost":
            bookie.lose(LEDGER_ID, 0)
        case "corrupt":
            bookie.corrupt(LEDGER_ID, 0)
        case "down":
            bookie.is_down = True
        case "busy":
            cluster.bookies.fail(A, Op.READ, Fault(error=UnavailableError))

    entry = await (await reader(cluster)).read(0)

    assert DIGEST.payload(entry) == b"%010d" % 0
    assert [call.bookie for call in cluster.bookies.called("read")] == [A, B]


@in_virtual_time
async def test_a_hanging_replica_is_overtaken_after_two_seconds() -> None:
    cluster = await cluster_with_entries()
    cluster.down = {A}

    await (await reader(cluster)).read(0)

    assert cluster.clock.now_s() == 2.0


@pytest.mark.parametrize(
    ("lost", "corrupt", "down", "error"),
    [
        pytest.param("abc", "", "", NoSuchEntryError, id="no replica has it"),
        pytest.param("", "abc", "", DigestMismatchError, id="all have it wrong"),
        pytest.param("ab", "c", "", DigestMismatchError, id="the only replica has it damaged"),
        pytest.param("ab", "", "c", UnavailableError, id="the last replica may have it"),
        pytest.param("", "ab", "c", UnavailableError, id="the last replica may have it undamaged"),
    ],
)
@in_virtual_time
async def test_an_entry_of_no_replica_is_an_error_that_lists_answers(
    lost: str, corrupt: str, down: str, error: type[BookmenderError]
) -> None:
    cluster = await cluster_with_entries()
    for name, bookie in zip("abc", (A, B, C), strict=True):
        if name in lost:
            cluster.bookies.bookie(bookie).lose(LEDGER_ID, 0)
        if name in corrupt:
            cluster.bookies.bookie(bookie).corrupt(LEDGER_ID, 0)
        if name in down:
            cluster.down.add(bookie)

    with pytest.raises(error) as raised:
        await (await reader(cluster)).read(0)
    assert type(raised.value) is error
    assert all(f"{bookie}: " in str(raised.value) for bookie in (A, B, C))


@in_virtual_time
async def test_each_entry_is_read_from_its_own_segment() -> None:
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], [D, B, C], firsts=[0, 1], write_quorum=2, entries=[0], on=[A]
    )
    await cluster.put(1, B)
    await cluster.put(3, D)

    ledger_reader = await reader(cluster)
    for entry_id in (0, 1, 3):
        await ledger_reader.read(entry_id)

    assert [call.bookie for call in cluster.bookies.called("read")] == [A, B, D]


@in_virtual_time
async def test_reading_ahead_is_bounded_and_ends_with_the_loop() -> None:
    cluster = await cluster_with_entries(1000)

    async with aclosing((await reader(cluster)).entries(0, 999)) as entries:
        async for entry in entries:
            if entry.entry_id == 99:
                break

    assert 100 <= len(cluster.bookies.called("read")) <= 100 + 64
