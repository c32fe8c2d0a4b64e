"""Which bookies are to hold a ledger's entries: pure choices among the writable ones.

Every choice keeps two promises: no bookie stands in an ensemble twice, and none that was excluded
comes in. What further makes a good choice (racks, regions, zones) is a ``PlacementPolicy``; the
random one is BookKeeper's DefaultEnsemblePlacementPolicy, weighted by load.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from ledgers.errors import NotEnoughBookiesError
from ledgers.metadata import BookieId

DEFAULT_RACK = "/default-rack"
"""Where BookKeeper's policies put a bookie whose location is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A writable bookie. ``load_bytes``: whatever the caller balances, 0 when it balances nothing."""

    bookie: BookieId
    rack: str = DEFAULT_RACK
    load_bytes: int = 0


class PlacementPolicy(Protocol):
    """Chooses among writable bookies. Both choices raise NotEnoughBookiesError.

    A policy that wants the location of a bookie that is no candidate (the lost one, whose rack the
    new one should share) remembers it from when it was.
    """

    def choose_ensemble(
        self,
        candidates: Collection[Candidate],
        size: int,
        *,
        write_quorum: int,
        excluded: Collection[BookieId] = (),
    ) -> tuple[BookieId, ...]: ...

    def choose_replacement(
        self,
        candidates: Collection[Candidate],
        *,
        ensemble: Sequence[BookieId],
        index: int,
        write_quorum: int,
        excluded: Collection[BookieId] = (),
    ) -> BookieId:
        """Who takes over bookie index ``index`` of ``ensemble``; none of its members may."""
        ...


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
        excluded: Collection[BookieId] = (),
    ) -> BookieId:
        return choose_replacement(
            candidates={candidate.bookie: candidate.load_bytes for candidate in candidates},
            ensemble=ensemble,
            excluded=excluded,
            local=self._local,
            random=self._random,
        )


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
