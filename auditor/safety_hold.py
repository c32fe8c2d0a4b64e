"""The safety hold: a pause of marking and fencing after a mass failure.

A failed switch, rack or ZooKeeper removes the znodes of many bookies at once, while their disks are
intact. It would be wrong to copy all their ledgers, and harmful to fence ledgers that are being
written. So the leader writes an order of a hold: no node marks ledgers for lost bookies or fences
any more. The hold ends when enough bookies are back, after its own time, or when an operator says
that the bookies are lost.

A hold begins when more than a set share of the bookies disappeared within a window, and they are at
least a set number or a whole rack. The share counts in both cases: where racks are small, the loss
of one is an ordinary loss. Bookies may be absent when a leader begins, without a record by an
earlier leader. These count as having disappeared now, because after a power failure bookies may
start later than our nodes.

A hold that has ended keeps its order as long as one of its bookies is absent. No new hold begins
because of these bookies; it may begin because of others.

``wanted_hold`` decides without I/O. ``SafetyHolds`` writes the order, or only remembers it in
observe mode.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import structlog

from auditor.settings import HoldSettings
from ledgers.clock import Clock
from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK, Locate
from ledgers.store import Create, Delete, MetadataStore, Operation, SetData
from replication.cluster import ClusterView
from replication.history import NO_HISTORY, Event, History, Kind
from replication.orders import HoldOrder, Orders, OrderStore, hold_znode
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, ensure_znode

log = structlog.get_logger()

CALM_S = 15.0
"""Time during which too few bookies for a hold must be absent before the hold ends. Otherwise
bookies that come and go would end and begin it again and again."""
TRIES_MAX = 5
BOOKIES_LOGGED_MAX = 20
RACK_BOOKIES_MIN = 2
"""The loss of a rack with fewer bookies is not the loss of a whole rack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieCensus:
    """The bookies that count for a hold. ``absent_since_s``: absent bookies that have a cookie,
    except bookies in maintenance and draining ones. Times are seconds of one clock."""

    present: frozenset[BookieId]
    absent_since_s: Mapping[BookieId, float]
    settled: frozenset[BookieId] = frozenset()
    """Bookies whose ledgers are marked. It is too late for a hold because of these alone."""
    rack_of: Locate = lambda _: DEFAULT_RACK

    @classmethod
    def of(
        cls,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
        rack_of: Locate,
    ) -> "BookieCensus":
        """Return the census. Bookies in maintenance, draining bookies and bookies without a cookie
        do not count.

        ``lost_since_s``: bookies whose ledgers are marked, perhaps by an earlier leader, and since
        when each is absent.
        """
        # If there is no cookie at all, an operator deleted their directory. Then every bookie
        # counts; otherwise no hold could begin.
        known = view.cookies.keys() or view.available | absent_since_s.keys()
        counted = known - view.orders.maintenance.keys() - view.orders.draining.keys()
        return cls(
            present=view.available,
            absent_since_s={
                bookie: min(since_s, lost_since_s.get(bookie, since_s))
                for bookie, since_s in absent_since_s.items()
                if bookie in counted
            },
            settled=frozenset(lost_since_s),
            rack_of=rack_of,
        )


