"""What a run of fsck needs around it: Spark, a folder of its own, the cluster's racks, marks."""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from auditor.findings import read_findings
from auditor.fsck.levels import FsckOptions, FsckProgress, Level
from auditor.fsck.publishing import Fault, Foreseen, Published
from auditor.fsck.results.cluster import Cluster as Origin
from auditor.fsck.results.cluster import keep_cluster
from auditor.fsck.results.run_folder import RunFolder, unfinished_runs
from auditor.fsck.results.summary import Counts, Summary, read_last, write_last
from auditor.fsck.verdicts import Grade
from auditor.underreplication import Damage
from daemon.admin_session import AdminSession
from daemon.fsck.running import (
    Marked,
    Places,
    Wanted,
    check_spark,
    find_places,
    job_of,
    preview,
    preview_here,
    publish,
    publish_here,
    read_racks,
    run,
    write_racks,
)
from daemon.fsck.texts import Meter, faults_lines, faults_record
from daemon.settings import Settings
from ledgers.errors import RejectedError, SettingsError
from ledgers.model import BookieId
from ledgers.placement import RackRule
from replication.entry_runs import EntryRuns
from replication.nodes import Membership, Role, live_nodes
from replication.settings import PlacementSettings
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info

OPTIONS = FsckOptions(metadata_service_uri="zk+hierarchical://zk:2181/ledgers")
NOW_S = 1_763_753_700.0


async def fault_of(cluster: Cluster, *bad: int) -> Fault:
    """Of a ledger that is written for it. ``bad``: entries that B1 lacks; the first, if none is
    given."""
    bad = bad or (0,)
    await cluster.write_ledger([B1, B2, B3])
    versioned = await cluster.manager.read(LEDGER)
    return Fault(
        ledger_id=LEDGER,
        grade=Grade.AT_RISK,
        damage={B1: Damage(bad=EntryRuns(bad), refused=EntryRuns(bad))},
        detail="missing",
        metadata_version=versioned.stat.version,
        mtime_ms=versioned.stat.mtime_ms,
    )


# --- What must be there ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_without_pyspark_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    def found(name: str) -> ModuleType:
        if name == missing:
            raise ImportError(name)
        return importlib

    monkeypatch.setattr("daemon.fsck.running.importlib.import_module", found)

    with pytest.raises(SettingsError, match=r"pip install 'bookmender\[fsck\]'"):
        check_spark(wanted(tmp_path), {})


def test_without_java_it_says_so_before_spark_does(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no Java found"):
        check_spark(wanted(tmp_path), {"PATH": "/nowhere"})


def test_spark_submit_has_a_java_running(tmp_path: Path) -> None:
    environment = {"PATH": "/nowhere", "PYSPARK_GATEWAY_PORT": "1"}

    assert check_spark(wanted(tmp_path), environment) is None
    with pytest.raises(SettingsError, match="no Java found"):
        check_spark(wanted(tmp_path, master="local[1]"), environment)


# --- Which run it is ------------------------------------------------------------------------------


def wanted(folder: Path, **changes: Any) -> Wanted:
    return Wanted(options=OPTIONS, output=folder, **changes)


def begin(folder: Path, run: str) -> RunFolder:
    made = RunFolder(folder, run)
    made.begin([], OPTIONS, started_ms=0)
    return made


def test_a_run_is_called_by_its_time(tmp_path: Path) -> None:
    job = job_of(wanted(tmp_path, time_budget_s=60.0, checked_within_s=9.0), now_s=NOW_S)

    assert (job.run, job.output) == ("20251121T193500Z", tmp_path)
    assert (job.time_budget_s, job.checked_within_s) == (60.0, 9.0)


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    begin(tmp_path, "20250101T000000Z")

    assert job_of(wanted(tmp_path), now_s=NOW_S).run == "20250101T000000Z"


def test_a_run_that_cannot_be_gone_on_with_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, "20250101T000000Z")
    places = Places(
        cluster=Origin(instance_id="a", metadata_service_uri="zk://a"), rule=None, racks={}
    )
    monkeypatch.setattr("auditor.fsck.spark.session.open_spark", None)
    other = replace(wanted(tmp_path), options=replace(OPTIONS, level=Level.FULL))

    with pytest.raises(SettingsError, match="level ends, not full"):
        run(other, places, lambda progress: None)


