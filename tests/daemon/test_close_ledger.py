"""Closing an open ledger by hand: when it is allowed, its lock, and its effects."""

import asyncio
import json
from typing import Any

import pytest

from auditor.checks.idle import LastChange
from daemon.operations.close import CloseRefusedError, CollectedEvents, doubts_about
from ledgers.errors import FencedError, NoSuchLedgerError, UnavailableError
from ledgers.manager import VersionedMetadata
from ledgers.model import LedgerState, Segment
from replication import znodes
from replication.history import Kind
from replication.ledger_record import WaitingNotes
from replication.orders import HoldOrder, hold_znode, tries_znode
from replication.reasons import Reason
from replication.settings import ReplicationSettings
from tests.daemon.closing import DAY_S, close, closer, idle_ledger, unproven_ledger
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import watch_fencing

SEEN = LastChange(last_entry_id=9, since_ms=1_000)


@pytest.mark.parametrize(
    ("sighting", "last_entry_id", "written_ms", "idle_s", "doubt"),
    [
        pytest.param(SEEN, 9, 500, DAY_S, None, id="no entry for a day"),
        pytest.param(SEEN, 9, 500, DAY_S - 1, "idle for only 23 h 59 min", id="not long enough"),
        pytest.param(SEEN, 10, 500, DAY_S, "it got an entry", id="a new entry"),
        pytest.param(SEEN, 9, 1_001, DAY_S, "its ensemble changed", id="new metadata"),
        pytest.param(SEEN, None, 500, DAY_S, "none of its bookies reports", id="no bookie answers"),
        pytest.param(None, 9, 500, DAY_S, "no check has seen it idle", id="no check yet"),
    ],
)
def test_the_doubts_about_closing(
    sighting: LastChange | None,
    last_entry_id: int | None,
    written_ms: int,
    idle_s: float,
    doubt: str | None,
) -> None:
    found = doubts_about(
        sighting,
        last_entry_id=last_entry_id,
        written_ms=written_ms,
        now_ms=1_000 + int(idle_s * 1000),
        after_s=DAY_S,
    )

    assert len(found) == (doubt is not None)
    assert doubt is None or doubt in found[0]


# --- On a cluster in memory -----------------------------------------------------------------------


@pytest.mark.compat(
    "G35", verdict="better", why="an operator closes it with one command, under the ledger's lock"
)
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@in_virtual_time
async def test_an_idle_ledger_is_closed_at_its_last_entry(state: LedgerState) -> None:
    cluster = await idle_ledger(state)

    done = await close(cluster)

    metadata = await cluster.metadata()
    assert done.has_changed
    assert done.state == metadata.state.name
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    assert await cluster.locked() == []
    await cluster.assert_whole()


@in_virtual_time
async def test_a_ledger_with_a_recent_entry_is_left_to_its_writer() -> None:
    cluster = await idle_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    fenced = watch_fencing(cluster)

    with pytest.raises(CloseRefusedError, match=r"it got an entry, .* fences the ledger"):
        await close(cluster)

    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert fenced == []
    assert await cluster.locked() == []


@in_virtual_time
async def test_force_closes_a_ledger_with_a_recent_entry() -> None:
    cluster = await idle_ledger()
    cluster.put(LEDGER, 10, B1, B2)

    await close(cluster, is_forced=True)

    assert (await cluster.metadata()).last_entry_id == 10


@pytest.mark.parametrize("is_forced", [False, True], ids=["unforced", "forced"])
@in_virtual_time
async def test_a_safety_hold_forbids_fencing(is_forced: bool) -> None:
    cluster = await idle_ledger()
    fenced = watch_fencing(cluster)
    hold = HoldOrder(since_ms=cluster.clock.wall_ms(), reason="3 of 7 went")
    await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)

    with pytest.raises(CloseRefusedError, match=r"a safety hold forbids fencing \(3 of 7 went\)"):
        await close(cluster, is_forced=is_forced)

    assert fenced == []
    assert await cluster.locked() == []
    shown = await (await closer(cluster)).look(LEDGER)
    assert shown.doubts == (), "a hold is no doubt about the writer"
    assert "bookmender hold" in shown.held_back


@in_virtual_time
async def test_a_ledger_locked_by_another_node_is_not_closed() -> None:
    cluster = await idle_ledger()
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("other"), is_ephemeral=True)

    with pytest.raises(UnavailableError, match="other is at work on it"):
        await close(cluster, is_forced=True)

    assert await cluster.locked() == [path.rpartition("/")[2]]
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_closed_ledger_is_not_changed() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2))

    done = await close(cluster)

    assert not done.has_changed
    assert done.doubts == ()
    assert (await cluster.manager.read(LEDGER)).version == before.version


@in_virtual_time
async def test_an_unknown_ledger_is_an_error() -> None:
    with pytest.raises(NoSuchLedgerError):
        await close(await Cluster.start(), is_forced=True)


