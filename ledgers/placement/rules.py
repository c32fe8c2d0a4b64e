"""The rules that keep the copies of a write set from failing together: racks, regions, zones.

The rules are BookKeeper's (RackawareEnsemblePlacementPolicy, RegionAwareEnsemblePlacementPolicy,
ZoneawareEnsemblePlacementPolicy). Each judges one write set at a time. A write set is a sequence of
locations. ``None`` is a bookie that is not chosen yet; it counts as the best possible location.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ledgers.placement.policy import DEFAULT_RACK

DEFAULT_REGION = "/default-region"
"""The region of a location that is not of the form ``/region/rack``."""

WriteSet = Sequence[str | None]
"""Locations of the bookies that store one entry."""


class Rule(Hashable, Protocol):
    """A rule for every write set of an ensemble. Rules are hashable values."""

    @property
    def is_enforced(self) -> bool:
        """True if a choice fails rather than break the rule."""
        ...

    @property
    def words(self) -> str:
        """The rule in words, for error messages: "at least 2 racks in each write set"."""
        ...

    def admits(self, location: str) -> bool:
        """True if the rule accepts a bookie at this location. Other bookies are chosen last, and
        never if the rule is enforced."""
        ...

    def fits(self, *, size: int, write_quorum: int) -> bool:
        """True if an ensemble of this size and write quorum can follow the rule."""
        ...

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool: ...

    def is_ideal(self, write_set: WriteSet) -> bool:
        """True if a write set that keeps the rule also meets all that the rule desires."""
        ...

    def domains(self, location: str) -> tuple[str, ...]:
        """Return the failure domains of a location, the widest first: ``/region``,
        ``/region/rack``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRule:
    """Accepts any bookies (DefaultEnsemblePlacementPolicy)."""

    is_enforced: ClassVar[bool] = False
    words: ClassVar[str] = "any bookies"

    def admits(self, location: str) -> bool:
        return True

    def fits(self, *, size: int, write_quorum: int) -> bool:
        return True

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        return True

    def is_ideal(self, write_set: WriteSet) -> bool:
        return True

    def domains(self, location: str) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RackRule:
    """Each write set covers at least ``min_racks`` racks, or as many racks as it has bookies.

    If enforced, the rule accepts no bookie of the default rack, because its location is unknown.
    """

    min_racks: int = 2
    """BookKeeper's minNumRacksPerWriteQuorum."""
    is_enforced: bool = False
    """BookKeeper's enforceMinNumRacksPerWriteQuorum."""

    def __post_init__(self) -> None:
        assert self.min_racks >= 1, self

    @property
    def words(self) -> str:
        return f"at least {self.min_racks} racks in each write set"

    def admits(self, location: str) -> bool:
        return not self.is_enforced or location != DEFAULT_RACK

    def fits(self, *, size: int, write_quorum: int) -> bool:
        return True

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        racks = len(set(write_set) - {None}) + write_set.count(None)
        return racks >= min(self.min_racks, len(write_set))

    def is_ideal(self, write_set: WriteSet) -> bool:
        return True

    def domains(self, location: str) -> tuple[str, ...]:
        return (location,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule:
    """Any ``min_regions - 1`` regions of a write set hold fewer bookies than the ack quorum.

    So an acknowledged entry is in at least ``min_regions`` regions, or in as many regions as the
    ack quorum has bookies. Locations are ``/region/rack``.
    """

    min_regions: int = 2
    """BookKeeper's reppMinimumRegionsForDurability. 1: entries may stay in one region."""
    regions: frozenset[str] = frozenset()
    """Allowed regions, as ``/region`` (BookKeeper's reppRegionsToWrite). Empty: all."""
    is_enforced: bool = True
    """BookKeeper's reppEnableDurabilityEnforcementInReplace."""

    def __post_init__(self) -> None:
        assert self.min_regions >= 1, self

    @property
    def words(self) -> str:
        where = f" of {', '.join(sorted(self.regions))}" if self.regions else ""
        return f"each acknowledged entry in at least {self.min_regions} regions{where}"

    def admits(self, location: str) -> bool:
        return not self.regions or _region(location) in self.regions

    def fits(self, *, size: int, write_quorum: int) -> bool:
        return True

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        counts = Counter(_region(location) for location in write_set if location is not None)
        unknown = write_set.count(None)
        fullest = sorted((*counts.values(), *(1,) * unknown), reverse=True)
        return sum(fullest[: min(self.min_regions, ack_quorum) - 1]) < ack_quorum

    def is_ideal(self, write_set: WriteSet) -> bool:
        return True

    def domains(self, location: str) -> tuple[str, ...]:
        return _region(location), location


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneRule:
    """Each write set covers at least ``min_zones`` zones, and if possible ``desired_zones``.

    Bookies of a write set that share a zone are in at least two upgrade domains of it. Locations
    are ``/zone/upgrade-domain``. A bookie whose location has another form breaks the rule.
    """

    min_zones: int = 2
    """BookKeeper's minNumZonesPerWriteQuorum."""
    desired_zones: int = 3
    """BookKeeper's desiredNumZonesPerWriteQuorum."""
    is_enforced: bool = True
    """BookKeeper's enforceStrictZoneawarePlacement."""

    def __post_init__(self) -> None:
        assert 1 <= self.min_zones <= self.desired_zones, self

    @property
    def words(self) -> str:
        return (
            f"at least {self.min_zones} zones in each write set, and two upgrade domains of a zone "
            "that holds several copies; E a multiple of W, and W greater than the number of zones"
        )

    def admits(self, location: str) -> bool:
        return _upper(location) is not None

    def fits(self, *, size: int, write_quorum: int) -> bool:
        return size % write_quorum == 0 and write_quorum > self.min_zones

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        known = [location for location in write_set if location is not None]
        if not all(map(self.admits, known)):
            return False
        zones = Counter(map(_upper, known))
        missing = max(0, min(self.min_zones, len(write_set)) - len(zones))
        lone = Counter(map(_upper, set(known)))  # number of upgrade domains by zone
        # Zones with several bookies in a single upgrade domain. Each needs one more bookie.
        crowded = sum(zones[zone] > 1 and count == 1 for zone, count in lone.items())
        return missing + crowded <= write_set.count(None)

    def is_ideal(self, write_set: WriteSet) -> bool:
        zones = {_upper(location) for location in write_set if location is not None}
        return len(zones) >= min(self.desired_zones, len(write_set))

    def domains(self, location: str) -> tuple[str, ...]:
        return _upper(location) or location, location


def _region(location: str) -> str:
    return _upper(location) or DEFAULT_REGION


def _upper(location: str) -> str | None:
    """Return ``/a`` for ``/a/b``; None for a location of any other form."""
    parts = location.split("/")
    return f"/{parts[1]}" if len(parts) == 3 and not parts[0] and all(parts[1:]) else None
