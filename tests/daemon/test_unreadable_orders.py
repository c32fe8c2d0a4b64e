"""Unreadable orders: every command that they concern reports them, and one command removes each."""

import json

import click
import pytest

from daemon.cli import bookie, orders
from daemon.cli.status import status
from replication.orders import (
    DrainOrder,
    HoldOrder,
    OrderStore,
    checks_znode,
    drain_znode,
    hold_znode,
    limits_znode,
    maintenance_znode,
    tries_znode,
)
from tests.daemon.in_memory import InMemory
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

DRAIN, WINDOW = drain_znode(PATHS, B1).path, maintenance_znode(PATHS, B2).path
LIMITS, HOLD, CHECKS = limits_znode(PATHS).path, hold_znode(PATHS).path, checks_znode(PATHS).path
TRIES = tries_znode(PATHS).path
ALL = (DRAIN, WINDOW, LIMITS, HOLD, CHECKS, TRIES)


async def break_all(cluster: Cluster) -> None:
    for path in ALL:
        await cluster.store.create(path, b'{"version": 9}', with_parents=True)


async def drain_three(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    for each in (B1, B2, B3):
        await order_store.give(drain_znode(PATHS, each), DrainOrder(since_ms=1), over=None)


async def unreadable(cluster: Cluster) -> tuple[str, ...]:
    return (await OrderStore(cluster.store, PATHS).read()).unreadable


SHOWN: dict[str, tuple[click.Command, tuple[str, ...], tuple[str, ...]]] = {
    "status": (status, (), ALL),
    "bookie list": (bookie.list_bookies, (), ALL),
    "bookie drain": (bookie.drain, (), (DRAIN,)),
    "bookie maintenance": (bookie.maintain, (), (WINDOW,)),
    "bookie maintenance ID": (bookie.maintain, (B2,), (WINDOW,)),
    "limits": (orders.limits, (), (LIMITS,)),
    "hold": (orders.hold, (), (HOLD,)),
}
"""Commands, and the unreadable orders that they report."""


@pytest.mark.parametrize(("command", "arguments", "paths"), SHOWN.values(), ids=SHOWN)
def test_unreadable_orders_are_named_with_advice(
    in_memory: InMemory, command: click.Command, arguments: tuple[str, ...], paths: tuple[str, ...]
) -> None:
    result, _ = in_memory(command, *arguments, prepare=break_all)
    printed, _ = in_memory(command, *arguments, "-o", "json", prepare=break_all)

    assert result.exit_code == 1
    lines = result.output.splitlines()
    said = [line for line in lines if "cannot be read" in line and "/orders/" in line]
    assert len(said) == len(paths)
    for path in paths:
        (line,) = (line for line in said if f"({path})" in line)
        assert "bookmender" in line or "delete" in line
    if command is not orders.limits:  # its object has only limits
        assert sorted(json.loads(printed.stdout)["unreadable_orders"]) == sorted(paths)


@pytest.mark.parametrize(
    ("command", "arguments", "path"),
    [
        (bookie.drain, (B1, "--cancel"), DRAIN),
        (bookie.maintain, (B2, "--end"), WINDOW),
        (orders.limits, ("--reset",), LIMITS),
        (orders.hold, ("--end",), HOLD),
    ],
    ids=["drain", "maintenance", "limits", "hold"],
)
def test_the_advised_command_removes_the_order(
    in_memory: InMemory, command: click.Command, arguments: tuple[str, ...], path: str
) -> None:
    result, left = in_memory(command, *arguments, prepare=break_all, look=unreadable)

    assert result.exit_code == 0, result.output
    assert path not in left
    assert path not in result.output


@pytest.mark.parametrize(
    ("command", "arguments", "path"),
    [
        (bookie.drain, (), PATHS.draining_orders),
        (bookie.drain, (B1, "--wait"), PATHS.draining_orders),
        (bookie.maintain, (), PATHS.maintenance_orders),
        (bookie.maintain, (B2,), PATHS.maintenance_orders),
    ],
    ids=["drains", "drain --wait", "windows", "window of one"],
)
def test_rule_s8_unlistable_orders_do_not_mean_no_orders(
    in_memory: InMemory, command: click.Command, arguments: tuple[str, ...], path: str
) -> None:
    result, _ = in_memory(command, *arguments, prepare=drain_three, shut=[path])

    assert result.exit_code == 1
    assert "cannot be listed" in result.stderr
    assert f"({path})" in result.stderr


def test_an_unreadable_hold_is_in_force_and_can_be_ended_with_yes(in_memory: InMemory) -> None:
    async def lose_one(cluster: Cluster) -> None:
        await break_all(cluster)
        await cluster.kill(B3)

    async def holding(cluster: Cluster) -> HoldOrder | None:
        return (await OrderStore(cluster.store, PATHS).read()).hold

    shown, _ = in_memory(orders.hold, prepare=break_all)
    assert "order cannot be read, so a hold is assumed" in shown.stdout
    for arguments, exit_code, is_ended in [(["--end"], 1, False), (["--end", "--yes"], 0, True)]:
        result, hold = in_memory(orders.hold, *arguments, prepare=lose_one, look=holding)
        assert result.exit_code == exit_code
        assert hold is not None
        assert hold.is_released is is_ended
        assert hold.bookies == ((B3,) if is_ended else ())


# --- Remaining and ended orders -------------------------------------------------------------------


def test_cancelling_a_drain_lists_the_remaining_ones(in_memory: InMemory) -> None:
    result, _ = in_memory(bookie.drain, B1, "--cancel", prepare=drain_three)

    assert f"{B1} is cancelled" in result.stderr
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [B2, B3]


@pytest.mark.parametrize(
    ("command", "kind"),
    [(bookie.drain, PATHS.draining_orders), (bookie.maintain, PATHS.maintenance_orders)],
)
def test_an_order_for_a_name_that_is_no_bookie_id_must_be_deleted_by_hand(
    in_memory: InMemory, command: click.Command, kind: str
) -> None:
    """No command takes that name."""
    data = DrainOrder(since_ms=1).to_json()

    async def prepare(cluster: Cluster) -> None:
        await cluster.store.create(f"{kind}/b 1", data, with_parents=True)

    result, _ = in_memory(command, prepare=prepare)

    assert result.exit_code == 1
    assert "b 1, which is not a bookie ID, so nodes ignore it. Delete its znode" in result.stderr
    assert f"({kind}/b 1)" in result.stderr
