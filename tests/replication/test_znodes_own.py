"""Our own records below ``bookmender``, the znodes of the tree, and the lists for people."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.errors import SettingsError
from replication import znodes
from replication.ledger_record import WaitingNote
from replication.marks import (
    MarkedLedger,
    locked_ledger_ids,
    marked_ledger_ids,
    prepare_tree,
    read_marks,
)
from replication.nodes import LiveNode, Membership, Role, live_nodes
from replication.reasons import Blocked, Facts, Reason
from replication.znodes import Mark
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, node_info

NOTE = WaitingNote(
    ledger_id=LEDGER,
    blocked=Blocked(reason=Reason.NO_COPY, facts=Facts(errors=("all gone",))),
    node="host-a",
    since_ms=5,
)


# --- The tree -------------------------------------------------------------------------------------


async def test_preparing_the_tree_is_idempotent_and_suits_java() -> None:
    cluster = Cluster()
    for _ in range(2):
        await prepare_tree(cluster.store, PATHS)

    assert (await cluster.store.get(PATHS.layout))[0] == znodes.LAYOUT_DATA
    for path in (PATHS.marks, PATHS.locks, PATHS.election):
        assert await cluster.store.children(path) == []


async def test_rule_s8_a_tree_with_another_layout_is_not_changed() -> None:
    cluster = Cluster()
    layout = b'type: "HIERARCHICAL"\nversion: 1\n'
    await cluster.store.create(PATHS.layout, layout, with_parents=True)

    with pytest.raises(SettingsError, match="BASIC"):
        await prepare_tree(cluster.store, PATHS)

    assert await cluster.store.children(PATHS.directory) == ["LAYOUT"]


# --- Members --------------------------------------------------------------------------------------


async def test_members_see_each_other_while_their_sessions_live(cluster: Cluster) -> None:
    one, two = MemoryStore(cluster.tree), MemoryStore(cluster.tree)
    first = await Membership.join(one, PATHS, node_info("host-a"))
    await Membership.join(two, PATHS, node_info("host-b", Role.AUDITOR))

    assert await first.live_nodes() == [
        LiveNode(info=node_info("host-a"), session_id=one.session_id),
        LiveNode(info=node_info("host-b", Role.AUDITOR), session_id=two.session_id),
    ]

    await two.close()
    assert [node.info.host for node in await first.live_nodes()] == ["host-a"]


async def test_members_of_a_later_release_are_ignored(cluster: Cluster) -> None:
    for name, data in [("a", b"not json"), ("b", b"[]"), ("c", b'{"role": "third"}')]:
        await cluster.store.create(f"{PATHS.nodes}/{name}", data)

    assert await live_nodes(cluster.store, PATHS) == []


async def test_a_members_data_is_read_once(cluster: Cluster) -> None:
    membership = await Membership.join(cluster.store, PATHS, node_info("host-a"))
    await membership.live_nodes()
    before = cluster.store.request_count

    await membership.live_nodes()

    assert cluster.store.request_count == before + 1


async def test_new_members_are_read_in_parallel(cluster: Cluster) -> None:
    for number in range(50):
        await Membership.join(cluster.store, PATHS, node_info(f"host-{number}"))

    async def travel() -> None:
        await asyncio.sleep(1)

    cluster.tree.latency = travel
    began_s = cluster.clock.now_s()
    assert len(await live_nodes(cluster.store, PATHS)) == 50
    assert cluster.clock.now_s() - began_s == 4, "one request for their names, one for all the rest"


# --- Notes ----------------------------------------------------------------------------------------


async def test_the_last_note_is_read_as_it_was_written(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await node.notes.put(replace(NOTE, since_ms=4))
        await node.notes.put(NOTE)

        assert await node.notes.read(LEDGER) == NOTE
        assert await node.notes.ledger_ids() == {LEDGER}


async def test_a_note_that_was_written_since_is_not_deleted(cluster: Cluster) -> None:
    """It belongs to a new mark."""
    async with cluster.node() as node:
        written = await node.notes.put(NOTE)
        await node.notes.put(replace(written, node="host-b"))
        assert written.version is not None

        await node.queue.delete_note(LEDGER, version=written.version)
        assert await node.notes.ledger_ids() == {LEDGER}


async def test_a_note_is_written_although_its_directory_was_deleted(cluster: Cluster) -> None:
    await cluster.store.delete(PATHS.waiting)
    async with cluster.node() as node:
        await node.notes.put(NOTE)

        assert await node.notes.read(LEDGER) == NOTE


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(NOTE.to_json().replace(b"no-copy", b"a-new-one"), id="an unknown reason"),
        pytest.param(NOTE.to_json().replace(b'"node"', b'"host"'), id="a name is missing"),
    ],
)
async def test_a_note_of_a_later_release_is_ignored(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(PATHS.waiting_note(LEDGER), data)
    async with cluster.node() as node:
        assert await node.notes.read(LEDGER) is None
        assert await node.notes.ledger_ids() == {LEDGER}


# --- Lists ----------------------------------------------------------------------------------------


async def test_the_whole_queue_is_listed_in_order(cluster: Cluster) -> None:
    ledger_ids = [3, 65_536, 2**33, 2**62]
    for ledger_id in reversed(ledger_ids):
        await cluster.mark(B1, ledger_id=ledger_id)
    await cluster.store.create(PATHS.lock(3))
    await cluster.store.create(f"{PATHS.locks}/strange")

    assert await marked_ledger_ids(cluster.store, PATHS) == ledger_ids
    assert await locked_ledger_ids(cluster.store, PATHS) == {3}


async def test_unreadable_marks_are_listed_and_deleted_ones_are_not(cluster: Cluster) -> None:
    await cluster.mark(B1, B2, ledger_id=1, ctime_ms=9)
    await cluster.store.create(PATHS.mark(2), b"\xff", with_parents=True)

    assert await read_marks(cluster.store, PATHS, [1, 2, 3]) == [
        MarkedLedger(ledger_id=1, mark=Mark(replicas=(B1, B2), ctime_ms=9)),
        MarkedLedger(ledger_id=2, mark=None),
    ]


async def test_without_its_znodes_the_queue_is_empty() -> None:
    cluster = Cluster()

    assert await marked_ledger_ids(cluster.store, PATHS) == []
    assert await locked_ledger_ids(cluster.store, PATHS) == set()
    assert await live_nodes(cluster.store, PATHS) == []
