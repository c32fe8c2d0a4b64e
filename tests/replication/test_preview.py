"""Plans that are shown and not carried out."""

import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from ledgers.memory.bookies import NO_FAULT, Fault, Op, no_faults
from ledgers.memory.store import MemoryStore
from ledgers.metadata import BookieId, LedgerState
from ledgers.placement import (
    DEFAULT_RACK,
    PlacementPolicy,
    RackRule,
    RandomPlacement,
    RuledPlacement,
)
from ledgers.registration import Registration
from ledgers.store import Operation
from replication.cluster.cluster_view import ViewSource
from replication.cluster.order_book import OrderBook, hold_place
from replication.cluster.orders import HoldOrder
from replication.planning.preview import Preview, Previewer
from replication.planning.survey import Surveyor
from replication.planning.targets import Receivers
from replication.reasons import Reason
from tests.replication.cluster import DIGEST, ENTRY_BYTES, Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, ROOT, UR
from tests.replication.repairs import drain, keep_away, repair

WRITES = (Op.ADD, Op.WRITE_LAC, Op.READ_FENCING)


@asynccontextmanager
async def touching_nothing(cluster: Cluster) -> AsyncIterator[None]:
    """Neither ZooKeeper nor any bookie is written to, and nothing is fenced."""
    touched: list[object] = []

    def note_request(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        if op in WRITES:
            touched.append(op)
        return NO_FAULT

    def note_write(store: MemoryStore, operations: Sequence[Operation]) -> None:
        touched.extend(operations)

    cluster.bookies.faults, cluster.tree.faults = note_request, note_write
    yield
    assert touched == []
    cluster.bookies.faults, cluster.tree.faults = no_faults, None


async def preview(
    cluster: Cluster,
    *,
    local: BookieId | None = None,
    racks: Mapping[BookieId, str] | None = None,
    moves_misplaced: bool = False,
    distrusted: Collection[BookieId] = (),
) -> Preview:
    rng = random.Random(cluster.seed)
    views = ViewSource(
        Registration(cluster.store, ROOT), cluster.clock, OrderBook(cluster.store, UR)
    )
    surveyor = Surveyor(
        manager=cluster.manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=rng,
        fallback_digest=DIGEST,
    )
    placement: PlacementPolicy = RandomPlacement(rng, local=local)
    if racks is not None:
        placement = RuledPlacement(RackRule(), rng, locate=racks.get)
    receivers = Receivers(
        placement,
        clock=cluster.clock,
        local=local,
        rack=lambda bookie: (racks or {}).get(bookie, DEFAULT_RACK),
    )
    view = await views.refresh()
    previewer = Previewer(surveyor, receivers, view, moves_misplaced=moves_misplaced)
    async with touching_nothing(cluster):
        return await previewer.preview(LEDGER, distrusted=distrusted)


@in_virtual_time
async def test_it_says_what_the_repair_then_does() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    found = await preview(cluster, local=B5)
    outcome = await repair(cluster, local=B5)

    [step] = found.repairs
    assert (step.replaced, step.target, step.index) == (B2, B5, 1)
    assert (found.entry_count, found.byte_count) == (7, 7 * ENTRY_BYTES)
    assert (outcome.entry_count, outcome.entry_bytes) == (found.entry_count, found.byte_count)
    assert await cluster.ensembles() == [(B1, B5, B3)]


@in_virtual_time
async def test_a_whole_ledger_needs_nothing_and_one_that_is_gone_neither() -> None:
    cluster = await Cluster.start()
    assert (await preview(cluster)).is_gone

    await cluster.write_ledger((B1, B2, B3))

    found = await preview(cluster)
    assert found.plan.is_whole
    assert not found.is_gone


@in_virtual_time
async def test_a_bookie_that_a_check_found_bad_is_asked_for_what_lies_between_the_ends() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(B2).lose(LEDGER, 4)

    assert (await preview(cluster)).plan.is_whole
    [step] = (await preview(cluster, distrusted=(B2,))).repairs
    assert (step.target, tuple(step.entry_ids)) == (B2, (4,))


@in_virtual_time
async def test_an_open_ledger_that_misses_a_bookie_is_told_to_be_closed_first() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.OPEN)
    await cluster.kill(B2)

    found = await preview(cluster)

    [blocked] = found.plan.blocked
    assert blocked.reason is Reason.OPEN_LEDGER_GRACE
    assert B2 in blocked.detail


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize(
    ("wiped", "away", "doubt"),
    [
        pytest.param((B1,), (), "", id="those that are left suffice"),
        pytest.param(
            (B1, B3),
            (),
            f"set up after the ledger was made, so that their 'no' is not believed: {B1}, {B3}",
            id="too many were wiped",
        ),
        pytest.param(
            (B1,),
            (B2,),
            f"away: {B2}; set up after the ledger was made, so that their 'no' is not believed: {B1}",
            id="one was wiped, and one is away",
        ),
    ],
)
@in_virtual_time
async def test_it_says_where_an_end_may_not_be_provable(
    wiped: Sequence[BookieId], away: Sequence[BookieId], doubt: str, state: LedgerState
) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=-1, write_quorum=3, ack_quorum=2, state=state)
    for entry_id in range(3):
        cluster.put(LEDGER, entry_id, B1, B2, B3, lac=-1)
    for bookie in wiped:
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
    await cluster.kill(*away)

    details = [blocked.detail for blocked in (await preview(cluster)).plan.blocked]

    told = [detail.partition("; its end may not be provable: ")[2] for detail in details]
    assert told == [doubt]


