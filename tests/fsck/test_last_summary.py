"""The result of the last run, as the daemon shows it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from auditor.fsck.options import Level
from auditor.fsck.results.summary import (
    Summary,
    meter_last,
    note_marked,
    read_closer,
    read_last,
    write_last,
)
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.fsck.advice import counts_text
from daemon.status.gathering import gather_status
from daemon.status.report import to_text
from ledgers.errors import BookmenderError, UnauthorizedError, UnavailableError
from ledgers.store import Stat
from tests.daemon.status_values import as_json
from tests.daemon.visits import visiting
from tests.fsck.results import counted, damaged, seen, whole
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import PATHS

LOST = damaged(1, Grade.LOST, seen(Finding.MISSING))
SUSPECT = damaged(2, Grade.WHOLE, seen(Finding.SUSPECT))


def summary(
    *verdicts: LedgerVerdict, level: Level = Level.FULL, finished_ms: int = 2_000
) -> Summary:
    return Summary(
        run="r", level=level, started_ms=1_000, finished_ms=finished_ms, counts=counted(verdicts)
    )


def metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"bookmender_fsck_{name}", labels)


@in_virtual_time
async def test_the_last_run_replaces_the_one_before() -> None:
    cluster = await Cluster.start()
    assert await read_last(cluster.store, PATHS) is None

    await write_last(cluster.store, PATHS, summary(LOST))
    await write_last(cluster.store, PATHS, summary(whole(1)))

    assert await read_last(cluster.store, PATHS) == summary(whole(1))


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"run": 1}'])
@in_virtual_time
async def test_an_unreadable_summary_is_ignored(data: bytes) -> None:
    cluster = await Cluster.start()
    await cluster.store.create(PATHS.fsck_last, data, with_parents=True)
    assert await read_last(cluster.store, PATHS) is None


@in_virtual_time
async def test_status_shows_age_level_and_results_of_the_last_run() -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(LOST, SUSPECT, whole(0)))

    status = await gather_status(visiting(cluster))

    assert as_json(status)["last_fsck"]["verdicts"]["lost"] == 1
    assert (
        "fsck      1 min ago, level full: 3 ledgers: 2 whole, 1 lost; of these also 1 suspect"
        in to_text(replace(status, taken_ms=62_000)).splitlines()
    )


@in_virtual_time
async def test_status_says_that_level_metadata_reads_no_copy() -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(whole(0), level=Level.METADATA))

    told = to_text(await gather_status(visiting(cluster)))

    assert "level metadata (no copy was read): 1 ledger: 1 whole" in told


@in_virtual_time
async def test_status_says_how_many_ledgers_were_left() -> None:
    cluster = await Cluster.start()
    run = replace(summary(whole(0)), left=3)

    for each, text in (
        (run, "1 whole; 3 left for lack of time"),
        (replace(run, left_wrong=2), "1 whole; 3 left for lack of time, 2 of them wrong before"),
    ):
        await write_last(cluster.store, PATHS, each)
        lines = to_text(await gather_status(visiting(cluster))).splitlines()
        assert lines[-1].endswith(text)


@in_virtual_time
async def test_a_less_close_run_does_not_hide_earlier_findings() -> None:
    cluster = await Cluster.start()
    full, ends = summary(LOST), summary(SUSPECT, level=Level.ENDS)
    shallow = summary(whole(0), level=Level.METADATA, finished_ms=9_000)

    for each, closer in ((full, None), (ends, full), (shallow, full), (summary(whole(0)), None)):
        await write_last(cluster.store, PATHS, each)
        assert await read_last(cluster.store, PATHS) == each
        assert await read_closer(cluster.store, PATHS) == closer


@in_virtual_time
async def test_the_largest_count_of_marks_is_kept_with_its_run() -> None:
    cluster = await Cluster.start()
    store = cluster.store
    await write_last(store, PATHS, summary(LOST, SUSPECT))
    assert "marked" not in summary(LOST).to_record(), "a run itself knows of no marks"

    for run, count, expected in (("other", 5, None), ("r", 2, 2), ("r", 1, 2)):
        await note_marked(store, PATHS, run, count)
        found = await read_last(store, PATHS)
        assert found is not None
        assert found.marked == expected
    told = to_text(await gather_status(visiting(cluster)))
    assert "1 whole, 1 lost; of these also 1 suspect; 2 marked for repair" in told

    await write_last(store, PATHS, replace(summary(whole(1), level=Level.ENDS), run="later"))
    await note_marked(store, PATHS, "r", 3)
    closer = await read_closer(store, PATHS)
    assert closer is not None
    assert closer.marked == 3
    assert await read_last(store, PATHS) == replace(
        summary(whole(1), level=Level.ENDS), run="later"
    )


@in_virtual_time
async def test_a_note_on_an_earlier_run_does_not_undo_a_newer_run() -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(LOST))
    later, read = replace(summary(whole(1)), run="later"), cluster.store.get

    async def get(path: str) -> tuple[bytes, Stat]:
        found = await read(path)
        cluster.store.get = read  # type: ignore[method-assign]
        await write_last(cluster.store, PATHS, later)
        return found

    cluster.store.get = get  # type: ignore[method-assign]
    await note_marked(cluster.store, PATHS, "r", 1)

    assert await read_last(cluster.store, PATHS) == later


@in_virtual_time
async def test_status_and_metrics_show_both_runs() -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(LOST))
    metering = asyncio.create_task(meter_last(cluster.store, PATHS))
    await write_last(cluster.store, PATHS, summary(whole(0), level=Level.ENDS))
    await asyncio.sleep(1)

    status = await gather_status(visiting(cluster))

    assert as_json(status)["closer_fsck"]["verdicts"]["lost"] == 1
    assert metric("wrong_ledgers") == 1
    metering.cancel()
    lines = to_text(replace(status, taken_ms=62_000)).splitlines()
    assert "fsck      1 min ago, level ends: 1 ledger: 1 whole" in lines
    assert "          1 min ago, level full: 1 ledger: 1 lost; no run at this level since" in lines


@in_virtual_time
async def test_status_without_any_run_does_not_mention_fsck() -> None:
    status = await gather_status(visiting(await Cluster.start()))

    assert as_json(status)["last_fsck"] is None
    assert "fsck" not in to_text(status)


@in_virtual_time
async def test_the_metrics_of_the_leader_follow_the_last_run() -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(LOST))
    metering = asyncio.create_task(meter_last(cluster.store, PATHS))
    await asyncio.sleep(1)
    assert (metric("ledgers", verdict="lost"), metric("findings", finding="missing")) == (1, 1)
    assert (metric("wrong_ledgers"), metric("finished_timestamp_seconds", level="full")) == (1, 2)

    await write_last(cluster.store, PATHS, summary(whole(0), level=Level.ENDS, finished_ms=9_000))
    await asyncio.sleep(1)

    assert (metric("ledgers", verdict="lost"), metric("ledgers", verdict="whole")) == (0, 1)
    assert metric("wrong_ledgers") == 1, "no run at this level since"
    assert metric("finished_timestamp_seconds", level="ends") == 9
    assert metric("finished_timestamp_seconds", level="full") is None

    metering.cancel()
    await asyncio.wait([metering])

    assert metric("wrong_ledgers") == 0, "another node leads now"
    assert metric("finished_timestamp_seconds", level="ends") is None


@pytest.mark.parametrize("error", [UnavailableError, UnauthorizedError])
@in_virtual_time
async def test_a_failure_to_read_the_summary_only_delays_metrics(
    error: type[BookmenderError],
) -> None:
    cluster = await Cluster.start()
    await write_last(cluster.store, PATHS, summary(LOST))
    read = cluster.store.get
    refused = [error("it is not to be had")]

    async def get(path: str) -> tuple[bytes, Stat]:
        if refused:
            raise refused.pop()
        return await read(path)

    cluster.store.get = get  # type: ignore[method-assign]
    metering = asyncio.create_task(meter_last(cluster.store, PATHS))
    await asyncio.sleep(1)
    assert not metering.done()

    await write_last(cluster.store, PATHS, summary(LOST, SUSPECT))
    await asyncio.sleep(1)

    assert metric("wrong_ledgers") == 2
    metering.cancel()


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([], "0 ledgers"),
        ([whole(0)], "1 ledger: 1 whole"),
        ([LOST, whole(0)], "2 ledgers: 1 whole, 1 lost"),
        ([damaged(3, Grade.AT_RISK), damaged(4, Grade.UNKNOWN)], "2 ledgers: 1 unknown, 1 at risk"),
        ([whole(0), SUSPECT], "2 ledgers: 2 whole; of these also 1 suspect"),
    ],
)
def test_the_counts_fit_in_one_line(verdicts: Sequence[LedgerVerdict], text: str) -> None:
    assert counts_text(counted(verdicts)) == text