def test_a_run_that_died_while_it_began_leaves_nothing_behind(tmp_path: Path) -> None:
    role = tmp_path / "state" / "run=20250101T000000Z"
    role.mkdir(parents=True)

    assert job_of(wanted(tmp_path), now_s=NOW_S).run == "20251121T193500Z"
    assert not role.exists()


def test_a_run_that_was_killed_can_be_given_up(tmp_path: Path) -> None:
    begin(tmp_path, "20250101T000000Z")

    assert job_of(wanted(tmp_path, is_anew=True), now_s=NOW_S).run == "20251121T193500Z"
    assert list(unfinished_runs(tmp_path)) == []
    assert list(tmp_path.glob("*/run=*")) == [], "no rows of it stay, either"


# --- The cluster ----------------------------------------------------------------------------------


@in_virtual_time
async def test_where_nobody_tells_where_bookies_are_nothing_is_said_of_placement() -> None:
    places = await find_places(visiting(await Cluster.start()))

    assert (places.rule, places.racks) == (None, {})


def test_racks_and_their_rule_come_from_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "racks"
    file.write_text(f"{B1} = /r1\n{B2} = /r2\n")

    async def look() -> Places:
        admin_session = visiting(await Cluster.start())
        placement = PlacementSettings(racks_file=str(file))
        return await find_places(
            replace(admin_session, settings=replace(admin_session.settings, placement=placement))
        )

    places = asyncio.run(look())  # the file is read in a thread, which knows no virtual time

    assert isinstance(places.rule, RackRule)
    assert places.racks == {B1: "/r1", B2: "/r2"}


@pytest.mark.parametrize("content", [None, "", "[]", '{"a": 1}'])
def test_racks_that_cannot_be_read_are_not_known(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "racks.json").write_text(content)

    assert read_racks(tmp_path) == {}


def test_racks_are_kept_for_the_report(tmp_path: Path) -> None:
    write_racks(tmp_path, {BookieId("b:1"): "/r", BookieId("a:1"): "/s"})

    assert read_racks(tmp_path) == {"a:1": "/s", "b:1": "/r"}
    assert list(json.loads((tmp_path / "racks.json").read_text())) == ["a:1", "b:1"]


# --- Another cluster ------------------------------------------------------------------------------


