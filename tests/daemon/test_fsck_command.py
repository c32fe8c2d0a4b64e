"""``bookmender fsck run``: its options, its output and its exit codes.

The run is a fake, without Spark.
"""

import json
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

from auditor.fsck.options import FeedChanges, FsckOptions, Level, SessionTimeouts
from daemon.cli.fsck import options_for, settings_for
from daemon.cli.main import cli
from daemon.fsck.changes import Fetched, WhyWhole
from daemon.fsck.runner import RunRequest
from ledgers.errors import UnavailableError
from tests.daemon.fsck_calls import LOST, UNKNOWN, URI, A, FakeRuns, Verdicts, call_run, fake_runs
from tests.fsck.results import whole


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return fake_runs(monkeypatch)


# --- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "exit_code"),
    [([whole(0)], 0), ([whole(0), LOST], 1), ([whole(0), UNKNOWN], 3)],
    ids=["all is whole", "something is wrong", "could not tell"],
)
def test_the_exit_code_depends_on_the_verdicts(
    runs: FakeRuns, tmp_path: Path, verdicts: Verdicts, exit_code: int
) -> None:
    runs.verdicts = verdicts

    assert call_run(tmp_path).exit_code == exit_code
    assert [summary.exit_code for summary in runs.told] == [exit_code], "the daemon knows, too"


def test_the_text_says_what_was_found_and_what_to_do(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [whole(0), LOST]

    said = call_run(tmp_path)

    assert "Data is lost" in said.stdout
    assert "2 ledgers: 1 whole, 1 lost" in said.stdout
    assert f"would mark ledger 1 (lost): {A}: missing, entry 3" in said.stdout
    assert "--mark marks them" in said.stdout
    assert f"report: {tmp_path}/report.html" in said.stdout
    assert A in (tmp_path / "report.html").read_text()
    assert "checking: 1 of 2 ledgers" in said.stderr


def test_the_json_has_the_same_results(runs: FakeRuns, tmp_path: Path) -> None:
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


# --- Options --------------------------------------------------------------------------------------


def test_the_options_reach_the_run(runs: FakeRuns, tmp_path: Path) -> None:
    call_run(
        tmp_path, "--sample", "5%", "--master", "spark://h:7077", "--for", "2h",
        "--reads-per-s", "20k", "--bytes-per-s", "50M",
        "--reads-in-flight", "9", "--spark-conf", "spark.executor.memory=2g", "--restart",
        "--start-within", "90s",
    )  # fmt: skip

    assert runs.wanted == RunRequest(
        options=FsckOptions(
            metadata_service_uri=URI,
            level=Level.SAMPLE,
            sample_share=0.05,
            reads_per_s=20_000,
            bytes_per_s=50_000_000,
            reads_in_flight_per_bookie=9,
        ),
        output=tmp_path,
        master="spark://h:7077",
        spark_settings={"spark.executor.memory": "2g"},
        start_timeout_s=90,
        time_budget_s=7_200,
        is_restart=True,
    )


def test_the_defaults_are_level_ends_without_limits(runs: FakeRuns, tmp_path: Path) -> None:
    call_run(tmp_path)

    assert runs.wanted == RunRequest(options=FsckOptions(metadata_service_uri=URI), output=tmp_path)
    assert runs.wanted.options.level is Level.ENDS


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--level", "closer"], id="no such level"),
        pytest.param(["--sample", "0%"], id="a sample of nothing"),
        pytest.param(["--sample", "101%"], id="more than everything"),
        pytest.param(["--sample", "5"], id="no unit"),
        pytest.param(["--sample", "5%", "--level", "full"], id="a sample of everything"),
        pytest.param(["--for", "soon"], id="no duration"),
        pytest.param(["--reads-in-flight", "501"], id="S10: more than a bookie may be asked"),
        pytest.param(["--spark-conf", "memory=2g"], id="not a Spark setting"),
        pytest.param(["--output", ""], id="a folder without a name"),
        pytest.param(["--output", "s3a://bucket/fsck"], id="a folder of other storage"),
        pytest.param(["--output", "file://host/fsck"], id="a folder of another host"),
        pytest.param(["--master", ""], id="an empty master"),
        pytest.param(["--output", "json"], id="a format in place of the folder"),
        pytest.param(["--master", "foo"], id="an unknown kind of master"),
        pytest.param(["--master", "local[x]"], id="a master of x cores"),
        pytest.param(["--master", "local[0]"], id="a master without cores"),
        pytest.param(["--master", "spark://host"], id="a master without a port"),
    ],
)
def test_wrong_options_are_refused(runs: FakeRuns, tmp_path: Path, arguments: list[str]) -> None:
    assert call_run(tmp_path, *arguments).exit_code == 2
    assert runs.wanted is None


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "File://localhost{}"])
def test_the_url_of_a_file_is_a_path(runs: FakeRuns, tmp_path: Path, form: str) -> None:
    said = call_run(tmp_path, "--output", form.format(tmp_path / "my%20results#1?"))

    assert said.exit_code == 0
    assert runs.wanted is not None
    assert runs.wanted.output == tmp_path / "my results#1?"


