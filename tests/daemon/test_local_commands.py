"""The commands of the local cluster where none is running; ``tests/cluster`` has the rest."""

import importlib.util
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from daemon.local import commands, folder, jars
from daemon.local.commands import local
from daemon.local.control import SOCKET_NAME, Response, listen, receive, send
from daemon.local.java import Java
from daemon.local.spec import ClusterSpec
from daemon.local.status import at_rest
from daemon.local.supervisor import Wish
from ledgers.errors import SettingsError, UnavailableError

SPEC = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default data folder, which is not there yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "bookmender" / "local"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(local, list(arguments))


def test_a_stopped_cluster_is_shown_as_down(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)

    result = run("status")

    assert result.exit_code == 1
    assert result.output.count("down") == 3  # ZooKeeper and two bookies
    assert "bookmender local up" in result.output


def test_status_speaks_json(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)

    status = json.loads(run("status", "-o", "json").output)

    assert status["is_running"] is False
    assert status["metadata_service_uri"] == SPEC.metadata_service_uri
    assert [bookie["address"] for bookie in status["bookies"]] == list(SPEC.bookies)


def test_without_a_cluster_status_says_how_to_make_one(data: Path) -> None:
    error = run("status").exception

    assert isinstance(error, SettingsError)
    assert "bookmender local up" in str(error)
    assert not data.exists()


def test_a_bookie_of_a_cluster_at_rest_is_wiped_and_no_other(data: Path) -> None:
    for port in (20_002, 20_003):
        (data / "bookies" / str(port) / "ledgers").mkdir(parents=True)
    SPEC.save(data)

    assert run("wipe", "2").output == f"wiped {SPEC.bookies[1]}\n"

    assert [folder.name for folder in (data / "bookies").iterdir()] == ["20002"]


@pytest.mark.parametrize("bookie", ["3", "../..", "20004"])
def test_only_a_bookie_of_the_cluster_is_wiped(data: Path, bookie: str) -> None:
    (data / "bookies" / "20004").mkdir(parents=True)
    SPEC.save(data)

    assert "there is no bookie" in str(run("wipe", bookie).exception)

    assert (data / "bookies" / "20004").exists()


def test_nothing_is_wiped_where_there_is_no_cluster(data: Path) -> None:
    assert "there is no cluster in" in str(run("wipe", "1").exception)
    assert not data.exists()


@pytest.mark.parametrize("command", ["kill", "start"])
def test_commands_to_a_cluster_that_is_not_running_are_refused(data: Path, command: str) -> None:
    error = run(command, "1").exception

    assert isinstance(error, SettingsError)
    assert "no cluster is running" in str(error)


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_an_empty_text_is_no_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    said = run(command, "--data", "")

    assert said.exit_code == 2
    assert "the name of the folder is empty" in said.output
    assert not [*tmp_path.iterdir()]


def test_what_a_dead_supervisor_left_behind_is_not_taken_for_a_live_one(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(data / SOCKET_NAME))  # the socket file stays when it is closed

    assert "It is not running" in run("status").output


def test_down_is_content_when_nothing_runs(data: Path) -> None:
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


def test_down_deletes_a_folder_that_holds_a_cluster_alone(data: Path) -> None:
    data.mkdir(parents=True)
    SPEC.save(data)

    assert f"deleted {data}\n" in run("down", "--delete").output
    assert not data.exists()


