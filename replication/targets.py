"""Which bookies may receive copies now, and which may not and why (rule S11).

``TargetSelector`` knows how many bytes this process has under way to each bookie, so that the next plan
spreads them. ``Targets`` is what it says at one moment: a value that a plan is made from.

Bookies that refused copies of a ledger: not asked again for it while they live (rule S11).

A bookie whose garbage collector has deleted a ledger refuses every later add to it, as if it were
fenced, until it restarts. Whoever tries again would copy the ledger's beginning in vain every time.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ledgers.clock import Clock
from ledgers.health import Quarantine, Shut
from ledgers.model import BookieId, Fragment, LedgerMetadata
from ledgers.placement import DEFAULT_RACK, Candidate, PlacementPolicy
from replication.cluster import ClusterView, anywhere

CopyKey = tuple[Fragment, int]
"""What was copied: a bookie index of a fragment. Other bounds or members make it another one."""

SORTED_AGAIN_S = 5.0
"""How long it holds who may receive and who may not, as far as that depends on free room."""

SMALL_COPY_BYTES = 1024 * 1024
"""Not held against the room of a bookie that has any to spare."""


class Exclusion(enum.Enum):
    """Why a writable bookie may not take over: in words that follow the number of several."""

    MEMBER = "already hold this part of the ledger or its open end"
    REFUSED = "refused it"
    SHORT_OF_ROOM = "are short of room"
    DRAINING = "are being drained"
    MAINTENANCE = "are under maintenance"
    QUARANTINED = "are in quarantine, as nothing was answered"
    ISOLATED = "are outside the ledger's isolation groups"
    NOT_LOCAL = "are not this node's (replication.target is local)"

    def told_of(self, count: int) -> str:
        """As in ``1 is short of room``."""
        one = self.value.replace("are ", "is ", 1).replace("hold ", "holds ", 1)
        return f"{count} {one if count == 1 else self.value}"


class Targets(Struct, frozen=True, kw_only=True):
    """The bookies that may receive copies of one ledger, with the bytes already under way to
    each."""

    candidates: Mapping[BookieId, Candidate]
    placement: PlacementPolicy
    barred: Mapping[BookieId, Exclusion] = field(default_factory=dict)
    """Writable ones that may not, whatever part of the ledger it is."""
    refilled: frozenset[BookieId] = frozenset()
    """Members that an earlier round gave what they lacked: what they lack still, they do not
    keep."""
    only_local: BookieId | None = None
    """The only bookie that this node may copy to, where that is set."""
    copied: Mapping[CopyKey, BookieId] = field(default_factory=dict)
    """Copies made in earlier rounds, with the bookie that holds them whole."""
    quarantined: Mapping[BookieId, Shut] = field(default_factory=dict)
    """Bookies that are not asked anything now."""
    spare_bytes: Mapping[BookieId, int] = field(default_factory=dict)
    """Of writable ones: the room beyond the floor, less what is under way. Of those that are not
    here nobody knows it."""

    def having_room(self, byte_count: int, loads: Mapping[BookieId, int]) -> "Targets":
        """Without those that so much more would leave short of room. ``loads``: what else will be
        sent to them."""
        if byte_count < SMALL_COPY_BYTES and not loads and self.only_local is None:
            return self
        short = {}
        for bookie, spare_bytes in self.spare_bytes.items():
            more_bytes = byte_count + loads.get(bookie, 0)
            is_short = spare_bytes < (0 if more_bytes < SMALL_COPY_BYTES else more_bytes)
            if is_short and self._may_be_given(bookie):
                short[bookie] = Exclusion.SHORT_OF_ROOM
        if not short:
            return self
        candidates = {b: each for b, each in self.candidates.items() if b not in short}
        return replace(self, candidates=candidates, barred={**self.barred, **short})

    def may_refill(self, bookie: BookieId) -> bool:
        """Whether a member that is there may be given in place what it lacks (rule S15)."""
        return self._may_be_given(bookie) and bookie not in self.refilled

    def _may_be_given(self, bookie: BookieId) -> bool:
        """Anything, be it only what it lacks itself."""
        return bookie in self.candidates or self.barred.get(bookie) in (
            Exclusion.NOT_LOCAL,
            Exclusion.ISOLATED,
        )

    def quarantine_end_ms(self, *, besides: Collection[BookieId]) -> int | None:
        """When the first of those that quarantine alone keeps from receiving may do so again; None:
        never."""
        ends_ms = (
            self.quarantined[bookie].until_ms
            for bookie, bar in self.barred.items()
            if bar is Exclusion.QUARANTINED and bookie not in besides
        )
        return min(ends_ms, default=None)


class DiskSpaces(Protocol):
    """What is known of the bookies' disks (``room.DiskSpaceSource``)."""

    def free_bytes(self, bookie: BookieId) -> int | None:
        """None where nobody knows."""
        ...

    def spare_bytes(self, bookie: BookieId) -> int | None:
        """How much of it is beyond the floor, which is to be kept free; None where nobody knows."""
        ...

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        """So much of it was used up by a copy."""
        ...


