"""The summary of the last run, in the znode ``<ur>/bookmender/fsck/last``, for the daemon's status
and metrics.

The znode ``closer`` beside it holds the summary of an earlier run at a closer level that found
something wrong. Until a run as close follows, nobody knows whether this was repaired. Each summary
also says how many ledgers were marked since, if any.
"""

import json
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import structlog
from prometheus_client import Gauge

from auditor.fsck.results.summary import Summary
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import ANY_VERSION, MetadataStore
from replication.cluster.own_state import own_path, parse_record, read_record

log = structlog.get_logger()
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
WRONG = Gauge(
    "bookmender_fsck_wrong_ledgers",
    "Ledgers that the last run of fsck exits 1 for, or a closer one that none as close came after.",
)
FINISHED = Gauge(
    "bookmender_fsck_finished_timestamp_seconds", "When the last run of fsck ended.", ["level"]
)


def last_path(ur: str) -> str:
    return f"{own_path(ur)}/fsck/last"


def closer_path(ur: str) -> str:
    return f"{own_path(ur)}/fsck/closer"


async def write_last(store: MetadataStore, ur: str, summary: Summary) -> None:
    """Replace the summary of the previous run. Nothing acts on it, so the write needs no guard of
    the session."""
    before = (await read_closer(store, ur), await read_last(store, ur))
    closer = _outstanding([each for each in before if each is not None], summary)
    if closer is not None:
        await _write(store, closer_path(ur), closer)
    else:
        with suppress(NoNodeError):
            await store.delete(closer_path(ur))
    await _write(store, last_path(ur), summary)


def _outstanding(before: Sequence[Summary], last: Summary) -> Summary | None:
    """Return the run at the closest level that found something wrong, if that level is closer than
    the last run's; the latest of several."""
    found = [each for each in before if each.wrong and each.level.depth > last.level.depth]
    return max(found, key=lambda each: (each.level.depth, each.finished_ms), default=None)


async def note_marked(store: MetadataStore, ur: str, run: str, count: int) -> None:
    """Record that ``count`` ledgers that ``run`` found wrong are marked now. Does nothing if that
    run is in neither znode."""
    for path in (last_path(ur), closer_path(ur)):
        with suppress(
            NoNodeError, CorruptionError, ConflictError
        ):  # a conflict means that another run has ended
            data, stat = await store.get(path)
            found = Summary.from_record(parse_record(data))
            if found.run == run:
                noted = replace(found, marked=max(count, found.marked or 0))
                await store.set(path, _to_bytes(noted), version=stat.version)


async def _write(store: MetadataStore, path: str, summary: Summary) -> None:
    data = _to_bytes(summary)
    try:
        await store.create(path, data, with_parents=True)
    except NodeExistsError:
        await store.set(path, data, version=ANY_VERSION)


def _to_bytes(summary: Summary) -> bytes:
    return json.dumps(summary.to_record()).encode()


async def read_last(store: MetadataStore, ur: str) -> Summary | None:
    """Return the last run's summary; None if there is none that can be read."""
    return await _read(store, last_path(ur))


async def read_closer(store: MetadataStore, ur: str) -> Summary | None:
    """Return the summary of the closer run that found something wrong; None if there is none that
    can be read."""
    return await _read(store, closer_path(ur))


async def _read(store: MetadataStore, path: str) -> Summary | None:
    return await read_record(store, path, Summary.from_record)


async def meter_last(store: MetadataStore, ur: str) -> None:
    """Set the metrics to the last run's results, until cancelled. Only the leader calls this.

    If the summary cannot be read, the metrics stay unchanged: an error here must not end the
    leadership. Raises SessionLostError.
    """
    async with aclosing(store.watch(last_path(ur))) as events:
        async for _ in events:
            try:
                if (summary := await read_last(store, ur)) is not None:
                    _meter(summary, await read_closer(store, ur))
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("fsck_summary.unread", error=str(error))


def _meter(summary: Summary, closer: Summary | None) -> None:
    for verdict, count in summary.counts.verdicts.items():
        LEDGERS.labels(verdict=verdict).set(count)
    for finding, count in summary.counts.findings.items():
        FINDINGS.labels(finding=finding).set(count)
    WRONG.set(max(summary.wrong, 0 if closer is None else closer.wrong))
    FINISHED.clear()  # else a run at another level would still count as the last one
    FINISHED.labels(level=summary.level.value).set(summary.finished_ms / 1000)
