"""Metadata restored from the journal: under the lock, on the bytes of the record, and
reversible.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from ledgers.errors import ConflictError, NoSuchLedgerError, UnavailableError
from ledgers.manager import VersionedMetadata
from ledgers.model import LedgerState
from ledgers.store import Delete, Operation, SetData
from replication import znodes
from replication.by_hand import CopyDoubt, RestoreRefusedError
from replication.copy_reader import Verdict
from replication.recent_copies import RecentCopies
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import drain, order_maintenance, touch
from tests.replication.undoing import PRIVATE, Undoing, repaired


async def test_the_metadata_is_exactly_what_it_was_before_the_write() -> None:
    undoing = await repaired()

    done = await undoing.undo(undoing.records[0])

    assert not done.is_done
    assert (await undoing.read()).data == undoing.records[0].before
    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]
    await undoing.cluster.assert_whole()
    assert await undoing.cluster.locked() == []


async def test_a_restore_can_be_restored() -> None:
    undoing = await repaired()
    await undoing.undo(undoing.records[0])

    await undoing.undo(undoing.records[1])

    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]
    assert len(undoing.records) == 3


async def test_restoring_twice_changes_nothing_the_second_time() -> None:
    undoing = await repaired()
    await undoing.undo(undoing.records[0])
    version = (await undoing.read()).version

    again = await undoing.undo(undoing.records[0])

    assert again.is_done
    assert (await undoing.read()).version == version


async def test_later_writes_are_not_undone_without_force() -> None:
    undoing = await repaired()
    versioned = await undoing.read()
    moved = versioned.metadata.segments[0].with_bookies({2: B4, 1: B3})
    await undoing.cluster.manager.write(
        LEDGER, replace(versioned.metadata, segments=(moved,)), read_as=versioned
    )
    undoing.cluster.violations.clear()  # that one was not ours

    with pytest.raises(RestoreRefusedError) as refused:
        await undoing.undo(undoing.records[0])
    assert any("written again later" in str(each) for each in refused.value.doubts)
    assert (await undoing.read()).metadata.segments == (moved,)
    assert await undoing.cluster.locked() == []

    await undoing.undo(undoing.records[0], is_forced=True)
    assert (await undoing.read()).data == undoing.records[0].before


async def test_another_clusters_metadata_is_not_restored_even_by_force() -> None:
    undoing = await repaired()
    before = await undoing.read()
    foreign = replace(undoing.records[0], cluster="another")

    with pytest.raises(RestoreRefusedError, match="another cluster"):
        await undoing.undo(foreign, is_forced=True)

    assert (await undoing.read()).version == before.version
    assert await undoing.cluster.locked() == []


async def test_an_unknown_clusters_metadata_is_recognised_by_its_bytes() -> None:
    undoing = await repaired()
    unknown = replace(undoing.records[0], cluster=None)
    await touch(undoing.cluster)
    await undoing.undo(unknown)

    changed = await undoing.read()
    assert changed.data == unknown.before

    with pytest.raises(RestoreRefusedError) as refused:
        await undoing.undo(replace(unknown, before=unknown.after, after=b"other bytes"))
    assert any("does not name its cluster" in str(each) for each in refused.value.doubts)


# --- The ledger's end -----------------------------------------------------------------------------


def reopened(found: VersionedMetadata) -> VersionedMetadata:
    metadata = replace(found.metadata, state=LedgerState.OPEN, last_entry_id=-1, length=0)
    return structs.replace(found, metadata=metadata)


def shortened(found: VersionedMetadata) -> VersionedMetadata:
    return structs.replace(found, metadata=replace(found.metadata, last_entry_id=5))


@pytest.mark.parametrize(
    ("before", "doubt"),
    [
        pytest.param(reopened, "turn a closed ledger back to OPEN", id="its closing"),
        pytest.param(shortened, "move the ledger's end from entry 9 to 5", id="its end"),
    ],
)
async def test_the_end_of_a_closed_ledger_is_not_moved_without_force(
    cluster: Cluster, before: Callable[[VersionedMetadata], VersionedMetadata], doubt: str
) -> None:
    undoing = Undoing(cluster)
    written = await cluster.write_ledger((B1, B2, B3))
    await undoing.manager.write_operation(LEDGER, before(written).metadata, read_as=written)
    recorded = undoing.records[0]
    recorded = replace(recorded, before=recorded.after, after=recorded.before)

    with pytest.raises(RestoreRefusedError) as refused:
        await undoing.undo(recorded)
    assert any(doubt in str(each) for each in refused.value.doubts)


async def test_unreadable_metadata_is_restored() -> None:
    undoing = await repaired()
    path = undoing.manager.path(LEDGER)
    await undoing.store.set(path, b"nonsense", version=-1)

    found = await (await undoing.restorer()).plan(undoing.records[0])
    assert found.now is None
    assert found.doubts
    await undoing.undo(undoing.records[0], is_forced=True)

    assert (await undoing.read()).data == undoing.records[0].before


async def test_rule_s3_a_ledger_under_repair_is_left_alone() -> None:
    undoing = await repaired()
    before = await undoing.read()
    await undoing.cluster.store.create(PATHS.lock(LEDGER))

    with pytest.raises(UnavailableError, match="another client is at work on it"):
        await undoing.undo(undoing.records[0])

    assert (await undoing.read()).version == before.version
    assert len(await undoing.cluster.locked()) == 1


async def test_rule_s2_a_concurrent_write_is_not_overwritten() -> None:
    undoing = await repaired()
    cluster, path = undoing.cluster, undoing.manager.path(LEDGER)
    put_back = undoing.manager.put_back_operation

    async def with_another_write_first(*arguments: object, **options: object) -> SetData:
        operation = await put_back(*arguments, **options)  # type: ignore[arg-type]
        before = cluster.tree.nodes[path]
        cluster.tree.apply(
            cluster.store.session_id,
            [SetData(path=path, data=before.data, version=operation.version)],
        )
        return operation

    undoing.manager.put_back_operation = with_another_write_first  # type: ignore[method-assign]

    with pytest.raises(ConflictError):
        await undoing.undo(undoing.records[0])
    assert await cluster.ensembles() == [(B1, B4, B3)]
    assert await cluster.locked() == []


async def test_a_deleted_ledger_is_not_created_again() -> None:
    undoing = await repaired()
    await undoing.cluster.manager.delete(LEDGER, version=-1)

    with pytest.raises(NoSuchLedgerError):
        await undoing.undo(undoing.records[0])


# --- The bookies ----------------------------------------------------------------------------------


async def reformatted(cluster: Cluster) -> None:
    await cluster.reformat(B2)


async def decommissioned(cluster: Cluster) -> None:
    await cluster.kill(B2)


async def collected(cluster: Cluster) -> None:
    """Delete the copies of an entry that no metadata named any more, as garbage collection does."""
    cluster.bookie(B2).lose(LEDGER, 4)


async def hanging(cluster: Cluster) -> None:
    cluster.bookie(B2).is_down = True


async def absent(cluster: Cluster) -> None:
    await order_maintenance(cluster, B2)
    await cluster.kill(B2)


@pytest.mark.parametrize(
    ("happens", "verdict", "bad_count"),
    [
        pytest.param(reformatted, Verdict.MISSING, 7, id="a member was reformatted"),
        pytest.param(decommissioned, Verdict.BOOKIE_ABSENT, 0, id="a member was decommissioned"),
        pytest.param(collected, Verdict.MISSING, 1, id="garbage was collected"),
        pytest.param(hanging, Verdict.UNKNOWN, 0, id="a member hangs"),
        pytest.param(absent, Verdict.IN_MAINTENANCE, 0, id="a member is absent"),
    ],
)
async def test_rule_s1_a_bookie_without_the_entries_needs_force(
    happens: Callable[[Cluster], Awaitable[None]], verdict: Verdict, bad_count: int
) -> None:
    undoing = await repaired()
    await happens(undoing.cluster)

    with pytest.raises(RestoreRefusedError) as refused:
        await undoing.undo(undoing.records[0])

    (doubt,) = refused.value.doubts
    assert isinstance(doubt, CopyDoubt)
    assert (doubt.bookie, doubt.verdict, doubt.bad_count) == (B2, verdict, bad_count)
    assert (doubt.entry_count, doubt.first_entry_id, doubt.last_entry_id) == (7, 0, 9)

    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]
    assert await undoing.own_marks() == []
    assert await undoing.cluster.locked() == []


async def test_a_draining_member_is_no_reason_for_force() -> None:
    undoing = await repaired()
    await drain(undoing.cluster, B2)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]


@pytest.mark.parametrize("is_marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("happens", [reformatted, collected])
async def test_a_forced_restore_is_repaired_by_the_nodes(
    happens: Callable[[Cluster], Awaitable[None]], is_marked: bool
) -> None:
    undoing = await repaired()
    await happens(undoing.cluster)
    if is_marked:
        await undoing.cluster.store.create(
            PRIVATE.mark(LEDGER), znodes.mark_to_bytes(znodes.Mark(ctime_ms=1)), with_parents=True
        )

    await undoing.undo(undoing.records[0], is_forced=True)

    undoing.cluster.violations.clear()  # that one was forced
    async with undoing.cluster.node() as node, working(node):
        await until(undoing.cluster, undoing.is_unmarked)
    await undoing.cluster.assert_whole()


# --- The mark -------------------------------------------------------------------------------------


async def test_every_restored_ledger_is_marked() -> None:
    undoing = await repaired()

    await undoing.undo(undoing.records[0])
    assert await undoing.own_marks() == [LEDGER]

    await undoing.undo(undoing.records[1])
    assert await undoing.own_marks() == [LEDGER]
    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]


async def test_a_directory_left_behind_by_a_crash_gets_its_mark() -> None:
    undoing = await repaired()
    directory = PRIVATE.mark(LEDGER).rpartition("/")[0]
    await undoing.cluster.store.create(directory, with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.own_marks() == [LEDGER]


async def test_rule_s6_the_metadata_is_not_restored_without_its_mark() -> None:
    """A worker deletes the upper directories before each write except the last."""
    undoing = await repaired()
    parent = PRIVATE.mark(LEDGER).rsplit("/", 2)[0]
    tidied = 0

    def tidy(_store: MemoryStore, operations: Sequence[Operation]) -> None:
        nonlocal tidied
        is_write = any(each.path == undoing.manager.path(LEDGER) for each in operations)
        if is_write and tidied < 2:
            tidied += 1
            undoing.cluster.tree.apply(undoing.store.session_id, [Delete(path=parent)])

    undoing.cluster.tree.faults = tidy

    await undoing.undo(undoing.records[0])

    assert tidied == 2
    assert await undoing.own_marks() == [LEDGER]
    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]
    assert len(undoing.records) == 2, "one write, one record"


async def test_the_noted_next_try_is_not_waited_for() -> None:
    undoing = await repaired()
    await undoing.cluster.store.create(PATHS.waiting_note(LEDGER), b"{}", with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.store.exists(PATHS.waiting_note(LEDGER)) is None


async def test_copies_named_again_are_read_again_later() -> None:
    undoing = await repaired()

    await undoing.undo(undoing.records[0])

    (name,) = [n for n in await _records(undoing.cluster) if n.endswith(f".{LEDGER}")]
    data, _ = await undoing.cluster.store.get(f"{PATHS.recent_copies}/{name}")
    copies = RecentCopies.parse(data)
    assert copies.targets == {LEDGER: frozenset({B1, B2, B3})}


async def _records(cluster: Cluster) -> list[str]:
    return await cluster.store.children(PATHS.recent_copies)
