"""Metadata near the largest request that ZooKeeper accepts: one clear reason, and no useless
copy."""

import asyncio

import pytest

from ledgers.model import LedgerState
from replication.reasons import Reason
from replication.repair import OutcomeKind
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, working
from tests.replication.repairs import repair_with

NEARLY_TOO_LARGE = (("x", b"y" * 999_400),)


async def large_ledger(state: LedgerState = LedgerState.CLOSED) -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), starts=(0, 5), custom=NEARLY_TOO_LARGE, state=state
    )
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


@pytest.mark.parametrize("state", [LedgerState.CLOSED, LedgerState.OPEN])
async def test_a_ledger_with_too_large_metadata_is_not_copied(state: LedgerState) -> None:
    cluster = await large_ledger(state)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(3_600)
        note = await node.notes.read(LEDGER)

    assert cluster.bookies.copied_count == 0
    assert await cluster.marked() == [LEDGER]
    if state is LedgerState.CLOSED:
        assert note is not None
        assert note.reason is Reason.WRITE_REFUSED
        assert note.blocked.facts.request_bytes_max == 1_000_000
        assert note.blocked.facts.metadata_bytes


async def test_it_is_repaired_where_the_limit_allows_it() -> None:
    cluster = await large_ledger()
    async with cluster.node() as node:
        node.store.request_bytes_max = 10_000_000

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_whole_ledger_is_unmarked_whatever_its_metadatas_size() -> None:
    cluster = await large_ledger()
    await cluster.revive(B2)

    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()
