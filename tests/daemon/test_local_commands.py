"""Commands of the local cluster while none is running. ``tests/cluster`` has the others."""

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.local import local
from daemon.local import folder
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.local.spec import ClusterSpec
from ledgers.errors import SettingsError, UnavailableError

SPEC = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default data folder, which does not exist yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "bookmender" / "local"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(local, list(arguments))


def test_a_stopped_cluster_is_shown_as_down(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)

    result = run("status")
    status = json.loads(run("status", "-o", "json").output)

    assert result.exit_code == 1
    assert result.output.count("down") == 3  # ZooKeeper and two bookies
    assert "It is not running. Start it with: bookmender local up" in result.output
    assert status["is_running"] is False
    assert status["metadata_service_uri"] == SPEC.metadata_service_uri
    assert [bookie["address"] for bookie in status["bookies"]] == list(SPEC.bookies)


def test_only_the_named_bookie_of_a_stopped_cluster_is_wiped(data: Path) -> None:
    for port in (20_002, 20_003):
        (data / "bookies" / str(port) / "ledgers").mkdir(parents=True)
    SPEC.save(data)

    assert run("wipe", "2").output == f"wiped {SPEC.bookies[1]}\n"

    assert [folder.name for folder in (data / "bookies").iterdir()] == ["20002"]


@pytest.mark.parametrize("bookie", ["3", "../..", "20004"])
def test_a_bookie_outside_the_cluster_is_not_wiped(data: Path, bookie: str) -> None:
    (data / "bookies" / "20004").mkdir(parents=True)
    SPEC.save(data)

    assert "there is no bookie" in str(run("wipe", bookie).exception)

    assert (data / "bookies" / "20004").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status"], "there is no cluster in"),
        (["wipe", "1"], "bookmender local up"),
        (["kill", "1"], "no cluster is running"),
        (["start", "1"], "no cluster is running"),
    ],
)
def test_commands_without_a_cluster_are_refused(
    data: Path, arguments: list[str], said: str
) -> None:
    error = run(*arguments).exception

    assert isinstance(error, SettingsError)
    assert said in str(error)
    assert not data.exists()


