"""Placement: the choice of writable bookies for the entries of a ledger. No I/O.

``rules`` defines the values and the rules (racks, regions, zones, or none), ranks replacements and
judges existing ensembles. ``selection`` is the policy that follows one rule, and chooses among
bookies that are equally good for it. ``topology`` remembers the
rack of each bookie. ``pulsar`` parses the racks and the isolation groups that Apache Pulsar stores.
"""

from ledgers.placement.rules import (
    DEFAULT_RACK,
    Adherence,
    Candidate,
    NoRule,
    RackRule,
    RegionRule,
    Rule,
    ZoneRule,
)
from ledgers.placement.selection import (
    Locate,
    PlacementPolicy,
    RandomPlacement,
    Weighting,
)

__all__ = [
    "DEFAULT_RACK",
    "Adherence",
    "Candidate",
    "Locate",
    "NoRule",
    "PlacementPolicy",
    "RackRule",
    "RandomPlacement",
    "RegionRule",
    "Rule",
    "Weighting",
    "ZoneRule",
]
