"""Bookies that collect copies named by no ensemble, every second instead of once a day.

A bookie refuses a ledger that it has collected. It does not collect a copy under way, because the
ledger is locked.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.spec import Storage
from ledgers.digest import EntryDigest
from ledgers.errors import NoSuchEntryError, UnavailableError
from ledgers.model import BookieId
from tests.cluster.faulty_daemon import Point
from tests.cluster.steps import (
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    events,
    is_frozen,
    nodes,
    shape,
    wait_for,
)
from tests.java.messages import Verdict
from tests.java.tool import JavaTool
from tests.workload import Written

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.long(group="java"), pytest.mark.timeout(240)]
CLUSTER = {
    # The sorted storage shows a collected ledger until it flushes its write cache.
    "storage": Storage.INTERLEAVED,
    "bookie_settings": {"gcWaitTime": "500", "gcOverreplicatedLedgerWaitTime": "500"},
}

ON_THREE = (3, 3, 3)
ENTRY_COUNT = 20
LONG_SESSION = {"ZOOKEEPER_SESSION_TIMEOUT_S": "60"}
"""A frozen node keeps its locks for this long."""


# --- Entries on bookies ---------------------------------------------------------------------------


async def stored_entries(on: Bench, bookie: BookieId, ledger: Written) -> set[int]:
    """Return the ids of the entries that the bookie has."""
    found = set()
    for entry_id in range(ENTRY_COUNT):
        with suppress(NoSuchEntryError):
            await on.workload.bookies.read(bookie, ledger.ledger_id, entry_id)
            found.add(entry_id)
    return found


async def wait_collected(on: Bench, bookie: BookieId, ledger: Written) -> None:
    async def is_collected() -> bool:
        try:
            return not await stored_entries(on, bookie, ledger)
        except UnavailableError:
            return False  # while the bookie collects the ledger, it answers with an I/O error

    await wait_for(is_collected, f"bookie {bookie} without ledger {ledger.ledger_id}")


async def members(on: Bench, ledger: Written) -> tuple[BookieId, ...]:
    return (await on.metadata(ledger)).last_segment.ensemble


async def copy_one_entry(on: Bench, ledger: Written, target: BookieId) -> None:
    """Copy entry 0, like a repair without a lock."""
    metadata, bookies = await on.metadata(ledger), on.workload.bookies
    assert metadata.password is not None
    assert metadata.digest_type is not None
    entry = await bookies.read(metadata.last_segment.ensemble[0], ledger.ledger_id, 0)
    key = EntryDigest(metadata.digest_type, metadata.password).master_key
    await bookies.add(target, entry, master_key=key, is_recovery=True)


async def assert_members_store_all(on: Bench, ledgers: Iterable[Written]) -> None:
    for ledger in ledgers:
        for bookie in await members(on, ledger):
            assert await stored_entries(on, bookie, ledger) == set(range(ENTRY_COUNT))


# --- The tests ------------------------------------------------------------------------------------


@pytest.mark.compat(
    "GcOverreplicatedLedgerTest.testGcOverreplicatedLedger",
    verdict="better",
    why="a bookie that refuses adds after garbage collection is no target for that ledger",
)
@pytest.mark.compat("GcOverreplicatedLedgerTest.testNoGcOfLedger", verdict="same")
async def test_a_bookie_that_collected_a_ledger_is_no_target_for_it(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(shape(0, entry_count=ENTRY_COUNT, quorums=ON_THREE))
        collector, *others = await members(on, ledger)
        assert await stored_entries(on, collector, ledger) == set(range(ENTRY_COUNT))
        await on.forget([ledger])  # so that no ensemble names the first bookie
        await wait_collected(on, collector, ledger)
        for bookie in others:
            assert await stored_entries(on, bookie, ledger) == set(range(ENTRY_COUNT))

        await on.mark([ledger.ledger_id])
        node = start("node", settings=WORKER_ONLY | {"NODE_BOOKIE_ID": collector})

        await on.wait_idle()
        assert collector in {event["bookie"] for event in events(node, "copy.refused")}
        assert collector not in await members(on, ledger)
        await assert_members_store_all(on, [ledger])
        assert not errors(node)
    assert java.judge(uri, [ledger.ledger_id]).verdict is Verdict.WHOLE


@pytest.mark.compat("GcOverreplicatedLedgerTest.testNoGcIfLedgerBeingReplicated", verdict="same")
@pytest.mark.compat(
    "G16",
    verdict="better",
    why="every repair, by hand too, runs under the ledger's lock",
)
async def test_the_ledger_lock_protects_a_copy_under_way(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        ledger, *others = await on.write(
            *(shape(n, entry_count=ENTRY_COUNT, quorums=ON_THREE) for n in range(30))
        )
        target = sorted(set(module_cluster.bookies) - set(await members(on, ledger)))[0]
        await on.lose([ledger])
        node = start(
            "node",
            command=("tests.cluster.faulty_daemon", Point.MID_COPY.value, "SIGSTOP"),
            settings=WORKER_ONLY | LONG_SESSION | {"NODE_BOOKIE_ID": target},
        )
        await wait_for(lambda: is_frozen(node), "copy under way")
        begun = await stored_entries(on, target, ledger)
        assert 0 < len(begun) < ENTRY_COUNT

        # The bookie collects a copy that comes without a lock, so its collector is running.
        for other in [each for each in others if target not in await members(on, each)][:2]:
            await copy_one_entry(on, other, target)
            await wait_collected(on, target, other)
        assert await stored_entries(on, target, ledger) == begun

        node.resume()
        await on.wait_idle()
        assert target in await members(on, ledger)
        await assert_members_store_all(on, [ledger, *others])
        assert not errors(node)
        written = [ledger, *others]
    report = java.judge(uri, [each.ledger_id for each in written])
    assert report.verdict is Verdict.WHOLE, report
