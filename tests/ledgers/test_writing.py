"""A writer: adding, closing, and what it does when another client recovers its ledger."""

import asyncio

import pytest

from ledgers import appending
from ledgers.digest import EntryHeader
from ledgers.errors import FencedError, LedgerClosedError, NoSuchLedgerError, RejectedError
from ledgers.model import DigestType, LedgerState
from ledgers.writing import PAYLOAD_BYTES_MAX
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import BOOKIES, MemoryCluster
from tests.memory.bookies import Fault, Op
from tests.memory.store import Fault as StoreFault
from tests.replication.cluster import in_virtual_time

# --- Adding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("metadata_version", [2, 3])
@pytest.mark.parametrize("quorums", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 3, 2), (4, 4, 4)])
@in_virtual_time
async def test_written_entries_can_be_read(
    digest_type: DigestType, metadata_version: int, quorums: tuple[int, int, int]
) -> None:
    cluster = MemoryCluster()
    ensemble_size, write_quorum, ack_quorum = quorums
    payloads = [b"x" * length for length in (0, 1, 1000, 3, 70_000)]

    async with cluster.writer(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        metadata_version=metadata_version,
    ) as writer:
        entry_ids = [await writer.add(payload) for payload in payloads]
        closed = await writer.close()

    assert entry_ids == [0, 1, 2, 3, 4]
    assert await cluster.payloads(writer.ledger_id) == payloads
    assert closed.metadata.length == sum(map(len, payloads))
    assert closed.metadata.metadata_version == metadata_version


@in_virtual_time
async def test_an_entry_tells_the_lac_and_the_length_so_far() -> None:
    async with MemoryCluster.with_writer() as (cluster, writer):
        for payload in (b"a", b"bb", b"ccc"):
            await writer.add(payload)

    headers = {EntryHeader.of(call.entry) for call in cluster.bookies.called("add")}
    assert {(h.entry_id, h.lac, h.length) for h in headers} == {(0, -1, 1), (1, 0, 3), (2, 1, 6)}


@in_virtual_time
async def test_adds_are_pipelined_and_acknowledged_in_order() -> None:
    cluster = MemoryCluster()
    delays_s = {0: 3.0, 1: 1.0, 2: 2.0}

    async def delay(call: Call) -> None:
        await cluster.clock.sleep(delays_s[call.entry_id])

    cluster.bookies.before = delay

    async with cluster.writer() as writer:
        acknowledged: list[int] = []
        for _ in delays_s:
            future = await writer.send(b"entry")
            future.add_done_callback(lambda done: acknowledged.append(done.result()))
        await future

    assert cluster.clock.now_s() == 3.0
    assert acknowledged == [0, 1, 2]


@in_virtual_time
async def test_an_acknowledgement_needs_an_ack_quorum_of_bookies_only() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=2) as (cluster, writer):
        cluster.bookies.fail(writer.metadata.last_segment.ensemble[1], Op.ADD, Fault(delay_s=60))
        await writer.add(b"entry")
        assert cluster.clock.now_s() == 0


@in_virtual_time
async def test_unacknowledged_entries_are_bounded() -> None:
    cluster = MemoryCluster()
    under_way = 0

    async def never(call: Call) -> None:
        nonlocal under_way
        under_way = max(under_way, call.entry_id + 1)
        await cluster.clock.sleep(60)

    cluster.bookies.before = never

    async with cluster.writer() as writer, asyncio.TaskGroup() as group:
        adds = [group.create_task(writer.add(b"x" * 1024)) for _ in range(2000)]
        await cluster.clock.sleep(30)
        assert under_way == appending.ENTRIES_MAX
        for add in adds:
            add.cancel()

    async with cluster.writer() as writer, asyncio.TaskGroup() as group:
        under_way = 0
        adds = [group.create_task(writer.add(bytes(1_000_000))) for _ in range(20)]
        await cluster.clock.sleep(30)
        assert under_way == 8
        for add in adds:
            add.cancel()


