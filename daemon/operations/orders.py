"""Concerns: orders that cannot be read, and what keeps the nodes from following orders.

An order in ZooKeeper may be unreadable because of a typing error or a later release. If Java's
AutoRecovery leads, it does not know bookmender's orders and acts as if there were none.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from auditor.election import current_leader
from daemon.admin_session import AdminSession
from daemon.words import printable
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from replication.history import Event
from replication.nodes import LiveNode, Role, live_nodes
from replication.orders import OrderStore, OrderZnode

UNREADABLE_VOTE = "its vote cannot be read"


async def withdraw_order(cluster: AdminSession, znode: OrderZnode[Any], event: Event) -> bool:
    """Withdraw an order and record that, and return False if there was none. Raises
    ConflictError."""
    order_store = OrderStore(cluster.store, cluster.paths)
    stored = await order_store.stored(znode)
    if stored is None:
        return False
    await order_store.withdraw(znode, over=stored)
    await cluster.note_order(event)
    return True


async def node_concerns(
    cluster: AdminSession, *, ignored: str = "", known: dict[str, LiveNode | None] | None = None
) -> list[str]:
    """Return what keeps the nodes from moving ledgers, as sentences.

    ``ignored``: the orders that Java's nodes do not know, such as ``drains``; empty if Java's nodes
    can do the work, too. ``known``: a cache, as in ``live_nodes``.
    """
    if await cluster.store.exists(cluster.paths.disable) is not None:
        return ["Auto-recovery is disabled, so nothing is moved. Enable it: bookmender enable"]
    leader = await current_leader(cluster.store, cluster.paths)
    nodes = await live_nodes(cluster.store, cluster.paths, known)
    if leader is None:
        return [
            "No auditor is running, so the ledgers are not marked. Start one: bookmender daemon"
        ]
    if ignored and leader.session_id not in {node.session_id for node in nodes}:
        return [
            "The leader is Java's AutoRecovery "
            f"({printable(leader.candidate or UNREADABLE_VOTE)}), which ignores "
            f"{ignored}. Stop it, so that a bookmender node leads."
        ]
    if any(node.info.role is Role.WORKER for node in nodes):
        return []
    if ignored:
        return [
            f"No bookmender worker is running, and Java's workers ignore {ignored}, so nothing is "
            "copied. Start one: bookmender daemon"
        ]
    return [
        "No bookmender worker is running, and Java's workers do not say why a ledger does not "
        "move: bookmender plan LEDGER shows it."
    ]


async def leader_concerns(cluster: AdminSession, orders: str) -> list[str]:
    """Return a sentence if Java's AutoRecovery leads and marks ledgers despite ``orders``, such as
    ``holds``."""
    if await cluster.store.exists(cluster.paths.disable) is not None:
        return []
    leader = await current_leader(cluster.store, cluster.paths)
    if leader is None:
        return []
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    if leader.session_id in ours:
        return []
    return [
        f"The leader is Java's AutoRecovery ({printable(leader.candidate or UNREADABLE_VOTE)}), "
        f"which ignores {orders} and marks the ledgers of lost bookies. To stop it as well, run: "
        "bookmender disable"
    ]


def unreadable_texts(paths: Sequence[str]) -> list[str]:
    """Return a text for each unreadable order: how nodes act without it, what to do, its path."""
    return [f"{_what(path)} ({printable(path)})" for path in paths]


def unreadable_of(
    kind: str, paths: Sequence[str], bookies: Collection[BookieId] | None = None
) -> tuple[str, ...]:
    """Return the unreadable orders of ``bookies``, or all. ``kind``: draining or maintenance.

    The path of the whole folder is included if the orders cannot be listed.
    """
    split = ((path, *_split(path)) for path in paths)
    return tuple(
        path
        for path, found, name in split
        if found == kind and (bookies is None or not name or name in bookies)
    )


def bookies_of(paths: Sequence[str]) -> set[BookieId]:
    """Return the bookies that the paths of the orders name."""
    return {BookieId(name) for _, name in map(_split, paths) if _is_bookie_id(name)}


def _is_bookie_id(name: str) -> bool:
    with suppress(CorruptionError):
        parse_bookie_id(name)
        return True
    return False


def _split(path: str) -> tuple[str, str]:
    """Return the kind of an order and its bookie, which is empty if it concerns no single
    bookie."""
    kind, _, name = path.rpartition("/orders/")[2].partition("/")
    return kind, name


_UNLISTED = (
    "cannot be listed, because an ACL denies access. Running nodes keep the orders they know, and "
    "a new node knows none. Grant read access"
)


def _what(path: str) -> str:
    match _split(path):
        case "draining", "":
            return f"The orders to drain bookies {_UNLISTED}"
        case "maintenance", "":
            return f"The maintenance windows {_UNLISTED}"
        case "draining" | "maintenance", name if not _is_bookie_id(name):
            return (
                f"An order names {printable(name)}, which is not a bookie ID, so nodes ignore it. "
                "Delete its znode with ZooKeeper's zkCli.sh"
            )
        case "draining", bookie:
            return (
                f"The order to drain {bookie} cannot be read, so nodes drain the bookie as the "
                "last order said, or without fencing. Cancel it: "
                f"bookmender bookie drain {bookie} --cancel"
            )
        case "maintenance", bookie:
            return (
                f"The maintenance window of {bookie} cannot be read, so nodes assume that it lasts "
                "until a day after the order was written, or longer if the last one that they read "
                "did. If an ACL hides that time, they assume no end. End it: "
                f"bookmender bookie maintenance {bookie} --end"
            )
        case "limits", _:
            return (
                "The ordered limits cannot be read. Running nodes keep the limits they had, and a "
                "new node uses its settings. Withdraw the order: bookmender limits --reset"
            )
        case "hold", _:
            return (
                "The order of the safety hold cannot be read, so all nodes act as if there were a "
                "hold. End it with bookmender hold --end, or replace it with --begin"
            )
        case "checks", _:
            return (
                "The order that pauses the checks cannot be read, so they are paused. Withdraw "
                "it: bookmender check --resume"
            )
        case "mutes", _:
            return (
                "The order that mutes conditions cannot be read, so none is muted. bookmender "
                "status --unmute CODE replaces it"
            )
        case "disable-end", _:
            return (
                "The time at which auto-recovery is enabled again cannot be read, so the leader "
                "does not enable it: bookmender enable"
            )
        case "tries", _:
            return (
                "The order to try ledgers at once cannot be read, so they wait for their next "
                "try. bookmender repair replaces the order, or delete its znode"
            )
    return "An order cannot be read, so nodes ignore it. Delete its znode"
