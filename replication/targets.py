"""Decides which bookies may receive copies now, and why the others may not (rule S11).

``TargetSelector`` knows how many bytes this process is sending to each bookie, so that the next
plan spreads its copies. ``Targets`` is its answer for one ledger at one moment: a value from which
a plan is made. ``Refusals`` remembers which bookies refused copies of a ledger.

``DiskSpaceSource`` asks every possible target for its free disk space. A bookie turns read-only
when a disk is 95 % full (its diskUsageThreshold), and its clients lose it. So copies go only to
bookies with more free space than the floor. A bookie that does not answer remains a possible
target.
"""

import asyncio
import dataclasses
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from ledgers.bookies import Bookies, DiskSpace
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, SecureConnectionError
from ledgers.health import BookieHealth, Shut
from ledgers.model import BookieId, Fragment, LedgerMetadata
from ledgers.placement import DEFAULT_RACK, Candidate, PlacementPolicy
from replication.cluster import ClusterView, ViewSource, anywhere
from replication.reasons import Exclusion

log = structlog.get_logger()
CopyKey = tuple[Fragment, int]
"""A bookie index of a fragment. A fragment with other bounds or members has other keys."""

SORTED_AGAIN_S = 5.0
"""Time that the list of candidates stays valid with respect to free disk space."""

SMALL_COPY_BYTES = 1024 * 1024
"""A smaller copy is allowed on every bookie that has any space to spare."""


class Targets(Struct, frozen=True, kw_only=True):
    """The bookies that may receive copies of one ledger, and the bytes being sent to each."""

    candidates: Mapping[BookieId, Candidate]
    placement: PlacementPolicy
    barred: Mapping[BookieId, Exclusion] = field(default_factory=dict)
    """Writable bookies that may not receive any part of the ledger."""
    refilled: frozenset[BookieId] = frozenset()
    """Members that an earlier round gave the entries they lacked. If they still lack some, they do
    not store what they get."""
    only_local: BookieId | None = None
    """The only bookie to which this node may copy, if it is restricted."""
    copied: Mapping[CopyKey, BookieId] = field(default_factory=dict)
    """Complete copies of earlier rounds, with the bookie that stores them."""
    quarantined: Mapping[BookieId, Shut] = field(default_factory=dict)
    """Bookies to which no request is sent now."""
    spare_bytes: Mapping[BookieId, int] = field(default_factory=dict)
    """Per writable bookie: the free space above the floor, less what is being sent. Bookies whose
    space is unknown are not listed."""

    def having_room(self, byte_count: int, loads: Mapping[BookieId, int]) -> "Targets":
        """Return the targets with room for that much more, besides the ``loads`` sent to each."""
        if byte_count < SMALL_COPY_BYTES and not loads and self.only_local is None:
            return self
        short = {}
        for bookie, spare_bytes in self.spare_bytes.items():
            more_bytes = byte_count + loads.get(bookie, 0)
            is_short = spare_bytes < (0 if more_bytes < SMALL_COPY_BYTES else more_bytes)
            if is_short and self._may_be_given(bookie):
                short[bookie] = Exclusion.SHORT_OF_SPACE
        if not short:
            return self
        candidates = {b: each for b, each in self.candidates.items() if b not in short}
        return replace(self, candidates=candidates, barred={**self.barred, **short})

    def may_refill(self, bookie: BookieId) -> bool:
        """Return True if a registered member may be given what it lacks (rule S15)."""
        return self._may_be_given(bookie) and bookie not in self.refilled

    def _may_be_given(self, bookie: BookieId) -> bool:
        """Return True if the bookie may be sent anything, even only what it lacks itself."""
        return bookie in self.candidates or self.barred.get(bookie) in (
            Exclusion.NOT_LOCAL,
            Exclusion.ISOLATED,
        )

    def quarantine_end_ms(self, *, besides: Collection[BookieId]) -> int | None:
        """Return when the first possible target besides these leaves quarantine; None: never."""
        ends_ms = (
            self.quarantined[bookie].until_ms
            for bookie, exclusion in self.barred.items()
            if exclusion is Exclusion.QUARANTINED and bookie not in besides
        )
        return min(ends_ms, default=None)


# --- Free disk space ------------------------------------------------------------------------------

INTERVAL_S = 60.0
"""Average interval between two questions to a bookie."""
JITTER = 0.2
"""Random variation of the interval, so that the nodes do not ask at the same time."""
NEAR_INTERVAL_S = 10.0
"""Interval for a bookie near the floor, which the copies of a minute could fill."""
NEAR_FACTOR = 2.0
"""A bookie is near the floor if less than this multiple of the floor is free."""
STALE_S = 600.0
"""Time that the last answer of a bookie is used if it does not answer any more."""
START_TIMEOUT_S = 5.0
"""Maximum time that the start of a worker waits for the first answers."""
BOOKIES_AT_ONCE = 16


