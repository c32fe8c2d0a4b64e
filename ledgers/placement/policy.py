"""What every placement policy is given, what it is asked, and what it promises.

Every choice keeps two promises: no bookie stands in an ensemble twice, and none that was excluded
comes in. What further makes a good choice (racks, regions, zones, room) is the policy's.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from ledgers.metadata import BookieId

DEFAULT_RACK = "/default-rack"
"""Where BookKeeper's policies put a bookie whose location is not known."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A bookie that may be chosen, and what speaks for and against it."""

    bookie: BookieId
    rack: str = DEFAULT_RACK
    """Its location as in BookKeeper: ``/rack``, ``/region/rack`` or ``/zone/upgrade-domain``."""
    load_bytes: int = 0
    """Whatever the caller balances (bytes under way to it), 0 when it balances nothing."""
    free_bytes: int | None = None
    """Free room on its disks; None when it did not say. Counts in disk-weighted choices only."""


class Adherence(enum.Enum):
    """Whether an ensemble that stands keeps a policy's rule (BookKeeper's
    PlacementPolicyAdherence)."""

    FAIL = "fail"
    SOFT = "soft"
    """The least that the rule demands, but not all that it wishes."""
    STRICT = "strict"
    UNKNOWN = "unknown"
    """It depends on where some member is, or was, and nobody knows that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bookie index ``index`` of an ensemble falls to ``target``."""

    index: int
    target: BookieId


class PlacementPolicy(Protocol):
    """Chooses among writable bookies; all choices raise NotEnoughBookiesError, naming the rule.

    ``excluded`` may name members of the ensemble and bookies that are no candidates. A member's
    location is known to the policy also while the member is away.
    """

    def choose_ensemble(
        self,
        candidates: Collection[Candidate],
        size: int,
        *,
        write_quorum: int,
        ack_quorum: int | None = None,
        excluded: Collection[BookieId] = (),
    ) -> tuple[BookieId, ...]:
        """``ack_quorum`` None: the same as the write quorum."""
        ...

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
        """Who takes over bookie index ``index`` of ``ensemble``; none of its members may."""
        ...

    def choose_moves(
        self,
        candidates: Collection[Candidate],
        *,
        ensemble: Sequence[BookieId],
        write_quorum: int,
        ack_quorum: int,
        excluded: Collection[BookieId] = (),
    ) -> tuple[Move, ...]:
        """Which member of an ensemble that fails the rule gives way to whom, for it to fail less:
        one, or as many as must move together. Raises NotEnoughBookiesError also where that makes
        nothing better.
        """
        ...

    def adherence(
        self, ensemble: Sequence[BookieId], *, write_quorum: int, ack_quorum: int
    ) -> Adherence:
        """What the rule says of an ensemble that stands, members that are away included."""
        ...