@pytest.mark.parametrize(
    "arguments",
    [
        ["fsck", "mark", "s3a://bucket/fsck"],
        ["fsck", "show", "s3a://bucket/fsck", "1"],
        ["fsck", "mark", "file:/fsck%00"],
        ["fsck", "mark", "file://[/fsck"],
        ["local", "up", "--data", "s3a://bucket/cluster"],
        ["config", "check", "-c", "https://host/bookmender.toml"],
        ["config", "import", "s3a://bucket/bk_server.conf"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_command_takes_the_url_of_other_storage_for_a_path(arguments: list[str]) -> None:
    said = CliRunner().invoke(cli, arguments)

    assert said.exit_code == 2
    assert "is a URL, but bookmender reads and writes only files of this host" in said.output


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[*]",
        "local[4]",
        "local[*, 3]",
        "local-cluster[2,1,1024]",
        "spark://h1:7077,[::1]:7077",
        "yarn",
        "k8s://https://host:443",
        "k8s://host",
    ],
)
def test_every_kind_of_master_is_passed_to_spark(
    runs: FakeRuns, tmp_path: Path, master: str
) -> None:
    assert call_run(tmp_path, "--master", master).exit_code == 0
    assert runs.wanted is not None
    assert runs.wanted.master == master


def test_the_uri_on_the_command_line_wins() -> None:
    environment = {"BOOKMENDER_METADATA_SERVICE_URI": "zk://elsewhere/ledgers"}

    assert settings_for(URI, None, environment).metadata_service_uri == URI
    assert settings_for(None, None, environment).metadata_service_uri == "zk://elsewhere/ledgers"


def test_facts_about_the_cluster_come_from_the_settings() -> None:
    environment = {
        "BOOKMENDER_CHECKS_IDLE_OPEN_AFTER_S": "0",
        "BOOKMENDER_REPLICATION_DEFAULT_PASSWORD": "secret",
        "BOOKMENDER_REPLICATION_DEFAULT_DIGEST_TYPE": "CRC32C",
        "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": "30",
        "BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S": "40",
    }

    options = options_for(settings_for(URI, None, environment), Level.FULL)

    assert options.default_password.reveal() == "secret"
    assert options.default_digest_type == "CRC32C"
    assert options.timeouts == SessionTimeouts(session_s=30, connect_s=40)
    assert options.idle_open_after_s == float("inf"), "0: no open ledger counts as idle"


# --- Only what changed ----------------------------------------------------------------------------

CHANGES = FeedChanges(
    client="fsck-ends",
    generation=1,
    position=16,
    is_whole=False,
    ledger_ids=array("q", [4, 5]),
    versions=array("Q", [17, 18]),
    are_deleted=bytes([0, 1]),
)


def test_a_run_over_changes_acknowledges_them_after_its_results(
    runs: FakeRuns, tmp_path: Path
) -> None:
    runs.fetched = Fetched(changes=CHANGES, why=None)
    runs.verdicts = [whole(4)]

    said = call_run(tmp_path, "--changed", "-o", "json")

    assert said.exit_code == 0
    assert runs.wanted is not None
    assert (runs.wanted.client, runs.changes) == ("fsck-ends", CHANGES)
    (told,) = runs.told
    assert runs.acknowledged == [(CHANGES, told.run)]
    assert "client fsck-ends: 2 changed ledgers, 1 of them deleted" in said.stderr
    assert json.loads(said.stdout)["changes"] == {
        "client": "fsck-ends",
        "is_whole": False,
        "position": 16,
        "changed": 2,
        "deleted": 1,
        "is_acknowledged": True,
    }


def test_the_first_run_over_changes_says_that_it_checks_all_ledgers(
    runs: FakeRuns, tmp_path: Path
) -> None:
    changes = FeedChanges(client="nightly", generation=1, position=16, is_whole=True)
    runs.fetched = Fetched(changes=changes, why=WhyWhole.FIRST)

    said = call_run(tmp_path, "--changed", "--client", "nightly", "--level", "full")

    assert runs.wanted is not None
    assert runs.wanted.client == "nightly"
    assert "this run checks all ledgers: it is the first one of client nightly" in said.stderr
    assert "later runs check what changes after checkpoint 0x10" in said.stderr


def test_results_hold_though_they_cannot_be_acknowledged(runs: FakeRuns, tmp_path: Path) -> None:
    runs.fetched = Fetched(changes=CHANGES, why=None)
    runs.verdicts = [LOST]
    runs.acknowledges = UnavailableError("ZooKeeper does not answer")

    said = call_run(tmp_path, "--changed", "-o", "json")

    assert said.exit_code == 1
    assert json.loads(said.stdout)["changes"]["is_acknowledged"] is False
    assert "not acknowledged: ZooKeeper does not answer. The next run" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--client", "nightly"), "--client needs --changed"),
        (("--changed", "--for", "2h"), "leave --for out"),
    ],
    ids=["client alone", "with a time limit"],
)
def test_options_that_do_not_go_together_are_refused(
    runs: FakeRuns, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    said = call_run(tmp_path, *arguments)

    assert said.exit_code == 2
    assert says in said.stderr
    assert runs.wanted is None
