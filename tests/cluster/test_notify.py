"""Every client learns the latest version of each of its objects, whatever is killed."""

from pathlib import Path

import pytest

from tests.notify_demo import notify_and_compare

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="feed"), pytest.mark.timeout(480)]


def test_clients_learn_everything_while_servers_nodes_and_bookies_are_killed(
    tmp_path: Path,
) -> None:
    notify_and_compare(tmp_path, trouble_s=20.0)
