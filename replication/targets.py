"""Which bookies may receive copies now, and which may not and why (rule S11).

``Receivers`` knows how many bytes this process has under way to each bookie, so that the next plan
spreads them. ``Targets`` is what it says at one moment: a value that a plan is made from.
"""

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.placement import DEFAULT_RACK, Candidate, PlacementPolicy
from replication.cluster_view import ClusterView

CopyKey = tuple[Fragment, int]
"""What was copied: a bookie index of a fragment. Other bounds or members make it another one."""


class Bar(enum.Enum):
    """Why a writable bookie may not take over: in words that follow its number."""

    MEMBER = "already hold this part of the ledger or its open end"
    REFUSED = "refused it"
    SHORT_OF_ROOM = "are short of room"
    DRAINING = "are being drained"
    MAINTENANCE = "are under maintenance"
    NOT_LOCAL = "are not this node's (replication.target is local)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The bookies that may receive copies of one ledger, with the bytes already under way to each."""

    candidates: Mapping[BookieId, Candidate]
    placement: PlacementPolicy
    barred: Mapping[BookieId, Bar] = field(default_factory=dict)
    """Writable ones that may not, whatever part of the ledger it is."""
    refilled: frozenset[BookieId] = frozenset()
    """Members that an earlier round gave what they lacked: what they lack still, they do not keep."""
    only_local: BookieId | None = None
    """The only bookie that this node may copy to, where that is set."""
    copied: Mapping[CopyKey, BookieId] = field(default_factory=dict)
    """Copies made in earlier rounds, with the bookie that holds them whole."""

    def may_refill(self, bookie: BookieId) -> bool:
        """Whether a member that is there may be given in place what it lacks (rule S15)."""
        is_open_to_copies = bookie in self.candidates or self.barred.get(bookie) is Bar.NOT_LOCAL
        return is_open_to_copies and bookie not in self.refilled


class Room(Protocol):
    """What is known of the bookies' disks."""

    def free_bytes(self, bookie: BookieId) -> int | None: ...

    def is_short(self, bookie: BookieId) -> bool:
        """Whether so little is free that no copy may go there. False where nobody knows."""
        ...


class BoundlessRoom:
    """Nothing is known of anybody's disks, and nobody is kept from receiving."""

    def free_bytes(self, bookie: BookieId) -> int | None:
        return None

    def is_short(self, bookie: BookieId) -> bool:
        return False


class Receivers:
    """One for a worker, which all its repairs share."""

    def __init__(
        self,
        placement: PlacementPolicy,
        *,
        local: BookieId | None = None,
        is_local_only: bool = False,
        room: Room | None = None,
        rack: Callable[[BookieId], str] = lambda bookie: DEFAULT_RACK,
    ) -> None:
        """``local``: this host's bookie. ``is_local_only``: it is the only target (``target = "local"``)."""
        self.placement = placement
        self._local = local
        self._is_local_only = is_local_only
        self._room = room or BoundlessRoom()
        self._rack = rack
        self._load_bytes: dict[BookieId, int] = {}

    def targets(
        self,
        view: ClusterView,
        *,
        refused: Collection[BookieId] = (),
        refilled: Collection[BookieId] = (),
        copied: Mapping[CopyKey, BookieId] | None = None,
    ) -> Targets:
        """For one ledger: who refused it, who was refilled, what was copied in earlier rounds."""
        barred = {
            bookie: bar
            for bookie in view.writable
            if (bar := self._bar(bookie, view, refused)) is not None
        }
        return Targets(
            candidates={
                bookie: self._candidate(bookie) for bookie in view.writable if bookie not in barred
            },
            placement=self.placement,
            barred=barred,
            refilled=frozenset(refilled),
            only_local=self._local if self._is_local_only else None,
            copied=copied or {},
        )

    def candidates(self, view: ClusterView) -> list[Candidate]:
        """For who takes over while a ledger is recovered: wherever that is, ``target`` or not."""
        return [self._candidate(b) for b in view.receiving if not self._room.is_short(b)]

    @contextmanager
    def under_way(self, bookie: BookieId, byte_count: int) -> Iterator[None]:
        """So many bytes are being copied to the bookie."""
        self._load_bytes[bookie] = self._load_bytes.get(bookie, 0) + byte_count
        try:
            yield
        finally:
            self._load_bytes[bookie] -= byte_count
            if not self._load_bytes[bookie]:
                del self._load_bytes[bookie]

    def _bar(
        self, bookie: BookieId, view: ClusterView, refused: Collection[BookieId]
    ) -> Bar | None:
        if bookie in refused:
            return Bar.REFUSED
        if bookie in view.orders.draining:
            return Bar.DRAINING
        if bookie in view.orders.maintenance:
            return Bar.MAINTENANCE
        if self._is_local_only and bookie != self._local:
            return Bar.NOT_LOCAL
        return Bar.SHORT_OF_ROOM if self._room.is_short(bookie) else None

    def _candidate(self, bookie: BookieId) -> Candidate:
        return Candidate(
            bookie=bookie,
            rack=self._rack(bookie),
            load_bytes=self._load_bytes.get(bookie, 0),
            free_bytes=self._room.free_bytes(bookie),
        )


def with_load(
    candidates: Mapping[BookieId, Candidate], loads: Mapping[BookieId, int]
) -> list[Candidate]:
    """The candidates, with more bytes under way to some of them."""
    return [
        replace(candidate, load_bytes=candidate.load_bytes + loads[bookie])
        if bookie in loads
        else candidate
        for bookie, candidate in candidates.items()
    ]


def why_nobody(targets: Targets, taken: Collection[BookieId]) -> str:
    """Which rules leave no bookie to take over; "" if some candidate is left."""
    barred = dict(targets.barred)
    barred.update((bookie, Bar.MEMBER) for bookie in targets.candidates if bookie in taken)
    if len(barred) < len(targets.barred) + len(targets.candidates):
        return ""
    counts = {bar: sum(each is bar for each in barred.values()) for bar in Bar}
    told = [f"{count} {bar.value}" for bar, count in counts.items() if count]
    return f"of {len(barred)} writable ones {' and '.join(told)}" if told else "none is writable"
