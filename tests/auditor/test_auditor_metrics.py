"""The metrics of audits, recovery delays, scans and runs of checks."""

import asyncio

from tests.auditor.auditing import auditing
from tests.auditor.checking import HOURLY, HOURS, CountingCheck, checker, running
from tests.auditor.scenes import SOON_S, delayed, marked_soon, with_ledgers
from tests.metric_changes import changes, sample
from tests.replication.cluster import PAYLOAD_BYTES, until
from tests.replication.ledger_values import B1, B2, B3

DELAYS = ("recovery_delays_total", "event", "began", "expired", "cancelled")


async def test_recovery_delays_end_with_the_loss_or_with_the_return_of_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    delays = changes(*DELAYS)

    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)
        assert delays() == {"began": 2}
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S)
        assert delays() == {"began": 2, "cancelled": 1}
        await asyncio.sleep(60)
        assert delays() == {"began": 2, "cancelled": 1, "expired": 1}


async def test_without_a_recovery_delay_none_begins() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    delays = changes(*DELAYS)

    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

    assert delays() == {}


async def test_an_audit_counts_what_lacks_copies() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
    audits = changes("audit_seconds_count", "bookies", "lost", "none")
    found = "audit_underreplicated_ledgers"
    before = sample(f"{found}_sum"), sample("audit_underreplicated_bytes_sum")
    scans = sample("ledger_map_scan_seconds_count")

    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        assert set(audits()) == {"none"}
        assert sample(f"{found}_sum") == before[0]
        audit_count = sample(f"{found}_count")
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0, 2]

    audit_count = sample(f"{found}_count") - audit_count
    assert audits()["lost"] == audit_count == 1
    assert sample(f"{found}_sum") - before[0] == 2
    assert sample("audit_underreplicated_bytes_sum") - before[1] == 2 * 10 * PAYLOAD_BYTES
    assert sample("ledger_map_scan_seconds_count") > scans


async def test_the_duration_of_a_check_is_that_of_its_finished_runs() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 10)
    check = CountingCheck(part_size=2, part_s=10)
    counts = changes("check_run_seconds_count", "check", HOURLY.name)
    sums = changes("check_run_seconds_sum", "check", HOURLY.name)

    async def is_finished() -> bool:
        return check.finished_count == 1

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(25)
        assert counts() == {}
        await until(cluster, is_finished)
        await asyncio.sleep(1)

    assert counts() == {HOURLY.name: 1}
    assert 49 <= sums()[HOURLY.name] <= 51
