"""Our metrics under Java's names: where values come from, quantiles, and the setting."""

import math
import re

import pytest
from prometheus_client import REGISTRY

from auditor.checks.records import ALL_LEDGERS, PLACEMENT, REPLICAS
from daemon.http.java_metrics import (
    EMBEDDED,
    METRICS,
    OFF,
    STANDALONE,
    WINDOW_S,
    JavaMetric,
    JavaMetricsText,
    Kind,
    quantile,
)
from daemon.http.metrics import MetricsText
from daemon.http.metrics_page import declared
from daemon.settings import HttpSettings
from ledgers.errors import SettingsError
from replication.repair import OutcomeKind
from replication.worker import REPAIR_S

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
INF = math.inf
each_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def value(text: bytes, series: str) -> float:
    (found,) = re.findall(rf"^{re.escape(series)} (\S+)$", text.decode(), flags=re.MULTILINE)
    return float(found)


@each_metric
def test_what_a_metric_is_made_of_exists(metric: JavaMetric) -> None:
    ours = {row.name: row for row in declared()}

    for source in (metric.source, metric.failed, metric.count):
        if source is not None:
            row = ours[source.metric]
            assert set(source.labels) <= set(row.labels), source
            has_buckets = metric.kind is Kind.SUMMARY and metric.count is None
            assert (row.kind == "histogram") is has_buckets, source


@pytest.mark.parametrize(
    ("share", "events", "expected"),
    [
        pytest.param(0.5, {}, math.nan, id="nothing was ever counted"),
        pytest.param(0.5, {1.0: 0.0, INF: 0.0}, math.nan, id="no event in this minute"),
        pytest.param(0.5, {1.0: 4.0, INF: 4.0}, 0.5, id="half of the only bucket"),
        pytest.param(0.75, {1.0: 2.0, 3.0: 4.0, INF: 4.0}, 2.0, id="half of the second bucket"),
        pytest.param(1.0, {1.0: 2.0, 3.0: 4.0, INF: 4.0}, 3.0, id="the largest"),
        pytest.param(0.5, {1.0: 2.0, 3.0: 2.0, INF: 4.0}, 1.0, id="a bound itself"),
        pytest.param(0.9, {1.0: 2.0, 3.0: 2.0, INF: 4.0}, 3.0, id="above all bounds"),
    ],
)
def test_a_quantile_is_estimated_from_buckets(
    share: float, events: dict[float, float], expected: float
) -> None:
    assert quantile(share, events) == pytest.approx(expected, nan_ok=True)


def test_durations_are_in_milliseconds_and_quantiles_of_the_last_minute() -> None:
    now_s = 1000.0
    java = JavaMetricsText(STANDALONE, now_s=lambda: now_s)
    name = "replication_worker_rereplicate"
    sum_of, median = f'{name}_sum{{success="true"}}', f'{name}{{success="true",quantile="0.5"}}'
    before = java.text()

    REPAIR_S.labels(outcome=OutcomeKind.DONE.value).observe(0.5)
    REPAIR_S.labels(outcome=OutcomeKind.WAITING.value).observe(0.2)
    assert value(java.text(), sum_of) - value(before, sum_of) == pytest.approx(500)
    failed = f'{name}_count{{success="false"}}'
    assert value(java.text(), failed) - value(before, failed) == 1
    now_s += WINDOW_S
    assert 250 < value(java.text(), median) <= 500
    now_s += WINDOW_S
    assert math.isnan(value(java.text(), median))


def test_every_name_is_exported_from_the_start() -> None:
    text = JavaMetricsText(STANDALONE, now_s=lambda: 0.0).text().decode()

    assert re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE) == [
        (metric.name, metric.kind.value) for metric in METRICS
    ]


def test_inside_a_bookie_the_names_have_a_prefix() -> None:
    text = JavaMetricsText(EMBEDDED, now_s=lambda: 0.0).text().decode()

    assert "\nreplication_replication_worker_NUM_ENTRIES_READ " in text
    assert not re.search(r"^(auditor|replication_worker)_", text, flags=re.MULTILINE)


def test_java_names_are_off_by_default_and_never_openmetrics() -> None:
    assert HttpSettings().java_metrics == OFF
    text, content_type = MetricsText([]).text(OPENMETRICS)
    assert b"auditor_" not in text
    assert "openmetrics" in content_type

    text, content_type = MetricsText([], java_metrics=STANDALONE).text(OPENMETRICS)
    assert b"\nauditor_NUM_LEDGERS_CHECKED " in text
    assert b"\nbookmender_leader " in text
    assert content_type.startswith("text/plain")


def test_other_values_of_the_setting_are_refused() -> None:
    with pytest.raises(SettingsError, match="standalone, embedded"):
        HttpSettings(java_metrics="on")


def test_other_checks_do_not_count() -> None:
    counter = REGISTRY._names_to_collectors["bookmender_check_ledgers"]
    java = JavaMetricsText(STANDALONE, now_s=lambda: 0.0)
    before = value(java.text(), "auditor_NUM_LEDGERS_CHECKED")

    for kind, count in ((ALL_LEDGERS, 5), (PLACEMENT, 7), (REPLICAS, 9)):
        counter.labels(kind.name).inc(count)  # type: ignore[attr-defined]

    assert value(java.text(), "auditor_NUM_LEDGERS_CHECKED") == before + 5
