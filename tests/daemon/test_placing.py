"""The section [placement] becomes a rule, a weighting and a source of racks."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from daemon.placement import (
    FileRacks,
    ScriptRacks,
    SessionPlacement,
    load_placement,
    rack_source,
    rule_of,
    weighting_of,
)
from ledgers.errors import SettingsError
from ledgers.placement import (
    DEFAULT_RACK,
    Adherence,
    Candidate,
    NoRule,
    RackRule,
    RegionRule,
    Rule,
    Weighting,
    ZoneRule,
)
from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.racks import ZnodeRacks
from replication.settings import PlacementSettings
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, ROOT


def settings(**given: object) -> PlacementSettings:
    return PlacementSettings(**given)  # type: ignore[arg-type]  # a table of keywords


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        pytest.param({}, RackRule(min_racks=2, is_enforced=False), id="as BookKeeper's clients"),
        pytest.param({"policy": "random"}, NoRule(), id="random"),
        pytest.param(
            {"min_racks": 3, "enforce_min_racks": True, "racks_file": "/racks"},
            RackRule(min_racks=3, is_enforced=True),
            id="racks, enforced",
        ),
        pytest.param(
            {"policy": "region", "regions": "east; /west;", "racks_znode": "/bookies"},
            RegionRule(min_regions=2, regions=frozenset({"/east", "/west"}), is_enforced=True),
            id="regions",
        ),
        pytest.param(
            {
                "policy": "region",
                "min_regions": 3,
                "enforce_min_regions": False,
                "racks_script": "racks.sh",
            },
            RegionRule(min_regions=3, is_enforced=False),
            id="regions, not enforced",
        ),
        pytest.param(
            {
                "policy": "zone",
                "min_zones": 1,
                "desired_zones": 2,
                "enforce_zones": False,
                "racks_file": "/racks",
            },
            ZoneRule(min_zones=1, desired_zones=2, is_enforced=False),
            id="zones",
        ),
    ],
)
def test_a_policy_is_a_rule(given: dict[str, object], rule: Rule) -> None:
    assert rule_of(settings(**given)) == rule


def test_choices_are_weighted_only_if_configured() -> None:
    assert weighting_of(settings()) is None
    assert weighting_of(settings(weighted_by_free_disk=True)) == Weighting(multiple_max=3.0)
    assert weighting_of(settings(weighted_by_free_disk=True, disk_weight_max=0.0)) == Weighting(
        multiple_max=0.0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "racks"}, "placement.policy is 'racks'; allowed: random, rack, region, zone"),
        ({"min_racks": 0}, "placement.min_racks is 0; allowed: 1 to 100"),
        ({"desired_zones": 1}, "placement.desired_zones is 1; allowed: 2 to 100"),
        ({"disk_weight_max": -1.0}, "placement.disk_weight_max is -1.0; allowed: 0 to 1000"),
        (
            {"racks_znode": "bookies"},
            "placement.racks_znode is 'bookies'; allowed: the path of a znode, as /bookies",
        ),
        (
            {"racks_file": "/a", "racks_znode": "/b"},
            "placement.racks_file and placement.racks_znode are both set; set one of them",
        ),
        (
            {"policy": "zone"},
            "placement.policy is 'zone', which needs the racks of the bookies. Set "
            "placement.racks_file, placement.racks_script or placement.racks_znode",
        ),
        (
            {"enforce_min_racks": True},
            "placement.enforce_min_racks is True, which needs the racks of the bookies. Set "
            "placement.racks_file, placement.racks_script or placement.racks_znode",
        ),
    ],
)
def test_contradictory_settings_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(**given)

    assert str(caught.value) == message


@in_virtual_time
async def test_racks_come_from_the_configured_source() -> None:
    cluster = await Cluster.start()

    def source(**given: object) -> object:
        return rack_source(settings(**given), cluster.store, cluster.clock)

    assert source() is None
    assert isinstance(source(racks_file="/racks"), FileRacks)
    assert isinstance(source(racks_script="racks.sh -v"), ScriptRacks)
    assert isinstance(source(racks_znode="/bookies"), ZnodeRacks)


async def no_address(host: str) -> str | None:
    return None


async def placing(cluster: Cluster, **given: object) -> SessionPlacement:
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    return await load_placement(
        settings(**given),
        store=cluster.store,
        paths=PATHS,
        views=views,
        local=None,
        clock=cluster.clock,
        rng=random.Random(1),
        resolve=no_address,
    )


@in_virtual_time
async def test_the_first_choice_already_uses_racks() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    racks = f"""{{"g": {{
        "{B1}": {{"rack": "/a"}}, "{B2}": {{"rack": "/b"}},
        "{B3}": {{"rack": "/b"}}, "{B4}": {{"rack": "/c"}}
    }}}}"""
    await cluster.store.create("/bookies", racks.encode())

    begun = await placing(cluster, racks_znode="/bookies", min_racks=2, enforce_min_racks=True)
    chosen = begun.policy.choose_replacement(
        [Candidate(bookie=b, rack=begun.racks.rack(b)) for b in (B3, B4)],
        ensemble=(B1, B2),
        index=0,
        write_quorum=2,
    )

    assert chosen == B4


@pytest.mark.compat(
    "G19",
    verdict="better",
    why="the last known rack of an absent bookie counts; without one the verdict is unknown",
)
@in_virtual_time
async def test_the_last_known_rack_of_an_absent_bookie_counts() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.kill(B1)
    await cluster.store.create("/bookies", f'{{"g": {{"{B2}": {{"rack": "/b"}}}}}}'.encode())
    record = {"version": 1, "racks": {B1: "/a", B2: "/old", B3: "/c"}}
    await cluster.store.create(PATHS.racks, json.dumps(record).encode(), with_parents=True)

    begun = await placing(cluster, racks_znode="/bookies")

    assert begun.racks.rack(B1) == "/a"
    assert begun.racks.rack(B2) == "/b", "the source is newer"
    assert begun.racks.rack(B3) == DEFAULT_RACK, "registered bookies need the source"
    assert (await placing(cluster)).racks.rack(B1) == DEFAULT_RACK, "racks are not used"


@in_virtual_time
async def test_a_bookie_without_any_known_rack_is_unknown() -> None:
    """Gap G19. The source may learn of the bookie later."""
    cluster = await Cluster.start(B1, B2)
    await cluster.store.create("/bookies", f'{{"g": {{"{B1}": {{"rack": "/a"}}}}}}'.encode())
    begun = await placing(cluster, racks_znode="/bookies")

    def said() -> Adherence:
        return begun.policy.adherence((B1, B2), write_quorum=2, ack_quorum=2)

    assert said() is Adherence.UNKNOWN

    both = f'{{"g": {{"{B1}": {{"rack": "/a"}}, "{B2}": {{"rack": "/a"}}}}}}'
    await cluster.store.set("/bookies", both.encode(), version=-1)
    assert begun.rack_keeper is not None
    assert await begun.rack_keeper.refresh()

    assert said() is Adherence.FAIL


@in_virtual_time
async def test_with_a_broken_source_the_stored_racks_are_used() -> None:
    cluster = await Cluster.start(B1)
    record = {"version": 1, "racks": {B1: "/a"}}
    await cluster.store.create(PATHS.racks, json.dumps(record).encode(), with_parents=True)

    with capture_logs():
        begun = await placing(cluster, racks_znode="/bookies")

    assert begun.racks.rack(B1) == "/a"


@pytest.mark.parametrize(
    ("given", "is_there", "warnings"),
    [
        pytest.param({}, True, ["racks.unused"], id="Pulsar's racks are not read"),
        pytest.param({}, False, [], id="there are none"),
        pytest.param({"racks_znode": "/bookies"}, True, [], id="they are read"),
        pytest.param(
            {"racks_znode": "/bookies"}, False, ["racks.unreadable"], id="they are missing"
        ),
    ],
)
def test_unused_or_missing_racks_get_a_warning(
    given: dict[str, object], is_there: bool, warnings: list[str]
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cluster = await Cluster.start(B1)
        if is_there:
            await cluster.store.create("/bookies", b"{}")
        await placing(cluster, **given)

    with capture_logs() as logs:
        scenario()

    assert [each["event"] for each in logs if each["log_level"] != "info"] == warnings


def test_a_missing_racks_file_is_only_a_warning(tmp_path: Path) -> None:
    async def scenario() -> None:  # in real time, because a thread reads the file
        begun = await placing(await Cluster.start(B1), racks_file=str(tmp_path / "none"))

        assert begun.policy.choose_ensemble([Candidate(bookie=B1)], 1, write_quorum=1) == (B1,)

    with capture_logs() as logs:
        asyncio.run(scenario())

    assert [each["event"] for each in logs] == ["racks.unreadable"]