class UnlimitedDiskSpaces:
    """Nothing is known of anybody's disks, and nobody is kept from receiving."""

    def free_bytes(self, bookie: BookieId) -> int | None:
        return None

    def spare_bytes(self, bookie: BookieId) -> int | None:
        return None

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        pass


Allowed = Callable[[LedgerMetadata, Collection[BookieId]], frozenset[BookieId] | None]
"""Of writable bookies, those that may hold copies of a ledger; None: all."""


class TargetSelector:
    """One for a worker, which all its repairs share.

    Who is a candidate is worked out once for each view of the cluster, and again every few seconds
    for what the disks say: with hundreds of bookies and thousands of small ledgers it is no small
    thing.
    """

    def __init__(
        self,
        placement: PlacementPolicy,
        *,
        clock: Clock,
        local: BookieId | None = None,
        is_local_only: bool = False,
        disk_spaces: DiskSpaces | None = None,
        rack: Callable[[BookieId], str] = lambda bookie: DEFAULT_RACK,
        quarantine: Quarantine | None = None,
        allowed: Allowed = anywhere,
    ) -> None:
        """``local``: this host's bookie. ``is_local_only``: it is the only target (``target =
        "local"``). ``allowed``: who may hold copies of a ledger that is isolated."""
        self._allowed = allowed
        self.placement = placement
        self._clock = clock
        self._local = local
        self._is_local_only = is_local_only
        self._disk_spaces = disk_spaces or UnlimitedDiskSpaces()
        self._rack = rack
        self._quarantine = quarantine or Quarantine(clock, life=lambda bookie: 0)
        self._load_bytes: dict[BookieId, int] = {}
        self._view: ClusterView | None = None
        self._sorted_at_s = 0.0
        self._candidates: dict[BookieId, Candidate] = {}
        self._barred: dict[BookieId, Exclusion] = {}
        self._spare_bytes: dict[BookieId, int] = {}
        """Of those whose room is known, less what is under way to them."""

    def targets(
        self,
        view: ClusterView,
        metadata: LedgerMetadata | None = None,
        *,
        refused: Collection[BookieId] = (),
        refilled: Collection[BookieId] = (),
        copied: Mapping[CopyKey, BookieId] | None = None,
    ) -> Targets:
        """For one ledger (None: for any), and for now: who refused it, who was refilled, what was
        copied in earlier rounds."""
        self._sort(view)
        candidates, barred = self._candidates, self._barred
        quarantined = self._quarantine.shut()
        allowed = None if metadata is None else self._allowed(metadata, view.writable)
        if refused or quarantined or allowed is not None:
            outside = () if allowed is None else candidates.keys() - allowed
            why = dict.fromkeys(outside, Exclusion.ISOLATED)
            why |= dict.fromkeys(candidates.keys() & refused, Exclusion.REFUSED)
            why |= dict.fromkeys(candidates.keys() & quarantined.keys(), Exclusion.QUARANTINED)
            candidates = {b: each for b, each in candidates.items() if b not in why}
            barred = barred | why
        return Targets(
            candidates=candidates,
            placement=self.placement,
            barred=barred,
            refilled=frozenset(refilled),
            only_local=self._local if self._is_local_only else None,
            copied=copied or {},
            quarantined=quarantined,
            spare_bytes=self._spare_bytes,
        )

    def candidates(
        self, view: ClusterView, metadata: LedgerMetadata | None = None
    ) -> list[Candidate]:
        """For who takes over while a ledger is recovered: wherever that is, ``target`` or not."""
        able = view.receiving - self._quarantine.shut().keys()
        allowed = None if metadata is None else self._allowed(metadata, view.writable)
        if allowed is not None:
            able &= allowed
        return [self._candidate(b) for b in able if not self._is_short(b)]

    def why_no_candidate(
        self, view: ClusterView, members: Collection[BookieId], metadata: LedgerMetadata
    ) -> str:
        """Which rules leave nobody but ``members`` among these; "" if somebody else is left."""
        candidates = {each.bookie: each for each in self.candidates(view, metadata)}
        barred = self.targets(view, metadata).barred.items()
        return why_nobody(
            Targets(
                candidates=candidates,
                placement=self.placement,
                barred={b: bar for b, bar in barred if b not in candidates},
            ),
            members,
        )

    @contextmanager
    def under_way(self, bookie: BookieId, byte_count: int) -> Iterator[None]:
        """So many bytes are being copied to the bookie; those that ``landed`` count on, until it
        tells of its room."""
        self._add_load(bookie, byte_count)
        try:
            yield
        finally:
            self._add_load(bookie, -byte_count)

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        """So many of the bytes that are ``under_way`` have arrived. To be told before that ends."""
        self._disk_spaces.landed(bookie, byte_count)

    def _add_load(self, bookie: BookieId, byte_count: int) -> None:
        self._load_bytes[bookie] = self._load_bytes.get(bookie, 0) + byte_count
        if not self._load_bytes[bookie]:
            del self._load_bytes[bookie]
        if self._view is not None and bookie in self._view.writable:
            self._sort_one(bookie, self._view)

    def _sort(self, view: ClusterView) -> None:
        now_s = self._clock.now_s()
        if view is self._view and now_s - self._sorted_at_s < SORTED_AGAIN_S:
            return
        self._view, self._sorted_at_s = view, now_s
        self._candidates, self._barred, self._spare_bytes = {}, {}, {}
        for bookie in sorted(view.writable):
            self._sort_one(bookie, view)

    def _sort_one(self, bookie: BookieId, view: ClusterView) -> None:
        """Into candidates and those that may not receive."""
        spare_bytes = self._spare(bookie)
        if spare_bytes is None:
            self._spare_bytes.pop(bookie, None)
        else:
            self._spare_bytes[bookie] = spare_bytes
        bar = self._bar(bookie, view)
        if bar is None:
            self._candidates[bookie] = self._candidate(bookie)
            self._barred.pop(bookie, None)
        else:
            self._barred[bookie] = bar
            self._candidates.pop(bookie, None)

    def _bar(self, bookie: BookieId, view: ClusterView) -> Exclusion | None:
        if bookie in view.orders.draining:
            return Exclusion.DRAINING
        if bookie in view.orders.maintenance:
            return Exclusion.MAINTENANCE
        if self._is_local_only and bookie != self._local:
            return Exclusion.NOT_LOCAL
        return Exclusion.SHORT_OF_ROOM if self._is_short(bookie) else None

    def _is_short(self, bookie: BookieId) -> bool:
        spare_bytes = self._spare(bookie)
        return spare_bytes is not None and spare_bytes < 0

    def _spare(self, bookie: BookieId) -> int | None:
        """The room beyond the floor, less what is under way."""
        spare_bytes = self._disk_spaces.spare_bytes(bookie)
        return None if spare_bytes is None else spare_bytes - self._load_bytes.get(bookie, 0)

    def _candidate(self, bookie: BookieId) -> Candidate:
        return Candidate(
            bookie=bookie,
            rack=self._rack(bookie),
            load_bytes=self._load_bytes.get(bookie, 0),
            free_bytes=self._disk_spaces.free_bytes(bookie),
        )


