"""Builds the placement policy from the settings, with the source of racks that it uses."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import structlog

from daemon.rack_sources import FileRacks, ScriptRacks, resolve_host
from daemon.session import Session
from ledgers.clock import Clock
from ledgers.formats.pulsar_racks import PULSAR_RACKS_PATH
from ledgers.metadata import BookieId
from ledgers.placement import (
    NoRule,
    PlacementPolicy,
    RackRule,
    RegionRule,
    Rule,
    RuledPlacement,
    Weighting,
    ZoneRule,
)
from ledgers.placement.racks import Racks, clean_rack
from ledgers.store import MetadataStore
from replication.cluster.cluster_view import ViewSource
from replication.cluster.isolation import IsolationGroups
from replication.cluster.rack_memory import remembered_racks
from replication.cluster.racks import (
    RackKeeper,
    RackSource,
    ResolveHost,
    ZnodeRacks,
    has_unused_racks,
)
from replication.settings import PlacementSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The placement policy of one session. ``keeper`` keeps the racks up to date; None if racks
    have no source."""

    policy: PlacementPolicy
    racks: Racks
    keeper: RackKeeper | None
    groups: IsolationGroups

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.groups.run())
            if self.keeper is not None:
                tasks.create_task(self.keeper.run())


async def begin_placing(
    settings: PlacementSettings,
    *,
    store: MetadataStore,
    ur: str,
    views: ViewSource,
    local: BookieId | None,
    clock: Clock,
    rng: random.Random,
    resolve: ResolveHost = resolve_host,
) -> Placing:
    """Build the policy and read the racks once, if their source answers in time.

    Racks of absent bookies come from ``rack_memory``. ``local``: the bookie that is preferred among
    equals.
    """
    source = rack_source(settings, store, clock)
    racks = Racks() if source is None else Racks(await remembered_racks(store, ur))
    keeper = None
    if source is not None:
        keeper = RackKeeper(source, racks, views, clock=clock, resolve_host=resolve)
        await keeper.start()
    elif await has_unused_racks(store):
        log.warning(
            "racks.not_used",
            path=PULSAR_RACKS_PATH,
            next_step=f'set placement.racks_znode = "{PULSAR_RACKS_PATH}", as Pulsar goes by it',
        )
    policy = RuledPlacement(
        rule_of(settings),
        rng,
        locate=racks.rack_if_known,
        local=local,
        weighting=weighting_of(settings),
    )
    groups = IsolationGroups(
        store,
        clock,
        path=settings.racks_znode or PULSAR_RACKS_PATH,
        may_leave=settings.may_leave_isolation,
    )
    await groups.refresh()
    return Placing(policy=policy, racks=racks, keeper=keeper, groups=groups)


async def placing_of(session: Session, settings: PlacementSettings) -> Placing:
    """Build the policy for a session."""
    return await begin_placing(
        settings,
        store=session.store,
        ur=session.ur,
        views=session.views,
        local=session.local,
        clock=session.clock,
        rng=session.rng,
    )


def rule_of(settings: PlacementSettings) -> Rule:
    match settings.policy:
        case "rack":
            return RackRule(min_racks=settings.min_racks, is_enforced=settings.enforce_min_racks)
        case "region":
            regions = map(clean_rack, settings.regions.split(";"))
            return RegionRule(
                min_regions=settings.min_regions,
                regions=frozenset(region for region in regions if region is not None),
                is_enforced=settings.enforce_min_regions,
            )
        case "zone":
            return ZoneRule(
                min_zones=settings.min_zones,
                desired_zones=settings.desired_zones,
                is_enforced=settings.enforce_zones,
            )
        case _:
            return NoRule()


def weighting_of(settings: PlacementSettings) -> Weighting | None:
    if not settings.weighted_by_room:
        return None
    return Weighting(multiple_max=settings.room_weight_max)


def rack_source(
    settings: PlacementSettings, store: MetadataStore, clock: Clock
) -> RackSource | None:
    """Return the configured source of racks; None without one."""
    if settings.racks_file:
        return FileRacks(Path(settings.racks_file), clock)
    if settings.racks_script:
        return ScriptRacks(settings.racks_script, clock)
    if settings.racks_znode:
        return ZnodeRacks(store, settings.racks_znode)
    return None
