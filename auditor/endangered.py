"""Which ledgers a loss touches, and which of them are to be marked first: pure functions.

Most endangered first: fewest good copies left of any entry, then the oldest loss, then most bytes.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ledgers.metadata import BookieId, LedgerMetadata, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Endangered:
    """A ledger that names lost bookies. ``lost`` ascends; ``copies_left`` of its worst entry."""

    ledger_id: int
    lost: tuple[BookieId, ...]
    copies_left: int
    length: int
    """Payload bytes; 0 while the ledger is not closed."""


def endangered(
    ledger_id: int, metadata: LedgerMetadata, lost: Collection[BookieId]
) -> Endangered | None:
    """What the loss means for one ledger; None when no segment names a lost bookie."""
    named = metadata.bookies & frozenset(lost)
    if not named:
        return None
    return Endangered(
        ledger_id=ledger_id,
        lost=tuple(sorted(named)),
        copies_left=min(
            _copies_left(segment, metadata.write_quorum, named) for segment in metadata.segments
        ),
        length=metadata.length,
    )


def _copies_left(segment: Segment, write_quorum: int, lost: Collection[BookieId]) -> int:
    """Bookies left of the worst write set: any ``write_quorum`` consecutive indexes, cyclically."""
    ensemble_size = len(segment.ensemble)
    is_left = [bookie not in lost for bookie in segment.ensemble]
    return min(
        sum(is_left[(first + offset) % ensemble_size] for offset in range(write_quorum))
        for first in range(ensemble_size)
    )


def most_endangered_first(
    found: Collection[Endangered], absent_since_s: Mapping[BookieId, float]
) -> list[Endangered]:
    """In the order in which they are to be marked.

    ``absent_since_s`` holds every bookie that is away; one that is not came back, perhaps empty.
    """

    def urgency(ledger: Endangered) -> tuple[int, float, int]:
        oldest_s = min(absent_since_s.get(bookie, math.inf) for bookie in ledger.lost)
        return ledger.copies_left, oldest_s, -ledger.length

    return sorted(found, key=urgency)


def most_urgent(ordered: Sequence[Endangered]) -> list[int]:
    """Those that all workers should take before any other. ``ordered``: most endangered first.

    With one copy left, or none, or with fewer than the rest has.
    """
    if not ordered:
        return []
    safest = ordered[-1].copies_left
    return [x.ledger_id for x in ordered if x.copies_left <= 1 or x.copies_left < safest]
