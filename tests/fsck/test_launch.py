"""The JVM that is started for a Spark context: how it ends."""

import logging
import signal
import subprocess

import pytest
from pyspark import SparkContext, java_gateway

from auditor.fsck.spark import launching


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
