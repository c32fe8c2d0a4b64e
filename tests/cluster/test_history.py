"""The history on real servers: a loss, its repair, an order, and a leader that is killed."""

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.model import LedgerState
from replication.history import Kind, NodeEvent, read_history
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.steps import Bench, bench, errors, events, nodes, shape, wait_for
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="audit"), pytest.mark.timeout(240)]

SETTINGS = {"AUDITOR_LOST_BOOKIE_RECOVERY_DELAY_S": "1", "REPLICATION_OPEN_LEDGER_GRACE_S": "0.2"}

IGNORED = (
    *(Kind.LEDGERS_REPAIRED, Kind.LEDGER_FENCED, Kind.LEDGER_RECOVERED),
    *(Kind.ORDER, Kind.CHECK_FINISHED),
)
"""Events that are checked otherwise, or depend on the time."""


async def told(on: Bench, since_ms: int, kind: str) -> list[NodeEvent]:
    found = (await read_history(on.seen.store, on.seen.paths, since_ms)).events
    return [noted for noted in found if noted.event.kind == kind]


async def test_the_history_outlives_a_leader_that_is_killed(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim, first, second = module_cluster.bookies[:3]
    since_ms = time.time_ns() // 1_000_000

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(
            *(shape(number) for number in range(20)),
            *(shape(number, ending=Ending.ABANDONED) for number in range(20, 25)),
        )
        at_risk = len(await on.names(written, victim))
        leader = start("one", settings={**SETTINGS, "NODE_BOOKIE_ID": first})
        await wait_for(lambda: events(leader, "election.won"), "leader")
        standby = start("two", settings={**SETTINGS, "NODE_BOOKIE_ID": second})
        await wait_for(lambda: events(standby, "election.entered"), "standby")

        kill_and_expire(module_cluster, victim)
        await on.wait_repaired(written, victim)
        for kind in (Kind.LEDGERS_MARKED, Kind.LEDGERS_REPAIRED):
            await wait_for(partial(told, on, since_ms, kind), f"{kind} in the history")
        os.kill(leader.pid, signal.SIGKILL)
        await wait_for(lambda: events(standby, "election.won"), "another leader")
        assert (await bookmender(uri, "disable")).exit_code == 0
        assert (await bookmender(uri, "enable")).exit_code == 0
        await asyncio.to_thread(module_cluster.start_bookie, victim)
        await wait_for(lambda: told(on, since_ms, Kind.BOOKIE_RETURNED), "the return")

        (open_ledger,) = await on.write(shape(25, ending=Ending.ABANDONED))
        by_hand = str(open_ledger.ledger_id)
        closing = ("ledger", "close", by_hand, "--yes", "--force")
        assert (await bookmender(uri, *closing, state=tmp_path)).exit_code == 0
        assert (await bookmender(uri, "repair", by_hand, state=tmp_path)).exit_code == 0

        said = await bookmender(uri, "history", "--since", "2m", "-o", "json")
        found = [each for each in said.record["events"] if each["at_ms"] >= since_ms]
        check_story(found, str(victim), str(first), str(second), at_risk=at_risk)
        for ledger in (each for each in found if each["kind"] == Kind.LEDGER_RECOVERED):
            metadata = (await on.seen.manager.read(ledger["ledger_id"])).metadata
            assert metadata.state is LedgerState.CLOSED
            assert ledger["last_entry_id"] == metadata.last_entry_id
        text = (await bookmender(uri, "history", "--since", "2m", "--bookie", victim)).out
        assert f"{victim} is lost" in text
        assert f"{victim} is registered again" in text
        assert not errors(standby)


def check_story(
    found: list[dict[str, Any]], victim: str, first: str, second: str, *, at_risk: int
) -> None:
    """Check who recorded what, and in which order."""
    by_leaders = [
        (each["node"], each["kind"], *each["bookies"])
        for each in found
        if each["kind"] not in IGNORED
    ]
    assert by_leaders == [
        (first, "leader-elected"),
        (first, "bookie-lost", victim),
        (first, "ledgers-marked", victim),
        (second, "leader-elected"),
        (second, "bookie-returned", victim),
    ]
    marked = next(each for each in found if each["kind"] == Kind.LEDGERS_MARKED)
    assert marked["ledger_count"] == at_risk
    orders = [each for each in found if each["kind"] == Kind.ORDER]
    assert [each["order"] for each in orders] == ["disable", "enable", "ledger close", "repair"]
    assert [each["last_entry_id"] for each in orders] == [None, None, 19, None]
    assert all("@" in each["by"] for each in orders)
    fenced = [each["ledger_id"] for each in found if each["kind"] == Kind.LEDGER_FENCED]
    assert orders[2]["ledger_id"] in fenced
    # The killed node may have had no time to write its last repairs and recoveries.
    repaired = [each for each in found if each["kind"] == Kind.LEDGERS_REPAIRED]
    assert sum(each["ledger_count"] for each in repaired) >= 1
