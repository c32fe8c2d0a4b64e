"""The local cluster itself: real processes, started and broken."""

import pytest

from daemon.local import ports
from daemon.local.cluster import LocalCluster
from daemon.local.spec import port_of
from tests.cluster.conftest import MakeCluster

pytestmark = pytest.mark.cluster


def test_every_bookie_is_writable_once_the_cluster_is_up(cluster: LocalCluster) -> None:
    assert cluster.writable() == frozenset(cluster.bookies)
    assert all(ports.answers(port_of(bookie)) for bookie in cluster.bookies)


def test_a_wiped_bookie_comes_back_empty_with_the_same_id(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(bookies=1)
    (bookie,) = cluster.bookies

    cluster.wipe(bookie)
    cluster.start_bookie(bookie)

    assert cluster.writable() == {bookie}
