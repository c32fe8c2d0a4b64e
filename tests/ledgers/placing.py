"""Helpers for the tests of placement by rules."""

from collections.abc import Mapping, Sequence
from random import Random

from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK, PlacementPolicy, RackRule, Rule

SEEDS = range(60)
ENFORCED = RackRule(is_enforced=True)


def named(racks: Sequence[str]) -> dict[BookieId, str]:
    """Return a bookie for each rack: ``0``, ``1``, ..."""
    return {BookieId(str(number)): rack for number, rack in enumerate(racks)}


def policy_of(
    rule: Rule, racks: Mapping[BookieId, str], *, seed: int = 0, local: str | None = None
) -> PlacementPolicy:
    return PlacementPolicy(
        rule,
        Random(seed),
        locate=lambda bookie: racks.get(bookie, DEFAULT_RACK),
        local=None if local is None else BookieId(local),
    )
