"""No choice breaks a rule that could be kept, compared with every possible choice in small
clusters.

The rules are written down here a second time, on purpose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from random import Random

import pytest

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement import (
    DEFAULT_RACK,
    Candidate,
    PlacementPolicy,
    RackRule,
    RegionRule,
    Rule,
    ZoneRule,
)

RACKS = ("/a", "/b", "/c", DEFAULT_RACK)
PATHS = ("/x/1", "/x/2", "/y/1", "/y/2", "/z/1", "/nowhere")
SEEDS = range(200)


def racks_are_kept(rule: RackRule, racks: Sequence[str], ack_quorum: int) -> bool:
    has_nowhere = rule.is_enforced and DEFAULT_RACK in racks
    return not has_nowhere and len(set(racks)) >= min(rule.min_racks, len(racks))


def regions_are_kept(rule: RegionRule, racks: Sequence[str], ack_quorum: int) -> bool:
    regions = [rack.split("/")[1] if rack.count("/") == 2 else "nowhere" for rack in racks]
    few = min(rule.min_regions, ack_quorum) - 1
    return all(
        sum(region in some for region in regions) < ack_quorum
        for some in combinations(set(regions), min(few, len(set(regions))))
    )


def zones_are_kept(rule: ZoneRule, racks: Sequence[str], ack_quorum: int) -> bool:
    if any(rack.count("/") != 2 for rack in racks):
        return False
    in_zone = {rack[:2]: [each for each in racks if each[:2] == rack[:2]] for rack in racks}
    has_domains = all(len(each) == 1 or len(set(each)) > 1 for each in in_zone.values())
    return has_domains and len(in_zone) >= min(rule.min_zones, len(racks))


@dataclass(frozen=True)
class Case:
    """A small cluster, a rule, and a shape, drawn from a seed."""

    rule: Rule
    racks: tuple[str, ...]
    size: int
    write_quorum: int
    ack_quorum: int
    is_write_set_good: Callable[[Sequence[str]], bool]

    @classmethod
    def drawn(cls, rng: Random) -> "Case":
        size = rng.randint(1, 4)
        write_quorum = rng.randint(1, size)
        ack_quorum = rng.randint(1, write_quorum)
        is_enforced = rng.random() < 0.5
        match rng.choice(("racks", "regions", "zones")):
            case "racks":
                rack = RackRule(min_racks=rng.randint(1, 3), is_enforced=is_enforced)
                rule: Rule = rack
                is_good = lambda racks: racks_are_kept(rack, racks, ack_quorum)  # noqa: E731
            case "regions":
                region = RegionRule(min_regions=rng.randint(1, 3), is_enforced=is_enforced)
                rule = region
                is_good = lambda racks: regions_are_kept(region, racks, ack_quorum)  # noqa: E731
            case _:
                zone = ZoneRule(min_zones=rng.randint(1, 3), is_enforced=is_enforced)
                rule = zone
                is_good = lambda racks: zones_are_kept(zone, racks, ack_quorum)  # noqa: E731
        locations = RACKS if isinstance(rule, RackRule) else PATHS
        racks = tuple(rng.choice(locations) for _ in range(rng.randint(size, 6)))
        return cls(rule, racks, size, write_quorum, ack_quorum, is_good)

    @property
    def bookies(self) -> dict[BookieId, str]:
        return {BookieId(f"b{number}"): rack for number, rack in enumerate(self.racks)}

    def is_good(self, racks: Sequence[str], *, around: int | None = None) -> bool:
        """Return True if every write set obeys the rule, or every one that includes the place
        ``around``."""
        for start in range(len(racks)):
            members = [(start + offset) % len(racks) for offset in range(self.write_quorum)]
            if around is not None and around not in members:
                continue
            if not self.is_write_set_good([racks[member] for member in members]):
                return False
        return True

    @property
    def can_be_good(self) -> bool:
        return any(self.is_good(racks) for racks in permutations(self.racks, self.size))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_ensemble_adheres_to_a_rule_if_possible(seed: int) -> None:
    rng = Random(seed)
    case = Case.drawn(rng)
    bookies = case.bookies
    candidates = [Candidate(bookie=bookie, rack=rack) for bookie, rack in bookies.items()]
    fits = case.rule.fits(size=case.size, write_quorum=case.write_quorum)
    must_fail = case.rule.is_enforced and not (fits and case.can_be_good)

    try:
        chosen = PlacementPolicy(case.rule, rng).choose_ensemble(
            candidates, case.size, write_quorum=case.write_quorum, ack_quorum=case.ack_quorum
        )
    except NotEnoughBookiesError:
        assert must_fail, case
        return

    assert not must_fail, case
    assert len(set(chosen)) == case.size
    assert case.is_good([bookies[each] for each in chosen]) == case.can_be_good, case


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replacement_adheres_to_a_rule_if_possible(seed: int) -> None:
    rng = Random(seed)
    case = Case.drawn(rng)
    bookies = case.bookies
    ensemble = list(bookies)[: case.size]
    index = rng.randrange(case.size)
    candidates = {bookie: rack for bookie, rack in bookies.items() if bookie not in ensemble}

    def is_good(taker: BookieId) -> bool:
        racks = [bookies[each] for each in ensemble]
        racks[index] = candidates[taker]
        return case.is_good(racks, around=index)

    try:
        taker = PlacementPolicy(case.rule, rng, locate=bookies.__getitem__).choose_replacement(
            [Candidate(bookie=bookie, rack=rack) for bookie, rack in candidates.items()],
            ensemble=ensemble,
            index=index,
            write_quorum=case.write_quorum,
            ack_quorum=case.ack_quorum,
        )
    except NotEnoughBookiesError:
        assert case.rule.is_enforced or not candidates, case
        assert not any(map(is_good, candidates)), case
        return

    assert is_good(taker) or not any(map(is_good, candidates)), case
