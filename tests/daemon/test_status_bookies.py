"""What ``bookmender status`` says of single bookies, whatever its verdict is about."""

import asyncio
from dataclasses import replace

import pytest

from auditor.absence import Outages
from auditor.ledger_map_updater import LedgerMapRecord
from daemon.cli.maintenance import end_window, open_window
from daemon.status.command import render
from daemon.status.gathering import gather_status
from daemon.status.leader import LeaderState
from daemon.status.verdict import verdict_text
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.nodes import Role
from replication.orders import HoldOrder
from replication.reasons import Blocked, Reason
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, with_ledgers
from tests.daemon.status_values import WHOLE, node
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import working

BUILT = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=9)
LED = replace(
    WHOLE,
    leader="host-a",
    leader_node=node("host-a", 11, Role.AUDITOR),
    auditing=LeaderState(index=BUILT),
)


@pytest.mark.parametrize(
    ("changes", "verdict", "why"),
    [
        pytest.param(
            {"is_disabled": True, "marked_count": 2},
            "disabled",
            ": auto-recovery is disabled",
            id="disabled, and others are marked",
        ),
        pytest.param(
            {"hold": HoldOrder(since_ms=0)}, "held", ": a safety hold stands", id="a hold stands"
        ),
        pytest.param({"lost": (B2,)}, "bookies-lost", "", id="another one is lost"),
    ],
)
def test_a_bookie_that_came_back_empty_is_told_under_every_verdict(
    changes: dict[str, object], verdict: str, why: str
) -> None:
    found = replace(LED, wiped=(B1,), **changes)  # type: ignore[arg-type]

    lines = render(found, now_ms=0).splitlines()

    assert found.verdict == verdict
    assert (
        f"          wiped: {B1}, set up anew, and may have lost what it had; its ledgers are not "
        f"marked for that yet{why}" in lines
    )
    [counts] = [line for line in lines if line.startswith("bookies ")]
    assert counts.endswith(", 1 wiped")


@in_virtual_time
async def test_marks_for_a_lost_bookie_that_wait_for_another_ones_maintenance_are_explained() -> (
    None
):
    """The ledgers name the lost one no more, but miss copies still (rule S6)."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), ledger_id=0, write_quorum=3)
    await cluster.write_ledger((B1, B3), ledger_id=1)
    here, clock = visiting(cluster), cluster.clock
    for bookie in (B1, B2):
        await open_window(here, bookie, duration_s=3600, reason="", clock=clock)
        await cluster.kill(bookie)

    async with auditing(cluster) as leader, cluster.node("node-2") as worker, working(worker):
        await leader.records.write_index(replace(BUILT, session_id=leader.store.session_id))
        await asyncio.sleep(SOON_S)
        await end_window(here, B1)
        await asyncio.sleep(60)
        status = await gather_status(here, clock=clock)

    assert await cluster.marked() == [0]
    assert B1 not in (await cluster.manager.read(0)).metadata.bookies
    lines = render(status, now_ms=clock.wall_ms()).splitlines()
    assert (
        f"          lost: {B1}, named by no ledger any more (1 marked for it waits for maintenance of others): "
        "start it, or bookmender bookie decommission it"
    ) in lines
    told = verdict_text(status, now_ms=clock.wall_ms())
    assert told.startswith(
        "repairing (all that is left waits for maintenance windows to end, the next one in 5"
    )
    assert status.to_json()["queue"]["for_windows_by_lost_bookie"] == {B1: 1}


@pytest.mark.parametrize(
    ("marked_count", "text"),
    [
        pytest.param(5, "5 marked for it, 3 of which wait for maintenance of others", id="more"),
        pytest.param(4, "4 marked for it, 3 of which wait for maintenance of others", id="as many"),
    ],
)
def test_while_some_ledgers_name_it_still_that_is_no_matter_of_when_they_were_counted(
    marked_count: int, text: str
) -> None:
    lost = BookieId("b")
    state = LeaderState(index=BUILT, naming={lost: 4}, are_all_named=True)
    found = replace(
        LED,
        lost=(lost,),
        auditing=state,
        by_bookie=((lost, marked_count),),
        for_windows=((lost, 3),),
    )

    assert f"          lost: b, named by 4 ledgers, {text}" in render(found, now_ms=0).splitlines()


def test_as_long_as_anything_else_is_left_the_verdict_says_nothing_of_windows() -> None:
    note = WaitingNote(
        ledger_id=1, blocked=Blocked(reason=Reason.MAINTENANCE), node="n", since_ms=0, next_try_ms=9
    )
    found = replace(LED, marked_count=2, waiting=(note,), waiting_count=1)

    assert verdict_text(found, now_ms=0) == "repairing"
    assert "windows" in verdict_text(replace(found, marked_count=1), now_ms=0)
    due = replace(found, marked_count=1, overtaken=frozenset({1}))
    assert verdict_text(due, now_ms=0) == "repairing"


@in_virtual_time
async def test_who_went_in_an_outage_of_zookeeper_is_not_called_lost_while_its_loss_is_held_back() -> (
    None
):
    cluster = await with_ledgers((B1, B2))
    outages = Outages(cluster.clock, return_s=20.0)
    async with auditing(cluster, outages=outages) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        await asyncio.sleep(2)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(8)
        held = await gather_status(visiting(cluster), clock=cluster.clock)
        now_ms = cluster.clock.wall_ms()
        await asyncio.sleep(12 + SOON_S)
        after = await gather_status(visiting(cluster), clock=cluster.clock)

    text = "its loss is held back till then, as it may register again after an outage of ZooKeeper"
    assert (held.away, held.lost) == ((B1,), ())
    assert verdict_text(held, now_ms=now_ms) == (
        f"bookies-away (1 bookie away, the next one lost in 12 s: {text})"
    )
    assert f"away: {B1} lost in 12 s: {text}" in render(held, now_ms=now_ms)
    (pending,) = held.to_json()["auditing"]["pending_losses"]
    assert pending["is_excused"]
    assert (after.lost, after.marked_count, after.verdict) == ((B1,), 1, "repairing")
