"""The metadata of a cluster is restored from its archive, and Java's client reads everything."""

from pathlib import Path

import pytest

from tests.restore_demo import restore_and_read

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="feed"), pytest.mark.timeout(480)]


def test_no_acknowledged_entry_is_lost_with_zookeeper(tmp_path: Path) -> None:
    restore_and_read(tmp_path)
