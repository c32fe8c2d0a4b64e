"""The servers of the stores under test."""

import os
from collections.abc import Iterator

import pytest

from ledgers.errors import SettingsError
from tests.postgresql_server import find_binaries, running_postgresql
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Yield the URL of a database. Without PostgreSQL tests are skipped, except where .ci/run has
    found it."""
    try:
        find_binaries()
    except SettingsError as error:
        if os.environ.get("TEST_POSTGRESQL") == "required":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with running_postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server
