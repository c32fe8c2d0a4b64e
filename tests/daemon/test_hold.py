"""The safety hold as operators see it, order it, and end it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import Result
from msgspec import structs

from daemon.cli.orders import hold as hold_command
from daemon.operations.holds import HoldStateRecord, begin_hold, end_hold, hold_text, read_hold
from ledgers.errors import ConflictError
from ledgers.model import BookieId
from replication.cluster import HOLD
from replication.orders import (
    DrainOrder,
    HoldOrder,
    MaintenanceWindow,
    OrderStore,
    drain_znode,
    hold_znode,
    maintenance_znode,
)
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS
from tests.said import Said

OURS = HoldOrder(since_ms=1, until_ms=None, bookies=(B1, B2), reason="2 of 7 went")


async def give(cluster: Cluster, order: HoldOrder) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await order_store.give(znode, order, over=await order_store.stored(znode))


async def stored_hold(cluster: Cluster) -> HoldOrder | None:
    found = await OrderStore(cluster.store, PATHS).stored(hold_znode(PATHS))
    return None if found is None else found.value


# --- The order ------------------------------------------------------------------------------------


@in_virtual_time
async def test_without_a_hold_absent_bookies_are_shown() -> None:
    """Bookies in maintenance or draining are listed apart."""
    cluster = await Cluster.start()
    await cluster.kill(B1, B2, B3)
    order_store = OrderStore(cluster.store, PATHS)
    window = MaintenanceWindow(since_ms=0, until_ms=cluster.clock.wall_ms() + 1)
    await order_store.give(maintenance_znode(PATHS, B2), window, over=None)
    await order_store.give(drain_znode(PATHS, B3), DrainOrder(since_ms=0), over=None)

    state = await read_hold(visiting(cluster), clock=cluster.clock)

    assert state == HoldStateRecord(
        is_held=False,
        hold=None,
        absent=[B1],
        lost=[B1, B3],
        absent_by_order=[B2, B3],
        bookie_count=7,
        unreadable_orders=[],
    )


@in_virtual_time
async def test_an_operators_hold_replaces_the_leaders() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)

    async with cluster.node() as node:
        given = await begin_hold(
            visiting(cluster), duration_s=60, reason="new switch", clock=cluster.clock
        )
        await cluster.clock.sleep(0.1)
        assert node.views.current.orders.hold == given
        assert node.views.current.orders.is_held
        assert HOLD._value.get() == 1
        await cluster.clock.sleep(61)
        assert not node.views.current.orders.is_held
        assert HOLD._value.get() == 0

    assert given.is_by_operator
    assert given.bookies == (), "its end releases no bookies"
    assert (await read_hold(visiting(cluster), clock=cluster.clock)).hold is None


@in_virtual_time
async def test_ending_a_hold_releases_all_absent_bookies() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)

    assert await end_hold(visiting(cluster), [B2, B3], clock=cluster.clock)

    assert await stored_hold(cluster) == replace(OURS, bookies=(B1, B2, B3), is_released=True)
    assert not await end_hold(visiting(cluster), [B4], clock=cluster.clock), "it has ended already"
    assert await stored_hold(cluster) == replace(OURS, bookies=(B1, B2, B3), is_released=True)


@in_virtual_time
async def test_ending_a_hold_without_absent_bookies_deletes_it() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)

    assert await end_hold(visiting(cluster), [], clock=cluster.clock)

    assert await stored_hold(cluster) is None
    assert not await end_hold(visiting(cluster), [], clock=cluster.clock)


@in_virtual_time
async def test_a_concurrent_write_of_the_hold_is_a_conflict() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)
    admin_session = visiting(cluster)
    get = admin_session.store.get

    async def slow(path: str) -> Any:
        found = await get(path)
        if path == hold_znode(PATHS).path:
            await give(cluster, replace(OURS, bookies=(B1, B2, B3)))
        return found

    admin_session.store.get = slow  # type: ignore[method-assign]

    with pytest.raises(ConflictError):
        await end_hold(admin_session, [B1], clock=cluster.clock)


SCENES = {
    "by the leader": OURS,
    "by the leader, with an end": replace(OURS, until_ms=3_690_000),
    "by an operator": HoldOrder(since_ms=0, until_ms=3_690_000, is_by_operator=True),
    "with control characters": replace(OURS, reason="\x1b[2J"),
}
ABSENT: dict[str, dict[str, list[BookieId]]] = {
    "none is absent": {},
    "one is absent": {"absent": [B1]},
    "one is lost": {"absent": [B1], "lost": [B1]},
    "one of two is lost": {"absent": [B1, B2], "lost": [B2]},
    "all absent ones are in maintenance or draining": {"absent_by_order": [B1, B2]},
    "some are in maintenance": {"absent": [B3], "absent_by_order": [B1]},
}


def test_a_hold_and_absent_bookies_are_described(said: Said) -> None:
    none = HoldStateRecord(
        is_held=False,
        hold=None,
        absent=[],
        lost=[],
        absent_by_order=[],
        bookie_count=4,
        unreadable_orders=[],
    )
    absent = {
        name: structs.replace(none, **bookies).absent_text for name, bookies in ABSENT.items()
    }

    said("hold", {name: hold_text(hold, now_ms=90_000) for name, hold in SCENES.items()} | absent)


# --- The commands ---------------------------------------------------------------------------------

Invoke = Callable[..., tuple[Result, HoldOrder | None]]


@pytest.fixture
def invoke(in_memory: InMemory) -> Invoke:
    """Return a function that runs the command on a cluster of seven bookies.

    Some of them are absent, and an order may exist. It returns the result and the order afterwards.
    """

    def invoked(
        *arguments: str, away: int = 0, order: HoldOrder | None = None
    ) -> tuple[Result, HoldOrder | None]:
        async def prepare(cluster: Cluster) -> None:
            await cluster.kill(*BOOKIES[:away])
            if order is not None:
                await give(cluster, order)

        return in_memory(hold_command, *arguments, prepare=prepare, look=stored_hold)

    return invoked


@pytest.mark.parametrize(
    ("order", "exit_code"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(OURS, 1, id="in force"),
        pytest.param(replace(OURS, is_released=True), 0, id="ended"),
        pytest.param(replace(OURS, until_ms=2), 0, id="over"),
    ],
)
def test_a_hold_in_force_is_shown_and_exits_with_1(
    invoke: Invoke, order: HoldOrder | None, exit_code: int
) -> None:
    result, _ = invoke(away=2, order=order)

    assert result.exit_code == exit_code
    assert f"2 of 7 bookies are lost: {B1}, {B2}" in result.output
    assert ("safety hold by" in result.output) == (exit_code == 1)


def test_the_json_has_the_same_facts(invoke: Invoke) -> None:
    result, _ = invoke("-o", "json", away=2, order=OURS)

    record = json.loads(result.output)
    assert record["is_held"]
    assert record["hold"] == {
        "since_ms": 1,
        "until_ms": None,
        "bookies": [B1, B2],
        "reason": "2 of 7 went",
        "is_by_operator": False,
    }
    assert (record["absent"], record["bookie_count"]) == ([B1, B2], 7)


def test_a_hold_begins_with_a_duration_and_a_reason_or_without(invoke: Invoke) -> None:
    result, after = invoke("--begin", "--for", "2h", "--reason", "new switch")
    endless, without_end = invoke("--begin")

    assert (result.exit_code, endless.exit_code) == (0, 0)
    assert after is not None
    assert without_end is not None
    assert after.until_ms == after.since_ms + 7_200_000
    assert (after.reason, after.is_by_operator) == ("new switch", True)
    assert without_end.until_ms is None


@pytest.mark.parametrize(
    ("arguments", "away", "exit_code", "is_ended"),
    [
        pytest.param(["--end"], 0, 0, True, id="no bookie is absent: harmless"),
        pytest.param(["--end"], 2, 1, False, id="bookies are absent: a preview first"),
        pytest.param(["--end", "--yes"], 2, 0, True, id="with yes"),
    ],
)
def test_ending_a_hold_needs_yes_if_bookies_are_absent(
    invoke: Invoke, arguments: list[str], away: int, exit_code: int, is_ended: bool
) -> None:
    result, after = invoke(*arguments, away=away, order=OURS)

    assert result.exit_code == exit_code
    assert ("Nothing was changed" in result.output) is not is_ended
    assert (after is None or after.is_released) is is_ended


def test_ending_a_hold_that_does_not_exist_is_no_error(invoke: Invoke) -> None:
    result, after = invoke("--end", "--yes", away=2)

    assert result.exit_code == 0
    assert "no safety hold" in result.output
    assert after is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--begin", "--for", "soon"],
        ["--begin", "--reason", "a\nb"],
        ["--begin", "--end"],
        ["--for", "1h"],
        ["--begin", "--yes"],
        ["stop"],
        ["-o", "yaml"],
    ],
)
def test_wrong_arguments_are_refused(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke(*arguments)[0].exit_code == 2
