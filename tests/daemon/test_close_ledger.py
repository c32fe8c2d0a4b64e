"""Open ledgers by hand: when one may be closed, that it is closed under its lock, and what
follows."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from auditor.checks.idle import Sighting
from daemon.cli.close_ledger import CloseRefusedError, doubts_about
from daemon.cli.idle import closing_text
from ledgers.errors import FencedError, NoSuchLedgerError, UnavailableError
from ledgers.manager import VersionedMetadata
from ledgers.memory.bookies import NO_FAULT, Fault, Op
from ledgers.model import LedgerState, Segment
from replication import znodes
from replication.ledger_record import WaitingNotes
from replication.orders import HoldOrder, hold_znode, tries_znode
from replication.reasons import Reason
from replication.settings import ReplicationSettings
from tests.daemon.closing import DAY_S, close, closer, idle_ledger, unproven_ledger
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import watch_fencing

SEEN = Sighting(last_entry_id=9, since_ms=1_000)


@pytest.mark.parametrize(
    ("sighting", "last_entry_id", "written_ms", "idle_s", "doubt"),
    [
        pytest.param(SEEN, 9, 500, DAY_S, None, id="nothing came for a day"),
        pytest.param(SEEN, 9, 500, DAY_S - 1, "last entry 23 h 59 min ago", id="not long enough"),
        pytest.param(SEEN, 10, 500, DAY_S, "it got an entry", id="an entry came"),
        pytest.param(SEEN, 9, 1_001, DAY_S, "or other bookies", id="metadata was written"),
        pytest.param(SEEN, None, 500, DAY_S, "none of its bookies says", id="nobody answers"),
        pytest.param(None, 9, 500, DAY_S, "no check has seen it idle", id="nobody looked yet"),
    ],
)
def test_what_speaks_against_closing(
    sighting: Sighting | None,
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


# --- On a cluster in memory ------------------------------------------------------------------------


@pytest.mark.compat(
    "G35", verdict="better", why="an operator closes it with one command, under the ledger's lock"
)
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@in_virtual_time
async def test_an_idle_ledger_is_closed_at_its_last_entry(state: LedgerState) -> None:
    cluster = await idle_ledger(state)

    done = await close(cluster)

    metadata = await cluster.metadata()
    assert done.closed is not None
    assert done.closed.metadata == metadata
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 9)
    assert await cluster.locked() == []
    await cluster.assert_whole()


@in_virtual_time
async def test_a_ledger_that_got_an_entry_lately_is_left_to_its_writer() -> None:
    cluster = await idle_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    fenced = watch_fencing(cluster)

    with pytest.raises(CloseRefusedError, match=r"it got an entry, .* locks a writer"):
        await close(cluster)

    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert fenced == []
    assert await cluster.locked() == []


@in_virtual_time
async def test_somebodys_word_is_enough() -> None:
    cluster = await idle_ledger()
    cluster.put(LEDGER, 10, B1, B2)

    await close(cluster, is_forced=True)

    assert (await cluster.metadata()).last_entry_id == 10


@pytest.mark.parametrize("is_forced", [False, True], ids=["unforced", "forced"])
@in_virtual_time
async def test_while_a_hold_stands_nothing_is_fenced(is_forced: bool) -> None:
    cluster = await idle_ledger()
    fenced = watch_fencing(cluster)
    hold = HoldOrder(since_ms=cluster.clock.wall_ms(), reason="3 of 7 went")
    await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)

    with pytest.raises(CloseRefusedError, match=r"a hold stands \(3 of 7 went\)"):
        await close(cluster, is_forced=is_forced)

    assert fenced == []
    assert await cluster.locked() == []
    shown = await (await closer(cluster)).look(LEDGER)
    assert shown.doubts == (), "that is none about its writer"
    assert "bookmender hold" in shown.held_back


@in_virtual_time
async def test_a_ledger_that_somebody_else_has_is_left_to_them() -> None:
    cluster = await idle_ledger()
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("other"), is_ephemeral=True)

    with pytest.raises(UnavailableError, match="other is at work on it"):
        await close(cluster, is_forced=True)

    assert await cluster.locked() == [path.rpartition("/")[2]]
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_closed_ledger_stays_as_it_is() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2))

    done = await close(cluster)

    assert done.closed is None
    assert done.doubts == ()
    assert (await cluster.manager.read(LEDGER)).version == before.version


@in_virtual_time
async def test_a_ledger_that_is_not_there_is_told() -> None:
    with pytest.raises(NoSuchLedgerError):
        await close(await Cluster.start(), is_forced=True)


@in_virtual_time
async def test_one_whose_end_cannot_be_proven_is_closed_only_where_that_is_accepted() -> None:
    """Entry 9 was on B1 and B2 alone."""
    cluster = await idle_ledger()
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)

    with pytest.raises(CloseRefusedError, match=r"cannot be proven.*--accept-loss --yes closes it"):
        await close(cluster, is_forced=True)
    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.closed is not None
    assert done.closed.metadata.last_entry_id == 8


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@in_virtual_time
async def test_a_bookie_that_was_found_to_have_lost_entries_is_not_believed(
    state: LedgerState,
) -> None:
    """Entry 9 was on B1, which is away, and on B2, which lost it: its cookie is what it was."""
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
async def test_where_nobody_takes_its_last_entries_it_is_said_what_is_lacking() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    ensemble = (B1, B2, B3)
    await cluster.write_ledger(ensemble, write_quorum=3, ack_quorum=3, state=LedgerState.OPEN)
    cluster.bookies.fail(B3, Op.ADD, Fault(error=FencedError))

    with pytest.raises(CloseRefusedError, match=r"on 3 bookies \(its ack quorum\).*; add a bookie"):
        await close(cluster, is_forced=True)

    assert not (await cluster.metadata()).is_closed


SLOW = ReplicationSettings(retry_min_s=3600, retry_max_s=3600)


async def told(cluster: Cluster) -> Reason | None:
    """Why it waits now."""
    note = await WaitingNotes(cluster.store, PATHS).read(LEDGER)
    return None if note is None else note.reason


@pytest.mark.parametrize("own", [False, True])
@in_virtual_time
async def test_once_it_is_closed_it_waits_for_nothing_that_was_in_the_way_before(own: bool) -> None:
    """One node remembers what it put aside, and the other what was noted of it."""
    cluster = await unproven_ledger(own=own)
    async with (
        cluster.node("node-1", settings=SLOW) as one,
        cluster.node("node-2", settings=SLOW) as two,
        working(one),
        working(two),
    ):
        await asyncio.sleep(100)
        assert await told(cluster) is Reason.END_UNPROVEN

        await close(cluster, is_forced=True, accepts_loss=True)
        assert await told(cluster) is None
        await asyncio.sleep(3)

        assert await told(cluster) is Reason.NO_COPY, "that of what was lost"


@in_virtual_time
async def test_a_ledger_that_was_not_marked_is_marked_where_java_does_not_look() -> None:
    cluster = await idle_ledger()

    await close(cluster)

    assert await cluster.marked(PATHS.private) == [LEDGER]
    assert await cluster.marked() == []


@in_virtual_time
async def test_that_the_tries_cannot_be_ordered_does_not_undo_the_closing() -> None:
    cluster = await unproven_ledger()
    shut_out(cluster.store, PATHS.mark(LEDGER), tries_znode(PATHS).path)

    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.closed is not None
    assert await cluster.locked() == []


@pytest.mark.parametrize(
    ("has_doubts", "is_forced", "next_step"),
    [
        pytest.param(False, False, "--yes closes it", id="nothing speaks against it"),
        pytest.param(
            True, False, "--force and --yes together close it all the same", id="something does"
        ),
        pytest.param(
            True,
            True,
            "with --yes beside --force it is closed all the same",
            id="it is forced, and not done",
        ),
    ],
)
@in_virtual_time
async def test_after_a_look_it_is_said_what_closes_it(
    has_doubts: bool, is_forced: bool, next_step: str
) -> None:
    cluster = await idle_ledger()
    if has_doubts:
        cluster.put(LEDGER, 10, B1, B2)

    found = await (await closer(cluster)).look(LEDGER)

    last_line = closing_text(found, is_forced=is_forced).splitlines()[-1]
    assert last_line == f"nothing was changed: {next_step}"


@in_virtual_time
async def test_where_the_end_may_not_be_provable_nobody_is_promised_that_it_is_closed() -> None:
    found = await (await closer(await idle_ledger())).look(LEDGER)

    last_line = closing_text(replace(found, end_doubt="wiped: B2"), is_forced=False).splitlines()[
        -1
    ]

    assert last_line == "nothing was changed: --yes closes it, if its end can be proven"


@in_virtual_time
async def test_a_look_changes_nothing() -> None:
    cluster = await idle_ledger()
    fenced = watch_fencing(cluster)

    found = await (await closer(cluster)).look(LEDGER)

    assert (found.last_entry_id, found.doubts, found.closed) == (9, (), None)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_ledger_that_its_writer_changes_after_the_last_look_is_not_closed() -> None:
    cluster = await idle_ledger()
    marking = cluster.manager.write

    async def write(*args: Any, **options: Any) -> VersionedMetadata:
        cluster.manager.write = marking  # type: ignore[method-assign]
        found = await cluster.manager.read(LEDGER)
        changed = Segment(first_entry_id=10, ensemble=(B1, B4, B3))
        await marking(LEDGER, found.metadata.with_segment(changed), read_as=found)
        return await marking(*args, **options)

    cluster.manager.write = write  # type: ignore[method-assign]

    with pytest.raises(CloseRefusedError, match="its writer may be alive"):
        await close(cluster)

    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_ledger_that_was_closed_with_too_few_copies_is_repaired_by_a_node() -> None:
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
