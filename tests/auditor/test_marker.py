"""Marking under-replicated ledgers, beside workers and Java's auditor."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from auditor import marker
from auditor.marker import LIST_S, MARKS_PER_MULTI, MULTIS_AT_ONCE, LossMarker
from auditor.underreplication import UnderreplicatedLedger
from ledgers.errors import (
    LeadershipLostError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import (
    Create,
    Delete,
    Operation,
    SetData,
    request_bytes,
)
from replication import znodes
from replication.transactions import BATCH_BYTES_MAX
from replication.znodes import Mark
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import marked_soon, with_ledgers
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, fault_once, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.refusing import refuse, writes_below
from tests.replication.watched import settle

MARK = PATHS.mark(LEDGER)


def underreplicated(ledger_id: int, *lost: BookieId) -> UnderreplicatedLedger:
    return UnderreplicatedLedger(ledger_id=ledger_id, lost=lost or (B1,), copies_left=1, length=0)


async def mark_of(cluster: Cluster, ledger_id: int = LEDGER) -> Mark:
    data, _ = await cluster.store.get(PATHS.mark(ledger_id))
    return znodes.parse_mark(data)


async def test_a_new_mark_names_the_lost_bookies_and_the_time(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        count = await leader.marker.mark_all([underreplicated(LEDGER, B1, B2)])

    assert count == 1
    data, stat = await cluster.store.get(MARK)
    now_ms = cluster.clock.wall_ms()
    assert data == f'replica: "{B1}"\nreplica: "{B2}"\nctime: {now_ms}\n'.encode()
    assert stat.ephemeral_owner == 0


async def test_marks_are_made_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", 1)
    cluster = await Cluster.start()
    order = [5, 7_000, 3, 4_000, 1, 20_000, 2, 10_000]
    async with leading(cluster) as leader:
        # Creates the directories: marks without directories take longer.
        await leader.marker.mark(0, (B1,))
        count = await leader.marker.mark_all([underreplicated(i) for i in order])

    assert count == len(order)
    czxids = [(await cluster.mark_stat(i)).czxid for i in order]
    assert czxids == sorted(set(czxids))


async def test_thousands_of_marks_cost_few_requests(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        await settle()
        before = leader.store.request_count

        count = await leader.marker.mark_all(
            [underreplicated(i) for i in range(30 * MARKS_PER_MULTI)]
        )

        assert count == 30 * MARKS_PER_MULTI
        assert leader.store.request_count - before < count / 10
    assert len(await cluster.marked()) == count


async def test_rule_s14_large_marks_stay_within_the_bound_in_bytes(cluster: Cluster) -> None:
    many = tuple(BookieId(f"a-bookie-with-a-name-of-its-own-{i}:3181") for i in range(1_000))
    largest = 0

    def note(_: MemoryStore, operations: Sequence[Operation]) -> None:
        nonlocal largest
        largest = max(largest, request_bytes(operations))

    async with leading(cluster) as leader:
        cluster.tree.faults = note
        count = await leader.marker.mark_all([underreplicated(i, *many) for i in range(50)])

    assert count == 50
    assert 0 < largest <= BATCH_BYTES_MAX


async def test_existing_marks_cost_one_request_each(cluster: Cluster) -> None:
    ledgers = [underreplicated(i) for i in range(20 * MARKS_PER_MULTI)]
    async with leading(cluster) as leader:
        await leader.marker.mark_all(ledgers)
        await settle()
        before = leader.store.request_count

        assert await leader.marker.mark_all(ledgers) == 0
        assert leader.store.request_count - before <= len(ledgers) + MULTIS_AT_ONCE


@pytest.mark.parametrize("denied", ["read the mark", "write it", "its directory", "its group"])
async def test_denied_access_to_a_mark_does_not_stop_the_others(
    cluster: Cluster, denied: str
) -> None:
    """It is reported."""
    hidden = 70_000  # in a group of directories of its own
    path = PATHS.mark(hidden)
    if denied in ("read the mark", "write it"):
        await cluster.mark(B2, ledger_id=hidden)
    async with leading(cluster) as leader:
        if denied == "read the mark":
            shut_out(leader.store, path)
        else:
            path = path.rsplit("/", {"write it": 0, "its directory": 1, "its group": 2}[denied])[0]
            refuse(leader.store, writes_below(path), UnauthorizedError)
        with capture_logs() as logs:
            assert await leader.marker.mark_all([underreplicated(i) for i in (hidden, 0, 1)]) == 2

    assert set(await cluster.marked()) - {hidden} == {0, 1}
    told = [each for each in logs if each["event"] == "mark.access_denied"]
    assert [(each["ledger_id"], each["log_level"]) for each in told] == [(hidden, "error")]


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testManyFailuresInAnEnsemble", verdict="same"
)
@pytest.mark.compat("G27", verdict="better", why="the mark keeps its first time")
async def test_an_existing_mark_is_extended_and_keeps_its_first_time(cluster: Cluster) -> None:
    await cluster.mark(B2, ctime_ms=5)
    async with leading(cluster) as leader:
        assert await leader.marker.mark_all([underreplicated(LEDGER, B1, B2, B3)]) == 1

    assert await mark_of(cluster) == Mark(replicas=(B2, B1, B3), ctime_ms=5)


@pytest.mark.compat("TestLedgerUnderreplicationManager.test2reportSame", verdict="same")
async def test_a_mark_that_names_all_bookies_is_not_written(cluster: Cluster) -> None:
    await cluster.mark(B1, B2)
    async with leading(cluster) as leader:
        assert await leader.marker.mark_all([underreplicated(LEDGER, B2)]) == 0

    assert (await cluster.mark_stat()).version == 0


@pytest.mark.parametrize(
    ("data", "after"),
    [
        pytest.param(b"", Mark(replicas=(B1,)), id="a mark without data"),
        pytest.param(b"\xff", Mark(replicas=(B1,)), id="an unreadable mark"),
        pytest.param(
            znodes.mark_to_bytes(Mark(replicas=(B2,))),
            Mark(replicas=(B2, B1)),
            id="a mark of an old version, without a time",
        ),
    ],
)
async def test_an_unreadable_mark_is_replaced(cluster: Cluster, data: bytes, after: Mark) -> None:
    await cluster.store.create(MARK, data, with_parents=True)
    async with leading(cluster) as leader:
        assert await leader.marker.mark_all([underreplicated(LEDGER, B1)]) == 1

    mark = await mark_of(cluster)
    assert mark.replicas == after.replicas
    assert mark.ctime_ms == cluster.clock.wall_ms()


async def test_an_empty_directory_left_behind_gets_its_mark(cluster: Cluster) -> None:
    await cluster.store.create(MARK.rpartition("/")[0], with_parents=True)
    async with leading(cluster) as leader:
        assert await leader.marker.mark_all([underreplicated(LEDGER)]) == 1

    assert await cluster.marked() == [LEDGER]


def before_write(
    cluster: Cluster, store: MemoryStore, *undo: Operation, kind: type[Operation] = Create
) -> None:
    """Run a change of another client right before the store's next write of that kind to the
    mark."""

    def act(asking: MemoryStore, operations: Sequence[Operation]) -> None:
        if asking is store and any(
            isinstance(each, kind) and each.path == MARK for each in operations
        ):
            cluster.tree.faults = None
            cluster.tree.apply(cluster.store.session_id, undo)

    cluster.tree.faults = act


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testHierarchyCleanupInterference", verdict="same"
)
async def test_parents_that_java_deletes_meanwhile_are_created_again(cluster: Cluster) -> None:
    directory = MARK.rpartition("/")[0]
    await cluster.store.create(directory.rpartition("/")[0], with_parents=True)
    async with leading(cluster) as leader:
        upper = [Delete(path=directory.rsplit("/", depth)[0]) for depth in (1, 2, 3)]
        before_write(cluster, leader.store, *upper)

        assert await leader.marker.mark_all([underreplicated(LEDGER)]) == 1

    assert await cluster.marked() == [LEDGER]


async def test_parents_that_disappear_are_created_mark_by_mark(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They disappear while they are created."""
    async with leading(cluster) as leader:
        ensure, count = leader.marker._ensure, 0

        async def tidied(directory: str) -> None:
            nonlocal count
            count += 1
            if count == 1:
                raise NoNodeError("no node", path=directory)
            await ensure(directory)

        monkeypatch.setattr(leader.marker, "_ensure", tidied)

        assert await leader.marker.mark_all([underreplicated(LEDGER)]) == 1

    assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            SetData(path=MARK, data=znodes.mark_to_bytes(Mark(replicas=(B3,))), version=-1),
            id="extended",
        ),
        pytest.param(Delete(path=MARK), id="deleted"),
    ],
)
async def test_a_mark_changed_while_it_is_extended_is_read_again(
    cluster: Cluster, change: Operation
) -> None:
    await cluster.mark(B2, ctime_ms=5)
    async with leading(cluster) as leader:
        before_write(cluster, leader.store, change, kind=SetData)

        assert await leader.marker.mark_all([underreplicated(LEDGER, B1)]) == 1

    assert B1 in (await mark_of(cluster)).replicas
    if isinstance(change, SetData):
        assert B3 in (await mark_of(cluster)).replicas


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("kind", [Create, SetData])
async def test_after_a_lost_reply_the_mark_exists_once(fault: Fault, kind: type[Operation]) -> None:
    cluster = await Cluster.start()
    if kind is SetData:
        await cluster.mark(B2)
    async with leading(cluster) as leader:
        fault_once(cluster, leader.store, kind, fault, path=MARK)
        await leader.marker.mark_all([underreplicated(LEDGER, B1)])

    assert (await mark_of(cluster)).replicas.count(B1) == 1


