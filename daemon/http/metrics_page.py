"""Writes docs/metrics.md from the metrics that the code declares.

Run it as ``python -m daemon.http.metrics_page > docs/metrics.md``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

import daemon.http.server
import daemon.node  # every module of a node that declares a metric
import daemon.notify  # noqa: F401

HEAD = """\
# Metrics

`GET /metrics` of a node ([http.md](http.md)) answers in Prometheus' text format, or as OpenMetrics
if the scraper asks for it. A scrape reads values that the node has anyway. It costs neither
ZooKeeper nor a bookie anything.

- Counters end in `_total`. Times are in seconds, sizes in bytes.
- No label has ledger IDs, and only `bookmender_condition` has bookie IDs.
- Metrics of the whole cluster come from the leader. The other nodes have 0, or NaN for times: use
  `max()` or `sum()` over the nodes.
- The leader counts what is left to repair every 5 s, and finds out its conditions every 15 s.
  `bookmender status` reads them at once, so the two may differ for that long.
- Besides these there are `process_…` and `python_…` of the Prometheus client library.
- [java_names.rules.yaml](../deploy/prometheus/java_names.rules.yaml) has recording rules for the
  names of Java's AutoRecovery ([moving.md](moving.md#metrics)).

This page is generated: `python -m daemon.http.metrics_page > docs/metrics.md`.
"""
GROUPS: Sequence[tuple[str, str]] = (
    (
        "What is left to repair",
        "underreplicated unavailable missing_copies queue waiting oldest_mark repair_remaining "
        "draining",
    ),
    (
        "Repairs of this node",
        "repair deferrals interrupted lease recent_copies copying copied copy client_active",
    ),
    (
        "The cluster",
        "condition leader registered unregistered recovery_delays marks audit hold disabled "
        "ledger_map",
    ),
    ("Checks and fsck", "check fsck"),
    ("Change feed", "feed"),
    ("Notifications", "notify"),
    ("Archive", "archive"),
    ("ZooKeeper", "zookeeper"),
    ("The node", "role journal history log_ http build_info"),
    ("Observe mode", "observe"),
)
"""Titles, and the beginnings of the names after ``bookmender_``. The first that fits decides."""
PREFIX = "bookmender_"
TABLE = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"


class Row(NamedTuple):
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def declared() -> Iterator[Row]:
    """Yield the metrics of this code, by name."""
    collectors = dict.fromkeys(REGISTRY._collector_to_names)  # the library has no list of them
    rows = []
    for collector in collectors:
        if isinstance(collector, MetricWrapperBase):
            (metric,) = collector.describe()
            if metric.name.startswith(PREFIX):
                name = f"{metric.name}_total" if metric.type == "counter" else metric.name
                labels = tuple(collector._labelnames)
                rows.append(Row(name, metric.type, labels, metric.documentation))
    yield from sorted(rows)


def group_of(row: Row) -> str:
    """Return the title under which the metric is listed."""
    name = row.name.removeprefix(PREFIX)
    for title, beginnings in GROUPS:
        if any(name.startswith(beginning) for beginning in beginnings.split()):
            return title
    raise LookupError(f"no group for {row.name}: add it to GROUPS")


def page() -> str:
    """Return the page."""
    rows = list(declared())
    parts = [HEAD]
    for title, _ in GROUPS:
        parts.append(f"\n## {title}\n\n{TABLE}")
        for row in rows:
            if group_of(row) == title:
                labels = ", ".join(f"`{label}`" for label in row.labels)
                parts.append(f"| `{row.name}` | {row.kind} | {labels} | {row.about} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
