"""Deferred ledgers: which nodes try them again, and when."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from ledgers.errors import FencedError
from ledgers.model import BookieId, LedgerState
from ledgers.registration import BookieView
from ledgers.store import Delete
from replication import znodes
from replication.cluster import ClusterView
from replication.ledger_record import WaitingNote
from replication.open_ledgers import WriterSighting, is_overtaken
from replication.orders import DrainOrder, Orders, drain_znode
from replication.reasons import Blocked, Exclusion, Facts, Reason
from replication.repair import DONE, Outcome, waiting
from replication.settings import ReplicationSettings
from replication.work_queue import LedgerLease
from replication.znodes import Mark
from tests.memory.bookies import Fault as BookieFault
from tests.memory.bookies import Op
from tests.memory.store import Fault
from tests.replication.cluster import (
    Cluster,
    fault_once,
    lease_attempts,
    queue_empty,
    until,
    with_lost_b2,
)
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES, registered
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import THREE, drain, open_ledger, order_maintenance, watch_fencing
from tests.replication.test_open_ledgers import SEGMENT
from tests.replication.workers import lockers, noted, start_nodes, without_target

PATIENT = ReplicationSettings(retry_min_s=10, retry_max_s=40, idle_wait_s=0.5)


@pytest.mark.parametrize("node_count", [1, 3])
async def test_many_nodes_do_not_try_more_often_than_one(node_count: int) -> None:
    cluster = await without_target(LEDGER)
    times_s = lease_attempts(cluster)

    async with AsyncExitStack() as stack:
        await start_nodes(stack, cluster, node_count, PATIENT)
        await asyncio.sleep(200)

    waits_s = [after - before for before, after in pairwise(times_s)]
    assert len(waits_s) >= 5
    for wait_s, nominal_s in zip(waits_s, [10, 20, 40, 40, 40], strict=False):
        assert wait_s >= 0.8 * nominal_s


async def test_the_tries_of_a_dead_node_are_counted_on() -> None:
    cluster = await without_target(LEDGER)
    async with cluster.node(settings=PATIENT) as node, working(node):
        await asyncio.sleep(35)
    before = await node_note(cluster)

    async with cluster.node("node-2", settings=PATIENT) as node, working(node):
        await asyncio.sleep(45)

    after = await node_note(cluster)
    assert before.tries in (2, 3)
    assert after.tries > before.tries
    assert after.since_ms == before.since_ms


async def node_note(cluster: Cluster) -> WaitingNote:
    async with cluster.node("reader") as node:
        return await noted(node)


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldRetryUntilThereAreEnoughBksAvailableForReplication",
    "TestReplicationWorker.testBookiesNotAvailableScenarioForReplicationWorker",
    "G13",
    verdict="better",
)
async def test_a_new_bookie_causes_one_try_for_all_nodes() -> None:
    cluster = await without_target(*range(20))

    async with AsyncExitStack() as stack:
        await start_nodes(stack, cluster, 3, ReplicationSettings(retry_min_s=600, retry_max_s=600))
        await asyncio.sleep(100)
        asked = lockers(cluster)
        await cluster.register(B4)
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 1
    assert {len(stores) for stores in asked.values()} == {1}


@pytest.mark.parametrize("is_same_node", [True, False])
async def test_a_further_lost_bookie_is_replaced_during_maintenance(
    cluster: Cluster, is_same_node: bool
) -> None:
    """The mark exists until the window ends, and the leader only extends it."""
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    await order_maintenance(cluster, B1, for_s=36_000)
    await cluster.kill(B1, B2)
    await cluster.mark(B2)
    async with AsyncExitStack() as stack:
        await start_nodes(stack, cluster, 1, PATIENT)
        await asyncio.sleep(20)
        assert B2 not in (await cluster.metadata()).bookies
        if not is_same_node:
            await stack.aclose()
            await start_nodes(stack, cluster, 1, PATIENT)

        await cluster.kill(B3)
        await cluster.mark(B2, B3)
        await asyncio.sleep(5)

    ((first, *others),) = await cluster.ensembles()
    assert first == B1
    assert B3 not in others


async def test_a_ledger_left_to_other_nodes_is_repaired_at_once() -> None:
    cluster = await with_lost_b2(4)
    settings = ReplicationSettings(target="local", idle_wait_s=0.5)

    async with (
        cluster.node("member", local=B1, settings=settings) as one,
        cluster.node("other", local=B4, settings=settings) as two,
        working(one),
        working(two),
    ):
        took_s = await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(1)
        assert await one.notes.ledger_ids() == set()

    assert took_s < 5
    await cluster.assert_whole(*range(4))


async def test_a_wait_with_a_known_end_ends_then() -> None:
    cluster = await with_lost_b2(1)
    until_ms = cluster.clock.wall_ms() + 100_000

    async with cluster.node(settings=PATIENT) as node:
        repair, times_s = node.repairer.repair, []

        async def wait_for_window(
            lease: LedgerLease, sighting: WriterSighting | None = None, **_: object
        ) -> Outcome:
            times_s.append(cluster.clock.wall_ms())
            if cluster.clock.wall_ms() < until_ms:
                return waiting(
                    Blocked(
                        reason=Reason.MAINTENANCE,
                        facts=Facts(errors=("until then",)),
                        until_ms=until_ms,
                    )
                )
            return await repair(lease, sighting)

        node.repairer.repair = wait_for_window  # type: ignore[method-assign]
        async with working(node):
            await asyncio.sleep(130)

    assert len(times_s) == 2
    assert until_ms <= times_s[1] <= until_ms + 11_000
    await cluster.assert_whole(0)


# --- A later mark ---------------------------------------------------------------------------------

SLOW = ReplicationSettings(retry_min_s=600, retry_max_s=600, idle_wait_s=0.5)


async def unmark(cluster: Cluster) -> None:
    """Delete the mark as Java's worker does, which does not know our notes."""
    mark = PATHS.mark(LEDGER)
    await cluster.store.delete(mark)
    await cluster.store.delete(mark.rpartition("/")[0])


