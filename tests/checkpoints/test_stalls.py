"""Reports to operators about a stalled feed, and about clients that are behind."""

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY

from auditor.ledger_map_updater import LedgerMapUpdater
from checkpoints import stalls
from checkpoints.leader_state import LeaderState
from checkpoints.receipts import ClientSummary
from checkpoints.stalls import FeedReporter, StallReason, read_feed_state
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from ledgers.errors import UnknownOutcomeError
from ledgers.store import Operation, Stat
from ledgers.tasks import task_scope
from replication.transactions import Batcher
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.replication.cluster import in_virtual_time, shut_out


async def reporter_of(cluster: FeedCluster, *, batcher: Batcher | None = None) -> FeedReporter:
    """Return the reporter of a leader that published checkpoints 10, 20 and 30, one each second,
    the last one seven seconds ago."""
    made = FeedReporter(
        LeaderState(chain=await cluster.enable(), generation=1),
        LedgerMapUpdater(store=cluster.store, manager=cluster.manager, clock=cluster.clock),
        store=cluster.store,
        batcher=batcher or Batcher(cluster.store, ()),
        paths=PATHS,
        clock=cluster.clock,
    )
    for number in (1, 2, 3):
        made.remember(10 * number, cluster.clock.wall_ms() - 10_000 + 1_000 * number)
    made.remember(30, 0)  # added before, so it is not added again
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
@in_virtual_time
async def test_the_lag_is_the_age_of_the_first_checkpoint_without_receipt(
    low_watermark: int, lag_s: float
) -> None:
    reporter = await reporter_of(await FeedCluster.start())
    clients = [
        ClientSummary(name="now", generation=1, low_watermark=low_watermark),
        ClientSummary(name="of another feed", generation=2, low_watermark=20),
        ClientSummary(name="new", generation=1),
    ]

    assert reporter.lags(clients) == {"now": lag_s}


@in_virtual_time
async def test_each_client_has_a_metric_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "CLIENTS_MAX", 2)
    cluster = await FeedCluster.start()
    for name in ("c", "b", "a"):
        store = await ZooKeeperReceiptStore.open(
            cluster.store, folder=PATHS.feed_clients, client=name, generation=1
        )
        await store.store_low_watermark(20)
    reporter = await reporter_of(cluster)

    await reporter.meter_clients_once()
    assert metered() == {"a", "b"}
    reporter._state.chain = await cluster.disable()
    await reporter.meter_clients_once()
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

    await (await reporter_of(cluster)).meter_clients_once()

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
    reporter = await reporter_of(cluster, batcher=batcher)

    async def reason() -> StallReason | None:
        record = await read_feed_state(cluster.store, PATHS)
        assert record is not None
        return record.reason

    reporter.waits()
    async with task_scope() as scope:
        scope.start(batcher.run())
        scope.start(reporter.run())
        await asyncio.sleep(stalls.STALLED_AFTER_S + 2)
        assert await reason() is StallReason.LEDGER_MAP, "the map of ledgers is not read yet"

        batcher.is_failing = True
        reporter.idles()
        await asyncio.sleep(2)
        assert await reason() is StallReason.LEDGER_MAP
        batcher.is_failing = False
        await asyncio.sleep(stalls.WRITE_INTERVAL_S)
        assert await reason() is None
