"""Helpers for the tests of repairs: one repair at a time, and events in the middle of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ledgers.bookies import Transfer
from ledgers.model import BookieId, LedgerState
from replication.orders import DrainOrder, MaintenanceWindow, drain_znode, maintenance_znode
from replication.reasons import Blocked
from replication.repair import SPLIT_AFTER_S, Outcome, OutcomeKind
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, Node

THREE = (B1, B2, B3)

VERSION_1: dict[str, Any] = {
    "metadata_version": 1,
    "password": None,
    "digest_type": None,
    "ack_quorum": 2,
    "has_ack_quorum": False,
}
"""Fields that such metadata has, and fields that it lacks."""


async def repair_with(node: Node) -> Outcome:
    """Lease the marked ledger and repair it."""
    return await node.repairer.repair(await node.lease())


async def repair(cluster: Cluster, **options: object) -> Outcome:
    """Mark the ledger, and let a node repair it. Its lock ends with the node's session."""
    if not await cluster.marked():
        await cluster.mark()
    async with cluster.node(**options) as node:  # type: ignore[arg-type]
        return await repair_with(node)


async def make_whole(cluster: Cluster, **options: object) -> None:
    """Repair the ledger: the node says that it is done, and every copy exists afterwards."""
    outcome = await repair(cluster, **options)
    assert outcome.kind is OutcomeKind.DONE, outcome
    await cluster.assert_whole()


async def repair_late(cluster: Cluster, *, local: BookieId | None = None) -> Outcome:
    """Let a node repair the ledger that has missed the absent bookies for long."""
    await cluster.mark()
    async with cluster.node(local=local) as node:
        await asyncio.sleep(SPLIT_AFTER_S)
        return await repair_with(node)


async def drain(cluster: Cluster, *bookies: BookieId, may_fence: bool = False) -> None:
    """Order a drain, as an operator's command does. The leader or the test makes the marks."""
    order = DrainOrder(since_ms=cluster.clock.wall_ms(), may_fence=may_fence)
    for bookie in bookies:
        await cluster.store.create(
            drain_znode(PATHS, bookie).path, order.to_json(), with_parents=True
        )


async def order_maintenance(cluster: Cluster, bookie: BookieId, *, for_s: float = 60) -> int:
    """Order a maintenance window and return its end in wall-clock milliseconds."""
    since_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=since_ms, until_ms=since_ms + int(1000 * for_s))
    path = maintenance_znode(PATHS, bookie).path
    await cluster.store.create(path, window.to_json(), with_parents=True)
    return window.until_ms


async def assert_still_marked(cluster: Cluster) -> None:
    assert await cluster.marked() == [LEDGER]


async def lost_b2(*bookies: BookieId) -> Cluster:
    """Return a marked ledger on B1, B2 and B3, of which B2 is lost."""
    cluster = await Cluster.start(*bookies)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


async def open_ledger(
    *ensembles: Sequence[BookieId],
    last: int = 9,
    starts: Sequence[int] = (0,),
    state: LedgerState = LedgerState.OPEN,
    ack_quorum: int = 2,
) -> Cluster:
    """Return a marked open ledger with write quorum 3."""
    cluster = await Cluster.start()
    await cluster.write_ledger(
        *(ensembles or (THREE,)),
        starts=starts,
        last=last,
        write_quorum=3,
        ack_quorum=ack_quorum,
        state=state,
    )
    await cluster.mark()
    return cluster


def watch_fencing(cluster: Cluster) -> list[BookieId]:
    """Return a list that grows by each bookie that is asked to fence."""
    fenced: list[BookieId] = []

    def note(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        if op is Op.READ_FENCING:
            fenced.append(bookie)
        return NO_FAULT

    cluster.bookies.faults = note
    return fenced


def once_while_copying(cluster: Cluster, action: Callable[[Transfer], Awaitable[None]]) -> None:
    """Run ``action`` right before the first entries are copied."""

    async def act(transfer: Transfer) -> None:
        if transfer.target is not None:
            cluster.bookies.before_transfer = None
            await action(transfer)

    cluster.bookies.before_transfer = act


def once_copied(cluster: Cluster, action: Callable[[Transfer], Awaitable[None]]) -> None:
    """Run ``action`` when the target has acknowledged its entries, before metadata names it."""

    async def act(transfer: Transfer) -> None:
        if transfer.target is not None:
            cluster.bookies.after_transfer = None
            await action(transfer)

    cluster.bookies.after_transfer = act


async def touch(cluster: Cluster) -> None:
    """Write the metadata as another client, without a change that matters."""
    versioned = await cluster.manager.read(LEDGER)
    await cluster.manager.write(LEDGER, versioned.metadata, read_as=versioned)


def blocked_by(outcome: Outcome) -> Blocked:
    """Return what blocks the repair, which must be blocked."""
    assert outcome.blocked is not None, outcome
    return outcome.blocked
