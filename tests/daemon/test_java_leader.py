"""Warnings of commands while Java's AutoRecovery leads, which ignores our orders."""

import click
import pytest

from daemon.cli.bookie import maintain
from daemon.cli.orders import hold
from daemon.operations.orders import UNREADABLE_VOTE, leader_concerns
from replication import znodes
from replication.orders import (
    HoldOrder,
    MaintenanceWindow,
    OrderStore,
    hold_znode,
    maintenance_znode,
)
from tests.auditor.auditing import leading
from tests.daemon.in_memory import InMemory, Prepare
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1
from tests.replication.nodes import PATHS

LEADS = "Java's AutoRecovery (java-1:3181), which ignores"


async def led_by_java(cluster: Cluster) -> None:
    await cluster.store.create(
        f"{PATHS.election}/V_0000000003",
        znodes.vote_to_bytes("java-1:3181"),
        with_parents=True,
    )


async def led_by_java_and_ordered(cluster: Cluster) -> None:
    """Let Java lead a cluster with a safety hold and a maintenance window."""
    await led_by_java(cluster)
    order_store = OrderStore(cluster.store, PATHS)
    await order_store.give(hold_znode(PATHS), HoldOrder(since_ms=1, is_by_operator=True), over=None)
    window = MaintenanceWindow(since_ms=1, until_ms=4_000_000_000_000)
    await order_store.give(maintenance_znode(PATHS, B1), window, over=None)


@in_virtual_time
async def test_java_leads_if_the_leader_is_no_bookmender_node() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    assert await leader_concerns(here, "holds") == []
    async with leading(cluster):
        assert await leader_concerns(here, "holds") == []
    await led_by_java(cluster)
    (told,) = await leader_concerns(here, "holds")
    assert "java-1:3181" in told

    await cluster.store.set(f"{PATHS.election}/V_0000000003", b"\xff", version=-1)

    (told,) = await leader_concerns(here, "holds")
    assert UNREADABLE_VOTE in told


@in_virtual_time
async def test_a_java_leader_is_no_concern_while_recovery_is_disabled() -> None:
    cluster = await Cluster.start()
    await led_by_java(cluster)
    await cluster.store.create(PATHS.disable, with_parents=True)

    assert await leader_concerns(visiting(cluster), "holds") == []


@pytest.mark.parametrize(
    ("command", "arguments", "prepare", "orders"),
    [
        pytest.param(hold, (), led_by_java_and_ordered, "holds", id="hold"),
        pytest.param(hold, ("--begin",), led_by_java, "holds", id="hold begin"),
        pytest.param(hold, (), led_by_java, None, id="no hold"),
        pytest.param(
            maintain, (B1, "--for", "1h"), led_by_java, "maintenance windows", id="a window begins"
        ),
        pytest.param(
            maintain, (), led_by_java_and_ordered, "maintenance windows", id="a window is open"
        ),
        pytest.param(maintain, (B1, "--end"), led_by_java_and_ordered, None, id="a window ends"),
    ],
)
def test_an_order_that_a_java_leader_ignores_gets_a_warning(
    in_memory: InMemory,
    command: click.Command,
    arguments: tuple[str, ...],
    prepare: Prepare,
    orders: str | None,
) -> None:
    result, _ = in_memory(command, *arguments, prepare=prepare)

    if orders is None:
        assert LEADS not in result.stderr
    else:
        assert f"{LEADS} {orders} and marks the ledgers of lost bookies" in result.stderr
    assert LEADS not in result.stdout
