"""The surroundings of a run of fsck: Spark, a folder of its own, racks, and marks."""

import asyncio
import importlib
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from auditor.fsck.damage_marker import DamagedLedger, MarkCounts, MarkPreview
from auditor.fsck.options import FeedChanges, FsckJob, FsckOptions, FsckProgress, Level
from auditor.fsck.results.folder import Cluster as Origin
from auditor.fsck.results.folder import keep_cluster
from auditor.fsck.results.run_folder import RunFolder, next_run, unfinished_runs
from auditor.fsck.results.summary import Counts, Summary, read_last, write_last
from auditor.fsck.run import fits_in_this_process
from auditor.fsck.verdicts import Grade
from auditor.mark_reasons import read_findings
from daemon.admin_session import AdminSession
from daemon.fsck.changes import Fetched
from daemon.fsck.runner import (
    ClusterFacts,
    MarkResult,
    RunRequest,
    changes_for,
    check_spark,
    fetch_cluster_facts,
    mark_damaged,
    preview_damaged,
    run,
)
from daemon.fsck.texts import Meter, mark_lines, marks_record
from daemon.settings import Settings
from ledgers.errors import RejectedError, SettingsError
from ledgers.placement import RackRule
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from replication.nodes import Membership, Role, live_nodes
from replication.settings import PlacementSettings
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info

OPTIONS = FsckOptions(metadata_service_uri="zk+hierarchical://zk:2181/ledgers")
NOW_S = 1_763_753_700.0


async def damaged_ledger(cluster: Cluster, *bad: int) -> DamagedLedger:
    """Write a ledger, and return it as damaged.

    ``bad``: entries that B1 lacks; by default the first one.
    """
    bad = bad or (0,)
    await cluster.write_ledger([B1, B2, B3])
    versioned = await cluster.manager.read(LEDGER)
    return DamagedLedger(
        ledger_id=LEDGER,
        grade=Grade.AT_RISK,
        damage={B1: ReadFailures(absent=EntryRuns(bad))},
        detail="missing",
        metadata_version=versioned.stat.version,
        mtime_ms=versioned.stat.mtime_ms,
    )


# --- Prerequisites --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_without_pyspark_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    def found(name: str) -> ModuleType:
        if name == missing:
            raise ImportError(name)
        return importlib

    monkeypatch.setattr("daemon.fsck.runner.importlib.import_module", found)

    with pytest.raises(SettingsError, match=r"pip install 'bookmender\[fsck\]'"):
        check_spark(wanted(tmp_path), {})


def test_a_missing_java_is_reported_before_spark_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no Java found"):
        check_spark(wanted(tmp_path), {"PATH": "/nowhere"})


def test_under_spark_submit_no_java_is_looked_for(tmp_path: Path) -> None:
    environment = {"PATH": "/nowhere", "PYSPARK_GATEWAY_PORT": "1"}

    assert check_spark(wanted(tmp_path), environment) is None
    with pytest.raises(SettingsError, match="no Java found"):
        check_spark(wanted(tmp_path, master="local[1]"), environment)


# --- Runs over changes ----------------------------------------------------------------------------


def changed(*ledger_ids: int) -> FeedChanges:
    return FeedChanges(
        client="fsck-ends",
        generation=1,
        position=9,
        is_whole=False,
        ledger_ids=array("q", ledger_ids),
        versions=array("Q", range(10, 10 + len(ledger_ids))),
        are_deleted=bytes(len(ledger_ids)),
    )


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        pytest.param(changed(1, 2, 3), True, id="a few changes"),
        pytest.param(changed(*range(2_001)), False, id="many changes"),
        pytest.param(replace(changed(), is_whole=True), False, id="all ledgers"),
        pytest.param(None, False, id="not over changes"),
    ],
)
def test_few_changes_are_checked_without_spark(
    tmp_path: Path, changes: FeedChanges | None, fits: bool
) -> None:
    job = FsckJob(run="20251121T193500Z", output=tmp_path, changes=changes)

    assert fits_in_this_process(OPTIONS, job) is fits


def test_an_unfinished_run_goes_on_with_what_it_was_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "20251121T193500Z")
    folder.begin([], OPTIONS, started_ms=0, changes=changed(4))

    settings = Settings(metadata_service_uri=OPTIONS.metadata_service_uri)  # not asked
    fetched = asyncio.run(changes_for(settings, wanted(tmp_path, client="fsck-ends")))

    assert fetched == Fetched(changes=changed(4), why=None)


# --- New and continued runs -----------------------------------------------------------------------


def wanted(folder: Path, **changes: Any) -> RunRequest:
    return RunRequest(options=OPTIONS, output=folder, **changes)


def begin(folder: Path, run: str) -> RunFolder:
    made = RunFolder(folder, run)
    made.begin([], OPTIONS, started_ms=0)
    return made


