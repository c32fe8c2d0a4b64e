"""Starts of Spark itself, in environments that a host may have."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark import __version__

from tests.daemon.spark_homes import environment_without_spark, spark_home
from tests.spark_cluster import QUICK_TO_START

pytestmark = pytest.mark.timeout(600)  # a start of Spark, on a busy machine

ROOT = Path(__file__).parent.parent.parent


def opened(
    master: str,
    log: Path,
    environment: dict[str, str],
    *,
    start_timeout_s: float = 300.0,
    folder: Path | None = None,
    under: Sequence[str] = (),
) -> dict[str, str]:
    """Start Spark in a process of its own, because a process keeps its first JVM.

    Return the outcome. ``under``: a command that starts the process.
    """
    program = f"""
import json
from pathlib import Path
from auditor.fsck.spark import imported_pyspark, is_here, open_spark
from daemon.fsck.spark_environment import applied, launch_environment
from daemon.home import has_name
import os
master, log = {master!r}, Path({str(log)!r})
try:
    launch = launch_environment(
        os.environ,
        is_here=is_here(master),
        pyspark_home=imported_pyspark()[0],
        home=None if has_name() else log.parent,
    )
    with applied(launch):
        context = open_spark(
            master,
            {{
                "spark.driver.memory": "512m",
                "spark.driver.extraJavaOptions": {QUICK_TO_START!r},
            }},
            log=log,
            start_timeout_s={start_timeout_s},
        )
    print(json.dumps({{"sum": str(context.parallelize([1, 2], 1).sum())}}))
except Exception as error:
    print(json.dumps({{"error": str(error)}}))
"""
    ended = subprocess.run(
        [*under, sys.executable, "-c", program],
        env={**environment_without_spark(), "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not ended.stderr
    result: dict[str, str] = json.loads(ended.stdout)
    return result


def test_local_spark_starts_in_any_environment(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\nspark.eventLog.dir /nowhere\n"
    )
    environment = {
        "SPARK_HOME": "/nowhere",
        "SPARK_CONF_DIR": str(tmp_path),
        "SPARK_REMOTE": "sc://127.0.0.1:1",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "PYSPARK_PYTHON": "/nowhere/python",
        "PYSPARK_DRIVER_PYTHON": "/nowhere/python",
        "SPARK_LOCAL_IP": "",
        "JDK_JAVA_OPTIONS": "-Djdk.net.hosts.file=/dev/null",  # no host name resolves
    }

    assert opened("local[1]", tmp_path / "spark.log", environment) == {"sum": "3"}


NAMELESS = ("unshare", "--user", "--map-user=123456", "--map-group=123456")
"""Runs a command as a user id without an entry in the user database, as a container may."""


@pytest.mark.skipif(
    subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode != 0,
    reason="this host allows no user namespace",
)
def test_spark_starts_for_a_user_id_without_an_entry(tmp_path: Path) -> None:
    started = opened("local[1]", tmp_path / "log", {"HOME": "/nowhere"}, under=NAMELESS)

    assert started == {"sum": "3"}


def test_the_error_has_one_line_with_a_reason_and_the_log(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\nspark.eventLog.dir /nowhere\n"
    )
    log = tmp_path / "spark.log"

    told = opened("local-cluster[1,1,1024]", log, {"SPARK_CONF_DIR": str(tmp_path)})["error"]

    assert "Spark did not start: " in told
    assert "/nowhere does not exist" in told
    assert "check --master, --spark-conf, and the variables" in told
    assert str(log) in told
    assert "\n" not in told
    assert "\tat " in log.read_text()


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    home = spark_home(
        tmp_path / "home",
        f"spark-core_2.13-{__version__}.jar",
        script=f"sleep 600 &\necho $! > {pid}\nwait",
    )

    told = opened(
        "local-cluster[1,1,1024]",
        tmp_path / "spark.log",
        {"SPARK_HOME": str(home)},
        start_timeout_s=2,
    )["error"]

    assert "Spark did not start: it was not ready after 2 s; see also --start-within" in told
    assert not Path("/proc", pid.read_text().strip()).exists() or _is_zombie(pid.read_text())


def _is_zombie(pid: str) -> bool:
    return ") Z " in Path("/proc", pid.strip(), "stat").read_text()


def test_a_spark_in_the_parent_folder_is_not_used(tmp_path: Path) -> None:
    spark_home(tmp_path, script="echo another Spark")
    (tmp_path / "conf").mkdir()

    result = opened("local[1]", tmp_path / "spark.log", {}, folder=tmp_path / "conf")

    assert result == {"sum": "3"}


def test_variables_of_spark_submit_without_its_jvm_are_named(tmp_path: Path) -> None:
    submitted = {"PYSPARK_GATEWAY_PORT": "1", "PYSPARK_GATEWAY_SECRET": "x"}
    program = "from auditor.fsck.spark import submitted_spark; submitted_spark()"

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment_without_spark(), **submitted},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    last = ended.stderr.splitlines()[-1]
    assert "UnavailableError" in ended.stderr
    assert "PYSPARK_GATEWAY_PORT names, provides no Spark context" in ended.stderr, last
