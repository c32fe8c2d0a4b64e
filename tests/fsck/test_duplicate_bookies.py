"""A bookie that is twice in an ensemble, as conflicting repairs by Java may leave it."""

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.model import BookieId
from tests.fsck.inspections import inspect_once, one_ledger, told
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER

TWICE = (B1, B2, B1)
"""With two copies: entries 0, 3, 6, … and 1, 4, 7, … are on both bookies, 2, 5, 8, … only on B1, by
both of its indexes."""
LEVELS = pytest.mark.parametrize("level", Level, ids=lambda level: level.value)


async def striped(ensemble: tuple[BookieId, ...] = TWICE) -> Cluster:
    cluster, _ = await one_ledger(ensemble, write_quorum=2, ack_quorum=2, last=9)
    return cluster


@LEVELS
@pytest.mark.parametrize("ensemble", [TWICE, (B1, B1, B2), (B1, B1)])
@in_virtual_time
async def test_both_indexes_of_one_bookie_are_one_copy(
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
        pytest.param(0, Level.ENDS, id="an end of the first index"),
        pytest.param(8, Level.ENDS, id="an end of the second index"),
        pytest.param(3, Level.FULL, id="an entry of the first index"),
        pytest.param(4, Level.FULL, id="an entry of the second index"),
    ],
)
@in_virtual_time
async def test_an_entry_is_lost_only_if_no_other_bookie_has_it(entry_id: int, level: Level) -> None:
    cluster = await striped()
    cluster.bookie(B1).lose(LEDGER, entry_id)

    grade, findings = told(await inspect_once(cluster, level))

    is_of_both = entry_id % 3 == 2
    assert grade is (Grade.LOST if is_of_both else Grade.AT_RISK)
    assert Finding.MISSING in findings


@in_virtual_time
async def test_a_duplicated_bookie_is_not_suspect() -> None:
    cluster = await striped((B1, B1, B2))

    verdict = await inspect_once(cluster, Level.FULL)

    assert Finding.SUSPECT not in verdict.findings
    assert verdict.entries_read == sum(1 for _ in range(10)) + sum(1 for e in range(10) if e % 3)
