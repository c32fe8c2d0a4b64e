"""Runs of entry ids as a sequence."""

import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.entry_runs import NO_ENTRIES, EntryRuns, merged

ids = st.sets(st.integers(0, 60)).map(sorted)


@given(ids)
def test_it_is_the_sequence_of_its_ids(entry_ids: list[int]) -> None:
    runs = EntryRuns(entry_ids)

    assert list(runs) == entry_ids
    assert len(runs) == len(entry_ids)
    assert bool(runs) is bool(entry_ids)
    assert [runs[rank] for rank in range(len(runs))] == entry_ids
    assert [entry_id in runs for entry_id in range(-1, 62)] == [
        entry_id in entry_ids for entry_id in range(-1, 62)
    ]
    assert [i for run in runs.runs for i in run] == entry_ids
    assert runs == EntryRuns(entry_ids) == EntryRuns(array("q", entry_ids))


@given(ids, st.integers(0, 60), st.integers(0, 60))
def test_a_slice_has_the_ids_between_two_ranks(entry_ids: list[int], start: int, stop: int) -> None:
    assert EntryRuns(entry_ids)[start:stop] == entry_ids[start:stop]


@given(ids, st.integers(0, 60), st.integers(0, 60))
def test_between_two_ids_both_included(entry_ids: list[int], first: int, last: int) -> None:
    found = EntryRuns(entry_ids).between(first, last)

    assert list(found) == [i for i in entry_ids if first <= i <= last]
    assert [found[rank] for rank in range(len(found))] == list(found)


def test_two_disjoint_runs_are_merged_in_order() -> None:
    assert list(merged(EntryRuns([1, 5, 6]), EntryRuns([2, 9]))) == [1, 2, 5, 6, 9]
    assert merged(EntryRuns([1]), NO_ENTRIES) == EntryRuns([1])


def test_ten_million_consecutive_ids_need_little_memory() -> None:
    runs = EntryRuns(range(10_000_000, 10_000_000 + 100_000))

    assert len(runs) == 100_000
    assert len(runs.runs) == 1
    assert runs[99_999] == 10_099_999
    assert sys.getsizeof(runs) < 1_000


@pytest.mark.parametrize("position", [3, -4])
def test_a_rank_beyond_the_last_is_an_error(position: int) -> None:
    with pytest.raises(IndexError):
        EntryRuns([1, 2, 9])[position]