@pytest.mark.parametrize("remains", ["summaries/{}.json", "ledgers/run={}"])
@pytest.mark.parametrize(
    ("last", "name"),
    [
        pytest.param("20251121T193500Z", "20251121T193501Z", id="within a second"),
        pytest.param("20251121T205959Z", "20251121T210000Z", id="the clock was set back"),
    ],
)
def test_a_run_is_named_after_the_last_one(
    remains: str, last: str, name: str, tmp_path: Path
) -> None:
    """Else it would take the verdicts of that run for its own, and check nothing."""
    for run_name in ("20251121T180000Z", last, "copy of mine"):
        (tmp_path / remains.format(run_name)).mkdir(parents=True)

    assert next_run(tmp_path, is_restart=False, now_s=NOW_S) == name


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    begin(tmp_path, "20250101T000000Z")

    assert next_run(tmp_path, is_restart=False, now_s=NOW_S) == "20250101T000000Z"


def test_a_run_with_other_options_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, "20250101T000000Z")
    places = ClusterFacts(
        cluster=Origin(instance_id="a", metadata_service_uri="zk://a"), rule=None, racks={}
    )
    monkeypatch.setattr("auditor.fsck.spark.open_spark", None)
    other = replace(wanted(tmp_path), options=replace(OPTIONS, level=Level.FULL))

    with pytest.raises(SettingsError, match="level ends, not full"):
        run(other, places, lambda progress: None)


def test_a_run_killed_at_its_start_leaves_nothing_behind(tmp_path: Path) -> None:
    role = tmp_path / "state" / "run=20250101T000000Z"
    role.mkdir(parents=True)

    assert next_run(tmp_path, is_restart=False, now_s=NOW_S) == "20251121T193500Z"
    assert not role.exists()


def test_a_killed_run_can_be_given_up(tmp_path: Path) -> None:
    begin(tmp_path, "20250101T000000Z")

    assert next_run(tmp_path, is_restart=True, now_s=NOW_S) == "20251121T193500Z"
    assert list(unfinished_runs(tmp_path)) == []
    assert list(tmp_path.glob("*/run=*")) == [], "no rows of it are left either"


# --- The cluster ----------------------------------------------------------------------------------


