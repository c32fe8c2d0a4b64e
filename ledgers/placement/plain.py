"""Any bookie is as good as any other: BookKeeper's DefaultEnsemblePlacementPolicy, weighted by load."""

from collections.abc import Collection, Mapping, Sequence
from random import Random

from ledgers.errors import NotEnoughBookiesError
from ledgers.metadata import BookieId
from ledgers.placement.policy import Adherence, Candidate


class RandomPlacement:
    """Any bookie is as good as any other of the same load. ``local``: preferred among equals."""

    def __init__(self, random: Random, *, local: BookieId | None = None) -> None:
        self._random, self._local = random, local

    def choose_ensemble(
        self,
        candidates: Collection[Candidate],
        size: int,
        *,
        write_quorum: int,
        ack_quorum: int | None = None,
        excluded: Collection[BookieId] = (),
    ) -> tuple[BookieId, ...]:
        bookies = [candidate.bookie for candidate in candidates]
        return choose_ensemble(bookies, size, random=self._random, excluded=excluded)

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
        return choose_replacement(
            candidates={candidate.bookie: candidate.load_bytes for candidate in candidates},
            ensemble=ensemble,
            excluded=excluded,
            local=self._local,
            random=self._random,
        )

    def adherence(
        self, ensemble: Sequence[BookieId], *, write_quorum: int, ack_quorum: int
    ) -> Adherence:
        return Adherence.STRICT


def choose_ensemble(
    candidates: Collection[BookieId],
    size: int,
    *,
    random: Random,
    excluded: Collection[BookieId] = (),
) -> tuple[BookieId, ...]:
    """``size`` different bookies in random order. Raises NotEnoughBookiesError."""
    allowed = sorted(set(candidates) - set(excluded))
    if len(allowed) < size:
        raise NotEnoughBookiesError(
            "too few writable bookies for an ensemble", wanted=size, allowed=len(allowed)
        )
    return tuple(random.sample(allowed, size))


def choose_replacement(
    *,
    candidates: Mapping[BookieId, int],
    ensemble: Sequence[BookieId],
    excluded: Collection[BookieId],
    local: BookieId | None,
    random: Random,
) -> BookieId:
    """The least loaded bookie; among several of them the local one, else a random one.

    ``candidates``: each writable bookie's load in bytes. Members of the ensemble are never chosen,
    the lost ones neither. Raises NotEnoughBookiesError.
    """
    # Sorted, so that a seed decides alone: sets of strings iterate in another order every run.
    allowed = sorted(candidates.keys() - set(ensemble) - set(excluded))
    if not allowed:
        raise NotEnoughBookiesError(
            "no writable bookie is left to take over", candidates=len(candidates)
        )
    least_bytes = min(candidates[bookie] for bookie in allowed)
    best = [bookie for bookie in allowed if candidates[bookie] == least_bytes]
    return local if local in best else random.choice(best)
