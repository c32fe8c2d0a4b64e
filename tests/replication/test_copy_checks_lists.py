"""Lists of entries instead of reads, and bookies that do not answer such requests."""

from collections.abc import Sequence

import pytest

from ledgers.model import BookieId
from replication.copy_reader import UNANSWERED_PAUSE_S, EntryLists, lacks
from replication.outcome import DONE, OutcomeKind
from replication.settings import ReplicationSettings
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, fragment
from tests.replication.nodes import LEDGER
from tests.replication.repairs import repair

LISTS = ReplicationSettings(entry_lists=True)


@pytest.mark.parametrize(
    ("listed", "is_lacking"),
    [
        pytest.param([range(10)], False, id="more than it should have"),
        pytest.param([range(1), range(2, 4), range(5, 7), range(8, 10)], False, id="its stripe"),
        pytest.param([range(1), range(2, 4), range(5, 6), range(8, 10)], True, id="without 6"),
        pytest.param([range(2, 10)], True, id="without the first"),
        pytest.param([range(9)], True, id="without the last"),
        pytest.param([], True, id="nothing"),
    ],
)
def test_a_list_is_compared_with_the_stripe(listed: Sequence[range], is_lacking: bool) -> None:
    # E 3, W 2: index 0 stores 0 2 3 5 6 8 9
    assert lacks([fragment()], B1, listed) is is_lacking


def test_every_fragment_of_the_bookie_counts() -> None:
    fragments = [fragment(last=9), fragment((B2, B4, B3), first=10, last=19)]

    assert lacks(fragments, B2, [range(10)])
    assert not lacks(fragments, B2, [range(20)])
    assert not lacks(fragments, B4, [range(10, 20)])


@in_virtual_time
async def test_a_gap_in_the_middle_of_a_list_is_found_and_filled() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lose(LEDGER, 4)

    outcome = await repair(cluster, settings=LISTS)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 1)
    await cluster.assert_whole()


@in_virtual_time
async def test_complete_lists_leave_only_reads_of_the_ends() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))

    assert await repair(cluster, settings=LISTS) == DONE

    assert {b: cluster.bookies.asked(b) for b in (B1, B2, B3)} == {
        B1: [0, 9],
        B2: [0, 9],
        B3: [1, 8],
    }


@in_virtual_time
async def test_a_bookie_that_does_not_know_the_ledger_lacks_all_of_it() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).wipe()

    outcome = await repair(cluster, settings=LISTS)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 7)
    await cluster.assert_whole()


@in_virtual_time
async def test_an_unanswered_list_is_replaced_by_reads_for_a_while() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lists_entries = False
    lists = EntryLists(cluster.bookies, cluster.clock)
    asked: list[BookieId] = []
    list_entries = cluster.bookies.list_entries

    async def note(bookie: BookieId, ledger_id: int) -> Sequence[range]:
        asked.append(bookie)
        return await list_entries(bookie, ledger_id)

    cluster.bookies.list_entries = note  # type: ignore[method-assign]
    members = (B1, B2, B3)
    for _ in range(3):
        assert await lists.lacking([fragment()], members) == frozenset()
    assert asked.count(B2) == 1
    assert asked.count(B1) == 3

    await cluster.clock.sleep(UNANSWERED_PAUSE_S)
    await lists.lacking([fragment()], members)

    assert asked.count(B2) == 2


@in_virtual_time
async def test_rule_s7_a_list_does_not_show_damage_at_the_ends() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 0)

    outcome = await repair(cluster, settings=LISTS)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()
