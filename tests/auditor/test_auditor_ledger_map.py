"""The auditor and its ledger map: a loss is handled at once with the known ledgers, in any state of
the map."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest

from auditor import marker
from auditor.underreplication import SLICE
from ledgers.model import BookieId
from ledgers.store import Create, Operation
from tests.auditor.auditing import Leader, auditing, leading
from tests.auditor.ledger_map_scenes import rescan
from tests.auditor.scenes import SOON_S, delayed, marked_soon, with_ledgers
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT

SPARES = [BookieId(f"spare-{number}:3181") for number in range(10)]


async def with_many_ledgers(count: int) -> Cluster:
    """Return ledgers on B1 and B2, in a cluster where the loss of two bookies is an ordinary
    one."""
    cluster = await Cluster.start()
    for bookie in SPARES:
        await cluster.store.create(f"{ROOT}/cookies/{bookie}")
        await cluster.register(bookie)
    for ledger_id in range(count):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)
    return cluster


async def made(cluster: Cluster, ledger_id: int) -> int:
    """Return the transaction that created the mark."""
    stat = await cluster.store.exists(PATHS.mark(ledger_id))
    assert stat is not None
    return stat.czxid


async def test_a_loss_is_marked_without_reading_metadata() -> None:
    cluster = await with_many_ledgers(300)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        await cluster.kill(B1)

        assert await marked_soon(cluster) == list(range(300))
        assert leader.store.request_count - before < 100, "of which 12 and a few more are marks"


async def test_the_first_marks_are_made_before_the_lookup_is_complete() -> None:
    cluster = await with_many_ledgers(4 * SLICE)
    looked_up = 0
    looked_up_at_first_mark: list[int] = []
    async with leading(cluster) as leader:
        get = leader.updater.ledger_map.get

        def counted(ledger_id: int) -> object:
            nonlocal looked_up
            looked_up += 1
            return get(ledger_id)

        leader.updater.ledger_map.get = counted  # type: ignore[method-assign, assignment]

        def note(store: MemoryStore, operations: Sequence[Operation]) -> None:
            marks = PATHS.marks
            if any(isinstance(each, Create) and each.path.startswith(marks) for each in operations):
                looked_up_at_first_mark.append(looked_up)

        cluster.tree.faults = note
        await cluster.kill(B1)
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)

        assert 0 < looked_up_at_first_mark[0] <= SLICE
        assert await cluster.marked() == list(range(4 * SLICE))
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


def delay_reads(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the updater's reads of metadata wait until the returned event is set."""
    is_released = asyncio.Event()
    read = leader.updater._reader.read

    async def slowly(ledger_ids: Sequence[int]) -> Collection[int]:
        await is_released.wait()
        return await read(ledger_ids)

    monkeypatch.setattr(leader.updater._reader, "read", slowly)
    return is_released


async def test_a_loss_during_a_rescan_is_marked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The marking is completed after the rescan."""
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        is_released = delay_reads(leader, monkeypatch)
        await cluster.write_ledger((B1, B4), ledger_id=3)
        rescan(leader.updater)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0, 1]

        is_released.set()
        assert await marked_soon(cluster) == [0, 1, 3]


async def test_a_loss_during_the_first_scan_is_marked_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with leading(cluster) as leader:
        is_released = delay_reads(leader, monkeypatch)
        auditor = asyncio.create_task(leader.auditor.run())
        await cluster.kill(B1)
        assert await marked_soon(cluster) == []

        is_released.set()
        assert await marked_soon(cluster) == [0, 1]
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


async def test_a_reformatted_bookie_waits_until_all_ledgers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, "node-1", delayed(3600)):
        await asyncio.sleep(SOON_S)
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)
    async with leading(cluster, "node-2", delayed(3600)) as leader:
        delay_reads(leader, monkeypatch)
        auditor = asyncio.create_task(leader.auditor.run())
        assert await marked_soon(cluster) == []
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)

    async with auditing(cluster, "node-3", delayed(3600)):
        assert await marked_soon(cluster) == [0]


@asynccontextmanager
async def marking_slowly(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Leader]:
    """Run a leader that makes about 40 marks a second."""
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", 1)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        cluster.tree.latency = lambda: asyncio.sleep(0.05)
        yield leader
        cluster.tree.latency = lambda: asyncio.sleep(0)


async def test_a_worse_loss_overtakes_one_that_is_still_being_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_many_ledgers(1000)
    await cluster.write_ledger((B4, B5), ledger_id=5000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        assert 0 < len(await cluster.marked()) < 500

        await cluster.kill(B4, B5)
        await asyncio.sleep(60)

    assert await cluster.marked() == [*range(1000), 5000]
    worse, last = [await made(cluster, ledger_id) for ledger_id in (5000, 999)]
    assert worse < last


async def test_marking_stops_when_the_bookie_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_many_ledgers(1000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        await cluster.revive(B1)
        await asyncio.sleep(60)

    assert 0 < len(await cluster.marked()) < 500


async def test_a_second_loss_marks_all_ledgers_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bookie returned while its ledgers were marked, and disappeared again."""
    cluster = await with_many_ledgers(1000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        await cluster.revive(B1)
        await asyncio.sleep(60)
        for ledger_id in await cluster.marked():  # as workers do, who find them whole
            await cluster.store.delete(PATHS.mark(ledger_id))

        await cluster.kill(B1)
        await asyncio.sleep(60)

    assert await cluster.marked() == list(range(1000))
