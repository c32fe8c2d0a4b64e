"""Carries out safety holds: ``holding`` decides which hold is due; the leader writes the order and
logs it as an error. Observe mode keeps the order in memory instead.

The safety hold: so many bookies went at once that it is hardly they who failed.

A switch, a rack's power or ZooKeeper itself takes many bookies' znodes away together, while their
disks are as they were. To copy all that they hold would be the wrong answer, and to fence what is
being written a harmful one. So the leader orders a hold (``holds``): no further ledger is marked
for lost bookies, and nothing fenced, by any node, until enough of them are back, the hold's own end
comes, or an operator says that they are lost.

A hold begins when more than a set share of the bookies went within a window of each other, and they
are at least so many, or a whole rack. The share must be exceeded in either case: where racks are
small, losing one is an ordinary loss. What a leader finds away when it begins, and no leader before
it knew of, went just now: after a power cut bookies may come back later than we do.

A hold that is over, by its own end or an operator's word, is kept as long as one of its bookies is
away: it binds for these, so that nothing holds on their account again; a further wave of others
does.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import structlog

from auditor.settings import HoldSettings
from ledgers.clock import Clock
from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK, Locate
from ledgers.store import Create, Delete, MetadataStore, Operation, SetData
from replication.cluster import ClusterView
from replication.orders import HoldOrder, Orders, OrderStore, VersionedOrder, hold_znode
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, ensure_znode

RACK_BOOKIES_MIN = 2
"""A rack of one bookie is no more than that bookie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieCensus:
    """Who is there and who is not, of the bookies that count. Times are seconds of one clock.

    ``absent_since_s``: those that were set up and are away neither on purpose nor for good.
    """

    present: frozenset[BookieId]
    absent_since_s: Mapping[BookieId, float]
    settled: frozenset[BookieId] = frozenset()
    """Those whose ledgers are marked: on their account alone it is too late to hold."""
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
        """Without those that are away on purpose: under maintenance, or drained and then gone. Nor
        does one count that ledgers name and that has no cookie (any more).

        ``lost_since_s``: whose ledgers are marked, by an earlier leader perhaps, which saw them go.
        """
        # Without a single cookie, somebody deleted their directory: then every bookie counts, as no
        # hold would begin.
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
    standing: HoldOrder | None,
    *,
    settings: HoldSettings,
    now_s: float,
    now_ms: int,
    is_calm: bool,
) -> HoldOrder | None:
    """The order that should stand now, in place of ``standing``; None: there should be none.

    ``is_calm``: the standing hold has not been warranted for long enough.
    """
    standing = Orders(hold=standing).at(now_ms).hold
    recent = {
        bookie: since_s
        for bookie, since_s in census.absent_since_s.items()
        if bookie not in census.settled or now_s - since_s <= settings.window_s
    }
    if standing is None or standing.is_released:
        return _after_release(census, recent, standing, settings, now_ms=now_ms)
    if standing.is_by_operator:
        return standing
    if is_calm or not settings.enabled:
        return None
    return replace(standing, bookies=_in_order(recent.keys() | set(standing.bookies)))


def is_warranted(hold: HoldOrder, census: BookieCensus, settings: HoldSettings) -> bool:
    """Whether the bookies of a hold that are still away are enough for it, whenever they went."""
    away = census.absent_since_s.keys() & set(hold.bookies)
    return _is_enough(away, census, settings, bookie_count=len(census.present) + len(away))


def _after_release(
    census: BookieCensus,
    recent: Mapping[BookieId, float],
    released: HoldOrder | None,
    settings: HoldSettings,
    *,
    now_ms: int,
) -> HoldOrder | None:
    named = set() if released is None else set(released.bookies)
    wave = {bookie: since_s for bookie, since_s in recent.items() if bookie not in named}
    if settings.enabled and (gone := _gone_at_once(wave, census, settings)):
        return HoldOrder(
            since_ms=now_ms,
            until_ms=now_ms + int(settings.lasts_s * 1000) if settings.lasts_s else None,
            bookies=_in_order(wave),
            reason=_reason(gone, census, settings),
        )
    bound = named & census.absent_since_s.keys()
    return replace(released, bookies=_in_order(bound)) if released is not None and bound else None


