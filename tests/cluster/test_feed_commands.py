"""Programs that follow the feed on real bookies, and are killed: they miss nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from checkpoints.chain import RETENTION_DEFAULT_S
from daemon.local.cluster import LocalCluster
from daemon.operations.feed import disable_feed, enable_feed, read_feed
from ledgers.clock import SystemClock
from tests.cluster.commands import bookmender
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, nodes, shape, wait_for
from tests.forked import ForkedChild
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "examples" / "catalogue.py"
CLOCK = SystemClock()


@asynccontextmanager
async def enabled_feed(cluster: LocalCluster, folder: Path) -> AsyncIterator[Bench]:
    uri = cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, folder) as start:
        start("node", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
        yield on
        await disable_feed(on.seen, clock=CLOCK)


def environment(uri: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    return {**ours, "BOOKMENDER_METADATA_SERVICE_URI": uri, "PYTHONPATH": str(ROOT)}


async def change(on: Bench, number: int) -> tuple[list[int], int]:
    """Create and close ledgers, and delete one. Return those that exist, and the deleted one."""
    written = await on.write(
        shape(number, entry_count=1),
        shape(number + 1, entry_count=1, ending=Ending.CLOSED),
        shape(number + 2, entry_count=1),
    )
    ids = [each.ledger_id for each in written]
    await on.seen.manager.delete(ids[-1], version=-1)
    return ids[:-1], ids[-1]


async def test_a_killed_follower_goes_on_where_it_was(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, out = module_cluster.metadata_service_uri, tmp_path / "out"
    out.touch()
    command = f'echo "$LEDGER_ID $LEDGER_DELETED" >>{out}; sleep 0.05'
    arguments = ("feed", "follow", "--client", "backup", "--exec", command)

    def handled() -> dict[int, bool]:
        """Return the ledgers that the command was run for, and whether they were deleted then."""
        lines = [line.split() for line in out.read_text().splitlines()]
        return {int(ledger_id): deleted == "1" for ledger_id, deleted in lines}

    async with enabled_feed(module_cluster, tmp_path) as on:
        existing, deleted = set[int](), set[int]()
        for number in range(3):
            follower = ForkedChild(
                f"follower {number}",
                ("daemon", *arguments),
                log=tmp_path / f"follower-{number}.log",
                environment=environment(uri),
            )
            handled_before = len(handled())

            def has_handled(before: int = handled_before) -> bool:
                return len(handled()) > before

            async def is_connected() -> bool:
                said = await bookmender(uri, "feed", "clients", "-o", "json")
                return any(each["is_connected"] for each in said.record["clients"])

            await wait_for(is_connected, "a connected follower")
            kept, gone = await change(on, 10 * number)
            existing.update(kept)
            deleted.add(gone)
            await wait_for(has_handled, "a handled ledger")
            await asyncio.to_thread(follower.kill)  # in the middle
            kept, gone = await change(on, 10 * number + 5)
            existing.update(kept)
            deleted.add(gone)

        async def are_all_handled() -> bool:
            said = await bookmender(uri, *arguments, "--once")
            assert said.exit_code == 0, said.err
            seen = handled()
            # A ledger that was created and deleted before the leader began the log is not told.
            return existing <= seen.keys() and all(seen.get(each, True) for each in deleted)

        await wait_for(are_all_handled, "a command for each changed ledger")
        assert not any(handled()[each] for each in existing)
        said = await bookmender(uri, "feed", "status", "-o", "json")
        (client,) = said.record["clients"]
        assert (client["name"], client["is_connected"]) == ("backup", False)
        assert client["lag_checkpoints"] is not None
        said = await bookmender(uri, "feed", "clients", "backup", "--forget", "--yes")
        assert said.exit_code == 0, said.err
        said = await bookmender(uri, "feed", "clients", "-o", "json")
        assert said.record == {"clients": [], "connected_elsewhere": []}


@contextmanager
def catalogue_process(uri: str, file: Path) -> Iterator[None]:
    """Run the example until the end of the block, and kill it."""
    process = subprocess.Popen(
        [sys.executable, str(CATALOGUE), uri, str(file)], cwd=ROOT, env=environment(uri)
    )
    try:
        yield
        assert process.poll() is None, "the example ended"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def catalogue_rows(file: Path) -> dict[int, str]:
    """Return the state of each ledger by the example."""
    if not file.exists():
        return {}
    with closing(sqlite3.connect(file)) as table:
        try:
            return dict(table.execute("SELECT id, state FROM ledgers"))
        except sqlite3.OperationalError:  # the example has not created it yet
            return {}


async def states_in_zookeeper(on: Bench) -> dict[int, str]:
    found = {}
    async for ledger_ids in on.seen.manager.ledger_ids():
        for ledger_id in ledger_ids:
            read = await on.seen.manager.find(ledger_id)
            if read is not None:
                found[ledger_id] = read.metadata.state.name
    return found


@pytest.mark.long(group="feed")
async def test_the_catalogue_of_the_example_is_right_whatever_is_killed(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, file = module_cluster.metadata_service_uri, tmp_path / "catalogue.db"

    async with enabled_feed(module_cluster, tmp_path) as on:

        async def is_right() -> bool:
            rows = catalogue_rows(file)
            return bool(rows) and rows == await states_in_zookeeper(on)

        await change(on, 100)
        for number in range(3):
            with catalogue_process(uri, file):
                if number == 0:
                    await wait_for(is_right, "a catalogue")
                await change(on, 110 + 10 * number)
            await change(on, 115 + 10 * number)  # nobody follows
        with catalogue_process(uri, file):
            await wait_for(is_right, "a catalogue that equals ZooKeeper")


@pytest.mark.long(group="feed")
async def test_a_new_catalogue_has_no_ledger_that_the_feed_never_tells(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """A ledger that is created and deleted while no node leads is in no checkpoint."""
    uri, file = module_cluster.metadata_service_uri, tmp_path / "catalogue.db"

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (known,) = await on.write(shape(0, entry_count=1))
        first = start("first", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)

        async def is_published() -> bool:
            return (await read_feed(on.seen)).last_checkpoint_id is not None

        await wait_for(is_published, "a checkpoint")
        await asyncio.to_thread(first.kill)
        (unseen,) = await on.write(shape(1, entry_count=1))
        with catalogue_process(uri, file):
            await wait_for(lambda: known.ledger_id in catalogue_rows(file), "a catalogue")
            assert unseen.ledger_id not in catalogue_rows(file)
            await on.seen.manager.delete(unseen.ledger_id, version=-1)
            (last,) = await on.write(shape(2, entry_count=1))
            start("second", settings=AUDITOR_ONLY)
            await wait_for(lambda: last.ledger_id in catalogue_rows(file), "the last ledger")

            async def is_right() -> bool:
                return catalogue_rows(file) == await states_in_zookeeper(on)

            await wait_for(is_right, "a catalogue that equals ZooKeeper")
        await disable_feed(on.seen, clock=CLOCK)
