"""What is put back may name copies that are gone: its bookies are asked first, and its nodes
told."""

import re
from collections.abc import Awaitable, Callable, Sequence

import pytest

from ledgers.memory.store import MemoryStore
from ledgers.store import Delete, Operation
from replication import znodes
from replication.recent_copies import RecentCopies
from replication.restore import RestoreRefusedError
from replication.znodes import parse_record
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import drain, keep_away
from tests.replication.undoing import OWN, repaired

# --- The bookies ----------------------------------------------------------------------------------


async def wiped(cluster: Cluster) -> None:
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)


async def decommissioned(cluster: Cluster) -> None:
    await cluster.kill(B2)


async def collected(cluster: Cluster) -> None:
    """Its garbage collector has deleted one entry's copy, which no metadata named any more."""
    cluster.bookie(B2).lose(LEDGER, 4)


async def hanging(cluster: Cluster) -> None:
    cluster.bookie(B2).is_down = True


async def away(cluster: Cluster) -> None:
    await keep_away(cluster, B2)
    await cluster.kill(B2)


@pytest.mark.parametrize(
    ("happens", "doubt"),
    [
        pytest.param(wiped, f"{B2} lacks 7 of the 7 entries", id="a member was wiped"),
        pytest.param(decommissioned, f"{B2} is not registered", id="a member is gone"),
        pytest.param(collected, f"{B2} lacks 1 of the 7 entries", id="garbage was collected"),
        pytest.param(hanging, f"{B2} did not say", id="a member hangs"),
        pytest.param(away, f"{B2} is under maintenance", id="a member is away"),
    ],
)
@in_virtual_time
async def test_rule_s1_a_bookie_without_the_entries_is_not_named_without_a_word(
    happens: Callable[[Cluster], Awaitable[None]], doubt: str
) -> None:
    undoing = await repaired()
    await happens(undoing.cluster)

    with pytest.raises(RestoreRefusedError, match=re.escape(doubt)):
        await undoing.undo(undoing.records[0])

    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]
    assert await undoing.own_marks() == []
    assert await undoing.cluster.locked() == []


@in_virtual_time
async def test_a_member_that_drains_is_no_reason_to_ask() -> None:
    undoing = await repaired()
    await drain(undoing.cluster, B2)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]


@pytest.mark.parametrize("is_marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("happens", [wiped, collected])
@in_virtual_time
async def test_what_was_put_back_by_force_is_mended_by_the_nodes(
    happens: Callable[[Cluster], Awaitable[None]], is_marked: bool
) -> None:
    undoing = await repaired()
    await happens(undoing.cluster)
    if is_marked:
        await undoing.cluster.store.create(
            OWN.mark(LEDGER),
            znodes.mark_to_bytes(znodes.Mark(ctime_ms=1)),
            with_parents=True,
        )

    await undoing.undo(undoing.records[0], is_forced=True)

    undoing.cluster.violations.clear()  # that one was forced
    async with undoing.cluster.node() as node, working(node):
        await until(undoing.cluster, undoing.is_unmarked)
    await undoing.cluster.assert_whole()


# --- The mark -------------------------------------------------------------------------------------


@in_virtual_time
async def test_whatever_is_put_back_is_marked_for_the_nodes_to_check() -> None:
    undoing = await repaired()

    await undoing.undo(undoing.records[0])
    assert await undoing.own_marks() == [LEDGER]

    await undoing.undo(undoing.records[1])
    assert await undoing.own_marks() == [LEDGER]
    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]


@in_virtual_time
async def test_a_directory_that_a_crash_left_behind_gets_its_mark() -> None:
    undoing = await repaired()
    directory = OWN.mark(LEDGER).rpartition("/")[0]
    await undoing.cluster.store.create(directory, with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.own_marks() == [LEDGER]


@in_virtual_time
async def test_rule_s6_the_metadata_is_not_put_back_without_its_mark() -> None:
    """A worker tidies the upper directories away before each write, but for the last."""
    undoing = await repaired()
    parent = OWN.mark(LEDGER).rsplit("/", 2)[0]
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


@in_virtual_time
async def test_what_was_noted_of_its_next_try_is_not_waited_for() -> None:
    undoing = await repaired()
    await undoing.cluster.store.create(PATHS.waiting_note(LEDGER), b"{}", with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.store.exists(PATHS.waiting_note(LEDGER)) is None


@in_virtual_time
async def test_copies_that_are_named_again_are_to_be_read_again_later() -> None:
    undoing = await repaired()

    await undoing.undo(undoing.records[0])

    (name,) = [n for n in await _records(undoing.cluster) if n.endswith(f".{LEDGER}")]
    data, _ = await undoing.cluster.store.get(f"{PATHS.recent_copies}/{name}")
    copies = RecentCopies.from_record(parse_record(data))
    assert copies.targets == {LEDGER: frozenset({B1, B2, B3})}


async def _records(cluster: Cluster) -> list[str]:
    return await cluster.store.children(PATHS.recent_copies)
