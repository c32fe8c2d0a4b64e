"""``bookmender bookie maintenance --end`` warns that an absent bookie is lost then."""

import asyncio

from auditor.ledger_map_updater import LedgerMapRecord
from auditor.settings import AuditorSettings
from daemon.cli.bookie import maintain
from daemon.operations.maintenance import end_concerns, end_window, open_window
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from replication import znodes
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import DELAY, SOON_S, delayed, with_ledgers
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS

AGAIN = f". To prevent that, begin another window: bookmender bookie maintenance {B1} --for 1h"


async def ended(
    cluster: Cluster, bookie: BookieId = B1, *, settings: AuditorSettings | None = None
) -> list[str]:
    """Return the warnings when the window of an absent bookie ends while a node leads."""
    here = visiting(cluster)
    await open_window(here, bookie, duration_s=3600, reason="", clock=cluster.clock)
    async with auditing(cluster, settings=settings or AuditorSettings()) as leader:
        await leader.records.write(
            LedgerMapRecord(
                session_id=leader.store.session_id, written_ms=0, is_complete=True, ledger_count=2
            )
        )
        await cluster.kill(bookie)
        await asyncio.sleep(SOON_S)
        assert await end_window(here, bookie)
        return await end_concerns(here, bookie, clock=cluster.clock)


@in_virtual_time
async def test_without_a_recovery_delay_it_is_lost_at_once() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))

    assert await ended(cluster) == [
        f"{B1} is absent, and is lost now. Its 2 ledgers are then marked and copied to other "
        f"bookies{AGAIN}"
    ]


@in_virtual_time
async def test_with_a_recovery_delay_it_has_time_to_return() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.create(DELAY, znodes.recovery_delay_to_bytes(600), with_parents=True)

    assert await ended(cluster, settings=delayed(600)) == [
        f"{B1} is absent, and will be lost in 10 min, unless it is back by then. Its 1 ledger is "
        f"then marked and copied to other bookies{AGAIN}"
    ]


@in_virtual_time
async def test_the_reasons_why_its_ledgers_are_not_marked_are_given() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    here, told = visiting(cluster), list[str]()

    await cluster.store.create(PATHS.disable, with_parents=True)
    told += await end_concerns(here, B1, clock=cluster.clock)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    await order_store.give(znode, HoldOrder(since_ms=0), over=await order_store.stored(znode))
    told += await end_concerns(here, B1, clock=cluster.clock)

    lost = (
        f"{B1} is absent, and is lost now. Its ledgers are then marked and copied to other bookies"
    )
    assert told == [
        f"{lost}, but not before auto-recovery is enabled (bookmender enable){AGAIN}",
        f"{lost}, but not before the safety hold ends (bookmender hold){AGAIN}",
    ]


@in_virtual_time
async def test_for_a_bookie_that_no_ledger_names_nothing_is_copied() -> None:
    cluster = await with_ledgers((B1, B2))

    assert await ended(cluster, B4) == [
        f"{B4} is absent, but no ledger names it, so nothing is copied. If it never returns, run: "
        f"bookmender bookie decommission {B4}"
    ]


@in_virtual_time
async def test_a_registered_bookie_gets_no_warning() -> None:
    """Nor does any bookie while none is registered."""
    cluster = await with_ledgers((B1, B2))
    assert await end_concerns(visiting(cluster), B1, clock=cluster.clock) == []

    await cluster.kill(*BOOKIES)

    assert await end_concerns(visiting(cluster), B1, clock=cluster.clock) == [], "rule S8"


def test_the_command_says_whether_there_was_a_window(in_memory: InMemory) -> None:
    async def window_of_an_absent_bookie(cluster: Cluster) -> None:
        clock = SystemClock()
        await open_window(visiting(cluster), B1, duration_s=3600, reason="", clock=clock)
        await cluster.kill(B1)

    none, _ = in_memory(maintain, B1, "--end")
    ended, _ = in_memory(maintain, B1, "--end", prepare=window_of_an_absent_bookie)

    assert (none.exit_code, ended.exit_code) == (0, 0)
    assert none.stderr == f"{B1} had no maintenance window.\n"
    assert f"The maintenance window of {B1} is ended." in ended.output
    assert f"{B1} is absent, and is lost now" in ended.stderr
