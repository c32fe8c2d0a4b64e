"""``fsck run --changed`` on real bookies: the first run is on Spark, later ones in one process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck.results.run_folder import Results
from checkpoints.chain import RETENTION_DEFAULT_S
from daemon.local.cluster import LocalCluster
from daemon.operations.feed import disable_feed, enable_feed
from ledgers.clock import SystemClock
from tests.cluster.commands import Said, bookmender
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, nodes, shape, wait_for
from tests.forked import ForkedChild
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="fsck"), pytest.mark.timeout(600)]

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    return {"session_timeout_s": 90}  # a bookie that hangs stays registered


class Runs:
    """The runs of fsck of one folder."""

    def __init__(self, uri: str, on: Bench, folder: Path) -> None:
        self.uri, self.on, self.folder = uri, on, folder
        self._watcher_count = 0
        self.arguments = ("fsck", "run", "--changed", "--output", str(folder), "-o", "json")

    async def run(self) -> tuple[Said, set[int]]:
        """Run the command. Return what it said, and the ledgers with a verdict of this run."""
        said = await bookmender(self.uri, *self.arguments)
        assert said.exit_code in (0, 1, 3), said.err
        rows = Results.open(self.folder, said.record["run"]).table(["ledger_id"])
        return said, set(rows["ledger_id"].to_pylist())

    async def told(self, ledger_id: int, *, is_deleted: bool = False) -> None:
        """Wait until the feed has told the last change of the ledger."""
        found = await self.on.seen.manager.find(ledger_id)
        assert (found is None) is is_deleted

        async def is_told() -> bool:
            self._watcher_count += 1
            new = f"watcher {self._watcher_count}"  # a new client is told everything
            said = await bookmender(
                self.uri, "feed", "follow", "--client", new, "--from-start", "--once", "-o", "json"
            )
            changes = [json.loads(line) for line in said.out.splitlines()]
            last = {each["ledger_id"]: each for each in changes}.get(ledger_id)
            if last is None or found is None:
                return last is not None and bool(last["is_deleted"])
            return bool(last["version"] == found.stat.mzxid)

        await wait_for(is_told, "a told change")


@asynccontextmanager
async def runs(cluster: LocalCluster, folder: Path) -> AsyncIterator[Runs]:
    uri = cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, folder) as start:
        start("node", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
        yield Runs(uri, on, folder / "results")
        await disable_feed(on.seen, clock=CLOCK)


async def test_later_runs_check_what_changed_and_what_was_wrong(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    async with runs(module_cluster, tmp_path) as fsck:
        on = fsck.on
        written = await on.write(*(shape(i, ending=Ending.CLOSED) for i in range(4)))
        ids = [each.ledger_id for each in written]
        await fsck.told(ids[-1])
        said, checked = await fsck.run()  # on Spark
        assert said.exit_code == 0, said.out
        assert checked >= set(ids)
        assert said.record["changes"]["is_whole"]
        assert said.record["changes"]["is_acknowledged"]
        assert not said.record["is_changed_only"]

        await on.forget(written[:1])
        await on.seen.manager.delete(ids[1], version=-1)
        await fsck.told(ids[1], is_deleted=True)
        said, checked = await fsck.run()
        assert said.exit_code == 1, said.out
        assert checked & set(ids) == {ids[0]}
        assert said.record["is_changed_only"]
        assert said.record["changes"]["deleted"] == 1
        assert not (fsck.folder / "spark.log").exists()

        said, checked = await fsck.run()  # nothing changed, and one ledger is still wrong
        assert (said.exit_code, checked & set(ids)) == (1, {ids[0]})
        status = await bookmender(fsck.uri, "status", "-o", "json")
        assert "FSCK_FOUND_DAMAGE" in status.out

        await on.seen.manager.delete(ids[0], version=-1)
        await fsck.told(ids[0], is_deleted=True)
        said, checked = await fsck.run()
        assert (said.exit_code, checked & set(ids)) == (0, set())


async def test_a_ledger_whose_bookie_did_not_answer_is_checked_again(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    async with runs(module_cluster, tmp_path) as fsck:
        await fsck.run()
        (written,) = await fsck.on.write(shape(0, ending=Ending.CLOSED))
        ledger_id = written.ledger_id
        await fsck.told(ledger_id)
        found = await fsck.on.seen.manager.read(ledger_id)
        hung = found.metadata.last_segment.ensemble[0]
        module_cluster.pause(hung)
        try:
            said, checked = await fsck.run()
        finally:
            module_cluster.resume(hung)
        assert (said.exit_code, ledger_id in checked) == (3, True), said.out
        assert said.record["findings"]["not_answered"] >= 1

        said, checked = await fsck.run()
        assert (said.exit_code, ledger_id in checked) == (0, True), said.out
        assert said.record["changes"]["changed"] >= 1


async def test_killed_runs_leave_no_change_unchecked(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with runs(module_cluster, tmp_path) as fsck:
        await fsck.run()
        expected = set[int]()
        for number in range(6):
            (written,) = await fsck.on.write(shape(number, ending=Ending.CLOSED))
            expected.add(written.ledger_id)
            await fsck.told(written.ledger_id)
            child = ForkedChild(
                f"fsck {number}",
                ("daemon", *fsck.arguments),
                log=tmp_path / f"fsck-{number}.log",
                environment={"BOOKMENDER_METADATA_SERVICE_URI": fsck.uri},
            )
            await asyncio.sleep(rng.uniform(0.2, 3.0))
            await asyncio.to_thread(child.kill)
        await fsck.run()  # that of a killed one, if it was begun
        await fsck.run()

        checked = set[int]()
        for path in (fsck.folder / "summaries").glob("*.json"):
            rows = Results.open(fsck.folder, path.stem).table(["ledger_id"])
            checked.update(rows["ledger_id"].to_pylist())
        assert checked >= expected
