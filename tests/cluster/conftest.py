"""Real clusters for the tests: one that all share, and others to be broken."""

import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.local.spec import BOOKIES_DEFAULT
from ledgers.errors import BookmenderError
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer, running_zookeeper

MakeCluster = Callable[..., LocalCluster]
"""Takes what LocalCluster.start takes, but for the folder."""

SHARED_BOOKIES = 4
SESSION_TIMEOUT_S = 4.0
"""Of bookies that tests kill: so long they stay registered."""
_running: list[LocalCluster] = []


@pytest.fixture(scope="session")
def _prerequisites() -> None:
    """Java and the jars. Without them tests are skipped here, but fail where CI promises them."""
    try:
        jars.spark_jars_folder()
        jars.fetch(jars.BOOKKEEPER_DEFAULT, Java.find())
    except BookmenderError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no local cluster: {error}")
        pytest.skip(f"no local cluster: {error}")


@pytest.fixture(scope="session")
def cluster(
    _prerequisites: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Shared by the whole run, so leave its bookies alone: make your own ledgers, kill nothing."""
    options = {"bookies": SHARED_BOOKIES, "session_timeout_s": PATIENT_SESSION_S}
    with _start(tmp_path_factory.mktemp("shared-cluster"), options) as shared:
        yield shared
    _running.remove(shared)


@pytest.fixture
def make_cluster(
    _prerequisites: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeCluster]:
    """Clusters to be broken, stopped after the test."""
    made: list[LocalCluster] = []

    def make(**options: Any) -> LocalCluster:
        folder = tmp_path_factory.mktemp("cluster")
        made.append(_start(folder, {"session_timeout_s": SESSION_TIMEOUT_S} | options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
        _running.remove(cluster)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """A ZooKeeper server alone. Tests may kill it, and then start it again."""
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def no_session_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "zookeeper"] == []


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    """Of the file's ``module_cluster``, over the default ones: a file that wants others has its
    own."""
    return {}


@pytest.fixture(scope="module")
def module_cluster(
    _prerequisites: None,
    tmp_path_factory: pytest.TempPathFactory,
    cluster_options: dict[str, Any],
) -> Iterator[LocalCluster]:
    """One to be broken that the tests of a file share: each leaves it whole."""
    defaults = {"bookies": BOOKIES_DEFAULT, "session_timeout_s": SESSION_TIMEOUT_S}
    options = defaults | cluster_options
    with _start(tmp_path_factory.mktemp("module-cluster"), options) as shared:
        yield shared
    _running.remove(shared)


@pytest.fixture(scope="module")
def uri(module_cluster: LocalCluster) -> str:
    return module_cluster.metadata_service_uri


def _start(folder: Path, options: dict[str, Any]) -> LocalCluster:
    cluster = LocalCluster.start(folder, **options)
    _running.append(cluster)
    return cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test says where the servers' logs are."""
    report = yield
    if report.failed:
        for cluster in _running:
            report.sections.append(("logs of the cluster", str(cluster.logs)))
    return report
