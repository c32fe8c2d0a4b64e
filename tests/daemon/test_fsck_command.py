"""``bookmender fsck run``: what is asked for, what is told, and how it ends. Without Spark: the run
is a fake."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from auditor.fsck.options import FsckOptions, Level, SessionTimeouts
from daemon.cli.main import cli
from daemon.fsck.command import options_for, settings_for
from daemon.fsck.runner import RunRequest
from tests.daemon.fsck_calls import LOST, UNKNOWN, URI, A, FakeRuns, Verdicts, call_run, fake_runs
from tests.fsck.results import whole


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return fake_runs(monkeypatch)


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
    assert f"would mark ledger 1 (lost): {A}: missing, entry 3" in said.stdout
    assert "--mark marks them" in said.stdout
    assert f"report: {tmp_path}/report.html" in said.stdout
    assert "/rack-1" in (tmp_path / "report.html").read_text()
    assert "checking: 1 of 2 ledgers" in said.stderr


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
        "--reads-in-flight", "9", "--spark-conf", "spark.executor.memory=2g", "--restart",
        "--start-within", "90s",
    )  # fmt: skip

    assert runs.wanted == RunRequest(
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
        start_timeout_s=90,
        time_budget_s=7_200,
        checked_within_s=604_800,
        is_restart=True,
    )


def test_without_more_it_looks_at_the_ends_as_fast_as_it_may(
    runs: FakeRuns, tmp_path: Path
) -> None:
    call_run(tmp_path)

    assert runs.wanted == RunRequest(options=FsckOptions(metadata_service_uri=URI), output=tmp_path)
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
        pytest.param(["--output", ""], id="a folder without a name"),
        pytest.param(["--master", ""], id="a master that a script has not set"),
        pytest.param(["--master", "foo"], id="a master of no kind"),
        pytest.param(["--master", "local[x]"], id="a master of x cores"),
        pytest.param(["--master", "local[0]"], id="a master without cores"),
        pytest.param(["--master", "spark://host"], id="a master without a port"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_to_be_so(
    runs: FakeRuns, tmp_path: Path, arguments: list[str]
) -> None:
    assert call_run(tmp_path, *arguments).exit_code == 2
    assert runs.wanted is None


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
def test_masters_of_every_kind_are_left_to_spark(
    runs: FakeRuns, tmp_path: Path, master: str
) -> None:
    assert call_run(tmp_path, "--master", master).exit_code == 0
    assert runs.wanted is not None
    assert runs.wanted.master == master


def test_the_address_on_the_command_line_wins() -> None:
    environment = {"BOOKMENDER_METADATA_SERVICE_URI": "zk://elsewhere/ledgers"}

    assert settings_for(URI, None, environment).metadata_service_uri == URI
    assert settings_for(None, None, environment).metadata_service_uri == "zk://elsewhere/ledgers"


def test_what_is_known_of_the_cluster_comes_from_the_settings() -> None:
    environment = {
        "BOOKMENDER_CHECKS_IDLE_OPEN_AFTER_S": "0",
        "BOOKMENDER_REPLICATION_DEFAULT_PASSWORD": "secret",
        "BOOKMENDER_REPLICATION_DEFAULT_DIGEST_TYPE": "CRC32C",
        "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": "30",
        "BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S": "40",
    }

    options = options_for(
        settings_for(URI, None, environment), level=Level.FULL, share=None, entry_lists=False,
        reads_per_s=None, bytes_per_s=None, reads_in_flight=None,
    )  # fmt: skip

    assert (options.default_password, options.default_digest_type) == ("secret", "CRC32C")
    assert options.timeouts == SessionTimeouts(session_s=30, connect_s=40)
    assert options.idle_open_after_s == float("inf"), "0: no open ledger counts as idle"


def test_help_needs_no_spark() -> None:
    said = CliRunner().invoke(cli, ["fsck", "run", "--help"])

    assert said.exit_code == 0
    assert "metadata   unreadable metadata" in said.output
