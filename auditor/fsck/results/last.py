"""What the last run of all found: ``<ur>/bookmender/fsck/last``, its summary, for the daemon's status and metrics."""

import json
from contextlib import aclosing, suppress

from prometheus_client import Gauge

from auditor.fsck.results.summary import Summary
from ledgers.errors import CorruptionError, NodeExistsError
from ledgers.store import ANY_VERSION, MetadataStore
from replication.cluster.own_state import own_path, read_json

LEDGERS = Gauge(
    "bookmender_fsck_ledgers",
    "Ledgers that the last run of fsck looked at, by verdict.",
    ["verdict"],
)
FINDINGS = Gauge(
    "bookmender_fsck_findings",
    "Ledgers that the last run of fsck found something of, by finding.",
    ["finding"],
)
WRONG = Gauge("bookmender_fsck_wrong_ledgers", "Ledgers that the last run of fsck exits 1 for.")
FINISHED = Gauge(
    "bookmender_fsck_finished_timestamp_seconds", "When the last run of fsck ended.", ["level"]
)


def last_path(ur: str) -> str:
    return f"{own_path(ur)}/fsck/last"


async def write_last(store: MetadataStore, ur: str, summary: Summary) -> None:
    """In place of the run before. Nobody acts on it, so that it needs no proof of a session."""
    data = json.dumps(summary.to_record()).encode()
    try:
        await store.create(last_path(ur), data, with_parents=True)
    except NodeExistsError:
        await store.set(last_path(ur), data, version=ANY_VERSION)


async def read_last(store: MetadataStore, ur: str) -> Summary | None:
    """None where there is none that can be read."""
    record = await read_json(store, last_path(ur))
    with suppress(CorruptionError):
        return None if record is None else Summary.from_record(record)
    return None


async def meter_last(store: MetadataStore, ur: str) -> None:
    """Have the metrics say what the last run found, until cancelled. Of the leader alone."""
    async with aclosing(store.watch(last_path(ur))) as events:
        async for _ in events:
            if (summary := await read_last(store, ur)) is not None:
                _meter(summary)


def _meter(summary: Summary) -> None:
    for verdict, count in summary.counts.verdicts.items():
        LEDGERS.labels(verdict=verdict).set(count)
    for finding, count in summary.counts.findings.items():
        FINDINGS.labels(finding=finding).set(count)
    WRONG.set(summary.counts.wrong)
    FINISHED.clear()  # that of a run at another level is not the last one any more
    FINISHED.labels(level=summary.level.value).set(summary.finished_ms / 1000)