def settings_of(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Whoever visits by them gets to ``cluster``."""
    seen = visiting(cluster)

    @asynccontextmanager
    async def admin_session(settings: Settings) -> AsyncIterator[AdminSession]:
        yield seen

    monkeypatch.setattr("daemon.fsck.running.visit", admin_session)
    return seen.settings


def test_a_run_writes_nothing_into_the_results_of_another_cluster(tmp_path: Path) -> None:
    ours, others = (Origin(instance_id=name, metadata_service_uri="zk://a") for name in "ab")
    keep_cluster(tmp_path, others)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(SettingsError, match=r"the cluster b .* this is a"):
        run(wanted(tmp_path), Places(cluster=ours, rule=None, racks={}), lambda progress: None)

    assert sorted(tmp_path.iterdir()) == before


def test_what_was_found_of_one_cluster_is_not_marked_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_cluster(tmp_path, Origin(instance_id="theirs", metadata_service_uri="zk://a"))

    @in_virtual_time
    async def mark() -> None:
        cluster = await Cluster.start()
        await cluster.store.create(f"{ROOT}/INSTANCEID", b"ours")
        fault = await fault_of(cluster)
        settings = settings_of(cluster, monkeypatch)

        with pytest.raises(SettingsError, match=r"theirs.*ours"):
            await publish(settings, tmp_path, "r", [fault], lambda left: None)
        with pytest.raises(SettingsError, match=r"theirs.*ours"):
            await preview(settings, tmp_path, [fault], lambda left: None)
        assert await cluster.marked() == []

    mark()


def test_that_it_was_marked_is_noted_beside_what_the_run_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_virtual_time
    async def mark() -> None:
        cluster = await Cluster.start()
        fault = await fault_of(cluster)
        settings = settings_of(cluster, monkeypatch)
        summary = Summary(run="r", level=Level.ENDS, started_ms=0, finished_ms=1, counts=Counts())
        await write_last(cluster.store, PATHS, summary)

        await preview(settings, tmp_path, [fault], lambda left: None)
        assert await read_last(cluster.store, PATHS) == summary
        for _ in range(2):
            await publish(settings, tmp_path, "r", [fault], lambda left: None)
            assert await read_last(cluster.store, PATHS) == replace(summary, marked=1)

    mark()


# --- Marks ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_marks_are_written_by_a_session_that_joins_and_leaves() -> None:
    cluster = await Cluster.start()
    fault = await fault_of(cluster)
    admin_session = visiting(cluster)

    marked = await publish_here(admin_session, [fault], lambda left: None)

    assert marked == Marked(published=Published(new=1), has_worker=False)
    assert "daemon mends them" not in str(faults_lines([fault], marked))
    assert await cluster.marked() == [LEDGER]
    assert (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER].check == "fsck"
    assert len(await live_nodes(cluster.store, PATHS)) == 1
    await admin_session.store.close()
    assert await live_nodes(cluster.store, PATHS) == []


@pytest.mark.parametrize("has_worker", [False, True])
@in_virtual_time
async def test_where_no_node_of_ours_works_it_is_said_that_nobody_mends_what_java_does_not_see(
    has_worker: bool,
) -> None:
    cluster = await Cluster.start()
    fault = await fault_of(cluster, 3)
    if has_worker:
        await Membership.join(cluster.store, PATHS, node_info("node-1", Role.WORKER))

    marked = await publish_here(visiting(cluster), [fault], lambda left: None)

    assert marked == Marked(published=Published(new=1, own=1), has_worker=has_worker)
    assert (await cluster.marked(), await cluster.marked(PATHS.private)) == ([], [LEDGER])
    first, own = faults_lines([fault], marked)
    assert first == "1 ledger marked for the daemon"
    assert own.startswith("1 ledger of these in bookmender's private queue")
    assert ("none is running: start a node" in own) is not has_worker
    assert faults_record([fault], marked) == {
        "marked": 1,
        "known": 0,
        "changed": 0,
        "own": 1,
        "has_worker": has_worker,
    }


@in_virtual_time
async def test_what_would_be_marked_is_said_by_what_stands_there_now() -> None:
    cluster = await Cluster.start()
    fault = await fault_of(cluster)
    gone = replace(fault, ledger_id=LEDGER + 1)

    seen = await preview_here(visiting(cluster), [gone, fault], lambda left: None)

    assert seen == Foreseen(faults=(fault,), changed=1)
    assert await live_nodes(cluster.store, PATHS) == []


@in_virtual_time
async def test_while_auto_recovery_is_switched_off_nothing_is_marked() -> None:
    cluster = await Cluster.start()
    fault = await fault_of(cluster)
    await cluster.store.create(PATHS.disable, with_parents=True)

    with pytest.raises(RejectedError, match="bookmender enable"):
        await publish_here(visiting(cluster), [fault], lambda left: None)

    assert await cluster.marked() == []


# --- How far it is --------------------------------------------------------------------------------


def test_progress_is_told_with_rates_and_the_time_that_is_left() -> None:
    now_s = 100.0
    meter = Meter(lambda: now_s)
    assert meter.text(FsckProgress(phase="listing", ledgers_done=5_000)) == "5,000 ledgers"

    # A run that goes on: what was read before it was killed is no measure.
    meter.text(_looking(ledgers=1_000, entries=1_000_000))
    now_s += 10
    told = meter.text(_looking(ledgers=1_500, entries=1_200_000))

    assert told == (
        "1,500 of 4,000 ledgers; 1,200,000 entries, 120 MB; 20,000 entries/s, 2 MB/s; 7 min 20 s to go"
    )


def test_a_phase_that_reads_nothing_has_no_rate() -> None:
    meter = Meter(lambda: 0.0)

    assert meter.text(_looking(ledgers=10, entries=0)) == "10 of 4,000 ledgers"
    assert meter.text(FsckProgress(phase="writing", entries_read=9, bytes_read=9)) == (
        "0 ledgers; 9 entries, 9 B"
    )


def _looking(*, ledgers: int, entries: int) -> FsckProgress:
    return FsckProgress(
        phase="looking",
        ledgers_done=ledgers,
        ledgers_expected=4_000,
        work_done=2 * entries,
        work_expected=20_000_000,
        entries_read=entries,
        bytes_read=100 * entries,
    )
