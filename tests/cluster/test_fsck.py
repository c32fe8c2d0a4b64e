"""fsck on real bookies, without Spark: healthy ledgers, then each kind of damage at each level."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.local.cluster import LocalCluster
from tests.cluster.steps import bench
from tests.fsck.healthy import make_healthy, writing
from tests.fsck.kinds import Told
from tests.fsck.running import options, run, told
from tests.fsck.scene import BOOKIES, Scene, make_scene
from tests.java import messages
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HEALTHY_LEDGERS = 1_000


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    return {"bookies": BOOKIES, "session_timeout_s": 90}  # a bookie that hangs stays registered


@pytest.mark.long(group="fsck")
def test_healthy_ledgers_have_no_findings_during_changes(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Other ledgers are written and deleted meanwhile."""
    healthy = make_healthy(module_cluster, java, tmp_path, count=HEALTHY_LEDGERS)
    doomed = [each.ledger for each in java.write(uri, messages.Shape(count=20))]
    with writing(uri) as writer:
        for level in Level:
            ledger_ids = [*healthy.ledger_ids, writer.ledger_id]

            verdicts = asyncio.run(run(options(uri, level), ledger_ids))

            alarms = {i: verdict for i, verdict in verdicts.items() if told(verdict) != Told()}
            assert not alarms, level
            assert len(verdicts) == len(ledger_ids)

        verdicts = asyncio.run(run_while_deleting(uri, doomed))

    assert all(told(verdict) == Told() for verdict in verdicts.values()), verdicts
    assert 0 < len(verdicts) < len(doomed)


async def run_while_deleting(uri: str, ledger_ids: Sequence[int]) -> dict[int, LedgerVerdict]:
    """Run fsck. At its first verdict, delete the ledgers, those that come last first."""
    async with bench(uri) as on:

        async def delete() -> None:
            for ledger_id in reversed(ledger_ids):
                await on.seen.manager.delete(ledger_id, version=-1)

        wanted = options(uri, Level.FULL, ledgers_at_once=1)
        return await run(wanted, ledger_ids, on_first=delete)


@pytest.mark.long(group="fsck")
def test_a_bookie_that_hangs_makes_only_its_ledgers_unknown(
    module_cluster: LocalCluster, java: JavaTool, uri: str
) -> None:
    hung = module_cluster.bookies[2]
    ledger_ids = [each.ledger for each in java.write(uri, messages.Shape(count=12, ack_quorum=2))]
    of_hung = {i for i in ledger_ids if hung in ensembles(java, uri, i)}
    module_cluster.pause(hung)
    try:
        verdicts = asyncio.run(run(options(uri, Level.FULL), ledger_ids))
    finally:
        module_cluster.resume(hung)

    unknown = Told(grade=Grade.UNKNOWN, findings=(Finding.NOT_ANSWERED,), rests_on_unknown=True)
    assert 0 < len(of_hung) < len(ledger_ids)
    assert {i: told(verdict) for i, verdict in verdicts.items()} == {
        i: unknown if i in of_hung else Told() for i in ledger_ids
    }


def test_an_open_ledger_without_new_entries_is_idle(java: JavaTool, uri: str) -> None:
    (left,) = java.write(uri, messages.Shape(close=False))
    with writing(uri) as writer:
        wanted = options(uri, Level.ENDS, idle_open_after_s=0)

        verdicts = asyncio.run(run(wanted, [left.ledger, writer.ledger_id]))

    idle = Told(findings=(Finding.IDLE_OPEN,))
    assert told(verdicts[left.ledger]) == idle
    assert told(verdicts[writer.ledger_id]) == Told()


def ensembles(java: JavaTool, uri: str, ledger_id: int) -> set[str]:
    return {b for each in java.metadata(uri, ledger_id).ensembles.values() for b in each}


# --- Lasting damage, so these come last -----------------------------------------------------------


@pytest.fixture(scope="module")
def scene(module_cluster: LocalCluster, java: JavaTool) -> Scene:
    return make_scene(module_cluster, java)


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
def test_each_kind_of_damage_gets_the_verdict_of_the_level(
    level: Level, scene: Scene, uri: str
) -> None:
    verdicts = asyncio.run(run(options(uri, level), scene.ledger_ids))

    found = {ledger_id: told(verdict) for ledger_id, verdict in verdicts.items()}
    assert named(found, scene) == named(scene.expected(level), scene)


def named(told_of: dict[int, Told], scene: Scene) -> dict[str, Told]:
    """Return the verdicts by the kind of damage, so that a difference is easy to read."""
    return {f"{ledger_id}: {name(ledger_id, scene)}": each for ledger_id, each in told_of.items()}


def name(ledger_id: int, scene: Scene) -> str:
    if ledger_id in scene.damaged:
        return scene.damaged[ledger_id].name
    lost = scene.others[ledger_id]
    return f"two whole bookies damaged: {[finding.value for finding in lost]}"
