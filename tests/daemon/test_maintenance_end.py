"""``bookmender bookie maintenance --end`` of a bookie that is away: it is lost then, which nobody
is to be surprised by."""

import asyncio

import pytest

from auditor.ledger_map_updater import LedgerMapRecord
from auditor.settings import AuditorSettings
from daemon.cli import maintenance as maintenance_command
from daemon.cli.maintenance import end_concerns, end_window, open_window
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from replication import znodes
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import DELAY, SOON_S, delayed, with_ledgers
from tests.daemon.in_memory import run_in_memory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS

AGAIN = f"; if it is to be away on purpose still, bookmender bookie maintenance {B1} --for 1h"


async def ended(
    cluster: Cluster, bookie: BookieId = B1, *, settings: AuditorSettings | None = None
) -> list[str]:
    """What is told when the window of a bookie that went in it is ended, while a node leads."""
    here = visiting(cluster)
    await open_window(here, bookie, duration_s=3600, reason="", clock=cluster.clock)
    async with auditing(cluster, settings=settings or AuditorSettings()) as leader:
        await leader.records.write_index(
            LedgerMapRecord(
                session_id=leader.store.session_id, written_ms=0, is_complete=True, ledger_count=2
            )
        )
        await cluster.kill(bookie)
        await asyncio.sleep(SOON_S)
        assert await end_window(here, bookie)
        return await end_concerns(here, bookie, clock=cluster.clock)


@in_virtual_time
async def test_without_a_delay_it_is_lost_at_once_and_its_ledgers_are_counted() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))

    assert await ended(cluster) == [
        f"{B1} is not registered, and counts as lost from now on: 2 ledgers that name it are marked, and "
        f"copied to others{AGAIN}"
    ]


@in_virtual_time
async def test_with_a_delay_it_has_that_time_to_come_back() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.create(DELAY, znodes.recovery_delay_to_bytes(600), with_parents=True)

    assert await ended(cluster, settings=delayed(600)) == [
        f"{B1} is not registered, and counts as lost in 10 min, unless it is back by then: 1 ledger that "
        f"names it is marked, and copied to others{AGAIN}"
    ]


@in_virtual_time
async def test_what_keeps_its_ledgers_from_being_marked_is_said_too() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    here, told = visiting(cluster), list[str]()

    await cluster.store.create(PATHS.disable, with_parents=True)
    told += await end_concerns(here, B1, clock=cluster.clock)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await order_store.give(znode, HoldOrder(since_ms=0), over=await order_store.stored(znode))
    told += await end_concerns(here, B1, clock=cluster.clock)

    lost = f"{B1} is not registered, and counts as lost from now on: its ledgers are marked, and copied to others"
    assert told == [
        f"{lost}, but not before auto-recovery is enabled again: bookmender enable{AGAIN}",
        f"{lost}, but not before the safety hold that stands has ended: bookmender hold{AGAIN}",
    ]


@in_virtual_time
async def test_of_one_that_no_ledger_names_nothing_is_copied() -> None:
    cluster = await with_ledgers((B1, B2))

    assert await ended(cluster, B4) == [
        f"{B4} is not registered, but no ledger names it: nothing is copied for it; if it is not to come "
        f"back, bookmender bookie decommission {B4} forgets it"
    ]


@in_virtual_time
async def test_nothing_is_said_of_one_that_is_back_nor_while_no_bookie_is_there() -> None:
    cluster = await with_ledgers((B1, B2))
    assert await end_concerns(visiting(cluster), B1, clock=cluster.clock) == []

    await cluster.kill(*BOOKIES)

    assert await end_concerns(visiting(cluster), B1, clock=cluster.clock) == [], "rule S8"


def test_the_command_says_it_when_it_ends_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(cluster: Cluster) -> None:
        clock = SystemClock()
        await open_window(visiting(cluster), B1, duration_s=3600, reason="", clock=clock)
        await cluster.kill(B1)

    module = maintenance_command
    result, _ = run_in_memory(monkeypatch, module, module.maintenance, B1, "--end", prepare=prepare)

    assert result.exit_code == 0
    assert f"{B1} is not registered, and counts as lost from now on" in result.stderr
