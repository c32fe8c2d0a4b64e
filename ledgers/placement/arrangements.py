"""Which rack goes to which place of an ensemble: what a rule says of it, and the search for a good
one.

An arrangement is a sequence of racks, one for each bookie index; ``None`` is a place not filled
yet. Bookies of the same rack are alike here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from msgspec import Struct

from ledgers.placement.rules import Rule
from ledgers.striping import write_set

Arrangement = Sequence[str | None]

STEPS_MAX = 2_000
"""Places tried before a search is given up. One that succeeds rarely takes more than one a
place."""


class Shape(Struct, frozen=True, kw_only=True):
    """E, W and A. ``1 <= ack_quorum <= write_quorum <= size``."""

    size: int
    write_quorum: int
    ack_quorum: int

    def __post_init__(self) -> None:
        assert 1 <= self.ack_quorum <= self.write_quorum <= self.size, self

    def write_sets(self) -> dict[int, tuple[int, ...]]:
        """Every different write set, by the bookie index that it begins with."""
        starts = range(1 if self.write_quorum == self.size else self.size)
        return {start: self._write_set(start) for start in starts}

    def write_sets_with(self, index: int) -> dict[int, tuple[int, ...]]:
        return {start: members for start, members in self.write_sets().items() if index in members}

    def _write_set(self, start: int) -> tuple[int, ...]:
        return write_set(start, ensemble_size=self.size, write_quorum=self.write_quorum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The bookies of a rack that may be chosen: how many, and what they weigh together."""

    count: int
    weight: float

    def less_one(self) -> "Stock":
        return Stock(count=self.count - 1, weight=self.weight * (self.count - 1) / self.count)


class Arrangements:
    """Arrangements of one shape, as one rule sees them."""

    def __init__(self, rule: Rule, shape: Shape) -> None:
        self._rule, self._shape = rule, shape

    # --- What the rule says --------------------------------------------------------------------

    def offences(self, arrangement: Arrangement) -> int:
        """What is wrong: write sets that break the rule, and racks that an enforced one does not
        admit."""
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
        """The write sets of a place that break the rule, by the bookie index they begin with."""
        return frozenset(
            start
            for start, members in self._shape.write_sets_with(index).items()
            if not self._keeps(arrangement, members)
        )

    def crowding(self, arrangement: Arrangement, index: int) -> tuple[int, ...]:
        """How unevenly the write sets of a place are spread, the widest domains first; 0s are
        least.

        For each width the pairs of bookies that share a domain: what may fail together.
        """
        rows: list[tuple[int, ...]] = []
        for members in self._shape.write_sets_with(index).values():
            racks = [rack for at in members if (rack := arrangement[at]) is not None]
            widths = zip(*map(self._rule.domains, racks), strict=True)
            rows.append(tuple(map(_pairs, widths)))
        return tuple(map(sum, zip(*rows, strict=True)))

    def _keeps(self, arrangement: Arrangement, members: Sequence[int]) -> bool:
        racks = [arrangement[index] for index in members]
        return self._rule.keeps(racks, ack_quorum=self._shape.ack_quorum)

    # --- The search for a good one -------------------------------------------------------------

    def search(self, stocks: Mapping[str, Stock], rng: Random) -> list[str] | None:
        """An arrangement that keeps the rule; None where there is none (or none was found in
        time)."""
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
        """Place by place the rack that breaks the rule least. There must be bookies enough."""
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
        """The racks for a place with the number of write sets they would break there, best first.

        Among equally good ones a lot decides, in which a rack weighs what its bookies weigh.
        """
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


def _pairs(domains: Sequence[str]) -> int:
    return sum(count * (count - 1) // 2 for count in Counter(domains).values())
