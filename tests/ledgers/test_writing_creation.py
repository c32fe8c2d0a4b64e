"""Creating a ledger, and what prevents it."""

from collections.abc import Sequence

import pytest

from ledgers.errors import NodeExistsError, NotEnoughBookiesError
from ledgers.model import DigestType, LedgerMetadata, Segment
from ledgers.store import Operation
from tests.ledgers.memory_cluster import BOOKIES, PASSWORD, MemoryCluster
from tests.memory.store import Fault as StoreFault
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time


@in_virtual_time
async def test_a_new_ledger_is_open_empty_and_as_requested() -> None:
    cluster = MemoryCluster()

    async with cluster.writer(
        ensemble_size=4,
        write_quorum=3,
        ack_quorum=2,
        digest_type=DigestType.HMAC,
        custom=(("app", b"demo"),),
        has_ctime=True,
    ) as writer:
        metadata = await cluster.metadata(writer.ledger_id)

    (segment,) = metadata.segments
    assert len(set(segment.ensemble)) == 4
    assert metadata == LedgerMetadata(
        ensemble_size=4,
        write_quorum=3,
        ack_quorum=2,
        digest_type=DigestType.HMAC,
        password=PASSWORD,
        custom=(("app", b"demo"),),
        ctime_ms=cluster.clock.wall_ms(),
        c_token=metadata.c_token,
        segments=(Segment(first_entry_id=0, ensemble=segment.ensemble),),
    )


@pytest.mark.parametrize("fault", StoreFault)
@in_virtual_time
async def test_a_create_whose_reply_is_lost_makes_one_ledger(fault: StoreFault) -> None:
    cluster = MemoryCluster()
    is_lost = False

    def lose(store: MemoryStore, operations: Sequence[Operation]) -> StoreFault | None:
        nonlocal is_lost
        is_create = any("/L" in operation.path for operation in operations)
        if not is_create or is_lost:
            return None
        is_lost = True
        return fault

    cluster.tree.faults = lose

    async with cluster.writer() as writer:
        await writer.add(b"entry")
        assert is_lost

    assert sum("/L" in path for path in cluster.tree.snapshot()) == 1


@in_virtual_time
async def test_an_existing_id_is_an_error() -> None:
    cluster = MemoryCluster()
    async with cluster.writer(ledger_id=5):
        pass

    with pytest.raises(NodeExistsError):
        async with cluster.writer(ledger_id=5):
            pass


@in_virtual_time
async def test_with_too_few_bookies_no_ledger_is_made() -> None:
    cluster = MemoryCluster()
    cluster.down = set(BOOKIES[2:])

    with pytest.raises(NotEnoughBookiesError):
        async with cluster.writer(ensemble_size=3):
            pass