def wanted_hold(
    census: BookieCensus,
    current: HoldOrder | None,
    *,
    settings: HoldSettings,
    now_s: float,
    now_ms: int,
    is_calm: bool,
) -> HoldOrder | None:
    """Return the order that is due now in place of ``current``; None if none is due.

    ``is_calm``: True if too few bookies have been absent for long enough to end the current hold.
    """
    current = Orders(hold=current).at(now_ms).hold
    named = frozenset(() if current is None else current.bookies)
    recent = {
        bookie: since_s
        for bookie, since_s in census.absent_since_s.items()
        if bookie not in census.settled or now_s - since_s <= settings.window_s
    }
    if current is not None and not current.is_released:
        if current.is_by_operator:
            return current
        if is_calm or not settings.enabled:
            return None
        return replace(current, bookies=tuple(sorted(recent.keys() | named)))
    wave = {bookie: since_s for bookie, since_s in recent.items() if bookie not in named}
    for start_s in sorted(set(wave.values())) if settings.enabled else ():
        # The share is of the bookies that were present when the first of the wave disappeared.
        later = {bookie for bookie, since_s in wave.items() if since_s >= start_s}
        gone = {bookie for bookie in later if wave[bookie] <= start_s + settings.window_s}
        if not _is_enough(gone, census, settings, bookie_count=len(census.present) + len(later)):
            continue
        racks = _whole_racks(gone, census)
        including = f", including all of {', '.join(racks)}" if racks else ""
        return HoldOrder(
            since_ms=now_ms,
            until_ms=now_ms + int(settings.lasts_s * 1000) if settings.lasts_s else None,
            bookies=tuple(sorted(wave)),
            reason=f"{len(gone)} of {len(census.present) + len(gone)} bookies disappeared within "
            f"{settings.window_s:g} s{including}",
        )
    bound = named & census.absent_since_s.keys()
    return replace(current, bookies=tuple(sorted(bound))) if current and bound else None


def is_warranted(hold: HoldOrder, census: BookieCensus, settings: HoldSettings) -> bool:
    """True if the bookies of the hold that are still absent suffice for a hold."""
    absent = census.absent_since_s.keys() & set(hold.bookies)
    return _is_enough(absent, census, settings, bookie_count=len(census.present) + len(absent))


def _is_enough(
    disappeared: Collection[BookieId],
    census: BookieCensus,
    settings: HoldSettings,
    *,
    bookie_count: int,
) -> bool:
    if len(disappeared) <= settings.share * bookie_count:
        return False
    return len(disappeared) >= settings.bookies_min or bool(_whole_racks(disappeared, census))


def _whole_racks(disappeared: Collection[BookieId], census: BookieCensus) -> list[str]:
    """Return the racks, except the default one, that lost several bookies and have none left."""
    members = defaultdict(set)
    for bookie in disappeared:
        members[census.rack_of(bookie)].add(bookie)
    inhabited = {DEFAULT_RACK, *map(census.rack_of, census.present)}
    return sorted(
        rack
        for rack, bookies in members.items()
        if len(bookies) >= RACK_BOOKIES_MIN and rack not in inhabited
    )


