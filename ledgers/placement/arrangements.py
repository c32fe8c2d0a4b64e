"""The racks of an ensemble in order: how a rule judges them, and the search for good ones.

An arrangement is a sequence of racks, one for each bookie index. ``None`` is an index without a
bookie yet. Bookies of the same rack are equivalent here.
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
"""Racks tried before a search is given up. A successful search rarely takes more than one for each
index."""


class Shape(Struct, frozen=True, kw_only=True):
    """Ensemble size (E), write quorum (W) and ack quorum (A) of a ledger.

    ``1 <= ack_quorum <= write_quorum <= size``."""

    size: int
    write_quorum: int
    ack_quorum: int

    def __post_init__(self) -> None:
        assert 1 <= self.ack_quorum <= self.write_quorum <= self.size, self

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
        """Return the write sets that contain ``index`` and break the rule, as first indexes."""
        return frozenset(
            start
            for start, members in self._shape.write_sets_with(index).items()
            if not self._keeps(arrangement, members)
        )

    def crowding(self, arrangement: Arrangement, index: int) -> tuple[int, ...]:
        """Return how many pairs of bookies may fail together in the write sets with ``index``.

        There is one number for each width of failure domain, the widest first: the pairs of bookies
        that share a domain. Lower is better.
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

    # --- Searching -----------------------------------------------------------------------------

    def search(self, stocks: Mapping[str, Stock], rng: Random) -> list[str] | None:
        """Return an arrangement that keeps the rule; None if there is none, or none was found in
        ``STEPS_MAX`` steps."""
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

        The stocks must hold at least as many bookies as the ensemble.
        """
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
        """Return the racks for ``index``, best first, each with the number of write sets that
        would break the rule.

        Equally good racks are in random order, weighted by the weight of their bookies.
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
