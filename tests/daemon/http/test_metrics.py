"""/metrics: the text, its conventions, and the page that describes it."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
import structlog
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from daemon.http.metrics import MetricsText
from daemon.http.metrics_page import declared, page
from daemon.logs import set_up_logs
from daemon.role_state import RoleState
from daemon.settings import LogSettings
from tests.daemon.http.serving import serving
from tests.replication.cluster import Cluster

ROOT = Path(__file__).parents[3]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def test_the_page_is_what_the_code_declares() -> None:
    committed = (ROOT / "docs" / "metrics.md").read_text()

    assert committed == page(), "python -m daemon.http.metrics_page > docs/metrics.md"


def test_names_and_labels_keep_to_the_conventions() -> None:
    for row in declared():
        assert re.fullmatch(r"bookmender(_[a-z]+)+", row.name), row
        assert row.name.endswith("_total") is (row.kind == "counter"), row
        assert not re.search(r"_(ms|s|kb|mb|percent)(_total)?$", row.name), row
        assert row.about[0].isupper() or row.about[0].isdigit(), row
        assert row.about.endswith("."), row
        assert len(row.labels) <= 3, row
        assert not {"ledger", "ledger_id", "bookie", "bookie_id", "path"}.intersection(row.labels)


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain", prometheus),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain", prometheus),
        (OPENMETRICS, "application/openmetrics-text", openmetrics),
        ("application/openmetrics-text; version=x", "text/plain", prometheus),
    ],
)
def test_the_text_is_in_the_format_that_is_asked_for(
    accept: str, content_type: str, parse: object
) -> None:
    async def test() -> None:
        async with serving(await Cluster.start()) as client:
            answer = await client.get("/metrics", headers={"Accept": accept})
            assert (answer.status, answer.content_type) == (200, content_type)
            text = await answer.text()
        families = {family.name for family in parse(text)}  # type: ignore[operator]
        for row in declared():
            assert row.name.removesuffix("_total") in families
        assert not re.search(r"_created\b", text)

    asyncio.run(test())


def test_a_scrape_has_the_state_of_each_service() -> None:
    role = RoleState("worker")
    role.is_working = True

    text, _ = MetricsText([role]).text("")

    assert b'bookmender_role_ready{role="worker"} 0.0' in text
    assert b'bookmender_zookeeper_requests_in_flight{role="worker"} 0.0' in text


def test_many_scrapers_share_one_text() -> None:
    made = MetricsText([])
    before = made.text("")[0]
    REGISTRY._names_to_collectors["bookmender_leader"].set(1)  # type: ignore[attr-defined]
    try:
        assert made.text("")[0] is before
        assert made.text(OPENMETRICS)[0] is not before
    finally:
        REGISTRY._names_to_collectors["bookmender_leader"].set(0)  # type: ignore[attr-defined]


def test_the_log_of_a_node_counts_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        set_up_logs(LogSettings(format="json"))
        for level in ("info", "warning", "error"):
            structlog.get_logger().log(getattr(logging, level.upper()), "counted.once")
    finally:
        structlog.configure(**before)

    for level, count in (("info", None), ("warning", 1.0), ("error", 1.0)):
        labels = {"level": level, "event": "counted.once"}
        assert REGISTRY.get_sample_value("bookmender_log_events_total", labels) == count
    assert "counted.once" in capsys.readouterr().err
