"""Judgements of a rule: which racks suit a replacement, and whether an existing ensemble is good.

All functions are pure and cached, because most of thousands of ledgers are alike, and each is
judged more than once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from math import comb, perm

from ledgers.placement.arrangements import Arrangement, Arrangements, Shape, replaced
from ledgers.placement.policy import DEFAULT_RACK, Adherence
from ledgers.placement.rules import Rule

MOVES_MAX = 2
"""Number of copies that may move together if no single move improves the ensemble, as for
"/a /a /b /b" with W = 2."""
MOVES_TRIED_MAX = 5_000
"""Limit on the arrangements tried for several moves. They are only needed if racks are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best racks for one bookie index. ``spreading`` is a subset of ``keeping``."""

    keeping: tuple[str, ...]
    """Racks that break the rule for the fewest write sets."""
    spreading: tuple[str, ...]
    """The racks in ``keeping`` that spread the copies most evenly."""
    is_broken: bool
    """True if even the racks in ``keeping`` break the rule."""


@lru_cache(maxsize=8_192)
def rank_racks(
    rule: Rule,
    shape: Shape,
    others: tuple[str | None, ...],
    index: int,
    racks: tuple[str, ...],
) -> Ranking:
    """Return the best racks for a replacement at ``index``.

    ``others``: the racks of the ensemble, None at ``index``. ``racks``: the racks of the
    candidates. Write sets that break the rule with any replacement are not counted.
    """
    arrangements = Arrangements(rule, shape)
    admitted = tuple(filter(rule.admits, racks))
    hopeless = arrangements.broken(others, index)
    broken_counts = {
        rack: len(arrangements.broken(replaced(others, index, rack), index) - hopeless)
        for rack in admitted or racks
    }
    fewest = min(broken_counts.values())
    keeping = tuple(rack for rack, count in broken_counts.items() if count == fewest)
    crowding = {
        rack: arrangements.crowding(replaced(others, index, rack), index) for rack in keeping
    }
    least = min(crowding.values())
    return Ranking(
        keeping=keeping,
        spreading=tuple(rack for rack in keeping if crowding[rack] == least),
        is_broken=fewest > 0 or not admitted,
    )


@lru_cache(maxsize=8_192)
def better_arrangements(
    rule: Rule, shape: Shape, arrangement: tuple[str, ...], racks: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the best arrangements that the fewest moves can make of a failing one.

    The results are equally good: they have the fewest offences and, among these, the most even
    spread. Empty if no moves improve the arrangement. ``racks``: the racks of the candidates; a
    rack occurs once per candidate, ``MOVES_MAX`` times at most.
    """
    arrangements = Arrangements(rule, shape)
    least = arrangements.offences(arrangement)
    admitted = tuple(filter(rule.admits, racks))
    for count in range(1, MOVES_MAX + 1):
        tries = comb(shape.size, count) * perm(len(admitted), count)
        if count > 1 and tries > MOVES_TRIED_MAX:
            break
        found: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
        for indexes, moved in _moved(arrangement, admitted, count):
            if (offences := arrangements.offences(moved)) < least:
                crowding = tuple(arrangements.crowding(moved, index) for index in indexes)
                found.setdefault((offences, crowding), []).append(moved)
        if found:
            return tuple(found[min(found)])
    return ()


def _moved(
    arrangement: tuple[str, ...], racks: tuple[str, ...], count: int
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Yield each arrangement that ``count`` moves into these racks can make, with the indexes that
    were moved."""
    for indexes in combinations(range(len(arrangement)), count):
        for chosen in dict.fromkeys(permutations(racks, count)):
            moves = dict(zip(indexes, chosen, strict=True))
            yield indexes, tuple(moves.get(index, rack) for index, rack in enumerate(arrangement))


@lru_cache(maxsize=8_192)
def judge_racks(rule: Rule, shape: Shape, racks: tuple[str | None, ...]) -> Adherence:
    """Return how well an ensemble in these racks follows the rule. None is an unknown rack.

    The result is UNKNOWN only if it depends on the unknown racks. At best, each unknown rack is
    ideal. At worst, all of them are the rack of another bookie, or one that the rule does not admit
    (the default rack).
    """
    best = _judge(rule, shape, racks)
    if None not in racks or best is Adherence.FAIL:
        return best
    guesses = {DEFAULT_RACK, *(rack for rack in racks if rack is not None)}
    verdicts = {
        _judge(rule, shape, [guess if rack is None else rack for rack in racks])
        for guess in guesses
    }
    return best if verdicts == {best} else Adherence.UNKNOWN


def _judge(rule: Rule, shape: Shape, racks: Arrangement) -> Adherence:
    """Return the adherence, where each unknown rack counts as the best possible one."""
    arrangements = Arrangements(rule, shape)
    fits = rule.fits(size=shape.size, write_quorum=shape.write_quorum)
    if not fits or arrangements.offences(racks):
        return Adherence.FAIL
    return Adherence.STRICT if arrangements.is_ideal(racks) else Adherence.SOFT
