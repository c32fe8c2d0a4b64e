"""A safety hold on real servers: bookies fail at once and return; a rack is lost for good."""

import asyncio
import re
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.model import LedgerState
from replication import znodes
from replication.ledger_record import WaitingNotes
from replication.marks import marked_ledger_ids
from replication.orders import OrderStore
from replication.racks import remembered_racks
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.steps import Bench, bench, errors, events, nodes, shape, wait_for
from tests.workload import Ending, Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

DELAY_S = 1
SETTINGS = {
    "AUDITOR_LOST_BOOKIE_RECOVERY_DELAY_S": str(DELAY_S),
    "REPLICATION_OPEN_LEDGER_GRACE_S": "0.2",
    "REPLICATION_RETRY_MIN_S": "0.5",
    "REPLICATION_RETRY_MAX_S": "1",
}


async def hold_is_in_force(on: Bench) -> bool:
    return (await OrderStore(on.seen.store, on.seen.paths).read()).is_held


async def ask_for_audit(on: Bench) -> None:
    """Trigger an audit of all bookies that are absent now, as Java's triggeraudit does."""
    data = znodes.recovery_delay_to_bytes(DELAY_S)
    await on.seen.store.set(on.seen.paths.recovery_delay, data, version=-1)


async def marked(on: Bench) -> list[int]:
    return await marked_ledger_ids(on.seen.store, on.seen.paths)


async def is_deferred_by_hold(on: Bench, written: Written) -> bool:
    note = await WaitingNotes(on.seen.store, on.seen.paths).read(written.ledger_id)
    return note is not None and note.reason is Reason.HOLD


async def test_a_mass_failure_begins_a_safety_hold(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The hold ends when the bookies return, or when an operator ends it."""
    cluster = module_cluster
    uri, wave, rack = cluster.metadata_service_uri, cluster.bookies[:3], cluster.bookies[:2]
    racks = dict(zip(cluster.bookies, ("/a", "/a", "/b", "/c", "/c"), strict=True))
    racks_file = tmp_path / "racks"
    racks_file.write_text("".join(f"{bookie} {racks[bookie]}\n" for bookie in racks))
    settings = SETTINGS | {"PLACEMENT_RACKS_FILE": str(racks_file)}

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(10)))
        [unclosed] = await on.write(shape(10, quorums=(5, 3, 2), ending=Ending.ABANDONED))
        node = start("ours", settings=settings)
        await wait_for(lambda: events(node, "audit.finished"), "first audit")

        async def are_remembered() -> bool:
            return await remembered_racks(on.seen.store, on.seen.paths) == racks

        await wait_for(are_remembered, "racks in the record")

        for bookie in wave:
            await asyncio.to_thread(kill_and_expire, cluster, bookie)
        await wait_for(lambda: hold_is_in_force(on), "hold")
        audit_count = len(events(node, "audit.finished"))
        await ask_for_audit(on)
        await wait_for(lambda: len(events(node, "audit.finished")) > audit_count, "audit")

        assert await marked(on) == []
        shown = await bookmender(uri, "status")
        assert shown.exit_code == 1
        assert "SAFETY_HOLD" in shown.out.splitlines()[0], shown.out
        assert "on hold for" in shown.out
        unmeant = await bookmender(uri, "hold", "--end")
        assert unmeant.exit_code == 1
        assert re.search("3 of 5 bookies are (absent|lost)", unmeant.out)

        await on.mark([unclosed.ledger_id])
        await wait_for(
            lambda: is_deferred_by_hold(on, unclosed), "open ledger deferred by the hold"
        )

        # All at once: with two of them back, the hold would end, and the third would be lost.
        await asyncio.to_thread(cluster.start_bookies, wave)
        await wait_for(lambda: events(node, "hold.ended"), "end of the hold")
        await on.wait_idle()
        assert not await hold_is_in_force(on)
        assert not events(node, "bookies.lost")
        assert not events(node, "ledger.recovered")
        assert (await on.metadata(unclosed)).state is LedgerState.OPEN
        await on.assert_whole(written)

        for bookie in rack:
            await asyncio.to_thread(kill_and_expire, cluster, bookie)
        await wait_for(lambda: hold_is_in_force(on), "hold for a whole rack of only two bookies")
        meant = await bookmender(uri, "hold", "--end", "--yes")
        assert meant.exit_code == 0, meant
        await wait_for(lambda: events(node, "bookies.lost"), "loss")

        await wait_for(lambda: marked(on), "marks")
        assert {each["event"] for each in errors(node)} == {"hold.began"}
