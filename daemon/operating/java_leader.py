"""Java's AutoRecovery as the leader: orders that are ours alone it does not know, and acts as if
there were none."""

from auditor.election import current_leader
from daemon.operating.progress import printable
from daemon.visit import Visit
from replication.cluster.membership import live_nodes
from replication.queue import payloads

UNREADABLE_VOTE = "its vote cannot be read"


async def java_leader(cluster: Visit) -> str | None:
    """What the leader calls itself where it is none of our nodes; None where nobody leads, or one
    of ours does."""
    leader = await current_leader(cluster.store, cluster.ur)
    if leader is None:
        return None
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.ur)}
    return None if leader.session_id in ours else leader.candidate or UNREADABLE_VOTE


def disregards(leader: str, orders: str) -> str:
    """That it marks all the same, for people. ``orders``: which ones it does not know, as in
    ``holds``."""
    return (
        f"the leader is Java's AutoRecovery ({printable(leader)}), which knows no {orders} and marks whatever is "
        "lost: bookmender disable stops that, too"
    )


async def leader_concerns(cluster: Visit, orders: str) -> list[str]:
    """Likewise; empty where no such leader is there, or auto-recovery is disabled."""
    if await cluster.store.exists(payloads.disable_path(cluster.ur)) is not None:
        return []
    leader = await java_leader(cluster)
    return [] if leader is None else [disregards(leader, orders)]