# --- Over time -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SafetyHolds:
    """The holds of a leader, and in observe mode those that a leader would order.

    Writes through ``batcher``, whose guards prove the leadership (rule S9). In observe mode
    (``batcher`` is None) the order stays in memory, and an existing order has priority over it.
    """

    store: MetadataStore
    batcher: Batcher | None
    paths: ClusterPaths
    settings: HoldSettings
    """May be replaced at any time (``apply``)."""
    clock: Clock
    rack_of: Locate = lambda _: DEFAULT_RACK
    history: History = NO_HISTORY
    _calm_since_s: float | None = field(default=None, init=False)
    """Since when too few bookies are absent for the existing hold."""
    _logged: HoldOrder | None = field(default=None, init=False)
    """The hold in force that was logged last."""
    _simulated: HoldOrder | None = field(default=None, init=False)
    """In observe mode, the order that a leader would have written."""

    def __post_init__(self) -> None:
        self._order_store, self._znode = OrderStore(self.store, self.paths), hold_znode(self.paths)

    def apply(self, settings: HoldSettings) -> None:
        """Use these settings from the next ``update`` on."""
        self.settings = settings

    @property
    def wait_s(self) -> float:
        """Seconds until ``update`` may decide something else without any event. The end of a hold's
        own time does not count: the view changes with it."""
        if self._calm_since_s is None:
            return math.inf
        return max(0.0, self._calm_since_s + CALM_S - self.clock.now_s())

    async def update(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> HoldOrder | None:
        """Begin, extend or end a hold if that is due. Return the hold in force now, if any; then no
        bookie counts as lost.

        ``absent_since_s``: since when each bookie is absent. ``lost_since_s``: the lost bookies
        whose ledgers are marked, and since when each is absent. Raises UnavailableError if the hold
        in force is unknown; then nothing may be marked.
        """
        census = BookieCensus.of(
            view, absent_since_s, lost_since_s=lost_since_s, rack_of=self.rack_of
        )
        seen = view.orders.hold
        if self.batcher is None:
            self._simulated = self._wanted(seen or self._simulated, census)
            return _in_force(self._simulated)
        # The usual case: no hold is in force and none is due, so the order need not be read.
        if _in_force(seen) is None and self._wanted(seen, census) == seen:
            return self._log_change(seen, seen, census)
        path = self._znode.path
        for _ in range(TRIES_MAX):
            current = await self._order_store.stored(self._znode)
            order = None if current is None else current.value
            wanted = self._wanted(order, census)
            if wanted == order:
                return self._log_change(order, wanted, census)
            operation: Operation
            if current is None:
                assert wanted is not None, "there is no order, and none is due"
                operation = Create(path=path, data=wanted.to_json())
            elif wanted is None:
                operation = Delete(path=path, version=current.version)
            else:
                operation = SetData(path=path, data=wanted.to_json(), version=current.version)
            try:
                await self.batcher.apply(operation)
            except (ConflictError, NodeExistsError):
                continue  # another client was faster: read again
            except NoNodeError:  # the order or its directory was deleted
                await ensure_znode(self.store, self.paths.orders)
            else:
                return self._log_change(order, wanted, census)
        raise UnavailableError("other clients keep changing the hold", path=path)

    def _wanted(self, order: HoldOrder | None, census: BookieCensus) -> HoldOrder | None:
        """Return the order that is due in place of ``order``. Notes since when few are absent."""
        is_ours = order is not None and not (order.is_by_operator or order.is_released)
        if order is None or not is_ours or is_warranted(order, census, self.settings):
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = self.clock.now_s()
        return wanted_hold(
            census,
            order,
            settings=self.settings,
            now_s=self.clock.now_s(),
            now_ms=self.clock.wall_ms(),
            is_calm=self.wait_s <= 0,
        )

    def _log_change(
        self, before: HoldOrder | None, now: HoldOrder | None, census: BookieCensus
    ) -> HoldOrder | None:
        """Log what changed since the last call. Return ``now`` if it is in force.

        A hold is logged as an error, because an operator must look. Each new leader logs an
        existing hold once. ``before``: the order that was stored.
        """
        held, logged = _in_force(now), self._logged
        self._logged = held
        absent = sorted(census.absent_since_s)[:BOOKIES_LOGGED_MAX]
        if held is not None and not _is_same(held, logged):
            is_new = not _is_same(held, before)
            log.error(
                "hold.began" if is_new else "hold.found",
                reason=held.reason,
                is_by_operator=held.is_by_operator,
                absent_count=len(census.absent_since_s),
                bookie_count=len(census.present) + len(census.absent_since_s),
                absent=absent,
                until_ms=held.until_ms,
            )
            if is_new:
                self.history.record(
                    Event(
                        kind=Kind.HOLD_BEGAN,
                        bookies=held.bookies,
                        reason=held.reason,
                        ends_ms=held.until_ms,
                    )
                )
        if held is None and logged is not None:
            log.warning("hold.ended", absent=absent)
            cause = "order" if _in_force(before) is None else "returned"
            if logged.until_ms is not None and logged.until_ms <= self.clock.wall_ms():
                cause = "time"
            self.history.record(Event(kind=Kind.HOLD_ENDED, bookies=tuple(absent), cause=cause))
            self._calm_since_s = None
        return held


def _in_force(order: HoldOrder | None) -> HoldOrder | None:
    return None if order is None or order.is_released else order


def _is_same(hold: HoldOrder, other: HoldOrder | None) -> bool:
    """Return True also if bookies were added meanwhile."""
    return other is not None and hold.since_ms == other.since_ms
