"""Cases of Java's tests of its ReplicationWorker that no other test of repairs covers."""

import pytest

from ledgers.model import LedgerState
from replication.repair import OutcomeKind
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER
from tests.replication.repairs import repair


@pytest.mark.compat(
    "BookieWriteLedgerTest.testReadLacNotSameWithMetadataLedgerReplication",
    verdict="better",
    why="a new segment proves that all earlier entries are acknowledged, whatever LAC the bookies "
    "report; no ledger is fenced",
)
async def test_all_fragments_before_an_empty_last_segment_are_repaired(cluster: Cluster) -> None:
    """The bookies of the last segment report an old LAC."""
    await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=9, ack_quorum=2, state=LedgerState.OPEN
    )
    await cluster.kill(B2)

    outcome = await repair(cluster)

    (_, other, _), last = await cluster.ensembles()
    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert other not in {B1, B2, B3, B4}
    assert last == (B1, B4, B3)
    assert metadata.state is LedgerState.OPEN
    assert all(cluster.good_copies(LEDGER, metadata, entry_id) == 2 for entry_id in range(10))
    await cluster.assert_queue_empty()
