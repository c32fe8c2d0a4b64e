"""Bookies in trouble: dead, read-only, or alive where ZooKeeper does not show it.

Clusters for this have long sessions: a Java bookie whose session ends in an outage of ZooKeeper may
shut itself down. So what the expiry of a dead one's session would do is done by hand, at once.
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
"""For a cluster that only one test uses."""
READ_ONLY_SURVIVES_RESTART = {"persistBookieStatusEnabled": "true"}
"""A setting of the bookies that ``make_read_only`` needs."""


def kill_and_expire(cluster: LocalCluster, bookie: BookieId) -> None:
    """As a crash would, and time."""
    cluster.kill(bookie)
    expire(cluster, bookie)


def terminate(cluster: LocalCluster, bookie: BookieId) -> None:
    """Stop the bookie as systemd would. If it hangs and is killed, its session is ended as well."""
    if not cluster.terminate(bookie):
        expire(cluster, bookie)


def expire(cluster: LocalCluster, bookie: BookieId) -> None:
    """The session of a bookie that was killed is over."""
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
    """Where a bookie with ``persistBookieStatusEnabled`` keeps what it shall be after a restart."""
    ledgers = cluster.data / "bookies" / str(port_of(bookie)) / "ledgers"
    return ledgers / "current" / "BOOKIE_STATUS"


@asynccontextmanager
async def unregistered(on: Bench, bookie: BookieId) -> AsyncIterator[None]:
    """The bookie's process runs on without a znode; afterwards it has one, which nobody owns."""
    path = f"{on.seen.settings.uri.root}/available/{bookie}"
    data, _ = await on.seen.store.get(path)
    await on.seen.store.delete(path)
    yield
    await on.seen.store.create(path, data)


def register_anew(cluster: LocalCluster, bookie: BookieId) -> None:
    """With a znode of its own again."""
    cluster.terminate(bookie)
    expire(cluster, bookie)
    cluster.start_bookie(bookie)
