"""Orders that cannot be read: every command that they concern says so, and one takes them back."""

import json
from types import ModuleType

import click
import pytest

from daemon.cli import (
    bookie as bookie_command,
)
from daemon.cli import (
    drain as drain_command,
)
from daemon.cli import (
    hold as hold_command,
)
from daemon.cli import (
    limits as limits_command,
)
from daemon.cli import (
    maintenance as maintenance_command,
)
from daemon.cli.maintenance import open_window
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
    pytest.param(drain_command, drain_command.drain, (), (DRAIN,), id="bookie drain"),
    pytest.param(
        maintenance_command, maintenance_command.maintenance, (), (WINDOW,), id="bookie maintenance"
    ),
    pytest.param(
        maintenance_command,
        maintenance_command.maintenance,
        (B2,),
        (WINDOW,),
        id="bookie maintenance ID",
    ),
    pytest.param(limits_command, limits_command.limits, (), (LIMITS,), id="limits"),
    pytest.param(hold_command, hold_command.hold, ("show",), (HOLD,), id="hold"),
]


@pytest.mark.parametrize(("module", "command", "arguments", "paths"), COMMANDS)
def test_it_is_said_which_order_cannot_be_read_and_what_to_do(
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
    [each for each in COMMANDS if each.id != "limits"],  # whose object holds nothing but limits
)
def test_programs_are_told_of_the_znodes(
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
        pytest.param(drain_command, drain_command.drain, (B1, "--cancel"), DRAIN, id="drain"),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (B2, "--end"),
            WINDOW,
            id="maintenance",
        ),
        pytest.param(limits_command, limits_command.limits, ("--reset",), LIMITS, id="limits"),
        pytest.param(hold_command, hold_command.hold, ("end",), HOLD, id="hold"),
    ],
)
def test_what_it_says_to_do_does_it(
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
        pytest.param(drain_command, drain_command.drain, (), PATHS.draining_orders, id="drains"),
        pytest.param(
            drain_command,
            drain_command.drain,
            (B1, "--wait"),
            PATHS.draining_orders,
            id="drain --wait",
        ),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (),
            PATHS.maintenance_orders,
            id="windows",
        ),
        pytest.param(
            maintenance_command,
            maintenance_command.maintenance,
            (B2,),
            PATHS.maintenance_orders,
            id="window of one",
        ),
    ],
)
def test_rule_s8_orders_that_cannot_even_be_listed_are_not_taken_for_none(
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


def test_a_hold_that_cannot_be_read_is_shown_as_one_that_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = run_in_memory(monkeypatch, hold_command, hold_command.hold, prepare=break_all)

    assert result.stdout.startswith("held for")
    assert "order cannot be read, so a hold is assumed), until it is ended" in result.stdout


def test_a_hold_that_cannot_be_read_is_ended_like_any_other_once_that_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lose_one(cluster: Cluster) -> None:
        await break_all(cluster)
        await cluster.kill(B3)

    async def holding(cluster: Cluster) -> HoldOrder | None:
        return (await OrderStore(cluster.store, PATHS).read()).hold

    for arguments, exit_code, is_ended in [(["end"], 1, False), (["end", "--yes"], 0, True)]:
        result, hold = run_in_memory(
            monkeypatch,
            hold_command,
            hold_command.hold,
            *arguments,
            prepare=lose_one,
            look=holding,
        )
        assert result.exit_code == exit_code
        assert hold is not None
        assert hold.is_released is is_ended
        assert hold.bookies == ((B3,) if is_ended else ())


# --- What is left, and what was ended ----------------------------------------------------------------


def test_who_is_still_drained_when_one_order_is_taken_back_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = run_in_memory(
        monkeypatch, drain_command, drain_command.drain, B1, "--cancel", prepare=drain_three
    )

    assert f"{B1} is not drained any more" in result.stderr
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [B2, B3]
    assert "no bookie" not in result.output


@pytest.mark.parametrize(
    ("had_window", "said"), [(True, "its window is ended"), (False, "had no window")]
)
def test_ending_a_window_says_whether_there_was_one(
    monkeypatch: pytest.MonkeyPatch, had_window: bool, said: str
) -> None:
    async def prepare(cluster: Cluster) -> None:
        if had_window:
            await open_window(visiting(cluster), B1, duration_s=60, reason="", clock=cluster.clock)

    result, _ = run_in_memory(
        monkeypatch,
        maintenance_command,
        maintenance_command.maintenance,
        B1,
        "--end",
        prepare=prepare,
    )

    assert said in result.output
    assert result.exit_code == 0