@in_virtual_time
async def test_while_a_hold_stands_an_open_ledger_is_told_to_wait_for_its_end() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B2)
    hold = HoldOrder(since_ms=1, reason="3 of 5 went")
    await OrderBook(cluster.store, UR).give(hold_place(UR), hold, over=None)

    [blocked] = (await preview(cluster)).plan.blocked

    assert blocked.reason is Reason.HOLD


@in_virtual_time
async def test_what_is_closed_of_an_open_ledger_is_told_to_be_repaired_at_once() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), (B2, B3), starts=(0, 5), state=LedgerState.OPEN)
    await cluster.kill(B2)

    found = await preview(cluster, local=B5)

    assert [(r.replaced, r.target) for r in found.repairs] == [(B2, B5)]
    assert [blocked.reason for blocked in found.plan.blocked] == [Reason.OPEN_LEDGER_GRACE]


@in_virtual_time
async def test_what_is_in_the_way_stands_beside_what_can_be_done() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    until_ms = await keep_away(cluster, B1)
    await cluster.kill(B1)
    await drain(cluster, B3)

    found = await preview(cluster, local=B4)

    assert [(r.replaced, r.target) for r in found.repairs] == [(B3, B4)]
    assert [(b.reason, b.until_ms) for b in found.plan.blocked] == [(Reason.MAINTENANCE, until_ms)]


@in_virtual_time
async def test_metadata_that_cannot_be_read_is_in_the_way() -> None:
    cluster = await Cluster.start()
    written = await cluster.write_ledger((B1, B2, B3))
    await cluster.store.set(cluster.manager.path(LEDGER), b"nonsense", version=written.version)

    found = await preview(cluster)

    assert [b.reason for b in found.plan.blocked] == [Reason.CORRUPT_METADATA]


@in_virtual_time
async def test_metadata_that_acls_shut_away_is_in_the_way_of_that_ledger_alone() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    shut_out(cluster.store, cluster.manager.path(LEDGER))

    found = await preview(cluster)

    [blocked] = found.plan.blocked
    assert (blocked.reason, blocked.detail) == (
        Reason.SHUT_AWAY,
        "its metadata cannot be read: the ACL shuts us out",
    )


@in_virtual_time
async def test_what_is_to_be_moved_is_shown_where_that_is_wanted() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    racks = {B1: "/a", B2: "/a", B3: "/b"}

    unwanted = await preview(cluster, racks=racks)
    wanted = await preview(cluster, racks=racks, moves_misplaced=True)

    assert unwanted.plan.is_whole
    [step] = wanted.repairs
    assert step.target == B3
