"""Several workers on one queue, and the locks that they request."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from ledgers.store import Create, Operation
from replication import znodes
from replication.ledger_record import WaitingNote
from replication.settings import ReplicationSettings
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, Node, working

THREE = (B1, B2, B3)


def lockers(cluster: Cluster) -> dict[int, list[MemoryStore]]:
    """Return, by ledger, the sessions that request its lock; it grows as they do."""
    asked: dict[int, list[MemoryStore]] = {}

    def note(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        for each in operations:
            if isinstance(each, Create) and each.path.startswith(PATHS.locks):
                ledger_id = znodes.ledger_id_of_lock(each.path.rpartition("/")[2])
                assert ledger_id is not None
                asked.setdefault(ledger_id, []).append(store)
        return None

    cluster.tree.faults = note
    return asked


async def without_target(*ledger_ids: int) -> Cluster:
    """Return marked ledgers for whose lost bookie there is no target."""
    cluster = await Cluster.start(*THREE)
    for ledger_id in ledger_ids:
        await cluster.write_ledger(THREE, ledger_id=ledger_id)
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)
    return cluster


async def noted(node: Node, ledger_id: int = LEDGER) -> WaitingNote:
    """Return the note of the ledger, which must exist."""
    note = await node.notes.read(ledger_id)
    assert note is not None
    return note


async def start_nodes(
    stack: AsyncExitStack, cluster: Cluster, count: int, settings: ReplicationSettings
) -> list[Node]:
    """Start nodes that all know each other before they begin."""
    nodes = [
        await stack.enter_async_context(cluster.node(f"node-{i}", settings=settings))
        for i in range(count)
    ]
    for node in nodes:
        await stack.enter_async_context(working(node))
    return nodes
