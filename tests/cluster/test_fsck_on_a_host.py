"""``bookmender fsck run`` on a host with another Spark, in a pod."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.fsck_ledgers import make_ledgers
from tests.daemon.spark_homes import environment_without_spark
from tests.spark_cluster import QUICK_TO_START

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="fsck"), pytest.mark.timeout(600)]


def test_a_local_run_ignores_the_spark_of_the_host(uri: str, tmp_path: Path) -> None:
    ledgers = asyncio.run(make_ledgers(uri))
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\nspark.eventLog.dir /nowhere\n"
    )
    of_pulsar = uri.partition("://")[2]
    environment = {
        "BOOKMENDER_METADATA_SERVICE_URI": f" 'metadata-store:zk:{of_pulsar}' ",
        "BOOKMENDER_SERVICE_HOST": "10.96.0.7",
        "BOOKMENDER_PORT": "tcp://10.96.0.7:8080",
        "SPARK_HOME": "/nowhere",
        "SPARK_CONF_DIR": str(tmp_path),
        "SPARK_REMOTE": "sc://127.0.0.1:1",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "PYSPARK_PYTHON": "/nowhere/python",
    }

    options = [
        "--level",
        "full",
        "--master",
        "local[1]",
        "--spark-conf",
        "spark.driver.memory=512m",
        "--spark-conf",
        f"spark.driver.extraJavaOptions={QUICK_TO_START}",
    ]

    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "daemon",
            "fsck",
            "run",
            "-o",
            "json",
            "--output",
            str(tmp_path),
            *options,
        ],
        env={**environment_without_spark(), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)["verdicts"]["whole"] == len(ledgers.whole)
    assert ended.stderr.splitlines()[0] == (
        "ignored variables of another Spark: PYSPARK_PYTHON, PYSPARK_SUBMIT_ARGS, SPARK_CONF_DIR, "
        "SPARK_HOME, SPARK_REMOTE"
    )
    assert "Traceback" not in ended.stderr
    assert "\tat " not in ended.stderr
