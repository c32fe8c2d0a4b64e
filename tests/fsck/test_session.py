"""How Spark is set up, as far as that shows without starting it."""

import logging
import signal
import socket
import subprocess

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext, java_gateway

from auditor.fsck.spark.session import (
    _launch_undone,
    _require_master,
    on_this_machine,
    open_spark,
    stop_spark,
)
from daemon.local.ports import free_ports
from ledgers.errors import UnavailableError


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[4,2]"])
def test_on_one_machine_spark_listens_to_nobody_else(master: str) -> None:
    settings = on_this_machine(master)

    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.python.unix.domain.socket.enabled"] == "true"


@pytest.mark.parametrize("master", ["spark://localhost:7077", "local-cluster[2,1,1024]", "yarn"])
def test_executors_elsewhere_reach_the_driver(master: str) -> None:
    assert on_this_machine(master) == {}


def test_masters_that_nobody_reaches_are_told_at_once_each_with_the_reason() -> None:
    ports = free_ports(2)
    master = "spark://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    with pytest.raises(UnavailableError, match="no Spark master answers") as told:
        open_spark(master)

    for port in ports:
        assert f"127.0.0.1:{port}: [Errno 111] Connection refused" in str(told.value)


def test_one_master_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as standing_in:
        port = standing_in.getsockname()[1]

        (closed,) = free_ports(1)

        _require_master(f"spark://127.0.0.1:{closed},127.0.0.1:{port}")


@pytest.mark.parametrize("master", ["local[2]", "yarn", "spark://", "spark://host", "spark://h:p"])
def test_what_is_no_address_is_left_to_spark(master: str) -> None:
    _require_master(master)


@pytest.mark.parametrize("error", [Py4JError("is over"), ConnectionRefusedError(111, "refused")])
def test_a_session_of_which_nothing_is_left_is_stopped_quietly(error: Exception) -> None:
    class Ended:
        def stop(self) -> None:
            raise error

    stop_spark(Ended())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_the_start_of_a_session_ends_the_jvm_that_is_launched_for_it(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)  # other tests may have one
    processes: list[subprocess.Popen[bytes]] = []
    popen = vars(java_gateway)["Popen"]
    is_disabled = logging.root.manager.disable

    def start() -> None:
        with _launch_undone():
            processes.append(vars(java_gateway)["Popen"](["sleep", "600"]))
            raise error

    try:
        with pytest.raises(error):
            start()
    finally:
        logging.disable(is_disabled)

    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    assert vars(java_gateway)["Popen"] is popen
