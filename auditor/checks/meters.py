"""The metrics of the periodic checks: of the leader alone, nothing on any other node."""

from prometheus_client import Counter, Gauge

from auditor.checks.records import CheckRun

LEDGERS = Counter("bookmender_check_ledgers_total", "Ledgers a check has looked at.", ["check"])
RUNNING = Gauge("bookmender_check_running", "1 while a run of the check is not over.", ["check"])
PAUSED = Gauge("bookmender_check_paused", "1 while a run of the check must not go on.", ["check"])
LEFT = Gauge(
    "bookmender_check_ledgers_left", "Ledgers that the run has not looked at yet.", ["check"]
)
REMAINING = Gauge(
    "bookmender_check_remaining_seconds",
    "Until the run is over, by its speed so far; pauses come on top.",
    ["check"],
)
COUNTED = Gauge(
    "bookmender_check_counted",
    "What came of the last completed run that this leader knows of, by kind.",
    ["check", "kind"],
)
FINISHED = Gauge(
    "bookmender_check_finished_timestamp_seconds",
    "When the last completed run that this leader knows of ended.",
    ["check"],
)
_ALL = (RUNNING, PAUSED, LEFT, REMAINING, COUNTED, FINISHED)


def show_running(check: str, run: CheckRun, *, looked_at: int = 0) -> None:
    """``looked_at``: ledgers since it was shown last."""
    LEDGERS.labels(check).inc(looked_at)
    RUNNING.labels(check).set(1)
    PAUSED.labels(check).set(bool(run.pause))
    LEFT.labels(check).set(run.ledgers_left)
    REMAINING.labels(check).set(run.remaining_s or 0)


def show_finished(check: str, run: CheckRun) -> None:
    """Also of a run that an earlier leader completed."""
    assert run.finished_ms is not None, run
    for gauge in (RUNNING, PAUSED, LEFT, REMAINING):
        gauge.labels(check).set(0)
    FINISHED.labels(check).set(run.finished_ms / 1000)
    for kind, count in run.counts.items():
        COUNTED.labels(check, kind).set(count)


def clear() -> None:
    """This node leads no more."""
    for gauge in _ALL:
        gauge.clear()