def with_load(
    candidates: Mapping[BookieId, Candidate], loads: Mapping[BookieId, int]
) -> Collection[Candidate]:
    """The candidates, with more bytes under way to some of them."""
    if not loads:
        return candidates.values()
    return [
        replace(candidate, load_bytes=candidate.load_bytes + loads[bookie])
        if bookie in loads
        else candidate
        for bookie, candidate in candidates.items()
    ]


def why_nobody(targets: Targets, taken: Collection[BookieId]) -> str:
    """Which rules leave no bookie to take over; "" if some candidate is left."""
    barred = dict(targets.barred)
    barred.update(
        (bookie, Exclusion.MEMBER)
        for bookie in taken
        if bookie in targets.candidates or barred.get(bookie) is Exclusion.SHORT_OF_ROOM
    )
    if len(barred) < len(targets.barred) + len(targets.candidates):
        return ""
    counts = {bar: sum(each is bar for each in barred.values()) for bar in Exclusion}
    told = [bar.told_of(count) for bar, count in counts.items() if count]
    silent = (
        targets.quarantined.get(b) for b, bar in barred.items() if bar is Exclusion.QUARANTINED
    )
    if reasons := sorted({each.reason for each in silent if each is not None} - {""}):
        told[-1] += f" ({'; '.join(reasons)})"
    return f"of {len(barred)} writable ones {' and '.join(told)}" if told else "none is writable"


LEDGERS_MAX = 10_000
"""Ledgers remembered; the one that was refused longest ago is forgotten first."""


class Refusals:
    """One for a worker. A bookie that registered anew has begun another life: nothing is held
    against it."""

    def __init__(self) -> None:
        self._refusing: OrderedDict[int, dict[BookieId, int]] = OrderedDict()
        """Per ledger the bookies that refused it, with the czxid of their registration."""

    def note(self, ledger_id: int, bookie: BookieId, view: ClusterView) -> None:
        self._refusing.setdefault(ledger_id, {})[bookie] = view.czxid(bookie)
        self._refusing.move_to_end(ledger_id)
        if len(self._refusing) > LEDGERS_MAX:
            self._refusing.popitem(last=False)

    def of(self, ledger_id: int, view: ClusterView) -> set[BookieId]:
        """Those that refused it and are still the same."""
        refusing = self._refusing.get(ledger_id)
        if refusing is None:
            return set()
        return {bookie for bookie, czxid in refusing.items() if view.czxid(bookie) == czxid}
