"""What a write set must be like for its copies not to fail together: racks, regions, zones.

The rules are BookKeeper's (RackawareEnsemblePlacementPolicy, RegionAwareEnsemblePlacementPolicy,
ZoneawareEnsemblePlacementPolicy), each told of one write set at a time. A write set is a sequence
of locations; ``None`` stands for a bookie that is not chosen yet, and counts as the best it can be.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ledgers.placement.policy import DEFAULT_RACK

DEFAULT_REGION = "/default-region"
"""The region of a location that is not of the form ``/region/rack``."""

WriteSet = Sequence[str | None]
"""Locations of the bookies that one entry goes to."""


class Rule(Hashable, Protocol):
    """A rule about every write set of an ensemble: a value."""

    @property
    def is_enforced(self) -> bool:
        """Whether no bookie is better than one that breaks the rule."""
        ...

    @property
    def words(self) -> str:
        """The rule, for an error's message: "at least 2 racks in each write set"."""
        ...

    def admits(self, location: str) -> bool:
        """Whether a bookie there is wanted at all; one that is not comes last, or not at all."""
        ...

    def fits(self, *, size: int, write_quorum: int) -> bool:
        """Whether an ensemble of this shape can be all that the rule wishes."""
        ...

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool: ...

    def is_ideal(self, write_set: WriteSet) -> bool:
        """Of a write set that keeps the rule: whether it is also all that the rule wishes."""
        ...

    def domains(self, location: str) -> tuple[str, ...]:
        """What fails together with a bookie there, the widest first: ``/region``,
        ``/region/rack``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRule:
    """Any bookies will do (DefaultEnsemblePlacementPolicy)."""

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
    """Each write set lies in at least ``min_racks`` racks, or in as many as it has bookies.

    Enforced, it admits no bookie of the default rack, of which nobody knows where it is.
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
    """No ``min_regions - 1`` regions of a write set can acknowledge an entry among themselves.

    So an acknowledged entry is in ``min_regions`` regions at least, or in as many as its ack quorum
    has bookies. Locations are ``/region/rack``.
    """

    min_regions: int = 2
    """BookKeeper's reppMinimumRegionsForDurability. 1: entries may stay in one region."""
    regions: frozenset[str] = frozenset()
    """Where copies may be, as ``/region`` (BookKeeper's reppRegionsToWrite). Empty: anywhere."""
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
    """Each write set lies in at least ``min_zones`` zones, and if possible in ``desired_zones``.

    Those of its bookies that share a zone are in two upgrade domains of it at least. Locations are
    ``/zone/upgrade-domain``; a bookie whose location is of another form keeps no rule.
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
        lone = Counter(map(_upper, set(known)))  # zones that are in one upgrade domain only ...
        crowded = sum(zones[zone] > 1 and count == 1 for zone, count in lone.items())
        return missing + crowded <= write_set.count(None)  # ... need one more bookie each

    def is_ideal(self, write_set: WriteSet) -> bool:
        zones = {_upper(location) for location in write_set if location is not None}
        return len(zones) >= min(self.desired_zones, len(write_set))

    def domains(self, location: str) -> tuple[str, ...]:
        return _upper(location) or location, location


def _region(location: str) -> str:
    return _upper(location) or DEFAULT_REGION


def _upper(location: str) -> str | None:
    """``/a`` of ``/a/b``; None for a location of any other form."""
    parts = location.split("/")
    return f"/{parts[1]}" if len(parts) == 3 and not parts[0] and all(parts[1:]) else None
