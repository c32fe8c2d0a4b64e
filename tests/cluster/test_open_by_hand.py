"""Open ledgers whose writers died, repaired by hand on real bookies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.model import LedgerState
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.our_client import abandoned
from tests.cluster.steps import Bench, bench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]
CLUSTER = {"bookies": 3}

AT_ONCE_S = 30
"""Less than any grace, and far more than a command takes to start."""
LAST = 29


@asynccontextmanager
async def left_open(uri: str, *, ack_quorum: int) -> AsyncIterator[tuple[Bench, int]]:
    """Create an abandoned open ledger on all three bookies."""
    async with bench(uri) as on:
        writer = await abandoned(uri, [b"entry"] * (LAST + 1), ack_quorum=ack_quorum)
        yield on, writer.ledger_id


async def state_of(on: Bench, ledger_id: int) -> LedgerState:
    return (await on.seen.manager.read(ledger_id)).metadata.state


@pytest.mark.long(group="commands")
async def test_a_repair_of_an_open_end_names_the_closing_command(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    wiped = module_cluster.bookies[0]

    async with left_open(uri, ack_quorum=2) as (on, ledger_id):
        await asyncio.to_thread(kill_and_expire, module_cluster, wiped)
        await asyncio.to_thread(module_cluster.wipe, wiped)
        await asyncio.to_thread(module_cluster.start_bookie, wiped)

        async with asyncio.timeout(AT_ONCE_S):
            told = await bookmender(uri, "repair", str(ledger_id), state=tmp_path)
        listed = await bookmender(uri, "queue")

        assert told.exit_code == 1, told
        assert f"ledger {ledger_id} waits: open-fragment: " in told.out
        close = ("ledger", "close", str(ledger_id), "--yes")
        assert f"bookmender {' '.join(close)}`" in told.out
        assert f"bookmender {' '.join(close)}`" in listed.out
        assert await state_of(on, ledger_id) is LedgerState.OPEN

        closed = await bookmender(uri, *close, "--force", state=tmp_path)
        assert closed.exit_code == 0, closed
        whole = await bookmender(uri, "repair", str(ledger_id), state=tmp_path)
        assert whole.exit_code == 0, whole


async def test_without_a_bookie_for_its_last_entries_it_is_not_fenced(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    away = module_cluster.bookies[1]

    async with left_open(uri, ack_quorum=3) as (on, ledger_id):
        close = ("ledger", "close", str(ledger_id), "--yes", "--force")
        await asyncio.to_thread(kill_and_expire, module_cluster, away)
        try:
            refused = await bookmender(uri, *close, state=tmp_path)
            assert refused.exit_code == 1, refused
            assert f"no answer from {away} (not registered)" in refused.complaint
            assert f"Start {away}" in refused.complaint
            assert await state_of(on, ledger_id) is LedgerState.OPEN
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, away)

        closed = await bookmender(uri, *close, state=tmp_path)
        assert closed.exit_code == 0, closed
        metadata = (await on.seen.manager.read(ledger_id)).metadata
        assert (metadata.is_closed, metadata.last_entry_id) == (True, LAST)
