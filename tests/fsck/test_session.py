"""The set-up of Spark, as far as it can be tested without a start, and how its JVM ends."""

import logging
import signal
import socket
import subprocess

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext, java_gateway

from auditor.fsck.spark import _require_master, launching, on_this_machine, open_spark, stop_spark
from daemon.local.ports import free_ports
from ledgers.errors import UnavailableError


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[4,2]"])
def test_local_spark_listens_only_on_localhost(master: str) -> None:
    settings = on_this_machine(master)

    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.python.unix.domain.socket.enabled"] == "true"


@pytest.mark.parametrize("master", ["spark://localhost:7077", "local-cluster[2,1,1024]", "yarn"])
def test_a_cluster_master_has_no_local_settings(master: str) -> None:
    assert on_this_machine(master) == {}


def test_unreachable_masters_are_reported_with_their_errors() -> None:
    ports = free_ports(2)
    master = "spark://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    with pytest.raises(UnavailableError, match="no Spark master answers") as told:
        open_spark(master)

    for port in ports:
        assert f"127.0.0.1:{port}: [Errno 111] Connection refused" in str(told.value)


def test_one_reachable_master_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as standing_in:
        port = standing_in.getsockname()[1]

        (closed,) = free_ports(1)

        _require_master(f"spark://127.0.0.1:{closed},127.0.0.1:{port}")


@pytest.mark.parametrize("master", ["local[2]", "yarn", "spark://", "spark://host", "spark://h:p"])
def test_a_master_that_is_no_address_is_left_to_spark(master: str) -> None:
    _require_master(master)


@pytest.mark.parametrize("error", [Py4JError("is over"), ConnectionRefusedError(111, "refused")])
def test_stopping_an_ended_session_raises_nothing(error: Exception) -> None:
    class Ended:
        def stop(self) -> None:
            raise error

    stop_spark(Ended())  # type: ignore[arg-type]


# --- The JVM that is started ----------------------------------------------------------------------


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
