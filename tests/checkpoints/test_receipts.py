"""Merging of receipts, compared with sets of ids."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.receipts import RangeMerger, RangeSet, ReceiptRange

RANGES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 20)).map(
        lambda pair: ReceiptRange(pair[0], pair[0] + pair[1])
    )
)


def ids(ranges: list[ReceiptRange]) -> set[int]:
    return {id for begin, end in ranges for id in range(begin, end + 1)}


def are_apart(ranges: list[ReceiptRange]) -> bool:
    """Return True if ascending ranges neither overlap nor touch."""
    return all(lower.end + 1 < higher.begin for lower, higher in itertools.pairwise(ranges))


@given(RANGES)
def test_merged_receipts_cover_the_same_ids(ranges: list[ReceiptRange]) -> None:
    merged = RangeMerger(sorted(ranges, reverse=True)).ranges

    assert ids(merged) == ids(ranges)
    assert are_apart(merged)


@given(RANGES)
def test_joined_ranges_are_those_that_several_receipts_form(ranges: list[ReceiptRange]) -> None:
    merger = RangeMerger(sorted(ranges, reverse=True))

    for each in merger.ranges:
        within = [row for row in ranges if each.begin <= row.begin and row.end <= each.end]
        assert (each in merger.joined) == (len(within) > 1)


def test_a_receipt_may_reach_beyond_several_that_began_after_it() -> None:
    rows = [(80, 89), (50, 59), (30, 39), (20, 55), (5, 9)]

    merged = RangeMerger(ReceiptRange(*each) for each in rows).ranges

    assert merged == [(5, 9), (20, 59), (80, 89)]


@pytest.mark.parametrize("seed", range(20))
def test_adding_in_any_order_leaves_one_range(seed: int) -> None:
    """Neighbouring parts of a whole, each added once."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 1_000), 200))
    parts = [ReceiptRange(lower + 1, upper) for lower, upper in itertools.pairwise(cuts)]
    rng.shuffle(parts)
    added = RangeSet()

    for number, part in enumerate(parts, start=1):
        merged = added.add(part)
        assert merged.begin <= part.begin
        assert part.end <= merged.end
        assert added.beginning_at(merged.begin) == merged
        assert ids(list(added)) == ids(parts[:number])
        assert are_apart(list(added))

    assert list(added) == [(cuts[0] + 1, cuts[-1])]


def test_a_removed_range_is_gone() -> None:
    ranges = RangeSet([ReceiptRange(1, 5), ReceiptRange(10, 15)])

    ranges.remove(ReceiptRange(1, 5))

    assert list(ranges) == [(10, 15)]
    assert ranges.add(ReceiptRange(6, 9)) == (6, 15)
