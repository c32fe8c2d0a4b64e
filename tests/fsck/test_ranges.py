"""Conditions on ledger ids, from the filters of a Spark query."""

from collections.abc import Sequence

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from auditor.fsck.spark.sources import WantedLedgers, push_filters

ID = ("ledger_id",)
LEDGERS = [0, 3, 5, 8, 2**63 - 1]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        pytest.param([], LEDGERS, id="all"),
        pytest.param([EqualTo(ID, 5)], [5], id="one"),
        pytest.param([EqualTo(ID, 4)], [], id="an unknown one"),
        pytest.param([GreaterThan(ID, 3), LessThan(ID, 8)], [5], id="between, both excluded"),
        pytest.param(
            [GreaterThanOrEqual(ID, 3), LessThanOrEqual(ID, 8)], [3, 5, 8], id="both included"
        ),
        pytest.param([GreaterThan(ID, 8), LessThan(ID, 3)], [], id="contradictory"),
        pytest.param([In(ID, (8, 0, 7))], [0, 8], id="a list"),
        pytest.param([In(ID, (0, 8)), In(ID, (8, 3)), LessThan(ID, 9)], [8], id="lists, a bound"),
        pytest.param([LessThan(ID, 0)], [], id="below all"),
        pytest.param([EqualTo(ID, -(2**63))], [], id="not a ledger id"),
    ],
)
def test_only_ledgers_that_match_all_filters_are_read(
    filters: Sequence[Filter], wanted: Sequence[int]
) -> None:
    found, left = push_filters(filters, WantedLedgers())

    assert list(found.of(LEDGERS)) == wanted
    assert list(left) == []


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(EqualTo(("state",), 5), id="another column"),
        pytest.param(EqualTo(("custom", "ledger_id"), 5), id="a field of that name"),
        pytest.param(In(("entry_id",), (5,)), id="another column's list"),
        pytest.param(Not(EqualTo(ID, 5)), id="a negation"),
        pytest.param(IsNotNull(ID), id="another kind"),
    ],
)
def test_an_unsupported_filter_is_left_to_spark(other: Filter) -> None:
    found, left = push_filters([other, GreaterThan(ID, 3)], WantedLedgers())

    assert list(left) == [other]
    assert list(found.of(LEDGERS)) == [5, 8, 2**63 - 1]
