"""Placement: the choice of writable bookies for the entries of a ledger. No I/O.

``policy`` defines the interface of placement policies. ``rules`` defines the rules: racks, regions,
zones, or none. ``ruled`` is the policy that follows one rule.

``arrangements`` applies a rule to an ensemble and searches for good ensembles. ``verdicts`` ranks
replacements and judges existing ensembles. ``drawing`` chooses among bookies that are equally good
for the rule. ``racks`` remembers the location of each bookie.
"""

from ledgers.placement.drawing import Weighting
from ledgers.placement.policy import (
    DEFAULT_RACK,
    Adherence,
    Candidate,
    Move,
    PlacementPolicy,
)
from ledgers.placement.ruled import (
    Locate,
    LocateIfKnown,
    RandomPlacement,
    RuledPlacement,
)
from ledgers.placement.rules import NoRule, RackRule, RegionRule, Rule, ZoneRule

__all__ = [
    "DEFAULT_RACK",
    "Adherence",
    "Candidate",
    "Locate",
    "LocateIfKnown",
    "Move",
    "NoRule",
    "PlacementPolicy",
    "RackRule",
    "RandomPlacement",
    "RegionRule",
    "Rule",
    "RuledPlacement",
    "Weighting",
    "ZoneRule",
]