@in_virtual_time
async def test_an_unproven_end_is_closed_only_with_accept_loss() -> None:
    """Only B1 and B2 had entry 9."""
    cluster = await idle_ledger()
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)

    with pytest.raises(CloseRefusedError, match=r"cannot be proven.*--accept-loss --yes` closes"):
        await close(cluster, is_forced=True)
    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.has_changed
    assert done.last_entry_id == 8


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@in_virtual_time
async def test_a_bookie_with_a_finding_cannot_prove_the_end(
    state: LedgerState,
) -> None:
    """Entry 9 was on B1, which is absent, and on B2, which lost it but has its old cookie."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), ack_quorum=2, state=state)
    cluster.bookie(B2).lose(LEDGER, 9)
    await cluster.kill(B1)
    await cluster.mark(B2)
    await cluster.store.create(
        PATHS.finding(LEDGER), json.dumps({"bookies": [B2]}).encode(), with_parents=True
    )

    with pytest.raises(CloseRefusedError, match="--accept-loss"):
        await close(cluster, is_forced=True)

    assert not (await cluster.metadata()).is_closed


@in_virtual_time
async def test_a_lack_of_bookies_for_the_last_entries_is_explained() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    ensemble = (B1, B2, B3)
    await cluster.write_ledger(ensemble, write_quorum=3, ack_quorum=3, state=LedgerState.OPEN)
    cluster.bookies.fail(B3, Op.ADD, Fault(error=FencedError))

    with pytest.raises(CloseRefusedError, match=r"on 3 bookies \(the ack quorum\).*Add a bookie"):
        await close(cluster, is_forced=True)

    assert not (await cluster.metadata()).is_closed


SLOW = ReplicationSettings(retry_min_s=3600, retry_max_s=3600)


async def waiting_reason(cluster: Cluster) -> Reason | None:
    """Return the reason for which the ledger waits now."""
    note = await WaitingNotes(cluster.store, PATHS).read(LEDGER)
    return None if note is None else note.reason


@pytest.mark.parametrize("own", [False, True])
@in_virtual_time
async def test_closing_clears_the_deferral_of_every_node(own: bool) -> None:
    """One node remembers why it deferred the ledger; the other reads the note about it."""
    cluster = await unproven_ledger(own=own)
    async with (
        cluster.node("node-1", settings=SLOW) as one,
        cluster.node("node-2", settings=SLOW) as two,
        working(one),
        working(two),
    ):
        await asyncio.sleep(100)
        assert await waiting_reason(cluster) is Reason.END_UNPROVEN

        await close(cluster, is_forced=True, accepts_loss=True)
        assert await waiting_reason(cluster) is None
        await asyncio.sleep(3)

        assert await waiting_reason(cluster) is Reason.NO_COPY, "for the lost entries"


@in_virtual_time
async def test_nothing_closes_a_ledger_without_an_ack_quorum() -> None:
    """Its end can never be proven, and fencing would stop a writer that can close it."""
    cluster = await idle_ledger(ack_quorum=0)
    fenced = watch_fencing(cluster)

    with pytest.raises(CloseRefusedError, match=r"even with --force: .* ack quorum is below 1"):
        await close(cluster, is_forced=True, accepts_loss=True)

    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_closed_ledger_is_marked_in_the_private_queue() -> None:
    cluster = await idle_ledger()

    await close(cluster)

    assert await cluster.marked(PATHS.private) == [LEDGER]
    assert await cluster.marked() == []


@in_virtual_time
async def test_the_closing_succeeds_if_no_retry_can_be_ordered() -> None:
    cluster = await unproven_ledger()
    shut_out(cluster.store, PATHS.mark(LEDGER), tries_znode(PATHS).path)

    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.has_changed
    assert await cluster.locked() == []


@in_virtual_time
async def test_a_preview_changes_nothing() -> None:
    cluster = await idle_ledger()
    fenced = watch_fencing(cluster)

    found = await (await closer(cluster)).look(LEDGER)

    assert (found.last_entry_id, found.doubts, found.has_changed) == (9, (), False)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_change_by_the_writer_stops_the_closing() -> None:
    cluster = await idle_ledger()
    marking = cluster.manager.write

    async def write(*args: Any, **options: Any) -> VersionedMetadata:
        cluster.manager.write = marking  # type: ignore[method-assign]
        found = await cluster.manager.read(LEDGER)
        changed = Segment(first_entry_id=10, ensemble=(B1, B4, B3))
        await marking(LEDGER, found.metadata.with_segment(changed), read_as=found)
        return await marking(*args, **options)

    cluster.manager.write = write  # type: ignore[method-assign]

    with pytest.raises(CloseRefusedError, match="its writer may be running"):
        await close(cluster)

    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_worker_repairs_a_ledger_closed_with_too_few_copies() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    cluster.put(LEDGER, 10, B1, B2)
    hangs = Fault(delay_s=6, error=UnavailableError)
    cluster.bookies.faults = lambda b, op, i: hangs if b == B3 and op is not Op.ROOM else NO_FAULT
    await close(cluster, is_forced=True)
    assert cluster.good_copies(LEDGER, await cluster.metadata(), 10) == 2
    cluster.bookies.faults = lambda b, op, i: NO_FAULT

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    await cluster.assert_whole()
    assert await cluster.marked(PATHS.private) == []


# --- The history ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_close_tells_its_fence_and_its_recovery() -> None:
    did = CollectedEvents()

    await close(await idle_ledger(), history=did)

    told = [(event.kind, event.ledger_id, event.last_entry_id) for event in did.events]
    assert told == [
        (Kind.LEDGER_FENCED, LEDGER, None),
        (Kind.LEDGER_RECOVERED, LEDGER, 9),
    ]


@in_virtual_time
async def test_a_close_that_fails_after_fencing_tells_the_fence() -> None:
    did = CollectedEvents()
    cluster = await idle_ledger()
    cluster.bookies.fail(B1, Op.READ_FENCING, Fault(error=UnavailableError))

    with pytest.raises(UnavailableError):
        await close(cluster, history=did)

    assert [event.kind for event in did.events] == [Kind.LEDGER_FENCED]