def spare_bytes(space: DiskSpace | None, *, floor_share: float) -> int | None:
    """Return the free bytes beyond the floor, negative below it; None if unknown or without a
    floor.

    ``floor_share``: of the total space; 0: no floor.
    """
    if space is None or not floor_share:
        return None
    return math.floor(space.free_bytes - floor_share * space.total_bytes)


def is_short(space: DiskSpace | None, *, floor_share: float) -> bool:
    """Return True if less than the floor is known to be free."""
    spare = spare_bytes(space, floor_share=floor_share)
    return spare is not None and spare < 0


@dataclass(slots=True, eq=False)
class DiskSpaceSource:
    """The disk space that the bookies reported last, kept up to date by ``run``. ``health``:
    receives bookies that require authentication."""

    bookies: Bookies
    views: ViewSource
    floor_share: float
    clock: Clock
    rng: random.Random
    health: BookieHealth | None = None
    disk_spaces: dict[BookieId, DiskSpace] = dataclasses.field(default_factory=dict, init=False)
    _told_at_s: dict[BookieId, float] = dataclasses.field(default_factory=dict, init=False)
    _landed_bytes: Counter[BookieId] = dataclasses.field(default_factory=Counter, init=False)
    """Bytes of our copies since the last answered question."""
    _due_at_s: dict[BookieId, float] = dataclasses.field(default_factory=dict, init=False)
    _short: frozenset[BookieId] = dataclasses.field(default=frozenset(), init=False)

    def free_bytes(self, bookie: BookieId) -> int | None:
        """Return the free bytes, less our copies since; None if unknown."""
        space = self.disk_spaces.get(bookie)
        return None if space is None else max(0, space.free_bytes - self._landed_bytes[bookie])

    def spare_bytes(self, bookie: BookieId) -> int | None:
        """Return the free bytes beyond the floor, less our copies since; None if unknown."""
        spare = spare_bytes(self.disk_spaces.get(bookie), floor_share=self.floor_share)
        return None if spare is None else spare - self._landed_bytes[bookie]

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        """Count a copy that was written there, until the bookie is asked again."""
        self._landed_bytes[bookie] += byte_count

    async def start(self) -> None:
        """Ask all bookies before the first placement. Does not wait for slow bookies."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.ask_due()

    async def run(self) -> None:
        """Ask bookies at intervals, until cancelled."""
        while True:
            seen = self.views.change_count
            await self.ask_due()
            now_s = self.clock.now_s()
            next_s = min(self._due_at_s.values(), default=now_s + INTERVAL_S)
            await self.views.wait_change(seen, timeout_s=next_s - now_s)

    async def ask_due(self) -> None:
        """Ask the possible targets that are due, and forget other bookies."""
        receiving, now_s = self.views.current.receiving, self.clock.now_s()
        for bookie in self._due_at_s.keys() - receiving:
            del self._due_at_s[bookie], self._landed_bytes[bookie]
        for bookie, told_at_s in list(self._told_at_s.items()):
            if bookie not in receiving or now_s - told_at_s > STALE_S:
                del self._told_at_s[bookie], self.disk_spaces[bookie]
        due = sorted(b for b in receiving if self._due_at_s.get(b, now_s) <= now_s)
        limit = asyncio.Semaphore(BOOKIES_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for bookie in due:
                tasks.create_task(self._ask(bookie, limit))
        spaces, before, share = self.disk_spaces, self._short, self.floor_share
        self._short = frozenset(b for b in spaces if is_short(spaces[b], floor_share=share))
        for bookie in sorted(self._short - before):
            log.warning(
                "bookie.disk_space_low",
                bookie=bookie,
                free_bytes=spaces[bookie].free_bytes,
                total_bytes=spaces[bookie].total_bytes,
                floor_share=share,
            )
        for bookie in sorted(before - self._short):
            log.info("bookie.disk_space_recovered", bookie=bookie)

    async def _ask(self, bookie: BookieId, limit: asyncio.Semaphore) -> None:
        async with limit:
            landed_bytes = self._landed_bytes[bookie]
            try:
                self.disk_spaces[bookie] = await self.bookies.room(bookie)
                self._landed_bytes[bookie] -= landed_bytes
                self._told_at_s[bookie] = self.clock.now_s()
            except SecureConnectionError as error:
                # A bookie that requires authentication only closes connections over V2; this V3
                # request shows the reason.
                if self.health is not None:
                    self.health.note_silence(bookie, str(error.args[0]))
            except BookmenderError as error:  # busy, absent or too old; it is asked again later
                log.debug("bookie.disk_space_unknown", bookie=bookie, error=str(error))
        space, near_share = self.disk_spaces.get(bookie), NEAR_FACTOR * self.floor_share
        interval_s = NEAR_INTERVAL_S if is_short(space, floor_share=near_share) else INTERVAL_S
        jitter = self.rng.uniform(1 - JITTER, 1 + JITTER)
        self._due_at_s[bookie] = self.clock.now_s() + interval_s * jitter


# --- Targets of all repairs -----------------------------------------------------------------------

Allowed = Callable[[LedgerMetadata, Collection[BookieId]], frozenset[BookieId] | None]
"""Returns the writable bookies that may store copies of a ledger; None: all."""


@dataclass(eq=False)
class TargetSelector:
    """Selects the targets for all repairs of a worker.

    The candidates are computed once for each view of the cluster, and again every few seconds for
    changed disk space. With hundreds of bookies and thousands of small ledgers, more would cost too
    much.

    ``local``: the bookie of this host. ``is_local_only``: it is the only target (``target =
    "local"``). ``allowed``: the bookies that may store an isolated ledger.
    """

    placement: PlacementPolicy
    _: KW_ONLY
    clock: Clock
    local: BookieId | None = None
    is_local_only: bool = False
    disk_spaces: DiskSpaceSource | None = None
    rack: Callable[[BookieId], str] = lambda bookie: DEFAULT_RACK
    health: BookieHealth | None = None
    allowed: Allowed = anywhere

    def __post_init__(self) -> None:
        self._health = self.health or BookieHealth(self.clock)
        self._load_bytes: dict[BookieId, int] = {}
        self._view: ClusterView | None = None
        self._sorted_at_s = 0.0
        self._candidates: dict[BookieId, Candidate] = {}
        self._barred: dict[BookieId, Exclusion] = {}
        self._spare_bytes: dict[BookieId, int] = {}
        """Free space above the floor, less what is being sent, where it is known."""

    def targets(
        self,
        view: ClusterView,
        metadata: LedgerMetadata | None = None,
        *,
        refused: Collection[BookieId] = (),
        refilled: Collection[BookieId] = (),
        copied: Mapping[CopyKey, BookieId] | None = None,
    ) -> Targets:
        """Return the targets for one ledger now (None: for any ledger). ``refused``: bookies that
        refused a copy of it. ``refilled``, ``copied``: as in ``Targets``."""
        now_s = self.clock.now_s()
        if view is not self._view or now_s - self._sorted_at_s >= SORTED_AGAIN_S:
            self._view, self._sorted_at_s = view, now_s
            self._candidates, self._barred, self._spare_bytes = {}, {}, {}
            for bookie in sorted(view.writable):
                self._sort_one(bookie, view)
        candidates, barred = self._candidates, self._barred
        quarantined = self._health.shut()
        allowed = None if metadata is None else self.allowed(metadata, view.writable)
        if refused or quarantined or allowed is not None:
            outside = () if allowed is None else candidates.keys() - allowed
            more = dict.fromkeys(outside, Exclusion.ISOLATED)
            more |= dict.fromkeys(candidates.keys() & refused, Exclusion.REFUSED)
            more |= dict.fromkeys(candidates.keys() & quarantined.keys(), Exclusion.QUARANTINED)
            candidates = {b: each for b, each in candidates.items() if b not in more}
            barred = barred | more
        return Targets(
            candidates=candidates,
            placement=self.placement,
            barred=barred,
            refilled=frozenset(refilled),
            only_local=self.local if self.is_local_only else None,
            copied=copied or {},
            quarantined=quarantined,
            spare_bytes=self._spare_bytes,
        )

    def candidates(
        self, view: ClusterView, metadata: LedgerMetadata | None = None
    ) -> list[Candidate]:
        """Return the possible new members of a ledger under recovery, regardless of ``target``."""
        able = view.receiving - self._health.shut().keys()
        allowed = None if metadata is None else self.allowed(metadata, view.writable)
        if allowed is not None:
            able &= allowed
        return [self._candidate(b) for b in able if (self._spare(b) or 0) >= 0]

    def why_no_candidate(
        self, view: ClusterView, members: Collection[BookieId], metadata: LedgerMetadata
    ) -> tuple[tuple[Exclusion, int], ...] | None:
        """Return why ``candidates`` contains no bookie besides ``members``; None if it does."""
        candidates = {each.bookie: each for each in self.candidates(view, metadata)}
        barred = self.targets(view, metadata).barred.items()
        return exclusion_counts(
            Targets(
                candidates=candidates,
                placement=self.placement,
                barred={b: exclusion for b, exclusion in barred if b not in candidates},
            ),
            members,
        )

    @contextmanager
    def under_way(self, bookie: BookieId, byte_count: int) -> Iterator[None]:
        """Count the bytes as being sent to the bookie. Those that ``landed`` count until the bookie
        reports its free space again."""
        self._add_load(bookie, byte_count)
        try:
            yield
        finally:
            self._add_load(bookie, -byte_count)

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        """Count bytes that are ``under_way`` as stored. Call it before ``under_way`` ends."""
        if self.disk_spaces is not None:
            self.disk_spaces.landed(bookie, byte_count)

    def _add_load(self, bookie: BookieId, byte_count: int) -> None:
        self._load_bytes[bookie] = self._load_bytes.get(bookie, 0) + byte_count
        if not self._load_bytes[bookie]:
            del self._load_bytes[bookie]
        if self._view is not None and bookie in self._view.writable:
            self._sort_one(bookie, self._view)

    def _sort_one(self, bookie: BookieId, view: ClusterView) -> None:
        """Put the bookie among the candidates or among the excluded ones."""
        spare_bytes = self._spare(bookie)
        if spare_bytes is None:
            self._spare_bytes.pop(bookie, None)
        else:
            self._spare_bytes[bookie] = spare_bytes
        if bookie in view.orders.draining:
            exclusion = Exclusion.DRAINING
        elif bookie in view.orders.maintenance:
            exclusion = Exclusion.MAINTENANCE
        elif self.is_local_only and bookie != self.local:
            exclusion = Exclusion.NOT_LOCAL
        elif spare_bytes is not None and spare_bytes < 0:
            exclusion = Exclusion.SHORT_OF_SPACE
        else:
            self._candidates[bookie] = self._candidate(bookie)
            self._barred.pop(bookie, None)
            return
        self._barred[bookie] = exclusion
        self._candidates.pop(bookie, None)

    def _spare(self, bookie: BookieId) -> int | None:
        """Return the free space above the floor, less what is being sent; None if it is unknown."""
        disks = self.disk_spaces
        spare_bytes = None if disks is None else disks.spare_bytes(bookie)
        return None if spare_bytes is None else spare_bytes - self._load_bytes.get(bookie, 0)

    def _candidate(self, bookie: BookieId) -> Candidate:
        disks = self.disk_spaces
        return Candidate(
            bookie=bookie,
            rack=self.rack(bookie),
            load_bytes=self._load_bytes.get(bookie, 0),
            free_bytes=None if disks is None else disks.free_bytes(bookie),
        )


def exclusion_counts(
    targets: Targets, members: Collection[BookieId]
) -> tuple[tuple[Exclusion, int], ...] | None:
    """Return how many writable bookies are excluded, by reason; None if a candidate is left.
    ``members``: bookies that must not receive this copy."""
    barred = dict(targets.barred)
    barred.update(
        (bookie, Exclusion.MEMBER)
        for bookie in members
        if bookie in targets.candidates or barred.get(bookie) is Exclusion.SHORT_OF_SPACE
    )
    if len(barred) < len(targets.barred) + len(targets.candidates):
        return None
    counts = Counter(barred.values())
    return tuple((exclusion, counts[exclusion]) for exclusion in Exclusion if counts[exclusion])


def quarantine_errors(targets: Targets) -> tuple[str, ...]:
    """Return why bookies are in quarantine, as far as it is known."""
    shut = (
        targets.quarantined.get(bookie)
        for bookie, exclusion in targets.barred.items()
        if exclusion is Exclusion.QUARANTINED
    )
    return tuple(sorted({each.reason for each in shut if each is not None} - {""}))


LEDGERS_MAX = 10_000
"""Ledgers remembered. The one that was refused longest ago is forgotten first."""


class Refusals:
    """Remembers for a worker which bookies refused copies of which ledger (rule S11).

    A bookie whose garbage collector has deleted a ledger refuses every later add to it, as if the
    ledger were fenced, until it restarts. Without this memory each attempt would copy the beginning
    of the ledger in vain. A bookie that registers again may have restarted, so it is asked again.
    """

    def __init__(self) -> None:
        self._refusing: OrderedDict[int, dict[BookieId, int]] = OrderedDict()
        """Per ledger the bookies that refused it, with the czxid of their registration."""

    def note(self, ledger_id: int, bookie: BookieId, view: ClusterView) -> None:
        self._refusing.setdefault(ledger_id, {})[bookie] = view.czxid(bookie)
        self._refusing.move_to_end(ledger_id)
        if len(self._refusing) > LEDGERS_MAX:
            self._refusing.popitem(last=False)

    def of(self, ledger_id: int, view: ClusterView) -> set[BookieId]:
        """Return the bookies that refused the ledger since they registered."""
        refusing = self._refusing.get(ledger_id)
        if refusing is None:
            return set()
        return {bookie for bookie, czxid in refusing.items() if view.czxid(bookie) == czxid}
