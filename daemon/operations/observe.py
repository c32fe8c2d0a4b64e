"""What our leader would mark and our workers would repair now, without writing anything.

For use beside Java's AutoRecovery, or before a node is trusted: by ``bookmender plan --all``, and
by a node with ``node.mode = "observe"``, which logs changes and sets metrics. The session casts no
vote, takes no lock, registers no node and writes nothing else to ZooKeeper
(``MetadataStore.as_read_only``). No ledger is fenced. The leader's own code decides what would be
marked, and the worker's own code plans what would be repaired.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from msgspec import to_builtins
from prometheus_client import Gauge

from auditor.absence import LossTracker, Outages
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.observer import AffectedBookie, BookieCondition, Observation, Observer
from auditor.safety_hold import SafetyHolds
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.limits import keep_to_requests_per_s
from daemon.live_settings import LiveSettings
from daemon.local_bookie import local_bookie
from daemon.operations.plan import LedgerPlan, RepairPlan, plan_each
from daemon.placement import load_placement
from daemon.role_state import RoleState
from daemon.session import end_with_session
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.clock import Clock, SystemClock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement.topology import Racks
from ledgers.tasks import task_scope
from replication.cluster import ViewSource
from replication.orders import OrderStore

log = structlog.get_logger()

LOOK_INTERVAL_S = 30.0
"""Interval of the looks if no event is seen meanwhile."""
LOOK_INTERVAL_MIN_S = 2.0
"""Minimum interval of the looks: bookies often disappear and return together."""
PLANNED_MAX = 20
"""Ledgers planned at each look of a node. Each costs a few reads from bookies."""
LISTED_MAX = 20
"""Ledgers of a kind whose ids an answer has; the others are only counted."""

OBSERVED = Gauge(
    "bookmender_observed",
    "What our leader would do now, by field of the log event observe.would_mark: ledgers that it "
    "would_mark, ledgers that are underreplicated, unmarked, partly_marked or private_damaged, "
    "surplus marks, lost_bookies, lost_bytes, and is_held: 1 during a safety hold.",
    ["field"],
)
OBSERVED_FIELDS = (
    "would_mark",
    "underreplicated",
    "unmarked",
    "partly_marked",
    "surplus",
    "private_damaged",
    "lost_bookies",
    "lost_bytes",
    "is_held",
)


class SeenLedgers(Answer, frozen=True, kw_only=True):
    """Numbers of ledgers. ``is_complete``: all metadata was read."""

    is_complete: bool
    ledgers: int
    unreadable: int
    unreadable_ledgers: list[int]


class SeenBookies(Answer, frozen=True, kw_only=True):
    writable: int
    read_only: int
    affected: tuple[AffectedBookie, ...]
    """Bookies with most ledgers first."""


class SeenHold(Answer, frozen=True, kw_only=True):
    """The safety hold in force, or, unless ``is_ordered``, the one that a leader would begin."""

    since_ms: int
    until_ms: int | None
    bookies: tuple[BookieId, ...]
    reason: str
    is_by_operator: bool
    is_ordered: bool


class Underreplicated(Answer, frozen=True, kw_only=True):
    """Ledgers that lack copies, most urgent first."""

    ledgers: int
    by_copies_left: dict[int, int]
    """Number of ledgers by the copies left of their worst entry."""
    lost_bytes: int
    first_ledgers: list[int]


class Marks(Answer, frozen=True, kw_only=True):
    """The existing marks. Each list has the first ledgers of its kind."""

    total: int
    """Ledgers marked in either queue."""
    shared: int
    agreed: int
    """Marks that the leader would make too."""
    unmarked: int
    """Ledgers that the leader would mark and that have no mark."""
    unmarked_ledgers: list[int]
    partly_marked: int
    """Marks that name fewer bookies than are lost."""
    partly_marked_ledgers: list[int]
    surplus: int
    """Marks that the leader would not make."""
    surplus_ledgers: list[int]
    private: int
    """Marks that Java's workers do not see."""
    private_ledgers: list[int]
    private_damaged: int
    """Those of them with damage that Java does not detect."""
    private_damaged_ledgers: list[int]


