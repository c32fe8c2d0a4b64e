"""Unreadable orders: every command that they concern reports them, and one command removes each."""

import json
from types import ModuleType

import click
import pytest

from daemon.cli import bookie as bookie_command
from daemon.cli import orders as orders_command
from daemon.operations.maintenance import open_window
from daemon.status import command as status_command
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
from tests.daemon.in_memory import run_in_memory
from tests.daemon.visits import visiting
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
    for bookie in (B1, B2, B3):
        await order_store.give(drain_znode(PATHS, bookie), DrainOrder(since_ms=1), over=None)


async def unreadable(cluster: Cluster) -> tuple[str, ...]:
    return (await OrderStore(cluster.store, PATHS).read()).unreadable


COMMANDS = [
    pytest.param(status_command, status_command.status, (), ALL, id="status"),
    pytest.param(bookie_command, bookie_command.list_bookies, (), ALL, id="bookie list"),
    pytest.param(bookie_command, bookie_command.drain, (), (DRAIN,), id="bookie drain"),
    pytest.param(bookie_command, bookie_command.maintain, (), (WINDOW,), id="bookie maintenance"),
    pytest.param(
        bookie_command,
        bookie_command.maintain,
        (B2,),
        (WINDOW,),
        id="bookie maintenance ID",
    ),
    pytest.param(orders_command, orders_command.limits, (), (LIMITS,), id="limits"),
    pytest.param(orders_command, orders_command.hold, (), (HOLD,), id="hold"),
]


@pytest.mark.parametrize(("module", "command", "arguments", "paths"), COMMANDS)
def test_unreadable_orders_are_named_with_advice(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    arguments: tuple[str, ...],
    paths: tuple[str, ...],
) -> None:
    result, _ = run_in_memory(monkeypatch, module, command, *arguments, prepare=break_all)

    assert result.exit_code == 1
    lines = result.output.splitlines()
    said = [line for line in lines if "cannot be read" in line and "/orders/" in line]
    assert len(said) == len(paths)
    for path in paths:
        (line,) = (line for line in said if f"({path})" in line)
        assert "bookmender" in line or "delete" in line


@pytest.mark.parametrize(
    ("module", "command", "arguments", "paths"),
    [each for each in COMMANDS if each.id != "limits"],  # its object has only limits
)
def test_the_json_has_the_znodes(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    arguments: tuple[str, ...],
    paths: tuple[str, ...],
) -> None:
    result, _ = run_in_memory(
        monkeypatch, module, command, *arguments, "-o", "json", prepare=break_all
    )

    assert sorted(json.loads(result.stdout)["unreadable_orders"]) == sorted(paths)


@pytest.mark.parametrize(
    ("module", "command", "arguments", "path"),
    [
        pytest.param(bookie_command, bookie_command.drain, (B1, "--cancel"), DRAIN, id="drain"),
        pytest.param(
            bookie_command,
            bookie_command.maintain,
            (B2, "--end"),
            WINDOW,
            id="maintenance",
        ),
        pytest.param(orders_command, orders_command.limits, ("--reset",), LIMITS, id="limits"),
        pytest.param(orders_command, orders_command.hold, ("--end",), HOLD, id="hold"),
    ],
)
def test_the_advised_command_removes_the_order(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    arguments: tuple[str, ...],
    path: str,
) -> None:
    result, left = run_in_memory(
        monkeypatch, module, command, *arguments, prepare=break_all, look=unreadable
    )

    assert result.exit_code == 0, result.output
    assert path not in left
    assert path not in result.output


@pytest.mark.parametrize(
    ("module", "command", "arguments", "path"),
    [
        pytest.param(bookie_command, bookie_command.drain, (), PATHS.draining_orders, id="drains"),
        pytest.param(
            bookie_command,
            bookie_command.drain,
            (B1, "--wait"),
            PATHS.draining_orders,
            id="drain --wait",
        ),
        pytest.param(
            bookie_command,
            bookie_command.maintain,
            (),
            PATHS.maintenance_orders,
            id="windows",
        ),
        pytest.param(
            bookie_command,
            bookie_command.maintain,
            (B2,),
            PATHS.maintenance_orders,
            id="window of one",
        ),
    ],
)
def test_rule_s8_unlistable_orders_do_not_mean_no_orders(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    arguments: tuple[str, ...],
    path: str,
) -> None:
    result, _ = run_in_memory(
        monkeypatch, module, command, *arguments, prepare=drain_three, shut=[path]
    )

    assert result.exit_code == 1
    assert "cannot be listed" in result.stderr
    assert f"({path})" in result.stderr


def test_an_unreadable_hold_is_shown_as_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = run_in_memory(monkeypatch, orders_command, orders_command.hold, prepare=break_all)

    assert result.stdout.startswith("safety hold by")
    assert (
        "order cannot be read, so a hold is assumed). It lasts until it is ended" in result.stdout
    )


def test_an_unreadable_hold_can_be_ended_with_yes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lose_one(cluster: Cluster) -> None:
        await break_all(cluster)
        await cluster.kill(B3)

    async def holding(cluster: Cluster) -> HoldOrder | None:
        return (await OrderStore(cluster.store, PATHS).read()).hold

    for arguments, exit_code, is_ended in [(["--end"], 1, False), (["--end", "--yes"], 0, True)]:
        result, hold = run_in_memory(
            monkeypatch,
            orders_command,
            orders_command.hold,
            *arguments,
            prepare=lose_one,
            look=holding,
        )
        assert result.exit_code == exit_code
        assert hold is not None
        assert hold.is_released is is_ended
        assert hold.bookies == ((B3,) if is_ended else ())


# --- Remaining and ended orders -------------------------------------------------------------------


def test_cancelling_a_drain_lists_the_remaining_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = run_in_memory(
        monkeypatch, bookie_command, bookie_command.drain, B1, "--cancel", prepare=drain_three
    )

    assert f"{B1} is cancelled" in result.stderr
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [B2, B3]
    assert "no drain" not in result.output


@pytest.mark.parametrize(
    ("had_window", "said"),
    [(True, "The maintenance window of b1:3181 is ended."), (False, "had no maintenance window")],
)
def test_ending_a_window_says_whether_there_was_one(
    monkeypatch: pytest.MonkeyPatch, had_window: bool, said: str
) -> None:
    async def prepare(cluster: Cluster) -> None:
        if had_window:
            await open_window(visiting(cluster), B1, duration_s=60, reason="", clock=cluster.clock)

    result, _ = run_in_memory(
        monkeypatch,
        bookie_command,
        bookie_command.maintain,
        B1,
        "--end",
        prepare=prepare,
    )

    assert said in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize("kind", [PATHS.draining_orders, PATHS.maintenance_orders])
def test_an_order_for_a_name_that_is_no_bookie_id_must_be_deleted_by_hand(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No command takes that name."""
    data = DrainOrder(since_ms=1).to_json()

    async def prepare(cluster: Cluster) -> None:
        await cluster.store.create(f"{kind}/b 1", data, with_parents=True)

    command = bookie_command.drain if kind == PATHS.draining_orders else bookie_command.maintain
    result, _ = run_in_memory(monkeypatch, bookie_command, command, prepare=prepare)

    assert result.exit_code == 1
    assert "b 1, which is not a bookie ID, so nodes ignore it. Delete its znode" in result.stderr
    assert f"({kind}/b 1)" in result.stderr
