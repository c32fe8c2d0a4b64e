"""Fixtures for tests that ask Java. A file needs ``pytest_plugins = ["tests.java.fixtures"]``."""

import os
from collections.abc import Iterator

import pytest

from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from ledgers.errors import SettingsError
from tests.java.build import compiled_classes
from tests.java.tool import JavaTool


@pytest.fixture(scope="session")
def java(_prerequisites: None) -> Iterator[JavaTool]:
    """Yield one JVM for the whole run.

    Without a JDK the tests are skipped here, but fail in CI, which promises one.
    """
    try:
        compiled_classes(BOOKKEEPER_DEFAULT, Java.find())
    except SettingsError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with JavaTool() as tool:
        yield tool