async def test_the_note_of_a_deleted_mark_does_not_delay_the_next_one() -> None:
    cluster = await without_target(LEDGER)

    async with cluster.node(settings=SLOW) as node, working(node):
        await asyncio.sleep(5)
        before = await node_note(cluster)
        await unmark(cluster)
        await asyncio.sleep(5)
        times_s = lease_attempts(cluster)
        await cluster.mark(B2)
        await asyncio.sleep(5)
        after = await node_note(cluster)

    assert len(times_s) == 1
    assert (after.reason, after.tries) == (before.reason, 1)
    assert after.since_ms > before.since_ms


async def test_an_old_note_does_not_delay_it_on_another_node() -> None:
    """It leaves no note behind."""
    cluster = await without_target(LEDGER)
    async with cluster.node(settings=SLOW) as node, working(node):
        await asyncio.sleep(5)
    await unmark(cluster)
    await cluster.mark(B2)
    noted = []

    async with cluster.node("node-2", settings=SLOW) as node:

        async def look(lease: LedgerLease, *_: object, **__: object) -> Outcome:
            noted.append(await node.notes.read(LEDGER))
            await node.queue.complete(lease)
            return DONE

        node.repairer.repair = look  # type: ignore[method-assign]
        async with working(node):
            assert await until(cluster, lambda: queue_empty(cluster)) < 5
        assert noted == [None], "a reader during the repair is not told of the last mark"


