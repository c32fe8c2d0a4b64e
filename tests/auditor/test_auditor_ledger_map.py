"""The auditor and its ledger map: a loss is handled at once with the known ledgers, in any state of
the map.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from auditor import marker
from auditor.auditor import RETRY_S, STANDSTILL_MAX_S
from auditor.records import read_identities
from auditor.underreplication import SLICE
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import Create, Operation
from replication.orders import HoldOrder, hold_znode
from tests.auditor.auditing import Leader, auditing, leading, running
from tests.auditor.ledger_map_scenes import rescan
from tests.auditor.scenes import SOON_S, delayed, marked_soon, replicas, with_ledgers
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT

scene = partial(with_ledgers, (B1, B2))

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
        async with running(leader.auditor.run()):
            await asyncio.sleep(SOON_S)

            assert 0 < looked_up_at_first_mark[0] <= SLICE
            assert await cluster.marked() == list(range(4 * SLICE))


def delay_reads(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the updater's reads of metadata wait until the returned event is set."""
    is_released = asyncio.Event()
    read = leader.updater._reader.read

    async def slowly(ledger_ids: Sequence[int]) -> Collection[int]:
        await is_released.wait()
        return await read(ledger_ids)

    monkeypatch.setattr(leader.updater._reader, "read", slowly)
    return is_released


async def test_a_loss_during_a_rescan_is_marked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
        async with running(leader.auditor.run()):
            await cluster.kill(B1)
            assert await marked_soon(cluster) == []

            is_released.set()
            assert await marked_soon(cluster) == [0, 1]


async def test_a_reformatted_bookie_waits_until_all_ledgers_are_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditing(cluster, "node-1", delayed(3600)):
        await asyncio.sleep(SOON_S)
    await cluster.reformat(B1)
    async with leading(cluster, "node-2", delayed(3600)) as leader:
        delay_reads(leader, monkeypatch)
        async with running(leader.auditor.run()):
            assert await marked_soon(cluster) == []

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
    assert (await cluster.mark_stat(5000)).czxid < (await cluster.mark_stat(999)).czxid


