"""Few combinations that cover every pair of values.

Most faults that depend on a combination of settings need two of them, not all.
"""

import itertools
from collections.abc import Sequence
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]
"""Two values, each with the index of its dimension."""


def pairwise(*dimensions: Sequence[Any]) -> list[Case]:
    """Return cases, one value of each dimension, that cover all pairs. The result is reproducible.

    Greedy: the next case is the first one that covers the most pairs not covered yet. Values are
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
    """Return the pairs that the case covers."""
    return {
        (first, one, second, other)
        for (first, one), (second, other) in itertools.combinations(enumerate(case), 2)
    }
