"""What workers on this machine are forked from."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from daemon.fsck import forking
from daemon.local.processes import wait_until
from tests.spark_cluster import spark_session

LIB = "/env/site-packages/pyspark/python/lib"


def test_what_an_installed_pyspark_has_in_archives_is_taken_from_where_it_is_compiled() -> None:
    archives = [f"{LIB}/pyspark.zip", f"{LIB}/py4j-0.10-src.zip"]
    others = ["", "/somebody/elses.zip", "/usr/lib/python311.zip", "/env/site-packages"]

    assert forking.without_archives([*archives, *others]) == others


def test_archives_of_a_pyspark_that_is_not_installed_are_all_there_is_of_it() -> None:
    places = [f"{LIB}/pyspark.zip", "/another/site-packages"]

    assert forking.without_archives(places) == places


def test_a_process_that_spark_never_came_for_ends_with_the_run() -> None:
    with forking.started_ahead() as settings:
        folder = Path(socket_of(settings)).parent
        (ahead,) = children_named("daemon.fsck.forking")

    assert not folder.exists()
    assert not Path(f"/proc/{ahead}").exists()


@pytest.mark.cluster
def test_a_worker_on_this_machine_is_forked_from_the_process_that_was_started_ahead() -> None:
    with forking.started_ahead() as settings:
        worker = what_a_worker_has({**settings, "spark.executorEnv.FROM_SPARK": "here"})

    assert worker["parent of parent"] == str(os.getpid())
    assert worker["from Spark"] == "here"
    assert worker[forking.LOOKS]
    assert ".zip" not in worker[forking.WORKER]


@pytest.mark.cluster
def test_where_none_was_started_ahead_or_it_has_ended_sparks_own_process_does_it_all() -> None:
    with forking.started_ahead() as settings:
        os.unlink(socket_of(settings))
        worker = what_a_worker_has(settings)

    assert worker["parent of parent"] != str(os.getpid())
    assert worker[forking.LOOKS]
    assert ".zip" not in worker[forking.WORKER]


def socket_of(settings: Mapping[str, str]) -> str:
    path = settings[f"spark.executorEnv.{forking.AHEAD}"]
    wait_until(lambda: Path(path).exists(), [], timeout_s=30)
    return path


def children_named(module: str) -> list[int]:
    """Processes of ours that run the module."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()]


def what_a_worker_has(settings: Mapping[str, str]) -> dict[str, str]:
    with spark_session("local[1]", settings) as spark:
        seen = spark.sparkContext.parallelize([0], 1).mapPartitions(_look_around).collect()
    return dict(seen)


def _look_around(_: Iterable[int]) -> Iterator[tuple[str, str]]:
    """The files of PySpark's worker module and of what looks at ledgers, empty for what is not
    imported; and more."""
    for name in (forking.WORKER, forking.LOOKS):
        yield name, getattr(sys.modules.get(name), "__file__", None) or ""
    parents = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    yield "parent of parent", parents[1]
    yield "from Spark", os.environ.get("FROM_SPARK", "")
