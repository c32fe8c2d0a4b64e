"""``bookmender fsck``: what is asked for, what is told, and how it ends. Without Spark: the run itself is a fake."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.publishing import Fault, Published, Show
from auditor.fsck.results.cluster import Cluster, keep_cluster
from auditor.fsck.results.rows import SCHEMA
from auditor.fsck.results.run_folder import RunFolder
from auditor.fsck.results.summary import Summary
from auditor.fsck.running import FsckProgress, OnProgress
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon import fsck_command
from daemon.cli import cli, main
from daemon.fsck_command import fsck
from daemon.fsck_options import options_for, settings_for
from daemon.fsck_running import Places, Wanted, holding_output, write_racks
from daemon.settings import Settings
from ledgers.errors import CorruptionError, RejectedError, SettingsError, UnavailableError
from ledgers.metadata import BookieId
from tests.fsck.results import LATER_RUN, RUN, damaged, leave_results, seen, whole

URI = "zk+hierarchical://zk:2181/ledgers"
CLUSTER = Cluster(instance_id="id-1", metadata_service_uri=URI)
OTHER = Cluster(instance_id="id-2", metadata_service_uri=URI)
A = BookieId("a:3181")
LOST = damaged(1, Grade.LOST, seen(Finding.MISSING, A))
UNKNOWN = damaged(2, Grade.UNKNOWN, seen(Finding.NOT_ANSWERED, A))
Verdicts = Sequence[LedgerVerdict]


@dataclass(slots=True)
class FakeRuns:
    """In place of Spark and the cluster."""

    verdicts: Verdicts = ()
    raises: BaseException | None = None
    wanted: Wanted | None = None
    told: list[Summary] = field(default_factory=list)
    published: list[Fault] = field(default_factory=list)

    async def look_up_places(self, settings: Settings) -> Places:
        return Places(cluster=CLUSTER, rule=None, racks={A: "/rack-1"})

    def run(self, wanted: Wanted, places: Places, on_progress: OnProgress) -> Summary:
        self.wanted = wanted
        if self.raises is not None:
            raise self.raises
        on_progress(FsckProgress(phase="looking", ledgers_done=1, ledgers_expected=2))
        write_racks(wanted.output, places.racks)
        level = wanted.options.level
        return leave_results(wanted.output, self.verdicts, level=level).summary

    async def tell_daemon(self, settings: Settings, summary: Summary) -> None:
        self.told.append(summary)

    async def publish(
        self, settings: Settings, folder: Path, faults: Sequence[Fault], show: Show
    ) -> Published:
        self.published += faults
        return Published(new=len(faults), known=2, changed=3)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    for name in os.environ:
        if name.startswith("BOOKMENDER_"):
            monkeypatch.delenv(name)
    fake = FakeRuns()
    for name in ("look_up_places", "run", "tell_daemon", "publish"):
        monkeypatch.setattr(fsck_command, name, getattr(fake, name))
    monkeypatch.setattr(fsck_command, "check_spark", lambda: None)
    return fake


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(fsck, list(map(str, arguments)))


def call_run(folder: Path, *arguments: str) -> Result:
    return call("run", "--metadata-service-uri", URI, "--output", folder, *arguments)


# --- How it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "exit_code"),
    [([whole(0)], 0), ([whole(0), LOST], 1), ([whole(0), UNKNOWN], 3)],
    ids=["all is whole", "something is wrong", "could not tell"],
)
def test_automation_is_told_by_the_exit_code(
    runs: FakeRuns, tmp_path: Path, verdicts: Verdicts, exit_code: int
) -> None:
    runs.verdicts = verdicts

    assert call_run(tmp_path).exit_code == exit_code
    assert [summary.exit_code for summary in runs.told] == [exit_code], "the daemon knows, too"


def test_people_are_told_what_was_found_and_what_to_do(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [whole(0), LOST]

    said = call_run(tmp_path)

    assert "Data is lost" in said.stdout
    assert "2 ledgers: 1 whole, 1 lost" in said.stdout
    assert f"would mark ledger 1 (lost): {A}: missing, entry 3 (1)" in said.stdout
    assert "--mark does it" in said.stdout
    assert f"report: {tmp_path}/report.html" in said.stdout
    assert "/rack-1" in (tmp_path / "report.html").read_text()
    assert "looking: 1 of 2 ledgers" in said.stderr


def test_programs_are_told_the_same_as_an_object(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [whole(0), LOST]

    record = json.loads(call_run(tmp_path, "-o", "json").stdout)

    assert record["verdicts"]["lost"] == 1
    assert record["exit_code"] == 1
    assert record["marks"]["would_mark"] == 1
    assert record["marks"]["first_ledgers"][0]["bookies"] == [A]
    assert {**record, "output": "", "report": "", "marks": ""} == {
        **json.loads((tmp_path / "summary.json").read_text()),
        "output": "",
        "report": "",
        "marks": "",
    }


# --- What is asked for ----------------------------------------------------------------------------


def test_what_is_asked_for_reaches_the_run(runs: FakeRuns, tmp_path: Path) -> None:
    call_run(
        tmp_path, "--sample", "5%", "--master", "spark://h:7077", "--entry-lists", "--for", "2h",
        "--skip-checked-within", "7d", "--reads-per-s", "20k", "--bytes-per-s", "50M",
        "--reads-in-flight", "9", "--spark-conf", "spark.executor.memory=2g", "--anew",
    )  # fmt: skip

    assert runs.wanted == Wanted(
        options=FsckOptions(
            metadata_service_uri=URI,
            level=Level.SAMPLE,
            sample_share=0.05,
            entry_lists=True,
            reads_per_s=20_000,
            bytes_per_s=50_000_000,
            reads_in_flight_per_bookie=9,
        ),
        output=tmp_path,
        master="spark://h:7077",
        spark_settings={"spark.executor.memory": "2g"},
        time_budget_s=7_200,
        checked_within_s=604_800,
        is_anew=True,
    )


def test_without_more_it_looks_at_the_ends_as_fast_as_it_may(
    runs: FakeRuns, tmp_path: Path
) -> None:
    call_run(tmp_path)

    assert runs.wanted == Wanted(options=FsckOptions(metadata_service_uri=URI), output=tmp_path)
    assert runs.wanted.options.level is Level.ENDS


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--level", "closer"], id="no such level"),
        pytest.param(["--sample", "0%"], id="a sample of nothing"),
        pytest.param(["--sample", "101%"], id="more than all"),
        pytest.param(["--sample", "5"], id="five of what"),
        pytest.param(["--sample", "5%", "--level", "full"], id="a sample of everything"),
        pytest.param(["--for", "soon"], id="no duration"),
        pytest.param(["--reads-in-flight", "501"], id="S10: more than a bookie may be asked"),
        pytest.param(["--spark-conf", "memory=2g"], id="no setting of Spark's"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_to_be_so(
    runs: FakeRuns, tmp_path: Path, arguments: list[str]
) -> None:
    assert call_run(tmp_path, *arguments).exit_code == 2
    assert runs.wanted is None


def test_the_address_on_the_command_line_wins() -> None:
    environment = {"BOOKMENDER_METADATA_SERVICE_URI": "zk://elsewhere/ledgers"}

    assert settings_for(URI, None, environment).metadata_service_uri == URI
    assert settings_for(None, None, environment).metadata_service_uri == "zk://elsewhere/ledgers"


def test_what_is_known_of_the_cluster_comes_from_the_settings() -> None:
    environment = {
        "BOOKMENDER_CHECKS_IDLE_OPEN_AFTER_S": "0",
        "BOOKMENDER_REPLICATION_DEFAULT_PASSWORD": "secret",
        "BOOKMENDER_REPLICATION_DEFAULT_DIGEST_TYPE": "CRC32C",
    }

    options = options_for(
        settings_for(URI, None, environment), level=Level.FULL, share=None, entry_lists=False,
        reads_per_s=None, bytes_per_s=None, reads_in_flight=None,
    )  # fmt: skip

    assert (options.default_password, options.default_digest_type) == ("secret", "CRC32C")
    assert options.idle_open_after_s == float("inf"), "0: no open ledger counts as idle"


# --- What stands in the way -----------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """As from a shell."""
    monkeypatch.setattr("sys.argv", ["bookmender", "fsck", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_two_runs_do_not_write_to_one_folder(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("run", "--metadata-service-uri", URI, "--output", tmp_path)

    with holding_output(tmp_path):
        assert failing(monkeypatch, *arguments) == 2
    assert "another run of fsck writes there now" in capsys.readouterr().err
    assert runs.wanted is None

    assert failing(monkeypatch, *arguments) == 0, "the lock goes with the run"


def test_a_folder_that_cannot_be_written_to_is_noticed_before_anything_starts(
    runs: FakeRuns, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()

    said = call_run(file / "results")

    assert isinstance(said.exception, SettingsError)
    assert "cannot be written to" in str(said.exception)
    assert runs.wanted is None


@pytest.mark.parametrize(
    ("has_results", "told"),
    [(False, "no part of it was finished"), (True, "the same command goes on from there")],
    ids=["at once", "after a part"],
)
def test_who_interrupts_it_is_told_how_it_goes_on(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_results: bool,
    told: str,
) -> None:
    folder = RunFolder(tmp_path, RUN)
    options = FsckOptions(metadata_service_uri=URI)
    folder.begin(pa.table({"ledger_id": [1]}), options, part_size=1, started_ms=0)
    if has_results:
        none = SCHEMA.empty_table()
        folder.write_first_look(0, none, none, skipped=0, gone=1)
    runs.raises = KeyboardInterrupt()

    code = failing(monkeypatch, "run", "--metadata-service-uri", URI, "--output", tmp_path)

    assert code == 130
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(RuntimeError("Spark's own"), id="a crash"),
        pytest.param(UnavailableError("no answer"), id="ZooKeeper does not answer"),
        pytest.param(OSError(28, "no space left"), id="the disk is full"),
        pytest.param(CorruptionError("no layout"), id="what ZooKeeper holds cannot be read"),
    ],
)
def test_what_fails_does_not_look_like_damage(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    runs.raises = error
    monkeypatch.setattr("daemon.cli._drop_output", lambda: None)

    arguments = ("run", "--metadata-service-uri", URI, "--output", tmp_path)

    assert failing(monkeypatch, *arguments) == 3


def test_marks_that_cannot_be_made_leave_what_was_found_told(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(
        settings: Settings, folder: Path, faults: Sequence[Fault], show: Show
    ) -> Published:
        raise RejectedError("auto-recovery is switched off")

    monkeypatch.setattr(fsck_command, "publish", refuse)
    runs.verdicts = [LOST]

    said = call_run(tmp_path, "--mark")

    assert said.exit_code == 1
    assert "not marked: auto-recovery is switched off" in said.stderr
    assert "would mark ledger 1" in said.stdout


# --- Marks, reports, differences ------------------------------------------------------------------


def test_marks_are_made_only_when_they_are_asked_for(runs: FakeRuns, tmp_path: Path) -> None:
    leave_results(tmp_path, [whole(0), LOST, UNKNOWN])

    dry = call("mark", tmp_path, "--metadata-service-uri", URI)
    assert dry.exit_code == 0
    assert "would mark ledger 1" in dry.stdout
    assert runs.published == []

    said = call("mark", tmp_path, "--metadata-service-uri", URI, "--mark")
    assert [fault.ledger_id for fault in runs.published] == [1]
    assert "1 ledger marked for the daemon, 2 were marked already, 3 not" in said.stdout


def test_a_run_marks_what_it_found(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [LOST]

    record = json.loads(call_run(tmp_path, "--mark", "--json").stdout)

    assert [fault.ledger_id for fault in runs.published] == [1]
    assert record["marks"] == {"marked": 1, "known": 2, "changed": 3}


def test_where_nothing_is_wrong_nothing_is_marked(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [whole(0), UNKNOWN]

    assert "nothing to be marked" in call_run(tmp_path, "--mark").stdout
    assert runs.published == []


def test_the_report_of_any_run_is_made_anew(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [whole(0)], run=LATER_RUN)

    said = call("report", tmp_path)

    assert said.stdout.strip() == str(tmp_path / "report.html")
    assert LATER_RUN in (tmp_path / "report.html").read_text()
    call("report", f"{tmp_path}@{RUN}")
    assert LATER_RUN not in (tmp_path / "report.html").read_text()


def test_the_last_two_runs_of_a_folder_are_compared(tmp_path: Path) -> None:
    leave_results(tmp_path, [whole(1), UNKNOWN])
    leave_results(tmp_path, [LOST, whole(7)], run=LATER_RUN)

    said = call("diff", tmp_path)

    assert said.exit_code == 1
    assert said.stdout.splitlines() == [
        "changed: ledger 1: whole -> lost",
        "gone: ledger 2: unknown -> none",
        "1 ledger new, and whole",
    ]
    assert f"run {RUN}, then run {LATER_RUN}" in said.stderr


@pytest.mark.parametrize(
    "broken", [f"summaries/{RUN}.json", f"ledgers/run={RUN}/part-00000.parquet"]
)
def test_results_that_cannot_be_read_do_not_look_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [LOST], run=LATER_RUN)
    (tmp_path / broken).write_bytes(b"half")

    assert failing(monkeypatch, "diff", tmp_path) == 3


def test_a_run_that_looked_less_closely_cannot_tell_what_became_better(tmp_path: Path) -> None:
    levels = {"1": Level.ENDS, "2": Level.FULL, "3": Level.ENDS}
    for run, level in levels.items():
        leave_results(tmp_path, [LOST if level is Level.FULL else whole(1)], run=run, level=level)

    said = call("diff", tmp_path)

    assert isinstance(said.exception, SettingsError)
    assert str(said.exception) == (
        "run 3 (level ends) looked less closely than run 2 (level full), so that it cannot tell what became "
        f"better: compare it with {tmp_path}@1 (level ends)"
    )
    assert call("diff", f"{tmp_path}@1", f"{tmp_path}@3").exit_code == 0
    assert call("diff", f"{tmp_path}@1", f"{tmp_path}@2").exit_code == 1


def test_results_of_two_clusters_are_not_compared(tmp_path: Path) -> None:
    for name, cluster in (("a", CLUSTER), ("b", OTHER)):
        leave_results(tmp_path / name, [whole(1)])
        keep_cluster(tmp_path / name, cluster)

    said = call("diff", tmp_path / "a", tmp_path / "b")

    assert isinstance(said.exception, SettingsError)
    assert "id-1" in str(said.exception)
    assert "id-2" in str(said.exception)


def test_what_became_better_is_no_failure(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [whole(1)], run=LATER_RUN)

    said = call("diff", f"{tmp_path}@{RUN}", tmp_path, "-o", "json")

    assert said.exit_code == 0
    assert json.loads(said.stdout)["changed"] == [
        {"ledger_id": 1, "before": "lost", "after": "whole", "is_worse": False}
    ]


def test_without_results_it_says_so(tmp_path: Path) -> None:
    for arguments in (["report"], ["diff"], ["mark", "--metadata-service-uri", URI]):
        said = call(*arguments, tmp_path)
        assert isinstance(said.exception, SettingsError), arguments


def test_help_needs_no_spark() -> None:
    said = CliRunner().invoke(cli, ["fsck", "run", "--help"])

    assert said.exit_code == 0
    assert "metadata   metadata that cannot be read" in said.output
