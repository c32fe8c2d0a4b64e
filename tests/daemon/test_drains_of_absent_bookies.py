"""``bookie drain`` warns about absent bookies."""

import asyncio

import pytest

from auditor.absence import Outages
from daemon.cli.bookie import drain
from daemon.operations.drains import absent_concerns
from daemon.operations.maintenance import open_window
from ledgers.errors import RejectedError
from ledgers.model import BookieId, LedgerState
from replication.orders import OrderStore
from tests.auditor.auditing import auditing, draining
from tests.auditor.scenes import SOON_S, delayed, with_ledgers
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, working

WITHOUT = "Its ledgers are repaired from their other copies without a drain."


async def draining_now(cluster: Cluster) -> set[BookieId]:
    return {*(await OrderStore(cluster.store, PATHS).read()).draining}


async def absent(cluster: Cluster) -> None:
    await cluster.kill(B1)


async def absent_and_draining(cluster: Cluster) -> None:
    await order_drain(cluster, B1)
    await absent(cluster)


def test_draining_an_absent_bookie_needs_yes(in_memory: InMemory) -> None:
    refused, none = in_memory(drain, B1, B2, prepare=absent, look=draining_now)

    assert isinstance(refused.exception, RejectedError)
    assert f"give --yes. {B1} is lost. {WITHOUT}" in str(refused.exception)
    assert f"bookmender bookie decommission {B1}" in str(refused.exception)
    assert none == set(), "the registered bookie is not drained either"

    ordered, both = in_memory(drain, B1, B2, "--yes", prepare=absent, look=draining_now)
    assert (ordered.exit_code, both) == (0, {B1, B2})
    assert f"{B1} is lost. {WITHOUT}" in ordered.stderr


@pytest.mark.parametrize(
    ("arguments", "draining", "said"),
    [
        pytest.param((B1,), {B1}, f"{B1} is lost", id="ordering it again warns"),
        pytest.param((B1, "--cancel"), set(), f"The drain of {B1} is cancelled.", id="cancelled"),
        pytest.param(
            (B1, B2, "--cancel"), set(), f"No drain of {B2} was ordered.", id="nothing to cancel"
        ),
    ],
)
def test_the_drain_of_an_absent_bookie_can_be_repeated_and_cancelled(
    in_memory: InMemory, arguments: tuple[str, ...], draining: set[BookieId], said: str
) -> None:
    result, found = in_memory(drain, *arguments, prepare=absent_and_draining, look=draining_now)

    assert (result.exit_code, found) == (0, draining)
    assert said in result.stderr


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
