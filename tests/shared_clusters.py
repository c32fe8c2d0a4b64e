"""Real clusters that several test files use, one file after another.

Starting ZooKeeper and five bookies costs seven seconds of CPU time; an idle cluster costs almost
none. When a file has finished, its cluster is cleaned and kept for the next file that asks for the
same options. A file finds the cluster like a new one, with two exceptions: ledger ids are never
reused, and bookies may still store entries of deleted ledgers.

A cluster is stopped instead of kept if a test of the file failed, or if the file changed the
cluster for good.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NotEmptyError
from kazoo.handlers.threading import KazooTimeoutError

from daemon.local.cluster import LocalCluster
from daemon.local.spec import BOOKIES_DEFAULT, LEDGERS_ROOT
from daemon.local.znodes import AVAILABLE, COOKIES
from ledgers.errors import BookmenderError
from tests.cluster.bookies_in_trouble import READ_ONLY_SURVIVES_RESTART
from tests.zookeeper_server import PATIENT_SESSION_S

IDLE_MAX = 2
"""Maximum number of idle clusters that a test process keeps. Each takes 0.7 GB of memory."""
SHARED_OPTIONS: Mapping[str, Any] = {
    "bookies": BOOKIES_DEFAULT,
    "session_timeout_s": PATIENT_SESSION_S,
    "bookie_settings": READ_ONLY_SURVIVES_RESTART,
}
"""The defaults. Sessions are long, so tests end the session of a killed bookie with
``kill_and_expire`` instead of waiting for its timeout."""
KEPT = {"available", "cookies", "INSTANCEID", "LAYOUT", "idgen", "idgen-long"}
"""Children of the ledgers root that cleaning keeps. The id generators are among them, because
bookies still store entries of deleted ledgers under the old ids."""


class SharedClusters:
    """Owns the clusters of one test process. ``close`` stops the idle ones."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._idle: list[tuple[Mapping[str, Any], LocalCluster]] = []
        """Options and cluster, in the order of their last use."""

    @contextmanager
    def lend(self, session: pytest.Session, options: Mapping[str, Any]) -> Iterator[LocalCluster]:
        """Lend an idle cluster with these options, or start one. Defaults: SHARED_OPTIONS."""
        options = {**SHARED_OPTIONS, **options}
        failed_before = session.testsfailed
        cluster = self._take(options)
        try:
            yield cluster
        finally:
            has_failed = session.testsfailed > failed_before
            if not has_failed and can_be_used_again(cluster, options["bookies"]):
                self._idle.append((options, cluster))
            else:
                cluster.stop()
            if len(self._idle) > IDLE_MAX:
                self._idle.pop(0)[1].stop()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].stop()

    def _take(self, options: Mapping[str, Any]) -> LocalCluster:
        for number, (found, cluster) in enumerate(self._idle):
            if found == options:
                del self._idle[number]
                return cluster
        return LocalCluster.start(self._make_folder(), **options)


def can_be_used_again(cluster: LocalCluster, bookie_count: int) -> bool:
    """Start missing bookies and clean the cluster. Return False if it is not like a new one."""
    try:
        return make_whole(cluster, bookie_count) and clean(cluster)
    except (BookmenderError, KazooException, KazooTimeoutError):
        return False  # for example, a bookie was decommissioned and refuses to start


def make_whole(cluster: LocalCluster, bookie_count: int) -> bool:
    """Start the bookies that are down. Return whether the cluster has just its first bookies, and
    each of them registered itself as writable."""
    if len(cluster.bookies) != bookie_count or cluster.zookeeper_pid is None:
        return False
    cluster.start_bookies([each for each in cluster.bookies if cluster.pid(each) is None])
    with _session(cluster) as client:
        registered = set(client.get_children(AVAILABLE)) - {"readonly"}
        stats = [client.exists(f"{AVAILABLE}/{bookie}") for bookie in cluster.bookies]
        # A znode without an owner was created by a test, and would outlive its bookie.
        return registered == set(cluster.bookies) and all(
            stat is not None and stat.ephemeralOwner for stat in stats
        )


def clean(cluster: LocalCluster) -> bool:
    """Delete ledgers, marks, orders, and every other znode that tests created.

    Return False if a process still creates znodes there. Bookies that often collect garbage do.
    """
    with _session(cluster) as client:
        left = {f"/{name}" for name in client.get_children("/")} - {"/zookeeper", LEDGERS_ROOT}
        left |= {f"{LEDGERS_ROOT}/{n}" for n in set(client.get_children(LEDGERS_ROOT)) - KEPT}
        # A bookie with a cookie counts as lost if it is not registered.
        strangers = set(client.get_children(COOKIES)) - set(cluster.bookies)
        left |= {f"{COOKIES}/{bookie}" for bookie in strangers}
        try:
            for path in left:
                client.delete(path, recursive=True)
        except NotEmptyError:
            return False
    return True


@contextmanager
def _session(cluster: LocalCluster) -> Iterator[KazooClient]:
    client = KazooClient(cluster.zookeeper_address, timeout=10)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()
