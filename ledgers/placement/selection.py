"""The placement policy: it follows one rule, and chooses among the bookies that keep it.

A choice breaks no rule that can be kept, contains no bookie twice, and no excluded bookie. If an
enforced rule cannot be kept, the choice fails. If another rule cannot be kept, the bookie that
breaks it for the fewest write sets is chosen. Among bookies that are equal to the rule, load, free
space and locality decide, then chance.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from statistics import median

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId
from ledgers.placement.rules import (
    DEFAULT_RACK,
    MOVES_MAX,
    Adherence,
    Arrangements,
    Candidate,
    Move,
    NoRule,
    Rule,
    Shape,
    Stock,
    better_arrangements,
    judge_racks,
    rank_racks,
    replaced,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Choices weighted by free disk space (BookKeeper's diskWeightBasedPlacementEnabled)."""

    multiple_max: float = 3.0
    """Limit on a bookie's weight, in multiples of the median, so that a new empty bookie does not
    get everything (bookieMaxMultipleForWeightBasedPlacement). 0: no limit."""

    def weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """Return each candidate's weight, above 0; the median if its free space is unknown."""
        known = [each.free_bytes for each in candidates if each.free_bytes is not None]
        middle = float(median(known)) if known else 1.0
        least = float(min((free for free in known if free > 0), default=1))  # for full bookies
        most = self.multiple_max * middle or math.inf

        def weight(free_bytes: int | None) -> float:
            free = middle if free_bytes is None else float(free_bytes)
            return min(free or least, most)

        return {each.bookie: weight(each.free_bytes) for each in candidates}


Locate = Callable[[BookieId], str]
"""Returns the location of a bookie; for an absent bookie, the last known location."""
LocateIfKnown = Callable[[BookieId], str | None]
"""Like ``Locate``; None if never known. Choices then assume the default rack."""

_Pools = dict[str, list[Candidate]]
"""Candidates by rack."""

FAIR_SHARES_MAX = 3
"""A bookie that spreads copies over more racks is preferred, but gets at most about this many times
its random share. Else the last bookie of a rack would replace all the others."""


