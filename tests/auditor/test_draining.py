"""The leader's work for draining bookies. The tests do the workers' part."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from auditor.draining import LOOK_S, RELIST_S
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.records import DrainProgress, read_drains
from daemon.operations.drains import cancel_drains
from ledgers.model import BookieId, LedgerState
from ledgers.store import Operation
from replication import znodes
from replication.orders import drain_znode
from tests.auditor.auditing import auditing, draining
from tests.auditor.drains import OWN, drained_soon, order_drain, own_marks
from tests.auditor.scenes import SOON_S, with_ledgers
from tests.daemon.visits import order_drain as order_drains
from tests.daemon.visits import visiting
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, working
from tests.replication.workers import noted


async def cancel_drain(cluster: Cluster, bookie: BookieId) -> None:
    await cluster.store.delete(drain_znode(PATHS, bookie).path)


async def unmark(cluster: Cluster, ledger_id: int) -> None:
    path = OWN.mark(ledger_id)
    await cluster.store.delete(path)
    await cluster.store.delete(path.rpartition("/")[0])


async def move(cluster: Cluster, ledger_id: int, *, source: BookieId, to: BookieId) -> None:
    """Move a copy in the metadata and delete the mark, as a worker would."""
    cluster.tree.watcher = lambda *_: None
    versioned = await cluster.manager.read(ledger_id)
    segments = tuple(
        segment.with_bookies({i: to for i, b in enumerate(segment.ensemble) if b == source})
        for segment in versioned.metadata.segments
    )
    await cluster.manager.write(
        ledger_id, replace(versioned.metadata, segments=segments), read_as=versioned
    )
    await unmark(cluster, ledger_id)


async def progress(cluster: Cluster) -> dict[BookieId, tuple[int, int, bool]]:
    record = await read_drains(cluster.store, PATHS)
    assert record is not None
    return {b: (p.ledgers_left, p.ledgers_most, p.is_drained) for b, p in record.bookies.items()}


# --- Finding and marking --------------------------------------------------------------------------


async def test_rule_s16_draining_marks_are_made_in_our_own_queue_only() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B4))
    async with draining(cluster):
        await asyncio.sleep(SOON_S)
        assert await own_marks(cluster) == []

        await order_drain(cluster, B2)
        await asyncio.sleep(SOON_S)

        assert await own_marks(cluster) == [0, 1]
        data, _ = await cluster.store.get(OWN.mark(0))
        assert znodes.parse_mark(data).replicas == (B2,)
        assert await cluster.marked() == [], "Java would unmark them"


async def test_several_bookies_are_drained_at_once() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B4), (B4, B5))
    for bookie in (B1, B4):
        await order_drain(cluster, bookie)
    async with draining(cluster):
        await asyncio.sleep(LOOK_S + SOON_S)

        assert await own_marks(cluster) == [0, 2, 3]
        assert await progress(cluster) == {B1: (1, 1, False), B4: (2, 2, False)}


async def test_marks_come_in_the_order_of_risk() -> None:
    cluster = await with_ledgers((B3, B1), (B1, B2))
    marked: list[int] = []

    def note(_: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        marks = {OWN.mark(i): i for i in (0, 1)}
        marked.extend(marks[each.path] for each in operations if each.path in marks)
        return None

    cluster.tree.faults = note
    async with drained_soon(cluster, B1, B2):
        assert await own_marks(cluster) == [0, 1]

    assert list(dict.fromkeys(marked)) == [1, 0], (
        "the one with both copies on draining bookies comes first"
    )


async def test_a_further_order_is_handled_at_once() -> None:
    cluster = await with_ledgers((B1, B2), (B3, B4))
    async with drained_soon(cluster, B1):
        await order_drain(cluster, B3)
        await asyncio.sleep(SOON_S)

        assert await own_marks(cluster) == [0, 1]


async def test_denied_access_to_a_directory_of_our_queue_ends_no_term() -> None:
    cluster = await with_ledgers((B1, B2), (B3, B4))
    directory = OWN.mark(0).rsplit("/", 2)[0]
    await cluster.store.create(directory, with_parents=True)
    await order_drain(cluster, B1)
    async with draining(cluster) as leader:
        shut = shut_out(leader.store, directory)
        await asyncio.sleep(60)
        shut.clear()
        await asyncio.sleep(60)

        assert await own_marks(cluster) == [0]


async def test_while_auto_recovery_is_disabled_nothing_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.disable)
    async with drained_soon(cluster, B1):
        await asyncio.sleep(30)
        assert await own_marks(cluster) == []

        await cluster.store.delete(PATHS.disable)
        await asyncio.sleep(10)
        assert await own_marks(cluster) == [0]


# --- Until no ledger names it ---------------------------------------------------------------------


async def test_a_drain_is_finished_when_no_ledger_names_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with drained_soon(cluster, B1):
        await move(cluster, 0, source=B1, to=B4)
        await asyncio.sleep(LOOK_S + SOON_S)
        assert await progress(cluster) == {B1: (1, 2, False)}

        with capture_logs() as logs:
            await move(cluster, 1, source=B1, to=B4)
            await asyncio.sleep(LOOK_S + SOON_S)

        assert await progress(cluster) == {B1: (0, 2, True)}
        assert [line["bookie"] for line in logs if line["event"] == "drain.finished"] == [B1]


async def test_new_ledgers_on_a_draining_bookie_are_marked_too() -> None:
    cluster = await with_ledgers((B1, B2))
    async with drained_soon(cluster, B1):
        await cluster.write_ledger((B1, B3), ledger_id=1, state=LedgerState.OPEN)
        await asyncio.sleep(LOOK_S + SOON_S)
        assert await own_marks(cluster) == [0, 1]

        await move(cluster, 0, source=B1, to=B4)
        await cluster.write_ledger((B1, B3), ledger_id=2)
        await move(cluster, 1, source=B1, to=B4)
        await asyncio.sleep(LOOK_S + SOON_S)

        assert await own_marks(cluster) == [2]
        assert await progress(cluster) == {B1: (1, 2, False)}


async def test_marks_deleted_during_a_drain_are_restored() -> None:
    cluster = await with_ledgers((B1, B2))
    async with drained_soon(cluster, B1):
        for _ in range(2):
            await unmark(cluster, 0)
            await asyncio.sleep(2 * LOOK_S)
            assert await own_marks(cluster) == [], "but not in a hot loop"
            assert await progress(cluster) == {B1: (1, 1, False)}
            await asyncio.sleep(RELIST_S)
            assert await own_marks(cluster) == [0]


async def test_a_drain_without_progress_costs_few_requests() -> None:
    """One request every few seconds."""
    cluster = await with_ledgers((B1, B2))
    hour_s = 3600
    async with drained_soon(cluster, B1) as leader:
        before = leader.store.request_count
        await asyncio.sleep(hour_s)

        of_listing = 6 * hour_s / RELIST_S
        assert leader.store.request_count - before <= hour_s / LOOK_S + of_listing


async def test_rule_s8_the_map_must_be_complete_to_end_a_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2))
    monkeypatch.setattr(LedgerMapUpdater, "is_complete", False)
    async with drained_soon(cluster, B3):
        await asyncio.sleep(60)
        assert await read_drains(cluster.store, PATHS) is None

        monkeypatch.undo()
        await asyncio.sleep(LOOK_S)
        assert await progress(cluster) == {B3: (0, 0, True)}


async def test_new_writes_to_a_drained_bookie_are_noticed_at_once() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.register_again(B1, is_read_only=True)
    async with drained_soon(cluster, B1):
        await asyncio.sleep(3600)
        assert await progress(cluster) == {B1: (0, 0, True)}

        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(SOON_S)
        assert await own_marks(cluster) == []
        await cluster.register_again(B1)
        await asyncio.sleep(SOON_S)

        assert await own_marks(cluster) == [7]
        assert await progress(cluster) == {B1: (1, 1, False)}


# --- Changes of orders and leaders ----------------------------------------------------------------


async def test_a_cancelled_drain_is_forgotten_and_its_marks_stay() -> None:
    cluster = await with_ledgers((B1, B2), (B3, B4))
    async with drained_soon(cluster, B1, B3):
        await cancel_drain(cluster, B1)
        await asyncio.sleep(SOON_S)
        assert await progress(cluster) == {B3: (1, 1, False)}

        await cancel_drain(cluster, B3)
        await asyncio.sleep(SOON_S)
        assert await progress(cluster) == {}
        assert await own_marks(cluster) == [0, 1]


async def test_a_new_leader_continues_a_drain() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    async with drained_soon(cluster, B1):
        await move(cluster, 0, source=B1, to=B5)
        await asyncio.sleep(LOOK_S + SOON_S)

    async with draining(cluster, "node-2"):
        await asyncio.sleep(SOON_S)

        assert await progress(cluster) == {B1: (2, 3, False)}
        assert await own_marks(cluster) == [1, 2]


async def test_a_drain_that_is_ordered_again_starts_again() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with drained_soon(cluster, B1):
        await move(cluster, 0, source=B1, to=B5)
        await asyncio.sleep(SOON_S)
        await cancel_drain(cluster, B1)
        await order_drain(cluster, B1, since_ms=2)
        await asyncio.sleep(SOON_S)

        assert await progress(cluster) == {B1: (1, 1, False)}


async def test_failures_are_retried() -> None:
    cluster = await with_ledgers((B1, B2))
    await order_drain(cluster, B1)
    async with draining(cluster) as leader:
        cluster.tree.faults = lambda store, operations: (
            Fault.LOST_REQUEST if store is leader.store and not operations else None
        )
        await asyncio.sleep(30)
        cluster.tree.faults = None
        await asyncio.sleep(30)

        assert await own_marks(cluster) == [0]


async def told_of(cluster: Cluster, bookie: BookieId) -> DrainProgress:
    record = await read_drains(cluster.store, PATHS)
    assert record is not None
    return record.bookies[bookie]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": []}', id="a list"
        ),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": {"b": {}}}',
            id="a bookie without figures",
        ),
    ],
)
async def test_a_record_of_a_later_release_counts_as_none(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(f"{OWN.directory}/drains", data)

    assert await read_drains(cluster.store, PATHS) is None


# --- Uncertain ends -------------------------------------------------------------------------------


async def test_an_unreadable_ledger_is_counted_and_stops_nothing() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish", version=-1)
    async with drained_soon(cluster, B1):
        assert await own_marks(cluster) == [0]
        record = await read_drains(cluster.store, PATHS)

    assert record is not None
    assert record.unreadable_count == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"rubbish that names " + B1.encode(), id="with its id in it"),
        pytest.param(b"rubbish that names " + B4.encode(), id="without its id"),
        pytest.param(b"", id="empty"),
    ],
)
async def test_rule_s8_unreadable_ledgers_delay_the_end_of_a_drain(data: bytes) -> None:
    """An unreadable ledger may name the draining bookie."""
    cluster = await with_ledgers((B2, B3), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), data, version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.is_drained, told.is_in_doubt) == (False, True)
    assert told.unreadable == (1,)


async def test_a_bookie_that_a_ledger_names_is_certainly_not_drained() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.ledgers_left, told.is_drained, told.is_in_doubt) == (1, False, False)
    assert told.unreadable == (1,), "though it is said already"


async def test_of_very_many_unreadable_ledgers_some_are_named() -> None:
    """All of them are counted."""
    cluster = await with_ledgers(*[(B1, B2)] * 25)
    for ledger_id in range(25):
        await cluster.store.set(cluster.manager.path(ledger_id), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert told.unreadable_count == 25
    assert told.unreadable == tuple(range(20))


async def test_a_drain_continues_once_the_ledger_is_readable_or_gone() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.store.set(cluster.manager.path(0), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        await asyncio.sleep(3600)
        assert (await told_of(cluster, B1)).is_in_doubt

        await cluster.store.delete(cluster.manager.path(0))
        await asyncio.sleep(LOOK_S + SOON_S)

        assert (await told_of(cluster, B1)).is_drained


# --- Leader and worker together -------------------------------------------------------------------


async def are_drained(cluster: Cluster, *bookies: BookieId) -> bool:
    record = await read_drains(cluster.store, PATHS)
    told = {} if record is None else record.bookies
    return all(bookie in told and told[bookie].is_drained for bookie in bookies)


async def members(cluster: Cluster, *ledger_ids: int) -> set[BookieId]:
    return {b for i in ledger_ids for b in (await cluster.metadata(i)).bookies}


async def test_draining_never_leaves_a_ledger_with_fewer_copies() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B1), (B3, B4))
    await order_drains(cluster, B1, B2)
    async with draining(cluster), cluster.node() as node, working(node):
        await until(cluster, lambda: are_drained(cluster, B1, B2))

    assert not await members(cluster, 0, 1, 2) & {B1, B2}
    await cluster.assert_whole(0, 1, 2, 3)
    assert await own_marks(cluster) == []


@pytest.mark.parametrize(
    "may_fence", [True, False], ids=["with the order to fence", "without the order to fence"]
)
async def test_rule_s16_an_open_ledger_is_fenced_only_if_ordered(
    cluster: Cluster, may_fence: bool
) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.OPEN)
    await order_drains(cluster, B1, may_fence=may_fence)
    async with draining(cluster), cluster.node() as node, working(node):
        await asyncio.sleep(300)

        assert (await cluster.metadata(1)).is_closed is may_fence
        assert await are_drained(cluster, B1) is may_fence
        assert (await own_marks(cluster) == []) is may_fence


async def test_marks_of_a_cancelled_drain_are_completed_without_a_move() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    before = [await cluster.ensembles(ledger_id) for ledger_id in (0, 1)]
    await order_drains(cluster, B1)
    async with draining(cluster):
        await asyncio.sleep(1)
        assert await own_marks(cluster) == [0, 1]
        await cancel_drains(visiting(cluster), [B1])
        await asyncio.sleep(1)
        async with cluster.node() as node, working(node):
            await asyncio.sleep(10)

    assert await own_marks(cluster) == []
    assert [await cluster.ensembles(ledger_id) for ledger_id in (0, 1)] == before
    assert await cluster.locked() == []


async def test_a_bookie_that_dies_while_draining_is_lost() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await order_drains(cluster, B1)
    async with auditing(cluster), cluster.node() as node:
        await asyncio.sleep(1)
        await cluster.kill(B1)
        async with working(node):
            await until(cluster, lambda: _is_free_of(cluster, B1))

    await cluster.assert_whole(0, 1)
    await cluster.assert_queue_empty()


async def test_without_a_target_everything_stays_with_a_reason() -> None:
    cluster = await Cluster.start(B1, B2)
    await cluster.write_ledger((B1, B2), ledger_id=0)
    await order_drains(cluster, B1)
    async with draining(cluster), cluster.node() as node, working(node):
        await asyncio.sleep(60)
        assert await cluster.ensembles(0) == [(B1, B2)]
        assert (await noted(node, 0)).reason.needs_help

        await cluster.register(B3)
        await until(cluster, lambda: are_drained(cluster, B1))

    assert await cluster.ensembles(0) == [(B3, B2)]


async def _is_free_of(cluster: Cluster, bookie: BookieId) -> bool:
    return bookie not in await members(cluster, 0, 1) and not await cluster.marked()
