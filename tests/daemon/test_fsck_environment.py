"""Environment variables of another Spark: a local run ignores and names them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from daemon.fsck.spark_environment import LaunchEnvironment, applied, launch_environment
from tests.daemon.spark_homes import environment_without_spark

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
    master: str, environment: Mapping[str, str], *, home: Path | None = None
) -> LaunchEnvironment:
    return launch_environment(
        environment,
        is_here=master.startswith("local"),
        pyspark_home=Path(OUR_HOME),
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
    launch = launch_of("local[2]", {"JAVA_TOOL_OPTIONS": "-Xmx1g", "SPARK_REMOTE": ""})

    assert launch.ignored == ()
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


def test_a_run_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    before = dict(os.environ)

    with applied(launch_of("local", before)):
        assert os.environ["SPARK_HOME"] == OUR_HOME
        assert "SPARK_CONF_DIR" not in os.environ
    assert os.environ == before


# --- On a cluster ---------------------------------------------------------------------------------


def test_on_a_cluster_the_environment_is_used_except_for_spark_connect() -> None:
    environment = {"PATH": "/bin", "SPARK_CONF_DIR": "/etc/spark", "YARN_CONF_DIR": "/etc/yarn"}

    launch = launch_of("yarn", {**environment, "SPARK_REMOTE": "sc://127.0.0.1:1"})

    assert launch.variables == environment
    assert launch.ignored == ("SPARK_REMOTE",)


# --- Runs -----------------------------------------------------------------------------------------


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
    assert "PYTHONPATH" in ended.stderr


def test_a_local_run_names_the_variables_it_ignores(tmp_path: Path) -> None:
    ended = fsck_run(tmp_path, environment={"SPARK_HOME": "/opt/spark", "SPARK_CONF_DIR": "/c"})

    assert ended.returncode == 3, "no ZooKeeper answers"
    first, *_ = ended.stderr.splitlines()
    assert first == "ignored variables of another Spark: SPARK_CONF_DIR, SPARK_HOME"