class PlacementPolicy:
    """Chooses among writable bookies by one rule, or raises NotEnoughBookiesError. ``excluded`` may
    name any bookies. ``ack_quorum`` None: the write quorum. It also knows where absent members
    are."""

    def __init__(
        self,
        rule: Rule,
        rng: Random,
        *,
        locate: LocateIfKnown = lambda bookie: DEFAULT_RACK,
        local: BookieId | None = None,
        weighting: Weighting | None = None,
    ) -> None:
        """``local``: the bookie preferred among equally good ones for a replacement."""
        self._rule, self._rng, self._locate = rule, rng, locate
        self._local, self._weighting = local, weighting

    # --- New ensembles -------------------------------------------------------------------------

    def choose_ensemble(
        self,
        candidates: Collection[Candidate],
        size: int,
        *,
        write_quorum: int,
        ack_quorum: int | None = None,
        excluded: Collection[BookieId] = (),
    ) -> tuple[BookieId, ...]:
        """Return the bookies of a new ensemble."""
        allowed = _allowed(candidates, excluded)
        if len(allowed) < size:
            raise NotEnoughBookiesError(
                "too few writable bookies for an ensemble", wanted=size, allowed=len(allowed)
            )
        shape = Shape(
            size=size,
            write_quorum=write_quorum,
            ack_quorum=write_quorum if ack_quorum is None else ack_quorum,
        )
        weights = self._weights(allowed)
        pools = _by_rack(allowed)
        stocks = {
            rack: Stock(count=len(pool), weight=sum(weights.get(each.bookie, 1.0) for each in pool))
            for rack, pool in pools.items()
        }
        admitted = {rack: stock for rack, stock in stocks.items() if self._rule.admits(rack)}
        arrangements = Arrangements(self._rule, shape)
        racks = None
        if not self._rule.is_enforced or self._rule.fits(size=size, write_quorum=write_quorum):
            racks = arrangements.search(admitted, self._rng)
        if racks is None and self._rule.is_enforced:
            raise self._no_bookie(
                "no ensemble can be made of the writable bookies without breaking", pools
            )
        chosen: list[BookieId] = []
        for rack in racks or arrangements.makeshift(stocks, self._rng):
            taken = self._draw(pools[rack], weights, prefers_local=False)
            pools[rack].remove(taken)
            chosen.append(taken.bookie)
        return tuple(chosen)

    # --- Replacements --------------------------------------------------------------------------

    def choose_replacement(
        self,
        candidates: Collection[Candidate],
        *,
        ensemble: Sequence[BookieId],
        index: int,
        write_quorum: int,
        ack_quorum: int | None = None,
        excluded: Collection[BookieId] = (),
    ) -> BookieId:
        """Return the bookie to replace the one at ``index``; never a member of ``ensemble``."""
        allowed = _allowed(candidates, {*excluded, *ensemble})
        if not allowed:
            raise NotEnoughBookiesError(
                "no writable bookie is left to take over", candidates=len(candidates)
            )
        shape = Shape(
            size=len(ensemble),
            write_quorum=write_quorum,
            ack_quorum=write_quorum if ack_quorum is None else ack_quorum,
        )
        pools = _by_rack(allowed)
        others = replaced(self._racks(ensemble, candidates), index, None)
        ranking = rank_racks(self._rule, shape, tuple(others), index, tuple(pools))
        if ranking.is_broken and self._rule.is_enforced:
            raise self._no_bookie(
                "none of the writable bookies may take over without breaking", pools
            )
        spreading = [each for rack in ranking.spreading for each in pools[rack]]
        best = keeping = [each for rack in ranking.keeping for each in pools[rack]]
        # Few spreading candidates are preferred only in part of the choices, and only while their
        # load is at most ``FAIR_SHARES_MAX`` times the average.
        if self._rng.random() * len(keeping) < FAIR_SHARES_MAX * len(spreading):
            average_bytes = sum([each.load_bytes for each in keeping]) / len(keeping)
            most_bytes = FAIR_SHARES_MAX * average_bytes
            best = [each for each in spreading if each.load_bytes <= most_bytes] or keeping
        return self._draw(best, self._weights(allowed)).bookie

    def _no_bookie(self, what: str, pools: _Pools) -> NotEnoughBookiesError:
        return NotEnoughBookiesError(
            f"{what} the rule: {self._rule.words}",
            allowed=sum(map(len, pools.values())),
            racks=len(pools),
        )

    # --- Existing ensembles --------------------------------------------------------------------

    def choose_moves(
        self,
        candidates: Collection[Candidate],
        *,
        ensemble: Sequence[BookieId],
        write_quorum: int,
        ack_quorum: int,
        excluded: Collection[BookieId] = (),
    ) -> tuple[Move, ...]:
        """Return replacements that bring an ensemble closer to the rule: one move, or as many as
        must be made together. Raises NotEnoughBookiesError also if no move improves it."""
        # A move to an unknown location cannot be shown to be an improvement.
        known = [each for each in candidates if each.rack != DEFAULT_RACK]
        allowed = _allowed(known, {*excluded, *ensemble})
        pools = _by_rack(allowed)
        shape = Shape(size=len(ensemble), write_quorum=write_quorum, ack_quorum=ack_quorum)
        arrangement = tuple(self._racks(ensemble, candidates))
        racks = tuple(rack for rack, pool in pools.items() for _ in pool[:MOVES_MAX])
        better = better_arrangements(self._rule, shape, arrangement, racks)
        if not better:
            raise self._no_bookie("no writable bookie would bring the ensemble closer to", pools)
        changes = [
            {i: each[i] for i in range(shape.size) if each[i] != arrangement[i]} for each in better
        ]
        by_bookies = [sum(len(pools[rack]) for rack in each.values()) for each in changes]
        [chosen] = self._rng.choices(changes, by_bookies)
        weights = self._weights(allowed)
        moves: list[Move] = []
        for index, rack in chosen.items():
            target = self._draw(pools[rack], weights)
            pools[rack].remove(target)
            moves.append(Move(index=index, target=target.bookie))
        return tuple(moves)

    def adherence(
        self, ensemble: Sequence[BookieId], *, write_quorum: int, ack_quorum: int
    ) -> Adherence:
        """Return how well an existing ensemble follows the rule, counting absent members too."""
        shape = Shape(size=len(ensemble), write_quorum=write_quorum, ack_quorum=ack_quorum)
        return judge_racks(self._rule, shape, tuple(map(self._locate, ensemble)))

    # --- Draws ---------------------------------------------------------------------------------

    def _weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """Return the weight of each candidate; nothing if all weigh the same."""
        return {} if self._weighting is None else self._weighting.weights(candidates)

    def _draw(
        self,
        candidates: Sequence[Candidate],
        weights: Mapping[BookieId, float],
        *,
        prefers_local: bool = True,
    ) -> Candidate:
        """Return the least loaded of candidates; of several, the local one, else a random one. With
        weighting, of two that are drawn by weight: so free space decides in the long run."""
        allowed = candidates
        if weights:
            allowed = self._rng.choices(allowed, [weights[each.bookie] for each in allowed], k=2)
        least_bytes = min([each.load_bytes for each in allowed])
        best = [each for each in allowed if each.load_bytes == least_bytes]
        if prefers_local and self._local is not None:
            local = [each for each in best if each.bookie == self._local]
            best = local or best
        return best[0] if weights else self._rng.choice(best)

    def _racks(self, ensemble: Sequence[BookieId], candidates: Iterable[Candidate]) -> list[str]:
        members = set(ensemble)
        told = {each.bookie: each.rack for each in candidates if each.bookie in members}
        return [told.get(bookie) or self._locate(bookie) or DEFAULT_RACK for bookie in ensemble]


class RandomPlacement(PlacementPolicy):
    """Follows no rule, as BookKeeper's DefaultEnsemblePlacementPolicy, but balances load."""

    def __init__(self, rng: Random, *, local: BookieId | None = None) -> None:
        super().__init__(NoRule(), rng, local=local)


_BOOKIE = attrgetter("bookie")


def _allowed(
    candidates: Iterable[Candidate], excluded: Collection[BookieId]
) -> Sequence[Candidate]:
    """Return the allowed candidates, each once, by id: a choice depends only on the seed."""
    by_id = {each.bookie: each for each in candidates if each.bookie not in excluded}
    return sorted(by_id.values(), key=_BOOKIE)


def _by_rack(candidates: Iterable[Candidate]) -> _Pools:
    """Return the candidates by rack, sorted by rack, so that a choice depends only on the seed."""
    pools: _Pools = {}
    for each in candidates:
        pools.setdefault(each.rack, []).append(each)
    return dict(sorted(pools.items()))