@pytest.mark.parametrize("fault", Fault)
async def test_an_outdated_note_that_cannot_be_deleted_ends_no_session(fault: Fault) -> None:
    cluster = await without_target(LEDGER)
    async with cluster.node(settings=SLOW) as node, working(node):
        await asyncio.sleep(5)
    await unmark(cluster)
    await cluster.register(B4)
    await cluster.mark(B2)

    async with cluster.node("node-2", settings=PATIENT) as node, working(node):
        fault_once(cluster, node.store, Delete, fault, path=PATHS.waiting_note(LEDGER))
        await until(cluster, lambda: queue_empty(cluster))
        assert cluster.tree.faults is None
    await cluster.assert_whole()


@pytest.mark.parametrize("is_same_node", [True, False])
async def test_a_mark_extended_by_the_leader_keeps_waiting(is_same_node: bool) -> None:
    cluster = await without_target(LEDGER)
    async with AsyncExitStack() as stack:
        await start_nodes(stack, cluster, 1, SLOW)
        await asyncio.sleep(5)
        if not is_same_node:
            await stack.aclose()
            await start_nodes(stack, cluster, 1, SLOW)
        times_s = lease_attempts(cluster)
        await cluster.mark(B2, B3)
        await asyncio.sleep(5)

        assert times_s == []


async def test_a_ledger_in_both_queues_waits_with_the_older_mark() -> None:
    cluster = await without_target(LEDGER)
    async with cluster.node(settings=SLOW) as node, working(node):
        await asyncio.sleep(5)
    private = PATHS.private.mark(LEDGER)
    await cluster.store.create(private, znodes.mark_to_bytes(Mark()), with_parents=True)

    async with cluster.node("node-2", settings=SLOW) as node, working(node):
        times_s = lease_attempts(cluster)
        await asyncio.sleep(5)

    assert times_s == []


@pytest.mark.parametrize("is_same_node", [True, False])
async def test_a_loss_does_not_wait_for_an_obstacle_to_a_move(is_same_node: bool) -> None:
    """Marked for a move in our private queue, it waited; the shared mark is new."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    private = PATHS.private.mark(LEDGER)
    await cluster.store.create(private, znodes.mark_to_bytes(Mark()), with_parents=True)
    one_rack = dict.fromkeys(BOOKIES, "/r1")

    async with AsyncExitStack() as stack:
        await start_movers(stack, cluster, one_rack)
        await asyncio.sleep(5)
        assert (await node_note(cluster)).reason is Reason.MISPLACED
        if not is_same_node:
            await stack.aclose()
            await start_movers(stack, cluster, one_rack)
        await cluster.kill(B3)
        await cluster.mark(B3)

        assert await until(cluster, lambda: queue_empty(cluster)) < 5
    assert B3 not in (await cluster.metadata()).bookies


async def start_movers(
    stack: AsyncExitStack, cluster: Cluster, racks: Mapping[BookieId, str]
) -> None:
    """Start a node that moves misplaced copies."""
    node = await stack.enter_async_context(
        cluster.node(settings=SLOW, racks=racks, moves_misplaced=True)
    )
    await stack.enter_async_context(working(node))


async def test_an_entry_without_copy_is_the_first_reason_of_several() -> None:
    """The ledger is tried as often as for reasons that time may remove."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B2, B3)
    await cluster.kill(B2, B3)
    times_s = lease_attempts(cluster)

    async with cluster.node(settings=PATIENT) as node, working(node):
        await asyncio.sleep(100)
    note = await node_note(cluster)

    assert note.reason is Reason.NO_COPY
    assert note.blocked.facts == Facts(entry_ids=(1, 4, 7), entry_count=3, absent=(B2, B3))
    assert [each.facts.replaced for each in note.blocked.besides] == [B2, B3]
    assert len(times_s) >= 4


SETTINGS = ReplicationSettings()


async def unprovable_ledger() -> Cluster:
    """Return a ledger of which one bookie is lost for ever and one returned reformatted."""
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    await cluster.reformat(B2)
    await cluster.kill(B1)
    return cluster


async def notes_over(node: Node, span_s: int) -> list[WaitingNote]:
    """Return the notes at the end of each second."""
    found = []
    for _ in range(span_s):
        await asyncio.sleep(1)
        found.append(await noted(node))
    return found


