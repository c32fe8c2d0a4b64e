"""Helpers that put bookies in trouble: dead, read-only, or alive but not registered in ZooKeeper.

Clusters for this have long sessions, because a Java bookie whose session ends in an outage of
ZooKeeper may shut itself down. So these helpers end the session of a dead bookie themselves, at
once.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from daemon.local import znodes
from daemon.local.cluster import LocalCluster
from daemon.local.spec import port_of
from ledgers.model import BookieId
from tests.cluster.steps import Bench

SESSION_TIMEOUT_S = 10.0
"""Session timeout of a cluster that only one test uses."""
READ_ONLY_SURVIVES_RESTART = {"persistBookieStatusEnabled": "true"}
"""A setting of the bookies that ``make_read_only`` needs."""


def kill_and_expire(cluster: LocalCluster, bookie: BookieId) -> None:
    """Kill the bookie, and end its session as its timeout would."""
    cluster.kill(bookie)
    expire(cluster, bookie)


def terminate(cluster: LocalCluster, bookie: BookieId) -> None:
    """Stop the bookie as systemd would. If it hangs and is killed, its session is ended as well."""
    if not cluster.terminate(bookie):
        expire(cluster, bookie)


def expire(cluster: LocalCluster, bookie: BookieId) -> None:
    """End the session of a bookie that was killed."""
    with znodes.session(cluster.spec.zookeeper_port) as tree:
        tree.delete_registration(bookie)


def make_read_only(cluster: LocalCluster, bookie: BookieId) -> None:
    terminate(cluster, bookie)
    status_file(cluster, bookie).write_text("1,READ_ONLY,9999999999999\n")
    cluster.start_bookie(bookie)
    assert cluster.read_only() == {bookie}


def make_writable(cluster: LocalCluster, bookie: BookieId) -> None:
    terminate(cluster, bookie)
    status_file(cluster, bookie).unlink()
    cluster.start_bookie(bookie)
    assert bookie in cluster.writable()


def status_file(cluster: LocalCluster, bookie: BookieId) -> Path:
    """Return the file in which ``persistBookieStatusEnabled`` stores a bookie's next state."""
    ledgers = cluster.data / "bookies" / str(port_of(bookie)) / "ledgers"
    return ledgers / "current" / "BOOKIE_STATUS"


@asynccontextmanager
async def unregistered(on: Bench, bookie: BookieId) -> AsyncIterator[None]:
    """Delete the znode of a running bookie for a while. Afterwards the znode has no owner."""
    path = f"{on.seen.settings.uri.root}/available/{bookie}"
    data, _ = await on.seen.store.get(path)
    await on.seen.store.delete(path)
    yield
    await on.seen.store.create(path, data)


def register_again(cluster: LocalCluster, bookie: BookieId) -> None:
    """Restart the bookie, so that it owns its znode again."""
    cluster.terminate(bookie)
    expire(cluster, bookie)
    cluster.start_bookie(bookie)
