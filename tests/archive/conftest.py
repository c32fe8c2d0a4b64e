"""The server of S3 that the tests of a file share."""

from collections.abc import Iterator

import pytest

from tests.archive.places import S3Server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server