@pytest.mark.parametrize(
    "cluster_json",
    [None, "{}", "rubbish", '{"version": 9, "zookeeper_port": 1, "bookie_ports": []}'],
    ids=["none", "somebody else's", "unreadable", "another release's"],
)
def test_down_deletes_nothing_in_a_folder_that_is_no_cluster_of_ours(
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


def test_down_deletes_no_folder_that_is_not_there(data: Path) -> None:
    error = run("down", "--delete").exception

    assert isinstance(error, SettingsError)
    assert "there is no cluster in" in str(error)
    assert not data.exists()


def test_down_does_not_delete_under_a_running_cluster(data: Path) -> None:
    with folder.lease(data):  # as a program of the user's own does, without a supervisor
        SPEC.save(data)

        error = run("down", "--delete").exception

    assert isinstance(error, SettingsError)
    assert ClusterSpec.load(data) == SPEC


def test_up_refuses_a_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    error = run("up", "--foreground", "--data", str(tmp_path / ("x" * 120))).exception

    assert isinstance(error, SettingsError)
    assert "too long" in str(error)


def test_up_without_pyspark_says_what_to_install(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    error = run("up", "--foreground").exception

    assert isinstance(error, SettingsError)
    assert "pip install 'bookmender[local]'" in str(error)
    assert not data.exists()


@pytest.mark.parametrize("arguments", [["up"], ["up", "--foreground"]])
def test_up_says_where_it_cannot_make_its_folder(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").touch()

    error = run(*arguments, "--data", str(tmp_path / "file" / "data")).exception

    assert isinstance(error, SettingsError)
    assert "cannot make the folder" in str(error)


def test_up_in_the_background_says_what_its_supervisor_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(data))  # no Java there
    monkeypatch.delenv("JAVA_HOME", raising=False)

    error = run("up").exception

    assert isinstance(error, SettingsError)
    assert "install Java 17" in str(error)
    assert not data.exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_up_that_is_refused_leaves_nothing_in_a_folder_that_it_made(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(Java, "find", lambda: None)
    monkeypatch.setattr(jars, "spark_jars_folder", lambda: None)
    if not is_new:
        data.mkdir(parents=True)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = run("up", "--foreground", "--port", str(taken.getsockname()[1])).exception

    assert isinstance(error, SettingsError)
    assert "is taken by another process: end that, or --port names another" in str(error)
    assert data.exists() is not is_new


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param("cluster.json", id="a cluster"),
        pytest.param("logs/supervisor.log", id="a log that tells what went wrong"),
        pytest.param("notes", id="what is not ours"),
    ],
)
def test_a_start_that_failed_takes_nothing_away_that_somebody_needs(data: Path, kept: str) -> None:
    with pytest.raises(UnavailableError):
        begin_in_vain(data, kept)

    assert (data / kept).exists()


def begin_in_vain(data: Path, written: str) -> None:
    with folder.left_as_before(data):
        folder.make(data / "logs")
        (data / "logs" / "supervisor.log").touch()
        (data / written).write_text("x")
        raise UnavailableError("it did not come up")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        pytest.param(None, "interrupted; nothing is left of it", id="a folder that it made"),
        pytest.param((), "DATA contains a cluster that was not ready yet", id="an empty one"),
        pytest.param((SPEC,), "the cluster in DATA is stopped; its data is kept", id="a cluster"),
        pytest.param(("notes",), "DATA contains a cluster that was not", id="somebody else's"),
    ],
)
@pytest.mark.parametrize("arguments", [["up"], ["up", "--foreground"]])
def test_up_that_is_interrupted_takes_away_what_it_made_or_says_how(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[ClusterSpec | str, ...] | None,
    said: str,
    arguments: list[str],
) -> None:
    for each in () if before is None else ("", *before):
        data.mkdir(parents=True, exist_ok=True)
        if isinstance(each, ClusterSpec):
            each.save(data)
        elif each:
            (data / each).touch()
    for begin in ("supervise", "start_detached"):
        monkeypatch.setattr(commands, begin, begin_and_be_interrupted)

    result = run(*arguments)

    assert result.exit_code == 1  # click's; 130 by way of ``cli.main``
    assert said.replace("DATA", str(data)) in result.stderr
    assert data.exists() is (before is not None)
    is_new_in_old_folder = before is not None and SPEC not in before
    assert ("`bookmender local down --delete` deletes it" in result.stderr) is is_new_in_old_folder
    if before:
        left = {path.name for path in data.iterdir()}
        assert left >= {"cluster.json" if each is SPEC else each for each in before}


def begin_and_be_interrupted(wish: Wish, listener: object) -> None:
    data = Path(wish.data)
    (data / "bookies" / "20002" / "ledgers").mkdir(parents=True)
    (data / "logs").mkdir()
    (data / "logs" / "zookeeper.log").write_text("it began")
    SPEC.save(data)
    raise KeyboardInterrupt


def test_up_that_is_interrupted_before_it_made_a_cluster_says_so(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(wish: Wish, listener: object) -> None:
        raise KeyboardInterrupt

    data.mkdir(parents=True)
    monkeypatch.setattr(commands, "supervise", interrupt)

    assert "interrupted; no cluster was created" in run("up", "--foreground").stderr
    assert data.exists()


@pytest.mark.parametrize(
    ("zookeeper", "said"),
    [
        ("down", "local down`, then `bookmender local up`"),
        ("up", "is running already on {data}: `bookmender local down` stops it"),
    ],
)
def test_up_on_a_cluster_that_runs_says_whether_it_lost_its_zookeeper(
    data: Path, monkeypatch: pytest.MonkeyPatch, zookeeper: str, said: str
) -> None:
    monkeypatch.setattr(Java, "find", lambda: None)
    monkeypatch.setattr(jars, "spark_jars_folder", lambda: None)
    lock = folder.lease(data)
    status = at_rest(SPEC, data=str(data))
    status = replace(status, is_running=True, zookeeper=replace(status.zookeeper, state=zookeeper))

    def supervise(door: socket.socket) -> None:
        connection, _ = door.accept()
        with connection:
            receive(connection)
            send(connection, Response(status=status))

    with lock, listen(data) as door:
        supervisor = threading.Thread(target=supervise, args=(door,))
        supervisor.start()
        error = run("up", "--foreground").exception
        supervisor.join(timeout=10)

    assert isinstance(error, SettingsError)
    assert said.format(data=data) in str(error)


def test_up_on_a_folder_that_a_program_of_ones_own_holds_says_that_it_is_taken(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Java, "find", lambda: None)
    monkeypatch.setattr(jars, "spark_jars_folder", lambda: None)

    with folder.lease(data):
        error = run("up", "--foreground").exception

    assert isinstance(error, SettingsError)
    assert "is running already" in str(error)


@pytest.mark.parametrize("command", sorted(local.commands))
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")

    assert result.exit_code == 0
    assert "--data" in result.output
    assert isinstance(local.commands[command], click.Command)
    assert local.commands[command].help
