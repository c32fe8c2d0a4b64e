"""The check of all ledgers, on bookies with damaged files."""

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from auditor.checks.records import read_check
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.local.processes import Child
from ledgers.model import BookieId
from replication import znodes
from replication.marks import marked_ledger_ids
from tests.cluster.commands import Said, bookmender
from tests.cluster.steps import (
    AUDITOR_ONLY,
    WORKER_ONLY,
    Bench,
    bench,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.fsck.damage import cut_entry_logs, stopped, storage
from tests.workload import Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]
CLUSTER = {"bookies": 4, "session_timeout_s": 90}  # not shared, because its files are damaged

JAVA = "AuditorPeriodicCheckTest"
LEDGERS = 8
EVERY_ENTRY = AUDITOR_ONLY | {"CHECKS_ALL_LEDGERS_SHARE": "1", "CHECKS_READS_PER_S": "0"}


def break_indexes(files: Path) -> None:
    for path in files.rglob("*.idx"):
        path.write_bytes(b"\xff" * path.stat().st_size)


def damaged(cluster: LocalCluster, bookie: BookieId, damage: Callable[[Path], None]) -> None:
    with stopped(cluster, [bookie]):
        damage(storage(cluster, bookie))


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        pytest.param(
            0,
            cut_entry_logs,
            marks=pytest.mark.compat(f"{JAVA}.testEntryLogCorruption", verdict="same"),
            id="entry logs are truncated",
        ),
        pytest.param(
            1,
            break_indexes,
            marks=[
                pytest.mark.long(group="audit"),
                pytest.mark.compat(f"{JAVA}.testIndexCorruption", verdict="same"),
            ],
            id="indexes are overwritten",
        ),
    ],
)
async def test_damage_on_a_live_bookie_is_found_marked_and_repaired(
    number: int, damage: Callable[[Path], None], module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, victim = module_cluster.metadata_service_uri, module_cluster.bookies[number]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(n, quorums=(3, 3, 2)) for n in range(LEDGERS)))
        await asyncio.to_thread(damaged, module_cluster, victim, damage)
        start("auditor", settings=EVERY_ENTRY)

        found = await check_all_ledgers(uri)

        assert found.exit_code == 1, found
        assert await marked(on) == dict.fromkeys(await on.names(written, victim), (victim,))

        start("worker", settings=WORKER_ONLY)
        await on.wait_idle()
        await on.assert_whole(written)
        assert (await check_all_ledgers(uri)).exit_code == 0
        # SortedLedgerStorage does not find a new entry whose old index refers to nothing,
        # until it flushes. Keep such ledgers out of the other tests.
        await delete(on, written)


@pytest.mark.long(group="audit")
async def test_a_bookie_that_hangs_makes_its_ledgers_unknown(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """No ledger is marked."""
    uri, hung = module_cluster.metadata_service_uri, module_cluster.bookies[2]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(n, quorums=(3, 3, 2)) for n in range(LEDGERS)))
        start("auditor", settings=EVERY_ENTRY)
        module_cluster.pause(hung)
        try:
            found = await check_all_ledgers(uri)
        finally:
            module_cluster.resume(hung)

        assert found.exit_code == 3, found
        assert found.record["run"]["counts"] == {"unknown": len(await on.names(written, hung))}
        assert await marked(on) == {}
        await delete(on, written)


@pytest.mark.long(group="audit")
@pytest.mark.compat("G6", verdict="better")
async def test_the_next_leader_continues_the_run_of_a_killed_one(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, count = module_cluster.metadata_service_uri, 300
    slowly = AUDITOR_ONLY | {"CHECKS_READS_PER_S": "200"}  # two seconds for each of three parts

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        shapes = (shape(n, quorums=(2, 2, 2), entry_count=2) for n in range(count))
        written = await on.write(*shapes)
        await bookmender(uri, "check", "all-ledgers")
        first = start("first", settings=slowly)
        await wait_for(lambda: events(first, "check.began"), "the check")
        second = start("second", settings=slowly)

        async def has_progress() -> bool:
            run = (await read_check(on.seen.store, on.seen.paths, "all-ledgers")).running
            return run is not None and run.cursor > 0

        await wait_for(has_progress, "progress")
        first.kill()
        await wait_for(lambda: events(second, "check.finished"), "end of the check")

        (began,) = events(second, "check.began")
        (finished,) = events(second, "check.finished")
        assert began["cursor"] > 0
        assert (finished["ledger_count"], finished["counts"]) == (count, {})
        await delete(on, written)


@pytest.mark.long(group="audit")
@pytest.mark.compat("G34", verdict="better")
async def test_javas_tool_can_request_a_check_by_our_leader(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri = module_cluster.metadata_service_uri

    async with nodes(uri, tmp_path) as start:
        node = start("auditor", settings=AUDITOR_ONLY)
        assert (await check_all_ledgers(uri)).exit_code == 0
        before = run_count(node)

        await asyncio.to_thread(java_shell, module_cluster, tmp_path, "forceauditchecks", "-calc")

        await wait_for(lambda: run_count(node) == before + 1, "a check")


def run_count(node: Child) -> int:
    return sum(event["check"] == "all-ledgers" for event in events(node, "check.finished"))


def java_shell(cluster: LocalCluster, folder: Path, *arguments: str) -> None:
    """Run ``bookkeeper shell``."""
    settings = folder / "shell.conf"
    settings.write_text(f"metadataServiceUri={cluster.metadata_service_uri}\n")
    classpath = jars.bookkeeper_classpath(cluster.spec.bookkeeper)
    shell = "org.apache.bookkeeper.bookie.BookieShell"
    subprocess.run(
        [Java.find().executable, "-cp", classpath, shell, "-conf", settings, *arguments],
        check=True,
        capture_output=True,
        timeout=60,
    )


async def check_all_ledgers(uri: str) -> Said:
    return await bookmender(uri, "check", "all-ledgers", "--wait", "-o", "json")


async def marked(on: Bench) -> dict[int, tuple[BookieId, ...]]:
    found = {}
    for ledger_id in await marked_ledger_ids(on.seen.store, on.seen.paths):
        data, _ = await on.seen.store.get(on.seen.paths.mark(ledger_id))
        found[ledger_id] = znodes.parse_mark(data).replicas
    return found


async def delete(on: Bench, written: Sequence[Written]) -> None:
    for ledger in written:
        await on.seen.manager.delete(ledger.ledger_id, version=-1)
