"""The choice of a replacement by load alone."""

from collections.abc import Collection, Mapping, Sequence
from random import Random

from ledgers.errors import NotEnoughBookiesError
from ledgers.metadata import BookieId


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
