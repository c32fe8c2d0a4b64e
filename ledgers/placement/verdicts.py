"""What a rule says of racks: which of them are good for a place, and of an ensemble that stands.

Pure, and remembered: of thousands of ledgers most are alike, and each is asked about more than
once.
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
"""Copies that change places together, where one alone makes nothing better: "/a /a /b /b" with W
2."""
MOVES_TRIED_MAX = 5_000
"""Arrangements looked at for it. Two moves are needed only where racks are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The racks for a place, in order. ``spreading`` are among ``keeping``."""

    keeping: tuple[str, ...]
    """Those that break the rule for the fewest write sets."""
    spreading: tuple[str, ...]
    """Those of them that spread the copies furthest."""
    is_broken: bool
    """Whether even they break it."""


@lru_cache(maxsize=8_192)
def rank_racks(
    rule: Rule,
    shape: Shape,
    others: tuple[str | None, ...],
    index: int,
    racks: tuple[str, ...],
) -> Ranking:
    """``others``: the racks of an ensemble without its bookie ``index``. ``racks``: of the
    candidates.

    A write set that breaks the rule whoever comes speaks neither for nor against anybody.
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
    """What the fewest moves can make of one that fails, all of it equally good.

    Fewest offences count first, then the most even spread; nothing where it gets no better.
    ``racks``: of the bookies that may come in, a rack as often as it has some, ``MOVES_MAX`` times
    at most.
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
    """All that so many moves into these racks can make of it, each with the indexes that were
    moved."""
    for indexes in combinations(range(len(arrangement)), count):
        for chosen in dict.fromkeys(permutations(racks, count)):
            moves = dict(zip(indexes, chosen, strict=True))
            yield indexes, tuple(moves.get(index, rack) for index, rack in enumerate(arrangement))


@lru_cache(maxsize=8_192)
def judge_racks(rule: Rule, shape: Shape, racks: tuple[str | None, ...]) -> Adherence:
    """Of an ensemble in these racks; None where nobody knows.

    A verdict is given if it is the same wherever those bookies may be. The most that can go against
    them is that they share the rack of one of the others, or are in none that the rule admits.
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
    """Where a rack is not known it is taken for the best one."""
    arrangements = Arrangements(rule, shape)
    fits = rule.fits(size=shape.size, write_quorum=shape.write_quorum)
    if not fits or arrangements.offences(racks):
        return Adherence.FAIL
    return Adherence.STRICT if arrangements.is_ideal(racks) else Adherence.SOFT
