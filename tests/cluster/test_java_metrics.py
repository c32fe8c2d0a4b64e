"""Our metrics under Java's names, beside a real AutoRecovery: the same names, types and labels, and
the same counts for the same work."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.demo.workload import Written
from daemon.http.java_metrics import METRICS, NOT_OFFERED, STANDALONE
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.local.ports import LOOPBACK, free_ports
from ledgers.model import BookieId
from tests.cluster.beside_java import QUICK
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.java_http import ask
from tests.cluster.steps import Bench, bench, shape, wait_for
from tests.cluster.test_http import serving_node
from tests.prepare import METRICS_PROVIDER

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="http"), pytest.mark.timeout(360)]
PROVIDER_CLASS = "org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider"
LEDGER_COUNT = 12
ENTRY_COUNT, ENTRY_BYTES = 20, 100
LEDGER_BYTES = ENTRY_COUNT * ENTRY_BYTES
SAME = (
    "replication_worker_NUM_ENTRIES_READ",
    "replication_worker_NUM_ENTRIES_WRITTEN",
    'replication_worker_NUM_BYTES_READ_count{success="true"}',
    'replication_worker_NUM_BYTES_READ_sum{success="true"}',
    'replication_worker_NUM_BYTES_WRITTEN_count{success="true"}',
    'replication_worker_NUM_BYTES_WRITTEN_sum{success="true"}',
    "replication_worker_NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED",
    "replication_worker_NUM_NOT_ADHERING_PLACEMENT_LEDGERS_REPLICATED",
    "replication_worker_NUM_DEFER_LEDGER_LOCK_RELEASE_OF_FAILED_LEDGER",
)
"""Series that count the same for the same repairs."""
REPAIRS = 'replication_worker_rereplicate_count{success="true"}'
"""Repairs. An audit may mark a ledger again that was just repaired, so there may be more."""
AUDITED = (
    'auditor_URL_PUBLISH_TIME_FOR_LOST_BOOKIE_count{success="true"}',
    'auditor_NUM_UNDER_REPLICATED_LEDGERS_count{success="true"}',
    'auditor_NUM_UNDER_REPLICATED_LEDGERS_sum{success="true"}',
    'auditor_UNDER_REPLICATED_LEDGERS_TOTAL_SIZE_count{success="true"}',
    'auditor_UNDER_REPLICATED_LEDGERS_TOTAL_SIZE_sum{success="true"}',
)
"""Series that the loss of one bookie moves alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """``kinds``: by metric. ``values``: by series, as in the text."""

    kinds: Mapping[str, str]
    values: Mapping[str, float]

    def series_of(self, name: str) -> set[str]:
        return {
            series for series in self.values if re.match(rf"{name}(_count|_sum)?(\{{|$)", series)
        }


async def scrape(base: str) -> Scrape:
    status, text = await ask(base, "/metrics")
    assert status == 200
    return Scrape(
        kinds=dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE)),
        values={
            series: float(value)
            for series, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, flags=re.MULTILINE)
        },
    )


@asynccontextmanager
async def java_autorecovery(cluster: LocalCluster) -> AsyncIterator[str]:
    """Run Java's AutoRecovery with its Prometheus provider. Yield its address once it leads."""
    folder = jars.fetch(cluster.spec.bookkeeper, Java.find(), module=METRICS_PROVIDER)
    (port,) = free_ports(1)
    settings = QUICK | {
        "enableStatistics": "true",
        "statsProviderClass": PROVIDER_CLASS,
        "prometheusStatsHttpAddress": LOOPBACK,
        "prometheusStatsHttpPort": str(port),
    }
    java = cluster.start_autorecovery("metrics", settings=settings, more_jars=f"{folder}/*")
    base = f"http://{LOOPBACK}:{port}"

    async def leads() -> bool:
        assert java.is_running, java.log_tail()
        try:
            return "auditor_NUM_LEDGERS_CHECKED" in (await scrape(base)).kinds
        except OSError:
            return False

    try:
        await wait_for(leads, "metrics of Java's auditor")
        yield base
    finally:
        await asyncio.to_thread(java.kill)  # one that is asked to stop may hang for long


