"""Environment variables of another Spark: ignored by a local run, else reported."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from daemon.fsck.spark_environment import (
    LaunchEnvironment,
    applied,
    check_origin,
    launch_environment,
)
from ledgers.errors import SettingsError
from tests.daemon.spark_homes import environment_without_spark, spark_home

VERSION = "4.3.0"
OUR_HOME = "/venv/pyspark"
CLUSTER = "spark://127.0.0.1:7077"
OTHERS = {
    "SPARK_HOME": "/opt/spark",
    "SPARK_CONF_DIR": "/etc/spark",
    "SPARK_REMOTE": "sc://127.0.0.1:1",
    "SPARK_SUBMIT_OPTS": "-Xmx1k",
    "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
    "PYSPARK_PYTHON": "/nowhere/python",
    "PYSPARK_DRIVER_PYTHON": "/nowhere/python",
    "PYSPARK_GATEWAY_PORT": "1",
    "HADOOP_CONF_DIR": "/etc/hadoop",
}


def launch_of(
    master: str,
    environment: Mapping[str, str],
    *,
    spark_settings: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> LaunchEnvironment:
    return launch_environment(
        master,
        environment,
        is_here=master.startswith("local"),
        pyspark_home=Path(OUR_HOME),
        version=VERSION,
        spark_settings=spark_settings or {},
        home=home,
    )


# --- Local runs -----------------------------------------------------------------------------------


def test_a_local_run_uses_nothing_of_another_spark() -> None:
    environment = {"PATH": "/bin", "SPARK_LOCAL_DIRS": "/data/tmp", **OTHERS}

    launch = launch_of("local[2]", environment)

    assert launch.variables == {
        "PATH": "/bin",
        "SPARK_LOCAL_DIRS": "/data/tmp",
        "SPARK_HOME": OUR_HOME,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    assert launch.ignored == tuple(sorted(OTHERS))


def test_without_another_spark_no_variable_is_ignored() -> None:
    launch = launch_of("local[2]", {"PATH": "/bin", "SPARK_REMOTE": ""})

    assert launch.ignored == ()


def test_java_options_are_kept() -> None:
    launch = launch_of("local[2]", {"JAVA_TOOL_OPTIONS": "-Xmx1g"})

    assert launch.variables["JAVA_TOOL_OPTIONS"] == "-Xmx1g"


@pytest.mark.parametrize(
    ("environment", "name", "home"),
    [
        pytest.param({}, "bookmender", "/data/fsck", id="a bare container"),
        pytest.param({"HOME": "/nowhere"}, "bookmender", "/data/fsck", id="a home that is missing"),
        pytest.param({"HOME": "/tmp", "HADOOP_USER_NAME": "bk"}, "bk", "/tmp", id="what it has"),
    ],
)
@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_a_user_id_without_an_entry_gets_a_name_and_a_home(
    master: str, environment: dict[str, str], name: str, home: str
) -> None:
    launch = launch_of(master, environment, home=Path("/data/fsck"))

    assert launch.variables["SPARK_USER"] == launch.variables["HADOOP_USER_NAME"] == name
    assert launch.variables["SPARK_SUBMIT_OPTS"] == f'"-Duser.home={home}" -Duser.name={name}'


def test_a_missing_python_is_reported_with_its_option() -> None:
    settings = {"spark.pyspark.python": "/nowhere/python"}

    with pytest.raises(SettingsError, match=r"--spark-conf spark\.pyspark\.python is /nowhere/pyt"):
        launch_of("local[2]", {"PATH": "/bin"}, spark_settings=settings)
    assert launch_of("spark://h:7077", {}, spark_settings=settings), "on a cluster it may exist"


def test_a_run_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    before = dict(os.environ)

    with applied(launch_of("local", before)):
        assert os.environ["SPARK_HOME"] == OUR_HOME
        assert "SPARK_CONF_DIR" not in os.environ
    assert os.environ == before


# --- On a cluster ---------------------------------------------------------------------------------


def test_on_a_cluster_the_environment_is_used() -> None:
    environment = {"PATH": "/bin", "SPARK_CONF_DIR": "/etc/spark", "YARN_CONF_DIR": "/etc/yarn"}

    launch = launch_of("yarn", environment)

    assert launch.variables == environment
    assert launch.ignored == ()


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        pytest.param(
            {"SPARK_REMOTE": "sc://127.0.0.1:1"},
            "SPARK_REMOTE is set, .* unset it, and give the cluster's master",
            id="Spark Connect",
        ),
        pytest.param(
            {"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"},
            "PYSPARK_SUBMIT_ARGS has --master",
            id="another master",
        ),
        pytest.param(
            {"PYSPARK_SUBMIT_ARGS": "--remote=sc://h pyspark-shell"},
            "PYSPARK_SUBMIT_ARGS has",
            id="Spark Connect as an argument",
        ),
        pytest.param(
            {"PYSPARK_SUBMIT_ARGS": "--conf 'a=b pyspark-shell"},
            "PYSPARK_SUBMIT_ARGS cannot be parsed",
            id="a quote that is not closed",
        ),
        pytest.param(
            {"PYSPARK_SUBMIT_ARGS": "--num-executors 4"},
            "PYSPARK_SUBMIT_ARGS does not end with pyspark-shell",
            id="nothing to start",
        ),
        pytest.param(
            {"SPARK_HOME": "/nowhere"},
            "SPARK_HOME is /nowhere, which has no bin/spark-submit",
            id="a missing folder",
        ),
    ],
)
def test_a_variable_that_prevents_the_connection_is_named(
    environment: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        launch_of(CLUSTER, environment)


def test_arguments_that_fit_the_master_are_accepted() -> None:
    environment = {"PYSPARK_SUBMIT_ARGS": "--queue night pyspark-shell"}

    assert launch_of("yarn", environment).variables == environment


@pytest.mark.parametrize(
    ("jars", "named"),
    [([], "no Spark"), (["spark-core_2.12-3.5.1.jar"], "which has Spark 3.5.1: unset SPARK_HOME")],
)
def test_the_home_of_another_spark_is_refused(tmp_path: Path, jars: list[str], named: str) -> None:
    home = spark_home(tmp_path, *jars)

    with pytest.raises(SettingsError, match=named):
        launch_of(CLUSTER, {"SPARK_HOME": str(home)})


@pytest.mark.parametrize("version", [VERSION, f"{VERSION}-amzn-0"])
def test_the_home_of_the_same_spark_is_used(tmp_path: Path, version: str) -> None:
    home = spark_home(tmp_path, f"spark-core_2.13-{version}.jar")

    assert launch_of(CLUSTER, {"SPARK_HOME": str(home)}).variables == {"SPARK_HOME": str(home)}


# --- PySpark --------------------------------------------------------------------------------------

OURS = Path("/venv/lib/pyspark")


@pytest.mark.parametrize(
    ("folder", "installed"),
    [
        pytest.param(OURS, OURS, id="the one that is installed"),
        pytest.param(OURS, None, id="installed without a known folder"),
    ],
)
def test_the_installed_pyspark_is_accepted(folder: Path, installed: Path | None) -> None:
    check_origin(folder, installed, {"PYTHONPATH": "/opt/spark/python"})


@pytest.mark.parametrize(
    ("pythonpath", "remedy"),
    [
        ("/lib:/opt/spark/python:", "unset PYTHONPATH, which names it"),
        ("", "remove it from Python's path"),
    ],
)
def test_the_pyspark_of_another_spark_is_refused(pythonpath: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_origin(Path("/opt/spark/python/pyspark"), OURS, {"PYTHONPATH": pythonpath})

    assert str(refused.value) == (
        f"PySpark would be imported from /opt/spark/python/pyspark, not from {OURS}: {remedy}"
    )


def fsck_run(
    folder: Path, *arguments: str, environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, without a ZooKeeper server."""
    ours = {
        "BOOKMENDER_METADATA_SERVICE_URI": "zk://127.0.0.1:1/ledgers",
        "BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S": "0.5",
    }
    return subprocess.run(
        [sys.executable, "-m", "daemon", "fsck", "run", "--output", str(folder), *arguments],
        env={**environment_without_spark(), **ours, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_pyspark_of_another_spark_ends_a_run_early(tmp_path: Path) -> None:
    other = tmp_path / "python/pyspark"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemError('of another Python')")

    ended = fsck_run(tmp_path / "o", environment={"PYTHONPATH": str(other.parent)})

    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("unset PYTHONPATH, which names it")


def test_a_wrong_variable_ends_a_run_early(tmp_path: Path) -> None:
    ended = fsck_run(tmp_path, "--master", CLUSTER, environment={"SPARK_REMOTE": "sc://h:1"})

    assert ended.returncode == 2
    assert ended.stderr.startswith("bookmender: SPARK_REMOTE is set")


def test_a_local_run_names_the_variables_it_ignores(tmp_path: Path) -> None:
    ended = fsck_run(tmp_path, environment={"SPARK_HOME": "/opt/spark", "SPARK_CONF_DIR": "/c"})

    assert ended.returncode == 3, "no ZooKeeper answers"
    first, *_ = ended.stderr.splitlines()
    assert first == "ignored variables of another Spark: SPARK_CONF_DIR, SPARK_HOME"
