"""Taking a bookie out of a cluster for good, whatever happens meanwhile."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner

from daemon.cli import decommission
from daemon.cli import decommission as decommission_command
from daemon.cli.decommission import Decommissioned
from daemon.cli.hold import begin_hold
from ledgers.errors import ConflictError, RejectedError, UnavailableError
from ledgers.model import BookieId
from replication.orders import OrderStore
from tests.auditor.auditing import auditing
from tests.auditor.scenes import delayed, with_ledgers
from tests.daemon.cli_calls import exit_code
from tests.daemon.decommissioning import decommissioned, has_cookie
from tests.daemon.visits import Heard, order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.repairs import drain

STRANGER = BookieId("stranger:3181")
"""No bookie of the cluster."""


# --- The whole way ---------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieDecommissionTest.testDecommissionBookie",
    "BookieDecommissionTest.testDecommissionForLedgersWithMultipleSegmentsAndNotWriteClosed",
    "BookieDecommissionTest.testDecommissionForEmptyLedgers",
    verdict="better",
    why="it waits only for ledgers that name the bookie, shows how many are left, and can be interrupted and repeated",
)
@in_virtual_time
async def test_a_stopped_bookie_goes_once_its_ledgers_have_moved_whatever_the_delay() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
    heard = Heard()
    async with auditing(cluster, settings=delayed(3_600)), cluster.node() as node, working(node):
        await cluster.kill(B1)
        await asyncio.sleep(1)
        assert await cluster.marked() == []

        done = await decommissioned(cluster, heard=heard)

        assert done == Decommissioned(moved_count=2, had_cookie=True, was_known=True)
        assert not await has_cookie(cluster)
        assert heard.told == []
        assert heard.left[0] == 2
        for ledger_id in (0, 2):
            assert B1 not in (await cluster.metadata(ledger_id)).bookies
        await cluster.assert_queue_empty()
        await cluster.assert_whole(0, 1, 2)


@in_virtual_time
async def test_that_a_hold_keeps_its_ledgers_from_being_marked_is_said_while_it_waits() -> None:
    cluster = await with_ledgers((B1, B2))
    heard = Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await begin_hold(visiting(cluster), duration_s=60, reason="", clock=cluster.clock)
        await cluster.kill(B1)

        await decommissioned(cluster, heard=heard)

    (told,) = heard.told
    assert "hold stands" in told
    assert "bookmender hold" in told


@in_virtual_time
async def test_done_once_it_may_be_done_again() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    assert await decommissioned(cluster) == Decommissioned(
        moved_count=0, had_cookie=True, was_known=True
    )

    assert await decommissioned(cluster) == Decommissioned(
        moved_count=0, had_cookie=False, was_known=False
    )


async def give_cookie(cluster: Cluster) -> None:
    await cluster.store.create(f"{ROOT}/cookies/{STRANGER}")


async def give_drain_order(cluster: Cluster) -> None:
    await drain(cluster, STRANGER)


async def name_in_a_mark(cluster: Cluster) -> None:
    await cluster.mark(STRANGER, ledger_id=0)


async def name_in_a_ledger(cluster: Cluster) -> None:
    await cluster.write_ledger((STRANGER, B2, B3), ledger_id=9)


@pytest.mark.parametrize(
    ("spoken_of_by", "was_known"),
    [
        pytest.param(None, False, id="nothing"),
        pytest.param(give_cookie, True, id="its cookie"),
        pytest.param(give_drain_order, True, id="an order"),
        pytest.param(name_in_a_mark, True, id="a mark"),
        pytest.param(name_in_a_ledger, True, id="a ledger"),
    ],
)
@in_virtual_time
async def test_an_id_is_known_when_anything_speaks_of_it(
    spoken_of_by: Callable[[Cluster], Awaitable[None]] | None, was_known: bool
) -> None:
    cluster = await with_ledgers((B1, B2))
    if spoken_of_by is not None:
        await spoken_of_by(cluster)

    async with auditing(cluster), cluster.node() as node, working(node):
        done = await asyncio.wait_for(decommissioned(cluster, STRANGER), 600)

    assert done.was_known is was_known


@pytest.mark.parametrize(
    ("was_known", "arguments", "code"),
    [
        pytest.param(True, [], 0, id="known"),
        pytest.param(False, [], 2, id="unknown: most likely a slip of the pen"),
        pytest.param(False, ["--ignore-unknown"], 0, id="unknown, in a script that may run twice"),
    ],
)
def test_an_id_that_nothing_speaks_of_is_wrong_use_unless_that_is_expected(
    was_known: bool, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visited(config: object, act: object) -> Decommissioned:
        return Decommissioned(moved_count=0, had_cookie=False, was_known=was_known)

    monkeypatch.setattr(decommission_command, "run_in_session", visited)

    result = CliRunner().invoke(decommission_command.decommission, [B1, *arguments])

    assert result.exit_code == code, result.output
    assert ("nothing names" in result.output) is (code == 2)


def test_that_nothing_speaks_of_an_id_is_an_error_for_programs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def visited(config: object, act: object) -> Decommissioned:
        return Decommissioned(moved_count=0, had_cookie=False, was_known=False)

    monkeypatch.setattr(decommission_command, "run_in_session", visited)

    assert exit_code(monkeypatch, "bookie", "decommission", B1, "-o", "json") == 2

    record = json.loads(capsys.readouterr().out)
    assert record["exit_code"] == 2
    assert "nothing names it" in record["error"]


@pytest.mark.compat(
    "BookieDecommissionTest.testDecommissionBookie",
    "BookieDecommissionTest.testDecommissionForLedgersWithMultipleSegmentsAndNotWriteClosed",
    "BookieDecommissionTest.testDecommissionForEmptyLedgers",
    verdict="better",
)
@in_virtual_time
async def test_interrupted_anywhere_it_is_taken_up_again() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(3_600)):
        await cluster.kill(B1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decommissioned(cluster), 10)
        assert await cluster.marked() == [0, 1], "the auditors go on"
        assert await has_cookie(cluster)

        async with cluster.node() as node, working(node):
            done = await decommissioned(cluster)

    assert done.had_cookie
    assert not await has_cookie(cluster)


@in_virtual_time
async def test_a_mark_that_names_it_is_not_waited_for_when_its_ledger_does_not() -> None:
    """The mark may stay for another reason: entries that are lost for good."""
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await cluster.mark(B1, ledger_id=0)

    done = await asyncio.wait_for(decommissioned(cluster), 10)

    assert done.was_known
    assert not await has_cookie(cluster)
    assert await cluster.marked() == [0], "it is not ours to take away"


@in_virtual_time
async def test_a_mark_that_names_it_counts_when_its_ledger_cannot_be_read() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await cluster.mark(B1, ledger_id=0)
    await cluster.store.set(cluster.manager.path(0), b"rubbish", version=-1)

    with pytest.raises(UnavailableError, match=r"may name it.*: 0\. "):
        await asyncio.wait_for(decommissioned(cluster), 10)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_its_drain_order_goes_with_it() -> None:
    cluster = await with_ledgers((B2, B3))
    await order_drain(cluster, B1, B4)
    await cluster.kill(B1)

    await decommissioned(cluster)

    assert (await OrderStore(cluster.store, PATHS).read()).draining.keys() == {B4}


@in_virtual_time
async def test_an_audit_is_asked_for_again_when_nothing_comes_of_the_first() -> None:
    cluster = await with_ledgers((B1, B2))
    path = PATHS.recovery_delay
    await cluster.store.create(path, b"3600")
    await cluster.kill(B1)
    heard = Heard()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(
            decommissioned(cluster, heard=heard), 2.5 * decommission.AUDIT_AGAIN_S
        )

    data, stat = await cluster.store.get(path)
    assert data == b"3600", "the delay stays what it was"
    assert stat.version == 3
    assert sum("no auditor is running" in text for text in heard.told) == 3


# --- What cannot be told ---------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s8_a_ledger_that_cannot_be_read_keeps_the_cookie_and_is_named() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.kill(B1)
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)

    with pytest.raises(
        UnavailableError,
        match=r"cannot be read may name it.*: 1\. .*ignore-unreadable.*once the copies of 1 other ledger",
    ):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_ledger_that_cannot_be_read_but_proves_to_name_others_is_no_obstacle() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    data, _ = await cluster.store.get(cluster.manager.path(0))
    later = data.replace(b"Version\t3", b"Version\t4")
    await cluster.store.set(cluster.manager.path(0), later, version=-1)

    assert (await decommissioned(cluster)).had_cookie


@in_virtual_time
async def test_rule_s8_an_unreadable_ledger_that_names_others_is_one_where_its_mark_cannot_be_read() -> (
    None
):
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    data, _ = await cluster.store.get(cluster.manager.path(0))
    later = data.replace(b"Version\t3", b"Version\t4")
    await cluster.store.set(cluster.manager.path(0), later, version=-1)
    await cluster.mark(B2, ledger_id=0)
    await cluster.store.set(PATHS.mark(0), b"rubbish \xff", version=-1)

    with pytest.raises(UnavailableError, match=r"cannot be read may name it.*: 0\."):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_what_cannot_be_read_is_ignored_where_an_operator_says_so() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)

        done = await decommissioned(cluster, ignores_unreadable=True)

    assert (done.moved_count, done.had_cookie, done.ignored) == (1, True, (1,))
    assert not await has_cookie(cluster)


@in_virtual_time
async def test_rule_s8_an_empty_list_of_bookies_is_no_proof_that_it_is_stopped() -> None:
    cluster = await with_ledgers((B2, B3))
    for bookie in list((await visiting(cluster).registration.read()).available):
        await cluster.unregister(bookie)

    with pytest.raises(UnavailableError):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_bookie_that_is_started_while_its_ledgers_move_keeps_its_cookie() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        waiting = asyncio.create_task(decommissioned(cluster))
        await asyncio.sleep(5)
        await cluster.revive(B1)
        async with cluster.node() as node, working(node):
            await cluster.store.delete(cluster.manager.path(0))
            with pytest.raises(RejectedError, match="it is still registered"):
                await asyncio.wait_for(waiting, 60)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_bookie_that_is_set_up_anew_meanwhile_keeps_its_new_cookie() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.recovery_delay, b"0")
    await cluster.kill(B1)
    waiting = asyncio.create_task(decommissioned(cluster))
    await asyncio.sleep(5)
    await cluster.wipe(B1)
    await cluster.store.delete(cluster.manager.path(0))

    with pytest.raises(ConflictError):
        await asyncio.wait_for(waiting, 60)

    assert await has_cookie(cluster)
