"""A worker may read a mark before it learns of the change for which the mark was made."""

import asyncio

import pytest

from ledgers.registration import BookieView
from replication.repair import OutcomeKind
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, Node
from tests.replication.repairs import repair_with


def slow_to_see(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let reads of the list of bookies take a second, and count them."""
    registration, reads = node.views._registration, []
    read = registration.read

    async def late() -> BookieView:
        reads.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        return await read()

    monkeypatch.setattr(registration, "read", late)
    return reads


async def test_rule_s6_a_bookie_that_still_answers_may_be_unregistered(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut off from ZooKeeper it may be lost soon, and no auditor would mark the ledger again."""
    await cluster.write_ledger((B1, B2, B3))
    async with cluster.node() as node:
        slow_to_see(node, monkeypatch)
        await cluster.unregister(B2)
        await cluster.mark(B2)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_bookie_registered_as_before_needs_no_second_read(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B2)
    async with cluster.node() as node:
        await asyncio.sleep(1)  # it reads the list when it begins
        reads = slow_to_see(node, monkeypatch)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert reads == []


@pytest.mark.parametrize("is_made_anew", [True, False])
async def test_the_verdict_uses_the_contents_of_a_recreated_mark(is_made_anew: bool) -> None:
    """The new mark has the version of the one that was read, but other contents."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    finding = (
        b'{"version": 1, "check": "fsck", "bookies": ["%s", "%s"], "detail": "", "found_ms": 1}'
    )
    data = finding.replace(b"%s", B1.encode(), 1).replace(b"%s", B2.encode(), 1)
    await cluster.store.create(PATHS.finding(LEDGER), data, with_parents=True)
    await cluster.mark(B1)
    async with cluster.node() as node:
        queued = await node.queued()
        if is_made_anew:
            await cluster.store.delete(PATHS.mark(LEDGER))
            await cluster.mark(B2)
        lease = await node.queue.lease(queued)
        assert lease is not None

        assert await node.queue.found_bad(lease) == ({B1, B2} if is_made_anew else {B1})
