"""How Spark is set up, as far as that shows without starting it."""

import pytest

from auditor.fsck.spark.session import addresses


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[4,2]"])
def test_on_one_machine_spark_listens_to_nobody_else(master: str) -> None:
    assert addresses(master) == {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }


@pytest.mark.parametrize("master", ["spark://localhost:7077", "local-cluster[2,1,1024]", "yarn"])
def test_executors_elsewhere_reach_the_driver(master: str) -> None:
    assert addresses(master) == {}