async def is_told(node: Node, reason: Reason) -> bool:
    note = await node.notes.read(LEDGER)
    return note is not None and note.reason is reason


# --- An end that cannot be proven -----------------------------------------------------------------


async def test_an_unprovable_end_stays_noted_while_it_is_tried_again() -> None:
    cluster = await unprovable_ledger()

    async with cluster.node() as node, working(node):
        before = await notes_over(node, int(SETTINGS.open_ledger_grace_s) - 1)
        await asyncio.sleep(2)
        after = await notes_over(node, 400)

    assert {note.reason for note in before} == {Reason.OPEN_LEDGER_GRACE}
    assert {note.reason for note in after} == {Reason.END_UNPROVEN}
    assert len({note.since_ms for note in after}) == 1
    assert after[-1].tries > after[0].tries, "it is tried nonetheless"
    assert after[0].blocked.facts.unresponsive == (B1,)
    assert after[0].blocked.facts.needed == ()


async def test_the_note_names_bookies_without_which_it_cannot_close() -> None:
    """B2 returned empty, B1 is absent, B3 hangs: the last entries are unknown."""
    cluster = await unprovable_ledger()
    cluster.bookie(B3).is_down = True

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 60)
        note = await noted(node)

    assert note.reason is Reason.END_UNPROVEN
    assert note.blocked.facts.needed == (B1, B3)


async def test_once_its_bookies_are_back_the_ledger_is_closed() -> None:
    cluster = await unprovable_ledger()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        assert (await noted(node)).reason is Reason.END_UNPROVEN
        await cluster.revive(B1)
        await until(cluster, lambda: queue_empty(cluster))

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 10)


async def test_too_many_lost_bookies_are_noted_until_one_returns() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        told = await notes_over(node, 400)
        await cluster.revive(B3)
        async with asyncio.timeout(SETTINGS.open_ledger_grace_s + 5):
            await until(cluster, lambda: queue_empty(cluster))

    assert {note.reason for note in told} == {Reason.NO_COVERAGE}
    assert told[-1].blocked.facts.absent == (B2, B3)
    assert (await cluster.metadata()).last_entry_id == 9


async def open_ledger_without_spare(*, is_away: bool) -> Cluster:
    """Return a ledger whose entries must be on all three bookies. One is absent or refuses adds,
    and there is no fourth."""
    cluster = await Cluster.start(*THREE)
    await cluster.write_ledger(THREE, write_quorum=3, ack_quorum=3, state=LedgerState.OPEN)
    await cluster.mark(B3)
    if is_away:
        await cluster.kill(B3)
    else:
        await drain(cluster, B3, may_fence=True)
        cluster.bookies.fail(B3, Op.ADD, BookieFault(error=FencedError))
    return cluster


@pytest.mark.parametrize(
    ("is_away", "excluded", "absent"),
    [
        pytest.param(True, ((Exclusion.MEMBER, 2),), (B3,), id="one is absent"),
        pytest.param(False, ((Exclusion.MEMBER, 2), (Exclusion.DRAINING, 1)), (), id="one refuses"),
    ],
)
async def test_missing_targets_are_noted_until_one_appears(
    is_away: bool, excluded: tuple[tuple[Exclusion, int], ...], absent: tuple[BookieId, ...]
) -> None:
    """The note names the rule."""
    cluster = await open_ledger_without_spare(is_away=is_away)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        told = await notes_over(node, 400)
        cluster.bookie(B4).start()
        await cluster.register(B4)
        async with asyncio.timeout(SETTINGS.open_ledger_grace_s + 5):
            await until(cluster, lambda: queue_empty(cluster))

    assert {note.reason for note in told} == {Reason.NO_TARGET}
    assert told[-1].tries > 1, "it is tried nonetheless"
    facts = told[-1].blocked.facts
    assert f"{B3}: " in facts.errors[0]
    assert (facts.ack_quorum, facts.excluded, facts.absent) == (3, excluded, absent)
    assert (await cluster.metadata()).last_entry_id == 9


