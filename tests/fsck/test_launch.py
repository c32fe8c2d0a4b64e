"""The JVM that is started for a Spark context: how it ends, and the errors of a failed start."""

import logging
import signal
import subprocess
from pathlib import Path

import pytest
from pyspark import SparkContext, java_gateway

from auditor.fsck.spark.session import first_error_line, launching, next_step

# --- Ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_during_the_start_kills_the_jvm(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)  # other tests may have one
    processes: list[subprocess.Popen[bytes]] = []
    popen = vars(java_gateway)["Popen"]
    is_disabled = logging.root.manager.disable

    def start() -> None:
        with launching():
            processes.append(vars(java_gateway)["Popen"](["sleep", "600"]))
            raise error

    try:
        with pytest.raises(error):
            start()
    finally:
        logging.disable(is_disabled)

    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    assert vars(java_gateway)["Popen"] is popen


def test_a_jvm_that_never_reports_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)

    with launching(timeout_s=0.2) as launch:
        process = vars(java_gateway)["Popen"](["sleep", "600"])
        process.wait()

    assert launch.is_given_up
    assert process.poll() == -signal.SIGKILL


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("WARN x\nException in thread main\n\tat a.b\n", "Exception in thread main"),
        ("Welcome to\n   version 3.5.1\n\n", "version 3.5.1"),
        ("", None),
        (None, None),
    ],
)
def test_the_first_error_line_is_found(
    tmp_path: Path, content: str | None, line: str | None
) -> None:
    log = tmp_path / "spark.log"
    if content is not None:
        log.write_text(content)

    assert first_error_line(log) == line


@pytest.mark.parametrize(
    ("reason", "suspects", "step"),
    [
        pytest.param(
            "java.net.UnknownHostException: host-1: Name or service not known",
            [],
            "set SPARK_LOCAL_IP to an address of this host",
            id="a host name that does not resolve",
        ),
        pytest.param(
            "java.io.FileNotFoundException: File file:/nowhere does not exist",
            ["SPARK_CONF_DIR"],
            "such as spark.eventLog.dir, in spark-defaults.conf in SPARK_CONF_DIR",
            id="a folder that a file in SPARK_CONF_DIR names",
        ),
        pytest.param(
            "Unrecognized option: -Xfoo",
            ["SPARK_CONF_DIR", "JAVA_TOOL_OPTIONS"],
            "correct spark.driver.memory in --spark-conf; also check JAVA_TOOL_OPTIONS in the",
            id="a JVM that refuses its options",
        ),
        pytest.param(
            "something else",
            ["SPARK_HOME", "HADOOP_CONF_DIR"],
            "and --spark-conf; also check SPARK_HOME, HADOOP_CONF_DIR in the environment",
            id="any other reason",
        ),
        pytest.param("something else", [], "check --master and --spark-conf", id="no variables"),
    ],
)
def test_the_next_step_names_the_variable_or_the_file(
    reason: str, suspects: list[str], step: str
) -> None:
    assert step in next_step(reason, suspects)
