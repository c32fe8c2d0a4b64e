"""What the demonstration writes: ledgers of many shapes, the same ones each time."""

import enum
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ledgers.metadata import DigestType


class Ending(enum.Enum):
    """What becomes of a ledger's writer."""

    CLOSED = "closed"
    ABANDONED = "abandoned"
    """Left open: the writer is gone."""
    LIVE = "live"
    """Left open: the writer goes on all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One ledger to be written. ``change_at``: before this entry a bookie fails its writer."""

    number: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest_type: DigestType
    metadata_version: int
    entry_bytes: int
    entry_count: int
    change_at: int | None = None
    ending: Ending = Ending.CLOSED

    def payload(self, entry_id: int) -> bytes:
        """``entry_bytes`` bytes that no other entry has."""
        seed = hashlib.sha256(f"{self.number}:{entry_id}".encode()).digest()
        return (seed * (self.entry_bytes // len(seed) + 1))[: self.entry_bytes]


QUORUMS = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 2, 2), (5, 3, 2))
SIZES = (
    (1, 40),
    (100, 60),
    (1_000, 100),
    (1_000, 30),
    (10_000, 20),
    (65_536, 6),
    (0, 5),
    (1_000, 1),
    (1_000, 0),
)
"""Payload bytes of an entry, and how many of them."""
OPEN_SIZE = (1_000, 50)
"""Of a ledger that is left open."""
LARGE = (1_000_000, 5)
LARGE_EVERY = 50
CHANGE_EVERY = 9
OPEN_COUNT = 5
LIVE_COUNT = 2


def shapes(ledger_count: int, *, quorums: Sequence[tuple[int, int, int]] = QUORUMS) -> list[Shape]:
    """``ledger_count`` shapes, the last five of them left open, two with a live writer.

    ``quorums``: ensemble size, write quorum and ack quorum, taken in turn.
    """
    kinds = zip(
        itertools.cycle(quorums),
        itertools.cycle(SIZES),
        itertools.cycle(DigestType),
        itertools.cycle((3, 3, 2)),
        strict=False,
    )
    numbered = zip(range(ledger_count), kinds, strict=False)
    return [_shape(number, ledger_count, *kind) for number, kind in numbered]


def shapes_to_try(ledger_count: int, *, open_count: int, bookie_count: int) -> list[Shape]:
    """``ledger_count`` shapes that survive the loss of a bookie, the last ``open_count`` left open,
    their writer gone.

    Each entry has two copies at least, and one bookie at least is left to take over. Empty with
    fewer than three.
    """
    assert open_count <= ledger_count, (open_count, ledger_count)
    quorums = [q for q in QUORUMS if q[0] < bookie_count and q[1] > 1]
    if not quorums:
        return []
    made = shapes(ledger_count + OPEN_COUNT, quorums=quorums)[:ledger_count]
    closed_count = ledger_count - open_count
    return made[:closed_count] + [_left_open(shape) for shape in made[closed_count:]]


def _left_open(shape: Shape) -> Shape:
    entry_bytes, entry_count = OPEN_SIZE
    return replace(
        shape,
        entry_bytes=entry_bytes,
        entry_count=entry_count,
        change_at=None,
        ending=Ending.ABANDONED,
    )


def _shape(
    number: int,
    ledger_count: int,
    quorums: tuple[int, int, int],
    size: tuple[int, int],
    digest_type: DigestType,
    metadata_version: int,
) -> Shape:
    from_end = ledger_count - number
    ending = Ending.CLOSED
    if from_end <= OPEN_COUNT:
        ending = Ending.LIVE if from_end <= LIVE_COUNT else Ending.ABANDONED
        quorums, size = (3, 3, 2), OPEN_SIZE
    elif number % LARGE_EVERY == LARGE_EVERY - 1:
        size = LARGE
    ensemble_size, write_quorum, ack_quorum = quorums
    entry_bytes, entry_count = size
    may_change = ensemble_size <= 4 and entry_count >= 4 and ending is Ending.CLOSED
    return Shape(
        number=number,
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        metadata_version=metadata_version,
        entry_bytes=entry_bytes,
        entry_count=entry_count,
        change_at=entry_count // 2 if may_change and number % CHANGE_EVERY == 0 else None,
        ending=ending,
    )
