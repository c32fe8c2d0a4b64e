"""Progress of a periodic check while it runs, and its record afterwards."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from auditor.checks.records import (
    ALL_LEDGERS,
    PLACEMENT,
    REPLICAS,
    CheckKind,
    CheckRecord,
    CheckRun,
)
from auditor.checks.runner import FORCED_MS
from tests.auditor.checking import (
    HOUR_S,
    HOURLY,
    HOURS,
    CountingCheck,
    checked_at_ms,
    checker,
    record,
    running,
    ten_ledgers,
)
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import until
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS


async def test_the_record_tells_progress_and_the_time_left() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=2, part_s=10)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(41)

    run = (await record(cluster)).running
    assert run is not None
    assert (run.ledger_count, run.ledgers_left, run.cursor) == (8, 2, 8)
    assert run.remaining_s == pytest.approx(10, rel=0.1)
    assert run.counts == {"even": 4}


async def test_a_metric_tells_the_interval_while_this_node_leads() -> None:
    def interval_s() -> float | None:
        name, labels = "bookmender_check_interval_seconds", {"check": HOURLY.name}
        return REGISTRY.get_sample_value(name, labels)

    cluster = await ten_ledgers()
    async with checker(cluster, CountingCheck(), settings=HOURS) as made, running(made):
        await asyncio.sleep(1)
        assert interval_s() == HOUR_S
        made.runner.apply(replace(HOURS, all_ledgers_interval_s=0))
        await asyncio.sleep(60)
        assert interval_s() == 0

    assert interval_s() is None


async def test_a_run_in_progress_keeps_the_last_result() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=2, part_s=10)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(50 + HOUR_S + 15)

    found = await record(cluster)
    assert found.running is not None
    assert found.last is not None
    assert found.last.counts == {"even": 5}


async def test_progress_is_written_every_few_seconds_at_most() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 40)
    check = CountingCheck(part_size=1, part_s=0.5)
    writes: list[float] = []

    async with checker(cluster, check, settings=HOURS) as made:
        write = made.runner.records.write

        async def counted(kind: CheckKind, record: CheckRecord) -> None:
            if record.running is not None:
                writes.append(cluster.clock.now_s())
            await write(kind, record)

        made.runner.records.write = counted  # type: ignore[method-assign]
        async with running(made):
            await until(cluster, lambda: is_finished(check))

    assert 2 <= len(writes) <= 5, writes


async def is_finished(check: CountingCheck) -> bool:
    return check.finished_count == 1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.compat(
                f"TestLedgerUnderreplicationManager.test{name}CTime", verdict="same"
            ),
            id=kind.name,
        )
        for kind, name in (
            (ALL_LEDGERS, "CheckAllLedgers"),
            (PLACEMENT, "PlacementPolicyCheck"),
            (REPLICAS, "ReplicasCheck"),
        )
    ],
)
async def test_the_time_of_the_last_run_is_stored_as_java_writes_it(kind: CheckKind) -> None:
    cluster = await ten_ledgers()
    assert kind.audit is not None
    assert await checked_at_ms(cluster, kind) is None

    for time_ms, data in (
        (1_700_000_000_000, "0880d095ffbc31"),
        (1_795_258_083_503, "08afd1e1ed9f34"),
    ):
        async with checker(cluster) as made:
            last = CheckRun(started_ms=1, finished_ms=time_ms)
            written = CheckRecord(last=last, last_ms=time_ms)
            await made.runner.records.write(kind, written)

        stored, _ = await cluster.store.get(PATHS.audit_time(kind.audit))
        assert stored == bytes.fromhex(data)
        assert await checked_at_ms(cluster, kind) == time_ms
        assert (await record(cluster, kind)).last == last


async def test_a_check_unknown_to_java_stores_its_time_in_its_record() -> None:
    cluster = await ten_ledgers()
    ours = replace(HOURLY, name="ours", audit=None)
    check = CountingCheck(ours)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(60)
        assert check.started_at == [0]
        found = await record(cluster, ours)
        forced = replace(found, last_ms=FORCED_MS).to_json()
        await cluster.store.set(PATHS.check("ours"), forced, version=-1)
        await asyncio.sleep(60)

    assert check.started_at == [0, 0]
    assert await checked_at_ms(cluster, ours) != FORCED_MS
