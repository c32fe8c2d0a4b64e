"""The interface of placement policies: their input, their choices and their guarantees.

Every choice guarantees that no bookie is in an ensemble twice, and that no excluded bookie is
chosen. Each policy adds its own criteria (racks, regions, zones, free space).
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from ledgers.model import BookieId

DEFAULT_RACK = "/default-rack"
"""The location that BookKeeper's policies assume for a bookie whose location is unknown."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A bookie that may be chosen, with its location, load and free space."""

    bookie: BookieId
    rack: str = DEFAULT_RACK
    """Location as in BookKeeper: ``/rack``, ``/region/rack`` or ``/zone/upgrade-domain``."""
    load_bytes: int = 0
    """The load that the caller balances, such as bytes in flight to the bookie; 0 without
    balancing."""
    free_bytes: int | None = None
    """Free disk space; None if unknown. Used only in disk-weighted choices."""


class Adherence(enum.Enum):
    """A verdict: does an existing ensemble follow a policy's rule (BookKeeper's
    PlacementPolicyAdherence)?"""

    FAIL = "fail"
    SOFT = "soft"
    """The ensemble meets what the rule requires, but not all that the rule desires."""
    STRICT = "strict"
    UNKNOWN = "unknown"
    """The result depends on the location of a member whose location was never known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The replacement of the bookie at ``index`` of an ensemble by ``target``."""

    index: int
    target: BookieId


class PlacementPolicy(Protocol):
    """Chooses among writable bookies. If none suits, each choice raises NotEnoughBookiesError.

    ``excluded`` may name members of the ensemble, and bookies that are not candidates. The policy
    knows the location of a member even while the member is absent.
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
        """Return the bookies of a new ensemble. ``ack_quorum`` None: equal to the write quorum."""
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
        """Return the bookie to replace the one at ``index``. Members of ``ensemble`` are never
        chosen."""
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
        """Return replacements that bring an ensemble closer to the rule.

        The result is one move, or as many as must be made together. Raises NotEnoughBookiesError
        also if no move improves the ensemble.
        """
        ...

    def adherence(
        self, ensemble: Sequence[BookieId], *, write_quorum: int, ack_quorum: int
    ) -> Adherence:
        """Return how well an existing ensemble follows the rule, counting absent members too."""
        ...
