"""Cases that cover every pair of values."""

import itertools

import pytest

from tests.pairwise import pairs, pairwise


@pytest.mark.parametrize(
    ("sizes", "case_count_max"),
    [
        pytest.param((2, 2, 2), 4, id="the minimum"),
        pytest.param((3, 3, 4), 12, id="the test matrix"),
        pytest.param((5, 1, 3), 15, id="a dimension without a choice"),
        pytest.param((4, 4, 4, 4, 4), 32, id="more dimensions"),
    ],
)
def test_every_pair_meets_in_few_cases(sizes: tuple[int, ...], case_count_max: int) -> None:
    dimensions = [range(size) for size in sizes]

    cases = pairwise(*dimensions)

    met = set().union(*map(pairs, cases))
    assert met == set().union(*map(pairs, itertools.product(*dimensions)))
    assert len(cases) <= case_count_max


def test_the_cases_are_the_same_each_time() -> None:
    assert pairwise("abc", "xyz", range(4)) == pairwise("abc", "xyz", range(4))
