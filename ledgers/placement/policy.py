"""The input and the results of placement: candidates, verdicts and moves."""

import enum
from dataclasses import dataclass

from msgspec import Struct

from ledgers.model import BookieId

DEFAULT_RACK = "/default-rack"
"""The location that BookKeeper's policies assume for a bookie whose location is unknown."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A bookie that may be chosen, with its location, load and free space."""

    bookie: BookieId
    rack: str = DEFAULT_RACK
    """Location as in BookKeeper: ``/rack``, ``/region/rack`` or ``/zone/upgrade-domain``."""
    load_bytes: int = 0
    """The load to be balanced, such as bytes in flight to the bookie; 0 without balancing."""
    free_bytes: int | None = None
    """Free disk space; None if unknown. Used only in disk-weighted choices."""


class Adherence(enum.Enum):
    """Does an existing ensemble follow the rule (BookKeeper's PlacementPolicyAdherence)?"""

    FAIL = "fail"
    SOFT = "soft"
    """The ensemble meets what the rule requires, but not all that the rule desires."""
    STRICT = "strict"
    UNKNOWN = "unknown"
    """The result depends on the location of a member whose location was never known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The replacement of the bookie at ``index`` of an ensemble by ``target``."""

    index: int
    target: BookieId