class Outlook(Answer, frozen=True, kw_only=True):
    """What bookmender would do in the whole cluster, and how that differs from the marks."""

    version: int = 1
    seen_ms: int
    ledger_map: SeenLedgers
    bookies: SeenBookies
    recovery_delay_s: int
    is_disabled: bool
    hold: SeenHold | None
    underreplicated: Underreplicated
    would_mark: int
    """0 if auto-recovery is disabled or a hold forbids it."""
    marks: Marks
    would_repair: RepairPlan
    """The first repairs of workers."""


def outlook(seen: Observation, plan: RepairPlan) -> Outlook:
    difference, hold, lacking = seen.difference, seen.hold, seen.underreplicated
    groups: dict[str, Sequence[int]] = {
        "unmarked": difference.unmarked,
        "partly_marked": difference.partly_marked,
        "surplus": difference.surplus,
        "private": seen.private.ledger_ids,
        "private_damaged": seen.private.damaged,
    }
    marks: dict[str, Any] = {name: len(ids) for name, ids in groups.items()}
    marks |= {f"{name}_ledgers": list(ids[:LISTED_MAX]) for name, ids in groups.items()}
    return Outlook(
        seen_ms=seen.seen_ms,
        ledger_map=SeenLedgers(
            is_complete=seen.is_ledger_map_complete,
            ledgers=seen.ledger_count,
            unreadable=len(seen.unreadable),
            unreadable_ledgers=list(seen.unreadable[:LISTED_MAX]),
        ),
        bookies=SeenBookies(
            writable=seen.writable_count,
            read_only=seen.read_only_count,
            affected=seen.affected,
        ),
        recovery_delay_s=seen.recovery_delay_s,
        is_disabled=seen.is_disabled,
        hold=None
        if hold is None
        else SeenHold(
            since_ms=hold.since_ms,
            until_ms=hold.until_ms,
            bookies=hold.bookies,
            reason=hold.reason,
            is_by_operator=hold.is_by_operator,
            is_ordered=seen.is_hold_ordered,
        ),
        underreplicated=Underreplicated(
            ledgers=len(lacking),
            by_copies_left=seen.by_copies_left,
            lost_bytes=seen.lost_bytes,
            first_ledgers=[each.ledger_id for each in lacking[:LISTED_MAX]],
        ),
        would_mark=len(seen.would_mark),
        marks=Marks(
            total=seen.queued_count,
            shared=seen.marked_count,
            agreed=difference.agreed_count,
            **marks,
        ),
        would_repair=plan,
    )


# --- Sessions -------------------------------------------------------------------------------------

