"""Damage of a ledger that Java's workers would see, and damage that they would not."""

from collections.abc import Mapping

import pytest

from auditor.mark_reasons import (
    JavaVisibility,
    java_visibility,
)
from ledgers.model import BookieId, Fragment
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from tests.replication.ledger_values import B1, B2, B3, B4, fragment

ALL = frozenset({B1, B2, B3, B4})


def part(
    *ensemble: BookieId, first: int = 0, last: int | None = 9, is_closed: bool = True
) -> Fragment:
    """Return a fragment with a write quorum of 2."""
    return fragment(ensemble, first=first, last=last, is_closed=is_closed)


def lacks(*entry_ids: int) -> ReadFailures:
    return ReadFailures(absent=EntryRuns(entry_ids))


def holds_damaged(*entry_ids: int) -> ReadFailures:
    return ReadFailures(mismatched=EntryRuns(entry_ids))


def visibility(
    visible: tuple[BookieId, ...] = (), hidden: tuple[BookieId, ...] = ()
) -> JavaVisibility:
    return JavaVisibility(visible=frozenset(visible), hidden=frozenset(hidden))


ONE = (part(B1, B2),)
STRIPED = (part(B1, B2, B3),)
"""B1 stores 0, 2, 3, 5, 6, 8, 9; B2 0, 1, 3, 4, 6, 7, 9; B3 1, 2, 4, 5, 7, 8."""
TWO = (part(B1, B2, last=4), part(B1, B3, first=5))
OPEN = (part(B1, B2, is_closed=False),)


@pytest.mark.parametrize(
    ("fragments", "damage", "expected"),
    [
        pytest.param(ONE, {B1: lacks(0)}, visibility(visible=(B1,)), id="its first entry"),
        pytest.param(ONE, {B1: lacks(9)}, visibility(visible=(B1,)), id="its last"),
        pytest.param(ONE, {B1: lacks(1, 8)}, visibility(hidden=(B1,)), id="between the ends"),
        pytest.param(
            ONE, {B1: lacks(0, 4)}, visibility(visible=(B1,)), id="both: the part is copied whole"
        ),
        pytest.param(
            ONE, {B1: holds_damaged(0)}, visibility(hidden=(B1,)), id="no digest is checked"
        ),
        pytest.param(
            STRIPED, {B3: lacks(1)}, visibility(visible=(B3,)), id="the first that the index stores"
        ),
        pytest.param(
            STRIPED, {B3: lacks(8)}, visibility(visible=(B3,)), id="the last that it stores"
        ),
        pytest.param(
            STRIPED, {B2: lacks(1)}, visibility(hidden=(B2,)), id="which is between another's ends"
        ),
        pytest.param(
            TWO, {B1: lacks(5)}, visibility(visible=(B1,)), id="the first of a later fragment"
        ),
        pytest.param(
            TWO,
            {B1: lacks(0, 7)},
            visibility((B1,), (B1,)),
            id="Java sees one fragment and not the other",
        ),
        pytest.param(
            TWO,
            {B2: lacks(4), B3: lacks(7)},
            visibility((B2,), (B3,)),
            id="Java sees one bookie and not the other",
        ),
        pytest.param(
            OPEN, {B1: lacks(0)}, visibility(visible=(B1,)), id="the beginning of an open fragment"
        ),
        pytest.param(OPEN, {B1: lacks(9)}, visibility(hidden=(B1,)), id="its end moves on"),
        pytest.param(
            (part(B1, B2, last=None, is_closed=False),),
            {B1: lacks(0)},
            visibility(hidden=(B1,)),
            id="the end is unknown",
        ),
        pytest.param(ONE, {B4: lacks(0)}, visibility(hidden=(B4,)), id="a bookie of no fragment"),
        pytest.param((part(B1, B2, last=-1),), {}, visibility(), id="an empty fragment"),
    ],
)
def test_java_sees_losses_at_the_ends_of_a_fragment(
    fragments: tuple[Fragment, ...],
    damage: Mapping[BookieId, ReadFailures],
    expected: JavaVisibility,
) -> None:
    assert java_visibility(fragments, damage, registered=ALL) == expected


def test_java_sees_all_copies_of_a_bookie_that_is_not_registered() -> None:
    damage = {B1: lacks(4), B2: lacks(4)}

    assert java_visibility(ONE, damage, registered={B2}) == visibility((B1,), (B2,))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(visibility(visible=(B1,)), False, id="all is seen"),
        pytest.param(visibility((B1,), (B2,)), True, id="some is"),
        pytest.param(
            visibility(), True, id="no bookie is at fault, and Java would find the ledger whole"
        ),
    ],
)
def test_damage_invisible_to_java_needs_a_mark_in_our_own_queue(
    found: JavaVisibility, expected: bool
) -> None:
    assert found.needs_private_mark is expected
