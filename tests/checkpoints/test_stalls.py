"""Reports to operators about a stalled feed, and about clients that are behind."""

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY

from checkpoints import stalls
from checkpoints.receipts import ClientSummary
from checkpoints.stalls import (
    ClientMeter,
    FeedStateRecord,
    RecentCheckpoints,
    StallReason,
    StallReporter,
    lags,
    read_feed_state,
)
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from ledgers.errors import UnknownOutcomeError
from ledgers.store import Operation, Stat
from ledgers.tasks import task_scope
from replication.transactions import Batcher
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.replication.cluster import in_virtual_time, shut_out


def recent() -> RecentCheckpoints:
    """Checkpoints 10, 20 and 30, one each second."""
    made = RecentCheckpoints()
    for number in (1, 2, 3):
        made.add(10 * number, 1_000 * number)
    return made


@pytest.mark.parametrize(
    ("low_watermark", "lag_s"),
    [
        pytest.param(30, 0, id="up to date"),
        pytest.param(40, 0, id="ahead of what this leader published"),
        pytest.param(20, 7, id="one behind"),
        pytest.param(25, 7, id="between two checkpoints"),
        pytest.param(0, 9, id="behind all that is remembered: at least this"),
    ],
)
def test_the_lag_is_the_age_of_the_first_checkpoint_without_receipt(
    low_watermark: int, lag_s: float
) -> None:
    assert recent().lag_s(low_watermark, now_ms=10_000) == lag_s


def test_a_checkpoint_that_was_added_before_is_not_added_again() -> None:
    made = recent()
    made.add(30, 9_999)

    assert made.lag_s(20, now_ms=10_000) == 7


def test_clients_of_another_feed_and_new_ones_have_no_lag() -> None:
    clients = [
        ClientSummary(name="now", generation=2, low_watermark=20),
        ClientSummary(name="earlier", generation=1, low_watermark=20),
        ClientSummary(name="new", generation=2),
    ]

    assert lags(clients, recent(), generation=2, now_ms=10_000) == {"now": 7}


@in_virtual_time
async def test_each_client_has_a_metric_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "CLIENTS_MAX", 2)
    cluster = await FeedCluster.start()
    for name in ("c", "b", "a"):
        store = await ZooKeeperReceiptStore.open(
            cluster.store, folder=PATHS.feed_clients, client=name, generation=1
        )
        await store.store_low_watermark(20)
    generation = 1
    meter = ClientMeter(
        recent(), lambda: generation, store=cluster.store, paths=PATHS, clock=cluster.clock
    )

    await meter.run_once()
    assert metered() == {"a", "b"}
    generation = 0
    await meter.run_once()
    assert metered() == set()


def metered() -> set[str]:
    return {
        sample.labels["client"]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "bookmender_feed_client_lag_seconds"
    }


@pytest.mark.parametrize("is_denied", [False, True])
@in_virtual_time
async def test_an_unreadable_client_does_not_hide_the_lag_of_the_others(is_denied: bool) -> None:
    cluster = await FeedCluster.start()
    store = await ZooKeeperReceiptStore.open(
        cluster.store, folder=PATHS.feed_clients, client="b", generation=1
    )
    await store.store_low_watermark(20)
    await cluster.store.create(f"{PATHS.feed_clients}/a", b"rubbish")
    if is_denied:
        shut_out(cluster.store, f"{PATHS.feed_clients}/a")
    meter = ClientMeter(recent(), lambda: 1, store=cluster.store, paths=PATHS, clock=cluster.clock)

    await meter.run_once()

    assert metered() == {"b"}


class FailingBatcher(Batcher):
    """Fails each write while ``is_failing``."""

    is_failing = False

    async def send(self, operations: Sequence[Operation]) -> list[Stat | str | None]:
        if self.is_failing:
            raise UnknownOutcomeError("the reply was lost")
        return await super().send(operations)


@in_virtual_time
async def test_a_resumption_is_written_until_the_write_succeeds() -> None:
    """Otherwise operators would see a stalled feed for ever."""
    cluster = await FeedCluster.start()
    batcher = FailingBatcher(cluster.store, ())
    stalled_since_ms: int | None = 1_000

    def state() -> FeedStateRecord:
        return FeedStateRecord(
            session_id=cluster.store.session_id,
            written_ms=cluster.clock.wall_ms(),
            pending_count=1,
            stalled_since_ms=stalled_since_ms,
            reason=StallReason.SLOW if stalled_since_ms else None,
        )

    async def is_stalled() -> bool:
        record = await read_feed_state(cluster.store, PATHS)
        assert record is not None
        return record.is_stalled

    reporter = StallReporter(state, batcher=batcher, paths=PATHS, clock=cluster.clock)
    async with task_scope() as scope:
        scope.start(batcher.run())
        scope.start(reporter.run())
        await asyncio.sleep(2)
        assert await is_stalled()

        batcher.is_failing, stalled_since_ms = True, None
        await asyncio.sleep(2)
        batcher.is_failing = False
        await asyncio.sleep(stalls.WRITE_INTERVAL_S)
        assert not await is_stalled()