PlanEach = Callable[[Sequence[int]], Awaitable[Sequence[LedgerPlan]]]
"""Plans the repairs of these ledgers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observing:
    """Looks, as long as its session lasts. ``observe`` runs the parts."""

    observer: Observer
    updater: LedgerMapUpdater
    views: ViewSource
    plan_each: PlanEach
    clock: Clock

    async def look(self, *, planned_max: int) -> Outlook:
        """Look once and return the result. Raises UnavailableError if something could not be read
        completely. ``planned_max``: ledgers to plan; 0: no bookie is asked anything."""
        seen = await self.observer.observe()
        chosen = seen.would_repair[:planned_max]
        plans = await self.plan_each(chosen) if chosen else ()
        return outlook(seen, RepairPlan.of(plans, more=len(seen.would_repair) - len(chosen)))

    async def looks(self, *, planned_max: int) -> AsyncGenerator[Outlook, None]:
        """Yield a look whenever something may have changed. A failed look is repeated."""
        while True:
            seen, was_complete = self.views.change_count, self.updater.is_complete
            try:
                yield await self.look(planned_max=planned_max)
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("observe.failed", error=str(error))
            await self.clock.sleep(LOOK_INTERVAL_MIN_S)
            if was_complete:
                wait_s = min(LOOK_INTERVAL_S, self.observer.tracker.wait_s)
                await self.views.wait_change(seen, timeout_s=wait_s)


@asynccontextmanager
async def open_observing(
    settings: Settings, outages: Outages | None = None, state: RoleState | None = None
) -> AsyncIterator[Observing]:
    """Open a session that cannot write, and build the ledger map in it. The end of the session
    ends the body.

    ``state``: where a node publishes that it observes; None: for a command.
    Raises UnavailableError (also if there is no such cluster), SettingsError (another layout),
    UnauthorizedError.
    """
    async with open_store(settings, is_of_node=state is not None) as zookeeper:
        clock, store = SystemClock(), zookeeper.as_read_only()
        state = state or RoleState("observer")
        cluster = await AdminSession.on(store, settings)
        views = ViewSource(cluster.registration, clock, OrderStore(store, cluster.paths))
        view = await views.refresh()
        placing = await load_placement(  # for safety holds, which depend on racks
            settings.placement,
            store=store,
            paths=cluster.paths,
            views=views,
            local=await local_bookie(settings.node.bookie_id, view),
            clock=clock,
            rng=random.Random(),
        )
        async with (
            task_scope() as beside,
            observe(cluster, views, placing.racks, clock, outages=outages) as observing,
        ):
            for work in (
                views.run(),
                placing.run(),
                keep_to_requests_per_s(LiveSettings(settings), views, zookeeper),
                end_with_session(store),
            ):
                beside.start(work)
            with state.in_session(zookeeper), state.working():
                yield observing


@asynccontextmanager
async def observe(
    cluster: AdminSession,
    views: ViewSource,
    racks: Racks,
    clock: Clock,
    *,
    plans: PlanEach | None = None,
    outages: Outages | None = None,
) -> AsyncIterator[Observing]:
    """Observe in a session that the caller keeps open.

    ``plans``: plans the repairs; None: as ``bookmender plan`` does. ``outages``: the ZooKeeper
    outages, including those of earlier sessions; None: outages are ignored.
    """
    settings = cluster.settings
    updater = LedgerMapUpdater(store=cluster.store, manager=cluster.manager, clock=clock)
    tracker = LossTracker(
        updater=updater,
        views=views,
        holds=SafetyHolds(
            store=cluster.store,
            batcher=None,
            paths=cluster.paths,
            settings=settings.hold,
            clock=clock,
            rack_of=racks.rack,
        ),
        settings=settings.auditor,
        outages=outages,
    )
    await tracker.prepare()
    observer = Observer(tracker)
    async with task_scope() as beside:
        beside.start(updater.run())
        beside.start(observer.run())
        if outages is not None:
            beside.start(outages.follow(cluster.store))
        yield Observing(
            observer=observer,
            updater=updater,
            views=views,
            plan_each=plans or partial(plan_each, cluster),
            clock=clock,
        )


# --- A node ---------------------------------------------------------------------------------------


async def run_observer_session(settings: Settings, outages: Outages, state: RoleState) -> None:
    """Look repeatedly until the session ends. ``state``: where it publishes what it does."""
    reports = Reports()
    async with open_observing(settings, outages, state) as observing:
        log.info("session.opened", role="observer")
        async with aclosing(observing.looks(planned_max=PLANNED_MAX)) as looks:
            async for found in looks:
                reports.show(found)


class Reports:
    """Reports each look in metrics, and changes in the log."""

    def __init__(self) -> None:
        self._logged: dict[str, dict[str, Any]] = {}

    def show(self, found: Outlook) -> None:
        affected = found.bookies.affected
        fields = {
            "would_mark": found.would_mark,
            "underreplicated": found.underreplicated.ledgers,
            "by_copies_left": found.underreplicated.by_copies_left,
            "lost_bytes": found.underreplicated.lost_bytes,
            "first_ledgers": found.underreplicated.first_ledgers,
            **to_builtins(found.marks),
            "bookies": {row.bookie: row.state.value for row in affected[:LISTED_MAX]},
            "lost_bookies": sum(
                row.state is BookieCondition.LOST for row in found.bookies.affected
            ),
            "is_held": found.hold is not None,
            "is_disabled": found.is_disabled,
            "is_complete": found.ledger_map.is_complete,
        }
        for name in OBSERVED_FIELDS:
            OBSERVED.labels(field=name).set(fields[name])
        self._log("observe.would_mark", fields)
        plan = found.would_repair
        blocked = [part.reason.value for each in plan.ledgers for part in each.blocked]
        self._log(
            "observe.would_repair",
            {
                "planned_count": len(plan.ledgers),
                "more_count": plan.more_ledgers,
                "entry_count": plan.entries,
                "byte_count": plan.bytes,
                "blocked": {reason: blocked.count(reason) for reason in sorted(set(blocked))},
            },
        )

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        if self._logged.get(event) != fields:
            self._logged[event] = fields
            log.info(event, **fields)