def _gone_at_once(
    wave: Mapping[BookieId, float], census: BookieCensus, settings: HoldSettings
) -> frozenset[BookieId]:
    """Those that went within the window of each other, if they are enough for a hold; else none.

    The share is of the bookies that were there when the first of them went.
    """
    for start_s in sorted(set(wave.values())):
        later = {bookie: since_s for bookie, since_s in wave.items() if since_s >= start_s}
        gone = {b for b, since_s in later.items() if since_s <= start_s + settings.window_s}
        if _is_enough(gone, census, settings, bookie_count=len(census.present) + len(later)):
            return frozenset(gone)
    return frozenset()


def _is_enough(
    gone: Collection[BookieId], census: BookieCensus, settings: HoldSettings, *, bookie_count: int
) -> bool:
    if len(gone) <= settings.share * bookie_count:
        return False
    return len(gone) >= settings.bookies_min or bool(_whole_racks(gone, census))


def _whole_racks(gone: Collection[BookieId], census: BookieCensus) -> list[str]:
    """Racks, the default one being none, of which several bookies are gone and nobody is left."""
    members = defaultdict(set)
    for bookie in gone:
        members[census.rack_of(bookie)].add(bookie)
    inhabited = {DEFAULT_RACK, *map(census.rack_of, census.present)}
    return sorted(
        rack
        for rack, bookies in members.items()
        if len(bookies) >= RACK_BOOKIES_MIN and rack not in inhabited
    )


def _reason(gone: Collection[BookieId], census: BookieCensus, settings: HoldSettings) -> str:
    count = len(census.present) + len(gone)
    racks = _whole_racks(gone, census)
    told = f", all of {', '.join(racks)} among them" if racks else ""
    return f"{len(gone)} of {count} bookies went within {settings.window_s:g} s{told}"


def _in_order(bookies: Collection[BookieId]) -> tuple[BookieId, ...]:
    return tuple(sorted(bookies))


log = structlog.get_logger()

CALM_S = 15.0
"""How long too few bookies for a hold must be absent before the hold ends. Otherwise bookies that
come and go would end and begin it again and again."""
TRIES_MAX = 5
BOOKIES_LOGGED_MAX = 20


