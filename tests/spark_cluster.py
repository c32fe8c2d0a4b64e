"""Spark on loopback: sessions as small as possible, and a standalone cluster of processes."""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from auditor.fsck.spark import open_spark
from daemon.local.ports import free_ports
from daemon.local.processes import Child, stop_all, wait_until

START_TIMEOUT_S = 60.0
"""Deadline for the start of a JVM on a busy machine."""
STOP_TIMEOUT_S = 10.0
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
HOST = "127.0.0.1"

QUICK_TO_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options of a JVM that does little. They halve the work of its start."""
SMALL = {
    "spark.driver.extraJavaOptions": QUICK_TO_START,
    "spark.executor.extraJavaOptions": QUICK_TO_START,
    "spark.driver.bindAddress": HOST,
    "spark.driver.host": HOST,
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
}


@contextmanager
def spark_session(
    master: str = "local[2]", settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Open a session. A process can have one at a time."""
    os.environ["SPARK_LOCAL_IP"] = HOST
    spark = SparkSession(open_spark(master, {**SMALL, **(settings or {})}))
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def standalone_spark(
    folder: Path, *, worker_count: int = 2, cores: int = 1
) -> Iterator["StandaloneSpark"]:
    """Start a master and its workers, each a process."""
    spark = StandaloneSpark(folder)
    try:
        spark.start(worker_count=worker_count, cores=cores)
        yield spark
    finally:
        spark.stop()


class StandaloneSpark:
    """A standalone Spark cluster. The logs of its processes are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._web_port = free_ports(2)
        self._children: list[Child] = []

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self._port}"

    def start(self, *, worker_count: int, cores: int) -> None:
        ports = ["--port", str(self._port), "--webui-port", str(self._web_port)]
        self._start("master", [MASTER, "--host", HOST, *ports])
        wait_until(lambda: self._workers() is not None, self._children, timeout_s=START_TIMEOUT_S)
        size = ["--cores", str(cores), "--memory", "1g"]
        for number in range(worker_count):
            place = ["--host", HOST, "--work-dir", str(self._folder / f"work-{number}")]
            self._start(f"worker-{number}", [WORKER, *place, *size, self.master])
        wait_until(
            lambda: self._workers() == worker_count, self._children, timeout_s=START_TIMEOUT_S
        )

    def stop(self) -> None:
        stop_all(list(reversed(self._children)), timeout_s=STOP_TIMEOUT_S)

    def executors(self) -> list[int]:
        """Return the process ids of the running executors of all applications."""
        workers = {child.pid for child in self._children}
        return [pid for pid, parent in _parents().items() if parent in workers]

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_TO_START,
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [str(home / "bin" / "spark-class"), *arguments]
        log = self._folder / f"{name}.log"
        self._children.append(Child(f"Spark's {name}", command, log=log, environment=environment))

    def _workers(self) -> int | None:
        """Return the number of registered workers; None while the master does not answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._web_port}/json/", timeout=2) as page:
                alive: int = json.load(page)["aliveworkers"]
                return alive
        except (OSError, json.JSONDecodeError):
            return None


def _parents() -> dict[int, int]:
    """Return the parent of every running process. Zombies of start scripts are left out."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[0] != "Z":
            found[int(stat.parent.name)] = int(fields[1])
    return found