def test_write_to_a_stopped_cluster_says_how_to_start_it(data: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "trial"
    for place in (data, elsewhere):
        place.mkdir(parents=True)
        SPEC.save(place)

    assert "`bookmender local up` starts it" in str(run("write").exception)
    error = run("write", "--data", str(elsewhere)).exception
    assert f"`bookmender local up --data {elsewhere}` starts it" in str(error)


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_an_empty_folder_name_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    said = run(command, "--data", "")

    assert said.exit_code == 2
    assert "the value is empty" in said.output
    assert not [*tmp_path.iterdir()]


def test_down_succeeds_when_nothing_is_running(data: Path) -> None:
    result = run("down")

    assert result.exit_code == 0
    assert "no cluster is running" in result.output


def test_down_deletes_the_cluster_and_nothing_else(data: Path) -> None:
    for ours in (
        "bookies/20002/ledgers",
        "bookies/20003",
        "zookeeper/tmp",
        "autorecovery/a",
        "logs",
    ):
        (data / ours).mkdir(parents=True)
    (data / "logs" / "bookie-20002.log").touch()
    others = ("notes.txt", "logs/notes.txt", "bookies/notes/mine.txt")
    (data / "bookies" / "notes").mkdir()
    for other in others:
        (data / other).touch()
    SPEC.save(data)

    result = run("down", "--delete")

    assert result.exit_code == 0
    assert {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()} == {*others}
    assert f"deleted the cluster in {data}; other files stay" in result.output
    assert "notes.txt" in result.output


def test_down_deletes_a_folder_with_only_a_cluster(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)

    assert f"deleted {data}\n" in run("down", "--delete").output
    assert not data.exists()


@pytest.mark.parametrize(
    "cluster_json",
    [None, "{}", "rubbish", '{"version": 9, "zookeeper_port": 1, "bookie_ports": []}'],
    ids=["none", "another program's", "unreadable", "another release's"],
)
def test_down_deletes_nothing_in_a_folder_without_a_cluster(
    data: Path, cluster_json: str | None
) -> None:
    for file in ("logs/app.log", "zookeeper/data", "bookies/20002/ledger", "lock"):
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        (data / file).touch()
    if cluster_json is not None:
        (data / "cluster.json").write_text(cluster_json)
    before = sorted(data.rglob("*"))

    error = run("down", "--delete").exception

    assert isinstance(error, SettingsError)
    assert sorted(data.rglob("*")) == before


def test_down_does_not_delete_a_running_cluster(data: Path) -> None:
    with folder.lease(data):  # like a user's own program, without a supervisor
        SPEC.save(data)

        error = run("down", "--delete").exception

    assert isinstance(error, SettingsError)
    assert ClusterSpec.load(data) == SPEC


def test_up_reports_a_folder_that_it_cannot_create(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    error = run("up", "--data", str(tmp_path / "file" / "data")).exception

    assert isinstance(error, SettingsError)
    assert "cannot make the folder" in str(error)


def test_up_without_java_creates_no_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(data))  # without Java
    monkeypatch.delenv("JAVA_HOME", raising=False)

    error = run("up").exception

    assert isinstance(error, SettingsError)
    assert "install Java 17" in str(error)
    assert not data.exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_refused_up_deletes_a_folder_that_it_created(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(Java, "find", lambda: None)
    if not is_new:
        data.mkdir(parents=True)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = run("up", "--port", str(taken.getsockname()[1])).exception

    assert isinstance(error, SettingsError)
    assert "is used by another process. End that process, or choose another port (--port)" in str(
        error
    )
    assert data.exists() is not is_new


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param("cluster.json", id="a cluster"),
        pytest.param("logs/zookeeper.log", id="a log with the error"),
        pytest.param("notes", id="another file"),
    ],
)
def test_a_failed_start_deletes_nothing_that_is_needed(
    data: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    def fail(data: Path, **options: object) -> None:
        folder.make(data / "logs")
        (data / "logs" / "zookeeper.log").touch()
        (data / kept).write_text("x")
        raise UnavailableError("a server is not ready")

    monkeypatch.setattr(LocalCluster, "start", fail)

    assert isinstance(run("up").exception, UnavailableError)
    assert (data / kept).exists()


@pytest.mark.parametrize(
    ("before", "said"),
    [
        pytest.param(None, "interrupted; no cluster was created", id="a folder that it created"),
        pytest.param((), "the cluster in DATA is stopped and its data kept", id="an empty one"),
        pytest.param((SPEC,), "the cluster in DATA is stopped", id="a cluster"),
        pytest.param(("notes",), "the cluster in DATA is stopped", id="another program's"),
    ],
)
def test_an_interrupted_up_cleans_up_or_says_what_is_left(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[ClusterSpec | str, ...] | None,
    said: str,
) -> None:
    for each in () if before is None else ("", *before):
        data.mkdir(parents=True, exist_ok=True)
        if isinstance(each, ClusterSpec):
            each.save(data)
        elif each:
            (data / each).touch()
    monkeypatch.setattr(LocalCluster, "start", begin_and_be_interrupted)

    result = run("up")

    assert result.exit_code == 1  # by click; 130 through ``cli.main``
    assert said.replace("DATA", str(data)) in result.stderr
    assert data.exists() is (before is not None)
    assert ("bookmender local down --delete" in result.stderr) is (before is not None)
    if before:
        left = {path.name for path in data.iterdir()}
        assert left >= {"cluster.json" if each is SPEC else each for each in before}


def begin_and_be_interrupted(data: Path, **options: object) -> None:
    (data / "bookies" / "20002" / "ledgers").mkdir(parents=True)
    (data / "logs").mkdir()
    (data / "logs" / "zookeeper.log").write_text("it began")
    SPEC.save(data)
    raise KeyboardInterrupt


def test_up_refuses_a_folder_locked_by_another_program(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Java, "find", lambda: None)

    with folder.lease(data):
        error = run("up").exception

    assert isinstance(error, SettingsError)
    assert "is running already" in str(error)
