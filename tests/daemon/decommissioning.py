"""Helpers that the tests of decommissions share."""

from daemon.operations.decommission import Decommissioned, decommission_bookie
from ledgers.model import BookieId
from tests.daemon.visits import Heard, visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1
from tests.replication.nodes import ROOT

COOKIE = f"{ROOT}/cookies/{B1}"


async def decommissioned(
    cluster: Cluster,
    bookie: BookieId = B1,
    heard: Heard | None = None,
    *,
    ignores_unreadable: bool = False,
    ignores_unknown: bool = True,
) -> Decommissioned:
    heard = heard or Heard()
    return await decommission_bookie(
        visiting(cluster),
        bookie,
        ignores_unreadable=ignores_unreadable,
        ignores_unknown=ignores_unknown,
        notify=heard.tell,
        show=heard.show,
        clock=cluster.clock,
    )


def done(*, moved: int = 0, had_cookie: bool = True) -> Decommissioned:
    """Return the answer about B1."""
    return Decommissioned(
        bookie_id=B1, ledgers_moved=moved, cookie_deleted=had_cookie, unreadable_ignored=[]
    )


async def has_cookie(cluster: Cluster) -> bool:
    return await cluster.store.exists(COOKIE) is not None
