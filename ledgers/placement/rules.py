"""The rules that keep the copies of a write set from failing together: racks, regions, zones.

The rules are BookKeeper's (RackawareEnsemblePlacementPolicy, RegionAwareEnsemblePlacementPolicy,
ZoneawareEnsemblePlacementPolicy). Each ``Rule`` judges one write set at a time. A write set is a
sequence of locations. ``None`` is a bookie that is not chosen yet; it counts as the best possible
location.

``Arrangements`` searches for good ensembles. An arrangement is a sequence of racks, one for each
bookie index. Bookies of the same rack are equivalent here; ``selection`` chooses among them.

``rank_racks`` and ``judge_racks`` are the judgements: which racks suit a replacement, and whether
an existing ensemble follows the rule. All functions are pure and cached, because most of thousands
of ledgers are alike, and each is judged several times.
"""

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from math import comb, perm
from random import Random

from msgspec import Struct

from ledgers.model import BookieId, write_set

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


DEFAULT_REGION = "/default-region"
"""The region of a location that is not of the form ``/region/rack``."""

WriteSet = Sequence[str | None]
"""Locations of the bookies that store one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for every write set of an ensemble. Rules are hashable values. The base class accepts
    any bookies (DefaultEnsemblePlacementPolicy)."""

    is_enforced: bool = False
    """True if a choice fails rather than break the rule."""

    @property
    def words(self) -> str:
        """The rule in words, for error messages: "at least 2 racks in each write set"."""
        return "any bookies"

    def admits(self, location: str) -> bool:
        """True if the rule accepts a bookie at this location. A bookie elsewhere is chosen only if
        no accepted bookie is left, and never if the rule is enforced."""
        return True

    def fits(self, *, size: int, write_quorum: int) -> bool:
        """True if an ensemble of this size and write quorum can follow the rule."""
        return True

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        return True

    def is_ideal(self, write_set: WriteSet) -> bool:
        """True if a write set that keeps the rule also meets all that the rule desires."""
        return True

    def domains(self, location: str) -> tuple[str, ...]:
        """Return the failure domains of a location, the widest first: region, rack."""
        return ()


class NoRule(Rule):
    """Accepts any bookies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RackRule(Rule):
    """Each write set covers at least ``min_racks`` racks, or as many racks as it has bookies. If
    enforced, the rule accepts no bookie of the default rack, because its location is unknown."""

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

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        racks = len(set(write_set) - {None}) + write_set.count(None)
        return racks >= min(self.min_racks, len(write_set))

    def domains(self, location: str) -> tuple[str, ...]:
        return (location,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule(Rule):
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

    def keeps(self, write_set: WriteSet, *, ack_quorum: int) -> bool:
        counts = Counter(_region(location) for location in write_set if location is not None)
        unknown = write_set.count(None)
        fullest = sorted((*counts.values(), *(1,) * unknown), reverse=True)
        return sum(fullest[: min(self.min_regions, ack_quorum) - 1]) < ack_quorum

    def domains(self, location: str) -> tuple[str, ...]:
        return _region(location), location


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneRule(Rule):
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


Arrangement = Sequence[str | None]

STEPS_MAX = 2_000
"""Racks tried before a search is given up. A success rarely takes more than one an index."""


class Shape(Struct, frozen=True, kw_only=True):
    """E, W and A of a ledger. ``1 <= write_quorum <= size``. An ack quorum below 1 counts as 1."""

    size: int
    write_quorum: int
    ack_quorum: int

    def __post_init__(self) -> None:
        assert max(1, self.ack_quorum) <= self.write_quorum <= self.size, self

    def write_sets(self) -> dict[int, tuple[int, ...]]:
        """Return every distinct write set, by its first bookie index."""
        starts = range(1 if self.write_quorum == self.size else self.size)
        return {start: self._write_set(start) for start in starts}

    def write_sets_with(self, index: int) -> dict[int, tuple[int, ...]]:
        """Return the write sets that contain ``index``, by their first bookie index."""
        return {start: members for start, members in self.write_sets().items() if index in members}

    def _write_set(self, start: int) -> tuple[int, ...]:
        return write_set(start, ensemble_size=self.size, write_quorum=self.write_quorum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The number of bookies of a rack that may be chosen, and their total weight."""

    count: int
    weight: float

    def less_one(self) -> "Stock":
        return Stock(count=self.count - 1, weight=self.weight * (self.count - 1) / self.count)


