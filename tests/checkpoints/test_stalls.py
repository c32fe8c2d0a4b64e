"""Reports to operators about a stalled feed, and about clients that are behind."""

import pytest
from prometheus_client import REGISTRY

from checkpoints import stalls
from checkpoints.receipts import ClientSummary
from checkpoints.stalls import ClientMeter, RecentCheckpoints, lags
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.replication.cluster import in_virtual_time


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
