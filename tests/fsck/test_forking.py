"""What workers on this machine are forked from."""

import sys
from collections.abc import Iterable, Iterator

import pytest

from auditor.fsck.spark import forking
from tests.spark_cluster import spark_session

LIB = "/env/site-packages/pyspark/python/lib"


def test_what_an_installed_pyspark_has_in_archives_is_taken_from_where_it_is_compiled() -> None:
    archives = [f"{LIB}/pyspark.zip", f"{LIB}/py4j-0.10-src.zip"]
    others = ["", "/somebody/elses.zip", "/usr/lib/python311.zip", "/env/site-packages"]

    assert forking.without_archives([*archives, *others]) == others


def test_archives_of_a_pyspark_that_is_not_installed_are_all_there_is_of_it() -> None:
    places = [f"{LIB}/pyspark.zip", "/another/site-packages"]

    assert forking.without_archives(places) == places


@pytest.mark.cluster
def test_a_worker_on_this_machine_has_everything_imported_when_it_is_forked() -> None:
    with spark_session("local[1]") as spark:
        seen = spark.sparkContext.parallelize([0], 1).mapPartitions(what_a_worker_has).collect()

    worker_file, looks_file = seen
    assert looks_file
    assert ".zip" not in worker_file


def what_a_worker_has(_: Iterable[int]) -> Iterator[str]:
    """The files of PySpark's worker module and of what looks at ledgers; empty for what is not imported."""
    for name in (forking.WORKER, forking.LOOKS):
        yield getattr(sys.modules.get(name), "__file__", None) or ""
