"""Which bookies are to hold a ledger's entries: pure choices among the writable ones.

``policy`` is the interface: candidates, what a policy is asked, what it may say of an ensemble that
stands. ``rules`` are what parts the policies (racks, regions, zones, or none); ``ruled`` is the
policy that follows one. Beneath: ``arrangements`` and ``verdicts`` hold a rule against an ensemble,
``drawing`` chooses among equals, ``racks`` knows where the bookies are, and were.
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
