"""A bookie that stands in an ensemble twice, as Java's repairs may leave it when they conflict."""

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.model import BookieId
from tests.fsck.inspections import inspect_once, one_ledger, told
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER

TWICE = (B1, B2, B1)
"""With two copies of each entry: of 0, 3, 6, … and of 1, 4, 7, … on both, of 2, 5, 8, … on B1 by
both places."""
LEVELS = pytest.mark.parametrize("level", Level, ids=lambda level: level.value)


async def striped(ensemble: tuple[BookieId, ...] = TWICE) -> Cluster:
    cluster, _ = await one_ledger(ensemble, write_quorum=2, ack_quorum=2, last=9)
    return cluster


@LEVELS
@pytest.mark.parametrize("ensemble", [TWICE, (B1, B1, B2), (B1, B1)])
@in_virtual_time
async def test_what_both_places_store_is_one_copy(
    level: Level, ensemble: tuple[BookieId, ...]
) -> None:
    cluster = await striped(ensemble)

    verdict = await inspect_once(cluster, level)

    assert told(verdict) == (Grade.AT_RISK, (Finding.MISPLACED,))
    assert verdict.fragments[0].copies_least == 1
    assert [each.bookie for each in verdict.evidence] == [B1]


@pytest.mark.parametrize(
    ("entry_id", "level"),
    [
        pytest.param(0, Level.ENDS, id="an end of the first place"),
        pytest.param(8, Level.ENDS, id="an end of the second"),
        pytest.param(3, Level.FULL, id="of the first"),
        pytest.param(4, Level.FULL, id="of the second"),
    ],
)
@in_virtual_time
async def test_what_it_lacks_is_missing_and_not_lost_where_another_has_it(
    entry_id: int, level: Level
) -> None:
    cluster = await striped()
    cluster.bookie(B1).lose(LEDGER, entry_id)

    grade, findings = told(await inspect_once(cluster, level))

    is_of_both = entry_id % 3 == 2
    assert grade is (Grade.LOST if is_of_both else Grade.AT_RISK)
    assert Finding.MISSING in findings


@in_virtual_time
async def test_what_only_it_has_is_lost_with_it() -> None:
    cluster = await striped()
    cluster.bookie(B1).lose(LEDGER, 5)

    verdict = await inspect_once(cluster, Level.FULL)

    assert verdict.grade is Grade.LOST
    missing = [each for each in verdict.evidence if each.finding is Finding.MISSING]
    assert [(each.first_entry_id, each.entry_count) for each in missing] == [(5, 1)]


@in_virtual_time
async def test_copies_are_compared_though_one_is_there_by_two_places() -> None:
    cluster = await striped((B1, B1, B2))

    verdict = await inspect_once(cluster, Level.FULL)

    assert Finding.SUSPECT not in verdict.findings
    assert verdict.entries_read == sum(1 for _ in range(10)) + sum(1 for e in range(10) if e % 3)