async def repair_some(on: Bench) -> list[Written]:
    """Write ledgers that lack copies, and wait until they are repaired.

    Their ensembles are as large as the write quorum. In others, Java copies more entries than the
    bookie stored.
    """
    shapes = [
        shape(number, quorums=(2, 2, 2), entry_count=ENTRY_COUNT, entry_bytes=ENTRY_BYTES)
        for number in range(LEDGER_COUNT)
    ]
    written = await on.write(*shapes)
    await on.lose(written)
    await on.wait_idle()
    return written


async def settled(base: str) -> Scrape:
    """Return a scrape of our node once its leader knows all ledgers and misses no bookie."""

    async def is_settled() -> Scrape | None:
        seen = await scrape(base)
        lost = seen.values['bookmender_unregistered_bookies{state="lost"}']
        waiting = seen.values["bookmender_ledger_map_changes_waiting"]
        is_complete = seen.values["bookmender_ledger_map_complete"]
        return seen if is_complete and not lost and not waiting else None

    found: Scrape = await wait_for(is_settled, "complete ledger map without lost bookies")
    return found


async def audited_loss(
    cluster: LocalCluster, on: Bench, written: Sequence[Written], victim: BookieId, base: str
) -> tuple[int, dict[str, float]]:
    """Kill the bookie, and start it when its ledgers are repaired. Return how many ledgers named
    it, and how far the series of AUDITED moved."""
    before = await scrape(base)
    count = len(await on.names(written, victim))
    kill_and_expire(cluster, victim)
    try:
        await on.wait_repaired(written, victim)

        async def is_counted() -> bool:
            return (await scrape(base)).values[AUDITED[0]] > before.values[AUDITED[0]]

        await wait_for(is_counted, "the end of the audit")
        after = await scrape(base)
    finally:
        await asyncio.to_thread(cluster.start_bookie, victim)
    return count, {each: after.values[each] - before.values[each] for each in AUDITED}


def test_java_exports_what_we_offer_and_counts_alike(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with bench(uri) as on:
            async with java_autorecovery(module_cluster) as base:
                written = await repair_some(on)
                java = await scrape(base)
                losses = [
                    await audited_loss(module_cluster, on, written, module_cluster.bookies[0], base)
                ]
            async with serving_node(uri, tmp_path, HTTP_JAVA_METRICS=STANDALONE) as (_, base):
                written += await repair_some(on)
                ours = await settled(base)
                losses.append(
                    await audited_loss(module_cluster, on, written, module_cluster.bookies[1], base)
                )

        for count, moved in losses:
            assert count > 0
            assert list(moved.values()) == [1, 1, count, 1, count * LEDGER_BYTES], moved
        for metric in METRICS:
            assert java.kinds[metric.name] == ours.kinds[metric.name] == metric.kind.value
            assert ours.series_of(metric.name) == java.series_of(metric.name), metric
        offered = {metric.name for metric in METRICS}
        for name in java.kinds.keys() - offered:
            assert name.startswith(tuple(NOT_OFFERED)), name
        for name in NOT_OFFERED:
            assert name.endswith("_") or name in java.kinds, name
        assert {each: ours.values[each] for each in SAME} == {
            each: java.values[each] for each in SAME
        }
        assert min(java.values[REPAIRS], ours.values[REPAIRS]) >= LEDGER_COUNT
        assert java.values["replication_worker_NUM_ENTRIES_WRITTEN"] > 0
        seconds = ours.values['bookmender_repair_seconds_sum{outcome="done"}']
        ms = ours.values['replication_worker_rereplicate_sum{success="true"}']
        assert ms == pytest.approx(1000 * seconds)

    asyncio.run(run())