async def test_a_mark_that_never_stops_changing_is_an_error(cluster: Cluster) -> None:
    """A later audit may succeed."""
    await cluster.mark(B2)
    async with leading(cluster) as leader:

        def always_first(store: MemoryStore, operations: Sequence[Operation]) -> None:
            if store is leader.store and any(isinstance(each, SetData) for each in operations):
                touch = SetData(path=MARK, data=b"", version=-1)
                cluster.tree.apply(cluster.store.session_id, [touch])

        cluster.tree.faults = always_first
        with pytest.raises(UnavailableError):
            await leader.marker.mark_all([underreplicated(LEDGER, B1)])


@pytest.mark.parametrize(
    ("is_vote", "error"),
    [
        pytest.param(True, LeadershipLostError, id="its vote is deleted"),
        pytest.param(False, SessionLostError, id="its session is not proven"),
    ],
)
async def test_rule_s9_a_former_leader_writes_nothing(
    cluster: Cluster, is_vote: bool, error: type[Exception]
) -> None:
    await cluster.mark(B2, ledger_id=1)
    async with leading(cluster) as leader:
        gone = leader.leadership.vote_path if is_vote else leader.membership.path
        await cluster.store.delete(gone)
        before = cluster.tree.snapshot()

        for ledgers in ([underreplicated(LEDGER)], [underreplicated(1, B1)]):
            with pytest.raises(error):
                await leader.marker.mark_all(ledgers)

        assert cluster.tree.snapshot() == before


