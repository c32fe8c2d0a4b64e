"""``bookmender disable`` and ``bookmender enable``."""

import pytest

from daemon.operations.switch import switch_off, switch_on
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import PATHS


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDuplicateEnDisableAutoRecovery",
    verdict="other",
    why="it is no error, and the command says so",
)
@in_virtual_time
async def test_disabling_or_enabling_twice_changes_nothing() -> None:
    cluster = await Cluster.start()
    seen, path = visiting(cluster), PATHS.disable

    assert [(await switch_off(seen)).has_changed for _ in range(2)] == [True, False]
    assert await cluster.store.exists(path) is not None
    assert [(await switch_on(seen)).has_changed for _ in range(2)] == [True, False]
    assert await cluster.store.exists(path) is None
