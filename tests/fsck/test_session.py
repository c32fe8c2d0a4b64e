"""How Spark is set up, as far as that shows without starting it."""

import pytest

from auditor.fsck.spark.session import on_this_machine


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[4,2]"])
def test_on_one_machine_spark_listens_to_nobody_else(master: str) -> None:
    settings = on_this_machine(master)

    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.python.unix.domain.socket.enabled"] == "true"


@pytest.mark.parametrize("master", ["spark://localhost:7077", "local-cluster[2,1,1024]", "yarn"])
def test_executors_elsewhere_reach_the_driver(master: str) -> None:
    assert on_this_machine(master) == {}
