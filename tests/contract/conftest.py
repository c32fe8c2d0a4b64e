"""The real things that fakes are compared with."""

from collections.abc import Iterator

import pytest

from tests.contract.metadata_stores import MemoryWorld, World, ZooKeeperWorld
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """A server without bookies; each test keeps to a root of its own."""
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("zookeeper", marks=pytest.mark.cluster)])
def world(request: pytest.FixtureRequest) -> World:
    """Somewhere to open metadata stores on."""
    if request.param == "memory":
        return MemoryWorld()
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return ZooKeeperWorld(server)