@in_virtual_time
async def test_a_cancelled_caller_cancels_nothing() -> None:
    async with MemoryCluster().writer() as writer:
        add = asyncio.ensure_future(writer.add(b"nobody waits"))
        await asyncio.sleep(0)
        add.cancel()
        assert await writer.add(b"entry") == 1


@in_virtual_time
async def test_a_payload_too_large_for_any_frame_is_refused() -> None:
    """The writer continues."""
    async with MemoryCluster().writer() as writer:
        with pytest.raises(RejectedError, match="too large"):
            await writer.add(bytes(PAYLOAD_BYTES_MAX + 1))
        assert await writer.add(bytes(PAYLOAD_BYTES_MAX)) == 0


# --- Recovery by another client -------------------------------------------------------------------


@in_virtual_time
async def test_a_fenced_writer_stops_for_good() -> None:
    async with MemoryCluster.with_writer() as (cluster, writer):
        await writer.add(b"0")
        closed = await cluster.recover(writer.ledger_id)
        with pytest.raises(FencedError):
            await writer.add(b"1")
        with pytest.raises(FencedError):
            await writer.send(b"2")

    assert closed.last_entry_id == 0


@in_virtual_time
async def test_a_writer_replaces_no_bookie_during_a_recovery() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        found = await cluster.manager.read(writer.ledger_id)
        marked = found.metadata.with_state(LedgerState.IN_RECOVERY)
        await cluster.manager.write(writer.ledger_id, marked, read_as=found)
        cluster.down = {writer.metadata.last_segment.ensemble[0]}
        with pytest.raises(LedgerClosedError):
            await writer.add(b"0")

    assert await cluster.metadata(writer.ledger_id) == marked


@in_virtual_time
async def test_close_fails_unacknowledged_entries_and_ends_before_them() -> None:
    async with MemoryCluster.with_writer() as (cluster, writer):
        await writer.add(b"0")
        for bookie in BOOKIES:
            cluster.bookies.fail(bookie, Op.ADD, Fault(delay_s=1))
        pending = await writer.send(b"pending")
        closed = await writer.close()
        with pytest.raises(LedgerClosedError):
            await pending
        with pytest.raises(LedgerClosedError):
            await writer.add(b"late")

    assert (closed.metadata.last_entry_id, closed.metadata.length) == (0, 1)


@in_virtual_time
async def test_closing_twice_is_closing_once() -> None:
    async with MemoryCluster().writer() as writer:
        assert await writer.close() == await writer.close()


@pytest.mark.parametrize("fault", StoreFault)
@in_virtual_time
async def test_a_close_whose_reply_is_lost_is_looked_up(fault: StoreFault) -> None:
    async with MemoryCluster.with_writer() as (cluster, writer):
        await writer.add(b"0")
        faults = iter([fault])
        cluster.tree.faults = lambda store, operations: next(faults, None) if operations else None
        closed = await writer.close()

    assert closed.metadata.is_closed
    assert closed.metadata == await cluster.metadata(writer.ledger_id)


@in_virtual_time
async def test_deleting_deletes_the_metadata() -> None:
    async with MemoryCluster.with_writer() as (cluster, writer):
        await writer.delete()

    with pytest.raises(NoSuchLedgerError):
        await cluster.metadata(writer.ledger_id)


@in_virtual_time
async def test_leaving_the_writer_waits_for_all_copies() -> None:
    """Including those that no acknowledgement needed."""
    async with MemoryCluster.with_writer(ensemble_size=3, write_quorum=3, ack_quorum=1) as (
        cluster,
        writer,
    ):
        slow = writer.metadata.last_segment.ensemble[0]

        async def late(call: Call) -> None:
            if call.operation == "add" and call.bookie == slow:
                await cluster.clock.sleep(2.0)

        cluster.bookies.before = late
        await writer.add(b"entry")
        await writer.close()
        assert slow not in cluster.stored_on(0, writer.ledger_id)

    assert slow in cluster.stored_on(0, writer.ledger_id)