async def test_the_end_of_the_grace_is_noted_and_binds_no_node() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)

    async with cluster.node() as node, working(node):
        began_ms = cluster.clock.wall_ms()
        await asyncio.sleep(5)
        note = await noted(node)

    assert note.reason is Reason.OPEN_LEDGER_GRACE
    grace_ms = int(SETTINGS.open_ledger_grace_s * 1000)
    assert 0 <= note.grace_until_ms - began_ms - grace_ms < 1_000
    assert note.fingerprint is not None
    assert note.wait_ms(now_ms=began_ms, fingerprint=note.fingerprint) == 0, "should its node die"


# --- Orders that change meanwhile -----------------------------------------------------------------


async def test_a_cancelled_drain_ends_the_wait_of_its_ledgers() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        assert (await noted(node)).blocked.facts.draining == (B2,)
        await cluster.store.delete(drain_znode(PATHS, B2).path)
        took_s = await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(1)

        assert await node.notes.ledger_ids() == set()

    assert took_s < 2
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


async def test_an_absent_bookie_besides_the_drain_starts_its_own_grace() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)
    await cluster.kill(B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        await cluster.store.delete(drain_znode(PATHS, B2).path)
        await asyncio.sleep(SETTINGS.open_ledger_grace_s - 2)

        assert B2 not in (await noted(node)).blocked.facts.draining
        assert fenced == []
        await until(cluster, lambda: queue_empty(cluster))

    assert (await cluster.metadata()).is_closed


DRAINING = WriterSighting(segment=SEGMENT, last_entries={}, draining=(B1, B2))
ABSENT = WriterSighting(segment=SEGMENT, last_entries={B1: 3, B2: 3})
LACKING = WriterSighting(segment=SEGMENT, last_entries={B1: 3}, lacking=(B1,), first_lacking=4)
FENCING = DrainOrder(since_ms=1, may_fence=True)


@pytest.mark.parametrize(
    ("sighting", "orders", "there", "is_over"),
    [
        pytest.param(DRAINING, {B1: FENCING, B2: FENCING}, [B1, B2], False, id="as it was"),
        pytest.param(DRAINING, {B1: FENCING}, [B1, B2], True, id="one is no longer draining"),
        pytest.param(
            DRAINING,
            {B1: FENCING, B2: DrainOrder(since_ms=1)},
            [B1, B2],
            True,
            id="nothing is to be fenced for it any more",
        ),
        pytest.param(ABSENT, {}, [B3], False, id="no order was its reason, and they are absent"),
        pytest.param(ABSENT, {}, [B1, B3], False, id="one of them is back"),
        pytest.param(ABSENT, {}, [B1, B2, B3], True, id="both are back"),
        pytest.param(LACKING, {}, [B1, B2], False, id="it was there all along, and lacks entries"),
    ],
)
def test_a_grace_ends_with_its_reason(
    sighting: WriterSighting,
    orders: dict[BookieId, DrainOrder],
    there: list[BookieId],
    is_over: bool,
) -> None:
    view = ClusterView(
        bookies=BookieView(writable=registered(there)), orders=Orders(draining=orders)
    )

    assert is_overtaken(sighting, view) is is_over


async def test_once_its_bookies_are_back_a_ledger_waits_no_longer() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: is_told(node, Reason.NO_COVERAGE))
        await asyncio.sleep(2 * SETTINGS.retry_min_s)
        assert (await noted(node)).grace_until_ms, "its next grace has begun"
        await cluster.revive(B2)
        await cluster.revive(B3)
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 2
    assert (await cluster.metadata()).is_closed


async def test_the_grace_continues_if_only_one_bookie_is_back() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s - 10)
        await cluster.revive(B3)
        await asyncio.sleep(8)
        assert fenced == []
        await asyncio.sleep(4)

    assert fenced
