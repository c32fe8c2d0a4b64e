"""The choice among bookies that are equal to a rule: by load, free space, locality, then random."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from ledgers.metadata import BookieId
from ledgers.placement.policy import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Choices weighted by free disk space (BookKeeper's diskWeightBasedPlacementEnabled)."""

    multiple_max: float = 3.0
    """Limit on a bookie's weight, in multiples of the median, so that a new empty bookie does not
    get everything (bookieMaxWeightMultipleForWeightBasedPlacement). 0: no limit."""

    def weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """Return each candidate's weight, above 0. A candidate whose free space is unknown gets the
        median."""
        known = [each.free_bytes for each in candidates if each.free_bytes is not None]
        middle = float(median(known)) if known else 1.0
        least = float(min((free for free in known if free > 0), default=1))  # for full bookies
        most = self.multiple_max * middle or math.inf

        def weight(free_bytes: int | None) -> float:
            free = middle if free_bytes is None else float(free_bytes)
            return min(free or least, most)

        return {each.bookie: weight(each.free_bytes) for each in candidates}


class _Alike(dict[BookieId, float]):
    """Gives every bookie the weight 1, without a table of hundreds of bookies."""

    def __missing__(self, bookie: BookieId) -> float:
        return 1.0


_ALIKE = _Alike()


class Drawing:
    """Draws among candidates. Only the seed of ``rng`` decides between equal ones."""

    def __init__(
        self, rng: Random, *, local: BookieId | None = None, weighting: Weighting | None = None
    ) -> None:
        self._rng, self._local, self._weighting = rng, local, weighting

    def weights(self, candidates: Sequence[Candidate]) -> Mapping[BookieId, float]:
        """Return the weight of each candidate; the same for all if choices are not weighted."""
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
        """Return the least loaded candidate; of several, the local one, else a random one.

        With weighting, two candidates are drawn by weight, and the less loaded one is returned. So
        free space decides in the long run, and load at the moment. ``candidates`` is not empty.
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
