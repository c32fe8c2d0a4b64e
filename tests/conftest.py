"""Fixtures for all tests, the real clusters that they share, and runs in several processes."""

import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from daemon.local import jars, ports
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from ledgers.errors import BookmenderError
from tests.said import said as said
from tests.shared_clusters import SharedClusters

# No deadline: a busy machine is no failure. A failing example prints the blob that replays it.
settings.register_profile("bookmender", deadline=None, print_blob=True)
settings.load_profile("bookmender")

PORT_SHARES_MAX = 8
FOUR_BOOKIES = {"bookies": 4}
NO_HOME = "/dev/null/home"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="Write the texts of tests/*/said again.")


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C, and give each process of pytest-xdist a range of ports of its own.

    A bookie that is down leaves its port unused. No other process may take it in the meantime.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs like this. Programs that tests interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Commands find neither settings nor a local cluster of the user who runs the tests.
    os.environ |= {"XDG_CONFIG_HOME": NO_HOME, "XDG_DATA_HOME": NO_HOME}
    if (found := getattr(config, "workerinput", None)) is not None:
        count = min(found["workercount"], PORT_SHARES_MAX)
        share = (ports.PORT_LAST - ports.PORT_FIRST) // count
        ports.PORT_FIRST += int(found["workerid"].removeprefix("gw")) % count * share
        ports.PORT_LAST = ports.PORT_FIRST + share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files for several processes: those on real clusters, which take longest, come first.

    Files that use the same kind of cluster follow each other, so that it is running already.
    """
    if hasattr(config, "workerinput"):
        places: dict[str, tuple[bool, str]] = {}
        for item in items:
            is_in_memory, kind = places.get(_file(item), (True, ""))
            is_in_memory = is_in_memory and item.get_closest_marker("cluster") is None
            places[_file(item)] = (is_in_memory, max(kind, _cluster_kind(item)))
        items.sort(key=lambda item: places[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _cluster_kind(item: pytest.Item) -> str:
    """Return the options of the shared cluster that the test uses; empty if it uses none."""
    assert isinstance(item, pytest.Function)
    if "module_cluster" in item.fixturenames:
        return str(getattr(item.module, "CLUSTER", {}))
    return str(FOUR_BOOKIES) if "cluster" in item.fixturenames else ""


@pytest.fixture(autouse=True)
def fresh_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the logs, because loggers that a test set up would be kept for the next test."""
    configure = structlog.configure
    monkeypatch.setattr(
        structlog,
        "configure",
        lambda **given: configure(**given | {"cache_logger_on_first_use": False}),
    )
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def _prerequisites() -> None:
    """Require Java and the jars. Without them tests are skipped here, but fail in CI."""
    try:
        Java.find()
        jars.fetch()
    except BookmenderError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no local cluster: {error}")
        pytest.skip(f"no local cluster: {error}")


@pytest.fixture(scope="session")
def shared_clusters(
    _prerequisites: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedClusters]:
    shared = SharedClusters(lambda: tmp_path_factory.mktemp("cluster"))
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, shared_clusters: SharedClusters
) -> Iterator[LocalCluster]:
    """Yield a cluster of four bookies. Each test leaves all of them running."""
    with shared_clusters.lend(request.session, FOUR_BOOKIES) as cluster:
        yield cluster
