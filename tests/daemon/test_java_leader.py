"""What commands say where Java's AutoRecovery leads, which keeps to no order of ours."""

from dataclasses import replace
from types import ModuleType

import click
import pytest

from daemon.cli import hold as hold_command
from daemon.cli import maintenance as maintenance_command
from daemon.cli.orders import UNREADABLE_VOTE, disregards, java_leader, leader_concerns
from daemon.status.command import render
from replication import znodes
from replication.orders import (
    HoldOrder,
    MaintenanceWindow,
    OrderStore,
    hold_znode,
    maintenance_znode,
)
from tests.auditor.auditing import leading
from tests.daemon.in_memory import run_in_memory
from tests.daemon.status_values import WHOLE
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1
from tests.replication.nodes import PATHS

LEADS = "Java's AutoRecovery (java-1:3181), which knows no"


async def led_by_java(cluster: Cluster) -> None:
    await cluster.store.create(
        f"{PATHS.election}/V_0000000003",
        znodes.vote_to_bytes("java-1:3181"),
        with_parents=True,
    )


async def led_by_java_and_ordered(cluster: Cluster) -> None:
    """A hold and a window stand already."""
    await led_by_java(cluster)
    order_store = OrderStore(cluster.store, PATHS)
    await order_store.give(hold_znode(PATHS), HoldOrder(since_ms=1, is_by_operator=True), over=None)
    window = MaintenanceWindow(since_ms=1, until_ms=4_000_000_000_000)
    await order_store.give(maintenance_znode(PATHS, B1), window, over=None)


@in_virtual_time
async def test_it_leads_where_the_leader_is_none_of_our_nodes() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    assert await java_leader(here) is None
    async with leading(cluster):
        assert await java_leader(here) is None
    await led_by_java(cluster)
    assert await java_leader(here) == "java-1:3181"

    await cluster.store.set(f"{PATHS.election}/V_0000000003", b"\xff", version=-1)

    assert await java_leader(here) == UNREADABLE_VOTE


@in_virtual_time
async def test_while_auto_recovery_is_disabled_it_marks_nothing() -> None:
    cluster = await Cluster.start()
    await led_by_java(cluster)
    assert await leader_concerns(visiting(cluster), "holds") == [disregards("java-1:3181", "holds")]

    await cluster.store.create(PATHS.disable, with_parents=True)

    assert await leader_concerns(visiting(cluster), "holds") == []


@pytest.mark.parametrize(
    ("module", "command", "arguments", "is_ordered", "orders"),
    [
        pytest.param(hold_command, hold_command.hold, (), True, "holds", id="hold"),
        pytest.param(hold_command, hold_command.hold, ("begin",), False, "holds", id="hold begin"),
        pytest.param(hold_command, hold_command.hold, (), False, None, id="nothing is held"),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (B1, "--for", "1h"),
            False,
            "maintenance windows",
            id="a window begins",
        ),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (),
            True,
            "maintenance windows",
            id="a window stands",
        ),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (B1, "--end"),
            True,
            None,
            id="a window ends",
        ),
    ],
)
def test_who_gives_an_order_that_the_leader_does_not_know_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    arguments: tuple[str, ...],
    is_ordered: bool,
    orders: str | None,
) -> None:
    prepare = led_by_java_and_ordered if is_ordered else led_by_java

    result, _ = run_in_memory(monkeypatch, module, command, *arguments, prepare=prepare)

    if orders is None:
        assert LEADS not in result.stderr
    else:
        assert f"{LEADS} {orders} and marks whatever is lost" in result.stderr
    assert LEADS not in result.stdout


def test_status_says_so_of_a_hold() -> None:
    held = replace(WHOLE, leader="java-1:3181", hold=HoldOrder(since_ms=0))

    first, second, *_ = render(held, now_ms=60_000).splitlines()

    assert first.startswith("HOLD      held for 1 min")
    assert second == f"          {disregards('java-1:3181', 'holds')}"
    assert LEADS not in render(replace(held, is_disabled=True), now_ms=60_000)
    assert LEADS not in render(replace(held, leader=None), now_ms=60_000)
