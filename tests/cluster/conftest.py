"""Real clusters for the tests.

A test module may define ``CLUSTER``: options of its cluster that differ from ``SHARED_OPTIONS``.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.client import BookieClient
from ledgers.connection import ConnectionSettings
from tests.shared_clusters import SharedClusters
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

MakeCluster = Callable[..., LocalCluster]
"""Takes what LocalCluster.start takes, except the folder."""

SESSION_TIMEOUT_S = 4.0
"""For bookies whose session expires in a test. A killed bookie stays registered for this long."""
CONNECT_TIMEOUT_S = 30.0
_made: list[LocalCluster] = []


@pytest.fixture(scope="session", autouse=True)
def patient_connections() -> Iterator[None]:
    """Let clients in this process wait for connections while the machine is busy.

    The daemons under test are other processes and keep the normal timeout.
    """
    settings = ConnectionSettings(connect_timeout_s=CONNECT_TIMEOUT_S)
    defaults = BookieClient.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "settings", settings)
        yield


@pytest.fixture(scope="module")
def cluster_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of ``module_cluster``."""
    options: dict[str, Any] = getattr(request.module, "CLUSTER", {})
    return options


@pytest.fixture(scope="module")
def module_cluster(
    request: pytest.FixtureRequest,
    shared_clusters: SharedClusters,
    cluster_options: dict[str, Any],
) -> Iterator[LocalCluster]:
    """The cluster of a file. Tests may break it; each leaves all bookies running."""
    with shared_clusters.lend(request.session, cluster_options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def uri(module_cluster: LocalCluster) -> str:
    return module_cluster.metadata_service_uri


@pytest.fixture
def make_cluster(
    _prerequisites: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeCluster]:
    """Yield a function that starts clusters for one test. They are stopped after the test."""

    def make(**options: Any) -> LocalCluster:
        options = {"session_timeout_s": SESSION_TIMEOUT_S} | options
        _made.append(LocalCluster.start(tmp_path_factory.mktemp("cluster"), **options))
        return _made[-1]

    yield make
    while _made:
        _made.pop().stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Yield a ZooKeeper server without bookies. Tests may kill it and start it again."""
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def no_session_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "zookeeper"] == []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the paths of the servers' logs to the report of a failed test."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        clusters = [each for each in item.funcargs.values() if isinstance(each, LocalCluster)]
        for cluster in [*clusters, *_made]:
            report.sections.append(("logs of the cluster", str(cluster.logs)))
    return report
