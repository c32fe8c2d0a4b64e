"""Copies to a registered bookie that lacks entries (rule S15)."""

import pytest

from ledgers.errors import UnavailableError
from replication.copying import CopyJob
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, named_by
from tests.replication.copies import cluster_with_ledger, copy
from tests.replication.ledger_values import B2, B3, BOOKIES, fragment
from tests.replication.nodes import LEDGER


async def lacking(cluster: Cluster, *entry_ids: int) -> CopyJob:
    """Lose these entries on B2 and return their copy. B2 stores 0, 1, 3, 4, 6, 7 and 9."""
    for entry_id in entry_ids:
        cluster.bookie(B2).lose(LEDGER, entry_id)
    return CopyJob(
        fragment=fragment(),
        index=1,
        target=B2,
        entry_ids=entry_ids,
        available=frozenset(BOOKIES),
    )


async def test_rule_s15_only_the_missing_entries_are_written_in_place() -> None:
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, 4)
    cluster.bookie(B2).lose(LEDGER, 9)

    outcome = await copy(cluster, in_place)

    assert outcome.entry_count == 1
    assert cluster.bookie(B2).entry_ids(LEDGER) == {0, 1, 3, 4, 6, 7}


async def test_rule_s15_the_ends_are_written_last_in_place() -> None:
    cluster = await cluster_with_ledger()
    missing = (0, 4, 6, 9)
    in_place = await lacking(cluster, *missing)

    outcome = await copy(cluster, in_place)

    assert outcome.is_complete
    assert {*missing} <= cluster.bookie(B2).entry_ids(LEDGER)
    assert [
        sorted(e for ids in t.reads.values() for e in ids) for t, _ in cluster.bookies.transfers
    ] == [[4, 6], [0, 9]]


@pytest.mark.parametrize(
    ("missing", "lost", "written", "withheld"),
    [
        pytest.param((0, 4, 6, 9), {4}, {0, 6}, (9,), id="between the ends"),
        pytest.param((0, 4, 6, 9), {0, 4}, {6, 9}, (), id="between them, and the first"),
        pytest.param((0, 4, 6, 9), {4, 9}, {0, 6}, (9,), id="between them, and the last"),
        pytest.param((0, 4, 6, 9), {0}, {4, 6, 9}, (), id="the first"),
        pytest.param((0, 4, 6, 9), {9}, {0, 4, 6}, (), id="the last"),
        pytest.param((0, 9), {0, 9}, set(), (), id="both ends"),
        pytest.param((4, 6, 9), {4}, {6}, (9,), id="between them, and only the last is missing"),
        pytest.param((0, 4, 6), {4}, {6}, (0,), id="between them, and only the first is missing"),
    ],
)
async def test_rule_s15_an_end_that_shows_the_gap_is_not_written(
    missing: tuple[int, ...], lost: set[int], written: set[int], withheld: tuple[int, ...]
) -> None:
    """All other entries that have a copy are written in place."""
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, *missing)
    for entry_id in lost:
        others = set(named_by(await cluster.metadata(), entry_id)) - {B2}
        cluster.bookie(others.pop()).lose(LEDGER, entry_id)

    outcome = await copy(cluster, in_place)

    assert cluster.bookie(B2).entry_ids(LEDGER) & {*missing} == written
    assert outcome.withheld == withheld
    assert {*outcome.without_copy} == lost - {*withheld}
    assert not outcome.is_complete


async def test_rule_s15_no_end_is_written_if_a_replica_does_not_answer() -> None:
    cluster = await cluster_with_ledger()
    in_place = await lacking(cluster, 0, 4, 6, 9)
    cluster.bookies.fail(B3, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, in_place)

    assert outcome.unknown == (4,)
    assert cluster.bookie(B2).entry_ids(LEDGER) & {0, 9} == set()
