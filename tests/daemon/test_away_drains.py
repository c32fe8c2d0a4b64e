"""What is said of a drain of a bookie that is away, before it is ordered."""

import asyncio

import pytest
from click.testing import Result

from auditor.absence import Outages
from daemon.cli import drain as drain_command
from daemon.cli.drain import away_concerns
from daemon.cli.maintenance import open_window
from ledgers.errors import RejectedError
from ledgers.model import BookieId, LedgerState
from replication.orders import OrderStore
from tests.auditor.auditing import auditing, draining
from tests.auditor.scenes import SOON_S, delayed, with_ledgers
from tests.daemon.in_memory import run_in_memory
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, working
from tests.virtual_time import run

WITHOUT = "its ledgers are marked, and copied to others from their other copies, without any drain"


async def draining_now(cluster: Cluster) -> set[BookieId]:
    return {*(await OrderStore(cluster.store, PATHS).read()).draining}


def drained(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, was_draining: bool = False
) -> tuple[Result, set[BookieId]]:
    """What ``bookie drain`` makes of it while B1 is away, and who drains after it."""
    found: list[Cluster] = []

    async def prepare(cluster: Cluster) -> None:
        found.append(cluster)
        if was_draining:
            await order_drain(cluster, B1)
        await cluster.kill(B1)

    result, _ = run_in_memory(
        monkeypatch, drain_command, drain_command.drain, *arguments, prepare=prepare
    )
    return result, run(draining_now(found[0]))


def test_a_drain_of_a_bookie_that_is_away_is_refused_until_somebody_is_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, none = drained(monkeypatch, B1, B2)

    assert isinstance(refused.exception, RejectedError)
    assert str(refused.exception) == (
        f"{B1} is away, and counts as lost: {WITHOUT}; if it is not to come back: bookmender bookie "
        f"decommission {B1}; nothing was ordered: --yes orders it all the same"
    )
    assert none == set(), "nor is the other one drained, which is there"

    ordered, both = drained(monkeypatch, B1, B2, "--yes")
    assert (ordered.exit_code, both) == (0, {B1, B2})
    assert f"{B1} is away, and counts as lost: {WITHOUT}" in ordered.stderr


def test_a_drain_that_stands_goes_on_when_its_bookie_is_away_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, draining = drained(monkeypatch, B1, was_draining=True)

    assert (result.exit_code, draining) == (0, {B1})
    assert f"{B1} is away, and counts as lost" in result.stderr


def test_a_drain_of_a_bookie_that_is_away_is_taken_back_without_a_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, draining = drained(monkeypatch, B1, "--cancel", was_draining=True)

    assert (result.exit_code, draining) == (0, set())


@in_virtual_time
async def test_one_that_is_not_lost_yet_is_said_to_be_so_in_time() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(600)):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        told = await away_concerns(visiting(cluster), [B1, B2, B1], clock=cluster.clock)

    (text,) = told.values()
    assert text == (
        f"{B1} is away, so nothing can be read from it, and lost in 10 min: then {WITHOUT}; a drain does not wait "
        "for that, and has open ledgers on it closed as if it were lost; if it is not to come back: bookmender "
        f"bookie decommission {B1}"
    )


@in_virtual_time
async def test_after_an_outage_of_zookeeper_none_is_said_to_be_lost_while_its_loss_is_held_back() -> (
    None
):
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, outages=Outages(cluster.clock, return_s=20.0)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(10)
        told = await away_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert f"{B1} is away, so nothing can be read from it, and lost in 10 s: then" in told[B1]


@in_virtual_time
async def test_one_that_nobody_counts_is_lost_some_day() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster, settings=delayed(600)):
        await asyncio.sleep(SOON_S)

    told = await away_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert "and lost after the recovery delay of 10 min: then" in told[B1]


@in_virtual_time
async def test_one_under_maintenance_is_drained_only_after_its_window() -> None:
    cluster = await with_ledgers((B1, B2))
    await open_window(visiting(cluster), B1, duration_s=3600, reason="disk", clock=cluster.clock)
    await cluster.kill(B1)

    told = await away_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert told == {
        B1: f"{B1} is away, under maintenance for another 1 h (disk): nothing of it is moved before the window is "
        "over, or it is back"
    }


@in_virtual_time
async def test_where_no_bookie_is_registered_at_all_none_is_said_to_be_away() -> None:
    cluster = await Cluster.start(B1, B2)
    for bookie in (B1, B2):
        await cluster.kill(bookie)

    assert await away_concerns(visiting(cluster), [B1, B3], clock=cluster.clock) == {}


@in_virtual_time
async def test_a_drain_of_one_that_is_away_waits_for_no_delay_and_closes_what_is_open_as_it_was_said() -> (
    None
):
    cluster = await with_ledgers((B1, B2))
    await cluster.write_ledger((B1, B2), ledger_id=7, ack_quorum=2, state=LedgerState.OPEN)
    async with draining(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        await order_drain(cluster, B1)
        await asyncio.sleep(120)

    for ledger_id in (0, 7):
        metadata = (await cluster.manager.read(ledger_id)).metadata
        assert metadata.state is LedgerState.CLOSED
        assert B1 not in {b for segment in metadata.segments for b in segment.ensemble}
