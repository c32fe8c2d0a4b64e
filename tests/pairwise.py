"""Few combinations in which every pair of values meets.

Most faults that a combination of settings brings to light need two of them, not all.
"""

import itertools
from collections.abc import Sequence
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]
"""Two values, each with its dimension's place."""


def pairwise(*dimensions: Sequence[Any]) -> list[Case]:
    """Cases, one value of each dimension in turn, among which are all pairs. The same ones each
    time.

    Greedy: always the first of the cases with the most pairs that are still wanted. Values are
    hashable.
    """
    every_case = list(itertools.product(*dimensions))
    wanted = {pair for case in every_case for pair in pairs(case)}
    chosen = []
    while wanted:
        chosen.append(max(every_case, key=lambda case: len(wanted & pairs(case))))
        wanted -= pairs(chosen[-1])
    return chosen


def pairs(case: Case) -> set[Pair]:
    """The pairs that meet in it."""
    return {
        (first, one, second, other)
        for (first, one), (second, other) in itertools.combinations(enumerate(case), 2)
    }