def reaching(session: AdminSession, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of the session. Every command uses it from now on."""

    @asynccontextmanager
    async def admin_session(settings: Settings) -> AsyncIterator[AdminSession]:
        yield session

    monkeypatch.setattr("daemon.fsck.runner.admin_session", admin_session)
    return session.settings


@in_virtual_time
async def test_without_racks_there_is_no_placement_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    places = await fetch_cluster_facts(reaching(visiting(await Cluster.start()), monkeypatch))

    assert (places.rule, places.racks) == (None, {})


def test_racks_and_the_rule_come_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "racks"
    file.write_text(f"{B1} = /r1\n{B2} = /r2\n")

    async def look() -> ClusterFacts:
        admin_session = visiting(await Cluster.start())
        placement = PlacementSettings(racks_file=str(file))
        settings = replace(admin_session.settings, placement=placement)
        reached = reaching(replace(admin_session, settings=settings), monkeypatch)
        return await fetch_cluster_facts(reached)

    places = asyncio.run(look())  # a thread reads the file, without virtual time

    assert isinstance(places.rule, RackRule)
    assert places.racks == {B1: "/r1", B2: "/r2"}


# --- Another cluster ------------------------------------------------------------------------------


def test_a_run_refuses_the_results_folder_of_another_cluster(tmp_path: Path) -> None:
    ours, others = (Origin(instance_id=name, metadata_service_uri="zk://a") for name in "ab")
    keep_cluster(tmp_path, others)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(SettingsError, match=r"of cluster b .* not of a"):
        run(
            wanted(tmp_path), ClusterFacts(cluster=ours, rule=None, racks={}), lambda progress: None
        )

    assert sorted(tmp_path.iterdir()) == before


def test_results_of_one_cluster_are_not_marked_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_cluster(tmp_path, Origin(instance_id="theirs", metadata_service_uri="zk://a"))

    @in_virtual_time
    async def mark() -> None:
        cluster = await Cluster.start()
        await cluster.store.create(f"{ROOT}/INSTANCEID", b"ours")
        fault = await damaged_ledger(cluster)
        settings = reaching(visiting(cluster), monkeypatch)

        with pytest.raises(SettingsError, match=r"theirs.*ours"):
            await mark_damaged(settings, tmp_path, "r", [fault], lambda left: None)
        with pytest.raises(SettingsError, match=r"theirs.*ours"):
            await preview_damaged(settings, tmp_path, [fault], lambda left: None)
        assert await cluster.marked() == []

    mark()


def test_the_count_of_marks_is_noted_in_the_last_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_virtual_time
    async def mark() -> None:
        cluster = await Cluster.start()
        fault = await damaged_ledger(cluster)
        settings = reaching(visiting(cluster), monkeypatch)
        summary = Summary(run="r", level=Level.ENDS, started_ms=0, finished_ms=1, counts=Counts())
        await write_last(cluster.store, PATHS, summary)

        await preview_damaged(settings, tmp_path, [fault], lambda left: None)
        assert await read_last(cluster.store, PATHS) == summary
        for _ in range(2):
            await mark_damaged(settings, tmp_path, "r", [fault], lambda left: None)
            assert await read_last(cluster.store, PATHS) == replace(summary, marked=1)

    mark()


# --- Marks ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_marks_are_written_by_a_session_that_joins_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster.start()
    fault = await damaged_ledger(cluster)
    admin_session = visiting(cluster)
    settings = reaching(admin_session, monkeypatch)

    marked = await mark_damaged(settings, tmp_path, "r", [fault], lambda left: None)

    assert marked == MarkResult(counts=MarkCounts(new=1), has_worker=False)
    assert "bookmender worker" not in str(mark_lines([fault], marked))
    assert await cluster.marked() == [LEDGER]
    assert (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER].check == "fsck"
    assert len(await live_nodes(cluster.store, PATHS)) == 1
    await admin_session.store.close()
    assert await live_nodes(cluster.store, PATHS) == []


@pytest.mark.parametrize("has_worker", [False, True])
@in_virtual_time
async def test_marks_in_the_private_queue_need_a_bookmender_worker(
    has_worker: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster.start()
    settings = reaching(visiting(cluster), monkeypatch)
    fault = await damaged_ledger(cluster, 3)
    if has_worker:
        await Membership.join(cluster.store, PATHS, node_info("node-1", Role.WORKER))

    marked = await mark_damaged(settings, tmp_path, "r", [fault], lambda left: None)

    assert marked == MarkResult(counts=MarkCounts(new=1, own=1), has_worker=has_worker)
    assert (await cluster.marked(), await cluster.marked(PATHS.private)) == ([], [LEDGER])
    first, own = mark_lines([fault], marked)
    assert first == "1 ledger marked"
    assert own.startswith("1 ledger of these in bookmender's private queue")
    assert ("no such worker is running: start a node" in own) is not has_worker
    assert marks_record([fault], marked) == {
        "marked": 1,
        "known": 0,
        "changed": 0,
        "own": 1,
        "has_worker": has_worker,
    }


@in_virtual_time
async def test_the_preview_compares_with_the_present_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster.start()
    settings = reaching(visiting(cluster), monkeypatch)
    fault = await damaged_ledger(cluster)
    gone = replace(fault, ledger_id=LEDGER + 1)

    seen = await preview_damaged(settings, tmp_path, [gone, fault], lambda left: None)

    assert seen == MarkPreview(ledgers=(fault,), changed=1)
    assert await live_nodes(cluster.store, PATHS) == []


@in_virtual_time
async def test_nothing_is_marked_while_auto_recovery_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster.start()
    settings = reaching(visiting(cluster), monkeypatch)
    fault = await damaged_ledger(cluster)
    await cluster.store.create(PATHS.disable, with_parents=True)

    with pytest.raises(RejectedError, match="bookmender enable"):
        await mark_damaged(settings, tmp_path, "r", [fault], lambda left: None)

    assert await cluster.marked() == []


# --- Progress -------------------------------------------------------------------------------------


def test_progress_has_rates_and_the_time_left_if_something_is_read() -> None:
    now_s = 100.0
    meter = Meter(lambda: now_s)
    assert meter.text(FsckProgress(phase="listing", ledgers_done=5_000)) == "5,000 ledgers"

    # A continued run: the entries read before it was killed do not count for the speed.
    meter.text(_checking(ledgers=1_000, entries=1_000_000))
    now_s += 10
    told = meter.text(_checking(ledgers=1_500, entries=1_200_000))

    assert told == (
        "1,500 of 4,000 ledgers; 1,200,000 entries, 120 MB; 20,000 entries/s, 2 MB/s; 7 min 20 s "
        "to go"
    )

    meter = Meter(lambda: 0.0)
    assert meter.text(_checking(ledgers=10, entries=0)) == "10 of 4,000 ledgers"
    assert meter.text(FsckProgress(phase="writing", entries_read=9, bytes_read=9)) == (
        "0 ledgers; 9 entries, 9 B"
    )


def test_the_time_left_does_not_depend_on_which_tasks_ended_last() -> None:
    """Tasks of one size end together. The first of the next ones ends 200 s later."""
    now_s = [0.0]
    meter = Meter(lambda: now_s[0])
    meter.text(_checking(ledgers=0, entries=0))
    for now_s[0], entries in ((300.0, 6_000_000), (300.1, 7_500_000), (500.0, 8_000_000)):
        told = meter.text(_checking(ledgers=0, entries=entries))

    assert told.endswith("2 min 5 s to go")


def _checking(*, ledgers: int, entries: int) -> FsckProgress:
    return FsckProgress(
        phase="looking",
        ledgers_done=ledgers,
        ledgers_expected=4_000,
        work_done=2 * entries,
        work_expected=20_000_000,
        entries_read=entries,
        bytes_read=100 * entries,
    )