# --- Deleted marks of ledgers that still lack copies are noticed and made again -------------------


async def unmark(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        path = PATHS.mark(ledger_id)
        await cluster.store.delete(path)
        await cluster.store.delete(path.rpartition("/")[0])


async def move_copy(cluster: Cluster) -> None:
    """Move the first copy of ledger 0 to B3."""
    versioned = await cluster.manager.read(0)
    (segment,) = versioned.metadata.segments
    moved = versioned.metadata.with_segment(segment.with_bookies({0: B3}))
    await cluster.manager.write(0, moved, read_as=versioned)


async def test_a_mark_deleted_while_its_bookie_is_lost_is_restored() -> None:
    """A worker that saw the bookie return deleted the mark; the bookie disappeared again."""
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]
        await unmark(cluster, 1)
        with capture_logs() as logs:
            await asyncio.sleep(2 * LIST_S)
            assert await cluster.marked() == [0, 1]

            await unmark(cluster, 1)  # Java's workers may see it otherwise every time
            await asyncio.sleep(5 * LIST_S)
            assert await cluster.marked() == [0]
    assert [each["first"] for each in logs if each["event"] == "marks.disappeared"] == [[1]]


async def test_a_repaired_ledger_is_not_marked_again() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await asyncio.sleep(LIST_S - 2)
        await unmark(cluster, 0)
        # During this sleep the leader looks, and finds no mark and the old metadata.
        await asyncio.sleep(3)
        await move_copy(cluster)
        await asyncio.sleep(3 * LIST_S)

        assert await cluster.marked() == []


async def test_a_repair_that_the_ledger_map_did_not_read_yet_is_no_missing_mark() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        assert await marked_soon(cluster) == [0]
        leader.updater.changes_pause_s = 10 * LIST_S
        await move_copy(cluster)
        await unmark(cluster, 0)
        await asyncio.sleep(5 * LIST_S)

        assert await cluster.marked() == []


@pytest.mark.parametrize("returned", [B1, B2])
async def test_a_mark_that_named_a_returned_bookie_too_is_restored_by_the_next_audit(
    returned: BookieId,
) -> None:
    """A worker that saw both bookies registered may have deleted it."""
    cluster = await with_ledgers((B1, B2), (B3, B4))
    await cluster.kill(B1)
    await cluster.kill(B2)
    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]
        await cluster.revive(returned)
        await unmark(cluster, 0)
        assert await marked_soon(cluster) == []
        await cluster.kill(B3)

        assert await marked_soon(cluster) == [0, 1]


async def test_a_failed_listing_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        assert await marked_soon(cluster) == [0]
        await unmark(cluster, 0)
        shut = shut_out(leader.store, PATHS.marks)
        await asyncio.sleep(3 * LIST_S)
        assert await cluster.marked() == []

        shut.clear()
        await asyncio.sleep(2 * LIST_S)
        assert await cluster.marked() == [0]


async def test_nothing_is_listed_while_no_bookie_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B1, B2))

    def fail(self: LossMarker) -> None:
        raise UnavailableError("listed all the same")

    monkeypatch.setattr(LossMarker, "_find_gone", fail)
    with capture_logs() as logs:
        async with auditing(cluster):
            await asyncio.sleep(3 * LIST_S)

    assert [each for each in logs if each["event"] == "marks.list_failed"] == []
