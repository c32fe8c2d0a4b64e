"""Safety holds carried out: the leader asks ``holding`` what should stand, writes it, and says so
loudly."""

import math
from collections.abc import Collection, Mapping

import structlog

from auditor.holding import Muster, is_warranted, wanted_hold
from auditor.settings import HoldSettings
from ledgers.clock import Clock
from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.metadata import BookieId
from ledgers.placement import DEFAULT_RACK, Locate
from ledgers.store import Create, Delete, MetadataStore, Operation, SetData
from replication.cluster.cluster_view import ClusterView
from replication.cluster.membership import ensure
from replication.cluster.order_book import OrderBook, StandingOrder, hold_place
from replication.cluster.orders import HoldOrder
from replication.cluster.own_state import orders_path
from replication.queue.batching import Batcher

log = structlog.get_logger()

CALM_S = 15.0
"""For so long the bookies that are still away must be too few for a hold before it ends: those that
come and go would have it end and begin anew."""
TRIES_MAX = 5
BOOKIES_LOGGED_MAX = 20


class HoldJudge:
    """Says what hold should stand, as one leader would over time. Writes nothing."""

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
        """Since when the standing hold is not warranted."""

    def muster(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> Muster:
        """Arguments as of ``Holds.keep``."""
        return Muster.of(view, absent_since_s, lost_since_s=lost_since_s, rack_of=self._rack_of)

    def wanted(self, order: HoldOrder | None, muster: Muster) -> HoldOrder | None:
        """In place of ``order``."""
        return wanted_hold(
            muster,
            order,
            settings=self._settings,
            now_s=self._clock.now_s(),
            now_ms=self._clock.wall_ms(),
            is_calm=self._is_calm(order, muster),
        )

    @property
    def wait_s(self) -> float:
        """Until ``wanted`` may say something else though nothing was seen to happen.

        A hold's own end is not counted: the view changes with it.
        """
        if self._calm_since_s is None:
            return math.inf
        return max(0.0, self._calm_since_s + CALM_S - self._clock.now_s())

    def begin_anew(self) -> None:
        """Nothing holds any more."""
        self._calm_since_s = None

    def _is_calm(self, order: HoldOrder | None, muster: Muster) -> bool:
        is_ours = order is not None and not order.is_by_operator and not order.is_released
        if order is None or not is_ours or is_warranted(order, muster, self._settings):
            self._calm_since_s = None
            return False
        if self._calm_since_s is None:
            self._calm_since_s = self._clock.now_s()
        return self.wait_s <= 0


class Holds:
    """The leader's. Written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        settings: HoldSettings,
        clock: Clock,
        rack_of: Locate = lambda _: DEFAULT_RACK,
    ) -> None:
        self._store, self._ur = store, ur
        self._batcher = batcher
        self._book, self._place = OrderBook(store, ur), hold_place(ur)
        self._judge = HoldJudge(settings, clock, rack_of=rack_of)
        self._told: HoldOrder | None = None
        """The last order that held, as far as the log was told."""

    async def keep(
        self,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
    ) -> bool:
        """Begin, extend or end a hold as is due; whether one stands now: then nobody is lost.

        ``absent_since_s``: as ``still_absent`` says. ``lost_since_s``: since when those are away
        whose ledgers are marked. Raises UnavailableError: nobody can tell, so that nothing is to be
        marked.
        """
        muster = self._judge.muster(view, absent_since_s, lost_since_s=lost_since_s)
        seen = view.orders.hold
        is_held = seen is not None and not seen.is_released
        # Nearly always: spare the reading.
        if not is_held and self._judge.wanted(seen, muster) == seen:
            return self._tell(seen, seen, muster)
        for _ in range(TRIES_MAX):
            standing = await self._book.standing(self._place)
            order = None if standing is None else standing.order
            wanted = self._judge.wanted(order, muster)
            if wanted == order or await self._write(wanted, over=standing):
                return self._tell(order, wanted, muster)
        raise UnavailableError("the hold keeps changing under our hands", path=self._place.path)

    @property
    def wait_s(self) -> float:
        """Until ``keep`` is to be called again though nothing was seen to happen.

        A hold's own end needs no such call: the view changes with it.
        """
        return self._judge.wait_s

    async def _write(
        self, wanted: HoldOrder | None, *, over: StandingOrder[HoldOrder] | None
    ) -> bool:
        """False when an operator was quicker, or somebody deleted the directory, which is there
        again then."""
        try:
            await self._batcher.apply(self._operation(wanted, over=over))
        except (ConflictError, NodeExistsError):
            return False
        except NoNodeError:
            await ensure(self._store, orders_path(self._ur))
            return False
        return True

    def _operation(
        self, wanted: HoldOrder | None, *, over: StandingOrder[HoldOrder] | None
    ) -> Operation:
        path = self._place.path
        if over is None:
            assert wanted is not None, "nothing stands, and nothing is wanted"
            return Create(path=path, data=wanted.to_json())
        if wanted is None:
            return Delete(path=path, version=over.version)
        return SetData(path=path, data=wanted.to_json(), version=over.version)

    def _tell(self, before: HoldOrder | None, now: HoldOrder | None, muster: Muster) -> bool:
        """Say what is new; whether ``now`` holds."""
        held = None if now is None or now.is_released else now
        if held is not None and not _is_same(held, self._told):
            _tell_of_hold(held, muster, is_new=not _is_same(held, before))
        if held is None and self._told is not None:
            log.warning("hold.ended", away=_told_bookies(muster.absent_since_s))
            self._judge.begin_anew()
        self._told = held
        return held is not None


def _is_same(hold: HoldOrder, other: HoldOrder | None) -> bool:
    """Though bookies were added meanwhile."""
    return other is not None and hold.since_ms == other.since_ms


def _tell_of_hold(hold: HoldOrder, muster: Muster, *, is_new: bool) -> None:
    """An error: a person is to look. One that stood before this node led is told of by each new
    leader."""
    log.error(
        "hold.begun" if is_new else "hold.found",
        reason=hold.reason,
        is_by_operator=hold.is_by_operator,
        away_count=len(muster.absent_since_s),
        bookie_count=len(muster.present) + len(muster.absent_since_s),
        away=_told_bookies(muster.absent_since_s),
        until_ms=hold.until_ms,
        next_step="nothing more is marked, and nothing fenced, until they are back; bookmender hold end says they are lost",
    )


def _told_bookies(bookies: Collection[BookieId]) -> list[BookieId]:
    return sorted(bookies)[:BOOKIES_LOGGED_MAX]
