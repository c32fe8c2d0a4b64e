"""``bookie drain`` warns about absent bookies."""

import asyncio

import pytest
from click.testing import Result

from auditor.absence import Outages
from daemon.cli import bookie as drain_command
from daemon.operations.drains import absent_concerns
from daemon.operations.maintenance import open_window
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

WITHOUT = "Its ledgers are repaired from their other copies without a drain."


async def draining_now(cluster: Cluster) -> set[BookieId]:
    return {*(await OrderStore(cluster.store, PATHS).read()).draining}


def drained(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, was_draining: bool = False
) -> tuple[Result, set[BookieId]]:
    """Run ``bookie drain`` while B1 is absent. Return the result and the draining bookies."""
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


def test_draining_an_absent_bookie_needs_yes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, none = drained(monkeypatch, B1, B2)

    assert isinstance(refused.exception, RejectedError)
    assert str(refused.exception) == (
        f"nothing was ordered. To order the drain anyway, give --yes. {B1} is lost. {WITHOUT} If "
        f"it never returns, run: bookmender bookie decommission {B1}"
    )
    assert none == set(), "the registered bookie is not drained either"

    ordered, both = drained(monkeypatch, B1, B2, "--yes")
    assert (ordered.exit_code, both) == (0, {B1, B2})
    assert f"{B1} is lost. {WITHOUT}" in ordered.stderr


def test_repeating_the_drain_order_of_an_absent_bookie_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, draining = drained(monkeypatch, B1, was_draining=True)

    assert (result.exit_code, draining) == (0, {B1})
    assert f"{B1} is lost" in result.stderr


def test_cancelling_the_drain_of_an_absent_bookie_needs_no_yes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, draining = drained(monkeypatch, B1, "--cancel", was_draining=True)

    assert (result.exit_code, draining) == (0, set())


def test_a_drain_that_is_not_ordered_counts_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the end of a window, a hold or a pause that does not exist: a script can be repeated."""
    result, draining = drained(monkeypatch, B1, B2, "--cancel", was_draining=True)

    assert (result.exit_code, draining) == (0, set())
    assert result.stderr.splitlines() == [
        f"The drain of {B1} is cancelled. Moved copies stay moved.",
        f"No drain of {B2} was ordered.",
    ]


@in_virtual_time
async def test_the_concern_says_when_an_absent_bookie_is_lost() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(600)):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        told = await absent_concerns(visiting(cluster), [B1, B2, B1], clock=cluster.clock)

    (text,) = told.values()
    assert text == (
        f"{B1} is absent, so no copy can be read from it (lost in 10 min). Once it is lost, its "
        "ledgers are repaired from their other copies without a drain. A drain does not wait for "
        "that, and treats its open ledgers as if it were lost. If it never returns, run: "
        f"bookmender bookie decommission {B1}"
    )


@in_virtual_time
async def test_the_return_delay_after_an_outage_counts_for_drains() -> None:
    """After an outage of ZooKeeper, a bookie is lost only when its time to return is over."""
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, outages=Outages(cluster.clock, return_s=20.0)) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(10)
        told = await absent_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert f"{B1} is absent, so no copy can be read from it (lost in 10 s)." in told[B1]


@in_virtual_time
async def test_without_an_auditor_the_concern_names_the_recovery_delay() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with auditing(cluster, settings=delayed(600)):
        await asyncio.sleep(SOON_S)

    told = await absent_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert "(lost after the recovery delay of 10 min)." in told[B1]


@in_virtual_time
async def test_a_bookie_in_maintenance_is_drained_after_its_window() -> None:
    cluster = await with_ledgers((B1, B2))
    await open_window(visiting(cluster), B1, duration_s=3600, reason="disk", clock=cluster.clock)
    await cluster.kill(B1)

    told = await absent_concerns(visiting(cluster), [B1], clock=cluster.clock)

    assert told == {
        B1: f"{B1} is absent, in maintenance for another 1 h (disk). Its ledgers are moved only "
        "when it is back, or when the window ends."
    }


@in_virtual_time
async def test_with_no_bookie_registered_none_is_called_absent() -> None:
    cluster = await Cluster.start(B1, B2)
    for bookie in (B1, B2):
        await cluster.kill(bookie)

    assert await absent_concerns(visiting(cluster), [B1, B3], clock=cluster.clock) == {}


@in_virtual_time
async def test_draining_an_absent_bookie_ignores_the_recovery_delay() -> None:
    """Ledgers of the bookie are moved at once, and its open ledgers are closed."""
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
