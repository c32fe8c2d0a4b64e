"""Observe mode: one session that only reads, and what it sees of what a node of ours would do.

For beside Java's AutoRecovery, or before a node is trusted: no vote, no lock, no write anywhere in
ZooKeeper, not even to say that we are here, and no fencing. It shows what would be marked, by the
leader's own decisions, and what would be repaired, by the very code of ``bookmender plan``.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.observation import Observation
from auditor.observer import Observer
from auditor.safety_hold import SafetyHoldPolicy
from daemon.admin_session import AdminSession
from daemon.limits import keep_to_requests_per_s
from daemon.local_bookie import local_bookie
from daemon.placement import Placing, begin_placing
from daemon.previews import Previews, preview_all
from daemon.session import end_with_session, open_store
from daemon.settings import Settings
from ledgers.clock import Clock, SystemClock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.placement.topology import Racks
from ledgers.store import ReadOnlyStore
from ledgers.tasks import task_scope
from replication.cluster import ViewSource
from replication.orders import OrderBook
from replication.preview import Preview

log = structlog.get_logger()

LOOK_INTERVAL_S = 30.0
"""Between two looks, where nothing was seen to happen meanwhile."""
LOOK_INTERVAL_MIN_S = 2.0
"""Between two looks in any case: bookies often come and go together."""
PLANNED_MAX = 20
"""Ledgers planned for at each look of a node: each costs a few reads at bookies."""

PreviewAll = Callable[[Sequence[int]], Awaitable[Sequence[Preview]]]
"""Plans for these ledgers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen at one look. ``plan``: for the first ledgers that a worker of ours would
    take."""

    observation: Observation
    plan: Previews


class Observing:
    """Looks, as long as its session lasts."""

    def __init__(
        self,
        *,
        observer: Observer,
        updater: LedgerMapUpdater,
        views: ViewSource,
        preview: PreviewAll,
        clock: Clock,
    ) -> None:
        """``updater`` and ``views`` are run by somebody else."""
        self._observer = observer
        self.updater = updater
        self._views = views
        self._preview = preview
        self._clock = clock

    async def look(self, *, planned_max: int) -> Sight:
        """Raises UnavailableError when something could not be read whole."""
        seen = await self._observer.look()
        to_repair = ledgers_to_repair(seen)
        chosen = to_repair[:planned_max]
        plan = Previews(
            ledgers=await self._preview(chosen) if chosen else (),
            more=len(to_repair) - len(chosen),
        )
        return Sight(observation=seen, plan=plan)

    async def looks(self, *, planned_max: int) -> AsyncGenerator[Sight, None]:
        """One after the other, whenever something may have changed. One that fails is tried
        again."""
        while True:
            seen, was_complete = self._views.change_count, self.updater.is_complete
            try:
                yield await self.look(planned_max=planned_max)
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("observe.failed", error=str(error))
            await self._clock.sleep(LOOK_INTERVAL_MIN_S)
            if was_complete:
                wait_s = min(LOOK_INTERVAL_S, self._observer.wait_s)
                await self._views.wait_change(seen, timeout_s=wait_s)


def ledgers_to_repair(seen: Observation) -> list[int]:
    """In the order in which workers would take them: what would be marked, or was before a hold
    began, then what else is marked, in our private queue the damaged ones first. What Java would not
    repair, a node of ours would. None while auto-recovery is disabled."""
    if seen.is_disabled:
        return []
    held = frozenset(seen.difference.unmarked if seen.is_kept_from_marking else ())
    at_risk = (each.ledger_id for each in seen.underreplicated if each.ledger_id not in held)
    own = (*seen.own.damaged, *seen.own.others)
    return list(dict.fromkeys([*at_risk, *seen.difference.surplus, *own]))


@asynccontextmanager
async def open_observing(settings: Settings) -> AsyncIterator[Observing]:
    """A session that cannot write, with its index being built. What ends the session ends the body.

    Raises UnavailableError (no such cluster, too), SettingsError (another layout),
    UnauthorizedError.
    """
    zookeeper, clock = await open_store(settings), SystemClock()
    store = ReadOnlyStore(zookeeper)
    try:
        cluster = await AdminSession.on(store, settings)
        views = ViewSource(cluster.registration, clock, OrderBook(store, cluster.ur))
        await views.refresh()
        placing = await _racks(cluster, views, clock)
        async with (
            task_scope() as beside,
            observe(cluster, views, placing.racks, clock) as observing,
        ):
            for work in (
                views.run(),
                placing.run(),
                keep_to_requests_per_s(settings, views, zookeeper),
                end_with_session(store),
            ):
                beside.start(work)
            yield observing
    finally:
        await store.close()


async def _racks(cluster: AdminSession, views: ViewSource, clock: Clock) -> Placing:
    """For what a hold goes by; a plan draws its targets by its own."""
    settings = cluster.settings
    return await begin_placing(
        settings.placement,
        store=cluster.store,
        ur=cluster.ur,
        views=views,
        local=local_bookie(settings.node.bookie_id, views.current),
        clock=clock,
        rng=random.Random(),
    )


@asynccontextmanager
async def observe(
    cluster: AdminSession,
    views: ViewSource,
    racks: Racks,
    clock: Clock,
    preview: PreviewAll | None = None,
) -> AsyncIterator[Observing]:
    """On a session that somebody else keeps. ``preview``: where not as ``bookmender plan`` does."""
    settings = cluster.settings
    updater = LedgerMapUpdater(
        store=cluster.store,
        manager=cluster.manager,
        clock=clock,
        rescan_interval_s=settings.auditor.rescan_interval_s,
    )
    observer = Observer(
        store=cluster.store,
        ur=cluster.ur,
        updater=updater,
        views=views,
        settings=settings.auditor,
        judge=SafetyHoldPolicy(settings.hold, clock, rack_of=racks.rack),
        clock=clock,
    )
    await observer.prepare()
    async with task_scope() as beside:
        beside.start(updater.run())
        yield Observing(
            observer=observer,
            updater=updater,
            views=views,
            preview=preview or partial(preview_all, cluster),
            clock=clock,
        )
