"""Observe mode: one read-only session, and what a node of ours would mark and repair.

For use beside Java's AutoRecovery, or before a node is trusted. The session casts no vote, takes no
lock, registers no node and writes nothing else to ZooKeeper (``MetadataStore.as_read_only``). No
ledger is fenced. The leader's own code decides what would be marked, and the worker's own code
plans what would be repaired, as in ``bookmender plan``.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from auditor.absence import LossTracker, Outages
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.observer import Observation, Observer
from auditor.safety_hold import SafetyHolds
from daemon.admin_session import AdminSession
from daemon.limits import keep_to_requests_per_s
from daemon.live_settings import LiveSettings
from daemon.local_bookie import local_bookie
from daemon.placement import load_placement
from daemon.previews import Previews, preview_all
from daemon.role_state import RoleState
from daemon.session import end_with_session
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.clock import Clock, SystemClock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.placement.topology import Racks
from ledgers.tasks import task_scope
from replication.by_hand import Preview
from replication.cluster import ViewSource
from replication.orders import OrderStore

log = structlog.get_logger()

LOOK_INTERVAL_S = 30.0
"""Interval of the looks if no event is seen meanwhile."""
LOOK_INTERVAL_MIN_S = 2.0
"""Minimum interval of the looks: bookies often disappear and return together."""
PLANNED_MAX = 20
"""Ledgers planned at each look of a node. Each costs a few reads from bookies."""

PreviewAll = Callable[[Sequence[int]], Awaitable[Sequence[Preview]]]
"""Plans the repairs of these ledgers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Result of one look. ``plan``: for the first ledgers that a worker of ours would repair."""

    observation: Observation
    plan: Previews


@dataclass(frozen=True, slots=True, kw_only=True)
class Observing:
    """Looks, as long as its session lasts. ``observe`` runs the parts."""

    observer: Observer
    updater: LedgerMapUpdater
    views: ViewSource
    preview: PreviewAll
    clock: Clock

    async def look(self, *, planned_max: int) -> Sight:
        """Look once and return the result. Raises UnavailableError if something could not be read
        completely."""
        seen = await self.observer.observe()
        to_repair = seen.would_repair
        chosen = to_repair[:planned_max]
        plan = Previews(
            ledgers=await self.preview(chosen) if chosen else (),
            more=len(to_repair) - len(chosen),
        )
        return Sight(observation=seen, plan=plan)

    async def looks(self, *, planned_max: int) -> AsyncGenerator[Sight, None]:
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

    ``state``: where a node publishes that it observes.
    Raises UnavailableError (also if there is no such cluster), SettingsError (another layout),
    UnauthorizedError.
    """
    zookeeper, clock = await open_store(settings), SystemClock()
    store, state = zookeeper.as_read_only(), state or RoleState("observer")
    try:
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
    finally:
        await store.close()


@asynccontextmanager
async def observe(
    cluster: AdminSession,
    views: ViewSource,
    racks: Racks,
    clock: Clock,
    *,
    preview: PreviewAll | None = None,
    outages: Outages | None = None,
) -> AsyncIterator[Observing]:
    """Observe in a session that the caller keeps open.

    ``preview``: plans the repairs; None: as ``bookmender plan`` does. ``outages``: the ZooKeeper
    outages, including those of earlier sessions; None: outages are ignored.
    """
    settings = cluster.settings
    updater = LedgerMapUpdater(
        store=cluster.store,
        manager=cluster.manager,
        clock=clock,
    )
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
            preview=preview or partial(preview_all, cluster),
            clock=clock,
        )