async def test_marking_stops_when_the_bookie_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_many_ledgers(1000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        await cluster.revive(B1)
        await asyncio.sleep(60)

    assert 0 < len(await cluster.marked()) < 500


# --- A bookie that disappears or is reformatted again ---------------------------------------------


async def lose(cluster: Cluster) -> None:
    await cluster.kill(B1)


async def wipe_b1(cluster: Cluster) -> None:
    await cluster.reformat(B1)


async def lose_and_return(cluster: Cluster) -> None:
    await cluster.kill(B1)
    await asyncio.sleep(5)
    await cluster.revive(B1)
    await asyncio.sleep(0.2)


async def unmark_all(cluster: Cluster) -> None:
    """Delete all marks, as workers do that found the ledgers whole or repaired them."""
    for ledger_id in await cluster.marked():
        await cluster.store.delete(PATHS.mark(ledger_id))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(wipe_b1, lose, id="reformatted, then absent"),
        pytest.param(wipe_b1, wipe_b1, id="reformatted twice"),
        pytest.param(lose_and_return, lose, id="absent twice"),
    ],
)
async def test_marks_are_made_again_if_a_bookie_returns_during_marking(
    before: Callable[[Cluster], Awaitable[None]],
    after: Callable[[Cluster], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bookie returns for a moment; workers delete the marks; then it disappears again."""
    cluster = await with_many_ledgers(400)
    async with marking_slowly(cluster, monkeypatch):
        await before(cluster)
        await asyncio.sleep(3)
        slow, cluster.tree.latency = cluster.tree.latency, lambda: asyncio.sleep(0)
        assert len(await cluster.marked()) > 10
        await unmark_all(cluster)
        cluster.tree.latency = slow

        await after(cluster)
        await asyncio.sleep(60)

    assert await cluster.marked() == list(range(400))


async def test_marks_are_made_again_after_the_leaders_own_outage(cluster: Cluster) -> None:
    """The bookie returned, and disappeared again, while the leader was suspended."""
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        cluster.tree.suspend(leader.store)
        await cluster.revive(B1)
        await unmark_all(cluster)
        await cluster.kill(B1)
        cluster.tree.resume(leader.store)

        assert await marked_soon(cluster) == [0]


async def test_another_auditors_mark_is_renewed_at_the_first_loss(cluster: Cluster) -> None:
    """A worker that saw the bookie registered is about to delete that mark."""
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.mark(B1, ledger_id=0)
        before = (await cluster.mark_stat(0)).version
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)

        assert (await cluster.mark_stat(0)).version == before + 1


# --- Reformatted and new bookies ------------------------------------------------------------------


async def test_the_ledgers_of_a_reformatted_bookie_are_marked_once() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(3600)):
        assert await marked_soon(cluster) == []

        await cluster.reformat(B1)
        assert await marked_soon(cluster) == [0]
        assert await replicas(cluster, 0) == (B1,)
        await cluster.store.delete(PATHS.mark(0))  # as the worker that read it all
        await asyncio.sleep(STANDSTILL_MAX_S)
        assert await cluster.marked() == []

    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == []


async def test_a_handled_reformat_is_recorded_after_a_failed_try() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    losses = 1

    def lose_note(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        nonlocal losses
        if losses and any(each.path.endswith("/identities") for each in operations):
            losses -= 1
            return Fault.LOST_REQUEST
        return None

    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.wipe(B1)
        cluster.tree.faults = lose_note
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S + STANDSTILL_MAX_S + RETRY_S)

    assert losses == 0
    _, cookie = await cluster.store.get(f"{ROOT}/cookies/{B1}")
    assert (await read_identities(cluster.store, PATHS))[B1] == cookie.czxid


async def test_a_ledger_written_after_the_reformat_is_marked_too() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await cluster.reformat(B1)
        for ledger_id in (0, 1):  # a writer changes an ensemble, a worker repairs another fragment
            versioned = await cluster.manager.read(ledger_id)
            await cluster.manager.write(ledger_id, versioned.metadata, read_as=versioned)
        await cluster.store.delete(PATHS.disable)

        assert await marked_soon(cluster) == [0]


async def reformat(cluster: Cluster, bookie: BookieId) -> None:
    """Reformat the bookie and wait until the auditor has handled it."""
    await cluster.reformat(bookie)
    assert await marked_soon(cluster) == []


async def move(cluster: Cluster, ledger_id: int, to: BookieId) -> None:
    """Name the bookie instead of the first one, as a worker does that has copied the entries."""
    versioned = await cluster.manager.read(ledger_id)
    (segment,) = versioned.metadata.segments
    moved = versioned.metadata.with_segment(segment.with_bookies({0: to}))
    await cluster.manager.write(ledger_id, moved, read_as=versioned)


async def test_a_ledger_moved_to_a_newly_reformatted_bookie_is_marked() -> None:
    """A worker that was suspended may name the bookie for copies from before."""
    cluster = await with_ledgers((B1, B2), (B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)

        await move(cluster, 0, B3)
        assert await marked_soon(cluster) == [0]
        assert await replicas(cluster, 0) == (B3,)

        await asyncio.sleep(STANDSTILL_MAX_S)
        await move(cluster, 1, B3)
        assert await marked_soon(cluster) == [0]


async def test_such_a_ledger_is_marked_also_during_a_rescan(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()
        await cluster.reformat(B3)
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()

        await move(cluster, 0, B3)
        rescan(leader.updater)
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()

        assert await cluster.marked() == [0]


@pytest.mark.parametrize(
    ("path", "order"),
    [
        pytest.param(
            hold_znode(PATHS).path,
            HoldOrder(since_ms=1, is_by_operator=True).to_json(),
            id="a hold",
        ),
        pytest.param(PATHS.disable, b"", id="disabled"),
    ],
)
async def test_such_a_ledger_is_marked_when_marking_is_allowed_again(
    cluster: Cluster, path: str, order: bytes
) -> None:
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)
        await cluster.store.create(path, order, with_parents=True)
        await asyncio.sleep(SOON_S)

        await move(cluster, 0, B3)
        await asyncio.sleep(STANDSTILL_MAX_S)
        assert await cluster.marked() == []

        await cluster.store.delete(path)
        assert await marked_soon(cluster) == [0]


async def test_a_bookie_added_and_reformatted_while_disabled_is_marked() -> None:
    """A later write of metadata, such as the close, does not hide that its entries are lost."""
    cluster = await Cluster.start(B1, B2)
    await cluster.store.create(PATHS.disable, with_parents=True)
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(f"{ROOT}/cookies/{B3}")
        await cluster.register(B3)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=0)
        await reformat(cluster, B3)
        await asyncio.sleep(SOON_S)
        versioned = await cluster.manager.read(0)
        await cluster.manager.write(0, versioned.metadata, read_as=versioned)
        assert await marked_soon(cluster) == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


async def test_the_next_leader_marks_such_a_ledger(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)

    await move(cluster, 0, B3)
    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == [0]


async def test_such_a_ledger_is_marked_although_the_first_try_fails(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        await reformat(cluster, B3)
        mark, tries = leader.marker.mark, 0

        async def failing(*args: Any, **options: Any) -> bool:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise UnavailableError("no answer")
            return await mark(*args, **options)

        leader.marker.mark = failing  # type: ignore[method-assign]
        await move(cluster, 0, B3)
        await asyncio.sleep(SOON_S + RETRY_S)

        assert await cluster.marked() == [0]


async def test_a_mark_that_names_a_reformatted_bookie_is_renewed(cluster: Cluster) -> None:
    """A suspended worker that found the bookie whole would delete the old one (rule S6)."""
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.mark(B2, ledger_id=0)
        await cluster.reformat(B2)
        await asyncio.sleep(SOON_S)

        assert (await cluster.mark_stat(0)).version == 1


async def test_identities_of_decommissioned_bookies_are_deleted(cluster: Cluster) -> None:
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie in (B1, B3):  # of the first a ledger tells still
            await cluster.kill(bookie)
            await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.create(f"{ROOT}/cookies/new:3181")
        await cluster.register(BookieId("new:3181"))
        await asyncio.sleep(SOON_S)

    known = (await read_identities(cluster.store, PATHS)).keys()
    assert {B1, B2, BookieId("new:3181")} <= known
    assert B3 not in known


async def test_a_bookie_that_joins_the_cluster_marks_nothing(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.register(BookieId("new:3181"))
        await cluster.store.create(f"{ROOT}/cookies/new:3181")

        assert await marked_soon(cluster) == []
