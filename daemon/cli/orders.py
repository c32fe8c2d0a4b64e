"""Sentences about orders that have no effect, or whose effect is not known.

An order in ZooKeeper may be unreadable because of a typing error or a later release. And if Java's
AutoRecovery leads, it does not know bookmender's orders and acts as if there were none.
"""

from collections.abc import Collection, Sequence

from auditor.election import current_leader
from daemon.admin_session import AdminSession
from daemon.cli.progress import printable
from ledgers.model import BookieId
from replication.nodes import live_nodes


def unreadable_texts(paths: Sequence[str]) -> list[str]:
    """Return a sentence for each unreadable order: what follows, what to do, and its znode."""
    return [f"{_what(path)} ({path})" for path in paths]


def unreadable_drains(
    paths: Sequence[str], bookies: Collection[BookieId] | None = None
) -> tuple[str, ...]:
    """Return the unreadable drain orders of ``bookies``, or all of them if ``bookies`` is None.

    The path of the whole folder is included if the orders cannot be listed.
    """
    return _about_bookies(paths, "draining", bookies)


def unreadable_windows(
    paths: Sequence[str], bookies: Collection[BookieId] | None = None
) -> tuple[str, ...]:
    """Return the unreadable maintenance windows, chosen as in ``unreadable_drains``."""
    return _about_bookies(paths, "maintenance", bookies)


def bookies_of(paths: Sequence[str]) -> set[BookieId]:
    """Return the bookies that the paths of the orders name."""
    return {BookieId(name) for _, name in map(_split, paths) if name}


def _about_bookies(
    paths: Sequence[str], kind: str, bookies: Collection[BookieId] | None
) -> tuple[str, ...]:
    split = ((path, *_split(path)) for path in paths)
    return tuple(
        path
        for path, found, name in split
        if found == kind and (bookies is None or not name or name in bookies)
    )


def _split(path: str) -> tuple[str, str]:
    """Return the kind of an order and its bookie, which is empty if it concerns no single
    bookie."""
    kind, _, name = path.rpartition("/orders/")[2].partition("/")
    return kind, name


_UNLISTED = (
    "cannot be listed, as ZooKeeper's ACL shuts this session out: nodes keep to those that they saw "
    "before, and one that has started since knows of none"
)


def _what(path: str) -> str:
    match _split(path):
        case "draining", "":
            return f"the orders to drain bookies {_UNLISTED}"
        case "maintenance", "":
            return f"the maintenance windows {_UNLISTED}"
        case "draining", bookie:
            return (
                f"the order to drain {bookie} cannot be read, and nobody follows it: "
                f"bookmender bookie drain {bookie} --cancel takes it back"
            )
        case "maintenance", bookie:
            return (
                f"the maintenance window of {bookie} cannot be read, and nobody keeps to it: "
                f"bookmender bookie maintenance {bookie} --end takes it back"
            )
        case "limits", _:
            return (
                "the limits cannot be read: nodes keep to those that were in force before, or, if they "
                "started since, to their settings; bookmender limits --reset takes them back"
            )
        case "hold", _:
            return (
                "the safety hold cannot be read, and every node holds until bookmender hold begin "
                "replaces it, or bookmender hold end ends it"
            )
        case "checks", _:
            return (
                "the order that pauses the checks cannot be read, and they are paused: "
                "bookmender check resume takes it back"
            )
        case "tries", _:
            return (
                "the order to try ledgers at once cannot be read, and they wait for their next tries: "
                "the next such order replaces it, or delete its znode"
            )
    return "an order cannot be read, and nobody follows it: delete its znode"


UNREADABLE_VOTE = "its vote cannot be read"


async def java_leader(cluster: AdminSession) -> str | None:
    """Return the name of a leader that is not a bookmender node.

    Returns None if there is no leader, or if a bookmender node leads.
    """
    leader = await current_leader(cluster.store, cluster.paths)
    if leader is None:
        return None
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    return None if leader.session_id in ours else leader.candidate or UNREADABLE_VOTE


def disregards(leader: str, orders: str) -> str:
    """Return a sentence: Java's leader marks ledgers despite the orders that it does not know.

    ``orders``: the kind of orders, such as ``holds``.
    """
    return (
        f"the leader is Java's AutoRecovery ({printable(leader)}), which knows no {orders} and marks whatever is "
        "lost: bookmender disable stops that, too"
    )


async def leader_concerns(cluster: AdminSession, orders: str) -> list[str]:
    """Return that sentence in a list if Java leads and auto-recovery is enabled; else an empty
    list."""
    if await cluster.store.exists(cluster.paths.disable) is not None:
        return []
    leader = await java_leader(cluster)
    return [] if leader is None else [disregards(leader, orders)]
