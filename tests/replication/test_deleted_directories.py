"""Directories that were deleted by hand: what is lost with them, and what is logged."""

import pytest
from structlog.testing import capture_logs

from ledgers.errors import SessionLostError
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.nodes import Membership
from replication.reasons import Blocked, Facts, Reason
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, BOOKIES
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info

NOTE = WaitingNote(
    ledger_id=LEDGER,
    blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=Facts(errors=("put back by hand",))),
    node="host-a",
    since_ms=5,
    suspects=frozenset({B1}),
)


async def test_a_session_without_its_znode_ends_when_nodes_are_counted(cluster: Cluster) -> None:
    membership = await Membership.join(cluster.store, PATHS, node_info("host-a"))

    await cluster.store.delete(membership.path)

    assert await cluster.store.children(PATHS.nodes) == []
    with pytest.raises(SessionLostError, match="deleted"):
        await membership.reader_count()


async def test_bad_sources_are_noted_in_a_recreated_directory(cluster: Cluster) -> None:
    await cluster.store.delete(PATHS.waiting)
    notes = WaitingNotes(cluster.store, PATHS)

    await notes.let_go(LEDGER, guards=(), beside=NOTE)

    left = await notes.read(LEDGER)
    assert left is not None
    assert left.suspects == {B1}


async def test_registered_bookies_without_a_cookie_are_logged_once(cluster: Cluster) -> None:
    async with cluster.node() as node:
        for bookie in BOOKIES:
            await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.delete(f"{ROOT}/cookies")

        with capture_logs() as logs:
            for _ in range(2):
                await node.views.refresh()

    told = [line for line in logs if line["event"] == "cookies.missing"]
    assert [line["bookies"] for line in told] == [sorted(BOOKIES)]
