"""The safety hold as operators see it, order it, and end it."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daemon.admin_session import AdminSession
from daemon.cli import hold as hold_command
from daemon.cli.hold import HoldState, begin_hold, end_hold, hold_text, read_hold
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
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS
from tests.virtual_time import run

OURS = HoldOrder(since_ms=1, until_ms=None, bookies=(B1, B2), reason="2 of 7 went")


def test_its_help_teaches_how_a_hold_ends_and_what_becomes_of_who_is_away_then() -> None:
    text = " ".join(CliRunner().invoke(hold_command.hold, ["--help"]).output.split())

    assert "bookmender hold end end it, unless bookies are absent" in text
    assert "ends that hold soon after the bookies return, or after hold.lasts_s" in text
    assert "absent bookies count as lost" in text


async def give(cluster: Cluster, order: HoldOrder) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await order_store.give(znode, order, over=await order_store.stored(znode))


async def standing(cluster: Cluster) -> HoldOrder | None:
    found = await OrderStore(cluster.store, PATHS).stored(hold_znode(PATHS))
    return None if found is None else found.order


# --- What is read and written ----------------------------------------------------------------------


@in_virtual_time
async def test_without_a_hold_who_is_away_is_told_but_for_those_that_are_so_on_purpose() -> None:
    cluster = await Cluster.start()
    await cluster.kill(B1, B2, B3)
    order_store = OrderStore(cluster.store, PATHS)
    window = MaintenanceWindow(since_ms=0, until_ms=cluster.clock.wall_ms() + 1)
    await order_store.give(maintenance_znode(PATHS, B2), window, over=None)
    await order_store.give(drain_znode(PATHS, B3), DrainOrder(since_ms=0), over=None)

    state = await read_hold(visiting(cluster), clock=cluster.clock)

    assert state == HoldState(hold=None, away=(B1,), excused=(B2, B3), bookie_count=7)


@pytest.mark.parametrize(
    ("away", "excused", "text"),
    [
        pytest.param((), (), "0 of 4 bookies are away", id="nobody"),
        pytest.param((B1,), (), f"1 of 4 bookies is away: {B1}", id="one"),
        pytest.param(
            (),
            (B1, B2),
            f"2 of 4 bookies are away, all under maintenance or draining: {B1}, {B2}",
            id="all of them on purpose",
        ),
        pytest.param(
            (B3,),
            (B1,),
            f"2 of 4 bookies are away, 1 of them under maintenance or draining: {B1}; not so: {B3}",
            id="some on purpose",
        ),
    ],
)
def test_who_is_away_on_purpose_is_counted_and_told_apart(
    away: tuple[BookieId, ...], excused: tuple[BookieId, ...], text: str
) -> None:
    state = HoldState(hold=None, away=away, excused=excused, bookie_count=4)

    assert state.away_text == text
    assert state.to_json()["away_on_purpose"] == list(excused)


@in_virtual_time
async def test_an_operators_hold_takes_the_place_of_the_leaders_and_every_node_sees_it() -> None:
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
    assert given.bookies == (), "at its end it says nothing of who is still away"
    assert (await read_hold(visiting(cluster), clock=cluster.clock)).hold is None


@in_virtual_time
async def test_ending_one_binds_for_all_that_are_away() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)

    assert await end_hold(visiting(cluster), [B2, B3], clock=cluster.clock)

    assert await standing(cluster) == replace(OURS, bookies=(B1, B2, B3), is_released=True)
    assert not await end_hold(visiting(cluster), [B4], clock=cluster.clock), "it is ended already"
    assert await standing(cluster) == replace(OURS, bookies=(B1, B2, B3), is_released=True)


@in_virtual_time
async def test_ending_one_with_nobody_away_leaves_nothing_behind() -> None:
    cluster = await Cluster.start()
    await give(cluster, OURS)

    assert await end_hold(visiting(cluster), [], clock=cluster.clock)

    assert await standing(cluster) is None
    assert not await end_hold(visiting(cluster), [], clock=cluster.clock)


@in_virtual_time
async def test_of_an_operator_and_the_leader_who_write_at_once_one_is_told() -> None:
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


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        pytest.param(
            OURS,
            "by the leader (2 of 7 went), until it is ended, or until soon after its bookies are back",
            id="the leader's",
        ),
        pytest.param(
            replace(OURS, until_ms=3_690_000),
            "for another 1 h, or until soon after its bookies are back: no further",
            id="the leader's, with an end",
        ),
        pytest.param(
            HoldOrder(since_ms=0, until_ms=3_690_000, is_by_operator=True),
            "held for 1 min 30 s by an operator, for another 1 h: no further",
            id="an operator's",
        ),
        pytest.param(replace(OURS, reason="\x1b[2J"), r"(\x1b[2J)", id="no terminal obeys it"),
    ],
)
def test_a_hold_is_told_in_one_line(hold: HoldOrder, said: str) -> None:
    assert said in hold_text(hold, now_ms=90_000)


# --- The commands ----------------------------------------------------------------------------------


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, HoldOrder | None]]:
    """Run the command on a cluster of seven, some of them away, under some order; what stands
    after."""

    def invoked(
        *arguments: str, away: int = 0, order: HoldOrder | None = None
    ) -> tuple[Result, HoldOrder | None]:
        after: list[HoldOrder | None] = []

        def in_memory(config: Path | None, action: Callable[[AdminSession], Awaitable[Any]]) -> Any:
            async def acting() -> Any:
                cluster = await Cluster.start()
                await cluster.kill(*BOOKIES[:away])
                if order is not None:
                    await give(cluster, order)
                found = await action(visiting(cluster))
                after.append(await standing(cluster))
                return found

            return run(acting())

        monkeypatch.setattr(hold_command, "run_in_session", in_memory)
        return CliRunner().invoke(hold_command.hold, arguments), after[0] if after else None

    return invoked


Invoke = Callable[..., tuple[Result, HoldOrder | None]]


@pytest.mark.parametrize(
    ("order", "exit_code"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(OURS, 1, id="one stands"),
        pytest.param(replace(OURS, is_released=True), 0, id="one was ended"),
        pytest.param(replace(OURS, until_ms=2), 0, id="one is over"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["show"]], ids=["by default", "by name"])
def test_a_hold_that_stands_is_shown_and_found(
    invoke: Invoke, arguments: list[str], order: HoldOrder | None, exit_code: int
) -> None:
    result, _ = invoke(*arguments, away=2, order=order)

    assert result.exit_code == exit_code
    assert f"2 of 7 bookies are away: {B1}, {B2}" in result.output
    assert ("held for" in result.output) == (exit_code == 1)


def test_programs_are_told_the_same(invoke: Invoke) -> None:
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
    assert (record["away"], record["bookie_count"]) == ([B1, B2], 7)


def test_one_is_begun_for_a_while_and_for_a_reason(invoke: Invoke) -> None:
    result, after = invoke("begin", "--for", "2h", "--reason", "new switch")

    assert result.exit_code == 0
    assert after is not None
    assert after.until_ms == after.since_ms + 7_200_000
    assert (after.reason, after.is_by_operator) == ("new switch", True)
    assert "by an operator (new switch)" in result.output


def test_one_is_begun_until_it_is_ended(invoke: Invoke) -> None:
    result, after = invoke("begin")

    assert result.exit_code == 0
    assert after is not None
    assert after.until_ms is None


@pytest.mark.parametrize(
    ("arguments", "away", "exit_code", "is_ended"),
    [
        pytest.param(["end"], 0, 0, True, id="nobody is away: nothing comes of it"),
        pytest.param(["end"], 2, 1, False, id="much comes of it: that is shown first"),
        pytest.param(["end", "--yes"], 2, 0, True, id="it is meant"),
    ],
)
def test_one_is_ended_if_that_is_meant(
    invoke: Invoke, arguments: list[str], away: int, exit_code: int, is_ended: bool
) -> None:
    result, after = invoke(*arguments, away=away, order=OURS)

    assert result.exit_code == exit_code
    assert ("nothing was changed" in result.output) is not is_ended
    assert (after is None or after.is_released) is is_ended


def test_that_nothing_is_held_is_no_error_to_who_would_end_it(invoke: Invoke) -> None:
    result, after = invoke("end", "--yes", away=2)

    assert result.exit_code == 0
    assert "nothing is held" in result.output
    assert after is None


@pytest.mark.parametrize(
    "arguments",
    [["begin", "--for", "soon"], ["begin", "--reason", "a\nb"], ["stop"], ["-o", "yaml"]],
)
def test_what_cannot_be_meant_is_wrong_use(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke(*arguments)[0].exit_code == 2