class SafetyHoldPolicy:
    """Decides over time which hold is due, as one leader does. Writes nothing."""

    def __init__(
        self,
        settings: HoldSettings,
        clock: Clock,
        *,
        rack_of: Locate = lambda _: DEFAULT_RACK,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rack_of = rack_of
        self._calm_since_s: float | None = None
        """Since when too few bookies are absent for the existing hold."""

    def census(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> BookieCensus:
        """Arguments as for ``Holds.keep``."""
        return BookieCensus.of(
            view, absent_since_s, lost_since_s=lost_since_s, rack_of=self._rack_of
        )

    def wanted(self, order: HoldOrder | None, census: BookieCensus) -> HoldOrder | None:
        """Return the order that is due in place of ``order``."""
        return wanted_hold(
            census,
            order,
            settings=self._settings,
            now_s=self._clock.now_s(),
            now_ms=self._clock.wall_ms(),
            is_calm=self._is_calm(order, census),
        )

    @property
    def wait_s(self) -> float:
        """Seconds until ``wanted`` may decide something else without any event.

        The end of a hold's own time does not count: the view changes with it.
        """
        if self._calm_since_s is None:
            return math.inf
        return max(0.0, self._calm_since_s + CALM_S - self._clock.now_s())

    def begin_anew(self) -> None:
        """Forget the last hold, because none is in force any more."""
        self._calm_since_s = None

    def _is_calm(self, order: HoldOrder | None, census: BookieCensus) -> bool:
        is_ours = order is not None and not order.is_by_operator and not order.is_released
        if order is None or not is_ours or is_warranted(order, census, self._settings):
            self._calm_since_s = None
            return False
        if self._calm_since_s is None:
            self._calm_since_s = self._clock.now_s()
        return self.wait_s <= 0


class Holds:
    """The holds of a leader. Writes through ``batcher``, whose guards prove the leadership (rule
    S9)."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        settings: HoldSettings,
        clock: Clock,
        rack_of: Locate = lambda _: DEFAULT_RACK,
    ) -> None:
        self._store, self._paths = store, paths
        self._batcher = batcher
        self._order_store, self._znode = OrderStore(store, paths), hold_znode(paths)
        self._judge = SafetyHoldPolicy(settings, clock, rack_of=rack_of)
        self._told: HoldOrder | None = None
        """The hold in force that was logged last."""

    async def keep(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> HoldOrder | None:
        """Begin, extend or end a hold if that is due. Return the hold in force now, if any; then no
        bookie counts as lost.

        ``absent_since_s``: as ``still_absent`` returns it. ``lost_since_s``: the lost bookies whose
        ledgers are marked, and since when each is absent. Raises UnavailableError if the hold in
        force is unknown; then nothing may be marked.
        """
        census = self._judge.census(view, absent_since_s, lost_since_s=lost_since_s)
        seen = view.orders.hold
        is_held = seen is not None and not seen.is_released
        # The usual case: the order need not be read.
        if not is_held and self._judge.wanted(seen, census) == seen:
            return self._tell(seen, seen, census)
        for _ in range(TRIES_MAX):
            standing = await self._order_store.stored(self._znode)
            order = None if standing is None else standing.order
            wanted = self._judge.wanted(order, census)
            if wanted == order or await self._write(wanted, over=standing):
                return self._tell(order, wanted, census)
        raise UnavailableError("other clients keep changing the hold", path=self._znode.path)

    @property
    def wait_s(self) -> float:
        """Seconds until ``keep`` must be called again even without any event."""
        return self._judge.wait_s

    async def _write(
        self, wanted: HoldOrder | None, *, over: VersionedOrder[HoldOrder] | None
    ) -> bool:
        """Write the order. Return False if another client changed it first, or had deleted its
        directory, which is then created again."""
        try:
            await self._batcher.apply(self._operation(wanted, over=over))
        except (ConflictError, NodeExistsError):
            return False
        except NoNodeError:
            await ensure_znode(self._store, self._paths.orders)
            return False
        return True

    def _operation(
        self, wanted: HoldOrder | None, *, over: VersionedOrder[HoldOrder] | None
    ) -> Operation:
        path = self._znode.path
        if over is None:
            assert wanted is not None, "there is no order, and none is due"
            return Create(path=path, data=wanted.to_json())
        if wanted is None:
            return Delete(path=path, version=over.version)
        return SetData(path=path, data=wanted.to_json(), version=over.version)

    def _tell(
        self, before: HoldOrder | None, now: HoldOrder | None, census: BookieCensus
    ) -> HoldOrder | None:
        """Log what changed. Return ``now`` if it is in force."""
        held = _in_force(now)
        if held is not None and not _is_same(held, self._told):
            _tell_of_hold(held, census, is_new=not _is_same(held, before))
        if held is None and self._told is not None:
            log.warning("hold.ended", away=_told_bookies(census.absent_since_s))
            self._judge.begin_anew()
        self._told = held
        return held


class ForeseenHolds:
    """The holds that a leader would keep, for observe mode. Writes nothing."""

    def __init__(self, judge: SafetyHoldPolicy) -> None:
        self._judge = judge
        self._order: HoldOrder | None = None
        """The order that a leader would have written."""

    async def keep(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> HoldOrder | None:
        """As ``Holds.keep``. An existing order has priority over ours."""
        census = self._judge.census(view, absent_since_s, lost_since_s=lost_since_s)
        self._order = self._judge.wanted(view.orders.hold or self._order, census)
        return _in_force(self._order)

    @property
    def wait_s(self) -> float:
        return self._judge.wait_s


def _in_force(order: HoldOrder | None) -> HoldOrder | None:
    return None if order is None or order.is_released else order


def _is_same(hold: HoldOrder, other: HoldOrder | None) -> bool:
    """Return True also if bookies were added meanwhile."""
    return other is not None and hold.since_ms == other.since_ms


def _tell_of_hold(hold: HoldOrder, census: BookieCensus, *, is_new: bool) -> None:
    """Log the hold as an error, because an operator must look. Each new leader logs an existing
    hold once."""
    log.error(
        "hold.begun" if is_new else "hold.found",
        reason=hold.reason,
        is_by_operator=hold.is_by_operator,
        away_count=len(census.absent_since_s),
        bookie_count=len(census.present) + len(census.absent_since_s),
        away=_told_bookies(census.absent_since_s),
        until_ms=hold.until_ms,
        next_step="nothing more is marked, and nothing fenced, until they are back; bookmender hold end says they are lost",
    )


def _told_bookies(bookies: Collection[BookieId]) -> list[BookieId]:
    return sorted(bookies)[:BOOKIES_LOGGED_MAX]
