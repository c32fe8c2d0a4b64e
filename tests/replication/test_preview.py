"""Plans that are shown and not executed."""

import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from ledgers.model import BookieId, LedgerState
from ledgers.placement import DEFAULT_RACK, PlacementPolicy, RackRule, RandomPlacement
from ledgers.registration import Registration
from ledgers.store import Operation
from replication.by_hand import Preview, Previewer
from replication.cluster import ViewSource
from replication.inspection import Inspector
from replication.orders import HoldOrder, OrderStore, hold_znode
from replication.reasons import Reason
from replication.targets import TargetSelector
from tests.memory.bookies import NO_FAULT, Fault, Op, no_faults
from tests.memory.store import MemoryStore
from tests.replication.cluster import DIGEST, ENTRY_BYTES, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, PATHS, ROOT
from tests.replication.repairs import drain, order_maintenance, repair, repair_late

WRITES = (Op.ADD, Op.READ_FENCING)


@asynccontextmanager
async def touching_nothing(cluster: Cluster) -> AsyncIterator[None]:
    """Assert that the block writes to neither ZooKeeper nor a bookie, and fences nothing."""
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
    suspects: Collection[BookieId] = (),
) -> Preview:
    rng = random.Random(cluster.seed)
    views = ViewSource(
        Registration(cluster.store, ROOT), cluster.clock, OrderStore(cluster.store, PATHS)
    )
    inspector = Inspector(
        manager=cluster.manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=rng,
        fallback_digest=DIGEST,
    )
    placement: PlacementPolicy = RandomPlacement(rng, local=local)
    if racks is not None:
        placement = PlacementPolicy(RackRule(), rng, locate=racks.get)
    target_selector = TargetSelector(
        placement,
        clock=cluster.clock,
        local=local,
        rack=lambda bookie: (racks or {}).get(bookie, DEFAULT_RACK),
    )
    view = await views.refresh()
    previewer = Previewer(inspector, target_selector, view, moves_misplaced=moves_misplaced)
    async with touching_nothing(cluster):
        return await previewer.preview(LEDGER, suspects=suspects)


async def test_it_predicts_what_the_repair_then_does(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    found = await preview(cluster, local=B5)
    outcome = await repair(cluster, local=B5)

    [step] = found.repairs
    assert (step.replaced, step.target, step.index) == (B2, B5, 1)
    assert (found.entry_count, found.byte_count) == (7, 7 * ENTRY_BYTES)
    assert (outcome.entry_count, outcome.entry_bytes) == (found.entry_count, found.byte_count)
    assert await cluster.ensembles() == [(B1, B5, B3)]


async def test_a_whole_or_deleted_ledger_needs_nothing(cluster: Cluster) -> None:
    assert (await preview(cluster)).is_gone

    await cluster.write_ledger((B1, B2, B3))

    found = await preview(cluster)
    assert found.plan.is_whole
    assert not found.is_gone


async def test_a_bookie_with_a_finding_is_asked_for_every_entry(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(B2).lose(LEDGER, 4)

    assert (await preview(cluster)).plan.is_whole
    [step] = (await preview(cluster, suspects=(B2,))).repairs
    assert (step.target, tuple(step.entry_ids)) == (B2, (4,))


@pytest.mark.parametrize(
    ("state", "is_in_recovery"), [(LedgerState.OPEN, False), (LedgerState.IN_RECOVERY, True)]
)
async def test_an_open_ledger_that_lacks_a_bookie_is_closed_first(
    cluster: Cluster, state: LedgerState, is_in_recovery: bool
) -> None:
    await cluster.write_ledger((B1, B2, B3), state=state)
    await cluster.kill(B2)

    found = await preview(cluster)

    [blocked] = found.plan.blocked
    assert blocked.reason is Reason.OPEN_LEDGER_GRACE
    assert blocked.facts.absent == (B2,)
    assert blocked.facts.is_in_recovery is is_in_recovery


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize(
    ("wiped", "away", "is_doubtful"),
    [
        pytest.param((B1,), (), False, id="those that are left suffice"),
        pytest.param((B1, B3), (), True, id="too many were reformatted"),
        pytest.param((B1,), (B2,), True, id="one was reformatted, and one is absent"),
    ],
)
async def test_it_tells_where_the_end_may_not_be_provable(
    cluster: Cluster,
    wiped: tuple[BookieId, ...],
    away: tuple[BookieId, ...],
    is_doubtful: bool,
    state: LedgerState,
) -> None:
    await cluster.write_ledger((B1, B2, B3), last=-1, write_quorum=3, ack_quorum=2, state=state)
    for entry_id in range(3):
        cluster.put(LEDGER, entry_id, B1, B2, B3, lac=-1)
    for bookie in wiped:
        await cluster.reformat(bookie)
    await cluster.kill(*away)

    (blocked,) = (await preview(cluster)).plan.blocked

    assert blocked.facts.is_end_doubtful is is_doubtful
    assert blocked.facts.reformatted == (wiped if is_doubtful else ())
    assert blocked.facts.absent == away


async def test_during_a_hold_an_open_ledger_waits(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B2)
    hold = HoldOrder(since_ms=1, reason="3 of 5 went")
    await OrderStore(cluster.store, PATHS).give(hold_znode(PATHS), hold, over=None)

    [blocked] = (await preview(cluster)).plan.blocked

    assert blocked.reason is Reason.HOLD


async def test_closed_fragments_of_an_open_ledger_are_repaired_at_once(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), (B2, B3), starts=(0, 5), state=LedgerState.OPEN)
    await cluster.kill(B2)

    found = await preview(cluster, local=B5)

    assert [(r.replaced, r.target) for r in found.repairs] == [(B2, B5)]
    assert [blocked.reason for blocked in found.plan.blocked] == [Reason.OPEN_LEDGER_GRACE]


async def test_obstacles_are_shown_beside_the_possible_repairs(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    until_ms = await order_maintenance(cluster, B1)
    await cluster.kill(B1)
    await drain(cluster, B3)

    found = await preview(cluster, local=B4)

    assert [(r.replaced, r.target) for r in found.repairs] == [(B3, B4)]
    assert [(b.reason, b.until_ms) for b in found.plan.blocked] == [(Reason.MAINTENANCE, until_ms)]


async def test_moves_are_shown_where_they_are_wanted(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    racks = {B1: "/a", B2: "/a", B3: "/b"}

    unwanted = await preview(cluster, racks=racks)
    wanted = await preview(cluster, racks=racks, moves_misplaced=True)

    assert unwanted.plan.is_whole
    [step] = wanted.repairs
    assert step.target == B3


async def test_copies_are_planned_even_if_no_bookie_may_have_their_entries() -> None:
    """Which entries can be copied is known only after trying."""
    cluster = await Cluster.start(B1, B2, B3, B4, B5)
    await cluster.write_ledger((B1, B2, B3), last=29)
    await cluster.kill(B2, B3)

    found = await preview(cluster)
    outcome = await repair_late(cluster)

    assert {step.replaced: len(step.entry_ids) for step in found.repairs} == {B2: 20, B3: 20}
    assert found.plan.blocked == ()
    assert outcome.reason is Reason.NO_COPY
