"""fsck on real bookies, without Spark: each kind of damage at each level, and healthy ledgers beside it."""

import asyncio
from typing import Any

import pytest

from auditor.fsck.levels import Level
from daemon.local.cluster import LocalCluster
from tests.fsck.kinds import Told
from tests.fsck.running import options, run, told
from tests.fsck.scene import BOOKIES, Scene, make_scene
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    return {"bookies": BOOKIES, "session_timeout_s": 20}  # one that hangs stays registered


@pytest.fixture(scope="module")
def scene(module_cluster: LocalCluster, java: JavaTool) -> Scene:
    return make_scene(module_cluster, java)


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
def test_each_kind_of_damage_gets_the_verdict_that_the_level_can_give(
    level: Level, scene: Scene, uri: str
) -> None:
    verdicts = asyncio.run(run(options(uri, level), scene.ledger_ids))

    found = {ledger_id: told(verdict) for ledger_id, verdict in verdicts.items()}
    assert named(found, scene) == named(scene.expected(level), scene)


def named(told_of: dict[int, Told], scene: Scene) -> dict[str, Told]:
    """By the kind of damage, for whoever reads the difference."""
    return {f"{ledger_id}: {name(ledger_id, scene)}": each for ledger_id, each in told_of.items()}


def name(ledger_id: int, scene: Scene) -> str:
    if ledger_id in scene.damaged:
        return scene.damaged[ledger_id].name
    lost = scene.others[ledger_id]
    return f"two whole bookies damaged: {[finding.value for finding in lost]}"
