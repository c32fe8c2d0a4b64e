"""Which of several bookies that a rule finds equally good: by load, room, locality, then by lot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from ledgers.metadata import BookieId
from ledgers.placement.policy import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Choices weighted by free room (BookKeeper's diskWeightBasedPlacementEnabled)."""

    multiple_max: float = 3.0
    """No bookie weighs more than so many times the median, lest a new and empty one be given
    everything (bookieMaxWeightMultipleForWeightBasedPlacement). 0: no such limit."""

    def weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """Each one's, above 0. One that did not tell its room weighs as much as the median."""
        known = [each.free_bytes for each in candidates if each.free_bytes is not None]
        middle = float(median(known)) if known else 1.0
        least = float(min((free for free in known if free > 0), default=1))  # for the full ones
        most = self.multiple_max * middle or math.inf

        def weight(free_bytes: int | None) -> float:
            free = middle if free_bytes is None else float(free_bytes)
            return min(free or least, most)

        return {each.bookie: weight(each.free_bytes) for each in candidates}


class _Alike(dict[BookieId, float]):
    """Everybody weighs the same: there is nothing to be worked out for hundreds of bookies."""

    def __missing__(self, bookie: BookieId) -> float:
        return 1.0


_ALIKE = _Alike()


class Drawing:
    """Draws among candidates. Nothing but the seed of ``rng`` decides between equal ones."""

    def __init__(
        self, rng: Random, *, local: BookieId | None = None, weighting: Weighting | None = None
    ) -> None:
        self._rng, self._local, self._weighting = rng, local, weighting

    def weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """All the same where choices are not weighted."""
        if self._weighting is None:
            return _ALIKE
        return self._weighting.weights(candidates)

    def draw(
        self,
        candidates: Sequence[Candidate],
        weights: Mapping[BookieId, float],
        *,
        prefers_local: bool = True,
    ) -> Candidate:
        """One of at least one: the least loaded, among equals the local one, else any.

        Weighted, the less loaded of two that are drawn by weight: so that room decides on the
        whole, and load at the moment.
        """
        allowed = candidates
        if self._weighting is not None:
            allowed = self._rng.choices(allowed, [weights[each.bookie] for each in allowed], k=2)
        least_bytes = min([each.load_bytes for each in allowed])
        best = [each for each in allowed if each.load_bytes == least_bytes]
        if prefers_local and self._local is not None:
            local = [each for each in best if each.bookie == self._local]
            best = local or best
        return best[0] if self._weighting is not None else self._rng.choice(best)
