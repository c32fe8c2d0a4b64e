"""The real servers that fakes are compared with."""

from collections.abc import Iterator

import pytest

from tests.contract.metadata_stores import Backend, MemoryBackend, ZooKeeperBackend
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Yield a server without bookies. Each test uses its own root."""
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("zookeeper", marks=pytest.mark.cluster)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return a place to open metadata stores on."""
    if request.param == "memory":
        return MemoryBackend()
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return ZooKeeperBackend(server)
