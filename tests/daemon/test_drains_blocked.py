"""Waiting for a drain of which no remaining ledger can move."""

import asyncio
import re
from dataclasses import replace

import pytest

from daemon.operations.drains import Drains, wait_drained
from daemon.operations.waiting import SHOWN_MAX
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode
from replication.reasons import Blocked, Facts, Reason
from tests.auditor.auditing import draining
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import Heard, order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import open_ledger


async def drained(cluster: Cluster, *bookies: BookieId, heard: Heard | None = None) -> Drains:
    heard = heard or Heard()
    waiting = wait_drained(
        visiting(cluster), bookies, notify=heard.tell, show=heard.show, clock=cluster.clock
    )
    return await asyncio.wait_for(waiting, 600)


async def note(cluster: Cluster, ledger_id: int, reason: Reason) -> None:
    told = WaitingNote(
        ledger_id=ledger_id,
        blocked=Blocked(reason=reason, facts=Facts(errors=("d",))),
        node="node-1",
        since_ms=1,
    )
    await cluster.store.create(PATHS.waiting_note(ledger_id), told.to_json(), with_parents=True)


@in_virtual_time
async def test_a_ledger_with_an_unproven_end_ends_the_waiting() -> None:
    """B2 was reformatted, B3 is unresponsive, and B1 is draining."""
    cluster, heard = await open_ledger(), Heard()
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    cluster.bookie(B3).is_down = True
    await order_drain(cluster, B1, may_fence=True)

    async with draining(cluster), cluster.node() as node, working(node):
        drains = await drained(cluster, B1, heard=heard)

    (told,) = drains.blocked
    assert told.startswith(f"ledger {LEDGER} is blocked: end-unproven: ")
    assert not drains.are_drained_or_in_doubt([B1])
    _, what_it_means, why = drains.to_text().splitlines()
    assert what_it_means == "all ledgers that are left are blocked:"
    assert why == f"  {told}"
    assert drains.record().blocked == [told]
    assert heard.waiting[-1] == 1
    assert heard.beside[-1].startswith(f"1 of them waits (ledger {LEDGER} is blocked: end-unproven")


@in_virtual_time
async def test_waiting_continues_during_a_maintenance_window() -> None:
    cluster, heard = await with_ledgers((B1, B2)), Heard()
    await order_drain(cluster, B1)
    order_store, now_ms = OrderStore(cluster.store, PATHS), cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + 3_600_000)
    await order_store.give(maintenance_znode(PATHS, B1), window, over=None)
    await cluster.kill(B1)

    async with draining(cluster), cluster.node() as node, working(node):
        with pytest.raises(TimeoutError):
            await drained(cluster, B1, heard=heard)

    assert re.fullmatch(
        r"1 of them waits for a maintenance window to end \(next try in 5\d min( \d+ s)?, or when "
        r"its bookie is "
        r"back\); bookmender queue shows the reasons",
        heard.beside[-1],
    )


@in_virtual_time
async def test_a_ledger_that_left_the_bookie_is_not_waited_for() -> None:
    """The ledger still waits for the maintenance of another bookie."""
    cluster, heard = await with_ledgers((B1, B2, B3), (B1, B3)), Heard()
    await order_drain(cluster, B1)

    async with draining(cluster):
        await asyncio.sleep(1)
        moved = await cluster.manager.read(0)
        segment = replace(moved.metadata.segments[0], ensemble=(B4, B2, B3))
        await cluster.manager.write(0, replace(moved.metadata, segments=(segment,)), read_as=moved)
        await note(cluster, 0, Reason.MAINTENANCE)
        await note(cluster, 1, Reason.NO_TARGET)
        drains = await drained(cluster, B1, heard=heard)

    (told,) = drains.blocked
    assert told.startswith("ledger 1 is blocked: no-target")
    assert heard.left[-1] == heard.waiting[-1] == 1


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(Reason.OPEN_FRAGMENT, id="its writer may close it"),
        pytest.param(None, id="it will be moved"),
    ],
)
@in_virtual_time
async def test_waiting_continues_while_one_ledger_may_move(others: Reason | None) -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await order_drain(cluster, B1, B4)

    async with draining(cluster):
        await asyncio.sleep(1)
        await note(cluster, 0, Reason.NO_TARGET)
        if others is not None:
            await note(cluster, 1, others)
        with pytest.raises(TimeoutError):
            await drained(cluster, B1)


@in_virtual_time
async def test_a_note_older_than_its_mark_does_not_count() -> None:
    cluster = await with_ledgers((B1, B2))
    await order_drain(cluster, B1)
    await note(cluster, 0, Reason.NO_COPY)

    async with draining(cluster):
        with pytest.raises(TimeoutError):
            await drained(cluster, B1)


@in_virtual_time
async def test_blocked_ledgers_of_several_bookies_are_listed_once() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B3, B4))
    await order_drain(cluster, B1, B2)

    async with draining(cluster):
        await asyncio.sleep(1)
        for ledger_id in (0, 1):
            await note(cluster, ledger_id, Reason.NO_TARGET)
        drains = await drained(cluster, B1, B2)

    assert [text.partition(" is blocked")[0] for text in drains.blocked] == ["ledger 0", "ledger 1"]


@in_virtual_time
async def test_of_many_blocked_ledgers_the_text_names_only_some() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * (SHOWN_MAX + 3))
    await order_drain(cluster, B1)

    async with draining(cluster):
        await asyncio.sleep(1)
        for ledger_id in range(SHOWN_MAX + 3):
            await note(cluster, ledger_id, Reason.NO_TARGET)
        drains = await drained(cluster, B1)

    assert len(drains.record().blocked) == SHOWN_MAX + 3
    assert drains.to_text().endswith("\n  and 3 more. bookmender queue shows all.")
