"""The names under which Java's AutoRecovery exports metrics, for dashboards and alerts made for it.

``http.java_metrics`` adds them to ``/metrics``. Names, types and labels are those that AutoRecovery
4.18.0 prints with its PrometheusMetricsProvider. Every value is computed from metrics of ours at
each scrape, so this module measures nothing. A metric without a counterpart is not offered
(``NOT_OFFERED``), because 0 would claim that nothing happened.

Java's counters have no ``_total``, which OpenMetrics demands. So the text is always in Prometheus'
own format.

Java's summaries have two sets of series, by the label ``success``. Each has a count and a sum since
the start, and quantiles of the last complete minute; NaN if there was no event. Durations are in
milliseconds. We estimate quantiles from the buckets of our histograms, as Prometheus does.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY
from prometheus_client.utils import floatToGoString

from auditor.checks.copies import BELOW_ACK_QUORUM, BELOW_WRITE_QUORUM, NO_COPY
from auditor.checks.records import ALL_LEDGERS, PLACEMENT, REPLICAS
from ledgers.placement import Adherence
from replication.reasons import Reason
from replication.repair import OutcomeKind

OFF, STANDALONE, EMBEDDED = "off", "standalone", "embedded"
PREFIXES = {STANDALONE: "", EMBEDDED: "replication_"}
"""By value of the setting: what precedes each name. AutoRecovery prints more inside a bookie."""
WINDOW_S = 60.0
"""Default of Java's ``prometheusStatsLatencyRolloverSeconds``."""
QUANTILES = (0.5, 0.75, 0.95, 0.99, 0.999, 0.9999, 1.0)
MS_PER_S = 1000.0


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Series of one of our metrics, whose values are added. ``labels``: allowed values by label."""

    metric: str
    labels: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the source as documentation shows it."""
        chosen = ", ".join(
            f'{label}="{next(iter(values))}"' if len(values) == 1 else label
            for label, values in self.labels.items()
        )
        return self.metric + (f"{{{chosen}}}" if chosen else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaMetric:
    """A metric of Java's AutoRecovery, and where we have it.

    ``name``: of the stand-alone daemon. ``source``: the series of ours; of a summary, those of its
    successful events. A summary is made from a histogram of ours, or, without quantiles, from the
    two counters ``source`` (its sum) and ``count``. ``failed``: series of the same histogram for
    failed events. ``factor``: Java's unit is smaller than ours by this factor. ``note``: where the
    meaning differs.
    """

    name: str
    kind: Kind
    source: Source
    failed: Source | None = None
    count: Source | None = None
    factor: float = 1.0
    note: str = ""


def _counter(name: str, metric: str, *, note: str = "", **labels: Collection[str]) -> JavaMetric:
    source = Source(metric=metric, labels=labels)
    return JavaMetric(name=name, kind=Kind.COUNTER, source=source, note=note)


def _gauge(name: str, metric: str, *, note: str = "", **labels: Collection[str]) -> JavaMetric:
    source = Source(metric=metric, labels=labels)
    return JavaMetric(name=name, kind=Kind.GAUGE, source=source, note=note)


def _summary(
    name: str, metric: str, *, factor: float = 1.0, note: str = "", **labels: Collection[str]
) -> JavaMetric:
    source = Source(metric=metric, labels=labels)
    return JavaMetric(name=name, kind=Kind.SUMMARY, source=source, factor=factor, note=note)


def _entry_bytes(name: str) -> JavaMetric:
    return JavaMetric(
        name=name,
        kind=Kind.SUMMARY,
        source=Source(metric="bookmender_repaired_payload_bytes_total"),
        count=Source(metric="bookmender_repaired_entries_total"),
        note="Payload bytes by entry. Quantiles are NaN: entries are copied in bulk.",
    )


_CHECKS = "bookmender_check_counted"
_RUNS_S = "bookmender_check_run_seconds"
_NO_PAUSES = "Without pauses."
_STRIPES = (
    "Java also copies entries that the bookie never stored, if the ensemble is larger than the "
    "write quorum."
)

METRICS: Sequence[JavaMetric] = (
    _summary(
        "auditor_NUM_UNDER_REPLICATED_LEDGERS",
        "bookmender_audit_underreplicated_ledgers",
        note="One value by audit. Java has one by lost bookie, and one by ledger that its check "
        "of all ledgers found.",
    ),
    _summary(
        "auditor_UNDER_REPLICATED_LEDGERS_TOTAL_SIZE",
        "bookmender_audit_underreplicated_bytes",
    ),
    _summary(
        "auditor_URL_PUBLISH_TIME_FOR_LOST_BOOKIE",
        "bookmender_audit_seconds",
        factor=MS_PER_S,
        bookies=("lost",),
    ),
    _summary(
        "auditor_BOOKIE_TO_LEDGERS_MAP_CREATION_TIME",
        "bookmender_ledger_map_scan_seconds",
        factor=MS_PER_S,
        note="bookmender reads all ledgers when an auditor starts. Java does it for each audit.",
    ),
    _summary("auditor_AUDIT_BOOKIES_TIME", "bookmender_audit_seconds", factor=MS_PER_S),
    _summary(
        "auditor_CHECK_ALL_LEDGERS_TIME",
        _RUNS_S,
        factor=MS_PER_S,
        note=_NO_PAUSES,
        check=(ALL_LEDGERS.name,),
    ),
    _summary(
        "auditor_PLACEMENT_POLICY_CHECK_TIME",
        _RUNS_S,
        factor=MS_PER_S,
        note=_NO_PAUSES,
        check=(PLACEMENT.name,),
    ),
    _summary(
        "auditor_REPLICAS_CHECK_TIME",
        _RUNS_S,
        factor=MS_PER_S,
        note=_NO_PAUSES,
        check=(REPLICAS.name,),
    ),
    _counter(
        "auditor_NUM_LEDGERS_CHECKED", "bookmender_check_ledgers_total", check=(ALL_LEDGERS.name,)
    ),
    _counter(
        "auditor_NUM_BOOKIE_AUDITS_DELAYED", "bookmender_recovery_delays_total", event=("began",)
    ),
    _counter(
        "auditor_NUM_DELAYED_BOOKIE_AUDITS_CANCELLED",
        "bookmender_recovery_delays_total",
        event=("cancelled",),
    ),
    _gauge(
        "auditor_NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY",
        _CHECKS,
        check=(PLACEMENT.name,),
        kind=(Adherence.FAIL.value,),
    ),
    _gauge(
        "auditor_NUM_LEDGERS_SOFTLY_ADHERING_TO_PLACEMENT_POLICY",
        _CHECKS,
        check=(PLACEMENT.name,),
        kind=(Adherence.SOFT.value,),
    ),
    _gauge(
        "auditor_NUM_LEDGERS_HAVING_NO_REPLICA_OF_AN_ENTRY",
        _CHECKS,
        check=(REPLICAS.name,),
        kind=(NO_COPY,),
    ),
    _gauge(
        "auditor_NUM_LEDGERS_HAVING_LESS_THAN_AQ_REPLICAS_OF_AN_ENTRY",
        _CHECKS,
        check=(REPLICAS.name,),
        kind=(BELOW_ACK_QUORUM,),
    ),
    _gauge(
        "auditor_NUM_LEDGERS_HAVING_LESS_THAN_WQ_REPLICAS_OF_AN_ENTRY",
        _CHECKS,
        check=(REPLICAS.name,),
        kind=(BELOW_WRITE_QUORUM,),
    ),
    JavaMetric(
        name="replication_worker_rereplicate",
        kind=Kind.SUMMARY,
        source=Source(
            metric="bookmender_repair_seconds", labels={"outcome": (OutcomeKind.DONE.value,)}
        ),
        failed=Source(
            metric="bookmender_repair_seconds",
            labels={
                "outcome": (
                    OutcomeKind.WAITING.value,
                    OutcomeKind.MARKED_AGAIN.value,
                    "interrupted",
                )
            },
        ),
        factor=MS_PER_S,
        note='`success="false"`: all other outcomes.',
    ),
    _counter(
        "replication_worker_NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED",
        "bookmender_copied_ledgers_total",
    ),
    _counter(
        "replication_worker_NUM_NOT_ADHERING_PLACEMENT_LEDGERS_REPLICATED",
        "bookmender_copied_ledgers_total",
        cause=("placement",),
    ),
    _counter(
        "replication_worker_NUM_DEFER_LEDGER_LOCK_RELEASE_OF_FAILED_LEDGER",
        "bookmender_deferrals_total",
        note="All reasons except `open-ledger-grace` and `writer-alive`. bookmender unlocks the "
        "ledger at once, and leaves a note for all workers.",
        reason=tuple(reason.value for reason in Reason if not reason.is_a_grace),
    ),
    _counter(
        "replication_worker_NUM_ENTRIES_READ",
        "bookmender_repaired_entries_total",
        note=_STRIPES,
    ),
    _counter(
        "replication_worker_NUM_ENTRIES_WRITTEN",
        "bookmender_repaired_entries_total",
        note=_STRIPES,
    ),
    _entry_bytes("replication_worker_NUM_BYTES_READ"),
    _entry_bytes("replication_worker_NUM_BYTES_WRITTEN"),
)

_COPIES_NOTHING = "The auditor copies nothing. Java always exports 0."
_NO_ENTRY_TIMES = (
    "Entries are copied in bulk. See `bookmender_repair_step_seconds` with the step `copy`."
)
NOT_OFFERED: Mapping[str, str] = {
    "auditor_NUM_SKIPPING_CHECK_TASK_TIMES": "Checks are paused, not skipped. See "
    "`bookmender_check_paused`.",
    "auditor_NUM_FRAGMENTS_PER_LEDGER": "It describes the ledgers of the clients.",
    "auditor_NUM_BOOKIES_PER_LEDGER": "It describes the ledgers of the clients.",
    "auditor_NUM_UNDERREPLICATED_LEDGERS_ELAPSED_RECOVERY_GRACE_PERIOD": "See "
    "`bookmender_oldest_mark_age_seconds`.",
    "auditor_NUM_ENTRIES_READ": _COPIES_NOTHING,
    "auditor_NUM_ENTRIES_WRITTEN": _COPIES_NOTHING,
    "auditor_NUM_BYTES_READ": _COPIES_NOTHING,
    "auditor_NUM_BYTES_WRITTEN": _COPIES_NOTHING,
    "auditor_READ_DATA_LATENCY": _COPIES_NOTHING,
    "auditor_WRITE_DATA_LATENCY": _COPIES_NOTHING,
    "replication_worker_READ_DATA_LATENCY": _NO_ENTRY_TIMES,
    "replication_worker_WRITE_DATA_LATENCY": _NO_ENTRY_TIMES,
    "replication_worker_NUM_ENTRIES_UNABLE_TO_READ_FOR_REPLICATION": "Java's worker counts each "
    "entry once. See `bookmender_copy_failures_total`, and the reason `no-copy` of "
    "`bookmender_deferrals_total`.",
    "replication_worker_exceptions_": "They name Java's exceptions. See "
    "`bookmender_interrupted_repairs_total` and `bookmender_log_events_total`.",
    "bookkeeper_client_": "They describe Java's client. For ZooKeeper see "
    "`bookmender_zookeeper_request_seconds`.",
    "jvm_": "There is no JVM. See `python_gc_…`.",
    "process_": "Both programs export the standard metrics of a process.",
}
"""Names and beginnings of names that Java exports and we do not, and why. In order."""

_NAMES = frozenset(
    name
    for metric in METRICS
    for source in (metric.source, metric.failed, metric.count)
    if source is not None
    for name in (source.metric, *(f"{source.metric}_{end}" for end in ("bucket", "count", "sum")))
)

Buckets = Mapping[float, float]
"""By upper bound, in our unit: how many events were at most as large."""


class OurValues:
    """The values of our metrics at one moment."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for metric in REGISTRY.restricted_registry(_NAMES).collect():
            for sample in metric.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum_of(self, source: Source | None, *, ending: str = "") -> float:
        """Return the sum of the series; 0 if there is none."""
        return sum(value for _, value in self._matching(source, ending))

    def buckets(self, source: Source | None) -> Buckets:
        added: dict[float, float] = {}
        for labels, value in self._matching(source, "_bucket"):
            bound = float(labels["le"])
            added[bound] = added.get(bound, 0.0) + value
        return added

    def _matching(
        self, source: Source | None, ending: str
    ) -> Iterator[tuple[Mapping[str, str], float]]:
        if source is None:
            return
        for labels, value in self._samples.get(source.metric + ending, ()):
            if all(labels[label] in allowed for label, allowed in source.labels.items()):
                yield labels, value


def quantile(share: float, events: Buckets) -> float:
    """Return the value below which ``share`` of the events are; NaN without events.

    Within a bucket events count as evenly spread. Events above the largest finite bound count as
    that bound.
    """
    bounds = sorted(events)
    counts = [events[bound] for bound in bounds]
    if not counts or not counts[-1]:
        return math.nan
    place = bisect_left(counts, share * counts[-1])
    if math.isinf(bounds[place]):
        return bounds[place - 1] if place else math.nan
    below_bound, below_count = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    part = (share * counts[-1] - below_count) / (counts[place] - below_count)
    return below_bound + part * (bounds[place] - below_bound)


@dataclass(slots=True)
class _Window:
    """The events of one set of series in the last complete minute."""

    began: Buckets = field(default_factory=dict)
    """The buckets when the current minute began."""
    events: Buckets = field(default_factory=dict)

    def roll(self, buckets: Buckets) -> None:
        self.events = {bound: count - self.began.get(bound, 0) for bound, count in buckets.items()}
        self.began = buckets


class JavaMetricsText:
    """Makes the lines of ``/metrics`` with Java's names. ``setting``: STANDALONE or EMBEDDED."""

    def __init__(self, setting: str, *, now_s: Callable[[], float]) -> None:
        self._prefix = PREFIXES[setting]
        self._now_s = now_s
        self._rolled_s = -math.inf
        self._windows: dict[tuple[str, bool], _Window] = {}

    def text(self) -> bytes:
        values = OurValues()
        is_over = self._now_s() - self._rolled_s >= WINDOW_S
        if is_over:
            self._rolled_s = self._now_s()
        lines: list[str] = []
        for metric in METRICS:
            name = self._prefix + metric.name
            lines.append(f"# TYPE {name} {metric.kind.value}")
            if metric.kind is Kind.SUMMARY:
                lines += self._summary(name, metric, values, is_over=is_over)
            else:
                lines.append(f"{name} {_shown(values.sum_of(metric.source))}")
        return "".join(f"{line}\n" for line in lines).encode()

    def _summary(
        self, name: str, metric: JavaMetric, values: OurValues, *, is_over: bool
    ) -> Iterator[str]:
        for success, source in (("false", metric.failed), ("true", metric.source)):
            window = self._windows.setdefault((name, success == "true"), _Window())
            if is_over:
                window.roll(values.buckets(source))
            for share in QUANTILES:
                value = metric.factor * quantile(share, window.events)
                labels = f'success="{success}",quantile="{share}"'
                yield f"{name}{{{labels}}} {_shown(value)}"
            if metric.count is None or source is None:
                count = values.sum_of(source, ending="_count")
                total = values.sum_of(source, ending="_sum")
            else:
                count, total = values.sum_of(metric.count), values.sum_of(source)
            yield f'{name}_count{{success="{success}"}} {_shown(count)}'
            yield f'{name}_sum{{success="{success}"}} {_shown(metric.factor * total)}'


def _shown(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def page_part() -> str:
    """Return the section of docs/metrics.md about Java's names."""
    return HEAD + "".join(_rows()) + NOT_OFFERED_HEAD + "".join(_not_offered_rows())


HEAD = """
## Names of Java's AutoRecovery

With `java_metrics = "standalone"` in the section `[http]`, `/metrics` also has metrics under the
names that Java's AutoRecovery 4.18.0 exports with its `PrometheusMetricsProvider`. Dashboards and
alerts made for it go on working. With `"embedded"` each name begins with `replication_`, as it
does for an AutoRecovery inside a bookie. New dashboards should use the names above.

- Types, labels and units are Java's: durations in milliseconds, summaries with `success` and
  `quantile`, counters without `_total`. So the answer is never OpenMetrics.
- Counts and sums are exact. Quantiles are those of the last minute, estimated from the buckets of
  our histograms.
- Only the leading node moves the `auditor_` metrics. Java exports them only there; the other nodes
  of bookmender export them too.

| Java's name | type | made of | differs |
| --- | --- | --- | --- |
"""
NOT_OFFERED_HEAD = """
Not offered:

| Java's name | reason, and what to use |
| --- | --- |
"""


def _rows() -> Iterator[str]:
    for metric in METRICS:
        sources = " and ".join(
            f"`{source}`" for source in (metric.source, metric.count) if source is not None
        )
        yield f"| `{metric.name}` | {metric.kind.value} | {sources} | {metric.note} |\n"


def _not_offered_rows() -> Iterator[str]:
    for name, why in NOT_OFFERED.items():
        shown = f"{name}…" if name.endswith("_") else name
        yield f"| `{shown}` | {why} |\n"
