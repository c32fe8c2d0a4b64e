"""Restored metadata may name lost copies: its bookies are asked first, and the ledger is marked."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from ledgers.store import Delete, Operation
from replication import znodes
from replication.by_hand import CopyDoubt, RestoreRefusedError
from replication.copy_reader import Verdict
from replication.recent_copies import RecentCopies
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import drain, order_maintenance
from tests.replication.undoing import PRIVATE, repaired

# --- The bookies ----------------------------------------------------------------------------------


async def reformatted(cluster: Cluster) -> None:
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)


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
            PRIVATE.mark(LEDGER),
            znodes.mark_to_bytes(znodes.Mark(ctime_ms=1)),
            with_parents=True,
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
