"""Environment variables of another Spark: not heeded on this machine, named where a cluster cannot do with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import __version__

from daemon.fsck.environment import check_for_cluster, for_this_machine, spark_environment
from ledgers.errors import SettingsError

VERSION = "4.3.0"
CLUSTER = "spark://127.0.0.1:7077"
OTHERS = {
    "SPARK_HOME": "/opt/spark",
    "SPARK_CONF_DIR": "/etc/spark",
    "SPARK_REMOTE": "sc://127.0.0.1:1",
    "SPARK_SUBMIT_OPTS": "-Xmx1k",
    "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
    "HADOOP_CONF_DIR": "/etc/hadoop",
}

# --- The environment ------------------------------------------------------------------------------


def test_on_this_machine_nothing_of_another_spark_is_heeded() -> None:
    environment = {"PATH": "/bin", "SPARK_LOCAL_DIRS": "/data/tmp", **OTHERS}

    launched = for_this_machine(environment)

    assert launched == {
        "PATH": "/bin",
        "SPARK_LOCAL_DIRS": "/data/tmp",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def test_a_run_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    before = dict(os.environ)

    with spark_environment("local", is_here=True) as variables:
        assert not variables
        assert "SPARK_HOME" not in os.environ
    assert os.environ == before


def test_on_a_cluster_the_environment_is_heeded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")

    with spark_environment("yarn", is_here=False) as variables:
        assert "SPARK_CONF_DIR" in variables
        assert os.environ["SPARK_CONF_DIR"] == "/etc/spark"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SPARK_REMOTE": "sc://127.0.0.1:1"}, "unset it, and name the cluster's master"),
        (
            {"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"},
            "PYSPARK_SUBMIT_ARGS has --master",
        ),
        ({"PYSPARK_SUBMIT_ARGS": "--remote=sc://h pyspark-shell"}, "PYSPARK_SUBMIT_ARGS has"),
        ({"SPARK_HOME": "/nowhere"}, "SPARK_HOME is /nowhere, which has no bin/spark-submit"),
    ],
)
def test_a_variable_with_which_no_cluster_is_reached_is_named(
    environment: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        check_for_cluster(CLUSTER, environment, version=VERSION)


def spark_home(folder: Path, *jars: str, script: str = "") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "jars").mkdir()
    submit = folder / "bin/spark-submit"
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    for jar in jars:
        (folder / "jars" / jar).touch()
    return folder


@pytest.mark.parametrize(
    ("jars", "named"),
    [([], "no Spark"), (["spark-core_2.12-3.5.1.jar"], "which has Spark 3.5.1: unset SPARK_HOME")],
)
def test_a_home_of_another_spark_is_named(tmp_path: Path, jars: list[str], named: str) -> None:
    home = spark_home(tmp_path, *jars)

    with pytest.raises(SettingsError, match=named):
        check_for_cluster(CLUSTER, {"SPARK_HOME": str(home)}, version=VERSION)


@pytest.mark.parametrize("version", [VERSION, f"{VERSION}-amzn-0"])
def test_a_home_of_the_same_spark_is_used(tmp_path: Path, version: str) -> None:
    home = spark_home(tmp_path, f"spark-core_2.13-{version}.jar")

    check_for_cluster(CLUSTER, {"SPARK_HOME": str(home)}, version=VERSION)


# --- On Spark itself ------------------------------------------------------------------------------


def opened(master: str, log: Path, environment: dict[str, str]) -> dict[str, str]:
    """What becomes of a start in a process of its own: a process keeps the JVM of its first."""
    program = f"""
import json
from pathlib import Path
from auditor.fsck.spark.session import is_here, open_spark
from daemon.fsck.environment import spark_environment
master, log = {master!r}, Path({str(log)!r})
try:
    with spark_environment(master, is_here=is_here(master)) as variables:
        context = open_spark(
            master, {{"spark.driver.memory": "512m"}}, log=log, variables=variables
        )
    print(json.dumps({{"sum": str(context.parallelize([1, 2], 1).sum())}}))
except Exception as error:
    print(json.dumps({{"error": str(error)}}))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not ended.stderr
    result: dict[str, str] = json.loads(ended.stdout)
    return result


def test_on_this_machine_spark_starts_whatever_the_environment_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\nspark.eventLog.dir /nowhere\n"
    )
    environment = {
        "SPARK_HOME": "/nowhere",
        "SPARK_CONF_DIR": str(tmp_path),
        "SPARK_REMOTE": "sc://127.0.0.1:1",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "SPARK_LOCAL_IP": "",
        "JDK_JAVA_OPTIONS": "-Djdk.net.hosts.file=/dev/null",  # no host name resolves
    }

    assert opened("local[1]", tmp_path / "spark.log", environment) == {"sum": "3"}


def test_a_script_that_ends_and_says_nothing_is_no_spark(tmp_path: Path) -> None:
    home = spark_home(
        tmp_path / "home", f"spark-core_2.13-{__version__}.jar", script="echo version 3.5.1"
    )
    log = tmp_path / "spark.log"

    told = opened("local-cluster[1,1,1024]", log, {"SPARK_HOME": str(home)})["error"]

    assert "Spark did not start: version 3.5.1; " in told
    assert "what SPARK_HOME of the environment says?" in told
    assert str(log) in told


def test_the_reason_that_spark_has_is_told_without_its_traces(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\nspark.eventLog.dir /nowhere\n"
    )
    log = tmp_path / "spark.log"

    told = opened("local-cluster[1,1,1024]", log, {"SPARK_CONF_DIR": str(tmp_path)})["error"]

    assert "/nowhere does not exist" in told
    assert "what SPARK_CONF_DIR of the environment says?" in told
    assert "\n" not in told
    assert "\tat " in log.read_text()