class Arrangements:
    """Judges and finds arrangements of one shape by one rule."""

    def __init__(self, rule: Rule, shape: Shape) -> None:
        self._rule, self._shape = rule, shape

    # --- Judging by the rule -------------------------------------------------------------------

    def offences(self, arrangement: Arrangement) -> int:
        """Return the number of write sets that break the rule. If the rule is enforced, add the
        number of places in a rack that it does not admit."""
        broken = sum(
            not self._keeps(arrangement, each) for each in self._shape.write_sets().values()
        )
        if not self._rule.is_enforced:
            return broken
        return broken + sum(
            rack is not None and not self._rule.admits(rack) for rack in arrangement
        )

    def is_ideal(self, arrangement: Arrangement) -> bool:
        return all(
            self._rule.is_ideal([arrangement[index] for index in members])
            for members in self._shape.write_sets().values()
        )

    def broken(self, arrangement: Arrangement, index: int) -> frozenset[int]:
        """Return the first index of each write set with ``index`` that breaks the rule."""
        return frozenset(
            start
            for start, members in self._shape.write_sets_with(index).items()
            if not self._keeps(arrangement, members)
        )

    def crowding(self, arrangement: Arrangement, index: int) -> tuple[int, ...]:
        """Return how many pairs of bookies share a failure domain in the write sets with ``index``,
        for each width of domain, the widest first. Lower is better."""
        rows: list[tuple[int, ...]] = []
        for members in self._shape.write_sets_with(index).values():
            racks = [rack for at in members if (rack := arrangement[at]) is not None]
            widths = zip(*map(self._rule.domains, racks), strict=True)
            counts = [Counter(domains).values() for domains in widths]
            rows.append(tuple([sum(n * (n - 1) // 2 for n in each) for each in counts]))
        return tuple(map(sum, zip(*rows, strict=True)))

    def _keeps(self, arrangement: Arrangement, members: Sequence[int]) -> bool:
        racks = [arrangement[index] for index in members]
        return self._rule.keeps(racks, ack_quorum=max(1, self._shape.ack_quorum))

    # --- Searching -----------------------------------------------------------------------------

    def search(self, stocks: Mapping[str, Stock], rng: Random) -> list[str] | None:
        """Return an arrangement that keeps the rule; None if ``STEPS_MAX`` steps find none."""
        left = dict(stocks)
        places: list[str | None] = [None] * self._shape.size
        steps = iter(range(STEPS_MAX))

        def fill(index: int) -> bool:
            if index == len(places):
                return True
            for broken_count, rack in self._tries(places, index, left, rng):
                if broken_count or next(steps, None) is None:
                    return False
                before = left[rack]
                places[index], left[rack] = rack, before.less_one()
                if fill(index + 1):
                    return True
                places[index], left[rack] = None, before
            return False

        return [rack for rack in places if rack is not None] if fill(0) else None

    def makeshift(self, stocks: Mapping[str, Stock], rng: Random) -> list[str]:
        """Return an arrangement that gives each index in turn the rack that breaks the rule least.
        The stocks must hold at least as many bookies as the ensemble."""
        left = dict(stocks)
        places: list[str | None] = [None] * self._shape.size
        chosen: list[str] = []
        for index in range(len(places)):
            _, rack = self._tries(places, index, left, rng)[0]
            places[index], left[rack] = rack, left[rack].less_one()
            chosen.append(rack)
        return chosen

    def _tries(
        self, places: Arrangement, index: int, left: Mapping[str, Stock], rng: Random
    ) -> list[tuple[int, str]]:
        """Return the racks for ``index``, best first, each with the number of write sets that would
        break the rule. Equally good racks are in random order, weighted by their bookies."""
        tries = []
        for rack in sorted(rack for rack, stock in left.items() if stock.count):
            arrangement = replaced(places, index, rack)
            merit = (
                not self._rule.admits(rack),
                len(self.broken(arrangement, index)),
                self.crowding(arrangement, index),
                rng.expovariate(left[rack].weight),
            )
            tries.append((merit, rack))
        return [(merit[1], rack) for merit, rack in sorted(tries)]


def replaced(arrangement: Arrangement, index: int, rack: str | None) -> Arrangement:
    return [*arrangement[:index], rack, *arrangement[index + 1 :]]


MOVES_MAX = 2
"""Copies that may move together if no single move helps, as for "/a /a /b /b" with W = 2."""
MOVES_TRIED_MAX = 5_000
"""Limit on the arrangements tried for several moves. They are only needed if racks are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best racks for one bookie index. ``spreading`` is a subset of ``keeping``."""

    keeping: tuple[str, ...]
    """Racks that break the rule for the fewest write sets."""
    spreading: tuple[str, ...]
    """The racks in ``keeping`` that spread the copies most evenly."""
    is_broken: bool
    """True if even the racks in ``keeping`` break the rule."""


@lru_cache(maxsize=8_192)
def rank_racks(
    rule: Rule, shape: Shape, others: tuple[str | None, ...], index: int, racks: tuple[str, ...]
) -> Ranking:
    """Return the best racks for a replacement at ``index``. ``others``: the racks of the ensemble,
    None at ``index``. ``racks``: those of the candidates."""
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
    """Return the equally good arrangements, of fewest offences and most even spread, that the
    fewest moves can make of a failing one. ``racks``: of the candidates, each once per candidate,
    ``MOVES_MAX`` times at most."""
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
    """Yield each arrangement that ``count`` moves can make, with the indexes moved."""
    for indexes in combinations(range(len(arrangement)), count):
        for chosen in dict.fromkeys(permutations(racks, count)):
            moves = dict(zip(indexes, chosen, strict=True))
            yield indexes, tuple(moves.get(index, rack) for index, rack in enumerate(arrangement))


@lru_cache(maxsize=8_192)
def judge_racks(rule: Rule, shape: Shape, racks: tuple[str | None, ...]) -> Adherence:
    """Return how well an ensemble in these racks follows the rule. None is an unknown rack: ideal
    at best; at worst the rack of another bookie, or the default rack. UNKNOWN if that decides."""
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
    """Return the adherence, where each unknown rack counts as the best possible one."""
    arrangements = Arrangements(rule, shape)
    fits = rule.fits(size=shape.size, write_quorum=shape.write_quorum)
    if not fits or arrangements.offences(racks):
        return Adherence.FAIL
    return Adherence.STRICT if arrangements.is_ideal(racks) else Adherence.SOFT
