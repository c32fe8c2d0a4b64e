"""What a rule says of racks: which of them are good for a place, and of an ensemble that stands.

Pure, and remembered: of thousands of ledgers most are alike, and each is asked about more than once.
"""

from dataclasses import dataclass
from functools import lru_cache

from ledgers.placement.layouts import Layouts, Shape, replaced
from ledgers.placement.policy import Adherence
from ledgers.placement.rules import Rule


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
    """``others``: the racks of an ensemble without its bookie ``index``. ``racks``: of the candidates.

    A write set that breaks the rule whoever comes speaks neither for nor against anybody.
    """
    layouts = Layouts(rule, shape)
    admitted = tuple(filter(rule.admits, racks))
    hopeless = layouts.broken(others, index)
    broken_counts = {
        rack: len(layouts.broken(replaced(others, index, rack), index) - hopeless)
        for rack in admitted or racks
    }
    fewest = min(broken_counts.values())
    keeping = tuple(rack for rack, count in broken_counts.items() if count == fewest)
    crowding = {rack: layouts.crowding(replaced(others, index, rack), index) for rack in keeping}
    least = min(crowding.values())
    return Ranking(
        keeping=keeping,
        spreading=tuple(rack for rack in keeping if crowding[rack] == least),
        is_broken=fewest > 0 or not admitted,
    )


@lru_cache(maxsize=8_192)
def judge_racks(rule: Rule, shape: Shape, racks: tuple[str, ...]) -> Adherence:
    """Of an ensemble in these racks."""
    layouts = Layouts(rule, shape)
    is_kept = (
        rule.fits(size=shape.size, write_quorum=shape.write_quorum)
        and (not rule.is_enforced or all(map(rule.admits, racks)))
        and layouts.is_kept(racks)
    )
    if not is_kept:
        return Adherence.FAIL
    return Adherence.STRICT if layouts.is_ideal(racks) else Adherence.SOFT
